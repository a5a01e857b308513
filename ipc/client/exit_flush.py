"""Deliver at the end of the program the tasks that unclosed clients still hold.

submit() returns before its task has left the process, so a script that ends right after submit()
would lose the task silently. This module knows every client until it is closed. At exit each client
gets its connect timeout to have its tasks acknowledged. Tasks without an acknowledgement are named
on stderr, and the program ends with the status that Python uses for unwritten buffers.

A fork inherits the list but delivers nothing of its parent: a client belongs to the process that
made it.
"""

import atexit
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TextIO
from weakref import WeakKeyDictionary

from musterd.ipc.client.link import Link
from musterd.ipc.errors import MusterdError

IDS_SAID_MAX = 100  # on stderr: enough to look for them, and still a readable line
# Connections of AsyncClients whose loop was closed with tasks under way; each may hold 64 MiB.
INHERITED_MAX = 16
# multiprocessing runs its own finalizers instead of atexit's, the highest number first. Ours runs
# after those of its queues, whose threads may still submit.
_PRIORITY = -100


class _Client(NamedTuple):
    link: Link
    seconds: float
    finish: Callable[[Any, float], None]  # called with the owner


_unclosed: WeakKeyDictionary[object, _Client] = WeakKeyDictionary()
_inherited: deque[Link] = deque()  # connections without a driver
_registered_in = 0  # the process that runs our exit handler


def remember(
    owner: object, link: Link, seconds: float, finish: Callable[[Any, float], None]
) -> None:
    """Call finish(owner, seconds) at the end of the program, unless forget(owner) comes first."""
    _register()
    _unclosed[owner] = _Client(link, seconds, finish)


def forget(owner: object) -> None:
    """Drop an owner that was closed."""
    _unclosed.pop(owner, None)


def inherit(link: Link, seconds: float) -> None:
    """Deliver the tasks of a connection without an owner; its listeners hear nothing any more."""
    remember(link, link, seconds, lambda link, seconds: finish(link, seconds, seconds))
    _inherited.append(link)
    if len(_inherited) > INHERITED_MAX:
        oldest = _inherited.popleft()
        forget(oldest)
        if oldest.pid == os.getpid():
            _say_undelivered(oldest, f"over {INHERITED_MAX} clients were left unclosed")
            oldest.close()


def finish(link: Link, connect_timeout: float, seconds: float) -> None:
    """Drive a connection until its tasks are acknowledged, then close it."""
    session = link.session
    for record in session.records.values():
        record._listeners = None  # listeners belong to an event loop that is closed
    give_up = time.monotonic() + seconds
    poller = select.poll()
    poller.register(link.fd, select.POLLIN)
    try:
        link.pump()
        last = session.last_request
        while not session.acknowledged_up_to(last):
            left = link.patience(connect_timeout, give_up - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"no acknowledgement came within {seconds:g} s")
            wait_ns = min(int(left * 1e9), link.wait_ns(time.monotonic_ns()))
            poller.poll(-(-wait_ns // 1_000_000))
            link.pump()
    finally:
        link.close()


def _register() -> None:
    global _registered_in
    if _registered_in == os.getpid():
        return
    first, _registered_in = not _registered_in, os.getpid()
    if first:
        atexit.register(_finish_all)  # a fork inherits it
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _finish_all, exitpriority=_PRIORITY)


def _finish_all() -> None:
    began = time.monotonic()
    complete = True
    for owner, client in list(_unclosed.items()):
        if client.link.pid == os.getpid():
            left = max(began + client.seconds - time.monotonic(), 0)
            complete &= _finish_one(owner, client, left)
        forget(owner)
    if not complete and not hasattr(sys, "last_value"):  # else Python ends with 1 anyway
        _fail()


def _finish_one(owner: object, client: _Client, seconds: float) -> bool:
    reason = "they were not acknowledged"
    try:
        client.finish(owner, seconds)
    except (MusterdError, TimeoutError, RuntimeError, OSError) as error:
        reason = str(error)
    except KeyboardInterrupt:
        reason = "interrupted"
    return _say_undelivered(client.link, reason)


def _say_undelivered(link: Link, reason: str) -> bool:
    """Name tasks not delivered or not accepted on stderr; return whether there were none."""
    session = link.session
    unsent = [record.id for record in session.records.values() if not record._acknowledged]
    if unsent:
        _say(f"{_tasks(len(unsent))} not delivered to {link.path} ({reason}): {_some(unsent)}")
    rejections, total = session.take_unreported()
    if rejections:
        ids = [rejection.id for rejection in rejections]
        what = f"{_tasks(total)} not accepted ({rejections[0].message}): {_some(ids, total)}"
        _say(what)
    return not unsent and not rejections


def _tasks(count: int) -> str:
    return "1 task was" if count == 1 else f"{count} tasks were"


def _some(ids: Iterable[str], total: int = 0) -> str:
    ids = list(ids)
    shown = ids[:IDS_SAID_MAX]
    more = max(total, len(ids)) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _say(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # stderr is closed, or its reader is gone
            print(f"musterd: {text}", file=sys.stderr)


def _fail() -> None:
    """Make Python end with status 120, as for an unflushable stdout, after all clean-up.

    An exit handler has no other way to change the status: ending the process at once would keep
    other exit handlers from running.
    """
    if sys.stderr is not None:
        sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """Stream whose last flush, made by the interpreter itself, fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        self._stream.flush()
        if finalizing():
            raise OSError("tasks were not delivered")
