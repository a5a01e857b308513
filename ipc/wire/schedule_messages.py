"""Messages about schedules on tasks.sock: what clients ask, and what they are answered.

They are part of the protocol of messages.py, and beside it because they are a topic of their own.
"""

from typing import Annotated

from msgspec import Meta, Struct

from musterd.ipc.wire.messages import Id, Name, Number, Rejection, Word

SECTION_BYTES_MAX = 64 * 1024  # one schedule that is put, with its arguments
# Of one message: a schedule that is put takes about a tenth of a millisecond of the loop's time.
PUTS_MAX = 100
PUT_BYTES_MAX = 256 * 1024  # of all sections in a message, or one
SCHEDULES_SHOWN_MAX = 200  # of one answer

# Why schedules were not put, deleted, run or paused, the same way.
INVALID_SCHEDULE, UNKNOWN_SCHEDULE, READ_ONLY, TOO_MANY, STORE_FAILS = (
    "InvalidSchedule",
    "UnknownSchedule",
    "ReadOnly",
    "TooMany",
    "StoreFails",
)
STILL_RUNNING, PERHAPS_MADE, IN_USE = "StillRunning", "PerhapsMade", "InUse"

# -- client -> supervisor ---------------------------------------------------------------------


class SchedulePut(Struct, array_like=True, frozen=True):
    """A schedule to be added or changed: its keys as a configuration file has them, msgpack."""

    name: Name
    section: Annotated[bytes, Meta(max_length=SECTION_BYTES_MAX)]


class PutSchedules(Struct, array_like=True, tag="put", frozen=True):
    """Add schedules, or change them; answered after the commit by ScheduleAnswer."""

    request: Number
    schedules: Annotated[list[SchedulePut], Meta(max_length=PUTS_MAX)]


class DeleteSchedules(Struct, array_like=True, tag="delete", frozen=True):
    """Forget schedules that were put; answered after the commit by ScheduleAnswer."""

    request: Number
    names: Annotated[list[Name], Meta(max_length=PUTS_MAX)]


class RunSchedule(Struct, array_like=True, tag="run", frozen=True):
    """Run a schedule now; answered after the commit by ScheduleAnswer.

    The id of the task is `@NAME.HEXm`: the client's time in nanoseconds, its end made up.
    """

    request: Number
    name: Name
    id: Id
    again: bool = False  # sent before without an answer: it may be made already


class PauseSchedule(Struct, array_like=True, tag="pause", frozen=True):
    """Pause a schedule, or let it go on; answered after the commit by ScheduleAnswer."""

    request: Number
    name: Name
    paused: bool


class ShowSchedules(Struct, array_like=True, tag="schedules", frozen=True):
    """Ask for one schedule, or for those after a name; answered by Schedules."""

    request: Number
    name: Word = ""  # "": all
    after: Word = ""


ScheduleMessage = PutSchedules | DeleteSchedules | RunSchedule | PauseSchedule | ShowSchedules

# -- supervisor -> client ---------------------------------------------------------------------


class ScheduleAnswer(Struct, array_like=True, tag="scheduled", frozen=True):
    """Confirm that the request is done and on disk, except for the schedules rejected here, by
    their names."""

    request: int
    rejected: list[Rejection] = []


class ScheduleView(Struct, array_like=True, frozen=True):
    """One schedule as the supervisor sees it; times are wall-clock nanoseconds, 0 for none."""

    name: str
    state: str  # "active", "paused", "disabled", "unusable"
    task: str
    when: str  # "every 5m", "*/5 * * * * (Europe/Berlin)"
    origin: str = ""  # the file that has it; "" where it was put
    section: bytes = b""  # as it was put
    problem: str = ""  # why it is not run, and what to do
    next_ns: int = 0
    last_ns: int = 0  # the due time of its newest run
    last_task: str = ""
    last_state: str = ""
    runs: int = 0
    skipped: int = 0
    skipped_why: str = ""  # of the newest one since the daemon's start
    failures: int = 0  # failed runs in a row, where it reports changes
    stale: bool = False  # ... and that was reported


class Schedules(Struct, array_like=True, tag="schedules", frozen=True):
    """Answer a ShowSchedules: by name, and whether there are more."""

    request: int
    schedules: list[ScheduleView]
    more: bool = False


ScheduleReply = ScheduleAnswer | Schedules
