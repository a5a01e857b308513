"""Durations, sizes and shares: exact, both ways, and clear about what is wrong."""

from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.supervisor.text.units import (
    DURATION_NS_MAX,
    SIZE_BYTES_MAX,
    format_duration,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
)

anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
)


@pytest.mark.parametrize(
    ("written", "duration_ns"),
    [
        ("500ms", 500_000_000),
        ("30s", 30_000_000_000),
        ("5m", 300_000_000_000),
        ("2h", 7_200_000_000_000),
        ("1d", 86_400_000_000_000),
        ("1.5s", 1_500_000_000),
        ("0.1s", 100_000_000),
        ("7us", 7_000),
        ("7ns", 7),
        ("0s", 0),
        (30, 30_000_000_000),
        (0.1, 100_000_000),
        (0, 0),
        ("36500d", DURATION_NS_MAX),
    ],
)
def test_a_duration_becomes_exact_nanoseconds(written: object, duration_ns: int) -> None:
    assert parse_duration(written) == duration_ns


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("-5s", "is negative"),
        (-1, "is negative"),
        (-0.5, "is negative"),
        ("36501d", "is too long: give at most 36500d"),
        (1e300, "is too long"),
        ("9" * 30 + "d", "is too long"),
        ("0.1ns", "is shorter than a nanosecond"),
        (1e-30, "is shorter than a nanosecond"),
        ("30", "has no unit"),
        ("5M", "has the unit 'M'"),
        ("5 s", "is not a duration"),
        ("1h30m", "is not a duration"),
        ("", "is not a duration"),
        ("s", "is not a duration"),
        ("٣s", "is not a duration"),
        ("9" * 100 + "d", "is not a duration"),
        (True, "is not a duration"),
        (None, "is not a duration"),
        (float("nan"), "is not a duration"),
        (float("inf"), "is not a duration"),
        (["30s"], "is not a duration"),
    ],
)
def test_what_is_no_duration_is_refused_with_the_reason(written: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        parse_duration(written)


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("400M", 400 * 1024**2),
        ("2G", 2 * 1024**3),
        ("1.5K", 1536),
        ("1T", 1024**4),
        ("0", 0),
        (4096, 4096),
    ],
)
def test_a_size_becomes_bytes(written: object, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("-1M", "is negative"),
        ("1025T", "is too large: give at most 1024T"),
        ("0.3K", "is not a whole number of bytes"),
        (0.5, "is not a whole number of bytes"),
        ("4X", "has the unit 'X'"),
        ("50%", "has the unit '%'"),
        ("big", "is not a size"),
        (False, "is not a size"),
    ],
)
def test_what_is_no_size_is_refused_with_the_reason(written: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "share"),
    [("70%", 0.7), ("0%", 0.0), ("100%", 1.0), ("12.5%", 0.125), (0.1, 0.1), (1, 1.0), (0, 0.0)],
)
def test_a_share_becomes_a_number_up_to_one(written: object, share: float) -> None:
    assert parse_share(written) == share


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (70, "is more than the whole"),
        ("101%", "is more than the whole"),
        ("-1%", "is negative"),
        ("0.7", "has no unit"),
        ("70s", "has the unit 's'"),
        ("most", "is not a share"),
    ],
)
def test_what_is_no_share_is_refused_with_the_reason(written: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        parse_share(written)


@given(st.integers(0, DURATION_NS_MAX))
def test_every_duration_survives_being_written(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns


@given(st.integers(0, 36_500), st.sampled_from(["d", "h", "m", "s", "ms"]))
def test_a_round_duration_is_written_in_a_unit_at_least_as_large(count: int, unit: str) -> None:
    written = f"{count}{unit}"
    assert len(format_duration(parse_duration(written))) <= max(len(written), len("0s"))


@given(st.integers(0, SIZE_BYTES_MAX))
def test_every_size_survives_being_written(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.decimals(0, 100, places=3))
def test_every_percentage_is_the_nearest_number(percent: Decimal) -> None:
    assert parse_share(f"{percent}%") == float(percent / 100)


def test_a_number_too_large_to_be_printed_is_too_long() -> None:
    with pytest.raises(ValueError, match=r"^is too long"):
        parse_duration(10**5000)


@given(anything)
def test_nonsense_is_refused_and_what_is_accepted_is_in_range(value: object) -> None:
    for parse, most in (
        (parse_duration, DURATION_NS_MAX),
        (parse_size, SIZE_BYTES_MAX),
        (parse_share, 1),
    ):
        with suppress(ValueError):
            assert 0 <= parse(value) <= most
