"""Schedules as they are put into a cluster at run time, for all that put them."""

from random import Random

import msgspec

from musterd.supervisor.cluster.adding import AddedSchedule
from musterd.supervisor.cluster.scheduler import Memory
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.runs import plan_name
from musterd.supervisor.core.model.shared import card_of
from musterd.supervisor.core.model.timing import Every

FIRST_TURN_MAX = 8999  # of four digits, which the id of a run has room for; it grows later

_encode = msgspec.msgpack.Encoder().encode


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
