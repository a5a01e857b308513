"""Several tasks at once in one worker: the pool's `concurrency`, for tasks that are all async.

Everything happens in one event loop. Each attempt is an asyncio task with a request channel, a
vault and a line of its own; asyncio does timeouts and cancellations, and no signal ever raises.
A handler that blocks instead of awaiting holds up all others: then only the supervisor's deadline
helps, which ends the worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.debugger_messages import DebuggerLine
from musterd.ipc.wire.messages import Completion, HandlerAnswer, Lease, Progress
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.ipc.wire.signals import INTERRUPT_SIGNAL
from musterd.ipc.wire.waits import tell_waits
from musterd.workers.authoring import outcome
from musterd.workers.authoring.base import Context
from musterd.workers.authoring.request_channel import RequestChannel
from musterd.workers.runtime.interrupts import INTERRUPTED, NOT_BEGUN
from musterd.workers.runtime.limits import SWALLOWED_ASYNC_NS, free_limits, hold_limits
from musterd.workers.runtime.mailbox import PROGRESS_GAP_NS, Mailbox
from musterd.workers.runtime.speech import speaking
from musterd.workers.runtime.waiting import Speaker, Waiter, current

if TYPE_CHECKING:
    from musterd.workers.runtime.run import Runtime


LOOK_MS = 100  # while somebody debugs: signals only leave notes, and wake no poll


class ConcurrentRunner:
    def __init__(self, runtime: Runtime, mailbox: Mailbox, board: Scoreboard) -> None:
        self._runtime = runtime
        self._now_ns = runtime.clock.now_ns
        self._mailbox = mailbox
        self._board = board
        self._width = runtime.concurrency
        self._free = list(range(self._width))  # rows of the board
        self._running: dict[int, tuple[asyncio.Task[None], Context, Line]] = {}  # lease -> attempt
        self._numbers = count(1)
        self._wake = asyncio.Event()
        self._broken: BaseException | None = None  # a mistake of ours: the worker ends
        self._terms = 0  # SIGTERMs that came
        self._breakpoints = runtime.debuggable(self)

    async def serve(self, token: str) -> bool:
        """Run leases until told to stop; return False if the worker is not healthy any more."""
        loop, mailbox = asyncio.get_running_loop(), self._mailbox
        self.listen(loop)
        self._board.widen(self._width)
        mailbox.interrupt = self._interrupt
        mailbox.hello(token, self._width)
        checked_ns = self._now_ns()
        mailbox.full = partial(loop.add_writer, mailbox.fd, self._push)
        loop.add_reader(mailbox.fd, self._wake.set)
        try:
            while True:
                self._wake.clear()
                mailbox.receive()
                if mailbox.break_in is not None:
                    self._break_in()
                if mailbox.lost:
                    self._desert()
                self._begin()
                if self._broken is not None:
                    raise self._broken
                if mailbox.stopping and not self._running:
                    return True
                if await self._something(self._runtime.beat_seconds) or self._running:
                    continue
                now_ns = self._now_ns()
                self._board.beat(now_ns)
                health_ns = self._runtime.health_ns
                if health_ns and now_ns - checked_ns >= health_ns:
                    if not await self._runtime.check_health():
                        return False
                    checked_ns = self._now_ns()
        finally:
            loop.remove_reader(mailbox.fd)
            loop.remove_writer(mailbox.fd)
            mailbox.full = mailbox.wait_for_room

    async def _something(self, seconds: float) -> bool:
        """Wait for something to look at; return whether it came before the time is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _push(self) -> None:
        """Send what waits, now that there is room."""
        if self._mailbox.push():
            asyncio.get_running_loop().remove_writer(self._mailbox.fd)

    def _desert(self) -> None:
        """Give up the running leases: nobody will hear of them, and epoll would report the closed
        connection forever."""
        asyncio.get_running_loop().remove_reader(self._mailbox.fd)
        for lease in list(self._running):
            self._interrupt(lease)

    # -- leases -------------------------------------------------------------------------------

    def _begin(self) -> None:
        queue = self._mailbox.queue
        while queue and self._free:
            lease, row = queue.popleft(), self._free.pop()
            now_ns = self._now_ns()
            self._board.begin_row(row, lease.lease, now_ns)
            line = Line(self._mailbox, self._now_ns)
            vault = self._runtime.vaults.new()
            channel = RequestChannel(line, self._runtime.worker, vault, self._numbers)
            context = Context(lease.id, lease.attempt, channel=channel, lease=lease)
            running = asyncio.get_running_loop().create_task(
                self._run(lease, context, channel, line, now_ns)
            )
            self._running[lease.lease] = (running, context, line)
            running.add_done_callback(self._ender(lease.lease, row))
            self._runtime.show_title(f"{len(self._running)} at once")

    async def _run(
        self, lease: Lease, context: Context, channel: RequestChannel, line: Line, began_ns: int
    ) -> None:
        line.begun = lease.lease
        current.set(Speaker(line, asyncio.current_task()))
        speaking.set(lease.id)
        if context.cancelled:
            completion = Completion(lease.lease, 0, b"", outcome.cancelled(NOT_BEGUN))
        else:
            completion = await self._runtime.attempt(lease, context, channel, began_ns)
        line.close()
        self._mailbox.complete(completion, began_ns + completion.run_ns)
        self._mailbox.flush()

    def _ender(self, lease: int, row: int) -> Callable[[asyncio.Task[None]], None]:
        def ended(task: asyncio.Task[None]) -> None:
            del self._running[lease]
            if task.cancelled():
                self._broken = RuntimeError(f"lease {lease} was cancelled outside of its handler")
            elif task.exception() is not None:
                self._broken = task.exception()
            else:
                self._board.end_row(row, self._now_ns())
                self._free.append(row)
            self._runtime.show_title(f"{len(self._running)} at once" if self._running else "")
            self._wake.set()

        return ended

    def _interrupt(self, lease: int) -> bool:
        """Interrupt this lease; return whether it runs."""
        entry = self._running.get(lease)
        if entry is None:
            return False
        _, context, line = entry
        if not context.cancelled:
            context.cancelled = True
            if line.begun:  # else the attempt sees the interruption by itself
                self._strike(lease)
        return True

    def _strike(self, lease: int) -> None:
        """Cancel the attempt, again until it ends: a handler may swallow a cancellation."""
        entry = self._running.get(lease)
        if entry is not None:
            task, _, line = entry
            if line.begun:
                task.cancel(INTERRUPTED)
            again = SWALLOWED_ASYNC_NS / 1e9
            asyncio.get_running_loop().call_later(again, self._strike, lease)

    # -- a debugger: see breakpoints.Host -----------------------------------------------------

    @property
    def debuggable(self) -> int:
        """Lease of the attempt whose code calls this, 0 for none."""
        speaker = current.get()
        return speaker.line.running if speaker is not None else 0

    def number(self) -> int:
        return next(self._numbers)

    def hold(self) -> None:
        hold_limits()

    def move_deadlines(self, by_ns: int) -> None:
        for _, context, _ in self._running.values():
            context.deadline += by_ns / 1e9

    def go_on(self, stood_ns: int) -> None:
        free_limits()

    def interrupt(self) -> None:
        """Raise nothing: asyncio does."""

    def ask_debugger(self, request: int, frame: bytes) -> DebuggerLine | None:
        """Ask and wait for the answer, which holds up the event loop; None if the task has to stop
        instead."""
        mailbox, (_, context, _) = self._mailbox, self._running[self._breakpoints.lease]
        answers: list[DebuggerLine] = []
        mailbox.asked[request] = answers.append
        mailbox.send(frame)
        while not (answers or context.cancelled or mailbox.lost or self._terms):
            if mailbox.poll(LOOK_MS):
                mailbox.receive()
        mailbox.asked.pop(request, None)
        mailbox.break_in = None
        self._wake.set()  # to see what else has come
        return answers[0] if answers else None

    def send(self, frame: bytes) -> None:
        self._mailbox.send(frame)

    def _break_in(self) -> None:
        """Stop the debugged handler at its next line; it does not run now, or waits."""
        order, self._mailbox.break_in = self._mailbox.break_in, None
        debugger = self._breakpoints.debugger
        if debugger is not None and order is not None and order.lease == self._breakpoints.lease:
            if order.leave:
                debugger.leave()
            else:
                debugger.break_in(sys._getframe(), now=False)

    # -- signals ------------------------------------------------------------------------------

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make this process hear the signals of a worker, and tell for which tasks it waits."""

        def heard(number: int, _: object) -> None:
            self._terms += number == signal.SIGTERM
            if not loop.is_closed():
                loop.call_soon_threadsafe(
                    self._terminate if number == signal.SIGTERM else self._wake.set
                )

        waiter = Waiter(self._mailbox, lambda: next(self._numbers), None, lambda: None)
        tell_waits(waiter.begin)
        os.register_at_fork(after_in_child=self._mailbox.sever)
        signal.signal(signal.SIGTERM, heard)
        signal.signal(INTERRUPT_SIGNAL, heard)

    def _terminate(self) -> None:
        if self._mailbox.stopping:  # told before: now running tasks must end
            for lease in list(self._running):
                self._interrupt(lease)
        self._mailbox.stop()
        self._wake.set()


class Line:
    """Messages of one attempt to the supervisor; see request_channel.Line."""

    is_async = True

    def __init__(self, mailbox: Mailbox, now_ns: Callable[[], int]) -> None:
        self._mailbox = mailbox
        self._now_ns = now_ns
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[HandlerAnswer]] = {}
        self._progress: Progress | None = None  # the newest, not sent yet
        self._progress_ns = 0  # when the next may be sent
        self.begun = 0
        self._telling = False

    @property
    def running(self) -> int:
        return self.begun

    @property
    def asks(self) -> int:
        return len(self._futures)

    def send(self, frame: bytes) -> None:
        self._mailbox.send(frame)

    def ask(self, request: int, frame: bytes) -> HandlerAnswer:
        raise AssertionError("an async handler awaits its answers")  # see RequestChannel.check()

    async def ask_async(self, request: int, frame: bytes) -> HandlerAnswer:
        future: asyncio.Future[HandlerAnswer] = self._loop.create_future()
        self._futures[request] = future
        self._mailbox.asked[request] = future.set_result
        try:
            self.send(frame)
            return await future
        finally:
            self._mailbox.asked.pop(request, None)
            self._futures.pop(request, None)

    def report(self, progress: Progress) -> None:
        """Send the progress now, or the newest when the gap is over; from any thread."""
        self._progress = progress
        if not self._telling:
            self._telling = True
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        now_ns = self._now_ns()
        if now_ns < self._progress_ns:
            self._loop.call_later((self._progress_ns - now_ns) / 1e9, self._tell)
            return
        self._telling = False
        self._send_progress(now_ns)

    def _send_progress(self, now_ns: int) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            self._progress_ns = now_ns + PROGRESS_GAP_NS
            self.send(encode(progress))

    def close(self) -> None:
        """End the attempt: its last progress goes before the result, and awaited answers are
        cancelled."""
        self._send_progress(self._now_ns())
        self.begun = 0
        for future in self._futures.values():
            future.cancel()
