"""Make texts of handlers fit to be sent and shown.

A handler's text may be anything, and must never end its worker. Messages show a value whole or not
at all: secrets are removed from messages when they leave the worker, and the beginning of a secret
would not be recognised there.
"""

from typing import Any

SHOWN_CHARS_MAX = 80


def plain_text(text: object, chars_max: int) -> str:
    """Return a plain `str` of at most this many characters that UTF-8 can carry.

    Half of a surrogate pair, as in scraped text and file names, is written out (`\\ud83d`).
    """
    cut = str.__getitem__(text if isinstance(text, str) else str(text), slice(chars_max))
    return str.encode(cut, "utf-8", "backslashreplace").decode()[:chars_max]


def is_plain(text: str) -> bool:
    """Tell whether UTF-8 can carry the text as it is."""
    try:
        str.encode(text, "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def with_whole_characters(value: Any) -> Any:
    """Return plain data whose texts UTF-8 can carry: halves of surrogate pairs are replaced."""
    if isinstance(value, str):
        return value if is_plain(value) else _whole(value)
    if isinstance(value, dict):
        return {
            with_whole_characters(name): with_whole_characters(each) for name, each in value.items()
        }
    return [with_whole_characters(each) for each in value] if isinstance(value, list) else value


def _whole(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shown_whole(value: object, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """Return the value's repr; of a long one only its length."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of somebody's class
        return f"a {type(value).__name__}"
    if len(text) <= chars_max:
        return text
    return f"a {type(value).__name__} of {len(text)} characters"
