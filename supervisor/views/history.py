"""Results of schedules with their content: entries of history in, reports and api structs out."""

from collections.abc import Iterable

import msgspec
from msgspec import structs

from musterd.ipc.watching.content import content_of
from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.api.history import ChangeItem
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.watching import Kept

_decode_entry = msgspec.msgpack.Decoder(HistoryEntry).decode


def entries_of(values: Iterable[bytes | None]) -> list[HistoryEntry | None]:
    """Return the entries of history that the store has found; None where it has none."""
    return [None if each is None else _decode_entry(each) for each in values]


def with_content(report: Report, before: HistoryEntry | None, after: HistoryEntry | None) -> Report:
    """Return the report of a change with both results, as far as an event has room for them."""
    summary, old, new = content_of(before, after)
    return structs.replace(report, summary=summary, before=old, after=new)


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
