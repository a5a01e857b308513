"""Retry a function: after growing pauses, on errors that may pass, a limited number of times.

    @retry(max_retries=5, on=(ConnectionError, TimeoutError))
    def fetch(ctx, url): ...

Never retried here:

    Permanent      another attempt will not help
    Retry          is meant for the supervisor, whose wait does not hold a worker
    TaskTimeout    the task's time is over
    the rest       of what `on` does not name, and everything that is not an Exception

A pause never goes beyond the task's deadline. An error whose `retry_after` is longer than `max`
seconds is raised at once: the supervisor, which honours `retry_after` as well, waits instead.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from random import SystemRandom
from typing import Any, ParamSpec, TypeVar, cast, get_args, overload

import msgspec
from msgspec import Struct

from musterd.ipc.resilience.backoff import pause_ns
from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, RetryPolicy, Strategy
from musterd.workers.authoring.base import Permanent, Retry
from musterd.workers.toolkit import counts, functions
from musterd.workers.toolkit.state import StateStore, short_name, state_of

P = ParamSpec("P")
R = TypeVar("R")

Errors = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]
Backoff = Callable[[int, Exception], float]
OnRetry = Callable[[int, Exception, float], object]

log = logging.getLogger("musterd.toolkit")
_rng = SystemRandom()  # a seeded one would be equal in every fork


class RetryState(Struct, frozen=True):
    """State that `retry(state=...)` keeps over restarts."""

    failures: int
    error: str  # type of the last one


class _Rules(Struct, frozen=True):
    policy: RetryPolicy
    on: Callable[[Exception], bool]
    backoff: Backoff | None
    on_retry: OnRetry | None
    state: str | Callable[..., str] | None

    def is_final(self, failures: int, error: Exception) -> bool:
        """Tell whether no other attempt may follow, whatever the time."""
        return (
            failures > self.policy.max_retries
            or isinstance(error, Permanent | Retry)
            or functions.is_task_timeout(error)
            or not self.on(error)
        )

    def pause_seconds(self, failures: int, error: Exception, deadline: float) -> float | None:
        """Return how long to wait before the next attempt; None if it must not happen here."""
        backoff = self.policy.backoff
        longest = backoff.max_ns / SECOND_NS
        asked = functions.retry_after_of(error)
        if asked > longest:
            return None
        if self.backoff is None:
            pause = pause_ns(backoff, failures, _rng) / SECOND_NS
        else:
            pause = self.backoff(failures, error)
            if not pause >= 0:
                raise ValueError(f"backoff({failures}, ...) returned {pause!r}: give seconds")
        pause = max(min(pause, longest), asked)
        return pause if time.monotonic() + pause < deadline else None


@overload
def retry(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def retry(
    max_retries: int = 3,
    *,
    on: Errors = (Exception,),
    strategy: Strategy = "exponential",
    base: float | timedelta = 1.0,
    factor: float = 2.0,
    max: float | timedelta = 60.0,
    jitter: float = 0.1,
    backoff: Backoff | None = None,
    on_retry: OnRetry | None = None,
    state: str | Callable[..., str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def retry(
    max_retries: int | Callable[P, R] = 3,
    *,
    on: Errors = (Exception,),
    strategy: Strategy = "exponential",
    base: float | timedelta = 1.0,
    factor: float = 2.0,
    max: float | timedelta = 60.0,
    jitter: float = 0.1,
    backoff: Backoff | None = None,
    on_retry: OnRetry | None = None,
    state: str | Callable[..., str] | None = None,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Call the function up to `max_retries` times more when it raises one of `on`.

    `on` may also be a function of the error. `backoff(attempt, error)` replaces the strategy,
    `on_retry(attempt, error, pause)` is called before each pause. With `state`, a name or a
    function of the arguments, the count of failures outlives the worker (needs `ctx`). `@retry`
    without parentheses is `@retry()`.
    """
    if callable(max_retries) or isinstance(max_retries, staticmethod | classmethod):
        usual: Callable[[Callable[P, R]], Callable[P, R]] = retry()
        return usual(max_retries)
    rules = _Rules(
        policy=RetryPolicy(
            functions.count("retry: max_retries", max_retries, least=0),
            _backoff_policy(strategy, base, factor, max, jitter),
        ),
        on=_predicate(on),
        backoff=backoff,
        on_retry=on_retry,
        state=state,
    )
    return lambda function: _wrap(rules, function)


