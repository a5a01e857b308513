"""From what a user writes to a TaskSpec: every value is checked here, with a message that names it.

The supervisor drops a whole batch that holds one malformed task, so nothing malformed may leave.
"""

from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from math import isfinite
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET

from musterd.ipc.errors import InvalidTask
from musterd.ipc.ids import new_id
from musterd.ipc.keys import KEY_LENGTH_MAX, derived_key
from musterd.ipc.messages import (
    AS_CONFIGURED,
    NEVER_NS,
    NOT_GIVEN,
    PRIORITY_NAMES,
    TASK_BYTES_MAX,
    TaskSpec,
)
from musterd.ipc.secret import encode_secret

# The limits written in messages.py as annotations of Id, Name, Target and Nanoseconds.
ID_LENGTH_MAX = 64
NAME_LENGTH_MAX = 200
TARGET_LENGTH_MAX = 253
POLICY_LENGTH_MAX = 32
RETRIES_MAX = 1000
SECONDS_MAX = 2**62 // 1_000_000_000

ON_OPEN = ("wait", "fail", "fallback")
FALLBACK_ON = ("open", "failure")

CHECKED_NAMES_MAX = 1024  # a program uses few names and targets; each is checked once

_PRIORITIES: dict[str | int, int] = {name: level for level, name in enumerate(PRIORITY_NAMES)}
_PRIORITIES |= {level: level for level in range(len(PRIORITY_NAMES))}

_encode = msgspec.msgpack.Encoder(enc_hook=encode_secret).encode
# For keys: the same arguments are the same bytes, in whatever order they were given.
_encode_sorted = msgspec.msgpack.Encoder(enc_hook=encode_secret, order="deterministic").encode
_NO_ARGS = _encode({})


class TaskOptions(TypedDict, total=False):
    """The options of a task, as `submit()`, `submit_many()` and `map()` take them. In seconds."""

    priority: str | int  # critical, high, normal or low
    target: str  # the site
    timeout: float | timedelta | None  # of one attempt
    max_retries: int | None
    delay: float | timedelta  # before it may run
    expires: float | timedelta | None  # after so long it is not run any more
    key: str  # unique while it lives: a second task with it gets the result of the first
    # A result of the key that is younger will do. True: as young as [cache] says; False: none, even
    # if @task says otherwise.
    cache: float | timedelta | bool | None
    debounce: float | timedelta | bool | None  # so will that of a submit so shortly before
    policy: str  # the resilience class
    on_open: str  # while the target's breaker is open: wait, fail or fallback
    fallback: Any  # the value for want of a last good result; implies on_open="fallback"
    fallback_on: str  # "open": only while the breaker is open; "failure": also for a failed task


def make_spec(
    name: str,
    args: Mapping[str, Any] | None = None,
    *,
    priority: str | int = "normal",
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
) -> TaskSpec:
    """A checked TaskSpec with a new id; see TaskOptions.

    With `cache` or `debounce` and without a key, name and arguments are the key.
    """
    spec = TaskSpec(
        new_id(),
        _checked_text("task name", name, 1, NAME_LENGTH_MAX),
        encode_args(name, args) if args else _NO_ARGS,
        _level(priority),
        _checked_text("target", target, 0, TARGET_LENGTH_MAX) if target != "" else "",
        0 if timeout is None else _positive("timeout", timeout),
        NOT_GIVEN if max_retries is None else _retries(max_retries),
        0 if not delay else _positive("delay", delay),
        0 if expires is None else _positive("expires", expires),
    )
    if key or cache or debounce:
        spec = msgspec.structs.replace(
            spec,
            key=_checked_text("key", key, 1, KEY_LENGTH_MAX) if key else key_of(name, args),
            cache_ns=age_ns("cache", cache),
            debounce_ns=age_ns("debounce", debounce),
        )
    elif cache is False or debounce is False:
        spec = msgspec.structs.replace(
            spec, cache_ns=age_ns("cache", cache), debounce_ns=age_ns("debounce", debounce)
        )
    if policy or on_open or fallback is not UNSET or fallback_on:
        spec = _with_policy(spec, policy, on_open, fallback, fallback_on)
    return spec


def key_of(name: str, args: Mapping[str, Any] | None) -> str:
    """The key of a task that was given none: its name and a digest of its arguments."""
    try:
        return derived_key(name, _encode_sorted(dict(args or {})))
    except TypeError as error:  # they can be sent, but not sorted
        raise InvalidTask(
            f"the arguments of {name} cannot be made into a key ({error}): give a key"
        ) from error


