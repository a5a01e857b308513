"""Answers about the results of schedules: changes and history. Times are wall-clock seconds."""

from typing import Any

from msgspec import Struct


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
