"""What differs between two results: the fields, a unified diff, one line for people."""

import difflib
import json
from collections import Counter
from typing import Any

from msgspec import Struct

DIFF_LINES_MAX = 2000  # of each side: the time to compare grows with their product
SUMMARY_CHARS_MAX = 200
VALUE_CHARS_MAX = 40  # of a value in a summary
FIELDS_MAX = 3  # in a summary


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
            f"{_short(name)} {_short(each.before)} → {_short(each.after)}"
            for name, each in list(fields.items())[:FIELDS_MAX]
        ]
        more = len(fields) - len(parts)
        text = ", ".join(parts) + (f" and {more} more" if more else "")
    elif _is_short(before) and _is_short(after):
        text = f"{_short(before)} → {_short(after)}"
    else:
        text = _counted(before, after)
    return text if len(text) <= SUMMARY_CHARS_MAX else f"{text[: SUMMARY_CHARS_MAX - 1]}…"


def _counted(before: Any, after: Any) -> str:
    """Return how many lines came and went, in a time that grows with the texts alone."""
    old, new = (Counter(line.rstrip(",") for line in _lines(each)) for each in (before, after))
    came, went = list((new - old).elements()), list((old - new).elements())
    if not came and not went:
        return "the order has changed"
    first = _short((came or went)[0].strip())
    lines = f"+{len(came)} −{len(went)} lines"
    return f"{lines}: {first}" if first else lines


def _lines(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.splitlines()
    return _json(value, indent=2).splitlines()


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON cannot have; too deep
        return repr(value)


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= VALUE_CHARS_MAX and "\n" not in value.strip()
    return not isinstance(value, dict | list)


def one_line(value: Any, chars_max: int = SUMMARY_CHARS_MAX) -> str:
    """Return a result in one line, cut where it is longer."""
    if value is None or value == "":
        return "nothing"
    text = value if isinstance(value, str) else _json(value)
    text = text[: 10 * chars_max]  # spaces may be many
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def _short(value: Any) -> str:
    return one_line(value, VALUE_CHARS_MAX)
