"""Schedules of a cluster that are added at run time: how they begin, and why one is refused."""

from random import Random

import msgspec

from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import (
    IN_USE,
    INVALID_SCHEDULE,
    READ_ONLY,
    TOO_MANY,
    UNKNOWN_SCHEDULE,
)
from musterd.supervisor.cluster.engine import SCHEDULES_MAX, AddedSchedule
from musterd.supervisor.cluster.scheduler import Memory
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.runs import plan_name
from musterd.supervisor.core.model.shared import card_of
from musterd.supervisor.core.model.timing import Every

SECTION_BYTES_MAX = 64 * 1024
PLAN_BYTES_MAX = 2 * SECTION_BYTES_MAX
SECTIONS_BYTES_MAX = 32 * 1024 * 1024  # of all schedules
NAME_CHARS_MAX = 32
FIRST_TURN_MAX = 8999  # of four digits, which the id of a run has room for; it grows later
_WHY = {
    READ_ONLY: "is of the policy that is applied to the cluster, and is changed only there: change "
    "the file, then use `musterctl cluster apply FILE`",
    IN_USE: "is there already: replace it (--replace), or give another name",
    INVALID_SCHEDULE: f"takes over {SECTION_BYTES_MAX // 1024} KiB: shorten its arguments",
    TOO_MANY: f"would be one too many: there are {SCHEDULES_MAX} schedules at most, of "
    f"{SECTIONS_BYTES_MAX // 1024 // 1024} MiB together: delete some",
    UNKNOWN_SCHEDULE: "there is none of this name in the cluster",
}
_encode = msgspec.msgpack.Encoder().encode


def refusal(name: str, code: str) -> Rejection:
    return Rejection(name, code, f"schedule '{name}': {_WHY[code]}")


def added(
    policies: list[tuple[SchedulePolicy, bytes]],
    rng: Random,
    paused: frozenset[str] = frozenset(),
) -> list[AddedSchedule]:
    """Return schedules as they are put, each with its section.

    Those that come together are spread over their interval: all at once would be too much for their
    sites and for the workers, again and again. Runs of a schedule that had the name before have
    other ids.
    """
    made = []
    for place, (policy, section) in enumerate(policies):
        every_ns = policy.timing.every_ns if isinstance(policy.timing, Every) else 0
        memory = _encode(Memory(plan_name(policy), rng.randint(1, FIRST_TURN_MAX)))
        ago_ns = every_ns * place // len(policies)
        made.append(AddedSchedule(card_of(policy), section, ago_ns, memory, policy.name in paused))
    return made
