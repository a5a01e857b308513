"""Events about schedules, beside the others of events.py: what clients and operators ask for."""

from msgspec import Struct

from musterd.ipc.wire.messages import Rejection
from musterd.supervisor.core.model.policy import SchedulePolicy


class ScheduleRunRequested(Struct, frozen=True):
    """Run a schedule's task now; the peer is answered when the task is on disk."""

    name: str
    peer: bytes
    request: int = 0
    id: str = ""  # of the task, where the peer has made it
    again: bool = False  # asked for before: it may be made already


class SchedulePauseRequested(Struct, frozen=True):
    """Pause a schedule, or let it go on; the peer is answered when that is on disk."""

    name: str
    paused: bool
    peer: bytes
    request: int = 0


class AddedSchedule(Struct, frozen=True):
    """A schedule that was added at run time."""

    name: str
    section: bytes  # its keys as they were given, msgpack
    policy: SchedulePolicy | None = None  # None where the section cannot be used
    problem: str = ""  # why it is not run, and what to do


class AddedRecovered(Struct, frozen=True):
    """The store has these schedules, which were added at run time; told before their facts."""

    added: list[AddedSchedule]


class SchedulePutRequested(Struct, frozen=True):
    """Add schedules, or change them; the peer is answered when that is on disk."""

    added: list[AddedSchedule]
    rejected: list[Rejection]  # those that cannot be used
    peer: bytes
    request: int = 0
    paused: frozenset[str] = frozenset()  # names of those to be paused with it
    replace: bool = True  # False: refuse names that are in use
    dry_run: bool = False  # only refuse what would be refused


class ScheduleDeleteRequested(Struct, frozen=True):
    """Forget schedules that were added; the peer is answered when that is on disk."""

    names: list[str]
    peer: bytes
    request: int = 0
