"""Cache of a function's results, for a while: equal arguments get the same result.

    @cached(ttl=60, size=500)
    async def rate(ctx, currency: str) -> float: ...

    rate.invalidate(ctx, "EUR")     # of these arguments
    rate.clear()                    # of all

Simultaneous calls with equal arguments are computed once, in any thread and any event loop of this
process; the other callers wait for that call. Errors are not cached: all waiting callers get the
error, and the next call tries again. A result that was begun before its key was invalidated goes to
the waiting callers and is not cached. `submit(cache=...)` is the cache that all workers share.
"""

import asyncio
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from datetime import timedelta
from time import monotonic
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from msgspec import Struct

from musterd.ipc.signatures import CONTEXT_NAMES
from musterd.workers.authoring.base import Context
from musterd.workers.authoring.settings import settings
from musterd.workers.toolkit import functions

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class CacheStatus(Struct, frozen=True):
    entries: int
    hits: int
    misses: int


class _Entry(Struct, frozen=True):
    value: Any
    made: float  # of time.monotonic()


class _Lost(Exception):
    """The call that others waited for was stopped before it had a result."""


class _Running:
    """Call under way, and the thread or asyncio task that makes it."""

    __slots__ = ("future", "maker")

    def __init__(self, maker: object) -> None:
        self.future: Future[Any] = Future()
        self.maker = maker


class Cached(Protocol[P, R_co]):
    """Function with a cache; of a method, the instance is the first argument."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any: ...

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Forget the result of these arguments."""

    def clear(self) -> None:
        """Forget all results."""

    def status(self) -> CacheStatus: ...


_caches: "weakref.WeakSet[_Cache]" = weakref.WeakSet()


def clear_all() -> None:
    """Forget the results of all cached functions, as a new process has none."""
    for cache in list(_caches):
        cache.clear()


class _Cache:
    """Cache of one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        ttl: float | None,
        size: int | None,
        key: Callable[..., Hashable] | None,
    ) -> None:
        self._function = function
        self.awaits = functions.is_async("cached", function)
        self._ttl, self._size = ttl, size
        self._key_of = _keys(function, key)
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._running: dict[Hashable, _Running] = {}
        self._hits = self._misses = 0
        _caches.add(self)

    async def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call; a coroutine that awaits nothing for a plain function."""
        key = self._key_of(args, kwargs)
        while True:
            mine = _Running(asyncio.current_task() if self.awaits else threading.current_thread())
            try:
                found = self._begin(key, mine)
                if isinstance(found, _Entry):
                    return found.value
                if found is mine:
                    value = self._function(*args, **kwargs)
                    if self.awaits:
                        value = await value
                    self._end(key, mine, value)
                    return value
                self._check_maker(found, mine)
                return await _answer(found.future) if self.awaits else found.future.result()
            except _Lost:
                continue
            except BaseException as error:
                self._give_up(key, mine, error)
                raise
            finally:
                self._give_up(key, mine, None)

    def invalidate(self, *args: Any, **kwargs: Any) -> None:
        key = self._key_of(args, kwargs)
        with self._lock:
            self._entries.pop(key, None)
            self._running.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._running.clear()

    def status(self) -> CacheStatus:
        with self._lock:
            return CacheStatus(len(self._entries), self._hits, self._misses)

    # -- one call -----------------------------------------------------------------------------

    def _begin(self, key: Hashable, mine: _Running) -> "_Entry | _Running":
        """Return the cached entry or the running call; `mine` if this call is to compute it."""
        ttl = settings().cache_seconds if self._ttl is None else self._ttl
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and monotonic() - entry.made < ttl:
                self._entries.move_to_end(key)
                self._hits += 1
                return entry
            running = self._running.get(key)
            if running is not None:
                self._hits += 1
                return running
            self._misses += 1
            self._running[key] = mine
            return mine

    def _check_maker(self, found: _Running, mine: _Running) -> None:
        if found.maker is mine.maker:
            raise RuntimeError(
                f"{functions.name_of(self._function)} calls itself with the same arguments, and "
                "would wait for itself: @cached cannot answer that"
            )

    def _end(self, key: Hashable, mine: _Running, value: Any) -> None:
        size = settings().cache_entries if self._size is None else self._size
        with self._lock:
            if self._running.get(key) is mine:  # else it was invalidated meanwhile
                del self._running[key]
                self._entries[key] = _Entry(value, monotonic())
                self._entries.move_to_end(key)
                while len(self._entries) > size:
                    self._entries.popitem(last=False)
        mine.future.set_result(value)

    def _give_up(self, key: Hashable, mine: _Running, error: BaseException | None) -> None:
        """Release the callers that wait for this call, if it has not ended."""
        with self._lock:
            if self._running.get(key) is mine:
                del self._running[key]
        if mine.future.done():
            return
        # A timeout or a cancellation concerns this task alone: the other callers try themselves.
        own = isinstance(error, Exception) and not functions.is_task_timeout(error)
        mine.future.set_exception(error if own and error is not None else _Lost())


