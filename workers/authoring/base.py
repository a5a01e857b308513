"""Base of users' workers: Worker, @task, Retry, Permanent and the context of a task.

class Promos(Worker):
    @task(timeout=30, max_retries=3, retry_on=(TimeoutError,), target="url")
    def extract(self, ctx, url: str, select: dict[str, str]) -> dict: ...
"""

import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, overload

import msgspec
from msgspec import Struct

from musterd.ipc.signatures import TASK_ATTRIBUTE
from musterd.ipc.wire.artefacts import ATTACHED_BYTES_MAX
from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    NO_LOGIN,
    NOT_GIVEN,
    FallbackOn,
    Fetching,
    Lease,
)
from musterd.workers.authoring import closing
from musterd.workers.authoring.artefacts import Artefacts, Held, attach, check_name
from musterd.workers.authoring.settings import settings
from musterd.workers.metrics import Metrics, metrics

if TYPE_CHECKING:
    from musterd.workers.authoring.lock import SharedLock
    from musterd.workers.authoring.request_channel import RequestChannel
    from musterd.workers.authoring.session import Session
    from musterd.workers.authoring.state import OperationState

RETRIES_MAX = 1000  # as on the wire (TaskSpec.max_retries)
TIMEOUT_SECONDS_MAX = 30 * 24 * 3600.0  # a month: more is a mistake in the unit

LOCK_SECONDS = 5.0  # work that needs a lock for longer should not hold one

NO_FETCHING = Fetching()

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=Callable[..., Any])

Backoff = Callable[[int, BaseException], float]  # (attempt, error) -> seconds
OnRetry = Callable[["Context", BaseException], Awaitable[None] | None]


