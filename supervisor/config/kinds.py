"""The kinds of configuration values: how each is read, checked and written.

A kind stands in the annotation of a field, `Annotated[int, Duration()]`. `read` converts the value
of a file for the program; its ValueError continues the sentence "value X ...". `write` converts
back. A value given as text (environment, --set) may mean text or a number: `takes_text` prefers
text.
"""

import builtins
import keyword
import math
import re
from typing import Any, ClassVar

from msgspec import Struct

from musterd.ipc.wire.messages import AS_CONFIGURED, USUAL
from musterd.supervisor.config.timezones import time_zone
from musterd.supervisor.core.model.timing import cron_problem
from musterd.supervisor.text.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
)

# The longest path, name or word of a configuration (PATH_MAX on Linux).
TEXT_LENGTH_MAX = 4096
# The longest name in the protocol (ipc.wire.messages.Name).
TASK_NAME_LENGTH_MAX = 200
# Argument names: each submit is searched for all of them.
NAMES_MAX = 100
NAME_LENGTH_MAX = 200
# Deeper tables are a mistake, or a YAML document that contains itself.
NESTING_MAX = 20
STRATEGIES = ("exponential", "linear", "fixed", "random")  # as ipc.resilience.policy.Strategy
RATE_MAX = 1_000_000  # starts per unit of time: a higher rate is no limit

_GROUP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")  # as groupadd(8) allows


class Kind(Struct, frozen=True):
    """Base of all kinds."""

    takes_text: ClassVar[bool] = False
    secret: ClassVar[bool] = False  # its values are never shown
    holds_table: ClassVar[bool] = False  # a table of values, with names chosen by the user
    nests: ClassVar[bool] = False  # values of the table may be tables again

    def check_name(self, name: str) -> None:
        """Raise ValueError if a value in the table cannot have this name."""

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


class Rate(Kind, frozen=True):
    """A number per second, minute, hour or day; stored per second, 0 for no limit."""

    takes_text: ClassVar[bool] = True
    units: ClassVar[dict[str, float]] = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def read(self, value: object) -> float:
        give = 'give a rate such as "1/s", "30/m" or "100/h"'
        if value == 0 and not isinstance(value, bool):
            return 0.0
        count, slash, unit = value.partition("/") if isinstance(value, str) else ("", "", "")
        try:
            number = float(count)
        except ValueError:
            raise ValueError(f"is not a rate: {give}") from None
        if not slash or unit.strip() not in self.units:
            raise ValueError(f"is not a rate: {give}")
        if not 0 < number <= RATE_MAX:
            raise ValueError(f"is out of range: {give}")
        return number / self.units[unit.strip()]

    def write(self, value: float) -> object:
        for unit, seconds in self.units.items():
            count = value * seconds
            if value and abs(count - round(count)) < 1e-9 * count:
                return f"{round(count)}/{unit}"
        return f"{value!r}/s" if value else 0


class Duration(Kind, frozen=True):
    """Stored as nanoseconds."""

    low_ns: int = 0

    def read(self, value: object) -> int:
        duration_ns = parse_duration(value)
        if duration_ns < self.low_ns:
            raise ValueError(f'is too short: give at least "{format_duration(self.low_ns)}"')
        return duration_ns

    def write(self, value: int) -> object:
        return format_duration(value)


class Age(Duration, frozen=True):
    """The maximum age of a result: a duration, true for the default, false for none."""

    def read(self, value: object) -> int:
        if isinstance(value, bool):
            return AS_CONFIGURED if value else 0
        return super().read(value)

    def write(self, value: int) -> object:
        return super().write(value) if value > 0 else value == AS_CONFIGURED


class Size(Kind, frozen=True):
    """Stored as bytes."""

    low: int
    high: int

    def read(self, value: object) -> int:
        size = parse_size(value)
        if not self.low <= size <= self.high:
            low, high = format_size(self.low), format_size(self.high)
            raise ValueError(f'is out of range: give a size from "{low}" to "{high}"')
        return size

    def write(self, value: int) -> object:
        return format_size(value)


class Text(Kind, frozen=True):
    takes_text = True

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("is not text: put it in quotes")
        if len(value) > TEXT_LENGTH_MAX:
            raise ValueError(f"is longer than {TEXT_LENGTH_MAX} characters: shorten it")
        check_characters(value)
        return value


class Label(Text, frozen=True):
    """Text for messages and columns."""

    length_max: int

    def read(self, value: object) -> str:
        text = super().read(value)
        if len(text) > self.length_max:
            raise ValueError(f"is longer than {self.length_max} characters: shorten it")
        return text


class Choice(Text, frozen=True):
    """One of a few words, in upper or lower case."""

    words: tuple[str, ...]

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value.lower() not in self.words:
            raise ValueError(f"is unknown: give {_alternatives(self.words)}")
        return value.lower()


class AbsolutePath(Text, frozen=True):
    """An absolute path, or "" for none."""

    def read(self, value: object) -> str:
        path = super().read(value)
        if path and not path.startswith("/"):
            raise ValueError("is not an absolute path: begin it with /")
        return path


class GroupName(Text, frozen=True):
    """The name of a user group, or "" for none."""

    def read(self, value: object) -> str:
        name = super().read(value)
        if name and not _GROUP_NAME.fullmatch(name):
            raise ValueError("is not a valid group name: give one that `getent group` lists")
        return name


