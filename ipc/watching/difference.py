"""What differs between two results: the fields, a unified diff, one line for people.

The supervisor makes such lines in its loop. So a line takes some milliseconds at most, however long
the results are.
"""

import difflib
import json
from collections import Counter
from typing import Any

import msgspec
from msgspec import Struct

DIFF_LINES_MAX = 2000  # of each side: the time to compare grows with their product
SUMMARY_CHARS_MAX = 200
VALUE_CHARS_MAX = 40  # of a value in a summary
FIELDS_MAX = 3  # in a summary
COUNTED_CHARS_MAX = 16 * 1024  # of each side, from the first difference on
LEAD_CHARS = 10  # of what is the same before a difference
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)


class FieldChange(Struct, frozen=True):
    """A field of both results; None where a result does not have it."""

    before: Any
    after: Any


def changed_fields(before: Any, after: Any) -> dict[str, FieldChange]:
    """Return the fields of two dicts that differ, by name; nothing for other results."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return {}
    return {
        str(name): FieldChange(before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if name not in before or name not in after or before[name] != after[name]
    }


def unified_diff(before: Any, after: Any) -> str:
    """Return a unified diff of two texts; other results are compared as indented JSON."""
    old, new = _lines(before), _lines(after)
    diff = difflib.unified_diff(
        old[:DIFF_LINES_MAX], new[:DIFF_LINES_MAX], "before", "after", lineterm=""
    )
    lines = list(diff)
    if max(len(old), len(new)) > DIFF_LINES_MAX:
        lines.append(f"(only the first {DIFF_LINES_MAX} lines are compared)")
    return "\n".join(lines)


def summary(before: Any, after: Any) -> str:
    """Return what has changed in one line: `price 49.00 € → 39.00 €`."""
    fields = changed_fields(before, after)
    if fields:
        parts = [
            f"{_short(name)} {_difference(each.before, each.after)}"
            for name, each in list(fields.items())[:FIELDS_MAX]
        ]
        more = len(fields) - len(parts)
        text = ", ".join(parts) + (f" and {more} more" if more else "")
    else:
        text = _difference(before, after)
    return text if len(text) <= SUMMARY_CHARS_MAX else f"{text[: SUMMARY_CHARS_MAX - 1]}…"


def _difference(before: Any, after: Any) -> str:
    """Return both values if they are short, else what came and went of their lines; of very
    different texts, how many lines at least."""
    if (_is_short(before) and _is_short(after)) or "" in (before, after) or None in (before, after):
        return f"{_short(before)} → {_short(after)}"
    texts = _different_lines(_pieces(before), _pieces(after))
    cut = any(len(each) > COUNTED_CHARS_MAX for each in texts)
    old, new = (
        Counter(line.strip().rstrip(",") for line in _beginning(each).splitlines())
        for each in texts
    )
    came, went = list((new - old).elements()), list((old - new).elements())
    if len(came) == len(went) == 1:
        return _pair(*went, *came)
    if not came and not went:
        return _pair(*texts) if cut else "the order has changed"
    lines = f"+{len(came)} −{len(went)} lines" + (" and more" if cut else "")
    first = (came or went)[0]
    return f"{lines}: {_short(first)}" if first else lines


def _pair(old: str, new: str) -> str:
    """Return both texts; long ones from shortly before they differ."""
    if max(len(old), len(new)) > VALUE_CHARS_MAX:
        start = max(0, _common(old, new) - LEAD_CHARS)
        old, new = (f"…{text[start:]}" if start else text for text in (old, new))
    return f"{_short(old)} → {_short(new)}"


def _pieces(value: Any) -> str:
    """Return a result as lines: a list of texts has one for each of them."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "\n".join(" ".join(each.split()) for each in value)
    return _text(value)


def _beginning(text: str) -> str:
    """Return the first lines of a text; the beginning of a line that is longer."""
    if len(text) <= COUNTED_CHARS_MAX:
        return text
    return text[: text.rfind("\n", 0, COUNTED_CHARS_MAX) + 1 or COUNTED_CHARS_MAX]


def _different_lines(old: str, new: str) -> tuple[str, str]:
    """Return two texts without the lines that both begin and end with."""
    start = _common(old, new)
    start = old.rfind("\n", 0, start) + 1
    old, new = old[start:], new[start:]
    end = _common(old, new, from_end=True)
    line_end = old.find("\n", len(old) - end)
    end = len(old) - line_end - 1 if end and line_end >= 0 else 0
    return old[: len(old) - end], new[: len(new) - end]


def _common(old: str, new: str, *, from_end: bool = False) -> int:
    """Return how many characters two texts begin with, or end with, alike: by comparing slices,
    which is a thousand times faster than by characters."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(-middle, None) if from_end else slice(middle)
        alike = old[part] == new[part]
        low, high = (middle, high) if alike else (low, middle - 1)
    return low


def _lines(value: Any) -> list[str]:
    return _text(value).splitlines()


def _text(value: Any) -> str:
    """Return a text, or another result as indented JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    except (TypeError, ValueError, RecursionError):  # keys that JSON cannot have; too deep
        return repr(value)


def _json(value: Any, chars_max: int) -> str:
    """Return the beginning of a result as JSON; the rest is not even written."""
    room, parts = chars_max, []
    try:
        for part in _JSON.iterencode(value):
            parts.append(part)
            room -= len(part)
            if room < 0:
                break
    except (TypeError, ValueError, RecursionError):  # keys that JSON cannot have; too deep
        return repr(value)
    return "".join(parts)


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= VALUE_CHARS_MAX and "\n" not in value.strip()
    return not isinstance(value, dict | list)


def one_line(value: Any, chars_max: int = SUMMARY_CHARS_MAX) -> str:
    """Return a result in one line, cut where it is longer."""
    if value is None or value == "":
        return "nothing"
    room = 10 * chars_max  # spaces may be many
    text = (value if isinstance(value, str) else _json(value, room))[:room]
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def _short(value: Any) -> str:
    return one_line(value, VALUE_CHARS_MAX)