class Worker:
    """One instance lives in each worker process. open(), healthy(), close() may be `async def`."""

    options: dict[str, Any]  # `[pools.NAME] options` of the configuration, set before open()
    pool: str
    index: int

    def __init__(self) -> None:
        self.options = {}
        self.pool = ""
        self.index = 0

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Raise ConfigurationError if a worker with these options cannot work here.

        `musterd check-config` calls it in a process of its own; nothing is opened for it.
        """

    def open(self) -> Awaitable[None] | None:
        """Make what is expensive and lasts; the worker is ready when open() returns."""
        return None

    def healthy(self) -> Awaitable[bool] | bool:
        """Say whether the worker is well; False or an error replaces it. Called while idle."""
        return True

    def close(self) -> Awaitable[None] | None:
        """Clean up when the worker is told to end; not called when it is killed."""
        return None

    def on_close(self, function: F, /, *args: Any, **kwargs: Any) -> F:
        """Call the function when the worker ends, before close() and before functions registered
        earlier; see musterd.on_close."""
        return closing.on_close(function, *args, **kwargs)

    def encode_state(self, value: Any) -> Any:
        """Return plain data for ctx.state.save() to write; the value itself, unless overridden."""
        return value

    def decode_state(self, value: Any) -> Any:
        """Return the value for the plain data that ctx.state.load() has read."""
        return value


class Retry(Exception):
    """Raised by a handler: try again after `after` seconds, else after the usual backoff."""

    def __init__(self, *args: object, after: float | timedelta | None = None) -> None:
        if isinstance(after, timedelta):
            after = after.total_seconds()
        if after is not None and not 0 <= after < math.inf:
            raise ValueError(f"Retry(after={after!r}): give seconds, 0 or more")
        super().__init__(*args or ("the handler asked for another attempt",))
        self.after = after


class Permanent(Exception):
    """Raised by a handler: another attempt will not help."""


class TaskTimeout(BaseException):
    """Raised in a handler that has used up its time; clean up and let it pass.

    Neither an Exception nor a TimeoutError, like asyncio.CancelledError, so that `except Exception`
    and `except TimeoutError` around a single request do not swallow the end of the whole task.
    Raised again until the handler lets it pass.
    """


class TaskInterrupted(BaseException):
    """Raised in a handler whose task was cancelled, again until the handler lets it pass.

    Not an Exception, like asyncio.CancelledError, so that `except Exception` does not swallow it.
    """


for _kind in (Retry, Permanent, TaskTimeout, TaskInterrupted):
    _kind.__module__ = "musterd"  # tracebacks and messages name them as programs import them


class _Watched(Struct, array_like=True, frozen=True):
    """Rules of a Lease: the part that says which fields of a result are watched."""

    watch: tuple[str, ...] = ()  # none: all of them
    ignore: tuple[str, ...] = ()
    numbers: bool = False
    picture: bool = False


_decode_watched = msgspec.msgpack.Decoder(_Watched).decode


class Context:
    """Handler's view of its attempt."""

    __slots__ = (
        *("_artefacts", "_attached", "_channel", "_lease", "_log", "_session", "_state"),
        *("attempt", "cancelled", "deadline", "task_id"),
    )

    def __init__(
        self,
        task_id: str,
        attempt: int = 1,
        deadline: float = math.inf,
        channel: "RequestChannel | None" = None,
        lease: Lease | None = None,
    ) -> None:
        self.task_id = task_id
        self.attempt = attempt  # 1 for the first
        self.deadline = deadline  # in seconds of time.monotonic(); math.inf without a timeout
        self.cancelled = False
        self._channel = channel  # None outside of a worker, as in a test of a handler
        self._lease = lease
        self._artefacts: Artefacts | None = None
        self._attached = b""
        self._log: logging.LoggerAdapter[logging.Logger] | None = None
        self._session: Session | None = None
        self._state: OperationState | None = None

    def progress(self, fraction: float, text: str = "") -> None:
        """Report progress, from 0 to 1. Never waits; of many reports the newest is sent."""
        share = float(fraction)
        if not 0 <= share <= 1:
            raise ValueError(f"ctx.progress({share!r}): give a fraction from 0 to 1")
        if self._channel is not None and self._lease is not None:
            self._channel.progress(self._lease, share, text)

    @property
    def watch(self) -> bytes:
        """Rules of what counts as a change of the result (ipc.watching); b"" if nobody watches."""
        return self._lease.watch if self._lease is not None else b""

    @property
    def state(self) -> "OperationState":
        """State of this operation, kept over crashes; see musterd.workers.authoring.state."""
        if self._state is None:
            if self._channel is None or self._lease is None:
                raise RuntimeError(
                    "this context belongs to no worker, so it has no state: in a test of a handler "
                    "set ctx.state = musterd.workers.toolkit.MemoryState()"
                )
            self._state = self._channel.state(self._lease)
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def lock(self, name: str, timeout: float | timedelta = LOCK_SECONDS) -> "SharedLock":
        """Lock a name for one task at a time, across all workers (`with` or `async with`).

        LockTimeout if the lock is not free within `timeout` seconds.
        """
        if self._channel is None or self._lease is None:
            raise RuntimeError("this context belongs to no worker, so it cannot lock anything")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        return self._channel.lock(self._lease, name, seconds)

    def session(self, name: str | None = None) -> "Session":
        """Use the session that the task was submitted with (`with` or `async with`)."""
        if self._channel is None or self._lease is None:
            raise RuntimeError("this context belongs to no worker, so it has no session")
        if self._session is None or name not in (None, self._session.name):
            self._session = self._channel.session(self._lease, self, name)
        return self._session

    @property
    def has_session(self) -> bool:
        """Whether the task was submitted with a session."""
        return self._lease is not None and bool(self._lease.session)

    def may_log_in_again(self) -> bool:
        """Tell whether another login may help after LoggedOut."""
        return self._session is not None and self._session.may_log_in_again()

    def login_outcome(self, *, failed: bool) -> int:
        """Return what the attempt says about the login of its session."""
        return self._session.login_outcome(failed=failed) if self._session is not None else NO_LOGIN

    @property
    def fetching(self) -> Fetching:
        """What the task's target says about fetching its pages."""
        said = self._lease.fetching if self._lease is not None else None
        return said or NO_FETCHING

    def runs(self, method: str) -> bool:
        """Tell whether this method is the task, and is not called by another handler."""
        return self._lease is not None and self._lease.method == method

    @property
    def watched(self) -> bool:
        """Whether a schedule watches the result for changes."""
        return self._lease is not None and self._lease.watch != b""

    def watches(self, field: str) -> bool:
        """Tell whether a schedule watches this field of the result."""
        if self._lease is None or not self._lease.watch:
            return False
        rules = _decode_watched(self._lease.watch)
        named = {each.partition(".")[0] for each in rules.watch}
        return (not named or field in named) and field not in rules.ignore

    @property
    def private(self) -> bool:
        """Whether the attempt has a session, or secrets among its arguments."""
        lease, channel = self._lease, self._channel
        return lease is not None and (
            lease.session != "" or (channel is not None and channel.vault.opened)
        )

    def wants_artefacts(self, *, always: bool = False) -> bool:
        """Tell whether artefacts are kept of this attempt if it fails.

        Of an attempt that has a session or has seen secrets, only `always`.
        """
        if self._lease is None or settings().artefacts is None:
            return False
        secrets = self._channel is not None and self._channel.vault.used
        return always or not (self.private or secrets)

    def artefact(self, name: str, data: Held, *, always: bool = False) -> None:
        """Keep bytes or a text as a file if this attempt fails: `ctx.artefact("page.html", html)`.

        `musterctl task ID --save DIR` fetches it. Nothing is kept of an attempt that has a session
        or has seen secrets, unless with `always`. Known secrets are taken out of texts, not out of
        bytes. A function in place of the data is called if the attempt has failed.
        """
        check_name(name)
        if self.wants_artefacts(always=always):
            self._held(always=always).hold(name, data)

    def artefact_path(self, name: str, *, always: bool = False) -> Path | None:
        """Return where a tool may write an artefact itself; None where none are kept."""
        check_name(name)
        return self._held(always=always).path(name) if self.wants_artefacts(always=always) else None

    @property
    def attaches(self) -> bool:
        """Whether the schedule asks for a picture (`attach`), and it can be kept."""
        if self._lease is None or not self._lease.watch or settings().artefacts is None:
            return False
        return _decode_watched(self._lease.watch).picture

    def attach(self, picture: bytes) -> None:
        """Send this picture, a PNG, with the alert about the result, if that is a change.

        One that is too large is left out. Schedules ask for it by `attach`; where none does,
        nothing happens. It is sent as it is, whatever secrets it shows.
        """
        if self.attaches:
            self._attached = picture if len(picture) <= ATTACHED_BYTES_MAX else b""

    def _held(self, *, always: bool) -> Artefacts:
        if self._artefacts is None:
            keep = settings().artefacts
            assert keep is not None, "no artefacts are kept"
            self._artefacts = Artefacts(keep)
        self._artefacts.always &= always
        return self._artefacts

    def drop_artefacts(self) -> None:
        """Forget them: the attempt has succeeded. Its picture is kept until the result is known to
        be no change."""
        if self._artefacts is not None:
            self._artefacts.discard()
        keep = settings().artefacts
        if self._attached and keep is not None:
            try:
                attach(keep, self.task_id, self.attempt, self._attached)
            except OSError as error:
                self.log.warning("the picture of the page is not kept: %s", error)

    def keep_artefacts(self) -> None:
        """Write them to disk, after a failure; nobody looks into those of a cancelled task."""
        if self._artefacts is None:
            return
        # A secret may have been looked up after something was held.
        if self.cancelled or not self.wants_artefacts(always=self._artefacts.always):
            self._artefacts.discard()
            return
        redact = str if self._channel is None else self._channel.vault.redact
        try:
            self._artefacts.publish(self.task_id, self.attempt, redact)
        except Exception as error:  # noqa: BLE001 - also of a function that makes one
            self.log.warning("artefacts of the attempt are not kept: %s", error)

    def secret(self, name: str) -> str:
        """Return the value of a secret of this pool, and keep it out of all messages."""
        if self._channel is None:
            raise RuntimeError("this context belongs to no worker, so it has no secrets")
        return self._channel.vault.value(name)

    @property
    def metrics(self) -> Metrics:
        """Metrics of this worker: `ctx.metrics.counter("promos_found").inc()`."""
        return metrics

    @property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        """Logger whose records carry the task's id, also as a field of the journal."""
        if self._log is None:  # few tasks log, so it is made for those that do
            fields = {"MUSTERD_TASK": self.task_id, "MUSTERD_ATTEMPT": self.attempt}
            self._log = logging.LoggerAdapter(logging.getLogger("musterd.task"), fields)
        return self._log


