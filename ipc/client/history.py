"""Results of schedules that the daemon has kept, for users."""

from typing import Any

from msgspec import Struct, msgpack

from musterd.ipc.client.taskspec import checked_schedule, shown
from musterd.ipc.errors import HistoryUnavailable, UnknownSchedule
from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import HISTORY_LIMIT_MAX, Change, History


class KeptResult(Struct, frozen=True):
    """A result of a schedule that differs from the one before."""

    number: int  # grows with each different result
    at: float  # seconds of wall-clock time
    task: str  # id of the run that returned it
    digest: str  # SHA-256 of the result, or of the part that is watched
    value: Any  # the result, or the part that is watched
    cut: bool = False  # `value` is a text: the beginning of the result
    changed: bool = False  # it was told as a change


def question(schedule: str, n: int) -> History:
    """Return the question for the newest results; its request number is given later."""
    if not isinstance(schedule, str) or not schedule:
        raise TypeError(f"give the name of a schedule, not {shown(schedule)}")
    checked_schedule(schedule)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= HISTORY_LIMIT_MAX:
        raise ValueError(f"n={n!r}: give a whole number from 1 to {HISTORY_LIMIT_MAX}")
    return History(0, schedule, n)


def question_about(change: Change) -> History:
    """Return the question for the two results of a change."""
    numbers = [number for number in (change.before, change.number) if number]
    return History(0, change.schedule, numbers=numbers)


def results_of(answer: Entries) -> list[KeptResult]:
    """Return the results, oldest first; raise what the daemon says instead."""
    if answer.unknown:
        raise UnknownSchedule(answer.error)
    if answer.error:
        raise HistoryUnavailable(answer.error)
    return [_result(entry) for entry in answer.entries]


def _result(entry: HistoryEntry) -> KeptResult:
    return KeptResult(
        entry.number,
        entry.at_ns / 1e9,
        entry.task,
        entry.digest,
        msgpack.decode(entry.value),
        entry.cut,
        entry.changed,
    )
