"""Results of schedules with their content: entries of history in, reports and api structs out."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import structs

from musterd.ipc.watching.content import content_of, shown, summary_of
from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.api.history import ChangeItem, HistoryItem
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.watching import HISTORY_BYTES_MAX

# JSON of all results in one answer, which the loop makes in one turn.
ANSWER_BYTES_MAX = HISTORY_BYTES_MAX

_decode_entry = msgspec.msgpack.Decoder(HistoryEntry).decode


def entries_of(values: Iterable[bytes | None]) -> list[HistoryEntry | None]:
    """Return the entries of history that the store has found; None where it has none."""
    return [None if each is None else _decode_entry(each) for each in values]


def with_content(report: Report, before: HistoryEntry | None, after: HistoryEntry | None) -> Report:
    """Return the report of a change with both results, as far as an event has room for them."""
    summary, old, new = content_of(before, after)
    return structs.replace(report, summary=summary, before=old, after=new)


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
        value, size = shown(entry, self._room)
        self._room -= size
        left_out = entry is not None and value is None and size == 0
        return value, left_out or (entry is not None and entry.cut)
