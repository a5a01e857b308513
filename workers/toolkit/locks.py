"""Named locks for the threads of a worker, always with a timeout.

    with locks.acquire("report", timeout=5): ...
    with locks.acquire_rlock("report", timeout=5): ...
    locks.run_locked("report", write, path, timeout=5)
    with locks.holding(lock, timeout=5) as held: ...    # a Lock or RLock of your own

A name is one lock, wherever it is taken. `acquire_rlock` takes that lock too, but lets in the
thread that has it already. For coroutines, and across workers, use `ctx.lock(name, timeout)`.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar, TypeVarTuple

from musterd.ipc.errors import LockTimeout
from musterd.workers.toolkit import functions
from musterd.workers.toolkit.gate import Gates, Permit

A = TypeVarTuple("A")
R = TypeVar("R")

LOCK_SECONDS = 5.0  # work that needs a lock for longer should not hold one

_gates = Gates("lock")


class Lockable(Protocol):
    """Common interface of the locks of `threading`."""

    @property
    def acquire(self) -> Any: ...
    def release(self) -> None: ...


@contextmanager
def acquire(name: str, timeout: float | timedelta = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of that name; LockTimeout if it is not free in time."""
    timeout = functions.seconds("locks.acquire: timeout", timeout, zero=True)
    if _is_mine(name):
        me = threading.current_thread().name
        raise LockTimeout(
            f"lock {name!r} is held by this very thread ({me}), which would wait for itself; "
            "use acquire_rlock",
            name,
            me,
        )
    permit = Permit(name)
    try:
        if not _gates.enter(permit, 1, timeout):
            raise _timeout(name, timeout)
        yield
    finally:
        _gates.leave(permit)


@contextmanager
def acquire_rlock(name: str, timeout: float | timedelta = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of that name; the thread that holds it may take it again."""
    if _is_mine(name):
        yield  # the outermost block releases it
    else:
        with acquire(name, timeout):
            yield


def run_locked(
    name: str, function: Callable[[*A], R], *args: *A, timeout: float | timedelta = LOCK_SECONDS
) -> R:
    """Call the function while holding the lock of that name."""
    with acquire(name, timeout):
        return function(*args)


@contextmanager
def holding(lock: Lockable, timeout: float | timedelta = LOCK_SECONDS) -> Iterator[bool]:
    """Take a lock of your own (Lock, RLock, Semaphore, Condition) and yield whether that worked in
    time; release it at the end if it was taken."""
    seconds = functions.seconds("locks.holding: timeout", timeout, zero=True)
    take = getattr(lock, "acquire", None)
    if take is None or not hasattr(lock, "release"):
        raise TypeError(f"locks.holding: {lock!r} is no lock: give a threading.Lock or RLock")
    if inspect.iscoroutinefunction(take):
        raise TypeError(
            f"locks.holding: {lock!r} is for coroutines: write "
            "`async with asyncio.timeout(5), lock:`"
        )
    held = False
    try:
        # Without waiting, a Semaphore takes no timeout at all.
        held = take(timeout=seconds) if seconds else take(blocking=False)
        yield held
    finally:
        if held:
            lock.release()


def _is_mine(name: str) -> bool:
    return _gates.holder(name) is threading.current_thread()


def _timeout(name: str, timeout: float) -> LockTimeout:
    holder = _gates.holder(name)
    whose = f"thread {holder.name} has it" if holder else "it was released just now"
    return LockTimeout(
        f"lock {name!r} was not free within {timeout:g} s: {whose}",
        name,
        holder.name if holder else "",
    )
