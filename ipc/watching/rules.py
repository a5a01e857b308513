"""Rules for the worker: which part of a result is watched."""

import re
import warnings

import msgspec
from msgspec import Struct

PATTERN_CHARS_MAX = 500
# Of all ranges such as a-z in a pattern: `re` looks at each of them, in the daemon's loop.
RANGE_CHARS_MAX = 0x110000 + 0x10000
_CHAR = r"(\\[uUx][0-9A-Fa-f]+|\\N\{[^}]*\}|\\?.)"
_RANGE = re.compile(f"(?={_CHAR}-{_CHAR})", re.DOTALL)


class Rules(Struct, array_like=True, frozen=True):
    """What of a result counts. Without any rule the result counts as it is, byte by byte."""

    watch: tuple[str, ...] = ()  # fields of the result; none: all of them
    ignore: tuple[str, ...] = ()  # fields at any depth, and patterns "/.../" to take out of texts
    numbers: bool = False  # what is watched must be numbers
    picture: bool = False  # the handler takes a picture of the page, for the alert about a change

    @property
    def plain(self) -> bool:
        """Return whether a result counts as it is."""
        return not (self.watch or self.ignore or self.numbers)

    @property
    def fields_ignored(self) -> frozenset[str]:
        return frozenset(each for each in self.ignore if not is_pattern(each))

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(each[1:-1] for each in self.ignore if is_pattern(each))


_encode = msgspec.msgpack.Encoder().encode
decode_rules = msgspec.msgpack.Decoder(Rules).decode


def encode_rules(rules: Rules) -> bytes:
    """Return the rules for the worker. Without a picture they are as the version before wrote
    them: rules that look different begin with a new baseline."""
    return _encode(rules if rules.picture else (rules.watch, rules.ignore, rules.numbers))


PLAIN = encode_rules(Rules())


def is_pattern(text: str) -> bool:
    """Return whether a text is a regular expression in slashes, and not the name of a field."""
    return len(text) > 2 and text[0] == text[-1] == "/"


def pattern_problem(text: str) -> str:
    """Return what is wrong with a pattern in slashes; "" if nothing is."""
    if len(text) > PATTERN_CHARS_MAX:
        return f"is longer than {PATTERN_CHARS_MAX} characters"
    ranges: dict[int, int] = {}  # by the place of their sign
    for found in _RANGE.finditer(text):
        ranges.setdefault(found.end(1), _number(found[2]) - _number(found[1]))
    if sum(max(0, each) for each in ranges.values()) > RANGE_CHARS_MAX:
        return f"has ranges of over {RANGE_CHARS_MAX} characters"
    try:
        with warnings.catch_warnings():  # about sets that a later Python may read otherwise
            warnings.simplefilter("ignore")
            re.compile(text[1:-1])
    except Exception as error:  # noqa: BLE001 - of some patterns it says "invalid SRE code"
        return f"is no regular expression ({error})"
    return ""


def _number(char: str) -> int:
    """Return the code of one end of a range; the last there is where that has a name."""
    if char[:2] in ("\\u", "\\U", "\\x"):
        return int(char[2:], 16)
    return 0x10FFFF if char[:2] == "\\N" else ord(char[-1])
