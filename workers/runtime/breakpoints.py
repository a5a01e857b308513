"""Breakpoints of handlers: `breakpoint()` and `pdb.set_trace()` wait for `musterctl debug`.

    handler calls breakpoint() ──► hook: may the code that called it be debugged at all?
        ──► Breakpoint to the supervisor, which decides (core/tasks/debugging.py)
        ──► somebody came: a Pdb whose terminal is the connection to the supervisor (debugger.py)
            nobody came, or it is not allowed: the handler goes on

Everything happens in the handler's own thread: while somebody debugs, nothing else of this worker
runs, and its timeouts stand. The end of the debugger is never an error of the task: the handler
goes on, or is interrupted as if nobody had debugged it.

The hook is there from the load of the worker class on, also where no task runs. There it explains
itself, as it does in threads and forks, because Python's own hook would read from a standard input
that nobody can type into, and end the task with BdbQuit.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from time import monotonic_ns
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.debugger_messages import (
    Breakpoint,
    DebuggerLeft,
    DebuggerLine,
    DebuggerPrompt,
)
from musterd.ipc.wire.messages import CONCURRENCY_MAX
from musterd.workers.authoring import forks
from musterd.workers.texts import plain_text

if TYPE_CHECKING:
    from musterd.workers.runtime.debugger import Debugger

WHERE_CHARS_MAX = 200  # as on the wire (Word)

log = logging.getLogger("musterd.worker")


class Host(Protocol):
    """What runs the handlers: one at a time (Interrupts), or several (ConcurrentRunner)."""

    @property
    def debuggable(self) -> int:
        """Lease of the attempt whose code calls this, 0 for none."""

    def number(self) -> int:
        """Return the number of the next question."""

    def hold(self) -> None:
        """Stop the clock of all timeouts."""

    def move_deadlines(self, by_ns: int) -> None:
        """Tell handlers that they have so much longer (`ctx.deadline`)."""

    def go_on(self, stood_ns: int) -> None:
        """Let the clock go on, which stood for so long."""

    def interrupt(self) -> None:
        """Raise in a handler that has to stop."""

    def ask_debugger(self, request: int, frame: bytes) -> DebuggerLine | None:
        """Ask and wait for the answer; None if the task has to stop instead."""

    def send(self, frame: bytes) -> None:
        """Send a message that is not answered."""


class Breakpoints:
    """Breakpoints of one worker; one attempt is debugged at a time."""

    def __init__(self, host: Host, redact: Callable[[str], str]) -> None:
        self.host = host
        self.redact = redact
        self.lease = 0  # that is debugged, or waits for somebody; 0 for none
        self.stood_ns = 0  # for how long the clock stood, over all attempts
        self.debugger: Debugger | None = None
        self._held_ns = 0  # since when the clock stands
        self._moved_ns = 0  # until when handlers have been told that
        # Attempts that stop nowhere any more: nobody came, or somebody left. Of a loop with a
        # breakpoint only the first round may wait.
        self._over: deque[int] = deque(maxlen=CONCURRENCY_MAX)

    def stop(self, frame: FrameType, where: str, header: str) -> None:
        """Stop at a breakpoint of the running attempt."""
        lease = self.host.debuggable
        if self.debugger is not None and lease == self.lease:
            self.debugger.stop_at(frame, header)
        elif self.lease:
            pass_over(where, "another task of this worker is being debugged")
        elif lease not in self._over:
            self._wait(frame, where, header, lease)

    def _wait(self, frame: FrameType, where: str, header: str, lease: int) -> None:
        """Wait for somebody, and let them debug."""
        self.lease = lease
        self._held_ns = self._moved_ns = monotonic_ns()
        self.host.hold()
        request = self.host.number()
        answer = self.host.ask_debugger(request, encode(Breakpoint(request, lease, where)))
        self._move_deadlines()
        if answer is None or answer.line is None:
            self._go_on()
            self.host.interrupt()
            return
        from musterd.workers.runtime.debugger import Console, Debugger  # they need pdb

        self.debugger = Debugger(self, Console(self._ask, self.redact))
        self.debugger.stop_at(frame, header)

    def _ask(self, text: str, prompt: str) -> str | None:
        """Show what the debugger says, and return the line that is typed; None for no more."""
        if forks.is_child() or not self.lease:
            return None
        request = self.host.number()
        question = DebuggerPrompt(request, self.lease, text, prompt)
        answer = self.host.ask_debugger(request, encode(question))
        self._move_deadlines()
        return None if answer is None else answer.line

    def _move_deadlines(self) -> None:
        now_ns = monotonic_ns()
        self.host.move_deadlines(now_ns - self._moved_ns)
        self._moved_ns = now_ns

    def left(self, text: str) -> None:
        """Tell the supervisor that the attempt goes on without a debugger."""
        if forks.is_child():
            return  # the clock, and everything else here, is the worker's
        if self.lease:
            self.host.send(encode(DebuggerLeft(self.lease, text)))
        self._go_on()
        self.host.interrupt()

    def attempt_over(self) -> None:
        """End the debugger of an attempt that has ended; the supervisor knows by its end."""
        if self.debugger is not None:
            self.debugger.close()
        if not forks.is_child():
            self._go_on()

    def _go_on(self) -> None:
        self.debugger = None
        if self.lease:
            self._move_deadlines()
            self._over.append(self.lease)
            self.lease = 0
            stood_ns = monotonic_ns() - self._held_ns
            self.stood_ns += stood_ns
            self.host.go_on(stood_ns)


# -- the hook ---------------------------------------------------------------------------------


_breakpoints: Breakpoints | None = None  # of this worker, as soon as it takes leases


def serve(breakpoints: Breakpoints) -> None:
    """Let handlers be debugged from now on."""
    global _breakpoints
    _breakpoints = breakpoints


def install() -> None:
    """Take the place of Python's own breakpoint() and of pdb.set_trace()."""
    sys.breakpointhook = _hook
    if not any(isinstance(finder, _PdbFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PdbFinder())
    if "pdb" in sys.modules:
        _replace_set_trace(sys.modules["pdb"])


def pass_over(where: str, why: str) -> None:
    """Explain why nobody can debug here."""
    log.warning("breakpoint() at %s is passed over: %s", where, why)


def _hook(*args: Any, **options: Any) -> Any:
    """Do what breakpoint() does in a worker; PYTHONBREAKPOINT may choose something else."""
    chosen = os.environ.get("PYTHONBREAKPOINT", "")
    if chosen == "0":
        return None
    if chosen not in ("", "pdb.set_trace"):
        return sys.__breakpointhook__(*args, **options)
    _stop(sys._getframe(1), str(options.get("header") or ""))
    return None


def _set_trace(*, header: str | None = None, commands: object = None) -> None:
    """Do what pdb.set_trace() does in a worker: see breakpoint()."""
    _stop(sys._getframe(1), header or "")


async def _set_trace_async(*, header: str | None = None, commands: object = None) -> None:
    """Do what pdb.set_trace_async() of Python 3.14 does: here no handler needs it."""
    _stop(sys._getframe(1), header or "")


def _stop(frame: FrameType, header: str) -> None:
    where = _where(frame)
    thread = threading.current_thread()
    if forks.is_child():
        pass_over(where, "a process that the handler forked cannot be debugged")
    elif _breakpoints is None:
        pass_over(where, "no task runs: only handlers can be debugged, and what they call")
    elif thread is not threading.main_thread():
        why = f"thread {thread.name!r} cannot be debugged, only the handler itself"
        pass_over(where, why)
    elif not _breakpoints.host.debuggable:
        pass_over(where, "no task runs: only handlers can be debugged, and what they call")
    else:
        _breakpoints.stop(frame, where, header)


def _where(frame: FrameType) -> str:
    """Return the place in a few words: "shop.py:12 in check"."""
    file, folder = frame.f_code.co_filename, os.getcwd() + os.sep
    shown = file.removeprefix(folder) if file.startswith(folder) else file
    text = f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
    return plain_text(text[-WHERE_CHARS_MAX:], WHERE_CHARS_MAX)


class _PdbLoader(SourceFileLoader):
    """Load pdb with a set_trace() that works in a worker."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _replace_set_trace(module)


class _PdbFinder(MetaPathFinder):
    """Find pdb where Python has it: handlers import it when they need it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "pdb":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _PdbLoader(spec.loader.name, spec.loader.path)
        return spec


def _replace_set_trace(module: ModuleType) -> None:
    # Another module may be named so; that of Python has the class.
    if Path(str(module.__file__)).name == "pdb.py" and hasattr(module, "Pdb"):
        module.set_trace = _set_trace  # type: ignore[attr-defined]
        module.set_trace_async = _set_trace_async  # type: ignore[attr-defined]
