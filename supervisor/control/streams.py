"""Streams of control.sock: events of the fleet, and output of its workers.

Both are lines of JSON. A caller chooses by names and kinds when it begins to follow. The last
events are kept for those who come later.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import RecentEvents, means
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.log.worker_output import OutputChunk

EVENTS_KEPT = 200  # shown by `musterctl events`
CHATTER_KEPT = 50  # events of level debug: busy tasks make more than that in seconds

Wants = Callable[[Struct], bool]

_RESULTS = ("before", "after")  # a price of 0 is no empty field
_LEVELS = ("debug", "info", "warning", "error", "critical")
_encode = msgspec.json.Encoder().encode


class RecentReports:
    """The last events with their times; debug events push out debug events only."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Struct]] = deque(maxlen=EVENTS_KEPT)
        self._chatter: deque[tuple[float, Struct]] = deque(maxlen=CHATTER_KEPT)

    def keep(self, event: Struct) -> float:
        """Keep the event; return its time."""
        at = time.time()  # shown only
        chatter = isinstance(event, Report) and event.level == "debug"
        (self._chatter if chatter else self._kept).append((at, event))
        return at

    def found(self, params: rpc.Events) -> RecentEvents:
        wants = wants_events(params)
        kept = heapq.merge(self._kept, self._chatter, key=itemgetter(0))
        recent = [event_fields(at, event) for at, event in kept if wants(event)]
        return RecentEvents(recent=recent[-params.limit :] if params.limit else [])


def wants_events(params: rpc.Events) -> Wants:
    """Return the filter for the events that a caller asked for."""
    lowest = _LEVELS.index(params.level)

    def wants(event: Struct) -> bool:
        if not isinstance(event, Report):
            return not isinstance(event, OutputChunk)
        return (
            _LEVELS.index(event.level) >= lowest
            and (not params.names or means(params.names, event.worker or event.pool))
            and (not params.kinds or any(fnmatchcase(event.event, kind) for kind in params.kinds))
        )

    return wants


def wants_output(params: rpc.Tail) -> Wants:
    """Return the filter for the output that a caller asked for."""

    def wants(event: Struct) -> bool:
        return isinstance(event, OutputChunk) and (
            not params.names or means(params.names, event.worker)
        )

    return wants


def event_fields(at: float, event: Struct) -> dict[str, Any]:
    """Return the time and the fields of an event as they are sent, without empty fields."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    if isinstance(fields.get("seconds"), float):
        fields["seconds"] = round(fields["seconds"], 3)
    told = {
        name: value
        for name, value in fields.items()
        if value not in ("", 0, None) or (name in _RESULTS and value is not None)
    }
    return {"at": round(at, 3), **told}


def event_line(at: float, event: Struct) -> bytes:
    """Return an event as a line of a stream."""
    return _encode(event_fields(at, event)) + b"\n"
