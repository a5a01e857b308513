"""Messages on workers.sock about breakpoints: what a debugger says, and what is typed for it.

worker -> supervisor   Breakpoint, DebuggerPrompt (both answered by a DebuggerLine), DebuggerLeft
worker <- supervisor   DebuggerLine, BreakIn
"""

from typing import Annotated

from msgspec import Meta, Struct

from musterd.ipc.wire.messages import Number, Word

# Of what a debugger says between two prompts, and of a line that is typed.
DEBUGGER_CHARS_MAX = 32 * 1024
Said = Annotated[str, Meta(max_length=DEBUGGER_CHARS_MAX)]


class Breakpoint(Struct, array_like=True, tag="breakpoint", frozen=True):
    """Say that a handler waits for a debugger; answered when one is there, or when it is to go on
    without."""

    request: Number
    lease: Number
    where: Word


class DebuggerPrompt(Struct, array_like=True, tag="prompt", frozen=True):
    """Show what the debugger says, and ask for the next line."""

    request: Number
    lease: Number
    text: Said
    prompt: Word


class DebuggerLeft(Struct, array_like=True, tag="left", frozen=True):
    """Say that the handler goes on without a debugger; `text` was said last."""

    lease: Number
    text: Said


class DebuggerLine(Struct, array_like=True, tag="line", frozen=True):
    """A line for the debugger; None: there is nobody, or nobody any more."""

    request: int
    line: str | None = None


class BreakIn(Struct, array_like=True, tag="break", frozen=True):
    """Stop in the code that a debugged handler runs; `leave`: go on without a debugger instead."""

    lease: int
    leave: bool = False


DebuggerMessage = Breakpoint | DebuggerPrompt | DebuggerLeft
DebuggerCommand = DebuggerLine | BreakIn
