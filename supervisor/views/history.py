"""Results of schedules with their content: entries of history in, reports and api structs out."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import structs

from musterd.ipc.watching.difference import one_line, summary
from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.api.history import ChangeItem, HistoryItem
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.watching import HISTORY_BYTES_MAX, Kept

# JSON of a result in an event: hundreds of events are kept in memory.
EVENT_VALUE_BYTES_MAX = 4 * 1024
# JSON of all results in one answer, which the loop encodes in one turn.
ANSWER_BYTES_MAX = HISTORY_BYTES_MAX
CUT = "(only the beginning of the result is kept, and that is the same)"

_decode_entry = msgspec.msgpack.Decoder(HistoryEntry).decode
_decode = msgspec.msgpack.Decoder().decode


def entries_of(values: Iterable[bytes | None]) -> list[HistoryEntry | None]:
    """Return the entries of history that the store has found; None where it has none."""
    return [None if each is None else _decode_entry(each) for each in values]


def with_content(report: Report, before: HistoryEntry | None, after: HistoryEntry | None) -> Report:
    """Return the report of a change with both results, as far as an event has room for them."""
    old, _ = _shown(before, EVENT_VALUE_BYTES_MAX)
    new, _ = _shown(after, EVENT_VALUE_BYTES_MAX)
    return structs.replace(report, summary=summary_of(before, after), before=old, after=new)


def summary_of(before: HistoryEntry | None, after: HistoryEntry | None) -> str:
    """Return what has changed in one line; "" if that is not known."""
    if after is None:
        return ""
    new = _value(after)
    if before is None:
        return f"now {one_line(new)}"
    old = _value(before)
    return CUT if old == new else summary(old, new)


class Answer:
    """Items of one answer, which has a limit; the newest are made first."""

    def __init__(self) -> None:
        self._room = ANSWER_BYTES_MAX

    def change(
        self, schedule: str, pool: str, before: HistoryEntry | None, after: HistoryEntry
    ) -> ChangeItem:
        new, cut = self._take(after)
        old, old_cut = self._take(before)
        return ChangeItem(
            schedule=schedule,
            at=after.at_ns / 1e9,
            task=after.task,
            number=after.number,
            digest=after.digest,
            summary=summary_of(before, after),
            before=old,
            after=new,
            cut=cut or old_cut,
            pool=pool,
        )

    def entry(self, entry: HistoryEntry) -> HistoryItem:
        value, cut = self._take(entry)
        return HistoryItem(
            number=entry.number,
            at=entry.at_ns / 1e9,
            task=entry.task,
            digest=entry.digest,
            value=value,
            cut=cut,
            changed=entry.changed,
            before=entry.before,
        )

    def _take(self, entry: HistoryEntry | None) -> tuple[Any, bool]:
        value, size = _shown(entry, self._room)
        self._room -= size
        left_out = entry is not None and value is None and size == 0
        return value, left_out or (entry is not None and entry.cut)


def brief_change(schedule: str, pool: str, kept: Kept) -> ChangeItem:
    """Return a change without what the store has of it."""
    return ChangeItem(
        schedule=schedule,
        at=kept.changed_ns / 1e9,
        task="",
        number=kept.number,
        digest="",
        cut=True,
        pool=pool,
    )


def _shown(entry: HistoryEntry | None, room: int) -> tuple[Any, int]:
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