class TaskOptions(Struct, frozen=True):
    """What @task says about a handler."""

    timeout_ns: int = 0
    max_retries: int = NOT_GIVEN
    retry_on: tuple[type[BaseException], ...] | None = None  # None: everything
    target: str = ""
    backoff: Backoff | None = None
    on_retry: OnRetry | None = None
    fallback_on: FallbackOn = ""
    cache_ns: int = 0
    debounce_ns: int = 0


# (module, qualified name) -> first lines of the functions @task saw under it. A second function of
# the same name silently replaces the first; load() finds that here.
_defined_lines: dict[tuple[str, str], set[int]] = {}


@overload
def task(function: F, /) -> F: ...
@overload
def task(
    *,
    timeout: float | timedelta | None = None,
    max_retries: int | None = None,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    target: str | None = None,
    backoff: Backoff | None = None,
    on_retry: OnRetry | None = None,
    fallback_on: FallbackOn = "",
    cache: float | timedelta | bool | None = None,
    debounce: float | timedelta | bool | None = None,
) -> Callable[[F], F]: ...
def task(
    function: F | None = None,
    /,
    *,
    timeout: float | timedelta | None = None,
    max_retries: int | None = None,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    target: str | None = None,
    backoff: Backoff | None = None,
    on_retry: OnRetry | None = None,
    fallback_on: FallbackOn = "",
    cache: float | timedelta | bool | None = None,
    debounce: float | timedelta | bool | None = None,
) -> F | Callable[[F], F]:
    """Make a method of a Worker, or a function of a module, a task; it stays callable as before.

    `timeout` in seconds; `retry_on` are the exceptions worth another attempt (all, if not given);
    `target` names the argument that has the site, such as "url". `backoff(attempt, error)` returns
    the seconds to wait before the next attempt; `on_retry(ctx, error)`, which may be async, is
    called when an attempt has failed and another one will follow. With `fallback_on="failure"` a
    task that has failed for good ends with its last good result instead, else with the value that
    its submit gave as `fallback`. `cache` and `debounce` are for submits that do not give them:
    seconds, or True for the configured age.
    """
    options = TaskOptions(
        timeout_ns=_nanoseconds(timeout),
        max_retries=_count(max_retries),
        retry_on=_exceptions(retry_on),
        target=target or "",
        backoff=_callable("backoff", backoff),
        on_retry=_callable("on_retry", on_retry),
        fallback_on=_fallback_on(fallback_on),
        cache_ns=_age_ns("cache", cache),
        debounce_ns=_age_ns("debounce", debounce),
    )

    def mark(function: F) -> F:
        if not inspect.isfunction(function):
            raise TypeError(
                f"@task belongs directly on a method or function, not on {function!r}; "
                "put other decorators such as @staticmethod away or below it"
            )
        setattr(function, TASK_ATTRIBUTE, options)
        key = (function.__module__, function.__qualname__)
        _defined_lines.setdefault(key, set()).add(_first_line(function))
        return function

    return mark if function is None else mark(function)


