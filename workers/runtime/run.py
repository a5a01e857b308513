"""Life of a worker process: open the worker, run leases one at a time or several, end."""

import asyncio
import inspect
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import setproctitle

from musterd.ipc.errors import ProtocolError
from musterd.ipc.secrets.lookup import MissingSecret
from musterd.ipc.secrets.reference import SECRET_MARK
from musterd.ipc.signatures import INVALID_ARGUMENTS
from musterd.ipc.user_code import turn_down
from musterd.ipc.watching.view import look
from musterd.ipc.wire.environment import LOG_LEVEL_VARIABLE
from musterd.ipc.wire.messages import Completion, Failure, Lease
from musterd.ipc.wire.scoreboard import EXIT_UNHEALTHY, Scoreboard
from musterd.ipc.wire.waits import tell_waits
from musterd.workers.authoring import closing, forks, outcome, settings
from musterd.workers.authoring.base import Context, Worker
from musterd.workers.authoring.clock import Clock, SystemClock
from musterd.workers.authoring.request_channel import RequestChannel
from musterd.workers.authoring.session import twice
from musterd.workers.authoring.vault import Vault, Vaults, access_of
from musterd.workers.metrics import metrics
from musterd.workers.runtime import breakpoints
from musterd.workers.runtime.breakpoints import Breakpoints
from musterd.workers.runtime.concurrent import ConcurrentRunner
from musterd.workers.runtime.handlers import (
    LIFE_CYCLE,
    Handler,
    Loaded,
    WorkerLoadError,
    check_concurrency,
)
from musterd.workers.runtime.handlers import load as load_class
from musterd.workers.runtime.interrupts import Interrupts
from musterd.workers.runtime.limits import within_time
from musterd.workers.runtime.mailbox import COMPLETIONS_MAX, Mailbox, connect
from musterd.workers.runtime.retrying import Retrying
from musterd.workers.runtime.speech import Formatter, Voice, find_voice, speaking
from musterd.workers.runtime.waiting import Waiter

__all__ = [
    "EXIT_FAILED",
    "EXIT_UNHEALTHY",
    "Loaded",
    "WorkerLoadError",
    "check_concurrency",
    "load",
    "run",
]

EXIT_FAILED = 1  # open() or close() raised, or the supervisor is gone

Understood = tuple[Handler, Callable[..., Any], dict[str, Any]]  # a handler, ready to be called


class Called(Protocol):
    """Identity of this worker; both wait until the supervisor has told it."""

    @property
    def index(self) -> int: ...
    @property
    def token(self) -> str: ...


def run(
    loaded: Loaded,
    *,
    pool: str,
    called: Callable[[], Called],
    socket: str,
    board_fd: int,
    options: bytes,
    health_seconds: float,
    beat_seconds: float,
    concurrency: int = 1,
    threads: dict[str, int] | None = None,
    cache_seconds: float = 0.0,
    cache_entries: int = 0,
    sessions: bytes = b"",
    artefacts: bytes = b"",
) -> int:
    """Live the whole life of a freshly forked worker; return its exit code.

    `called` waits for the identity of this worker. Everything independent of that is done before.
    While idle the worker stamps its board every `beat_seconds` and calls healthy() every
    `health_seconds`, never if that is 0. It runs `concurrency` tasks at once. The other parameters
    are for the worker's own code: see workers/authoring/settings.py.
    """
    settings.use(threads or {}, cache_seconds, cache_entries, sessions, artefacts)
    board = Scoreboard.attach(board_fd)
    metrics.take()  # the import has counted once, not in every worker
    runtime = Runtime(loaded, pool, board)
    runtime.health_ns, runtime.beat_seconds = int(health_seconds * 1e9), beat_seconds
    runtime.concurrency = concurrency
    try:
        Formatter.redact = metrics.redact = runtime.vaults.redact
        threading.excepthook = runtime.thread_failed
        sys.unraisablehook = runtime.unraisable
        runtime.prepare(options)
        try:
            mailbox = Mailbox(connect(socket), board)
        except (OSError, ProtocolError) as error:
            return runtime.give_up(error)
        try:
            who = called()
            try:
                runtime.open(who.index)
            except BaseException as error:  # noqa: BLE001 - also the sys.exit() of an open()
                code = runtime.give_up(error)
                runtime.clean_up()
                return code
            return runtime.serve(mailbox, who.token)
        finally:
            mailbox.close()
    finally:
        runtime.end()
        board.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed by a handler, or None
                stream.flush()


def load(worker: str) -> Loaded:
    """Import the worker class and prepare what all its workers share."""
    find_voice()
    breakpoints.install()
    loaded = load_class(worker)
    _log_to_stderr()
    return loaded


