"""The dialogue with a debugger on control.sock.

`debug` is answered when it is over. Until then the connection is a dialogue: the daemon sends lines
of JSON, first a DebugBegun, then a DebugText for whatever the debugger says; the caller sends
`debug.line`, if the last text had a prompt, and `debug.interrupt`, without an `id` or with one.
"""

from msgspec import Struct


class DebugBegun(Struct, frozen=True, kw_only=True):
    """What is debugged."""

    debugging: str  # the slot
    task: str
    name: str
    attempt: int
    where: str  # "shop.py:12 in check"


class DebugText(Struct, frozen=True, omit_defaults=True):
    """What a debugger says; with a prompt it waits for a line."""

    text: str
    prompt: str | None = None


class DebugResult(Struct, frozen=True, kw_only=True):
    """Answer to `debug`, when it is over."""

    name: str  # the slot
    reason: str
