"""What Client and AsyncClient share: the reading of what they are given, and the ends of tasks."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.msgpack import Ext

from musterd.ipc.client.calls import Call, Decode, R_co, make_call
from musterd.ipc.client.record import TaskRecord
from musterd.ipc.client.session import TASK_MISSING, Session
from musterd.ipc.client.taskspec import shown
from musterd.ipc.errors import (
    InvalidResult,
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
from musterd.ipc.secrets.reference import Secret, is_secret_name, secret_name
from musterd.ipc.signatures import INVALID_ARGUMENTS
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
NOTE_CHARS_MAX = 8 * 1024  # of the worker's traceback, shown below a TaskFailed; its end is kept
EXIT_FLUSH_SECONDS = 1.0  # longest wait when an exception leaves the `with` block

Handle = TypeVar("Handle", bound="BaseHandle[Any]")

# What submit_many() takes for each task, beside calls.
Args = Mapping[str, Any] | None
Request = tuple[str, Args] | tuple[str, Args, dict[str, Any]]

_REQUEST = "(name, args) or (name, args, options), or a call()"

# Values of `state` before the end, beside the final states of ipc/wire/messages.py.
SENDING, ACCEPTED, REJECTED, MISSING = "sending", "accepted", "rejected", "missing"

_REJECTIONS: dict[str, type[Rejected]] = {
    QUEUE_FULL: QueueFull,
    SHUTTING_DOWN: ShuttingDown,
    UNKNOWN_TASK: UnknownTask,
    INVALID_TASK: InvalidTask,
}

_decode = msgspec.msgpack.Decoder().decode
_NONE = msgspec.msgpack.encode(None)


def taken_apart(
    requests: Iterable[Request | Call[Any]],
) -> Iterator[tuple[str | Call[Any], Args, bool, Any, dict[str, Any]]]:
    """Name, arguments, `wait`, `on_done` and options of each; InvalidTask names a wrong one.

    A call stands in place of a name, and has the rest itself.
    """
    if not isinstance(requests, Iterable):
        raise InvalidTask(f"submit_many takes several {_REQUEST}, not {shown(requests)}")
    for index, request in enumerate(requests):
        if not isinstance(request, tuple | list) or not 1 < len(request) < 4:
            if isinstance(request, Call):
                yield request, None, False, None, {}
                continue
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


def checked_arguments(name: object, iterable: Iterable[Args]) -> Iterable[Args]:
    """Return what map() was given; raise InvalidTask if it cannot be iterated."""
    if not isinstance(iterable, Iterable):
        raise InvalidTask(f"map takes several sets of arguments of {name}, not {shown(iterable)}")
    return iterable


def understood(
    task: Any, positional: tuple[Any, ...], given: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return what submit() was given: a call, or a name and arguments; and the options beside."""
    positional = tuple(each for each in positional if each is not UNSET)
    options = {name: value for name, value in given.items() if value is not UNSET}
    if callable(task):
        return make_call(task, positional, options), None, {}
    if not isinstance(task, Call):
        return (*named_task("submit", "args", task, positional, options), options)
    if positional:
        beside = shown(positional[0])
        raise InvalidTask(f"give options beside a call by their names, not {beside}")
    return task, None, options


