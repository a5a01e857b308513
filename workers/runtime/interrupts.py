"""Run a handler so that signals can interrupt its code, and no other code.

The main loop reads the mailbox between leases, and a signal handler reads it while a handler runs:
the supervisor sends INTERRUPT_SIGNAL after a message that cannot wait, and a timer (SIGALRM) wakes
us for soft timeouts and for results that have waited long enough.

Python runs signal handlers in the main thread between two bytecodes, wherever that is. What they
may do depends on one flag, `_window`, which is True only while a handler's code runs:

    window closed   the main loop is at work: leave a note (`noted`) and go
    window open     the mailbox is free: read it, send results, and raise TaskTimeout or
                    TaskInterrupted, but only if the interrupted code is not our own

The main loop looks at the note before each lease, and `call` once more right after it has opened
the window, so no signal is lost; a signal that may not raise where it struck sets the timer to
come again. Under an async handler nothing is raised: its asyncio task is cancelled instead.

Code may swallow either exception: a bare `except:`, a `__del__`, a library that drops errors. So
both are raised again and again until the attempt ends, but never in a handler that has heard: while
a handler deals with the first one, in its `except` and `finally` blocks, it is left to clean up.
For an async handler that cannot be seen from outside, so the pause before the next one is longer.
"""

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from musterd.ipc.wire.debugger_messages import DebuggerLine
from musterd.ipc.wire.messages import HandlerAnswer, Lease, Progress
from musterd.ipc.wire.signals import DUMP_SIGNAL, INTERRUPT_SIGNAL
from musterd.workers.authoring import forks
from musterd.workers.authoring.base import Context, TaskInterrupted, TaskTimeout
from musterd.workers.authoring.clock import Clock, SystemClock
from musterd.workers.runtime.breakpoints import Breakpoints
from musterd.workers.runtime.limits import (
    SWALLOWED_ASYNC_NS,
    comes_of,
    free_limits,
    hold_limits,
    too_long,
    within_time,
)
from musterd.workers.runtime.mailbox import FLUSH_NS, Mailbox

STRIKE_AGAIN_NS = 1_000_000  # after a signal that struck our own code: the handler's is near
# How often a handler that swallowed the exception gets it again, until the supervisor kills its
# worker five seconds after the first.
SWALLOWED_NS = 100_000_000
# A signal can overtake the message it announces, which waits while the kernel has no room for it.
# So we look again after 1, 4, 16, 64 and 256 ms; by then the message was read, or was none.
LOOK_GAP_NS, LOOK_GAP_FACTOR, LOOK_GAP_NS_MAX = 1_000_000, 4, 256_000_000
PUSH_NS = 10_000_000  # between two tries to send what the supervisor has not taken
ALARM_SECONDS_MIN = 10e-6  # 0 would switch the timer off
# The timer repeats until Python has seen it: a signal right before a system call does not interrupt
# that call, and a handler that sleeps for a minute would hear of the signal only afterwards.
ALARM_AGAIN_SECONDS = 0.01
NEVER = 2**63 - 1
# Code that a handler calls into and that must not be left half done.
OUR_MODULES = frozenset(
    (
        "musterd.ipc.wire.codec",
        "musterd.ipc.wire.zmtp",
        "musterd.workers.authoring.lock",
        "musterd.workers.authoring.request_channel",
        "musterd.workers.authoring.state",
        "musterd.workers.authoring.vault",
        "musterd.workers.metrics",
        "musterd.workers.runtime.breakpoints",
        "musterd.workers.runtime.debugger",
        "musterd.workers.runtime.interrupts",
        "musterd.workers.runtime.limits",
        "musterd.workers.runtime.mailbox",
        "musterd.workers.texts",
        *("bdb", "cmd", "pdb"),
    )
)

INTERRUPTED = "the task was cancelled while its handler ran"
NOT_BEGUN = "the task was cancelled before its handler began"


class _Woken(Exception):
    """Ends the wait of an idle worker."""


