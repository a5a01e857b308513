"""Timeouts of async handlers: the asyncio task is cancelled, again and again until it ends.

All of these clocks can stand, while a person debugs one of the handlers (breakpoints.py).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from musterd.ipc.wire.messages import Lease
from musterd.workers.authoring import forks
from musterd.workers.authoring.base import TaskTimeout

# How often an async handler that swallowed the cancellation gets it again: another cancellation
# would end its clean-up, so this is half of the five seconds until the supervisor kills its worker.
SWALLOWED_ASYNC_NS = 2_500_000_000
CHAIN_LENGTH_MAX = 64  # errors that led to an error; a chain can be made a ring by hand


async def within_time(
    coroutine: Coroutine[Any, Any, Any], pool: str, lease: Lease
) -> tuple[Any, BaseException | None]:
    """Return an async handler's value and error, TaskTimeout for one; never raise, because
    SystemExit would break the loop."""
    limit = _Limit(lease.timeout_ns / 1e9) if lease.timeout_ns else None
    try:
        value = await coroutine
        forks.leave_if_child()
        return value, None
    except BaseException as error:  # noqa: BLE001 - handed on
        forks.leave_if_child(error)
        if limit is not None and limit.strikes and _says_no_more(error):
            late = too_long(pool, lease)
            late.__cause__ = error
            return None, late
        return None, error
    finally:
        if limit is not None:
            limit.end()


def hold_limits() -> None:
    """Stop the clock of all async handlers."""
    for limit in _limits:
        limit.hold()


def free_limits() -> None:
    """Let the clock of all async handlers go on."""
    for limit in _limits:
        limit.go_on()


class _Limit:
    """Cancels the asyncio task that made it after this many seconds, and again until end()."""

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._strike)
        self._left: float | None = None  # seconds, while the clock stands
        self.strikes = 0
        _limits.add(self)

    def _strike(self) -> None:
        self.strikes += 1
        self._timer = self._loop.call_later(SWALLOWED_ASYNC_NS / 1e9, self._strike)
        self._task.cancel()

    def hold(self) -> None:
        """Stop the clock."""
        if self._left is None:
            self._left = max(0.0, self._timer.when() - self._loop.time())
            self._timer.cancel()

    def go_on(self) -> None:
        """Let the clock go on."""
        if self._left is not None:
            self._timer = self._loop.call_later(self._left, self._strike)
            self._left = None

    def end(self) -> None:
        _limits.discard(self)
        self._timer.cancel()
        for _ in range(self.strikes):
            self._task.uncancel()


_limits: set[_Limit] = set()  # of the handlers that run


def _says_no_more(error: BaseException) -> bool:
    """Tell whether the error of an async handler only says that it was cancelled.

    An error raised `from None` says why the handler took so long, which the user wants to know.
    """
    from_none = error.__suppress_context__ and error.__cause__ is None
    return not from_none and comes_of(error, asyncio.CancelledError)


def comes_of(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Tell whether the error is one of these, or was raised because of one."""
    for _ in range(CHAIN_LENGTH_MAX):
        if error is None or isinstance(error, kinds):
            return error is not None
        error = error.__cause__ or error.__context__
    return False


def too_long(pool: str, lease: Lease) -> TaskTimeout:
    return TaskTimeout(
        f"task {pool}.{lease.method} ran longer than its timeout of {lease.timeout_ns / 1e9:g} s"
    )
