"""Named locks for the threads of a worker, always with a time-out.

    with locks.acquire("report", timeout=5): ...
    with locks.acquire_rlock("report", timeout=5): ...
    locks.run_locked("report", write, path, timeout=5)

A name is one lock, wherever it is taken. `acquire_rlock` takes the same lock, but lets in the
thread that has it already. For coroutines, and across workers, there is `ctx.lock(name, timeout)`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

from musterd.ipc.errors import LockTimeout
from musterd.workers.toolkit import functions
from musterd.workers.toolkit.gate import Gates, Permit

A = TypeVarTuple("A")
R = TypeVar("R")

LOCK_SECONDS = 5.0  # what needs longer under a lock should not be under one

_gates = Gates("lock")


@contextmanager
def acquire(name: str, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """Holds the lock of that name; LockTimeout if it cannot be had in time."""
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
def acquire_rlock(name: str, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """The same, but a thread that holds the lock may take it again."""
    if _is_mine(name):
        yield  # the outermost gives it back
    else:
        with acquire(name, timeout):
            yield


def run_locked(
    name: str, function: Callable[[*A], R], *args: *A, timeout: float = LOCK_SECONDS
) -> R:
    """Calls the function while holding the lock of that name."""
    with acquire(name, timeout):
        return function(*args)


def _is_mine(name: str) -> bool:
    return _gates.holder(name) is threading.current_thread()


def _timeout(name: str, timeout: float) -> LockTimeout:
    holder = _gates.holder(name)
    whose = f"thread {holder.name} has it" if holder else "it was given back just now"
    return LockTimeout(
        f"lock {name!r} could not be had within {timeout:g} s: {whose}",
        name,
        holder.name if holder else "",
    )