def _first_line(function: Callable[..., Any]) -> int:
    """Return where the function is defined, looking through decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (code or function.__code__).co_firstlineno


def task_options(function: object) -> TaskOptions | None:
    """Return what @task says about this function; None if it is not a task."""
    options = getattr(function, TASK_ATTRIBUTE, None)
    return options if isinstance(options, TaskOptions) else None


def definition_lines(function: Callable[..., Any]) -> list[int]:
    """Return the lines of all tasks with this function's full name: more than one is a mistake."""
    if "<locals>" in function.__qualname__:
        return []  # made by a factory, which may well make several
    return sorted(_defined_lines.get((function.__module__, function.__qualname__), ()))


def _age_ns(option: str, age: float | timedelta | bool | None) -> int:
    """Return the allowed age of a result; 0 where none is asked for."""
    if isinstance(age, bool) or age is None:
        return AS_CONFIGURED if age else 0
    seconds = age.total_seconds() if isinstance(age, timedelta) else age
    if not isinstance(seconds, int | float) or not 0 < seconds <= TIMEOUT_SECONDS_MAX:
        raise ValueError(
            f"@task({option}={age!r}): give seconds, more than 0 and at most "
            f"{TIMEOUT_SECONDS_MAX:.0f}, or True for what the configuration says"
        )
    return max(1, int(seconds * 1e9))


def _nanoseconds(timeout: float | timedelta | None) -> int:
    if timeout is None:
        return 0
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"@task(timeout={timeout!r}): give seconds as a number")
    if not 0 < timeout <= TIMEOUT_SECONDS_MAX:
        raise ValueError(
            f"@task(timeout={timeout!r}): give seconds, more than 0 and at most "
            f"{TIMEOUT_SECONDS_MAX:.0f}; leave it out for the pool's own"
        )
    return max(1, int(timeout * 1e9))


def _count(max_retries: int | None) -> int:
    if max_retries is None:
        return NOT_GIVEN
    if isinstance(max_retries, bool) or not isinstance(max_retries, int):
        raise TypeError(f"@task(max_retries={max_retries!r}): give a whole number")
    if not 0 <= max_retries <= RETRIES_MAX:
        raise ValueError(f"@task(max_retries={max_retries!r}): give 0 to {RETRIES_MAX}")
    return max_retries


def _fallback_on(word: FallbackOn) -> FallbackOn:
    if word not in get_args(FallbackOn):
        raise ValueError(f'@task(fallback_on={word!r}): give "open" or "failure"')
    return word


def _callable(option: str, function: C | None) -> C | None:
    if function is not None and not callable(function):
        raise TypeError(f"@task({option}={function!r}): give a function")
    return function


def _exceptions(
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | None,
) -> tuple[type[BaseException], ...] | None:
    if retry_on is None:
        return None
    kinds = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"@task(retry_on=...): {kind!r} is not an exception class")
    return kinds
