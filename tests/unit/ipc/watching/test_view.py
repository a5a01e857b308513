"""The view of a result: what is watched, what is ignored, and what is no result at all."""

from hashlib import sha256
from typing import Any
from unicodedata import category

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.errors import NotANumber, NothingFound
from musterd.ipc.watching.rules import PLAIN, Rules, encode_rules, is_pattern, pattern_problem
from musterd.ipc.watching.view import look
from musterd.ipc.wire.messages import VIEW_BYTES_MAX, VIEW_NUMBERS_MAX, View

encode = msgspec.msgpack.encode


def seen(value: Any, **rules: Any) -> View:
    return look(encode(value), encode_rules(Rules(**rules)))


def part(value: Any, **rules: Any) -> Any:
    kept = seen(value, **rules).kept
    return value if kept is None else msgspec.msgpack.decode(kept)


@given(st.recursive(st.integers(-(2**63), 2**64 - 1) | st.text(min_size=1), st.lists, max_leaves=5))
def test_without_rules_the_bytes_of_the_result_count(value: Any) -> None:
    data = encode(value)
    try:
        assert look(data, PLAIN) == View(sha256(data).hexdigest())
    except NothingFound:
        assert all(category(each)[0] in "CZ" for each in value)


def test_only_watched_fields_count() -> None:
    first = seen({"price": "49", "time": "12:00"}, watch=("price",))
    assert first == seen({"time": "13:00", "price": "49"}, watch=("price",))
    assert first.digest != seen({"price": "39", "time": "12:00"}, watch=("price",)).digest
    assert part({"price": "49", "time": "12:00"}, watch=("price",)) == {"price": "49"}


def test_ignored_fields_and_patterns_do_not_count_at_any_depth() -> None:
    rules = {"ignore": ("time", r"/\d+ visitors?/")}
    one = [{"text": "Tea, 5 visitors", "time": 1}]
    other = [{"text": "Tea, 1 visitor", "time": 2}]
    assert seen(one, **rules).digest == seen(other, **rules).digest
    assert part(one, **rules) == [{"text": "Tea, "}]
    assert part("Tea, 5 visitors", **rules) == "Tea, "


