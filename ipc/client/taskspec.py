"""Checks of what a user submits, and the TaskSpec made of it. Errors name the wrong value.

The supervisor drops a whole batch that holds one malformed task, so nothing malformed may leave.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET

from musterd.ipc.client.ids import new_id
from musterd.ipc.errors import InvalidSchedule, InvalidTask
from musterd.ipc.secrets.reference import encode_secret
from musterd.ipc.wire.codec import find_fault, nests_too_deeply
from musterd.ipc.wire.keys import derived_key
from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    KEY_LENGTH_MAX,
    NESTING_MAX,
    NEVER_NS,
    NOT_GIVEN,
    PRIORITY_NAMES,
    SESSION_CHARS_MAX,
    TASK_BYTES_MAX,
    TaskSpec,
)

# Limits that ipc/wire/messages.py has as annotations of Id, Name, Target and Nanoseconds.
ID_LENGTH_MAX = 64
NAME_LENGTH_MAX = 200
TARGET_LENGTH_MAX = 253
POLICY_LENGTH_MAX = 32
RETRIES_MAX = 1000
SECONDS_MAX = 2**62 // 1_000_000_000

ON_OPEN = ("wait", "fail", "fallback")
FALLBACK_ON = ("open", "failure")

SHOWN_MAX = 80  # characters of a wrong value in a message
CHECKED_NAMES_MAX = 1024  # a program uses few names and targets; each is checked once

_PRIORITIES = {name: level for level, name in enumerate(PRIORITY_NAMES)}
_NORMAL_NAME = "normal"
_NORMAL = _PRIORITIES[_NORMAL_NAME]

_encode = msgspec.msgpack.Encoder(enc_hook=encode_secret).encode
# For keys: equal arguments give equal bytes, in any order.
_encode_sorted = msgspec.msgpack.Encoder(enc_hook=encode_secret, order="deterministic").encode
_NO_ARGS = _encode({})
_NO_TEXT = ""  # the default of every text: an omitted text needs no check


class SpecOptions(TypedDict, total=False):
    """Options of each submit but `fallback`, which adds to what a typed call may return."""

    priority: str | int  # critical, high, normal or low, in any case; or 0 to 3
    target: str  # the site
    timeout: float | timedelta | None  # of one attempt
    max_retries: int | None
    delay: float | timedelta  # before the task may run
    expires: float | timedelta | None  # after this time the task is no longer run
    key: str  # unique while the task is unfinished: a second task with the key gets its result
    # Accept a cached result of the key at most so old. True: as old as [cache] allows; False: none,
    # even if @task allows one.
    cache: float | timedelta | bool | None
    # the same, counted from the submit of the earlier task
    debounce: float | timedelta | bool | None
    policy: str  # the resilience class
    on_open: str  # while the target's breaker is open: wait, fail or fallback
    fallback_on: str  # "open": only while the breaker is open; "failure": also for a failed task
    session: str  # cookies and storage that outlive the task: a name of [sessions]


class TaskOptions(SpecOptions, total=False):
    """Options of `submit()`, `submit_many()` and `map()`. Times in seconds."""

    fallback: Any  # value where there is no last good result; implies on_open="fallback"


class EncodedArgs(Mapping[str, Any]):
    """Arguments that were encoded and checked before."""

    __slots__ = ("_values", "data")

    def __init__(self, values: dict[str, Any], data: bytes) -> None:
        self._values = values
        self.data = data

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def make_spec(
    name: str,
    args: Mapping[str, Any] | None = None,
    *,
    priority: str | int = _NORMAL_NAME,
    target: str = "",
    timeout: float | timedelta | None = None,
    max_retries: int | None = None,
    delay: float | timedelta = 0,
    expires: float | timedelta | None = None,
    key: str = "",
    cache: float | timedelta | bool | None = None,
    debounce: float | timedelta | bool | None = None,
    policy: str = "",
    on_open: str = "",
    fallback: Any = UNSET,
    fallback_on: str = "",
    session: str = "",
    **unknown: object,
) -> TaskSpec:
    """Return a checked TaskSpec with a new id; see TaskOptions. InvalidTask names a wrong value.

    With `cache` or `debounce` and without a key, name and arguments make the key.
    """
    if unknown:
        raise _unknown_option(next(iter(unknown)))
    spec = TaskSpec(
        new_id(),
        _checked_text("task name", name, 1, NAME_LENGTH_MAX),
        _NO_ARGS if args is None else encode_args(name, args),
        _NORMAL if priority is _NORMAL_NAME else priority_level(priority),
        "" if target is _NO_TEXT else _checked_text("target", target, 0, TARGET_LENGTH_MAX),
        0 if timeout is None else _positive("timeout", timeout),
        NOT_GIVEN if max_retries is None else _retries(max_retries),
        0 if _is_zero(delay) else _positive("delay", delay),
        0 if expires is None else _positive("expires", expires),
    )
    if session is not _NO_TEXT:
        named = _checked_text("session", session, 0, SESSION_CHARS_MAX)
        spec = msgspec.structs.replace(spec, session=named)
    if not (key is _NO_TEXT and cache is None and debounce is None):
        spec = _with_key(spec, key, cache, debounce, args)
    if not (
        policy is _NO_TEXT and on_open is _NO_TEXT and fallback is UNSET and fallback_on is _NO_TEXT
    ):
        spec = _with_policy(spec, policy, on_open, fallback, fallback_on)
    return spec


def _with_key(
    spec: TaskSpec,
    key: str,
    cache: float | timedelta | bool | None,
    debounce: float | timedelta | bool | None,
    args: Mapping[str, Any] | None,
) -> TaskSpec:
    key = _checked_text("key", key, 0, KEY_LENGTH_MAX)
    cache_ns, debounce_ns = _age_ns("cache", cache), _age_ns("debounce", debounce)
    if not key and {cache_ns, debounce_ns} - {0, NEVER_NS}:
        key = key_of(spec.name, args, spec.session)
    return msgspec.structs.replace(spec, key=key, cache_ns=cache_ns, debounce_ns=debounce_ns)


def key_of(name: str, args: Mapping[str, Any] | None, session: str = "") -> str:
    """Return the key of a task without one: its name and a digest of its arguments and session."""
    try:
        return derived_key(name, _encode_sorted(dict(args or {})) + session.encode())
    except TypeError as error:  # the arguments can be sent, but not sorted
        raise InvalidTask(
            f"the arguments of {name} cannot be made into a key ({error}): give a key"
        ) from error


def _with_policy(
    spec: TaskSpec, policy: str, on_open: str, fallback: Any, fallback_on: str
) -> TaskSpec:
    given = fallback is not UNSET
    _check_word("on_open", on_open, ON_OPEN)
    _check_word("fallback_on", fallback_on, FALLBACK_ON)
    encoded = packed(f"the fallback of {spec.name}", "fallback", fallback) if given else None
    if encoded is not None and len(spec.args) + len(encoded) > TASK_BYTES_MAX:
        raise InvalidTask(
            f"the arguments and the fallback of {spec.name} take "
            f"{len(spec.args) + len(encoded)} bytes, over the limit of {TASK_BYTES_MAX}"
        )
    return msgspec.structs.replace(
        spec,
        policy=_checked_text("policy", policy, 0, POLICY_LENGTH_MAX),
        on_open=on_open or ("fallback" if given else ""),  # a fallback is given to be used
        fallback=encoded,
        fallback_on=fallback_on,
    )


def _check_word(option: str, word: str, words: tuple[str, ...]) -> None:
    if not isinstance(word, str) or word not in ("", *words):
        allowed = ", ".join(repr(each) for each in words)
        raise InvalidTask(f"{option} must be one of {allowed}, not {shown(word)}")


def checked_invalidation(key: str, prefix: str | None) -> tuple[str, bool]:
    """Return (key, False) or (prefix, True); exactly one must be given."""
    if bool(key) == (prefix is not None):
        raise InvalidTask('give a key, or a prefix of keys ("" means all of them)')
    if prefix is None:
        return _checked_text("key", key, 1, KEY_LENGTH_MAX), False
    return _checked_text("prefix", prefix, 0, KEY_LENGTH_MAX), True


def checked_id(task_id: str) -> str:
    """Return the id if it is a possible one."""
    return _checked_text("task id", task_id, 1, ID_LENGTH_MAX)


def checked_schedule(name: object) -> str:
    """Return the name of a schedule if it can be sent, whether there is one or not."""
    if isinstance(name, str) and 0 < len(name) <= NAME_LENGTH_MAX:
        with suppress(UnicodeEncodeError):
            name.encode()
            return name
    why = f"give the name of a schedule, not {shown(name)}"
    raise InvalidSchedule(why, {str(name)[:NAME_LENGTH_MAX]: [why]})


def encode_args(name: str, args: Mapping[str, Any]) -> bytes:
    """Encode keyword arguments as msgpack; InvalidTask names the one that cannot be sent."""
    if not isinstance(args, dict):
        if isinstance(args, EncodedArgs):
            return args.data
        if not isinstance(args, Mapping):
            raise InvalidTask(
                f"the arguments of {name} must be a mapping of names to values, "
                f"not {type(args).__name__}"
            )
        args = dict(args)
    for key in args:
        if not isinstance(key, str):
            raise InvalidTask(
                f"the arguments of {name} must have names of type str, not {shown(key)}"
            )
    encoded = packed(f"the arguments of {name}", "args", args)
    if len(encoded) > TASK_BYTES_MAX:
        raise InvalidTask(
            f"the arguments of {name} take {len(encoded)} bytes, over the limit of "
            f"{TASK_BYTES_MAX}; pass a path or an address instead of the data"
        )
    return encoded


def packed(called: str, where: str, value: object) -> bytes:
    """Encode the value as msgpack; InvalidTask names the part that cannot be sent."""
    try:
        encoded = _encode(value)
    except RecursionError as error:
        raise InvalidTask(f"{called}: nested too deeply or in a circle") from error
    except Exception as error:  # from msgspec, or from a user's class
        where, culprit, _ = find_fault(_encode, where, value, _parts)
        if type(culprit) is int:
            what = f"is an int of more than 64 bits ({shown(culprit)}); pass it as a string"
        else:
            what = (
                f"is of type {type(culprit).__name__} ({error}); "
                "pass numbers, strings, bytes, lists and dicts"
            )
        raise InvalidTask(f"{called} cannot be sent: {where} {what}") from error
    # The caller refuses values that are longer than a task may be.
    if NESTING_MAX < len(encoded) <= TASK_BYTES_MAX and nests_too_deeply(encoded):
        raise InvalidTask(f"{called}: nested deeper than {NESTING_MAX} levels")
    return encoded


def _parts(where: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"{where}[{shown(key)}]", item) for key, item in value.items())
        yield from ((f"a key of {where}", key) for key in value)
    elif isinstance(value, list | tuple):
        yield from ((f"{where}[{index}]", item) for index, item in enumerate(value))


def _checked_text(what: str, text: str, shortest: int, longest: int) -> str:
    if not isinstance(text, str):
        raise InvalidTask(f"a {what} must be a str, not {shown(text)}")
    return _checked_once(what, text, shortest, longest)


@lru_cache(CHECKED_NAMES_MAX)
def _checked_once(what: str, text: str, shortest: int, longest: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTask(f"the {what} {text!r} is not valid Unicode: {error}") from error
    if not shortest <= len(text) <= longest:
        raise InvalidTask(
            f"a {what} must have {shortest} to {longest} characters, not {len(text)}: {text[:80]!r}"
        )
    return str.__str__(text)  # a plain str, also of a StrEnum


def priority_level(priority: str | int) -> int:
    """Return the level of a priority as people write it; InvalidTask if there is none."""
    if isinstance(priority, str):
        level = _PRIORITIES.get(priority)
        if level is None:
            level = _PRIORITIES.get(priority.lower())
    elif type(priority) is int and 0 <= priority < len(PRIORITY_NAMES):
        level = priority
    else:
        level = None
    if level is None:
        allowed = ", ".join(repr(name) for name in PRIORITY_NAMES)
        raise InvalidTask(f"priority must be one of {allowed} (or 0 to 3), not {shown(priority)}")
    return level


def _age_ns(what: str, age: float | timedelta | bool | None) -> int:
    """Return the allowed age of a result as the wire has it."""
    if age is True:
        return AS_CONFIGURED
    if age is False:
        return NEVER_NS
    return 0 if age is None or _is_zero(age) else _positive(what, age)


def _is_zero(seconds: object) -> bool:
    # Not all objects can be compared: Decimal("sNaN") raises.
    return isinstance(seconds, int | float) and seconds == 0 and seconds is not False


def _positive(what: str, seconds: float | timedelta) -> int:
    """Return seconds as nanoseconds, at least one: 0 means "never" on the wire."""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # Not isfinite(): it fails for whole numbers that no float can hold. NaN is in no range.
    if not number or not 0 < seconds <= SECONDS_MAX:
        raise InvalidTask(
            f"{what} must be a number of seconds above 0, at most {SECONDS_MAX}, "
            f"not {shown(seconds)}"
        )
    return max(1, int(seconds * 1_000_000_000))


def _retries(count: int) -> int:
    if type(count) is not int or not 0 <= count <= RETRIES_MAX:
        raise InvalidTask(
            f"max_retries must be a whole number from 0 to {RETRIES_MAX}, not {shown(count)}"
        )
    return count


def _unknown_option(name: str) -> InvalidTask:
    from difflib import get_close_matches

    options = list(TaskOptions.__annotations__)
    near = get_close_matches(name, options, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(options)}"
    return InvalidTask(f"a task has no option {name!r}: {hint}")


def shown(value: object) -> str:
    """Return the value as messages show it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of the user's class, or an int too long to be written
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."
