"""Text is fitted into columns by whole words and parts of names, in any script."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from musterd.supervisor.text.fitting import cells, clip, padded, shorten, wrapped

TEXTS = st.text(st.sampled_from("ab zя的。、価/-_.:=?€,;(́"), max_size=120)
ROOMS = st.integers(min_value=4, max_value=60)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("", 0),
        ("price", 5),
        ("цена", 4),
        ("価格", 4),
        ("e\u0301", 1),  # e and an accent
        ("ﾃ", 1),
        ("価格: 10 €", 10),
        ("❤\ufe0f", 2),
        ("價\ufe0f", 2),
    ],
)
def test_a_text_takes_as_many_columns_as_a_terminal_gives_it(text: str, columns: int) -> None:
    assert cells(text) == columns


@given(TEXTS)
def test_columns_are_those_of_terminals(text: str) -> None:
    assert cells(text) == wcswidth(text)


@pytest.mark.parametrize(
    ("text", "room", "shown"),
    [
        ("no price on the page", 20, "no price on the page"),
        ("no price on the page", 19, "no price on the …"),
        ("no price on the page", 12, "no price …"),
        ("https://site.example/a/b/c/d/e failed", 20, "https…/a/b/c/d/e …"),
        ("価格がページに見つかりません", 15, "価格がページに…"),
        ("цена не найдена на странице", 14, "цена не …"),
        ("anything", 2, "…"),
    ],
)
def test_prose_is_clipped_between_words(text: str, room: int, shown: str) -> None:
    assert clip(text, room) == shown


@given(TEXTS, ROOMS)
def test_what_is_clipped_fits_and_says_so(text: str, room: int) -> None:
    shown = clip(text, room)
    assert cells(shown) <= room
    assert (shown == text) == (cells(text) <= room)
    assert shown == text or "…" in shown


@pytest.mark.parametrize(
    ("name", "room", "shown"),
    [
        ("aurora-price-watch-parser/12", 28, "aurora-price-watch-parser/12"),
        ("aurora-price-watch-parser/12", 20, "aurora…parser/12"),
        ("www.aurora-shop.example", 16, "www…shop.example"),
        ("aurora_price.extract_all_prices", 18, "aurora…all_prices"),
        ("https://shop.example/kites/red/large", 25, "https://shop…/red/large"),
        ("x" * 50, 20, "x" * 13 + "…" + "x" * 6),
        ("東京都渋谷区のショップ", 9, "東京都…プ"),
        ("anything", 1, "…"),
    ],
)
def test_a_name_keeps_whole_parts_at_both_ends(name: str, room: int, shown: str) -> None:
    assert shorten(name, room) == shown


def test_different_names_stay_different() -> None:
    first = shorten("shop-import-of-kites-daily", 14)
    second = shorten("shop-import-of-teas-daily", 14, (first,))
    assert first != second
    assert max(cells(first), cells(second)) <= 14


@given(TEXTS.filter(lambda name: name.isprintable()), ROOMS, st.lists(TEXTS, max_size=3))
def test_a_shortened_name_fits(name: str, room: int, taken: list[str]) -> None:
    shown = shorten(name, room, taken)
    assert cells(shown) <= room
    head, _, tail = shown.partition("…")
    assert shown == name or (name.startswith(head) and name.endswith(tail))


def test_long_words_go_on_behind_a_slash() -> None:
    assert wrapped("GET https://shop.example/kites/red/large?color=blue failed", 30) == [
        "GET https://shop.example/",
        "    kites/red/large?color=blue",
        "    failed",
    ]
    assert wrapped("価格が、見つかりません。", 14, indent="") == ["価格が、見つか", "りません。"]


@given(TEXTS, ROOMS.filter(lambda room: room > 7))
def test_wrapped_lines_fit_and_lose_nothing(text: str, room: int) -> None:
    lines = wrapped(text, room, indent="  ", first="> ")
    assert max(cells(line) for line in lines) <= max(room, 2)
    assert "".join("".join(lines).split()) == "".join(f"> {text}".split())
    (first,) = wrapped(text, 0, first="> ")
    assert first == f"> {text}"


@given(TEXTS, ROOMS.filter(lambda room: room > 7), st.integers(min_value=1, max_value=3))
def test_there_are_at_most_so_many_lines(text: str, room: int, lines_max: int) -> None:
    whole = wrapped(text, room, indent="  ")
    lines = wrapped(text, room, indent="  ", lines_max=lines_max)
    assert len(lines) <= lines_max
    assert max(cells(line) for line in lines) <= room
    assert len(whole) > lines_max or lines == whole
    assert len(whole) <= lines_max or "…" in lines[-1]


def test_a_text_of_a_megabyte_is_fitted_at_once() -> None:
    assert len(wrapped("word " * 200_000, 80, lines_max=4)) == 4
    assert clip("word " * 200_000, 20) == "word word word …"


def test_padding_counts_columns() -> None:
    assert padded("価格", 6) == "価格  "
    assert padded("12", 4, right=True) == "  12"
