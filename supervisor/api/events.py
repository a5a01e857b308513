"""Lines of streams as musterctl prints them with --json: events, and output of workers.

On control.sock an event has no empty fields, which would cost every follower; musterctl fills them
in (`filled`), so that every field is always there.
"""

from typing import Any

import msgspec
from msgspec import Struct


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened; fields that are not about it are empty."""

    at: float  # wall-clock time
    event: str  # "worker.crashed", "breaker.open", ...
    level: str = "info"  # debug, info, warning, error
    pool: str = ""
    worker: str = ""  # "parser/0"
    task: str = ""
    method: str = ""  # of the task
    attempt: int = 0
    target: str = ""
    phase: str = ""
    reason: str = ""
    traceback: str = ""  # of the worker
    seconds: float = 0.0
    schedule: str = ""
    session: str = ""
    count: int = 0  # how many times
    digest: str = ""  # of a result
    cause: str = ""  # why a worker was lost: boot, exit, signal, oom, hung, unhealthy
    output: str = ""  # what the worker printed last
    node: str = ""  # of the cluster
    elsewhere: bool = False  # another node of the cluster alerts people of it
    number: int = 0  # of a changed result in the history of its schedule
    number_before: int = 0
    changed_at: float | None = None  # when a result changed, which may be told much later
    again: bool = False  # it may have been told before a restart
    summary: str = ""  # what has changed, in one line
    before: Any = None  # the results themselves
    after: Any = None


class Dropped(Struct, frozen=True, kw_only=True):
    """In a stream: the reader was too slow."""

    dropped: int  # events, or portions of output


class OutputPortion(Struct, frozen=True, kw_only=True):
    """What a worker wrote."""

    at: float
    worker: str  # the slot, or the pool whose worker class was imported
    lines: list[str]
    left_out: int = 0  # lines before these that were dropped: the worker wrote too fast


def filled(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an event, or a portion of output, with all its fields."""
    if "dropped" in fields:
        return fields
    return {**(_EMPTY_PORTION if "lines" in fields else _EMPTY_EVENT), **fields}


_EMPTY_EVENT = msgspec.to_builtins(Event(at=0.0, event=""))
_EMPTY_PORTION = msgspec.to_builtins(OutputPortion(at=0.0, worker="", lines=[]))
