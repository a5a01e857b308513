"""A client's records: its tasks, its submits, and its questions to the supervisor."""

from collections.abc import Callable
from typing import Any

from musterd.ipc.wire.history import Entries
from musterd.ipc.wire.messages import (
    History,
    Outcome,
    ProgressNote,
    Rejection,
    TaskSpec,
    TaskView,
)
from musterd.ipc.wire.resolving import Resolve, Resolved
from musterd.ipc.wire.schedule_messages import (
    ScheduleAnswer,
    ScheduleMessage,
    Schedules,
)

# Makes a message: a request number, and whether it was sent before.
Make = Callable[[int, bool], ScheduleMessage | Resolve]

# Bytes of a task beside its arguments: id, name, target, key and numbers.
_TASK_OVERHEAD_BYTES = 800


class TaskRecord:
    """What a client knows about one task.

    A handle is its own record, which saves an object for each task. What users of handles have no
    business with begins with an underscore; it belongs to all modules of this room.
    """

    __slots__ = (
        *("_acknowledged", "_ending", "_listeners", "_note", "_owner", "_patient", "_returns"),
        *("_size", "_spec", "id", "name"),
    )

    def __init__(
        self,
        task_id: str,
        name: str,
        spec: TaskSpec | None,
        owner: Any = None,
        returns: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.id = task_id
        self.name = name
        self._spec = spec  # dropped with the acknowledgement
        self._size = _size_of(spec) if spec is not None else 0
        self._acknowledged = spec is None
        self._patient = False  # resubmitted while the queue is full
        self._ending: Outcome | Rejection | None = None
        self._note: ProgressNote | None = None  # the newest progress report
        # Called with the record at its acknowledgement, at each progress report and at its end;
        # must not block or raise.
        self._listeners: list[Callable[[TaskRecord], object]] | None = None
        self._owner = owner  # what a handle asks: a driver, or an AsyncClient
        self._returns = returns  # decodes the result of a typed call; None: as plain data

    def _listen(self, listener: "Callable[[TaskRecord], object]") -> None:
        if self._listeners is None:
            self._listeners = []
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners or ():
            listener(self)


def _size_of(spec: TaskSpec) -> int:
    size = _TASK_OVERHEAD_BYTES + len(spec.args)
    return size if spec.fallback is None else size + len(spec.fallback)


class Inspection:
    """Unanswered question for a TaskView, for results of a schedule, or for advice."""

    __slots__ = ("ahead", "answered", "entries", "history", "id", "view", "workers")

    def __init__(
        self, task_id: str, ahead: bytes | None = None, history: History | None = None
    ) -> None:
        self.id = task_id
        self.history = history
        # message sent before the question, and done once the question is answered
        self.ahead = ahead
        self.answered = False
        self.view: TaskView | None = None
        self.workers: dict[str, int] = {}
        self.entries: Entries | None = None


class Question:
    """Unanswered question about schedules or functions, made anew for each connection."""

    __slots__ = ("answer", "answered", "asked", "make")

    def __init__(self, make: Make) -> None:
        self.make = make  # makes the message: a request number, and whether it was sent before
        self.asked = 0  # how often
        self.answered = False
        self.answer: ScheduleAnswer | Schedules | Resolved | None = None


class SubmitRequest:
    """Tasks of one Submit. `sent_ns` is -1 until the Submit is sent."""

    __slots__ = ("records", "resent", "sent_ns", "size")

    def __init__(self, records: list[TaskRecord], size: int) -> None:
        self.records = records
        self.size = size
        self.sent_ns = -1
        self.resent = False