def test_with_rules_the_order_of_fields_does_not_count() -> None:
    one, other = {"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 2, "c": 1}, "a": 1}
    assert seen(one, ignore=("x",)).digest == seen(other, ignore=("x",)).digest
    assert seen({1: 2, "a": 3}, ignore=("x",)).digest  # keys that cannot be sorted


@pytest.mark.parametrize(
    ("value", "rules", "why"),
    [
        (None, {}, "the result is empty: None"),
        (" \n", {}, "the result is empty"),
        ({"price": None}, {}, "the result is empty"),
        ({"price": "", "offers": []}, {}, "the result is empty"),
        ({"price": None, "a": 1}, {"watch": ("price",)}, "'price' is empty: its selector"),
        ({"price": " "}, {"watch": ("price",)}, "'price' is empty"),
        ({"price": []}, {"watch": ("price",)}, "'price' is empty"),
        ({"price": ["", None, " "]}, {"watch": ("price",)}, "'price' is empty"),
        ({"price": "\u200b\u00a0"}, {"watch": ("price",)}, "'price' is empty"),
        ({"prize": 1}, {"watch": ("price",)}, "'price' is missing in the result: there are prize"),
        ({}, {"watch": ("price",)}, "there are none"),
        ("text", {"watch": ("price",)}, "of type str and has no field 'price'"),
        ({"time": 1}, {"ignore": ("time",)}, "nothing that is watched"),
        ("5 visitors", {"ignore": ("/.*/",)}, "nothing that is watched"),
    ],
)
def test_nothing_found_is_a_failure_that_says_what_is_missing(
    value: Any, rules: Any, why: str
) -> None:
    with pytest.raises(NothingFound, match=why):
        seen(value, **rules)


@pytest.mark.parametrize("value", [[], {}, 0, False, {"price": 0}, {"price": None, "a": 1}])
def test_an_answer_of_a_handler_is_a_result_however_little_it_says(value: Any) -> None:
    assert seen(value) == View(sha256(encode(value)).hexdigest())


def test_numbers_are_read_by_field() -> None:
    rules = {"watch": ("price", "stock"), "numbers": True}
    view = seen({"price": "1.299,00 €", "stock": 3, "title": "Kite"}, **rules)
    assert view.numbers == {"price": 1299.0, "stock": 3.0}
    assert seen("$1,299.00", numbers=True).numbers == {"": 1299.0}


@pytest.mark.parametrize(
    ("value", "rules", "why"),
    [
        ({"price": "sold out"}, {"watch": ("price",)}, "field 'price' is not one number: 'sold"),
        ({"price": 1, "title": "Kite"}, {}, r"'title' is not one number.*watch = \[.price.\]"),
        ("49 € to 59 €", {}, "the result is not one number"),
        ({str(n): n for n in range(VIEW_NUMBERS_MAX + 1)}, {}, "at most 100 may be numbers"),
    ],
)
def test_what_is_no_number_is_a_failure_where_numbers_count(
    value: Any, rules: Any, why: str
) -> None:
    with pytest.raises(NotANumber, match=why):
        seen(value, **rules, numbers=True)


@pytest.mark.parametrize("value", ["ä" * VIEW_BYTES_MAX, ["text"] * VIEW_BYTES_MAX])
@pytest.mark.parametrize("rules", [{}, {"ignore": ("x",)}])
def test_of_a_long_result_the_beginning_is_kept_and_all_of_it_counts(
    value: Any, rules: Any
) -> None:
    view = seen(value, **rules)
    assert view.cut
    assert view.kept is not None
    assert VIEW_BYTES_MAX - 10 < len(view.kept) <= VIEW_BYTES_MAX
    text = msgspec.msgpack.decode(view.kept)
    assert text.startswith("ää" if isinstance(value, str) else '["text", "text"')
    assert seen(value[:-1], **rules).digest != view.digest


def test_a_long_result_may_have_keys_that_json_cannot_have() -> None:
    view = seen({b"key": "x" * VIEW_BYTES_MAX})
    assert view.kept is not None
    assert msgspec.msgpack.decode(view.kept).startswith("{b'key': 'xxx")


def test_patterns_are_in_slashes() -> None:
    assert is_pattern("/a/")
    assert not is_pattern("//")
    assert not is_pattern("a/b")
    assert pattern_problem("/[0-9]+/") == ""
    assert "is no regular expression (unterminated character set" in pattern_problem("/[/")
    assert "longer than 500" in pattern_problem(f"/{'a' * 500}/")


@pytest.mark.parametrize(
    "pattern",
    [
        "(?<=a{4294967294})(?<=a{4294967294})",  # `re` raises RuntimeError
        "(" * 200 + ")" * 199,
        "a{9999999999999}",
        "\\N{no such name}",
        "[\\x01-\\U0010ffff]" * 2,
        "[-\\x01-\U0010ffff][-\\x01-\U0010ffff]",
        "[\x01-\\N{WHITE SQUARE}]" * 2,
        "[\x01-\uffff]" * 90,
    ],
)
def test_a_pattern_that_cannot_be_used_is_told_and_costs_little(pattern: str) -> None:
    assert pattern_problem(f"/{pattern}/")


@pytest.mark.parametrize(
    "pattern",
    [
        "[а-яё]+ [А-Я]",
        "[\U00010000-\U0010ffff]",
        r"[\U00010000-\U0010ffff]",
        "[[a]",
        "a-z",
        "😀-😂",
    ],
)
def test_usual_patterns_have_no_problem(pattern: str) -> None:
    assert pattern_problem(f"/{pattern}/") == ""


@given(st.text("()[]{}|?*+.^$\\-<=!:iaLmsux0123456789,PNU\uffff", max_size=30))
def test_any_pattern_has_a_problem_or_none(pattern: str) -> None:
    pattern_problem(f"/{pattern}/")