def _with_policy(
    spec: TaskSpec, policy: str, on_open: str, fallback: Any, fallback_on: str
) -> TaskSpec:
    given = fallback is not UNSET
    _check_word("on_open", on_open, ON_OPEN)
    _check_word("fallback_on", fallback_on, FALLBACK_ON)
    encoded = _packed(f"the fallback of {spec.name}", "fallback", fallback) if given else None
    if encoded is not None and len(spec.args) + len(encoded) > TASK_BYTES_MAX:
        raise InvalidTask(
            f"the arguments and the fallback of {spec.name} take "
            f"{len(spec.args) + len(encoded)} bytes, over the limit of {TASK_BYTES_MAX}"
        )
    return msgspec.structs.replace(
        spec,
        policy=_checked_text("policy", policy, 1, POLICY_LENGTH_MAX) if policy else "",
        on_open=on_open or ("fallback" if given else ""),  # who gives one wants it
        fallback=encoded,
        fallback_on=fallback_on,
    )


def _check_word(option: str, word: str, words: tuple[str, ...]) -> None:
    if word and word not in words:
        allowed = ", ".join(repr(each) for each in words)
        raise ValueError(f"{option} must be one of {allowed}, not {word!r}")


def checked_invalidation(key: str, prefix: str | None) -> tuple[str, bool]:
    """What to forget: (key, False) or (prefix, True); exactly one must be given."""
    if bool(key) == (prefix is not None):
        raise ValueError('give a key, or a prefix of keys ("" means all of them)')
    if prefix is None:
        return _checked_text("key", key, 1, KEY_LENGTH_MAX), False
    return _checked_text("prefix", prefix, 0, KEY_LENGTH_MAX), True


def checked_id(task_id: str) -> str:
    """The id itself if it can be one."""
    return _checked_text("task id", task_id, 1, ID_LENGTH_MAX)


def encode_args(name: str, args: Mapping[str, Any]) -> bytes:
    """The keyword arguments of a task as msgpack, or InvalidTask that names the one that is not."""
    if not isinstance(args, dict):
        if not isinstance(args, Mapping):
            raise InvalidTask(
                f"the arguments of {name} must be a mapping of names to values, "
                f"not {type(args).__name__}"
            )
        args = dict(args)
    for key in args:
        if not isinstance(key, str):
            raise InvalidTask(f"the arguments of {name} must have names of type str, not {key!r}")
    encoded = _packed(f"the arguments of {name}", "args", args)
    if len(encoded) > TASK_BYTES_MAX:
        raise InvalidTask(
            f"the arguments of {name} take {len(encoded)} bytes, over the limit of "
            f"{TASK_BYTES_MAX}; pass a path or an address instead of the data"
        )
    return encoded


def _packed(called: str, where: str, value: object) -> bytes:
    try:
        return _encode(value)
    except RecursionError as error:
        raise InvalidTask(f"{called}: nested too deeply or in a circle") from error
    except (TypeError, ValueError, OverflowError) as error:  # UnicodeError is a ValueError
        where, what = _culprit(where, value)
        raise InvalidTask(
            f"{called} cannot be sent: {where} is of type {what} ({error}); "
            "pass numbers, strings, bytes, lists and dicts"
        ) from error


def _culprit(where: str, value: object) -> tuple[str, str]:
    """Where inside a value that cannot be encoded the fault lies, and of which type it is."""
    inner: list[tuple[str, object]] = []
    if isinstance(value, dict):
        inner = [(f"{where}[{key!r}]", item) for key, item in value.items()]
        inner += [(f"a key of {where}", key) for key in value]
    elif isinstance(value, list | tuple):
        inner = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
    for place, item in inner:
        try:
            _encode(item)
        except (TypeError, ValueError, OverflowError):
            return _culprit(place, item)
    return where, type(value).__name__


def _checked_text(what: str, text: str, shortest: int, longest: int) -> str:
    if not isinstance(text, str):
        raise InvalidTask(f"a {what} must be a str, not {text!r}")
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


def _level(priority: str | int) -> int:
    try:
        return _PRIORITIES[priority]
    except (KeyError, TypeError):
        allowed = ", ".join(repr(name) for name in PRIORITY_NAMES)
        raise ValueError(
            f"priority must be one of {allowed} (or 0 to 3), not {priority!r}"
        ) from None


def age_ns(what: str, age: float | timedelta | bool | None) -> int:
    """How old a result may be, as it is on the wire."""
    if age is True:
        return AS_CONFIGURED
    if age is False:
        return NEVER_NS
    return _positive(what, age) if age else 0


def _positive(what: str, seconds: float | timedelta) -> int:
    """Seconds as nanoseconds, at least one: 0 means "never" on the wire."""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not isfinite(seconds) or not 0 < seconds <= SECONDS_MAX:
        raise ValueError(
            f"{what} must be a number of seconds above 0, at most {SECONDS_MAX}, not {seconds!r}"
        )
    return max(1, int(seconds * 1_000_000_000))


def _retries(count: int) -> int:
    if type(count) is not int or not 0 <= count <= RETRIES_MAX:
        raise ValueError(
            f"max_retries must be a whole number from 0 to {RETRIES_MAX}, not {count!r}"
        )
    return count
