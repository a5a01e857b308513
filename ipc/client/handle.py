"""Task handles, as Client and AsyncClient share them: the end of a task as a value or an error."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from musterd.ipc.client.record import TaskRecord
from musterd.ipc.client.session import TASK_MISSING, Session
from musterd.ipc.client.taskspec import shown
from musterd.ipc.errors import (
    InvalidTask,
    QueueFull,
    Rejected,
    ShuttingDown,
    TaskCancelled,
    TaskError,
    TaskExpired,
    TaskFailed,
    TaskMissing,
    UnknownTask,
)
from musterd.ipc.wire.messages import (
    CANCELLED,
    EXPIRED,
    INVALID_TASK,
    QUEUE_FULL,
    SHUTTING_DOWN,
    SUCCEEDED,
    UNKNOWN_TASK,
    Outcome,
    Rejection,
    TaskView,
)

MAP_WINDOW = 2_000  # tasks of one map() under way: enough to keep a fleet busy, few enough to hold
EXIT_FLUSH_SECONDS = 1.0  # longest wait when an exception leaves the `with` block

Handle = TypeVar("Handle", bound="BaseHandle")

# What submit_many() takes for each task.
_Args = Mapping[str, Any] | None
Request = tuple[str, _Args] | tuple[str, _Args, dict[str, Any]]

_REQUEST = "(name, args) or (name, args, options)"

# Values of `state` before the end, beside the final states of ipc/wire/messages.py.
SENDING, ACCEPTED, REJECTED, MISSING = "sending", "accepted", "rejected", "missing"

_REJECTIONS: dict[str, type[Rejected]] = {
    QUEUE_FULL: QueueFull,
    SHUTTING_DOWN: ShuttingDown,
    UNKNOWN_TASK: UnknownTask,
    INVALID_TASK: InvalidTask,
}

_decode = msgspec.msgpack.Decoder().decode


def taken_apart(
    requests: Iterable[Request],
) -> Iterator[tuple[str, _Args, bool, Any, dict[str, Any]]]:
    """Name, arguments, `wait`, `on_done` and options of each; InvalidTask names a wrong one."""
    if not isinstance(requests, Iterable):
        raise InvalidTask(f"submit_many takes several {_REQUEST}, not {shown(requests)}")
    for index, request in enumerate(requests):
        if not isinstance(request, tuple | list) or not 1 < len(request) < 4:
            raise InvalidTask(
                f"request {index} of submit_many must be {_REQUEST}, not {shown(request)}"
            )
        name, args, *rest = request
        given = rest[0] if rest else {}
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise InvalidTask(
                f"the options in request {index} of submit_many must be a dict with names of "
                f"options, not {shown(given)}"
            )
        options = dict(given)
        yield name, args, bool(options.pop("wait", False)), options.pop("on_done", None), options


def checked_arguments(name: str, iterable: Iterable[_Args]) -> Iterable[_Args]:
    """Return what map() was given; raise InvalidTask if it cannot be iterated."""
    if not isinstance(iterable, Iterable):
        raise InvalidTask(f"map takes several sets of arguments of {name}, not {shown(iterable)}")
    return iterable


def checked_callback(on_done: object) -> None:
    """Raise InvalidTask unless `on_done` can be called."""
    if not callable(on_done):
        raise InvalidTask(f"on_done must be a function that takes the handle, not {shown(on_done)}")


def checked_handles(handles: Iterable[Handle]) -> list[Handle]:
    """Return each handle once; raise TypeError for anything that is no handle."""
    if not isinstance(handles, Iterable):
        raise TypeError(f"give several handles that submit() returned, not {shown(handles)}")
    unique: dict[Handle, None] = {}
    for handle in handles:
        if not isinstance(handle, BaseHandle):
            raise TypeError(f"give handles that submit() returned, not {shown(handle)}")
        unique[handle] = None
    return list(unique)


def checked_seconds(what: str, seconds: float) -> float:
    """Return the number; ValueError if it cannot be a time to wait."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not seconds >= 0:
        raise ValueError(f"{what} must be a number of seconds, 0 or more, not {shown(seconds)}")
    return float(seconds)