def retry_with(
    policy: RetryPolicy, on: Errors = (Exception,), on_retry: OnRetry | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Retry by a policy, as the supervisor has them."""
    rules = _Rules(policy, _predicate(on), None, on_retry, None)
    return lambda function: _wrap(rules, function)


def _backoff_policy(
    strategy: Strategy,
    base: float | timedelta,
    factor: float,
    longest: float | timedelta,
    jitter: float,
) -> BackoffPolicy:
    if strategy not in get_args(Strategy):
        known = ", ".join(get_args(Strategy))
        raise ValueError(
            f"retry: strategy={strategy!r} is not one of {known}; "
            "for one of your own give backoff=function"
        )
    if not factor >= 1:
        raise ValueError(f"retry: factor={factor!r}: give 1 or more, or the pauses would shrink")
    if not 0 <= jitter <= 1:
        raise ValueError(f"retry: jitter={jitter!r}: give a share between 0 and 1")
    return BackoffPolicy(
        base_ns=int(functions.seconds("retry: base", base, zero=True) * SECOND_NS),
        factor=factor,
        max_ns=int(functions.seconds("retry: max", longest, zero=True) * SECOND_NS),
        jitter=jitter,
        strategy=strategy,
    )


def _predicate(on: Errors) -> Callable[[Exception], bool]:
    kinds = on if isinstance(on, tuple) else (on,)
    if all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        classes = cast(tuple[type[Exception], ...], kinds)
        return lambda error: isinstance(error, classes)
    if isinstance(on, tuple | type) or not callable(on):
        raise TypeError(
            f"on={on!r}: give subclasses of Exception, or a function that says of an error "
            "whether it may pass"
        )
    return on


def _wrap(rules: _Rules, function: Callable[P, R]) -> Callable[P, R]:
    awaits = functions.is_async("retry", function)
    call: Callable[..., Any] = function
    context = functions.context_finder(function)
    counters = _counters(rules, function, awaits)

    async def retried(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ctx = context(args, kwargs)
        deadline = functions.deadline_of(ctx)
        counter = counters(ctx, args, kwargs) if counters else None
        failures = await counter.load() if counter else 0
        while True:
            try:
                value = call(*args, **kwargs)
                if awaits:
                    value = await value
            except Exception as error:
                failures += 1
                if rules.is_final(failures, error):
                    if counter:
                        await counter.clear()
                    raise
                if counter:
                    await counter.save(failures, error)
                pause = rules.pause_seconds(failures, error, deadline)
                if pause is None:
                    raise
                counts.retried(functions.name_of(function))
                told = rules.on_retry(failures, error, pause) if rules.on_retry else None
                if awaits and inspect.isawaitable(told):
                    await told
            else:
                if counter and failures:
                    await counter.clear()
                return value
            if awaits:
                await asyncio.sleep(pause)
            else:
                time.sleep(pause)

    return functions.wrapped(function, retried, awaits=awaits)


# -- state --------------------------------------------------------------------------------------


class _Counter:
    """Count of one call's failures, kept in ctx.state; `awaits`: by its async methods."""

    def __init__(self, store: StateStore, name: str, task_id: str, awaits: bool) -> None:
        self._store = store
        self._awaits = awaits
        # One count for each task: another task of the same name has its own failures.
        self._key = f"retry:{short_name(name)}:{task_id}"

    async def load(self) -> int:
        store, key = self._store, self._key
        kept = await store.aload(key) if self._awaits else store.load(key)
        if kept is None:
            return 0
        try:
            state = msgspec.convert(kept, RetryState)
        except msgspec.ValidationError as error:
            log.warning("state %s is not one of retry (%s); counting from 0", key, error)
            return 0
        log.info("state %s restored: %d failures, last %s", key, state.failures, state.error)
        return max(0, state.failures)

    async def save(self, failures: int, error: Exception) -> None:
        # Not its message: the state would refuse a secret in it, which would end the retries.
        value = msgspec.to_builtins(RetryState(failures, type(error).__name__))
        if self._awaits:
            await self._store.asave(value, self._key)
        else:
            self._store.save(value, self._key)

    async def clear(self) -> None:
        if self._awaits:
            await self._store.aclear(self._key)
        else:
            self._store.clear(self._key)


def _counters(
    rules: _Rules, function: Callable[..., Any], awaits: bool
) -> Callable[[Any | None, tuple[Any, ...], dict[str, Any]], _Counter] | None:
    if rules.state is None:
        return None
    name = functions.namer("retry(state=...)", rules.state, function)

    def make(ctx: Any | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Counter:
        store = state_of(ctx, f"retry(state=...) on {functions.name_of(function)}")
        return _Counter(store, name(args, kwargs), str(getattr(ctx, "task_id", "")), awaits)

    return make
