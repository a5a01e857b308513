"""Base of all sections of the configuration."""

import re
from collections.abc import Iterator
from typing import ClassVar

from msgspec import Struct

from musterd.supervisor.text.units import SECOND_NS, format_duration

MILLISECOND_NS = SECOND_NS // 1000
MEBIBYTE = 1024 * 1024
# Failures, workers, probes: more is a typing error.
COUNT_MAX = 100_000
# Its 64th power must stay a float; a delay that grows faster is at its maximum anyway.
FACTOR_MAX = 100

NAME = re.compile(r"[a-z][a-z0-9_-]*")

# The path of a value that conflicts with others, and the rest of the sentence.
Conflict = tuple[tuple[str, ...], str]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""

    # In a table of these sections: how many there may be, and what a name is, at most so long.
    entries_max: ClassVar[int] = 0
    name_is: ClassVar[str] = ""
    name_length_max: ClassVar[int] = 0
    # The field whose sections stand beside the keys of this one: [sessions] and [sessions.NAME].
    flattens: ClassVar[str] = ""

    @classmethod
    def name_problem(cls, name: str) -> str:
        """Return why a section in a table cannot have this name, or ""."""
        if NAME.fullmatch(name) and len(name) <= cls.name_length_max:
            return ""
        return (
            f"not {cls.name_is}: use lower-case letters, digits, - and _, beginning with a letter, "
            f"at most {cls.name_length_max} characters"
        )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield keys whose values conflict."""
        yield from ()


def base_over_max(base_ns: int, max_ns: int) -> Iterator[Conflict]:
    if base_ns > max_ns:
        yield ("base",), f"is longer than max ({format_duration(max_ns)}): lower base or raise max"
