"""A worker process without a process: the real runtime, which speaks to the world around it.

Messages go through memory instead of a socket, the clock is that of the world, and no signal is
needed: the world knows when the worker waits, and strikes there. Everything else is the code that
runs in a worker: decoding, handlers, interruptions, outcomes, requests, health, clean-ups.
"""

import asyncio
import gc
import logging
import math
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import msgspec

from musterd.ipc.wire.messages import Lease
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.ipc.wire.signals import INTERRUPT_SIGNAL
from musterd.ipc.wire.zmtp import Message
from musterd.supervisor.core.model import events
from musterd.testing.loop import VirtualLoop
from musterd.testing.surroundings import Surroundings
from musterd.testing.world import Stuck, WorkerKilled, World
from musterd.workers.authoring import forks
from musterd.workers.runtime.breakpoints import Breakpoints, Host
from musterd.workers.runtime.concurrent import ConcurrentRunner
from musterd.workers.runtime.handlers import Loaded, check_concurrency
from musterd.workers.runtime.mailbox import Mailbox
from musterd.workers.runtime.run import EXIT_UNHEALTHY, Runtime

KILLED = -9  # exit code of a worker that was killed
BEAT_SECONDS = 3600.0  # an idle worker looks up so often: nobody waits for a sign of life

log = logging.getLogger("musterd.testing")


def _forget_toolkit() -> None:
    """Forget what a new process would not have: open breakers, cached results."""
    breaker = sys.modules.get("musterd.workers.toolkit.breaker")
    cached = sys.modules.get("musterd.workers.toolkit.cached")
    if breaker is not None:
        breaker.breaker.reset()
    if cached is not None:
        cached.clear_all()


