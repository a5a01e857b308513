"""Keys of [[schedule]] that say what counts as a change: their kinds, and how they fit together."""

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import Struct, structs

from musterd.ipc.watching.rules import Rules, encode_rules, is_pattern, pattern_problem
from musterd.ipc.wire.messages import WATCH_BYTES_MAX
from musterd.supervisor.config.kinds import NAME_LENGTH_MAX, Kind, TextList, check_characters
from musterd.supervisor.config.section import Conflict

LIMIT_MAX = 1e15  # of a number that is watched: floats count every whole number up to here
CONFIRM_MAX = 100
KEEP_MAX = 200  # its list is written with each run
STALE_MAX = 1000
WATCH_KEYS = ("watch", "ignore", "confirm", "above", "below", "by", "keep", "stale", "attach")
SCREENSHOT = "screenshot"  # value of `attach`


class FieldNames(TextList, frozen=True):
    """Fields of a result."""

    noun = "fields"
    example = '"price"'

    def read_one(self, text: str) -> str:
        if not 0 < len(text) <= NAME_LENGTH_MAX:
            raise ValueError(f"has a name that is empty or over {NAME_LENGTH_MAX} characters")
        if is_pattern(text):
            raise ValueError(f'has "{text}", which is a pattern: only `ignore` takes patterns')
        check_characters(text)
        return text


class Ignored(TextList, frozen=True):
    """Fields of a result, and patterns in slashes."""

    noun = "fields and patterns"
    example = '"time", "/[0-9]+ visitors/"'

    def read_one(self, text: str) -> str:
        problem = pattern_problem(text) if is_pattern(text) else ""
        if problem:
            raise ValueError(f'has "{text[:NAME_LENGTH_MAX]}", which {problem}: correct it')
        if not is_pattern(text) and not 0 < len(text) <= NAME_LENGTH_MAX:
            raise ValueError(f"has a name that is empty or over {NAME_LENGTH_MAX} characters")
        check_characters(text)
        return text


class Step(Kind, frozen=True):
    """How far a number must go: a number, or a share of it such as "5%"; "" for no step."""

    takes_text: ClassVar[bool] = True

    def read(self, value: object) -> str:
        if value == "":
            return ""
        try:
            number, _ = parse_step(value)
        except ValueError:
            number = 0.0
        if not 0 < number <= LIMIT_MAX:
            raise ValueError('is not a step: give a number above 0, or a share such as "5%"')
        return str(value).strip()

    def write(self, value: str) -> object:
        number, share = parse_step(value) if value else (0.0, True)
        return value if share else (int(number) if number.is_integer() else number)


def parse_step(value: object) -> tuple[float, bool]:
    """Return a step, and whether it is a share; ValueError if it is no number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("not a number")
    text = str(value).strip()
    if text.endswith("%"):
        return float(text.removesuffix("%")) / 100, True
    return float(text), False


def rules_of(schedule: Any) -> Rules:
    """Return what the worker has to know of a result that is watched."""
    numbers = schedule.above is not None or schedule.below is not None or bool(schedule.by)
    return Rules(schedule.watch, schedule.ignore, numbers, schedule.attach == SCREENSHOT)


def given_keys(schedule: Struct) -> list[str]:
    """Return the keys about watching whose values are not the default."""
    defaults = {each.name: each.default for each in structs.fields(type(schedule))}
    return [name for name in WATCH_KEYS if getattr(schedule, name) != defaults[name]]


def watch_conflicts(schedule: Any) -> Iterator[Conflict]:
    rules = rules_of(schedule)
    if not schedule.notify:
        for name in given_keys(schedule):
            yield (name,), 'has no effect without notify = "task.changed": add that'
    for name in schedule.ignore:
        if name in schedule.watch:
            yield ("ignore",), f'has "{name}", which is in watch: remove it from one of them'
    if len(encode_rules(rules)) > WATCH_BYTES_MAX:
        yield ("watch",), f"and ignore have over {WATCH_BYTES_MAX} bytes together: shorten them"
    if not rules.plain and (schedule.key or schedule.cache_ns or schedule.debounce_ns):
        name = "key" if schedule.key else "cache" if schedule.cache_ns else "debounce"
        why = "takes results of other tasks, which these rules have not seen"
        yield (name,), f"{why}: remove it, or watch, ignore, above, below and by"


ATTACH_SHARED = (
    "has no effect in a pool that a cluster shares, because pictures stay on their node: remove "
    "it, or take the pool out of cluster.pools"
)


def attach_conflicts(task: str, *, parses: bool, kept: bool) -> Iterator[Conflict]:
    """Yield why a schedule cannot have a picture; `parses`: by the built-in parser worker."""
    if parses:
        yield (
            ("attach",),
            f"has no effect with task '{task}', which shows no page: use browser.extract or "
            "browser.render, or remove it",
        )
    if not kept:
        yield ("attach",), "has no effect where artefacts.enabled is false: remove one of them"