async def _answer(future: "Future[Any]") -> Any:
    """Wait for another call's result. Whoever gives up waiting must not take it from the others."""
    answer = asyncio.wrap_future(future)
    answer.add_done_callback(_look_at)
    return await asyncio.shield(answer)


def _look_at(answer: asyncio.Future[Any]) -> None:
    """Retrieve the error; else asyncio logs it when the waiter was cancelled before the answer."""
    if not answer.cancelled():
        answer.exception()


@overload
def cached(function: Callable[P, R_co], /) -> Cached[P, R_co]: ...
@overload
def cached(
    *,
    ttl: float | timedelta | None = None,
    size: int | None = None,
    key: Callable[..., Hashable] | None = None,
) -> Callable[[Callable[P, R_co]], Cached[P, R_co]]: ...
def cached(
    function: Callable[P, R_co] | None = None,
    /,
    *,
    ttl: float | timedelta | None = None,
    size: int | None = None,
    key: Callable[..., Hashable] | None = None,
) -> Cached[P, R_co] | Callable[[Callable[P, R_co]], Cached[P, R_co]]:
    """Return what the function returned for equal arguments at most `ttl` seconds ago.

    `size` results are kept, the longest unused goes first; [cache] of the configuration has the
    defaults of both. `ctx` does not count as an argument. `key` makes the key from the arguments
    that it asks for, where these cannot be a key themselves (lists, dicts).
    """
    seconds = None if ttl is None else functions.seconds("cached: ttl", ttl)
    count = None if size is None else functions.count("cached: size", size, least=1)

    def wrap(function: Callable[P, R_co]) -> Cached[P, R_co]:
        cache = _Cache(function, seconds, count, key)
        made: Any = functions.wrapped(function, cache.call, awaits=cache.awaits)
        made.invalidate, made.clear, made.status = cache.invalidate, cache.clear, cache.status
        return cast(Cached[P, R_co], made)

    return wrap if function is None else wrap(function)


def _keys(
    function: Callable[..., Any], key: Callable[..., Hashable] | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], Hashable]:
    """Return the function that makes the key of a call."""
    signature = inspect.signature(function)
    if key is not None:
        return functions.asker("cached: key", key, function)
    name = functions.name_of(function)

    def compute(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        parts = []
        for each, value in bound.arguments.items():
            if each in CONTEXT_NAMES or isinstance(value, Context):
                continue
            part: Hashable = value
            if isinstance(value, dict) and signature.parameters[each].kind is _MORE:
                part = tuple(sorted(value.items()))
            elif each == "self":
                part = _itself(value)
            try:
                hash(part)
            except TypeError:
                raise TypeError(
                    f"@cached: argument {each!r} of {name} is of type {type(value).__name__}, "
                    "which cannot be a key: give @cached(key=function) that makes one of it"
                ) from None
            # 1, 1.0 and True are equal, but different arguments.
            parts.append((each, type(value), part))
        return tuple(parts)

    return compute


_MORE = inspect.Parameter.VAR_KEYWORD


def _itself(instance: Any) -> Hashable:
    """Return an instance as a part of a key, without keeping it alive."""
    try:
        return weakref.ref(instance)
    except TypeError:
        return cast(Hashable, instance)
