"""What an engine does about schedules that are added at run time, and why it refuses one."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import (
    IN_USE,
    INVALID_SCHEDULE,
    READ_ONLY,
    SECTION_BYTES_MAX,
    TOO_MANY,
    UNKNOWN_SCHEDULE,
)
from musterd.supervisor.core.model.policy import SCHEDULES_MAX
from musterd.supervisor.core.model.shared import ScheduleCard

PLAN_BYTES_MAX = 2 * SECTION_BYTES_MAX
SECTIONS_BYTES_MAX = 32 * 1024 * 1024  # of all schedules
_WHY = {
    READ_ONLY: "is of the policy that is applied to the cluster, and is changed only there: change "
    "the file, then use `musterctl cluster apply FILE`",
    IN_USE: "is there already: edit it, replace it (import --replace), or give another name",
    INVALID_SCHEDULE: f"takes over {SECTION_BYTES_MAX // 1024} KiB: shorten its arguments",
    TOO_MANY: f"would be one too many: there are {SCHEDULES_MAX} schedules at most, of "
    f"{SECTIONS_BYTES_MAX // 1024 // 1024} MiB together: delete some",
    UNKNOWN_SCHEDULE: "there is none of this name in the cluster",
}


def refusal(name: str, code: str) -> Rejection:
    return Rejection(name, code, f"schedule '{name}': {_WHY[code]}")


class AddedSchedule(Struct, frozen=True):
    """A schedule that is added at run time."""

    card: ScheduleCard
    section: bytes = b""
    ago_ns: int = 0  # it begins as if that had been so long ago
    memory: bytes = b""  # as a node would have it then
    paused: bool = False


class AddingEngine(Protocol):
    def put(self, schedules: Sequence[AddedSchedule], *, replace: bool = True) -> list[Rejection]:
        """Add schedules at run time, or change them; return those that were refused.

        Those of the applied policy are changed only there. A policy that is applied later takes
        over a schedule of the same name.
        """

    def delete(self, names: Sequence[str]) -> list[Rejection]:
        """Forget schedules that were added, and their results; return those that were refused."""
