"""Texts of others, made safe for a terminal and for a log: nothing in them moves the cursor."""


def printable(text: str, keep: str = "") -> str:
    """The text with every control character written out, but for those in `keep`."""
    if text.isprintable():
        return text
    table = {
        ord(char): char.encode("unicode_escape").decode()
        for char in set(text)
        if not (char.isprintable() or char in keep)
    }
    return text.translate(table)
