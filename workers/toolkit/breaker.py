"""Circuit breaker around a function: stops calls to a service that is unwell.

    @breaker(key=lambda url: urlsplit(url).netloc, failures=3, open=300, successes=2)
    async def fetch(url): ...

Each key has one breaker in this process, for sync and async functions alike. The rules are those of
the supervisor's breakers (musterd.ipc.resilience.breaker). The exceptions of `on` are failures.
Permanent, Retry, BreakerOpen, BulkheadFull, exceptions that `on` does not name and cancellation say
nothing about the other side.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from datetime import timedelta
from random import SystemRandom
from time import monotonic_ns
from typing import Any, ParamSpec, TypeVar, cast

from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.ipc.resilience.breaker import Breaker, BreakerState
from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.workers.authoring.base import Permanent, Retry, TaskTimeout
from musterd.workers.toolkit import counts, functions
from musterd.workers.toolkit.bulkhead import BulkheadFull

P = ParamSpec("P")
R = TypeVar("R")

BREAKERS_MAX = 1000  # the least recently used is forgotten
# How long to wait for a free probe while half-open.
PROBE_SECONDS = 1.0

_rng = SystemRandom()
_lock = threading.Lock()


class BreakerOpen(MusterdError):
    """The call was not made. `retry_after` tells in how many seconds it may be."""

    def __init__(self, key: str, state: BreakerState, retry_after: float) -> None:
        super().__init__(f"breaker {key!r} is {state}; come back in {retry_after:.1f} s")
        self.key = key
        self.retry_after = retry_after


class BreakerStatus(Struct, frozen=True):
    state: BreakerState
    failures: int  # consecutive, while closed
    retry_after: float  # seconds, while open


class _Entry:
    __slots__ = ("breaker", "key", "probes")

    def __init__(self, key: str, policy: BreakerPolicy) -> None:
        self.key = key
        self.breaker = Breaker(policy)
        self.probes: dict[_Call, int] = {}  # probe -> when it began


_entries: OrderedDict[str, _Entry] = OrderedDict()


class _Call:
    """One call through a breaker. Ends once, however it ends."""

    __slots__ = ("_began_ns", "_entry", "_on", "_probe")

    def __init__(self, on: tuple[type[Exception], ...]) -> None:
        self._on = on
        self._entry: _Entry | None = None
        self._probe = False
        self._began_ns = 0

    def begin(self, key: str, policy: BreakerPolicy) -> None:
        """Begin the call; raise BreakerOpen if the breaker refuses it."""
        now_ns = self._began_ns = monotonic_ns()
        with _lock:
            entry = _entry(key, policy)
            breaker = entry.breaker
            before = breaker.state
            admitted = breaker.admits(now_ns)
            if not admitted and breaker.state == BreakerState.HALF_OPEN:
                _forget_lost_probes(entry, now_ns)
                admitted = breaker.admits(now_ns)
            if breaker.state != before:
                counts.breaker_changed(key, str(breaker.state))
            if not admitted:
                counts.breaker_refused(key)
                raise BreakerOpen(key, breaker.state, _retry_after(breaker, now_ns))
            self._probe = breaker.begin()
            if self._probe:
                entry.probes[self] = now_ns
            self._entry = entry

    def end(self, error: BaseException | None) -> None:
        with _lock:
            entry, self._entry = self._entry, None
            if entry is None:  # never begun, or ended
                return
            if self._probe and entry.probes.pop(self, None) is None:
                return  # given up as lost: its outcome comes too late
            now_ns, breaker = monotonic_ns(), entry.breaker
            if error is not None and not self._counts(error):
                breaker.forget(probe=self._probe)
                return
            before = breaker.state
            slow_ns = breaker.policy.slow_ns
            after = functions.retry_after_of(error) if error is not None else 0.0
            breaker.record(
                now_ns,
                _rng,
                ok=error is None,
                probe=self._probe,
                slow=bool(slow_ns) and now_ns - self._began_ns > slow_ns,
                retry_after_ns=int(after * SECOND_NS),
            )
            if breaker.state != before:
                counts.breaker_changed(entry.key, str(breaker.state))
            if breaker.state != BreakerState.HALF_OPEN:
                entry.probes.clear()  # other probes of this round have no say in the next

    def _counts(self, error: BaseException) -> bool:
        silent = isinstance(error, Permanent | Retry | BreakerOpen | BulkheadFull)
        # while our call ran: `on=TimeoutError` means the task's timeout too
        if isinstance(error, TaskTimeout):
            return issubclass(TimeoutError, self._on)
        return isinstance(error, self._on) and not silent


class breaker:
    """Guard a function by the breaker of a key: a name, or a function of the arguments.

    After `failures` in a row calls are refused with BreakerOpen for `open` seconds; then one call
    at a time is let through, and `successes` of them in a row close the breaker again. `policy`
    sets everything at once, also the rates of failures and slow calls, and excludes the others.
    """

    def __init__(
        self,
        key: str | Callable[..., str],
        *,
        failures: int = 3,
        open: float | timedelta = 300.0,
        successes: int = 2,
        on: type[Exception] | tuple[type[Exception], ...] = (Exception,),
        policy: BreakerPolicy | None = None,
    ) -> None:
        self._key = key
        self._on = on if isinstance(on, tuple) else (on,)
        for kind in self._on:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"breaker: on={kind!r} is not a subclass of Exception")
        self._policy = policy or BreakerPolicy(
            failures=functions.count("breaker: failures", failures, least=1),
            open_ns=int(functions.seconds("breaker: open", open) * SECOND_NS),
            successes=functions.count("breaker: successes", successes, least=1),
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if functions.is_async("breaker", function):
            coroutine = cast(Callable[P, Coroutine[Any, Any, Any]], function)
            return cast(Callable[P, R], self._wrap_async(coroutine))
        return self._wrap_sync(function)

    @staticmethod
    def states() -> dict[str, BreakerStatus]:
        """Return the status of every breaker of this process, by key."""
        now_ns = monotonic_ns()
        with _lock:
            return {
                key: BreakerStatus(
                    entry.breaker.state,
                    entry.breaker.failures,
                    _retry_after(entry.breaker, now_ns),
                )
                for key, entry in sorted(_entries.items())
            }

    @staticmethod
    def reset(key: str | None = None) -> bool:
        """Close the breaker of that key, or all of them; return False if there is none."""
        with _lock:
            found = [each for each in ([key] if key is not None else [*_entries]) if _forget(each)]
            return bool(found)

    def _wrap_sync(self, function: Callable[P, R]) -> Callable[P, R]:
        key = functions.namer("breaker: key", self._key, function)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            call = _Call(self._on)
            try:
                call.begin(key(args, kwargs), self._policy)
                value = function(*args, **kwargs)
                call.end(None)
            except BaseException as error:
                call.end(error)
                raise
            return value

        return guarded

    def _wrap_async(
        self, function: Callable[P, Coroutine[Any, Any, Any]]
    ) -> Callable[P, Coroutine[Any, Any, Any]]:
        key = functions.namer("breaker: key", self._key, function)

        @functools.wraps(function)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
            call = _Call(self._on)
            try:
                call.begin(key(args, kwargs), self._policy)
                value = await function(*args, **kwargs)
                call.end(None)
            except BaseException as error:
                call.end(error)
                raise
            return value

        return guarded


def _entry(key: str, policy: BreakerPolicy) -> _Entry:
    entry = _entries.get(key)
    if entry is None:
        entry = _entries[key] = _Entry(key, policy)
        while len(_entries) > BREAKERS_MAX:
            _forget(next(iter(_entries)))
    elif entry.breaker.policy != policy:
        raise ValueError(
            f"breaker {key!r} exists with another policy ({entry.breaker.policy}); give the same "
            "values wherever you give this key, or another key"
        )
    else:
        _entries.move_to_end(key)
    return entry


def _forget(key: str) -> bool:
    """Forget a breaker and report it closed, as the next call finds it; False if there is none."""
    entry = _entries.pop(key, None)
    if entry is not None and entry.breaker.state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
        counts.breaker_changed(key, str(BreakerState.CLOSED))
    return entry is not None


def _forget_lost_probes(entry: _Entry, now_ns: int) -> None:
    """Drop probes that never end: a hanging call must not keep its breaker half-open forever."""
    breaker = entry.breaker
    for call, began_ns in list(entry.probes.items()):
        if now_ns - began_ns >= breaker.policy.open_ns:
            del entry.probes[call]
            breaker.forget(probe=True)


def _retry_after(breaker: Breaker, now_ns: int) -> float:
    if breaker.state == BreakerState.OPEN:
        return max(0.0, (breaker.open_until_ns - now_ns) / SECOND_NS)
    return PROBE_SECONDS if breaker.state == BreakerState.HALF_OPEN else 0.0
