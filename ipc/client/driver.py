"""Threads take turns at one Link, so that a round trip needs no hop to an I/O thread.

One lock protects the link. A caller that waits becomes the *driver*: it polls the descriptor
outside the lock and pumps under it. Callers that wait meanwhile are *followers*: each sleeps on a
lock of its own, which the driver opens when the follower's condition holds. A driver that leaves
hands over to a follower. A background thread, started with the first task, is the driver of last
resort: it sends what submit() left in the batch after LINGER, drives when no caller does, and runs
the on_done callbacks. While callers are active, the background thread only looks in every BACKOFF.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from inspect import iscoroutine
from typing import Any, TypeVar

from musterd.ipc.client import exit_flush
from musterd.ipc.client.link import Link, give_up_at
from musterd.ipc.client.record import TaskRecord
from musterd.ipc.client.session import COALESCE_TASKS
from musterd.ipc.errors import NotConnected

LINGER_MS = 1  # longest wait of a task in the batch for company
LINGER_MAX_MS = 8  # the same while callers fill batches: each look costs them the interpreter
BACKOFF_MS = 50  # how long the background thread stays away while callers are active
QUIET_TURNS = 20  # quiet turns (a second) before the thread parks: waking it costs a caller time
FOLLOWER_SECONDS = 1.0  # how often a follower looks up, in case its driver vanished

Callback = Callable[[Any], object]  # called with the handle that was submitted
Changed = TypeVar("Changed")

log = logging.getLogger("musterd.client")


# States of the background thread.
_ABSENT = 0  # not started
_PARKED = 1  # sleeps until it is roused
_BACKOFF = 2  # stays away for a while
_DRIVE = 3  # polls the link
_LINGER = 4  # lets the batch gather
_CALLING = 5  # runs callbacks
_AWAKE = 6  # roused or about to decide: it will see all work there is


class _Follower:
    __slots__ = ("done", "gate")

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.gate = threading.Lock()
        self.gate.acquire()

    def open(self) -> None:
        if self.gate.locked():
            self.gate.release()


class Driver:
    """Threading of a Client."""

    def __init__(self, link: Link, connect_timeout: float) -> None:
        self.link = link
        self.session = link.session
        self.lock = threading.Lock()
        self.closed = False
        self.connect_timeout = connect_timeout
        self._pid = link.pid
        self._driving = False  # a caller drives
        # turns of callers; the background thread sees by it whether callers are active
        self._turns = 0
        self._followers: list[_Follower] = []
        self._poller = select.poll()
        self._poller.register(link.fd, select.POLLIN)
        self._mode = _ABSENT
        self._thread: threading.Thread | None = None
        self._rouse_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._deferred = 0  # tasks that submit() left in the batch
        self._callbacks: deque[tuple[Callback, TaskRecord]] = deque()
        self._callbacks_open = 0  # on_done of tasks that have not ended
        exit_flush.remember(self, link, connect_timeout, Driver.finish)

    @property
    def usable_here(self) -> bool:
        """Tell whether this is the process that made the client."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise if this client cannot be used in this process or any more."""
        self._check_open()
        if not self.usable_here:
            self.link.check_process()

    def _check_open(self) -> None:
        if self.closed:
            raise NotConnected("this client is closed; make a new one")

    # -- callers ------------------------------------------------------------------------------

    def add(self, record: TaskRecord, on_done: Callback | None = None) -> None:
        """Submit a task now, or after at most LINGER_MS of gathering company."""
        self.check()
        session = self.session
        with self.lock:
            self._add(record, on_done)
            self._turns += 1
            mode = self._mode
            if session.due or mode == _CALLING:
                self._pump()
                if mode <= _PARKED:
                    self._rouse()
            else:
                self._deferred += 1
                if mode < _LINGER:
                    self._rouse()

    def add_all(self, tasks: Iterable[tuple[TaskRecord, Callback | None]]) -> None:
        """Submit many tasks, in as few messages as possible."""
        self.check()
        with self.lock:
            for record, on_done in tasks:
                self._add(record, on_done)
            self._pump_and_leave()

    def _add(self, record: TaskRecord, on_done: Callback | None) -> None:
        self._check_open()
        if self.session.full:
            self._wait(self._has_room, None, "the acknowledgement of earlier tasks")
        self.session.add(record)
        if on_done is not None:
            self._callbacks_open += 1
            record._listen(partial(self._queue_callback, on_done))
            if self._mode <= _BACKOFF:
                self._rouse()

    def _queue_callback(self, callback: Callback, record: TaskRecord) -> None:
        if record._ending is not None:  # listeners hear of the acknowledgement too
            self._callbacks_open -= 1
            self._callbacks.append((callback, record))

    def tell(self, change: Callable[[int], Changed]) -> Changed:
        """Change the session under the lock and send the resulting messages."""
        self.check()
        with self.lock:
            self._check_open()
            changed = change(time.monotonic_ns())
            self._pump_and_leave()
        return changed

    def _pump_and_leave(self) -> None:
        self._turns += 1
        self._pump()
        if self._mode <= _PARKED:
            self._rouse()

    def wait(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until done() holds; TimeoutError says that `what` did not come."""
        self.check()
        with self.lock:
            self._wait(done, timeout, what)

    def flush(self, timeout: float | None) -> None:
        """Wait until every task submitted so far is acknowledged or rejected."""
        session = self.session
        if session.unacked_tasks:
            self.tell(session.seal)
            last = session.last_request
            self.wait(
                lambda: session.acknowledged_up_to(last),
                timeout,
                f"the acknowledgement of {session.unacked_tasks} tasks",
            )

    def _wait(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        give_up = give_up_at(timeout)
        self._turns += 1
        self.link.hurry()
        self._pump()
        try:
            while not done():
                seconds = self._patience_of_caller(give_up)
                if seconds <= 0:
                    raise self.link.late(what, timeout or 0.0, self.connect_timeout)
                if self._driving:
                    self._follow(done, seconds)
                else:
                    self._drive(done, seconds)
        finally:
            self._turns += 1
            self._hand_over()

    def _patience_of_caller(self, give_up: float) -> float:
        """Return how long to wait before the next look; raise if waiting is pointless."""
        if self.closed:
            raise NotConnected("this client was closed meanwhile")
        seconds = min(give_up - time.monotonic(), FOLLOWER_SECONDS)
        return self.link.patience(self.connect_timeout, seconds)

    def _hand_over(self) -> None:
        """Find another driver when a caller leaves and nobody drives."""
        if self._driving:
            return
        if self._followers:
            for follower in self._followers if self.closed else self._followers[:1]:
                follower.open()
        elif self._callbacks_open and self._mode == _BACKOFF:
            self._rouse()

    def _drive(self, done: Callable[[], bool], seconds: float) -> None:
        """Drive the link until done() holds or the time is over."""
        give_up_ns = time.monotonic_ns() + int(seconds * 1e9)
        self._driving = True
        try:
            while not done() and not self.closed and not self.session.refusal:
                now_ns = time.monotonic_ns()
                if now_ns >= give_up_ns:
                    return
                wait_ns = min(give_up_ns - now_ns, self.link.wait_ns(now_ns))
                self.lock.release()
                try:
                    self._poller.poll(-(-wait_ns // 1_000_000))
                finally:
                    self.lock.acquire()
                self._pump()
        finally:
            self._driving = False

    def _follow(self, done: Callable[[], bool], seconds: float) -> None:
        """Sleep until done() holds, the driver leaves, or the time is over."""
        follower = _Follower(done)
        self._followers.append(follower)
        self.lock.release()
        try:
            follower.gate.acquire(timeout=seconds)
        finally:
            self.lock.acquire()
            self._followers.remove(follower)

    def _has_room(self) -> bool:
        return not self.session.full

    def _pump(self) -> None:
        """Pump the link and wake followers whose condition holds; the lock is held."""
        if self.closed:
            return
        session = self.session
        self.link.pump()
        if session.progress:
            session.progress = False
            for follower in self._followers:
                if follower.done() or session.refusal:
                    follower.open()
            if self._callbacks and self._mode < _CALLING:
                self._rouse()

    # -- the background thread ----------------------------------------------------------------

    def _rouse(self) -> None:
        """Make the background thread decide again; the lock is held."""
        if self.closed:
            return
        if self._thread is None:
            self._mode = _AWAKE
            self._thread = threading.Thread(target=self._run, name="musterd-client", daemon=True)
            self._thread.start()
        else:
            os.eventfd_write(self._rouse_fd, 1)
            self._mode = _AWAKE

    def _run(self) -> None:
        alone, with_link = select.poll(), select.poll()
        alone.register(self._rouse_fd, select.POLLIN)
        with_link.register(self._rouse_fd, select.POLLIN)
        with_link.register(self.link.fd, select.POLLIN)
        deferred = turns = quiet = 0
        linger_ms = LINGER_MS
        while True:
            with self.lock:
                if self.closed:
                    break
                active = self._driving or turns != self._turns
                mode = self._mode = self._choose(active, deferred != self._deferred, quiet)
                quiet = 0 if active or mode != _BACKOFF else quiet + 1
                filled = self._deferred - deferred >= COALESCE_TASKS // 4
                linger_ms = min(2 * linger_ms, LINGER_MAX_MS) if filled else LINGER_MS
                deferred, turns = self._deferred, self._turns
                milliseconds = linger_ms if mode == _LINGER else self._patience(mode)
                if mode == _CALLING:
                    self._pump()  # the batch must not wait for user code
            if mode == _CALLING:
                self._run_callbacks()
                continue
            events = (with_link if mode == _DRIVE else alone).poll(milliseconds)
            with self.lock:
                self._mode = _AWAKE
                if any(fd == self._rouse_fd for fd, _ in events):
                    os.eventfd_read(self._rouse_fd)
                if (mode == _LINGER and self.session.gathering) or (
                    mode == _DRIVE and not self._driving
                ):
                    self._pump()
        self._run_callbacks()

    def _choose(self, active: bool, lingering: bool, quiet: int) -> int:
        if self._callbacks:
            return _CALLING
        if lingering or self.session.gathering:
            return _LINGER
        if active and (self._driving or not self._callbacks_open):
            return _BACKOFF
        if self.session.busy:
            return _DRIVE
        return _BACKOFF if quiet < QUIET_TURNS else _PARKED

    def _patience(self, mode: int) -> int:
        if mode == _BACKOFF:
            return BACKOFF_MS
        if mode == _PARKED:
            return -1
        return -(-self.link.wait_ns(time.monotonic_ns()) // 1_000_000)

    def _run_callbacks(self) -> None:
        while self._callbacks:
            callback, record = self._callbacks.popleft()
            try:
                outcome = callback(record)
                if iscoroutine(outcome):
                    outcome.close()
                    log.error(
                        "on_done callback %r of task %s returned a coroutine, which was not run: "
                        "Client has no event loop, use AsyncClient",
                        *(callback, record.id),
                    )
            except Exception:
                log.exception("on_done callback %r of task %s failed", callback, record.id)

    # -- the end ------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Flush and close at the end of the program; abandon a callback that hangs."""
        give_up = time.monotonic() + seconds
        try:
            self.flush(seconds)
        finally:
            self.close(max(give_up - time.monotonic(), 0))

    def close(self, timeout: float | None = None) -> None:
        """Release everything; callers that still wait get NotConnected.

        The background thread may be in a user's callback. If the thread is still there after the
        timeout, what it uses stays open.
        """
        if not self.usable_here:
            return  # a fork has nothing of its own to close
        exit_flush.forget(self)
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for follower in self._followers:
                follower.open()
            while self._driving:  # the driver polls the descriptor for at most LOOK_UP_NS more
                self._follow(lambda: not self._driving, FOLLOWER_SECONDS)
            if self._thread is not None:
                os.eventfd_write(self._rouse_fd, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                return
        with self.lock:
            self.link.close()
            os.close(self._rouse_fd)
