"""The view: the watched part of a result, its digest, its numbers, and what history keeps of it.

Patterns of users run here, so this is for workers only: a pattern that takes forever costs a task
its timeout and not the daemon.
"""

import json
import re
from hashlib import sha256
from typing import Any
from unicodedata import category

import msgspec

from musterd.ipc.errors import NotANumber, NothingFound
from musterd.ipc.watching.numbers import parse_number
from musterd.ipc.watching.rules import Rules, decode_rules
from musterd.ipc.wire.messages import VIEW_BYTES_MAX, VIEW_NUMBERS_MAX, View

FIELDS_SHOWN_MAX = 10  # in a message
CHARS_SHOWN_MAX = 80
# Categories of characters that nobody sees: pages leave a zero-width space where a price was.
BLANK = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))

_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode
_encode_sorted = msgspec.msgpack.Encoder(order="deterministic").encode


def look(data: bytes, rules: bytes) -> View:
    """Return the view of a result (msgpack); NothingFound or NotANumber where there is none."""
    value, given = _decode(data), decode_rules(rules)
    if given.plain:
        if _has_nothing(value):
            raise NothingFound(f"the result is empty: {_shown(value)}")
        return View(sha256(data).hexdigest(), {}, *_kept(value, data, data))
    part = _watched(value, given)
    encoded = _canonical(part)
    numbers = _numbers(part) if given.numbers else {}
    return View(sha256(encoded).hexdigest(), numbers, *_kept(part, encoded, data))


def _watched(value: Any, rules: Rules) -> Any:
    """Return the watched part of a result."""
    if rules.watch:
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise NothingFound(
                f"the result is of type {kind} and has no field '{rules.watch[0]}': return a dict, "
                "or do without `watch`"
            )
        for name in rules.watch:
            if _is_empty(value.get(name)):
                raise NothingFound(f"field '{name}' {_missing(value, name)}")
        value = {name: value[name] for name in rules.watch}
    patterns = [re.compile(each) for each in rules.patterns]
    part = _without(value, rules.fields_ignored, patterns)
    if part == {} or _has_nothing(part):
        raise NothingFound(f"nothing that is watched is in the result: {_shown(value)}")
    return part


def _missing(value: dict[Any, Any], name: str) -> str:
    if name in value:
        return "is empty: its selector matches nothing, or the page is another one"
    names = ", ".join(str(each) for each in list(value)[:FIELDS_SHOWN_MAX]) or "none"
    return f"is missing in the result: there are {names[:CHARS_SHOWN_MAX]}"


def _without(value: Any, names: frozenset[str], patterns: list[re.Pattern[str]]) -> Any:
    """Return a value without these fields, and its texts without what the patterns match."""
    if isinstance(value, dict):
        return {
            name: _without(each, names, patterns)
            for name, each in value.items()
            if name not in names
        }
    if isinstance(value, list):
        return [_without(each, names, patterns) for each in value]
    if isinstance(value, str):
        for pattern in patterns:
            value = pattern.sub("", value)
    return value


def _numbers(part: Any) -> dict[str, float]:
    """Return the numbers of a result by field; that of a result without fields is ""."""
    fields = part if isinstance(part, dict) else {"": part}
    if len(fields) > VIEW_NUMBERS_MAX:
        raise NotANumber(
            f"{len(fields)} fields are watched, and at most {VIEW_NUMBERS_MAX} may be numbers: "
            'name those that count, as in watch = ["price"]'
        )
    numbers = {}
    for name, value in fields.items():
        number = parse_number(value)
        if number is None:
            what = f"field '{name}'" if isinstance(part, dict) else "the result"
            raise NotANumber(
                f"{what} is not one number: {_shown(value)}; `above`, `below` and `by` need one: "
                'name the fields that have one, as in watch = ["price"]'
            )
        numbers[str(name)] = number
    return numbers


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return _is_blank(value)
    if isinstance(value, list):  # `[]` in a selector: elements without a text
        return all(each is None or (isinstance(each, str) and _is_blank(each)) for each in value)
    return value is None or (isinstance(value, dict | bytes) and not value)


def _is_blank(text: str) -> bool:
    return all(category(each) in BLANK for each in text)


def _has_nothing(value: Any) -> bool:
    """Return whether a result says nothing: no text, or fields that are all empty.

    An empty list of a handler is an answer: there are no offers today.
    """
    if isinstance(value, dict):
        return bool(value) and all(_is_empty(each) for each in value.values())
    return value is None or (isinstance(value, str) and _is_blank(value))


def _canonical(part: Any) -> bytes:
    """Return msgpack that is the same for dicts in any order, if their keys are texts."""
    try:
        return _encode_sorted(part)
    except TypeError:
        return _encode(part)


def _kept(part: Any, encoded: bytes, data: bytes) -> tuple[bytes | None, bool]:
    """Return what history keeps of the watched part, and whether that is only its beginning."""
    if len(encoded) <= VIEW_BYTES_MAX:
        return (None if encoded == data else encoded), False
    try:
        text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str)
    except TypeError:  # keys that JSON cannot have
        text = repr(part)
    room = VIEW_BYTES_MAX - 8  # for the length of the text
    return _encode(text.encode("utf-8", "replace")[:room].decode("utf-8", "ignore")), True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= CHARS_SHOWN_MAX else f"{text[:CHARS_SHOWN_MAX]}…"
