"""Fit text into the columns of a terminal: whole words, whole parts of names, any script.

A column is a cell of the terminal. A Chinese, Japanese or Korean character takes two, a combining
mark none. What is left out is always marked with an ellipsis.

    clip("no price on the page", 12)             "no price …"           words
    shorten("aurora-price-watch-parser/12", 20)  "aurora…parser/12"     names, at both ends
    wrapped("no price on the page", 13)          "no price on", "    the page"
"""

import re
from collections.abc import Iterator, Sequence

ELLIPSIS = "…"
# Fewer parts of a name than this share of the room: then letters are cut, to show more of it.
PARTS_SHARE_MIN = 0.5
PARTS_MAX = 40  # of one name, at which it may be cut
READ_MAX = 4  # characters for each column that there is: more of a text is not looked at
_CUTS = re.compile(r"[-._/:@ ]+")
_BREAKS = re.compile(r"(?<=[-./:@,;=&?_])(?=[^-./:@,;=&?_])")  # behind these a long word goes on
_OPENING = "「『（【《〈〔［｛“‘([{<"
_WIDE_EMOJI = "\ufe0f"  # makes the character before it as wide as an emoji


def cells(text: str) -> int:
    """Return how many columns the text takes."""
    if text.isascii():
        return len(text)
    taken, last = 0, 0
    for char in text:
        if char == _WIDE_EMOJI:  # not in every terminal: an empty column is better than a wrap
            taken += 1 if last == 1 else 0
            continue
        last = _cells_of(char)
        taken += last
    return taken


def _cells_of(char: str) -> int:
    import unicodedata  # few commands need it

    if unicodedata.east_asian_width(char) in "WF":
        return 2
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1


def padded(text: str, room: int, *, right: bool = False) -> str:
    """Return the text with spaces up to this many columns."""
    space = " " * (room - cells(text))
    return space + text if right else text + space


def clip(text: str, room: int) -> str:
    """Return as many words as fit, and an ellipsis where some are left out."""
    if cells(text) <= room:
        return text
    if room < 4:
        return ELLIPSIS[:room]
    text = text[: READ_MAX * room]
    kept, taken = "", 0
    for unit in _units(text):
        width = cells(unit)
        if taken + width + (2 if unit.endswith(" ") or kept.endswith(" ") else 1) > room:
            break
        kept, taken = kept + unit, taken + width
    rest = text[len(kept) :]
    if not kept.strip():
        return f"{shorten(rest.split(' ')[0], room - 2)} {ELLIPSIS}"
    return kept + ELLIPSIS


def _units(text: str) -> Iterator[str]:
    """Yield what is not cut: words, each with the space behind it, and wide characters."""
    for word in re.findall(r"[^ ]+ *| +", text):
        if word.isascii():
            yield word
            continue
        held, last = "", 0  # and the columns of its last character, without the marks on it
        for char in word:
            width = _cells_of(char)
            if 2 in (width, last) and width and held and _begins(char):
                yield held
                held = ""
            held, last = held + char, width or last
        yield held


def _begins(char: str) -> bool:
    """Whether a line may begin with this character; punctuation stays behind its word."""
    return char.isalnum() or char in _OPENING


def shorten(name: str, room: int, taken: Sequence[str] = ()) -> str:
    """Return the parts at both ends of a name that fit, with an ellipsis between them.

    It is none of `taken`, if there is another way: what is left out may be all that differs.
    """
    if cells(name) <= room:
        return name
    if room <= 1:
        return ELLIPSIS[:room]
    found = sorted(_ways(name, room), key=lambda way: way[0], reverse=True)
    for _, short in found:
        if short not in taken:
            return short
    for tail in range((room - 1) // 3, room):  # letters
        short = f"{_head(name, room - 1 - tail)}{ELLIPSIS}{_tail(name, tail)}"
        if short not in taken:
            return short
    return f"{_head(name, room - 1)}{ELLIPSIS}"


def _ways(name: str, room: int) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the ways to cut a name between its parts, each with how good it is."""
    found = list(_CUTS.finditer(name))[:PARTS_MAX]
    heads = [0, *(each.start() for each in found)]
    tails = [each.start() if "/" in each[0] else each.end() for each in found] + [len(name)]
    for head in heads:
        for tail in tails:
            short = f"{name[:head]}{ELLIPSIS}{name[tail:]}"
            width = cells(short)
            if head < tail and PARTS_SHARE_MIN * room <= width <= room:
                shorter = min(cells(name[:head]), cells(name[tail:]))
                yield (shorter, width), short


def _head(text: str, room: int) -> str:
    """Return the beginning that takes at most this many columns, with all marks of its end."""
    at, taken = 0, 0
    for char in text:
        taken += cells(char)
        if taken > room:
            break
        at += 1
    return text[:at]


def _tail(text: str, room: int) -> str:
    at, taken = len(text), 0
    for char in reversed(text):
        taken += cells(char)
        if taken > room:
            break
        at -= 1
    while at < len(text) and not _cells_of(text[at]):  # a mark whose character is cut off
        at += 1
    return text[at:]


def wrapped(
    text: str, room: int, *, indent: str = "    ", first: str = "", lines_max: int = 0
) -> list[str]:
    """Return lines of at most `room` columns; those behind the first begin with `indent`.

    Nothing is lost: a word that is longer than a line goes on in the next one, behind a slash or
    the like if it has one. With `lines_max` the last line is clipped. `room` 0 has room for all.
    """
    if not room or cells(first + text) <= room:
        return [first + text]
    if lines_max:
        text = text[: READ_MAX * room * lines_max]
    lines, line = [], first
    for unit in _units(text):
        for piece in _pieces(unit, room - cells(indent)):
            if line != indent and cells(line + piece.rstrip(" ")) > room:
                lines.append(line.rstrip(" "))
                line = indent
            line += piece
    lines.append(line.rstrip(" "))
    if lines_max and len(lines) > lines_max:
        last = " ".join(each.strip() for each in lines[lines_max - 1 :])
        start = indent if lines_max > 1 else first
        lines[lines_max - 1 :] = [start + clip(last, room - cells(start))]
    return lines


def _pieces(unit: str, room: int) -> Iterator[str]:
    """Yield a word, or the pieces of one that is longer than a line."""
    if cells(unit.rstrip(" ")) <= room:
        yield unit
        return
    for part in _BREAKS.split(unit):
        rest = part
        while cells(rest.rstrip(" ")) > room:
            head = _head(rest, max(room, 2))
            yield head
            rest = rest[len(head) :]
        yield rest
