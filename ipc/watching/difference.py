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
LEAD_CHARS = 10  # of what is the same before a difference
# Of longer values the lines are not counted: the daemon's loop makes summaries.
COUNTED_CHARS_MAX = 32 * 1024
NOTHING = "nothing"
STEP_CHARS = 4096  # that are compared at once


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
    """Return both values if they are short, else what came and went of their lines."""
    texts = _text(before), _text(after)
    short = _is_short(before) and _is_short(after)
    if short or NOTHING in texts or max(map(len, texts)) > COUNTED_CHARS_MAX:
        return _pair(*texts)
    old, new = Counter(_pieces(before)), Counter(_pieces(after))
    came, went = list((new - old).elements()), list((old - new).elements())
    if len(came) == len(went) == 1:
        return _pair(*went, *came)
    if not came and not went:
        return "the order has changed"
    lines = f"+{len(came)} −{len(went)} lines"
    first = (came or went)[0]
    shown = _short(first) if first else ""
    return f"{lines}: {shown}" if shown else lines


def _pair(old: str, new: str) -> str:
    """Return both texts; long ones from shortly before they differ."""
    if max(len(old), len(new)) > VALUE_CHARS_MAX:
        start = max(0, _same(old, new) - LEAD_CHARS)
        old, new = (f"…{text[start:]}" if start else text for text in (old, new))
    return f"{_short(old)} → {_short(new)}"


def _same(old: str, new: str) -> int:
    """Return how many characters at the beginning are the same."""
    end = min(len(old), len(new))
    parts = (slice(at, at + STEP_CHARS) for at in range(0, end, STEP_CHARS))
    at = next((each.start for each in parts if old[each] != new[each]), end)
    return next((each for each in range(at, end) if old[each] != new[each]), end)


def _pieces(value: Any) -> list[str]:
    """Return the lines of a value, or the texts of a list of texts."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [" ".join(each.split()) for each in value]
    return [line.strip().rstrip(",") for line in _lines(value)]


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


def _text(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    return value if isinstance(value, str) else _json(value)


def one_line(value: Any, chars_max: int = SUMMARY_CHARS_MAX) -> str:
    """Return a result in one line, cut where it is longer."""
    text = _text(value)[: 10 * chars_max]  # spaces may be many
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def _short(value: Any) -> str:
    return one_line(value, VALUE_CHARS_MAX)