def _log_to_stderr() -> None:
    """Send handlers' log records where the supervisor reads, unless the worker's module chose."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info")
    turn_down(level)
    root = logging.getLogger()
    if not root.handlers:
        stream = logging.StreamHandler()
        stream.setFormatter(Formatter(marks=isinstance(sys.stderr, Voice)))
        root.addHandler(stream)
        root.setLevel(logging.INFO)
        logging.captureWarnings(True)  # warnings quote addresses as well
        # ctx.log and messages about states: at the daemon's log level.
        logging.getLogger("musterd").setLevel(level.upper())


class Runtime:
    """A worker: prepare(), open(), then serve() or begin() and turn() again and again, end()."""

    worker: Worker
    _mailbox: Mailbox
    _channel: RequestChannel
    _breakpoints: Breakpoints
    health_ns = 0
    beat_seconds = 1.0
    concurrency = 1
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None  # None: asyncio's own

    def __init__(
        self, loaded: Loaded, pool: str, board: Scoreboard, clock: Clock | None = None
    ) -> None:
        self._loaded = loaded
        self.pool = pool
        self._board = board
        self.clock: Clock = clock or SystemClock()
        self._now_ns = self.clock.now_ns
        self.vaults = Vaults(access_of(os.environ, pool))
        self.vault = self.vaults.new()  # of the lease that runs
        self._interrupts = Interrupts(pool, self.clock)
        self._retrying = Retrying(self._await)
        self._checked_ns = 0  # when healthy() was called last
        self._index = 0
        self._options: dict[str, Any] = {}
        self._is_async = False
        self._title = ""
        self._opened = 0
        self._handlers: dict[str, tuple[Handler, Callable[..., Any]]] = {}
        self._runner: asyncio.Runner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # only where something is async

    def prepare(self, options: bytes) -> None:
        """Prepare everything that is cheap and comes before the worker's own code."""
        self._listen()
        factory = self._loaded.factory
        parts: list[Any] = [handler.function for handler in self._loaded.handlers]
        if factory is not None:
            parts += [getattr(factory, name) for name in LIFE_CYCLE]
        self._is_async = any(inspect.iscoroutinefunction(part) for part in parts)
        self._options = msgspec.msgpack.decode(options, type=dict[str, Any])

    def _listen(self) -> None:
        """Make this process hear the signals of a worker."""
        self._interrupts.listen()

    def open(self, index: int) -> None:
        """Make the worker."""
        self._index = index
        self.show_title("")
        self._opened = closing.count()  # functions registered from here on run before close()
        if self._is_async:  # not in a spare: the loop takes as much memory as all the rest of it
            self._make_loop()
        factory = self._loaded.factory
        self.worker = worker = Worker() if factory is None else factory()
        worker.options = self._options
        worker.pool, worker.index = self.pool, index
        try:
            self._await(worker.open())
        except BaseException as error:
            forks.leave_if_child(error)
            raise
        forks.leave_if_child()
        for handler in self._loaded.handlers:
            call = handler.function if factory is None else getattr(worker, handler.method)
            self._handlers[handler.method] = (handler, call)

    def give_up(self, error: BaseException) -> int:
        """Leave the reason for the supervisor, and the traceback in the log."""
        self._board.say(self.vaults.redact(outcome.last_words(error)))
        self._print(error)
        return EXIT_FAILED

    def thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """Print an error of a thread as Python does, without secrets."""
        if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
            name = failed.thread.name if failed.thread is not None else "?"
            self._print(failed.exc_value, f"Exception in thread {name}:\n")

    def unraisable(self, failed: "sys.UnraisableHookArgs") -> None:
        """Print an error that nobody can catch, as in a __del__, without secrets."""
        if failed.exc_value is not None:
            self._print(failed.exc_value, f"{failed.err_msg or 'Exception ignored'}:\n")

    def _print(self, error: BaseException, head: str = "") -> None:
        text = head + outcome.shown_traceback(error)
        sys.stderr.write(self.vaults.redact(text))

    def end(self) -> None:
        """End what the worker's own code has left running."""
        # Python gives signals their default back before it ends: a late SIGALRM would kill.
        self._interrupts.rest()
        pools = sys.modules.get("musterd.workers.toolkit.executors")
        if pools is not None:  # nothing to end where it was never used
            pools.shutdown()
        if self._runner is not None:
            self._runner.close()

    def serve(self, mailbox: Mailbox, token: str) -> int:
        """Run leases until told to stop; return the exit code."""
        if self.concurrency > 1:
            return self._serve_concurrently(mailbox, token)
        interrupts = self._interrupts
        interrupts.obey(mailbox)
        self.begin(mailbox)
        waiter = Waiter(mailbox, self._channel.number, interrupts, lambda: interrupts.own_task)
        tell_waits(waiter.begin)
        mailbox.hello(token)
        while True:
            code = self.turn()
            if code is not None:
                return code

    def begin(self, mailbox: Mailbox) -> None:
        """Take leases from this mailbox, one at a time."""
        self._mailbox = self._interrupts.mailbox = mailbox
        self._channel = RequestChannel(self._interrupts, self.worker, self.vault)
        self._interrupts.number = self._channel.number
        self._interrupts.breakpoints = self.debuggable(self._interrupts)
        self._checked_ns = self._now_ns()

    def turn(self) -> int | None:
        """Run a lease, or wait for something to do; return the exit code once told to stop."""
        interrupts, mailbox = self._interrupts, self._mailbox
        queue = mailbox.queue
        if interrupts.noted:
            interrupts.attend()
        elif mailbox.lost:  # whatever it would do now, nobody hears of it
            return self._finish()
        elif queue:
            self._run(queue.popleft())
            if not queue or len(mailbox.done) >= COMPLETIONS_MAX:
                mailbox.flush()
        elif mailbox.stopping:
            return self._finish()
        elif interrupts.wait(self.beat_seconds, self._loop):
            mailbox.receive()
        else:
            now_ns = self._now_ns()
            self._board.beat(now_ns)
            if self._title:
                self.show_title("")
            if self.health_ns and now_ns - self._checked_ns >= self.health_ns:
                return None if self.check_health_now() else EXIT_UNHEALTHY
        return None

    def debuggable(self, host: breakpoints.Host) -> Breakpoints:
        """Let the handlers that this runs be debugged."""
        self._breakpoints = made = Breakpoints(host, self.vaults.redact)
        breakpoints.serve(made)
        return made

    def _serve_concurrently(self, mailbox: Mailbox, token: str) -> int:
        self._mailbox = mailbox
        check_concurrency(self._loaded, self.concurrency)
        several = ConcurrentRunner(self, mailbox, self._board)
        stopped = self._make_loop().run_until_complete(several.serve(token))
        self._interrupts.obey(mailbox)
        return self._finish() if stopped else EXIT_UNHEALTHY

    def check_health_now(self) -> bool:
        """Check health while nothing runs, and keep the board up to date."""
        self._board.check(self._now_ns())
        try:
            answer = self._await(self.worker.healthy())
            forks.leave_if_child()
            healthy = self._well(answer)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the worker is not healthy
            healthy = self._ill(error)
        if healthy:
            self._checked_ns = self._now_ns()
            self._board.checked(self._checked_ns)
        return healthy

    async def check_health(self) -> bool:
        """Check health inside a running event loop, and keep the board up to date."""
        self._board.check(self._now_ns())
        try:
            answer = self.worker.healthy()
            answer = await answer if inspect.isawaitable(answer) else answer
            forks.leave_if_child()
            healthy = self._well(answer)
        except BaseException as error:  # noqa: BLE001 - as above
            healthy = self._ill(error)
        if healthy:
            self._board.checked(self._now_ns())
        return healthy

    def _well(self, answer: object) -> bool:
        if answer or answer is None:  # None: a body that was left empty
            return True
        self._board.say(self.vaults.redact(f"unhealthy: healthy() returned {answer!r}"))
        return False

    def _ill(self, error: BaseException) -> bool:
        forks.leave_if_child(error)
        words = f"unhealthy: healthy() raised {outcome.last_words(error)}"
        self._board.say(self.vaults.redact(words))
        self._print(error)
        return False

    def _finish(self) -> int:
        self._mailbox.receive()  # gives back leases that came meanwhile
        self._mailbox.flush()
        if self._mailbox.lost:
            return EXIT_FAILED
        self._interrupts.rest()
        end = closing.Closing(self._await, self._mailbox.close_ns, self.clock)
        error = end.run(since=self._opened, close=self.worker.close)
        return 0 if error is None else self.give_up(error)

    def clean_up(self) -> None:
        """Run the clean-ups that a failed open() had registered."""
        closing.Closing(self._await, 0, self.clock).run(since=self._opened, close=None)

    def _run(self, lease: Lease) -> None:
        began_ns = self._now_ns()
        self._board.begin(lease.lease, began_ns)
        self._mailbox.running = lease.lease
        self._channel.begin()
        stood_ns = self._breakpoints.stood_ns
        speaking.set(lease.id)
        completion = self._completion(lease, began_ns, stood_ns)
        speaking.set("")
        self._mailbox.running = 0
        if self._mailbox.progress is not None:
            self._mailbox.send_progress(self._now_ns())
        self.vault.clear()
        ended_ns = began_ns + completion.run_ns + self._breakpoints.stood_ns - stood_ns
        self._board.end(ended_ns)
        self._mailbox.complete(completion, ended_ns)

    def _completion(self, lease: Lease, began_ns: int, stood_ns: int) -> Completion:
        number, method = lease.lease, lease.method
        if method != self._title and method in self._handlers:
            self.show_title(method)
        understood = self.understand(lease, self.vault)
        if isinstance(understood, Failure):
            return Completion(number, 0, b"", understood)
        handler, call, arguments = understood
        context = Context(lease.id, lease.attempt, _deadline(lease, began_ns), self._channel, lease)
        try:
            if handler.is_async:
                assert self._loop is not None
                value = self._interrupts.call_async(self._loop, call, context, arguments, lease)
            else:
                value = self._interrupts.call(call, context, arguments, lease, began_ns)
            forks.leave_if_child()
            data = outcome.encode_result(method, value)
            self.vault.check(f"the result of {method}", data)
            view = look(data, lease.watch) if lease.watch else None
            run_ns = self._ran_ns(lease, began_ns, stood_ns)
            context.drop_artefacts()
            login = context.login_outcome(failed=False)
            clears = self._channel.clears
            return Completion(number, run_ns, data, clears=clears, view=view, login=login)
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a handler ends the task only
            run_ns = self._ran_ns(lease, began_ns, stood_ns)
            self._raised(lease, error)
            attempt = outcome.FailedAttempt(lease, handler.options, context, error)
            completion = outcome.failed(attempt, run_ns, self.vault.redact)
            context.keep_artefacts()
            completion = self._retrying.prepare(completion, attempt)
            forks.leave_if_child()
            outcome.forget(error)
            return completion

    def _raised(self, lease: Lease, error: BaseException) -> None:
        """Hear what an attempt has raised, before anything is made of it."""
        forks.leave_if_child(error)

    def _ran_ns(self, lease: Lease, began_ns: int, stood_ns: int) -> int:
        """End the debugger of a handler that has ended, if it has one; return how long it ran.

        `stood_ns` is for how long the clock had stood when it began.
        """
        debugged = self._breakpoints
        if debugged.lease == lease.lease:
            debugged.attempt_over()
        return self._now_ns() - began_ns - (debugged.stood_ns - stood_ns)

    async def attempt(
        self, lease: Lease, context: Context, channel: RequestChannel, began_ns: int
    ) -> Completion:
        """Run an attempt beside others, inside a running event loop."""
        number, method, vault = lease.lease, lease.method, channel.vault
        understood = self.understand(lease, vault)
        if isinstance(understood, Failure):
            return Completion(number, 0, b"", understood)
        handler, call, arguments = understood
        context.deadline = _deadline(lease, began_ns)
        stood_ns = self._breakpoints.stood_ns
        value, error = await within_time(call(context, **arguments), self.pool, lease)
        run_ns = self._ran_ns(lease, began_ns, stood_ns)
        try:
            if error is not None:
                raise error
            data = outcome.encode_result(method, value)
            vault.check(f"the result of {method}", data)
            view = look(data, lease.watch) if lease.watch else None
            context.drop_artefacts()
            login = context.login_outcome(failed=False)
            return Completion(number, run_ns, data, clears=channel.clears, view=view, login=login)
        except BaseException as raised:  # noqa: BLE001 - as above
            self._raised(lease, raised)
            attempt = outcome.FailedAttempt(lease, handler.options, context, raised)
            completion = outcome.failed(attempt, run_ns, vault.redact)
            context.keep_artefacts()
            completion = await self._retrying.prepare_async(completion, attempt)
            forks.leave_if_child()
            outcome.forget(raised)
            return completion

    def understand(self, lease: Lease, vault: Vault) -> "Failure | Understood":
        """Return the handler of the lease with its arguments; or why it cannot run."""
        entry = self._handlers.get(lease.method)
        if entry is None:
            return outcome.unknown(lease.method, list(self._handlers))
        handler, call = entry
        try:
            data = lease.args
            arguments = handler.decode(vault.open(data) if SECRET_MARK in data else data)
        except MissingSecret as error:
            return outcome.missing_secret(error)
        except INVALID_ARGUMENTS as error:
            return outcome.invalid(handler.signature, error, vault.redact)
        if lease.session:
            call = twice(call, is_async=handler.is_async)
        return handler, call, arguments

    def _await(self, value: Any) -> Any:
        """Return the value, awaited if necessary."""
        if not inspect.isawaitable(value):
            return value
        return self._make_loop().run_until_complete(value)

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._runner = asyncio.Runner(loop_factory=self.loop_factory)
            self._loop = self._runner.get_loop()
        return self._loop

    def show_title(self, method: str) -> None:
        self._title = method
        setproctitle.setproctitle(f"musterd: worker {self.pool}/{self._index} {method}".rstrip())


def _deadline(lease: Lease, began_ns: int) -> float:
    return (began_ns + lease.timeout_ns) / 1e9 if lease.timeout_ns else math.inf
