"""Texts of others, made safe for a terminal and for a log: nothing in them moves the cursor.

Nor ends a line for anybody: U+0085, U+2028 and their like are line breaks to many readers.
"""


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


def printable_json(text: str, keep: str = "\n") -> str:
    """The same JSON, or TOML, with every control character in its strings written as it has them.

    Encoders escape those of ASCII only.
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
    """Of UTF-16, as JSON counts."""
    data = char.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]
