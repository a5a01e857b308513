"""Numbers as people write them: a table of cases, and every locale's way back and forth."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.watching.numbers import TEXT_CHARS_MAX, parse_number

READ = {
    "1.299,00 €": 1299,
    "$1,299.00": 1299,
    "₽ 349": 349,
    "349\u00a0₽": 349,
    "1 299,00": 1299,
    "1\u202f299,00\u00a0€": 1299,
    "1'299.-": 1299,
    "CHF 1’299.–": 1299,
    "1'299.50": 1299.5,
    "49,-": 49,
    "49,-- €": 49,
    "49.- ": 49,
    "(12)": 12,
    "Reviews (12)": 12,
    # Three digits behind one sign are thousands ...
    "1.299": 1299,
    "1,299": 1299,
    "12,345": 12345,
    # ... unless they cannot be.
    "0.299": 0.299,
    "0,299": 0.299,
    "1234.567": 1234.567,
    "1.299.000": 1299000,
    "1,299,000.50": 1299000.5,
    "1.299.000,5": 1299000.5,
    "1 299 000": 1299000,
    "1,29,999.00": 129999,
    "49.9": 49.9,
    "49,90 EUR": 49.9,
    "EUR49": 49,
    "49kr": 49,
    "R$ 1.299,90": 1299.9,
    "Rs.500": 500,
    "Rs. 1,500": 1500,
    "$.99": 0.99,
    ".5": 0.5,
    "-5": -5,
    "- 5": -5,
    "−5,50 €": -5.5,
    "-$5.00": -5,
    "$-5.00": -5,
    "- € 5": -5,
    "A-5": 5,
    "A - 5": 5,
    "+3": 3,
    "5%": 5,
    "-20 %": -20,
    "Price: 49.00 €.": 49,
    "ab 49,00 €*": 49,
    "007": 7,
    "0": 0,
    "0,00": 0,
    "４９": 49,
    "٤٩": 49,
    "١٬٢٩٩٫٥٠ ر.س": 1299.5,
    "49٫90": 49.9,
    "5 m": 5,
}
REFUSED = (
    "",
    "free",
    "49 € to 59 €",
    "49.00 € (-20%)",
    "2 for 5 €",
    "12:30",
    "2026-11-18",
    "18.11.2026",
    "1.2k",
    "1.2 M",
    "3 Mio.",
    "3 млн ₽",
    "1e5",
    "1,2,3",
    "1.29,00.5",
    "12'34",
    "99 € / m²",
    "49⁹⁹ €",
    "49\u2007⅓",
    "1" * (TEXT_CHARS_MAX + 1),
)


@pytest.mark.parametrize("text", READ)
def test_a_number_is_read_as_people_mean_it(text: str) -> None:
    assert parse_number(text) == READ[text]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_one_number_is_none(text: str) -> None:
    assert parse_number(text) is None


def test_numbers_stay_what_they_are_and_other_values_are_none() -> None:
    assert parse_number(3) == 3
    assert parse_number(1.299) == 1.299
    for value in (None, True, [1], {"a": 1}, b"1", math.nan, math.inf, 10**400):
        assert parse_number(value) is None


STYLES = ((",", "."), (".", ","), (" ", ","), ("\u202f", ","), ("'", "."), ("", "."), ("", ","))
AROUND = ("{}", "{} €", "$ {}", "CHF {}", "{} ₽", "only {} today", "{}*")


@given(st.integers(0, 10**11), st.sampled_from(STYLES), st.sampled_from(AROUND), st.booleans())
def test_every_locale_is_read_back(
    cents: int, style: tuple[str, str], around: str, negative: bool
) -> None:
    thousands, decimal = style
    text = f"{cents // 100:,}".replace(",", thousands) + f"{decimal}{cents % 100:02}"
    text = ("-" if negative else "") + text
    assert parse_number(around.format(text)) == (-cents if negative else cents) / 100


@given(st.integers(1000, 10**15), st.sampled_from((",", ".", " ", "'")))
def test_whole_thousands_are_read_back(number: int, sign: str) -> None:
    assert parse_number(f"{number:,}".replace(",", sign)) == number


@given(st.text(max_size=60))
def test_no_text_raises_and_a_number_is_finite(text: str) -> None:
    number = parse_number(text)
    assert number is None or math.isfinite(number)