class WorkerName(Text, frozen=True):
    """The worker's code: "package.module:Class", or "package.module" for functions."""

    def read(self, value: object) -> str:
        name = super().read(value)
        module, colon, attribute = name.partition(":")
        if not _are_names([*module.split("."), *([attribute] if colon else [])]):
            raise ValueError('is not a worker: give "module:Class", or "module" for its functions')
        return name


class StrategyName(Text, frozen=True):
    """How delays grow: a word, or a function of the user, "package.module:function"."""

    def read(self, value: object) -> str:
        name = super().read(value)
        module, _, function = name.partition(":")
        if name not in STRATEGIES and not _are_names([*module.split("."), function]):
            words = _alternatives((*STRATEGIES, "module:function"))
            raise ValueError(f"is unknown: give {words}")
        return name


class TextList(Kind, frozen=True):
    """Base of lists of texts, each kept once."""

    noun: ClassVar[str]
    example: ClassVar[str]
    count_max: ClassVar[int] = NAMES_MAX
    remedy: ClassVar[str] = "shorten it"  # for a list that is too long

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"is not a list of {self.noun}: give one such as [{self.example}]")
        if len(value) > self.count_max:
            raise ValueError(f"has more than {self.count_max} {self.noun}: {self.remedy}")
        return tuple(dict.fromkeys(self.read_one(each) for each in value))

    def read_one(self, text: str) -> str:
        raise NotImplementedError

    def write(self, value: tuple[str, ...]) -> object:
        return list(value)


class FunctionNames(TextList, frozen=True):
    """A list of functions of the user, each "package.module:function"."""

    noun = "functions"
    example = '"myapp.ending:run"'

    def read_one(self, text: str) -> str:
        module, _, function = text.partition(":")
        if not _are_names([*module.split("."), function]):
            raise ValueError(f'has "{text[:200]}", which is not "module:function": correct it')
        return text


class FunctionName(Text, frozen=True):
    """A function of the user, "package.module:function", or "" for none."""

    def read(self, value: object) -> str:
        name = super().read(value)
        module, _, function = name.partition(":")
        if name and not _are_names([*module.split("."), function]):
            raise ValueError('is not a function: give "module:function"')
        return name


class ExceptionNames(TextList, frozen=True):
    """A list of exceptions that a site's breaker counts: "package.module:Error", the name of a
    built-in one, or USUAL for the default ones."""

    noun = "exceptions"
    example = '"myapp.errors:Blocked", "usual"'

    def read_one(self, text: str) -> str:
        module, colon, error = text.partition(":")
        if len(text) > NAME_LENGTH_MAX:
            raise ValueError(f"has a name of over {NAME_LENGTH_MAX} characters: shorten it")
        if colon and _are_names([*module.split("."), *error.split(".")]):
            return text
        known = getattr(builtins, text, None)
        if text != USUAL and not (isinstance(known, type) and issubclass(known, Exception)):
            raise ValueError(
                f'has "{text}", which is neither "module:Error", nor a built-in exception such '
                f'as "TimeoutError", nor "{USUAL}": correct it'
            )
        return text


class TaskName(Text, frozen=True):
    """The name of a task: POOL.METHOD."""

    def read(self, value: object) -> str:
        name = super().read(value)
        pool, _, method = name.partition(".")
        if not pool or not method.isidentifier() or len(name) > TASK_NAME_LENGTH_MAX:
            raise ValueError('is not a task name: give "POOL.METHOD"')
        return name


class OptionalTaskName(TaskName, frozen=True):
    """The name of a task, or "" for none."""

    def read(self, value: object) -> str:
        return super().read(value) if value != "" else ""


class CronExpression(Text, frozen=True):
    """A cron expression, or "" for none."""

    def read(self, value: object) -> str:
        expression = super().read(value)
        if expression and (problem := cron_problem(expression)):
            raise ValueError(
                f"is not a cron expression ({problem}): give minute, hour, day of the month, "
                'month and day of the week, such as "*/5 * * * *", or a word such as "@daily"'
            )
        return expression


class TimeZone(Text, frozen=True):
    """The name of a time zone, or "" for that of this machine."""

    def read(self, value: object) -> str:
        name = super().read(value)
        if name:
            time_zone(name)
        return name


class ArgumentNames(TextList, frozen=True):
    noun = "names"
    example = '"password"'

    def read_one(self, text: str) -> str:
        if not 0 < len(text) <= NAME_LENGTH_MAX:
            raise ValueError(f"has a name that is empty or over {NAME_LENGTH_MAX} characters")
        check_characters(text)
        return text


class Variables(Kind, frozen=True):
    """A table of environment variables; `read` gets one value of it."""

    takes_text = True
    holds_table = True

    def check_name(self, name: str) -> None:
        if not name or "=" in name:
            raise ValueError("is not a valid variable name: remove the =, or give it a name")
        check_characters(name)

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("is not text: put it in quotes")
        if "\0" in value:
            raise ValueError("contains a NUL character: remove it")
        _check_encodable(value)
        return value


class Options(Kind, frozen=True):
    """A table of the worker's own; `read` is given one value of it, or a table inside.

    Anything that both TOML and msgpack can hold, except dates.
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


def _are_names(parts: list[str]) -> bool:
    """Return whether each part is a valid name in Python."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


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


def check_characters(text: str) -> None:
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
