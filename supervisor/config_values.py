"""The kinds of values a configuration key can have: how each is read, checked and written.

A kind stands in the annotation of a field, `Annotated[int, Duration()]`. `read` turns what a file
says into what the program uses; its ValueError continues the sentence "value X ...". `write` is
the way back. Values that come as text from outside (environment, --set) may stand for text or for
a number: `takes_text` says that the text is meant.
"""

import keyword
import math
import re
from typing import Any, ClassVar

from msgspec import Struct

from musterd.supervisor.units import format_duration, parse_duration, parse_share

# No path, name or word of a configuration is longer (PATH_MAX of Linux).
TEXT_LENGTH_MAX = 4096
# Deeper tables are a mistake, or a YAML document that contains itself.
NESTING_MAX = 20

_GROUP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")  # as groupadd(8) allows


class Kind(Struct, frozen=True):
    """Base of all kinds."""

    takes_text: ClassVar[bool] = False
    holds_table: ClassVar[bool] = False  # of values, with names of the user's choice
    nests: ClassVar[bool] = False  # whose values may be tables again

    def check_name(self, name: str) -> None:
        """ValueError if a value in the table cannot be called so."""

    def read(self, value: object) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> object:
        return value


class Flag(Kind, frozen=True):
    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError("is neither true nor false: give one of them, without quotes")
        return value


class Whole(Kind, frozen=True):
    low: int
    high: int

    def read(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(
                f"is not an integer: give a whole number such as {min(max(3, self.low), self.high)}"
            )
        if not self.low <= value <= self.high:
            raise ValueError(f"is out of range: give a whole number from {self.low} to {self.high}")
        return value


class Number(Kind, frozen=True):
    low: float
    high: float

    def read(self, value: object) -> float:
        give = f"give a number from {self.low:g} to {self.high:g}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"is not a number: {give}")
        if not self.low <= value <= self.high:  # also true for nan
            raise ValueError(f"is out of range: {give}")
        return float(value)

    def write(self, value: float) -> object:
        return int(value) if value.is_integer() else value


class Share(Kind, frozen=True):
    def read(self, value: object) -> float:
        return parse_share(value)

    def write(self, value: float) -> object:
        return int(value) if value.is_integer() else value


class Duration(Kind, frozen=True):
    """Kept as nanoseconds."""

    low_ns: int = 0

    def read(self, value: object) -> int:
        duration_ns = parse_duration(value)
        if duration_ns < self.low_ns:
            raise ValueError(f'is too short: give at least "{format_duration(self.low_ns)}"')
        return duration_ns

    def write(self, value: int) -> object:
        return format_duration(value)


class Text(Kind, frozen=True):
    takes_text = True

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("is not text: put it in quotes")
        if len(value) > TEXT_LENGTH_MAX:
            raise ValueError(f"is longer than {TEXT_LENGTH_MAX} characters: shorten it")
        _check_characters(value)
        return value


class Choice(Text, frozen=True):
    """One of a few words. `later` names those of versions to come."""

    words: tuple[str, ...]
    later: tuple[str, ...] = ()

    def read(self, value: object) -> str:
        give = f"give {_alternatives(self.words)}"
        if value in self.later:
            raise ValueError(f"is not supported by this version: {give}")
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(f"is not known here: {give}")
        return value


class AbsolutePath(Text, frozen=True):
    """An absolute path, or "" for none."""

    def read(self, value: object) -> str:
        path = super().read(value)
        if path and not path.startswith("/"):
            raise ValueError("is not an absolute path: begin it with /")
        return path


class GroupName(Text, frozen=True):
    """The name of a group of users, or "" for none."""

    def read(self, value: object) -> str:
        name = super().read(value)
        if name and not _GROUP_NAME.fullmatch(name):
            raise ValueError("cannot be the name of a group: give one that `getent group` lists")
        return name


class WorkerName(Text, frozen=True):
    """Where the worker's code is: "package.module:Class", or "package.module" for functions."""

    def read(self, value: object) -> str:
        name = super().read(value)
        module, colon, attribute = name.partition(":")
        parts = [*module.split("."), *([attribute] if colon else [])]
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise ValueError(
                'is not the name of a worker: give "module:Class", or "module" for its functions'
            )
        return name


class Variables(Kind, frozen=True):
    """A table of environment variables; `read` is given one value of it."""

    takes_text = True
    holds_table = True

    def check_name(self, name: str) -> None:
        if not name or "=" in name:
            raise ValueError("cannot be the name of a variable: remove the =, or give it a name")
        _check_characters(name)

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("is not text: put it in quotes")
        if "\0" in value:
            raise ValueError("contains a NUL character: remove it")
        _check_encodable(value)
        return value


class Options(Kind, frozen=True):
    """A table of the worker's own; `read` is given one value of it, or a table inside.

    Whatever TOML and msgpack can both hold, but for dates.
    """

    holds_table = True
    nests = True

    def check_name(self, name: str) -> None:
        _check_encodable(name)

    def read(self, value: object, depth: int = NESTING_MAX) -> object:
        if depth == 0:
            raise ValueError(f"is nested deeper than {NESTING_MAX} levels: flatten it")
        if isinstance(value, dict):
            for name in value:
                if not isinstance(name, str):
                    raise ValueError(f"contains the name {name!r}, which is not text: quote it")
                self.check_name(name)
            return {name: self.read(item, depth - 1) for name, item in value.items()}
        if isinstance(value, list):
            return [self.read(item, depth - 1) for item in value]
        _check_scalar(value)
        return value


def _check_scalar(value: object) -> None:
    match value:
        case bool():
            pass
        case str():
            _check_encodable(value)
        case int():
            if not -(2**63) <= value < 2**63:
                raise ValueError("needs more than 64 bits: put it in quotes")
        case float():
            if not math.isfinite(value):
                raise ValueError("is not a finite number: give one, or text")
        case _:
            raise ValueError(
                "is neither text, number, true, false, list nor table: put it in quotes"
            )


def _check_characters(text: str) -> None:
    _check_encodable(text)
    if not text.isprintable():
        raise ValueError("contains a character that cannot be printed: remove it")


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid UTF-8: correct its encoding") from None


def _alternatives(words: tuple[str, ...]) -> str:
    quoted = [f'"{word}"' for word in words]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
