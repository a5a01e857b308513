"""Values of others in messages: whole or not at all.

Messages are cleaned of secrets when they leave the worker, and the beginning of a secret is not
known there for what it is.
"""

SHOWN_CHARS_MAX = 80


def shown_whole(value: object, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """The value as Python writes it; of a long one only how long it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of somebody's class
        return f"a {type(value).__name__}"
    if len(text) <= chars_max:
        return text
    return f"a {type(value).__name__} of {len(text)} characters"
