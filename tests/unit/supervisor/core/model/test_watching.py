"""Whether a result is a change: confirmations, limits for numbers, and a bounded history."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import VIEW_BYTES_MAX
from musterd.supervisor.core.model.policy import WatchPolicy
from musterd.supervisor.core.model.watching import (
    HISTORY_BYTES_MAX,
    UNTOLD_MAX,
    Seen,
    Watched,
    begin_anew,
    judge,
)


class History:
    """Facts of a schedule, as the store has them."""

    def __init__(self, **policy: Any) -> None:
        self.policy = WatchPolicy(**policy)
        self.watched = Watched()
        self.entries: dict[int, HistoryEntry] = {}
        self.run = 0

    def see(self, value: Any, size: int = 1) -> str:
        """Judge a result, a text or a number; return what is told: "before -> after", or ""."""
        self.run += 1
        numbers = {} if isinstance(value, str) else {"": float(value)}
        seen = Seen(str(self.run), str(value), numbers, b"x" * size, False, self.run)
        judgement = judge(self.policy, self.watched, seen)
        if judgement.entry is not None:
            self.entries[judgement.entry.number] = judgement.entry
        change = judgement.change
        told = ""
        if change is not None:
            assert self.entries[change.number].digest == change.digest == str(value)
            assert self.entries[change.number].changed
            before = self.entries.get(change.before)
            told = f"{before.digest if before else '?'} -> {change.digest}"
        for number in judgement.forgotten:
            del self.entries[number]
        assert list(self.entries) == [each.number for each in self.watched.history]
        return told

    def see_all(self, *values: Any) -> list[str]:
        return [self.see(each) for each in values]


def test_the_first_result_is_the_baseline_and_what_differs_is_a_change() -> None:
    told = History().see_all("a", "a", "b", "b", "a", "c")
    assert told == ["", "", "a -> b", "", "b -> a", "a -> c"]


@pytest.mark.parametrize(
    ("confirm", "values", "told"),
    [
        (2, "abab", {}),  # a page that flickers
        (2, "abb", {2: "a -> b"}),
        (2, "abcc", {3: "a -> c"}),
        (2, "abbaa", {2: "a -> b", 4: "b -> a"}),
        (3, "abbcbbb", {6: "a -> b"}),
        (3, "abbabb", {}),
    ],
)
def test_a_change_is_confirmed_by_results_in_a_row(
    confirm: int, values: str, told: dict[int, str]
) -> None:
    history = History(confirm=confirm)
    assert history.see_all(*values) == [told.get(place, "") for place in range(len(values))]


@pytest.mark.parametrize(
    ("rules", "values", "told"),
    [
        ({"by": 5}, (100, 104, 96, 95, 99, 90), {3: "100 -> 95", 5: "95 -> 90"}),
        ({"by": 0.05, "by_share": True}, (49, 46.6, 46.55, 48.8, 48.9), {2: "49 -> 46.55", 4: ...}),
        ({"by": 0.05, "by_share": True}, (0, 0, 0.001), {2: "0 -> 0.001"}),
        ({"by": 0.05, "by_share": True}, (-100, -96, -105), {2: "-100 -> -105"}),
        ({"above": 50}, (40, 50, 51, 60, 50, 55), {2: "40 -> 51", 5: "51 -> 55"}),
        ({"below": 50}, (60, 50, 49, 40, 50, 45), {2: "60 -> 49", 5: "49 -> 45"}),
        ({"below": 50}, (40, 30), {}),  # the first result is the baseline
        ({"below": 40, "by": 20}, (50, 45, 39, 65), {2: "50 -> 39", 3: "39 -> 65"}),
        ({"below": 40, "confirm": 2}, (50, 39, 50, 39, 38, 37), {4: "50 -> 38"}),
        ({"by": 5, "confirm": 2}, (50, 60, 50, 60, 61), {4: "50 -> 61"}),
    ],
)
def test_numbers_are_told_when_they_cross_a_limit_or_go_far(
    rules: dict[str, Any], values: tuple[float, ...], told: dict[int, Any]
) -> None:
    found = History(**rules).see_all(*values)
    for place, each in enumerate(found):
        want = told.get(place, "")
        assert each == want or (want is ... and each), (place, each)


def test_a_field_that_is_new_has_a_baseline_of_its_own() -> None:
    policy, watched = WatchPolicy(by=5), Watched()

    def see(**numbers: float) -> bool:
        seen = Seen("", str(numbers), numbers, b"", False, 1)
        return judge(policy, watched, seen).change is not None

    assert [see(a=1), see(a=1, b=100), see(a=1, b=104), see(a=1, b=106)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_other_rules_begin_anew_and_keep_the_history() -> None:
    history = History()
    history.see_all("a", "b")
    history.policy = WatchPolicy(name="other")
    assert history.see_all("x", "y") == ["", "x -> y"]
    assert [each.digest for each in history.entries.values()] == ["a", "b", "x", "y"]


def test_a_new_beginning_keeps_what_is_to_be_told() -> None:
    history = History()
    history.see_all("a", "b")
    begin_anew(history.watched)
    assert [note.digest for note in history.watched.untold] == ["b"]
    assert history.see("b") == ""


def test_a_confirmed_result_is_told_by_the_run_that_confirmed_it() -> None:
    history = History(confirm=2)
    history.see_all("a", "b", "b")
    assert [(each.number, each.task, each.changed) for each in history.entries.values()] == [
        (1, "1", False),
        (2, "3", True),
    ]


def test_what_was_told_last_outlives_any_number_of_results() -> None:
    history = History(keep=2, confirm=2)
    history.see_all("a", "b", "b")
    history.watched.untold = []
    for number in range(100):
        history.see(f"flicker {number}")
    assert [each.digest for each in history.entries.values()] == ["a", "b", "flicker 99"]
    assert history.see_all("c", "c") == ["", "b -> c"]


def test_the_changes_that_wait_to_be_told_are_bounded() -> None:
    history = History()
    history.see_all(*(str(each) for each in range(UNTOLD_MAX + 5)))
    assert len(history.watched.untold) == UNTOLD_MAX
    assert history.watched.untold[-1].digest == str(UNTOLD_MAX + 4)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, VIEW_BYTES_MAX)), max_size=60),
    st.integers(1, 3),
    st.integers(2, 6),
    st.booleans(),
)
def test_history_is_bounded_and_a_change_is_what_was_confirmed(
    results: list[tuple[str, int]], confirm: int, keep: int, tells: bool
) -> None:
    history = History(confirm=confirm, keep=keep)
    baseline, row = "", 0
    for place, (value, size) in enumerate(results):
        row = row + 1 if place and results[place - 1][0] == value else 1
        told = history.see(value, size)
        if not baseline:
            baseline = value
        elif value != baseline and row >= confirm:
            assert told == f"{baseline} -> {value}", "the entry before is still there"
            baseline = value
        else:
            assert told == ""
        kept = history.watched.history
        assert len(kept) <= max(keep, 4) + 2 * len(history.watched.untold)
        if tells:
            history.watched.untold = []
        assert sum(each.size for each in kept) <= HISTORY_BYTES_MAX
