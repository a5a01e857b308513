"""Results of schedules as people see them: entries of history in, words and values for JSON out."""

from typing import Any

import msgspec

from musterd.ipc.watching.difference import one_line, summary
from musterd.ipc.wire.history import HistoryEntry

# JSON of a result in an event: hundreds of events are kept in memory.
EVENT_VALUE_BYTES_MAX = 4 * 1024
CUT = "(only the beginning of the result is kept, and that is the same)"

_decode = msgspec.msgpack.Decoder().decode


def content_of(before: HistoryEntry | None, after: HistoryEntry | None) -> tuple[str, Any, Any]:
    """Return a change in one line and both results, as far as an event has room for them."""
    old, _ = shown(before, EVENT_VALUE_BYTES_MAX)
    new, _ = shown(after, EVENT_VALUE_BYTES_MAX)
    return summary_of(before, after), old, new


def summary_of(before: HistoryEntry | None, after: HistoryEntry | None) -> str:
    """Return what has changed in one line; "" if that is not known."""
    if after is None:
        return ""
    new = _value(after)
    if before is None:
        return f"now {one_line(new)}"
    old = _value(before)
    return CUT if old == new else summary(old, new)


def shown(entry: HistoryEntry | None, room: int) -> tuple[Any, int]:
    """Return a result as JSON can have it, and its size there; None and 0 if that is too much."""
    if entry is None or len(entry.value) > room:
        return None, 0
    value = _value(entry)
    try:
        size = len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError):  # keys that are no texts; nested too deeply
        value = repr(value)
        size = len(value)
    return (value, size) if size <= room else (None, 0)


def _value(entry: HistoryEntry) -> Any:
    try:
        return _decode(entry.value)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        return f"(it cannot be read: {error})"
