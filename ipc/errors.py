"""Every error that crosses a process border, under one root.

A message says what failed, with which value, and what to do about it.
"""

from musterd import __all__ as _public


class MusterdError(Exception):
    """Root of all errors of musterd."""


class ProtocolError(MusterdError):
    """A peer sent a message that cannot be understood; it is dropped."""


class ConfigurationError(MusterdError):
    """The configuration cannot be used; the daemon exits with 78."""


class SpawnError(MusterdError):
    """A worker process could not be made."""


class NotConnected(MusterdError):
    """No supervisor answered within the connect timeout."""


class StateError(MusterdError):
    """The state of an operation cannot be kept."""


class SessionError(MusterdError):
    """A session cannot be used, opened or kept."""


class LockTimeout(MusterdError, TimeoutError):
    """The lock was not free in time. `holder` names its holder."""

    def __init__(self, message: str, name: str = "", holder: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.holder = holder


class EmptyPage(MusterdError):
    """The page has no text where a watched value was."""


class LoggedOut(MusterdError):
    """The site does not know us any more. A handler may raise it, too.

    The handler of a task with a session is called once more, after another login; the second
    LoggedOut is a failure.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args or ("the site asks for a login",))


class ChallengePage(MusterdError):
    """The site wants to be shown that a person looks at it."""


class ProxyFailed(MusterdError):
    """A proxy did not pass the request on; the site was not reached.

    `everywhere`: it is of no use for other sites either.
    """

    unwell = False  # says nothing about the site: its breaker does not count it

    def __init__(self, message: str, *, everywhere: bool = True, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.everywhere = everywhere
        self.retry_after = retry_after


class TaskError(MusterdError):
    """Root of the errors of a single task."""


class Rejected(TaskError):
    """The task was not accepted; nothing of it is kept."""

    retry_after: float = 0.0  # seconds; 0 where coming back does not help


class QueueFull(Rejected):
    """The pool's queue has no room for this priority now."""


class ShuttingDown(Rejected):
    """The daemon takes no new tasks because it is stopping."""


class UnknownTask(Rejected):
    """No pool has a task of this name."""


class InvalidTask(Rejected, ValueError):
    """The task cannot run with these arguments, options, size or id."""


class ScheduleError(MusterdError):
    """Root of the errors of a schedule: what was asked was not done."""


class InvalidSchedule(ScheduleError, ValueError):
    """Schedules cannot be put or deleted; `problems` has what is wrong, by name."""

    def __init__(self, text: str, problems: dict[str, list[str]]) -> None:
        super().__init__(text)
        self.problems = problems


class UnknownSchedule(ScheduleError, LookupError):
    """There is no schedule of this name."""


class StillRunning(ScheduleError):
    """The last run of the schedule, `task`, has not ended."""

    def __init__(self, text: str, task: str) -> None:
        super().__init__(text)
        self.task = task


class TaskFailed(TaskError):
    """The task failed. `kind`, `type` and `traceback` tell what happened in the worker."""

    def __init__(
        self,
        message: str,
        *,
        kind: str = "error",
        type: str = "",
        traceback: str = "",
        status: int = 0,
        attempts: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.type = type
        self.traceback = traceback
        self.status = status
        self.attempts = attempts


class InvalidResult(TaskError, ValueError):
    """The task of a typed call succeeded with a result that is not what its handler is annotated
    with. `outcome().result` has it as it is."""


class WouldDeadlock(TaskError):
    """A handler waits for tasks that can never run, because all their workers wait too.

    `tasks` are the ids that the handler waits for.
    """

    def __init__(self, message: str, tasks: list[str] | None = None) -> None:
        super().__init__(message)
        self.tasks = list(tasks or ())


class TaskCancelled(TaskError):
    """The task was cancelled before it ended."""


class TaskExpired(TaskError):
    """The task's `expires` passed before it could run."""


class TaskMissing(TaskError):
    """No task has this id: it was never accepted, or was trimmed by `keep_results`."""


class HistoryUnavailable(MusterdError):
    """Results of a schedule cannot be read now, or are not kept here; the message says why."""


class NothingFound(TaskError):
    """A result that is watched has nothing where something is watched: never a change."""


class NotANumber(TaskError, ValueError):
    """A schedule has `above`, `below` or `by`, and what it watches is not one number."""


# Tracebacks and messages name them as programs import them.
for _name in _public:
    if isinstance(_kind := globals().get(_name), type):
        _kind.__module__ = "musterd"