class Interrupts:
    """Signals of a worker. `mailbox` is set before anything is called or waited for."""

    mailbox: Mailbox
    breakpoints: Breakpoints
    number: Callable[[], int]  # returns the number of the next question

    def __init__(self, pool: str, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._now_ns = self._clock.now_ns
        self.noted = False  # a signal came: attend() is due
        self._pool = pool
        self._window = False
        # the running lease
        self._lease: Lease | None = None
        self._context: Context | None = None
        self._deadline_ns = NEVER  # when TaskTimeout is due
        self._held_ns = NEVER  # when it would be due, while the clock stands
        self._interrupt = False  # TaskInterrupted is due
        self._strike_ns = 0  # nothing is raised before: the last one was a moment ago
        self._asyncio_task: asyncio.Task[Any] | None = None
        # the wait of an idle worker
        self._idle = False
        self._asking = False  # a handler waits for an answer
        self._idle_event: asyncio.Event | None = None
        self._idle_loop: asyncio.AbstractEventLoop | None = None
        self._futures: dict[
            int, asyncio.Future[HandlerAnswer]
        ] = {}  # request -> the future that a coroutine awaits
        # signals that came, and the timer
        self._terms = self._terms_seen = 0
        self._alarm_ns = NEVER  # when the timer will fire
        self._look_ns = NEVER  # when to look into the mailbox again
        self._look_gap_ns = 0

    def listen(self) -> None:
        """Install handlers for the time of open(): TERM still ends the process, as nothing has
        begun."""
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True, chain=False)
        # People send USR1 to see what a worker does; without a handler it would end the worker.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
        # The terminal's Ctrl-C belongs to the supervisor. Ignored, not handled, because children
        # inherit that: Ctrl-C must not end our browser either.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # System calls are not restarted after our signals: a restarted read() would keep Python
        # from running the signal handler until data come. Python repeats its own calls itself.
        self._clock.on_alarm(self.on_signal)
        signal.signal(INTERRUPT_SIGNAL, self.on_signal)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGALRM, INTERRUPT_SIGNAL, DUMP_SIGNAL}
        )
        os.register_at_fork(after_in_child=_forget_signals)
        forks.watch()

    def obey(self, mailbox: Mailbox) -> None:
        """Take TERM as: finish what runs, then end."""
        self.mailbox = mailbox
        os.register_at_fork(after_in_child=mailbox.sever)
        signal.signal(signal.SIGTERM, self.on_signal)

    def rest(self) -> None:
        """Stop the timer: nothing will run any more."""
        self._clock.set_alarm(0)

    # -- running a handler --------------------------------------------------------------------

    def call(
        self,
        handler: Callable[..., Any],
        context: Context,
        arguments: dict[str, Any],
        lease: Lease,
        began_ns: int,
    ) -> Any:
        """Return what the handler returns; raise its error, TaskTimeout or TaskInterrupted."""
        self._lease, self._context, self._interrupt = lease, context, False
        self._strike_ns = 0
        deadline_ns = began_ns + lease.timeout_ns if lease.timeout_ns else NEVER
        self._deadline_ns = deadline_ns
        mailbox, alarm_ns = self.mailbox, self._alarm_ns
        if (
            deadline_ns < alarm_ns
            or (mailbox.done and mailbox.done_ns + FLUSH_NS < alarm_ns)
            or mailbox.unsent
        ):
            self._arm(deadline_ns, began_ns)
        try:
            self._window = True
            if self.noted:
                self.on_signal(0, None)
            if self._interrupt:
                raise TaskInterrupted(NOT_BEGUN)
            return handler(context, **arguments)
        finally:
            self._window = False
            self._deadline_ns = NEVER
            self._lease = self._context = None

    def call_async(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Callable[..., Coroutine[Any, Any, Any]],
        context: Context,
        arguments: dict[str, Any],
        lease: Lease,
    ) -> Any:
        """Do the same as call() for an async handler."""
        self._lease, self._context, self._interrupt = lease, context, False
        self._strike_ns = 0
        self._arm(NEVER, self._now_ns())
        try:
            if self.noted:
                self.attend()
            if self._interrupt:
                raise TaskInterrupted(NOT_BEGUN)
            attempt = within_time(handler(context, **arguments), self._pool, lease)
            self._asyncio_task = loop.create_task(attempt)
            self._window = True
            if self.noted:
                self.on_signal(0, None)
            value, error = loop.run_until_complete(self._asyncio_task)
        finally:
            self._window = False
            self._asyncio_task = None
            if self._futures:
                self._forget_futures(loop)
            self._lease = self._context = None
        if error is not None:
            raise error
        return value

    # -- what a running handler asks for ------------------------------------------------------

    @property
    def running(self) -> int:
        """Lease whose handler's code runs, 0 for none."""
        return self._lease.lease if self._lease is not None and self._window else 0

    @property
    def own_task(self) -> "asyncio.Task[Any] | None":
        """Asyncio task of the running async handler."""
        return self._asyncio_task

    @property
    def begun(self) -> int:
        """Lease that has begun and not ended, 0 for none."""
        return self.mailbox.running

    @property
    def asks(self) -> int:
        """Number of answers that are awaited."""
        return len(self.mailbox.asked)

    @property
    def is_async(self) -> bool:
        """Whether the running handler is async."""
        return self._asyncio_task is not None

    def send(self, frame: bytes) -> None:
        """Send a message of the running handler that is not answered."""
        self._window = False
        self.mailbox.send(frame)
        self._window = True
        if self.noted or self.mailbox.unsent:
            self.on_signal(0, None)

    def ask(self, request: int, frame: bytes) -> HandlerAnswer:
        """Send a question of the running handler and wait for the answer.

        The window is closed meanwhile: signals leave their notes, and attend() serves them here,
        where the handler has called and exceptions may be raised.
        """
        mailbox = self.mailbox
        answers: list[HandlerAnswer] = []
        self._window = False
        self._asking = True
        try:
            mailbox.asked[request] = answers.append
            mailbox.flush()
            mailbox.send(frame)
            while not answers:
                if self.noted or self._poll(self._milliseconds_left()):
                    self.attend()
                if not answers:
                    self._raise_due()
        finally:
            self._asking = False
            mailbox.asked.pop(request, None)
            self._window = True
            if self.noted:
                self.on_signal(0, None)
        return answers[0]

    # -- a debugger: see breakpoints.Host -----------------------------------------------------

    @property
    def debuggable(self) -> int:
        """Lease whose handler's code runs, 0 for none."""
        return self.running

    def hold(self) -> None:
        """Stop the clock of the running handler."""
        self._held_ns, self._deadline_ns = self._deadline_ns, NEVER
        hold_limits()

    def move_deadlines(self, by_ns: int) -> None:
        if self._context is not None:
            self._context.deadline += by_ns / 1e9

    def go_on(self, stood_ns: int) -> None:
        """Let the clock go on, which stood for so long."""
        if self._lease is not None and self._held_ns != NEVER:
            self._deadline_ns = self._held_ns + stood_ns
            self._arm(self._deadline_ns, self._now_ns())
        self._held_ns = NEVER
        free_limits()

    def interrupt(self) -> None:
        """Raise in a handler that has to stop; asyncio does that for an async one."""
        if self._interrupt and not self.is_async:
            self._raise_due()

    def ask_debugger(self, request: int, frame: bytes) -> DebuggerLine | None:
        """Ask and wait for the answer; None if the task has to stop instead."""
        mailbox = self.mailbox
        answers: list[DebuggerLine] = []
        self._window = False
        self._asking = True
        try:
            mailbox.asked[request] = answers.append
            mailbox.flush()
            mailbox.send(frame)
            while not answers and not self._interrupt and not mailbox.lost:
                if self.noted or self._poll(-1):
                    self.attend()
        finally:
            self._asking = False
            mailbox.asked.pop(request, None)
            mailbox.break_in = None  # nothing has run that could be stopped
            self._window = True
            if self.noted or self._interrupt:
                self.on_signal(0, None)
        return answers[0] if answers else None

    def _break_in(self, frame: FrameType | None) -> None:
        """Stop the debugged code, if it was interrupted, or look again in a moment."""
        order, breakpoints = self.mailbox.break_in, self.breakpoints
        debugger = breakpoints.debugger
        if debugger is None or order is None or order.lease != breakpoints.lease:
            self.mailbox.break_in = None
        elif frame is None or frame.f_globals.get("__name__") in OUR_MODULES:
            now_ns = self._now_ns()
            self._wake_at(now_ns + STRIKE_AGAIN_NS, now_ns)
        else:
            self.mailbox.break_in = None
            if order.leave:
                debugger.leave()
            else:
                debugger.break_in(frame, now=not self.is_async)

    def _milliseconds_left(self) -> int:
        due_ns, now_ns = self._due_ns(), self._now_ns()
        if due_ns == NEVER:
            return -1
        if due_ns <= now_ns and _is_heard():
            due_ns = now_ns + SWALLOWED_NS
        return max(0, -(-(due_ns - now_ns) // 1_000_000))

    def _raise_due(self) -> None:
        now_ns = self._now_ns()
        if now_ns >= self._due_ns() and not _is_heard():
            raise self._blow(now_ns)

    async def ask_async(self, request: int, frame: bytes) -> HandlerAnswer:
        """Ask for an async handler; asyncio does its timeout and cancellation."""
        mailbox = self.mailbox
        loop = asyncio.get_running_loop()
        future: asyncio.Future[HandlerAnswer] = loop.create_future()
        self._futures[request] = future
        mailbox.asked[request] = lambda answer: loop.call_soon_threadsafe(_settle, future, answer)
        loop.add_reader(mailbox.fd, self.on_signal, 0, None)
        try:
            self.send(frame)
            return await future
        finally:
            mailbox.asked.pop(request, None)
            if self._futures.pop(request, None) is not None and not self._futures:
                loop.remove_reader(mailbox.fd)

    def _forget_futures(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel answers that are still awaited after the handler's end."""
        loop.remove_reader(self.mailbox.fd)
        self.mailbox.asked.clear()
        for future in self._futures.values():
            loop.call_soon(future.cancel)
        self._futures.clear()

    def report(self, progress: Progress) -> None:
        """Send the progress now, or the newest when the gap is over; from any thread."""
        mailbox = self.mailbox
        mailbox.progress = progress
        now_ns = self._now_ns()
        if now_ns >= mailbox.progress_ns and threading.current_thread() is threading.main_thread():
            self.on_signal(0, None)
        elif mailbox.progress_ns < self._alarm_ns:
            self._wake_at(max(mailbox.progress_ns, now_ns), now_ns)

    def _too_long(self) -> TaskTimeout:
        assert self._lease is not None
        return too_long(self._pool, self._lease)

    # -- waiting ------------------------------------------------------------------------------

    def wait(self, seconds: float, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Wait for a message or a TERM; return False if there was neither."""
        if loop is not None:
            return loop.run_until_complete(self._wait_in_loop(loop, seconds))
        return self._poll(int(seconds * 1000))

    def _poll(self, milliseconds: int) -> bool:
        """Return whether a message or a signal came; -1 waits without limit."""
        try:
            self._idle = True
            # Not receive(): the exception of a signal could strike in the middle of it.
            ready = self.noted or self.mailbox.poll(milliseconds)
            self._idle = False
        except _Woken:
            return True
        return ready

    async def _wait_in_loop(self, loop: asyncio.AbstractEventLoop, seconds: float) -> bool:
        """Wait inside the event loop, so that an idle worker's connections stay alive."""
        mailbox = self.mailbox
        event = asyncio.Event()
        self._idle_loop, self._idle_event = loop, event
        loop.add_reader(mailbox.fd, event.set)
        if mailbox.unsent:
            loop.add_writer(mailbox.fd, event.set)
        try:
            if not self.noted:
                async with asyncio.timeout(seconds):
                    await event.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(mailbox.fd)
            loop.remove_writer(mailbox.fd)
            self._idle_event = None
        return True

    def _end_wait(self) -> None:
        if self._idle_event is not None and self._idle_loop is not None:
            self._idle_loop.call_soon_threadsafe(self._idle_event.set)
        elif self._idle:
            self._idle = False
            raise _Woken

    # -- signals ------------------------------------------------------------------------------

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take a signal, as Python calls it; 0 is no signal, but a look at what is due."""
        if number == signal.SIGALRM:
            self._clock.set_alarm(0)
            self._alarm_ns = NEVER
        elif number == signal.SIGTERM:
            self._terms += 1
        elif number == INTERRUPT_SIGNAL:
            self._look_gap_ns = LOOK_GAP_NS
            self._look_ns = self._now_ns() + LOOK_GAP_NS
        self.noted = True
        if not self._window:
            if number == signal.SIGTERM or self._asking:
                self._end_wait()
            return
        while self.noted:
            self._window = False  # a signal that comes meanwhile leaves its note
            self.attend()
            self._window = True
        if self.mailbox.break_in is not None:
            self._break_in(frame)
        self._strike(frame)

    def attend(self) -> None:
        """Do everything a signal may have come for, except to raise. The window is closed."""
        self.noted = False
        mailbox = self.mailbox
        if self._terms > self._terms_seen:
            self._terms_seen = self._terms
            # told before, by a message or a signal: now running tasks must end
            if mailbox.stopping:
                mailbox.cancelled = True
            mailbox.stop()
        mailbox.receive()
        mailbox.flush()
        if mailbox.cancelled:
            mailbox.cancelled = False
            self._interrupt = True
            if self._context is not None:
                self._context.cancelled = True
        now_ns = self._now_ns()
        if now_ns >= self._look_ns:
            self._look_gap_ns *= LOOK_GAP_FACTOR
            over = self._look_gap_ns > LOOK_GAP_NS_MAX
            self._look_ns = NEVER if over else now_ns + self._look_gap_ns
        due_ns = self._due_ns()  # _strike() deals with what is due by now
        next_ns = min(due_ns, self._look_ns) if due_ns > now_ns else self._look_ns
        if mailbox.progress is not None:
            if now_ns >= mailbox.progress_ns:
                mailbox.send_progress(now_ns)
            else:
                next_ns = min(next_ns, mailbox.progress_ns)
        self._arm(next_ns, now_ns)

    def _strike(self, frame: FrameType | None) -> None:
        """Raise in the handler what is due, if the handler's code was interrupted."""
        now_ns = self._now_ns()
        if now_ns < self._due_ns():
            return
        task = self._asyncio_task
        if task is not None:
            self._strike_ns = now_ns + SWALLOWED_ASYNC_NS
            self._arm(self._strike_ns, now_ns)
            task.get_loop().call_soon_threadsafe(task.cancel, INTERRUPTED)
        elif frame is None or frame.f_globals.get("__name__") in OUR_MODULES:
            self._wake_at(now_ns + STRIKE_AGAIN_NS, now_ns)
        elif _is_heard():
            self._strike_ns = now_ns + SWALLOWED_NS
            self._arm(self._strike_ns, now_ns)
        else:
            raise self._blow(now_ns)

    def _due_ns(self) -> int:
        """Return when the handler must next be told to stop; NEVER if it may go on."""
        if self._interrupt:
            return self._strike_ns
        return max(self._deadline_ns, self._strike_ns)

    def _blow(self, now_ns: int) -> BaseException:
        """Return what to raise now; the next one is due a little later."""
        self._strike_ns = now_ns + SWALLOWED_NS
        self._arm(self._strike_ns, now_ns)
        return TaskInterrupted(INTERRUPTED) if self._interrupt else self._too_long()

    def _arm(self, when_ns: int, now_ns: int) -> None:
        """Set the timer, unless it fires early enough anyway: it runs on across leases."""
        if self.mailbox.done:
            when_ns = min(when_ns, self.mailbox.done_ns + FLUSH_NS)
        if self.mailbox.unsent:
            when_ns = min(when_ns, now_ns + PUSH_NS)
        if when_ns < self._alarm_ns:
            self._wake_at(when_ns, now_ns)

    def _wake_at(self, when_ns: int, now_ns: int) -> None:
        self._alarm_ns = when_ns  # first: if the old timer fires now, this one is set all the same
        seconds = max((when_ns - now_ns) / 1e9, ALARM_SECONDS_MIN)
        self._clock.set_alarm(seconds, ALARM_AGAIN_SECONDS)


def _is_heard() -> bool:
    """Tell whether the interrupted code deals with an earlier exception of ours."""
    return comes_of(sys.exception(), TaskTimeout, TaskInterrupted)


def _settle(future: "asyncio.Future[HandlerAnswer]", answer: HandlerAnswer) -> None:
    if not future.done():
        future.set_result(answer)


def _forget_signals() -> None:
    """Restore default signals in a handler's fork, which must end when it is told to."""
    for number in (signal.SIGTERM, signal.SIGALRM, INTERRUPT_SIGNAL):
        signal.signal(number, signal.SIG_DFL)