def named_task(
    function: str, second: str, task: Any, positional: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the name of a task, and the argument behind it; take those given as options out."""
    if task is UNSET:
        if "name" not in options:
            raise TypeError(f"{function}() takes the name of a task, a handler or a call")
        task = options.pop("name")
    if len(positional) > 1:
        raise TypeError(f"{function}() takes a name and {second}; give all options by their names")
    return task, positional[0] if positional else options.pop(second, None)


def are_calls(task: object, iterable: object) -> bool:
    """Tell whether map() was given calls, or a handler, and not the name of a task."""
    if iterable is not UNSET:
        return callable(task)
    return task is not UNSET and not isinstance(task, str)


def calls_of(task: object, iterable: object) -> Iterator[Call[Any]]:
    """Yield the calls that map() was given: calls, or a handler and sets of its arguments."""
    if iterable is UNSET:
        if not isinstance(task, Iterable):
            raise InvalidTask(
                "map takes calls, or a name or a handler with several sets of its arguments, not "
                f"{shown(task)}"
            )
        for index, each in enumerate(task):
            if not isinstance(each, Call):
                raise InvalidTask(f"call {index} of map must be a call(), not {shown(each)}")
            yield each
        return
    for args in checked_arguments(getattr(task, "__qualname__", task), iterable):  # type: ignore[arg-type]
        if args is not None and not isinstance(args, Mapping):
            raise InvalidTask(f"arguments must be a mapping of names to values, not {shown(args)}")
        yield make_call(task, (), args or {})


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


class TaskStatus(TaskView, frozen=True):
    """Task as shown to people, with its arguments and its result as Python values."""

    args: Any = msgspec.field(default_factory=dict)  # a dict of arguments; a Secret is a reference
    value: Any = None


def task_status(view: TaskView) -> TaskStatus:
    """Return the view as users see it."""
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    fields["args"] = _shown_value(view.args) if view.args else {}
    fields["value"] = _shown_value(view.value) if view.value else None
    return TaskStatus(**fields)


def _shown_value(data: bytes) -> Any:
    """Return the decoded value; what cannot be decoded, from a foreign client, as it is."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_extension)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data


def _extension(code: int, data: memoryview) -> Any:
    extension = Ext(code, bytes(data))
    name = secret_name(extension)
    return extension if name is None or not is_secret_name(name) else Secret(name)


class BaseHandle(TaskRecord, Generic[R_co]):
    """One task as its submitter sees it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name or '?'} {self.state}>"

    def done(self) -> bool:
        """Tell whether the task has ended, as far as this client has heard."""
        return self._ending is not None

    @property
    def state(self) -> str:
        """The state this client has heard of, without asking; `status()` asks."""
        ending = self._ending
        if isinstance(ending, Outcome):
            return ending.state
        if isinstance(ending, Rejection):
            return MISSING if ending.code == TASK_MISSING else REJECTED
        return ACCEPTED if self._acknowledged else SENDING

    def _answered(self) -> bool:
        return self._acknowledged or self._ending is not None

    def _outcome(self, session: Session) -> Outcome:
        """Return the outcome of the ended task; raise if it was rejected."""
        ending = self._ending
        assert ending is not None
        if isinstance(ending, Rejection):
            session.report(self)
            raise rejection_error(ending, self.name)
        return ending

    def _value(self, session: Session) -> Any:
        """Return the value of the ended task; raise the error that it ended with."""
        outcome = self._outcome(session)
        if outcome.state == SUCCEEDED:
            if self._returns is not None:
                return self._converted(outcome, self._returns)
            return _decode(outcome.value) if outcome.value else None
        raise _outcome_error(outcome, self.name)

    def _converted(self, outcome: Outcome, returns: Decode) -> Any:
        """Return the value of a typed call as its handler is annotated."""
        value = outcome.value or _NONE
        try:
            return returns(value)
        except INVALID_ARGUMENTS as error:
            if outcome.fallback:  # of the submit, which may be anything
                return _decode(value)
            raise InvalidResult(
                f"task {_called(self.id, self.name)} succeeded, but its result is not what its "
                f"handler is annotated with: {error}; outcome().result has it as it is"
            ) from error

    def _seen(self, view: TaskView | None) -> TaskStatus:
        """Return what the supervisor says about the task; TaskMissing if it says nothing."""
        if view is None:
            called = _called(self.id, self.name)
            raise TaskMissing(
                f"task {called} is not known: never accepted, or trimmed by keep_results"
            )
        return task_status(view)

    @property
    def cached(self) -> bool:
        """Whether the result is that of another task with the same key."""
        return isinstance(self._ending, Outcome) and self._ending.cached

    @property
    def stale(self) -> bool:
        """Whether the result is the last good one of an earlier task."""
        return isinstance(self._ending, Outcome) and self._ending.stale

    @property
    def fallback(self) -> bool:
        """Whether the result is the value given as `fallback` for want of a last good one."""
        return isinstance(self._ending, Outcome) and self._ending.fallback


class Gathering(Generic[Handle]):
    """Handles of map() or as_completed(): those under way, and those that have ended."""

    def __init__(self) -> None:
        self.under_way: dict[Handle, None] = {}  # in the order of add()
        self._ended: deque[Handle] = deque()

    def add(self, handle: Handle) -> None:
        self.under_way[handle] = None
        if handle._ending is None:
            handle._listen(self._hear)
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
        if handle._ending is not None:  # listeners hear of the acknowledgement too
            self._ended.append(handle)


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
    error = TaskFailed(
        f"task {called} failed after {tries}: {what}",
        kind=failure.kind,
        type=failure.type,
        traceback=failure.traceback,
        status=failure.status,
        attempts=outcome.attempts,
    )
    if failure.traceback:
        error.add_note(f"\nIn the worker:\n\n{failure.traceback[-NOTE_CHARS_MAX:].rstrip()}")
    return error


def _called(task_id: str, name: str) -> str:
    return f"{task_id} ({name})" if name else task_id
