"""Rules for the worker: which part of a result is watched."""

import re

import msgspec
from msgspec import Struct

PATTERN_CHARS_MAX = 500


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
    try:
        re.compile(text[1:-1])
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression ({error})"
    return ""
