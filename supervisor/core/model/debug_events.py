"""Events of people who debug a running handler (core/tasks/debugging.py)."""

from msgspec import Struct


class BreakpointHit(Struct, frozen=True):
    """A running handler waits for a debugger."""

    worker: int
    lease: int
    request: int
    where: str  # "shop.py:12 in check"


class DebuggerAsked(Struct, frozen=True):
    """The debugger of a handler says something, and waits for a line."""

    worker: int
    lease: int
    request: int
    text: str
    prompt: str


class DebuggerEnded(Struct, frozen=True):
    """A handler goes on without a debugger, which said this last."""

    worker: int
    lease: int
    text: str


class DebuggerAttached(Struct, frozen=True):
    """A person debugs the task that waits in this worker."""

    worker: int
    who: str


class DebuggerTyped(Struct, frozen=True):
    """The person typed a line; None: the end of what there is to type."""

    worker: int
    line: str | None


class DebuggerInterrupted(Struct, frozen=True):
    """The person wants to see where the code is."""

    worker: int


class DebuggerDetached(Struct, frozen=True):
    """The person has gone."""

    worker: int
