"""Stop waiting for a function after a number of seconds.

An async function is cancelled, as by asyncio.timeout.

A sync function cannot be stopped from outside without harm: an exception thrown into a running
thread strikes anywhere, in a `finally` too, and not at all while the thread is inside a C call such
as a read from a socket. (The runtime does so with the task's own timeout, when the task is lost
anyway.) So the function runs in a thread of its own, and after the timeout the caller stops
waiting. That means:

- The thread runs on until the function ends by itself; its result is dropped. Its side effects are
  not, so the next try may overlap with it.
- At most ABANDONED_MAX such threads run on at once; beyond that, calls are refused.
- Things that belong to one thread (a Playwright page, an sqlite3 connection) cannot be used in it.

For I/O, the timeouts of the I/O library are better: they really end the operation.
"""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

from musterd.ipc.errors import MusterdError
from musterd.workers.toolkit import functions

P = ParamSpec("P")
R = TypeVar("R")

ABANDONED_MAX = 16  # threads that nobody waits for any more; each holds its stack and its locks

_abandoned: "set[Future[Any]]" = set()


class CallTimeout(MusterdError, TimeoutError):
    """The function took longer than its @timeout."""


def timeout(seconds: float | timedelta) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Raise CallTimeout in the caller if the function takes longer than this many seconds."""
    limit = functions.seconds("timeout: seconds", seconds)

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        if functions.is_async("timeout", function):
            coroutine = cast(Callable[P, Coroutine[Any, Any, Any]], function)
            return cast(Callable[P, R], _wrap_async(limit, coroutine))
        return _wrap_sync(limit, function)

    return wrap


def _wrap_async(
    seconds: float, function: Callable[P, Coroutine[Any, Any, Any]]
) -> Callable[P, Coroutine[Any, Any, Any]]:
    @functools.wraps(function)
    async def limited(*args: P.args, **kwargs: P.kwargs) -> Any:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await function(*args, **kwargs)
        except TimeoutError as error:
            if limit.expired():
                raise _too_long(function, seconds, "it was cancelled") from error
            raise  # the function's own error

    return limited


def _wrap_sync(seconds: float, function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(_abandoned) >= ABANDONED_MAX:
            raise CallTimeout(
                f"{functions.name_of(function)} was not called: {ABANDONED_MAX} calls that took "
                "too long are still running; use timeouts that end the work itself"
            )
        future: Future[R] = Future()
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        work = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        name = f"timeout {functions.name_of(function)}"
        thread = threading.Thread(target=_work, args=(future, work), name=name, daemon=True)
        try:
            thread.start()
            # Not future.result(seconds): its TimeoutError could not be told from the function's
            # own, nor from the task's, which may strike while we wait.
            if not done.wait(seconds):
                raise _too_long(function, seconds, "its thread runs on until it ends")
            return future.result()
        finally:
            if thread.is_alive() and not future.done():
                _abandon(future)

    return limited


def _work(future: "Future[Any]", work: Callable[[], Any]) -> None:
    try:
        value = work()
    except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
        future.set_exception(error)
        del future  # which has the error, whose traceback has this frame
    else:
        future.set_result(value)


def _abandon(future: "Future[Any]") -> None:
    _abandoned.add(future)
    future.add_done_callback(_abandoned.discard)  # at once, if it has ended meanwhile


def _too_long(function: object, seconds: float, fate: str) -> CallTimeout:
    name = functions.name_of(function)
    return CallTimeout(f"{name} took longer than its timeout of {seconds:g} s; {fate}")
