"""AsyncClient: Client with `await`, on the running event loop and without threads."""

import asyncio
import logging
import math
import os
import time
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable
from types import TracebackType
from typing import Any, Self

from musterd.ipc.client import exit_flush, history
from musterd.ipc.client.async_submit import AsyncSubmitting, AsyncTaskHandle, OnDone
from musterd.ipc.client.calls import Decode, Names
from musterd.ipc.client.changes import AsyncChangeReader, Following
from musterd.ipc.client.handle import (
    EXIT_FLUSH_SECONDS,
    checked_seconds,
    unreported_error,
)
from musterd.ipc.client.history import KeptResult
from musterd.ipc.client.link import Link, give_up_at
from musterd.ipc.client.record import Inspection, TaskRecord
from musterd.ipc.client.schedules import AsyncSchedules
from musterd.ipc.client.taskspec import checked_id, checked_invalidation
from musterd.ipc.errors import HistoryUnavailable, MusterdError, NotConnected, UnknownSchedule
from musterd.ipc.wire import waits
from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import Change, History, TaskSpec

log = logging.getLogger("musterd.client")


class AsyncClient(AsyncSubmitting):
    """Connection to the supervisor for the asyncio tasks of one event loop.

    `socket` is the path of tasks.sock, by default $MUSTERD_TASKS or where this machine's daemon has
    it; or the address of a cluster, "postgresql://...". NotConnected if nobody answers within
    `connect_timeout` seconds.
    """

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, connect_timeout: float = 5.0
    ) -> None:
        self._unclosed = False  # until there is something to close
        seconds = checked_seconds("connect_timeout", connect_timeout)
        self._link = Link(socket)
        self._session = self._link.session
        self._names = Names(self._session)
        self._connect_timeout = seconds
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        # Waiting callers. A record's listener wakes a caller without a condition; a caller with a
        # condition is woken after each progress that fulfils it. The end wakes all of them.
        self._waiting: dict[asyncio.Future[None], Callable[[], bool] | None] = {}
        self._conditions = 0
        self._callbacks: set[asyncio.Future[None]] = set()  # callbacks that are being awaited
        self._unclosed = True
        self.schedules = AsyncSchedules(self)
        exit_flush.remember(self, self._link, seconds, AsyncClient._finish)

    def __repr__(self) -> str:
        return f"<AsyncClient {self._link.path}>"

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if not self._unclosed or os.getpid() != self._link.pid:
            return
        if not self._closed:
            if self._session.unacked_tasks:  # the event loop was closed before the acknowledgement
                exit_flush.inherit(self._link, self._connect_timeout)
            else:
                self._link.close()
        warn(f"unclosed {self!r}: use `async with` or close()", ResourceWarning, source=self)

    async def __aenter__(self) -> Self:
        self._running_loop()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
            return
        try:  # the first error matters more than a second one from close()
            await self.close(timeout=EXIT_FLUSH_SECONDS)
        except (MusterdError, TimeoutError) as second:
            log.warning("leaving the client after an error: %s", second)

    async def task(self, task_id: str) -> AsyncTaskHandle[Any]:
        """Return the handle of a task submitted before, by this client or another."""
        self._running_loop()
        handle = self._session.records.get(checked_id(task_id))
        if handle is None:
            handle = AsyncTaskHandle(task_id, "", None, self)
            self._session.watch(handle)
            self._pump()
        assert isinstance(handle, AsyncTaskHandle)
        return handle

    def changes(
        self, *schedules: str, timeout: float | None = None
    ) -> AsyncChangeReader[AsyncTaskHandle[Any]]:
        """Yield a change whenever a schedule with `notify = "task.changed"` has a new result.

        Covers the named schedules, or all of them, from this call on. Survives restarts of the
        daemon and lost connections: changes that were missed are delivered, as far as history has
        kept them. TimeoutError if the next change takes longer than `timeout`.

        A change has `before` and `after`, the `fields` that differ, a unified `diff`, `at`, the
        `task` that found it, and `again` if the daemon may have told it before.
        """
        self._running_loop()
        following, session = Following(schedules), self._session
        session.follow(following)
        self._pump()
        return AsyncChangeReader(
            following,
            partial(self._wait, following.any_unread, timeout, "the next change"),
            self.task,
            partial(self._recall, timeout=timeout),
            look_back=partial(self._look_back, timeout=timeout),
            stop=partial(session.unfollow, following),
        )

    async def history(
        self, schedule: str, n: int = 20, timeout: float | None = None
    ) -> list[KeptResult]:
        """Return the last `n` different results of a schedule with `notify`, oldest first.

        UnknownSchedule if there is none of this name.
        """
        return await self._ask_history(history.question(schedule, n), timeout)

    async def _recall(self, change: Change, timeout: float | None) -> list[KeptResult]:
        """Return the results of a change that the daemon has kept."""
        if not change.number:
            return []
        try:
            return await self._ask_history(history.question_about(change), timeout)
        except (HistoryUnavailable, UnknownSchedule):  # not kept there; the schedule was removed
            return []

    async def _look_back(self, change: Change, timeout: float | None) -> list[HistoryEntry]:
        """Return all that history has of the schedule of a change."""
        return (await self._ask_entries(History(0, change.schedule), timeout)).entries

    async def _ask_history(self, question: History, timeout: float | None) -> list[KeptResult]:
        return history.results_of(await self._ask_entries(question, timeout))

    async def _ask_entries(self, question: History, timeout: float | None) -> Entries:
        inspection = self._session.history(self._now_ns(), question)
        await self._wait_for_answer(inspection, timeout, f"the history of {question.schedule!r}")
        assert inspection.entries is not None
        return inspection.entries

    async def invalidate(
        self, key: str = "", *, prefix: str | None = None, timeout: float | None = None
    ) -> None:
        """Forget the cached results of a key, or of all keys with a prefix; return when done."""
        text, many = checked_invalidation(key, prefix)
        inspection = self._session.invalidate(self._now_ns(), text, many)
        await self._wait_for_answer(inspection, timeout, f"the invalidation of {text!r}")

    async def recommended_workers(self, timeout: float | None = None) -> dict[str, int]:
        """Return how many workers memory allows in each pool."""
        inspection = self._session.advise(self._now_ns())
        await self._wait_for_answer(inspection, timeout, "the recommended number of workers")
        return inspection.workers

    async def flush(self, timeout: float | None = None) -> None:
        """Return when every task submitted so far is stored; raise if one was rejected unseen."""
        self._link.check_process()
        await self._acknowledged(timeout)
        error = unreported_error(self._session)
        if error is not None:
            raise error

    async def _acknowledged(self, timeout: float | None) -> None:
        session = self._session
        if session.unacked_tasks:
            session.seal(self._now_ns())
            last = session.last_request
            what = f"the acknowledgement of {session.unacked_tasks} tasks"
            await self._wait(lambda: session.acknowledged_up_to(last), timeout, what)

    async def close(self, timeout: float | None = None) -> None:
        """Flush, then close the connection; handles of unfinished tasks stay unfinished.

        Waits for on_done callbacks of finished tasks until the timeout.
        """
        self._unclosed = False
        if self._closed or os.getpid() != self._link.pid:
            return  # a fork has nothing of its own to close
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        try:
            await self.flush(timeout)
            left = None if timeout is None else max(give_up - time.monotonic(), 0)
            await self._called_back(left)
        finally:
            self._release()

    def _finish(self, seconds: float) -> None:
        """Get all tasks acknowledged at the end of the program, with or without the event loop."""
        loop = self._loop
        if loop is not None and loop.is_running():  # in another thread, which nobody joins
            waiting = asyncio.run_coroutine_threadsafe(self._acknowledged(seconds), loop)
            try:
                waiting.result(seconds)
            finally:
                waiting.cancel()
            return
        self._closed = True
        self._waiting.clear()
        exit_flush.finish(self._link, self._connect_timeout, seconds)

    # -- the loop -----------------------------------------------------------------------------

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of this client, which is the loop of its first use."""
        if self._closed:
            raise NotConnected("this client is closed; make a new one")
        self._link.check_process()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._link.fd, self._pump)
        elif self._loop is not loop:
            raise RuntimeError("this AsyncClient belongs to another event loop: make one for each")
        return loop

    def _now_ns(self) -> int:
        self._running_loop()
        return time.monotonic_ns()

    def _call_soon(self, on_done: OnDone, record: TaskRecord) -> None:
        assert isinstance(record, AsyncTaskHandle)
        if record._ending is not None and self._loop is not None:
            self._loop.call_soon(self._call, on_done, record)

    def _call(self, on_done: OnDone, handle: AsyncTaskHandle[Any]) -> None:
        try:
            outcome = on_done(handle)
        except Exception:
            log.exception("on_done callback %r of task %s failed", on_done, handle.id)
            return
        if isawaitable(outcome):
            callback = asyncio.ensure_future(_awaited(outcome, on_done, handle))
            self._callbacks.add(callback)
            callback.add_done_callback(self._callbacks.discard)

    async def _called_back(self, timeout: float | None) -> None:
        """Wait until the callbacks of finished tasks are done."""
        await asyncio.sleep(0)  # let the callbacks of this turn begin
        others = self._callbacks - {asyncio.current_task()}  # a callback may close the client
        if others:
            await asyncio.wait(others, timeout=timeout)

    def _new_handle(self, spec: TaskSpec, returns: Decode | None) -> AsyncTaskHandle[Any]:
        return AsyncTaskHandle(spec.id, spec.name, spec, self, returns)

    async def _send(self, handle: AsyncTaskHandle[Any]) -> None:
        """Send the task now, or together with all others that this turn of the loop submits."""
        loop = self._running_loop()
        if self._session.full:
            await self._wait_for_room()
        self._session.add(handle)
        if self._session.due:
            self._pump()
        else:
            self._pump_soon(loop)

    async def _send_all(self, handles: list[AsyncTaskHandle[Any]]) -> None:
        """Send many tasks, in as few messages as possible."""
        self._running_loop()
        for handle in handles:
            if self._session.full:
                await self._wait_for_room()
            self._session.add(handle)
        self._pump()

    async def _wait_for_answer(
        self, inspection: Inspection, timeout: float | None, what: str
    ) -> None:
        try:
            await self._wait(lambda: inspection.answered, timeout, what)
        finally:
            if not inspection.answered:
                self._session.drop(inspection)

    async def _wait_for_room(self) -> None:
        what = "the acknowledgement of earlier tasks"
        await self._wait(lambda: not self._session.full, None, what)

    def _pump_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._soon is None:
            self._soon = loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Pump the link and wake the callers whose condition holds."""
        if self._closed or self._loop is None or os.getpid() != self._link.pid:
            return
        self._soon = None
        session = self._session
        self._link.pump()
        if session.progress:
            session.progress = False
            if self._conditions or session.refusal:
                self._wake(lambda done: bool(session.refusal) or (done is not None and done()))
        if session.busy and (self._timer is None or self._link.connection is None):
            # set before the connection was lost, so it would fire too late
            if self._timer is not None:
                self._timer.cancel()
            seconds = self._link.wait_ns(time.monotonic_ns()) / 1e9
            self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()

    def _wake(self, chosen: Callable[[Callable[[], bool] | None], bool]) -> None:
        for future, done in self._waiting.items():
            if not future.done() and chosen(done):
                future.set_result(None)

    async def _wait(
        self,
        done: Callable[[], bool],
        timeout: float | None,
        what: str,
        record: TaskRecord | None = None,
    ) -> None:
        """Wait until done() holds; with `record`, only that record changes done()."""
        give_up = give_up_at(timeout)
        self._pump_soon(self._running_loop())
        if self._link.hurry():
            self._pump()
        while not done():
            seconds = self._patience(give_up)
            if seconds <= 0:
                self._pump()  # a last look, and the only one when the timeout is 0
                if done():
                    return
                raise self._link.late(what, timeout or 0.0, self._connect_timeout)
            await self._sleep(done, seconds, record)

    async def _wait_for_tasks(
        self,
        done: Callable[[], bool],
        timeout: float | None,
        what: str,
        ids: list[str],
        record: TaskRecord | None = None,
    ) -> None:
        """Wait until done() holds, which the end of one of these tasks causes."""
        wake = partial(_call_in, self._running_loop(), partial(self._wake, lambda _: True))
        with waits.reported(ids, done, wake) as over:
            await self._wait(over, timeout, what, record)

    def _patience(self, give_up: float) -> float:
        """Return how long to wait before the next look; raise if waiting is pointless."""
        if self._closed:
            raise NotConnected("this client was closed meanwhile")
        return self._link.patience(self._connect_timeout, give_up - time.monotonic())

    async def _sleep(
        self, done: Callable[[], bool], seconds: float, record: TaskRecord | None
    ) -> None:
        """Sleep until the future is set or the time is over."""
        loop = self._running_loop()
        future: asyncio.Future[None] = loop.create_future()
        listener = partial(_set, future)
        if record is not None:
            record._listen(listener)
        self._waiting[future] = done if record is None else None
        self._conditions += record is None
        timer = loop.call_later(seconds, _set, future) if seconds < math.inf else None
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()
            del self._waiting[future]
            self._conditions -= record is None
            if record is not None and record._listeners is not None:
                record._listeners.remove(listener)

    def _release(self) -> None:
        self._closed = True
        exit_flush.forget(self)
        self._wake(lambda _: True)
        for pending in (self._timer, self._soon):
            if pending is not None:
                pending.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._link.fd)
        self._link.close()


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call from any thread, even from a signal handler."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def _set(future: "asyncio.Future[None]", _: object = None) -> None:
    if not future.done():
        future.set_result(None)


async def _awaited(
    outcome: Awaitable[object], on_done: OnDone, handle: AsyncTaskHandle[Any]
) -> None:
    try:
        await outcome
    except Exception:
        log.exception("on_done callback %r of task %s failed", on_done, handle.id)
