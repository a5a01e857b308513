"""Python's own debugger, with a terminal that is somewhere else.

Imported at the first breakpoint that somebody debugs: pdb is nothing that a worker needs.
"""

import io
import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.debugger_messages import DEBUGGER_CHARS_MAX
from musterd.workers.authoring.outcome import RUNTIME_CODE
from musterd.workers.runtime.speech import speaking
from musterd.workers.texts import plain_text

if TYPE_CHECKING:
    from musterd.workers.runtime.breakpoints import Breakpoints

PROMPT_CHARS_MAX = 200  # as on the wire (Word)
NOTE_CHARS = 100  # room for the words that tell what is missing
# Kept until the next prompt. Twice as much as is sent: a secret that is cut off at the end of this
# could not be recognized.
KEPT_CHARS_MAX = 2 * DEBUGGER_CHARS_MAX
# Code that nobody wants to step through: what runs the handler, and the event loop.
SKIPPED = (
    *("musterd.workers.runtime.*", "musterd.workers.authoring.*", "musterd.ipc.*"),
    *("asyncio", "asyncio.*", "selectors", "concurrent.futures.*", "bdb", "cmd", "pdb"),
)


class Console(io.TextIOBase):
    """Standard input and output of the debugger. The last, unfinished line is the prompt."""

    encoding = "utf-8"

    def __init__(self, ask: Callable[[str, str], str | None], redact: Callable[[str], str]) -> None:
        self._ask = ask
        self._redact = redact
        self._over = False  # nobody types any more
        self._kept: list[str] = []
        self._chars = 0
        self._more = 0  # characters that were not kept
        self._last = ""  # the end of what was said

    def write(self, text: str) -> int:
        room = KEPT_CHARS_MAX - self._chars
        self._kept.append(text[:room])
        self._chars += min(room, len(text))
        self._more += max(0, len(text) - room)
        self._last = f"{self._last}{text}"[-PROMPT_CHARS_MAX:]
        return len(text)

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]
        prompt = self._last.rpartition("\n")[2]
        text = self.said(without=prompt)
        line = None if self._over else self._ask(text, plain_text(prompt, PROMPT_CHARS_MAX))
        if line is None:
            self._over = True
            return ""
        return f"{line}\n"

    def said(self, without: str = "") -> str:
        """Return what was said since the last call, `without` this end."""
        text, more = "".join(self._kept), self._more
        self._kept, self._chars, self._more, self._last = [], 0, 0, ""
        if not more:
            text = text.removesuffix(without)
        text = plain_text(self._redact(text), len(text) + KEPT_CHARS_MAX)
        most = DEBUGGER_CHARS_MAX - NOTE_CHARS
        more += max(0, len(text) - most)
        return f"{text[:most]}\n... and {more} characters more\n" if more else text


class Debugger(pdb.Pdb):
    """Debugger of one attempt."""

    def __init__(self, breakpoints: "Breakpoints", console: Console) -> None:
        terminal: Any = console  # all of a text stream that pdb uses
        super().__init__(stdin=terminal, stdout=terminal, skip=SKIPPED, nosigint=True, readrc=False)
        self._breakpoints = breakpoints
        self._console = console
        self._task = speaking.get()
        self._depth = 0  # of prompts: over 0 while commands are carried out
        self._runs = False  # the code runs on, and nothing will stop it

    # -- where it stops -----------------------------------------------------------------------

    def stop_at(self, frame: FrameType, header: str = "") -> None:
        """Stop in the code of this frame, at its next line."""
        if header:
            self.message(header)
        self.set_trace(frame)

    def stop_here(self, frame: FrameType) -> bool:
        """Stop in the code of this attempt alone: others may run in the same event loop."""
        return speaking.get() == self._task and super().stop_here(frame)

    def break_here(self, frame: FrameType) -> bool:
        return speaking.get() == self._task and super().break_here(frame)

    def user_opcode(self, frame: FrameType) -> None:
        """Stop at an opcode: from Python 3.13 on, set_trace() asks for that in all frames."""
        if self.stop_here(frame):
            self.user_line(frame)

    def break_in(self, frame: FrameType, *, now: bool) -> None:
        """Stop the code that runs: `now`, in the middle of a system call too, or at its next line.

        Called by a signal handler that interrupted the code of this frame.
        """
        if self._depth:  # what was typed takes too long
            raise KeyboardInterrupt
        self.message("\n--KeyboardInterrupt--")
        self.set_trace(frame)
        sys.settrace(None)  # not of the debugger itself
        self.set_step()
        if now:
            self.interaction(frame, None)
        sys.settrace(None if self._runs else self.trace_dispatch)

    def interaction(self, *args: Any, **options: Any) -> None:
        self._depth += 1
        try:
            super().interaction(*args, **options)
        finally:
            self._depth -= 1

    def _set_stopinfo(self, *args: Any, **options: Any) -> None:
        self._runs = False
        super()._set_stopinfo(*args, **options)  # type: ignore[misc]

    def set_continue(self) -> None:
        super().set_continue()
        self._runs = not self.breaks

    def get_stack(self, *args: Any) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames without those of the runtime around the handler."""
        stack, current = super().get_stack(*args)
        ours = [
            place
            for place, (frame, _) in enumerate(stack[:current])
            if frame.f_code.co_filename.startswith(RUNTIME_CODE)
        ]
        first = ours[-1] + 1 if ours else 0
        return stack[first:], current - first

    # -- how it ends --------------------------------------------------------------------------

    def close(self) -> None:
        """Stop nowhere any more."""
        self.clear_all_breaks()
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back

    def leave(self) -> None:
        """Let the handler go on without a debugger."""
        self.clear_all_breaks()
        self.set_continue()
        self._breakpoints.left(self._console.said())

    def do_quit(self, arg: str) -> bool:
        """q(uit), exit, Ctrl-D: Leave the debugger; the task goes on."""
        self.leave()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        return self.do_quit(arg)

    def do_run(self, arg: str) -> None:
        """run, restart: Not here: musterctl retry runs a task again."""
        self.error("a task is not restarted from here: leave with q, then musterctl retry ID")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """interact: Start an interactive interpreter with the names of this scope; Ctrl-D ends
        it."""
        kept = sys.stdin, sys.stdout, sys.stderr
        sys.stdin = sys.stdout = sys.stderr = self._console
        try:
            super().do_interact(arg)
        finally:
            sys.stdin, sys.stdout, sys.stderr = kept
