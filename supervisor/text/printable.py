"""Make foreign text safe for a terminal and a log: nothing in it moves the cursor or ends a line.

U+0085, U+2028 and the like are line breaks to many readers.
"""


def printable(text: str, keep: str = "") -> str:
    """Return the text with every control character escaped, except those in `keep`."""
    if text.isprintable():
        return text
    table = {
        ord(char): char.encode("unicode_escape").decode()
        for char in set(text)
        if not (char.isprintable() or char in keep)
    }
    return text.translate(table)


def printable_json(text: str, keep: str = "\n") -> str:
    """Return equivalent JSON, or TOML, with every control character in its strings escaped.

    Encoders escape ASCII control characters only.
    """
    if text.isprintable():
        return text
    table = {
        ord(char): "".join(f"\\u{unit:04x}" for unit in _units(char))
        for char in set(text)
        if not (char.isprintable() or char in keep)
    }
    return text.translate(table)


def _units(char: str) -> list[int]:
    """Return the UTF-16 code units of a character, as JSON writes them."""
    data = char.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]
