"""Text as it can be sent: what a handler says may be anything, and must never end its worker."""


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
