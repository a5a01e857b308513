"""Answers about the results of schedules: changes and history. Times are wall-clock seconds."""

from typing import Any

from msgspec import Struct

from musterd.ipc.watching.content import shown, summary_of
from musterd.ipc.wire.history import HistoryEntry

# JSON of all results in one answer, which the loop makes in one turn: about one schedule's history.
ANSWER_BYTES_MAX = 1024 * 1024


class ChangeItem(Struct, frozen=True, kw_only=True):
    """A change of a schedule's result."""

    schedule: str
    at: float
    task: str  # id of the run that found it
    number: int  # of the new result in the history of the schedule
    digest: str
    summary: str = ""  # one line
    before: Any = None  # None: not known any more, or too long
    after: Any = None
    cut: bool = False  # one of them is left out, or only the beginning of the result
    pool: str = ""
    again: bool = False  # it may have been told before


class ChangeList(Struct, frozen=True, kw_only=True):
    changes: list[ChangeItem]  # oldest first


class HistoryItem(Struct, frozen=True, kw_only=True):
    """A result of a schedule that differs from the one before."""

    number: int
    at: float
    task: str
    digest: str
    value: Any = None
    cut: bool = False  # the value is left out, or only the beginning of the result
    changed: bool = False  # it was told as a change
    before: int = 0  # number of the result that it was compared with


class HistoryList(Struct, frozen=True, kw_only=True):
    schedule: str
    entries: list[HistoryItem]  # oldest first


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