class LocalConnection:
    """Connection to the world, as a Mailbox needs it."""

    drained = True

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self._hear = hear
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.inbox: list[Message] = []

    def fileno(self) -> int:
        return self._fd

    def put(self, message: bytes) -> None:
        self._hear(message)

    def flush(self) -> bool:
        return True

    def receive(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        return messages

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class LocalMailbox(Mailbox):
    def __init__(self, process: "LocalProcess") -> None:
        self._process = process
        self.connection = LocalConnection(process.say)
        super().__init__(self.connection, process.board)

    def poll(self, milliseconds: int) -> bool:
        """Let the world go on for so long, or until there is a message."""
        world = self._process.world
        end_ns = world.now_ns() + milliseconds * 1_000_000 if milliseconds >= 0 else math.inf
        while not self.connection.inbox:
            if not self.running and world.over:
                break
            if world.now_ns() >= end_ns:
                return False
            due_ns = world.next_due_ns()
            # An idle worker has nothing to wait for but what the world brings.
            world.pass_time(min(end_ns, due_ns) if self.running or due_ns < math.inf else due_ns)
        return True


class LocalRuntime(Runtime):
    def __init__(self, process: "LocalProcess", loaded: Loaded, pool: str) -> None:
        self._process = process
        super().__init__(loaded, pool, process.board, process.world.clock)
        self.loop_factory = process.make_loop
        self.problem: BaseException | None = None  # why it gave up

    def _listen(self) -> None:
        self.clock.on_alarm(self._interrupts.on_signal)
        forks.watch()

    def debuggable(self, host: Host) -> Breakpoints:
        """Leave breakpoint() as it is in tests: pytest stops there."""
        self._breakpoints = Breakpoints(host, self.vaults.redact)
        return self._breakpoints

    def show_title(self, method: str) -> None:
        self._title = method

    def give_up(self, error: BaseException) -> int:
        self.problem = error
        return super().give_up(error)

    def _print(self, error: BaseException, head: str = "") -> None:
        text = head + "".join(traceback.format_exception(error))
        log.error("%s", self.vaults.redact(text))

    def _raised(self, lease: Lease, error: BaseException) -> None:
        super()._raised(lease, error)
        if self._process.dead:
            raise WorkerKilled from None
        if _is_of_the_test(error):
            raise error
        self._process.world.raised(lease.id, error)

    @property
    def has_loop(self) -> bool:
        """Whether something of the worker is async."""
        return self._is_async or self.concurrency > 1

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._make_loop()

    def check_health_now(self) -> bool:
        with self._process.limited_health():
            return super().check_health_now()

    async def check_health(self) -> bool:
        with self._process.limited_health():
            return await super().check_health()

    def struck(self, frame: FrameType | None) -> None:
        """Take the signal that follows a message."""
        self._interrupts.on_signal(INTERRUPT_SIGNAL, frame)

    async def serve_concurrently(self, mailbox: Mailbox) -> bool:
        """Run leases side by side until told to stop; return False if it is not healthy."""
        return await _Concurrent(self, mailbox, self._board).serve("")

    def finish(self) -> int:
        """Call close() and the clean-ups; return the exit code."""
        return self._finish()


def _is_of_the_test(error: BaseException) -> bool:
    """Tell whether an error is for the test, not for the worker: Ctrl-C, or pytest.fail()."""
    if isinstance(error, KeyboardInterrupt | Stuck):
        return True
    return any(kind.__module__.startswith("_pytest.") for kind in type(error).__mro__)


class _Concurrent(ConcurrentRunner):
    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear no signals: each message wakes the loop."""


class LocalProcess:
    def __init__(
        self, number: int, world: World, loaded: Loaded, surroundings: Surroundings
    ) -> None:
        self.number = number
        self.world = world
        self.dead = self.running = False
        self.problem: BaseException | None = None  # why it ended
        self.board = Scoreboard.create()
        self._surroundings = surroundings
        self._serving: asyncio.Task[bool] | None = None
        self._pause: asyncio.Future[None] | None = None
        surroundings.renew()
        _forget_toolkit()
        told = world.settings.worker
        with surroundings.inside(str):
            self.runtime = runtime = LocalRuntime(self, loaded, world.settings.pool)
            self.mailbox = LocalMailbox(self)
            runtime.health_ns = int(told.health_seconds * 1e9)
            runtime.beat_seconds = told.health_seconds or BEAT_SECONDS
            runtime.concurrency = told.concurrency
            if told.concurrency > 1:
                check_concurrency(loaded, told.concurrency)
            runtime.prepare(msgspec.msgpack.encode(world.settings.options))

    # -- life ---------------------------------------------------------------------------------

    def run(self, call: Callable[[], int | None]) -> int | None:
        """Call this as code of the worker; return its exit code, if it has come to its end."""
        if self.running:
            raise RuntimeError(
                "the worker is at work: its handlers, their stand-ins and what after() calls "
                "cannot wait for a task of this worker; let the test itself wait"
            )
        if self.dead:
            return KILLED
        if threading.get_ident() != self.world.thread:
            raise RuntimeError("use the worker in the thread that has opened it")
        if self.runtime.has_loop and asyncio._get_running_loop() is not None:
            raise RuntimeError(
                "the worker has an event loop of its own, which cannot run inside another one: "
                "write `def test_...`, not `async def test_...`"
            )
        self.running = True
        try:
            with self._surroundings.inside(self.runtime.vaults.redact):
                code = call()
        except WorkerKilled:
            return KILLED
        except BaseException:
            self.dead = True  # what has begun cannot go on
            raise
        finally:
            self.running = False
        return KILLED if self.dead else code

    def open(self) -> int | None:
        """Make the worker and say hello; return the exit code if open() raises."""
        return self.run(self._open)

    def _open(self) -> int | None:
        runtime = self.runtime
        try:
            runtime.open(0)
        except WorkerKilled:
            raise
        except BaseException as error:  # noqa: BLE001 - also the sys.exit() of an open()
            code = runtime.give_up(error)
            runtime.clean_up()
            return code
        runtime.begin(self.mailbox)
        if runtime.concurrency > 1:
            self._serving = runtime.loop.create_task(runtime.serve_concurrently(self.mailbox))
            runtime.loop.run_until_complete(asyncio.sleep(0))  # to its hello
        else:
            self.mailbox.hello("")
        return None

    def turn(self) -> int | None:
        """Run what there is to run, or wait; return the exit code at the end of the worker."""
        return self.run(self._turn_of_several if self._serving else self.runtime.turn)

    def _turn_of_several(self) -> int | None:
        serving, runtime = self._serving, self.runtime
        assert serving is not None
        self._pause = runtime.loop.create_future()
        both: set[asyncio.Future[Any]] = {serving, self._pause}
        runtime.loop.run_until_complete(asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))
        if not serving.done():
            return None
        return runtime.finish() if serving.result() else EXIT_UNHEALTHY

    def check_health(self) -> int | None:
        """Have the worker say whether it is well; return its exit code if it is not."""

        def check() -> int | None:
            runtime = self.runtime
            if self._serving is None:
                healthy = runtime.check_health_now()
            else:
                healthy = runtime.loop.run_until_complete(runtime.check_health())
            return None if healthy else EXIT_UNHEALTHY

        return self.run(check)

    @contextmanager
    def limited_health(self) -> Iterator[None]:
        """Kill the worker if its healthy() takes too long, as the core does in a daemon."""
        limit_ns = self.world.settings.health_timeout_ns
        if not limit_ns:
            yield
            return
        entry = self.world.at(limit_ns / 1e9, self.kill)
        try:
            yield
        finally:
            self.world.drop(entry)

    def make_loop(self) -> asyncio.AbstractEventLoop:
        loop = VirtualLoop(self.world)
        loop.knows(self.mailbox.fd)
        return loop

    def end(self) -> None:
        """Release everything, as the end of a process does."""
        self.problem = self.runtime.problem
        killed = self.dead
        try:
            with warnings.catch_warnings(), self._surroundings.inside(str):
                if killed:
                    # The kernel closes what a killed process leaves open, and nobody is warned.
                    warnings.simplefilter("ignore", ResourceWarning)
                    if self.runtime.has_loop:
                        self.runtime.loop.set_exception_handler(lambda *_: None)
                self.runtime.end()
                self.world.clock.on_alarm(None)
                if killed:
                    vars(self.runtime).clear()
                    gc.collect()
        finally:
            self.mailbox.connection.close()
            self.board.close()

    def exit_event(self, code: int) -> tuple[events.WorkerExited, dict[int, int]]:
        """Return the end of this worker as a daemon learns of it, and when its leases had begun."""
        self.board.set_exit(code)
        reading = self.board.read()
        event = events.WorkerExited(
            self.number,
            code,
            reading.lease or reading.unsent,
            reading.last_words,
            unhealthy=reading.unhealthy,
            beside=tuple(lease for lease, _ in reading.beside),
        )
        return event, dict(((event.lease, reading.since_ns), *reading.beside))

    # -- as the world sees it -----------------------------------------------------------------

    def say(self, frame: bytes) -> None:
        """Send a message to the world."""
        if self.dead:
            raise WorkerKilled
        self.world.hear(self.number, frame)
        self.world.strike(None)

    def obey(self, frame: bytes) -> None:
        self.mailbox.connection.inbox.append(frame)
        self.mailbox.connection.wake()

    def strike(self, frame: FrameType | None) -> None:
        if self._serving is None:
            self.runtime.struck(frame)

    def kill(self) -> None:
        self.dead = True
        self.nudge()

    def read_board(self) -> events.BoardRead:
        return events.BoardRead(self.number, *self.board.pulse())

    def nudge(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)
        elif self._serving is None:
            self.mailbox.connection.wake()
