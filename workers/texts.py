"""Texts of handlers, made fit to be sent and shown.

What a handler says may be anything, and must never end its worker. Values in messages are shown
whole or not at all: messages are cleaned of secrets when they leave the worker, and the beginning
of a secret is not known there for what it is.
"""

SHOWN_CHARS_MAX = 80


def plain_text(text: object, chars_max: int) -> str:
    """A plain `str` of at most so many characters that UTF-8 can carry.

    Half of a pair of surrogates, as in scraped text and names of files, is written out (`\\ud83d`).
    """
    cut = str.__getitem__(text if isinstance(text, str) else str(text), slice(chars_max))
    return str.encode(cut, "utf-8", "backslashreplace").decode()[:chars_max]


def is_plain(text: str) -> bool:
    """Whether UTF-8 can carry the text as it is."""
    try:
        str.encode(text, "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shown_whole(value: object, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """The value as Python writes it; of a long one only how long it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of somebody's class
        return f"a {type(value).__name__}"
    if len(text) <= chars_max:
        return text
    return f"a {type(value).__name__} of {len(text)} characters"
