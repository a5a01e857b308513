"""Changes with their content: as much of it as an event and an answer have room for."""

from typing import Any

import msgspec
import pytest

from musterd.ipc.watching.content import CUT, EVENT_VALUE_BYTES_MAX
from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.api import history
from musterd.supervisor.api.history import ANSWER_BYTES_MAX, Answer
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.views.history import entries_of, with_content

CHANGED = Report("task.changed", task="@s.1", schedule="s", number=2, number_before=1)


def entry(value: Any, number: int = 2, **more: Any) -> HistoryEntry:
    return HistoryEntry(number, 10**9, "@s.1", "d", msgspec.msgpack.encode(value), **more)


def test_an_event_has_both_results_and_one_line() -> None:
    report = with_content(CHANGED, entry({"price": 49}, 1), entry({"price": 39}))
    assert report.summary == "price 49 → 39"
    assert (report.before, report.after) == ({"price": 49}, {"price": 39})
    assert report.task == "@s.1"


def test_an_event_has_no_room_for_a_long_result() -> None:
    report = with_content(CHANGED, entry("one\n" * EVENT_VALUE_BYTES_MAX, 1), entry("two"))
    assert (report.before, report.after) == (None, "two")
    assert report.summary == f"+1 −{EVENT_VALUE_BYTES_MAX} lines: two"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (None, entry({"price": 39}), 'now {"price": 39}'),
        (None, entry("39"), "now 39"),
        (None, entry("one\ntwo"), "now one two"),
        (entry("x"), None, ""),
        (entry("same", cut=True), entry("same", cut=True), CUT),
    ],
)
def test_what_is_not_known_is_not_made_up(before: Any, after: Any, line: str) -> None:
    assert with_content(CHANGED, before, after).summary == line


def test_what_json_cannot_have_is_shown_as_text() -> None:
    report = with_content(CHANGED, entry({None: 1}, 1), entry({"at": b"\xff"}))
    assert report.before == "{None: 1}"
    assert report.after == {"at": b"\xff"}
    msgspec.json.encode(report)


def test_an_entry_that_cannot_be_read_is_no_end_of_the_world() -> None:
    broken = HistoryEntry(1, 0, "@s.1", "d", b"\xc1")
    assert "cannot be read" in with_content(CHANGED, broken, entry("x")).before


def test_entries_of_the_store_are_read_or_missing() -> None:
    assert entries_of([msgspec.msgpack.encode(entry("x")), None]) == [entry("x"), None]


def test_an_answer_has_a_limit_and_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ANSWER_BYTES_MAX", 25)
    answer = Answer()
    first = answer.change("s", "p", entry("0123456789", 1), entry("9876543210"))
    assert (first.before, first.after, first.cut) == ("0123456789", "9876543210", False)
    second = answer.change("s", "p", entry("0123456789", 1), entry(1))
    assert (second.before, second.after, second.cut) == (None, 1, True)
    assert second.summary == "0123456789 → 1"
    assert answer.entry(entry("12345", changed=True)).value is None
    assert ANSWER_BYTES_MAX > 25


def test_a_result_that_was_cut_when_it_was_kept_says_so() -> None:
    assert Answer().entry(entry("beginning", cut=True)).cut
    assert not Answer().entry(entry(None)).cut
