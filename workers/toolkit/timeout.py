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
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

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
        awaits = functions.is_async("timeout", function)
        call: Callable[..., Any] = function

        async def limited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            work = functools.partial(call, *args, **kwargs)
            name = functions.name_of(function)
            return await _awaited(limit, work, name) if awaits else _in_thread(limit, work, name)

        return functions.wrapped(function, limited, awaits=awaits)

    return wrap


async def _awaited(seconds: float, work: Callable[[], Awaitable[Any]], name: str) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work()
    except TimeoutError as error:
        if limit.expired():
            raise _too_long(name, seconds, "it was cancelled") from error
        raise  # the function's own error


def _in_thread(seconds: float, work: Callable[[], Any], name: str) -> Any:
    if len(_abandoned) >= ABANDONED_MAX:
        raise CallTimeout(
            f"{name} was not called: {ABANDONED_MAX} calls that took too long are still running; "
            "use timeouts that end the work itself"
        )
    future: Future[Any] = Future()
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    inside = functools.partial(contextvars.copy_context().run, work)
    thread = threading.Thread(
        target=_work, args=(future, inside), name=f"timeout {name}", daemon=True
    )
    try:
        thread.start()
        # Not future.result(seconds): its TimeoutError could not be told from the function's own,
        # nor from the task's, which may strike while we wait.
        if not done.wait(seconds):
            raise _too_long(name, seconds, "its thread runs on until it ends")
        return future.result()
    finally:
        if thread.is_alive() and not future.done():
            _abandon(future)


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


def _too_long(name: str, seconds: float, fate: str) -> CallTimeout:
    return CallTimeout(f"{name} took longer than its timeout of {seconds:g} s; {fate}")