class BaseHandle(TaskRecord):
    """One task as its submitter sees it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name or '?'} {self.state}>"

    def done(self) -> bool:
        """Tell whether the task has ended, as far as this client has heard."""
        return self.ending is not None

    @property
    def state(self) -> str:
        """The state this client has heard of, without asking; `status()` asks."""
        ending = self.ending
        if isinstance(ending, Outcome):
            return ending.state
        if isinstance(ending, Rejection):
            return MISSING if ending.code == TASK_MISSING else REJECTED
        return ACCEPTED if self.acknowledged else SENDING

    def _answered(self) -> bool:
        return self.acknowledged or self.ending is not None

    @property
    def cached(self) -> bool:
        """Whether the result is that of another task with the same key."""
        return isinstance(self.ending, Outcome) and self.ending.cached

    @property
    def stale(self) -> bool:
        """Whether the result is the last good one of an earlier task."""
        return isinstance(self.ending, Outcome) and self.ending.stale

    @property
    def fallback(self) -> bool:
        """Whether the result is the value given as `fallback` for want of a last good one."""
        return isinstance(self.ending, Outcome) and self.ending.fallback


class Gathering(Generic[Handle]):
    """Handles of map() or as_completed(): those under way, and those that have ended."""

    def __init__(self) -> None:
        self.under_way: dict[Handle, None] = {}  # in the order of add()
        self._ended: deque[Handle] = deque()

    def add(self, handle: Handle) -> None:
        self.under_way[handle] = None
        if handle.ending is None:
            handle.listen(self._hear)
        else:
            self._ended.append(handle)

    def any_ended(self) -> bool:
        return bool(self._ended)

    def take(self) -> Iterator[Handle]:
        """Yield the handles that have ended since the last call."""
        while self._ended:
            handle = self._ended.popleft()
            del self.under_way[handle]
            yield handle

    def _hear(self, handle: Any) -> None:
        if handle.ending is not None:  # listeners hear of the acknowledgement too
            self._ended.append(handle)


def outcome_of(session: Session, record: TaskRecord) -> Outcome:
    """Return the outcome of an ended record; raise if it was rejected."""
    ending = record.ending
    assert ending is not None
    if isinstance(ending, Rejection):
        session.report(record)
        raise rejection_error(ending, record.name)
    return ending


def value_of(session: Session, record: TaskRecord) -> Any:
    """Return the value of an ended record's task; raise the error that it ended with."""
    outcome = outcome_of(session, record)
    if outcome.state == SUCCEEDED:
        return _decode(outcome.value) if outcome.value else None
    raise _outcome_error(outcome, record.name)


def view_of(record: TaskRecord, view: TaskView | None) -> TaskView:
    if view is None:
        raise TaskMissing(
            f"task {_called(record.id, record.name)} is not known: never accepted, or trimmed by "
            "keep_results"
        )
    return view


def rejection_error(rejection: Rejection, name: str) -> TaskError:
    text = f"task {_called(rejection.id, name)} was not accepted: {rejection.message}"
    if rejection.code == TASK_MISSING:
        return TaskMissing(f"task {_called(rejection.id, name)}: {rejection.message}")
    error = _REJECTIONS.get(rejection.code, Rejected)(text)
    error.retry_after = rejection.retry_after_ns / 1e9
    return error


def unreported_error(session: Session) -> TaskError | None:
    """Return one error for all unreported rejections: the first of them, with their number."""
    rejections, total = session.take_unreported()
    if not rejections:
        return None
    first = rejections[0]
    if total == 1:
        return rejection_error(first, "")
    error = _REJECTIONS.get(first.code, Rejected)(
        f"{total} tasks were not accepted; one of them, {first.id}: {first.message}"
    )
    error.retry_after = max(rejection.retry_after_ns for rejection in rejections) / 1e9
    return error


def _outcome_error(outcome: Outcome, name: str) -> TaskError:
    called = _called(outcome.id, name)
    if outcome.state == CANCELLED:
        return TaskCancelled(f"task {called} was cancelled")
    if outcome.state == EXPIRED:
        return TaskExpired(f"task {called} expired before it could run")
    failure = outcome.failure
    tries = f"{outcome.attempts} attempt{'' if outcome.attempts == 1 else 's'}"
    if failure is None:
        return TaskFailed(f"task {called} failed after {tries}", attempts=outcome.attempts)
    what = ": ".join(part for part in (failure.type, failure.message) if part) or failure.kind
    return TaskFailed(
        f"task {called} failed after {tries}: {what}",
        kind=failure.kind,
        type=failure.type,
        traceback=failure.traceback,
        status=failure.status,
        attempts=outcome.attempts,
    )


def _called(task_id: str, name: str) -> str:
    return f"{task_id} ({name})" if name else task_id
