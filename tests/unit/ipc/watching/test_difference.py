"""What differs between two results, for programs and for people."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.watching.difference import (
    COUNTED_CHARS_MAX,
    DIFF_LINES_MAX,
    SUMMARY_CHARS_MAX,
    FieldChange,
    _different_lines,
    changed_fields,
    summary,
    unified_diff,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


def test_fields_that_differ_have_both_values() -> None:
    before, after = {"a": 1, "b": 2, "gone": 3}, {"a": 1, "b": 5, "new": None}
    assert changed_fields(before, after) == {
        "b": FieldChange(2, 5),
        "gone": FieldChange(3, None),
        "new": FieldChange(None, None),
    }
    assert changed_fields("text", after) == {}


LONG = [f"line {number} of the page" for number in range(50)]
PAGE = "all text of the page " * 20
MANY = "a 1 → nothing, b 1 → nothing, c 1 → nothing and 1 more"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ({"price": "49.00 €"}, {"price": "39.00 €"}, "price 49.00 € → 39.00 €"),
        ({"a": 1, "b": None}, {"a": 2, "b": "x\ny"}, "a 1 → 2, b nothing → x y"),
        (dict.fromkeys("abcd", 1), dict.fromkeys("abcd"), MANY),
        ("49 €", "39 €", "49 € → 39 €"),
        (49, 39.5, "49 → 39.5"),
        ("one\ntwo\nthree", "one\n2\nthree\nfour", "+2 −1 lines: 2"),
        (["a", "b"], ["a", "b", "c"], "+1 −0 lines: c"),
        ({"text": [*LONG, "49 €"]}, {"text": [*LONG, "39 €"]}, "text 49 € → 39 €"),
        ({"text": LONG}, {"text": [*LONG, "sale", "now"]}, "text +2 −0 lines: sale"),
        ({"a": f"{PAGE}49 €"}, {"a": f"{PAGE}39 €"}, "a … the page 49 € → … the page 39 €"),
        (f"{PAGE * 500}49 €", f"{PAGE * 500}3 €", "… the page 49 € → … the page 3 €"),
        ({"a": PAGE + "\n1\n2"}, {"a": PAGE + "\n1\n3"}, "a 2 → 3"),
        ({"a": {"b": LONG, "c": 1}}, {"a": {"b": LONG, "c": 2}}, 'a "c": 1 → "c": 2'),
        ("a\nb", "b\na", "the order has changed"),
        ({"x": "a" * 99}, {"x": "b"}, f"x {'a' * 39}… → b"),
    ],
)  # fmt: skip
def test_a_change_is_told_in_one_line(before: Any, after: Any, line: str) -> None:
    assert summary(before, after) == line


LINES = [f"line {number}" for number in range(COUNTED_CHARS_MAX)]
TEXT = "\n".join(LINES)
HALF = len(LINES) // 2
SWAPPED = f"{' '.join(LINES[:6])[:39]}… → {' '.join([*LINES[1::-1], *LINES[2:6]])[:39]}…"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (TEXT, "\n".join([*LINES[:HALF], "new", *LINES[HALF + 1 :]]), f"line {HALF} → new"),
        (TEXT, "\n".join([*LINES, "new"]), "+1 −0 lines: new"),
        (TEXT, "\n".join(LINES[1:]), "+0 −1 lines: line 0"),
        (LINES, [*LINES, "new"], "+1 −0 lines: new"),
        (TEXT, "\n".join([*LINES[1::-1], *LINES[2:-2], *LINES[:-3:-1]]), SWAPPED),
    ],
    ids=["in the middle", "at the end", "at the beginning", "a list", "places"],
)  # fmt: skip
def test_lines_of_long_texts_are_counted_where_they_differ(
    before: Any, after: Any, line: str
) -> None:
    assert summary(before, after) == line


def test_of_long_texts_with_nothing_in_common_the_beginning_is_counted() -> None:
    line = summary(TEXT, TEXT.replace("line", "row"))
    assert "lines and more: row 0" in line
    numbers = list(range(100_000))
    assert summary({"a": numbers}, {"a": numbers[1:]}) == "a +0 −1 lines: 0"


@given(st.text("ab\n", max_size=12), st.text("ab\n", max_size=12))
def test_what_two_texts_have_in_common_is_whole_lines(before: str, after: str) -> None:
    old, new = _different_lines(before, after)
    assert len(before) - len(old) == len(after) - len(new)
    counted = [Counter(each.splitlines()) for each in (before, after, old, new)]
    assert counted[0] - counted[1] == counted[2] - counted[3]
    assert counted[1] - counted[0] == counted[3] - counted[2]


def test_a_diff_is_unified() -> None:
    assert unified_diff("one\ntwo\nthree", "one\n2\nthree").splitlines() == [
        "--- before", "+++ after", "@@ -1,3 +1,3 @@", " one", "-two", "+2", " three",
    ]  # fmt: skip
    assert '-  "price": 49' in unified_diff({"price": 49}, {"price": 39}).splitlines()
    assert unified_diff("same", "same") == ""


def test_a_diff_of_very_long_texts_says_that_it_has_an_end() -> None:
    long = "\n".join(str(n) for n in range(DIFF_LINES_MAX + 1))
    assert unified_diff(long, f"new\n{long}").endswith("lines are compared)")


@given(PLAIN, PLAIN)
def test_any_two_results_can_be_compared(before: Any, after: Any) -> None:
    line = summary(before, after)
    assert 0 < len(line) <= SUMMARY_CHARS_MAX
    assert line.isprintable()
    unified_diff(before, after)
