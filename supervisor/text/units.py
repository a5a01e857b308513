"""Convert durations, sizes and shares as people write them to exact numbers, and back.

    "500ms" "30s" "5m" "2h" "1d"    nanoseconds; a plain number counts seconds
    "400M" "2G"                     bytes, in steps of 1024; a plain number counts bytes
    "70%"                           0.7; a plain number is the share itself

A ValueError continues the sentence "value X ...": what is wrong, then what to give instead.
"""

import math
import re
from decimal import ROUND_HALF_EVEN, Decimal

SECOND_NS = 1_000_000_000

_DURATION_UNITS = {  # largest first: format_duration takes the first that divides evenly
    "d": 86_400 * SECOND_NS,
    "h": 3_600 * SECOND_NS,
    "m": 60 * SECOND_NS,
    "s": SECOND_NS,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}
_SIZE_UNITS = {"T": 1024**4, "G": 1024**3, "M": 1024**2, "K": 1024}

# A century: more is a typing error, and a century after today still fits in 63 bits.
DURATION_NS_MAX = 36_500 * _DURATION_UNITS["d"]
# A pebibyte: more than any machine has, and far from the end of 63 bits.
SIZE_BYTES_MAX = 1024 * _SIZE_UNITS["T"]
# Nobody means a longer number.
NUMBER_LENGTH_MAX = 40

# Greater than every limit here, and still quick to calculate with.
_ENDLESS = 2**80

_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z%]*)")

_GIVE_DURATION = 'give a number with a unit such as "500ms", "30s", "5m", "2h" or "1d"'
_GIVE_SIZE = 'give a number with a unit such as "400M" or "2G"'
_GIVE_SHARE = 'give a percentage such as "70%", or a number from 0 to 1'


def parse_duration(value: object) -> int:
    """Return nanoseconds; ValueError if the value is no duration from 0 to DURATION_NS_MAX."""
    number, unit = _number_and_unit(value, "duration", _GIVE_DURATION)
    if isinstance(value, str) and unit not in _DURATION_UNITS:
        raise ValueError(_unit_problem(unit, "duration", _GIVE_DURATION))
    exact = number * _DURATION_UNITS[unit or "s"]
    duration_ns = int(exact.to_integral_value(ROUND_HALF_EVEN))
    if duration_ns > DURATION_NS_MAX:
        raise ValueError(f"is too long: give at most {format_duration(DURATION_NS_MAX)}")
    if exact and not duration_ns:
        raise ValueError('is shorter than a nanosecond: give 0 or at least "1ns"')
    return duration_ns


def format_duration(duration_ns: int) -> str:
    """Return the shortest text that parse_duration turns into the number."""
    if not duration_ns:
        return "0s"
    unit, length_ns = next(
        (unit, length_ns)
        for unit, length_ns in _DURATION_UNITS.items()
        if duration_ns % length_ns == 0
    )
    return f"{duration_ns // length_ns}{unit}"


def parse_size(value: object) -> int:
    """Return bytes; ValueError if the value is no size from 0 to SIZE_BYTES_MAX."""
    number, unit = _number_and_unit(value, "size", _GIVE_SIZE)
    if unit and unit not in _SIZE_UNITS:
        raise ValueError(_unit_problem(unit, "size", _GIVE_SIZE))
    exact = number * _SIZE_UNITS.get(unit, 1)
    if exact > SIZE_BYTES_MAX:
        raise ValueError(f"is too large: give at most {format_size(SIZE_BYTES_MAX)}")
    if exact != exact.to_integral_value():
        raise ValueError("is not a whole number of bytes: give one without a fraction")
    return int(exact)


def format_size(size_bytes: int) -> str:
    """Return the shortest text that parse_size turns into the number."""
    for unit, length in _SIZE_UNITS.items():
        if size_bytes and size_bytes % length == 0:
            return f"{size_bytes // length}{unit}"
    return str(size_bytes)


def parse_share(value: object) -> float:
    """Return a number from 0 to 1; ValueError if the value is no share."""
    number, unit = _number_and_unit(value, "share", _GIVE_SHARE)
    if isinstance(value, str) and unit != "%":
        raise ValueError(_unit_problem(unit, "share", _GIVE_SHARE))
    share = number / 100 if unit else number
    if share > 1:
        raise ValueError(f"is more than the whole: {_GIVE_SHARE}")
    return float(share)


def _number_and_unit(value: object, what: str, give: str) -> tuple[Decimal, str]:
    """Return the number, never negative, and the unit behind it ("" for plain numbers)."""
    unit = ""
    if isinstance(value, bool):
        raise ValueError(f"is not a {what}: {give}")
    if isinstance(value, int):
        number = Decimal(max(-1, min(value, _ENDLESS)))
    elif isinstance(value, float) and math.isfinite(value):
        number = Decimal(repr(value))  # 0.1 means a tenth, not its nearest binary fraction
    elif isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value.removeprefix("-"))
        if match is None or len(value) > NUMBER_LENGTH_MAX:
            raise ValueError(f"is not a {what}: {give}")
        number, unit = Decimal(match[1]), match[2]
        if value.startswith("-"):
            number = -number
    else:
        raise ValueError(f"is not a {what}: {give}")
    if number < 0:
        raise ValueError(f"is negative: {give}")
    return number, unit


def _unit_problem(unit: str, what: str, give: str) -> str:
    if not unit:
        return f"has no unit: {give}"
    return f"has the unit {unit!r}, which no {what} has: {give}"
