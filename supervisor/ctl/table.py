"""Lay out tables: complete where there is room, and never wider than the terminal.

In a file or a pipe a table is as wide as it has to be. In a terminal, as long as it is too wide:

    1. short forms of columns that have one (the time of day in the place of the date), names over a
       share of the width are shortened, and ids over it have a line of their own,
    2. what does not fit into the last column is told below its row,
    3. columns with a `rank` go, the lowest first: what they say is told below the row,
    4. names are shortened further.

`Paper` says what is written on: how wide it is, and whether it has colours.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from musterd.supervisor.text.fitting import cells, clip, padded, shorten, wrapped
from musterd.supervisor.text.printable import printable

GAP = "  "
BELOW = "    "  # before what is told below a row
BELOW_LINES_MAX = 4  # of one row; --json has all
COLUMNS_MIN = 20  # of a terminal: in a narrower one lines wrap
NAME_MIN = 8  # columns that every name has
NAME_SHARE = 0.4  # of the width: longer names are shortened before other columns go
LAST_MIN = 16  # columns, for the last column to be kept beside the others
NOTHING = ("", "-", "0")  # cells that need not be told below a row

BOLD = "1"


class Paper(NamedTuple):
    """What is written on."""

    columns: int = 0  # 0: as many as it takes
    colour: bool = False


def paper() -> Paper:
    """Return what standard output is."""
    if sys.stdout is None or not sys.stdout.isatty():
        return Paper()
    colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return Paper(max(COLUMNS_MIN, _columns()), colour)


def _columns() -> int:
    """Return how many columns the terminal has, or the user says it has."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        return 80


class Column(NamedTuple):
    """A column of a table; the last one is prose if it has a `rank`."""

    head: str
    rank: int = 0  # the lowest goes first where there is no room; 0: it stays
    below: Callable[[str], str] = str  # how a cell of it is told below its row; "": not at all
    short: Callable[[str], str] | None = None  # another form of its cells
    name: bool = False  # may be shortened
    right: bool = False  # aligned to the right, as columns of whole numbers always are
    alone: bool = False  # has to stay whole: one that is too long has a line of its own


def told(text: str, many: str = "") -> Callable[[str], str]:
    """Return how a cell is told below its row: told("{} waiting"), told("{} crash", "es")."""
    return lambda cell: text.format(cell) + ("" if cell == "1" else many)


def untold(_cell: str) -> str:
    """Tell nothing of a cell whose column has no room."""
    return ""


class Laid(NamedTuple):
    """A table as it is written."""

    heads: list[str]
    rows: list[list[str]]  # padded cells
    above: list[list[str]]  # lines, for each row
    below: list[list[str]]
    kept: list[int]  # the columns that are shown


def short_moment(text: str) -> str:
    """Return the time of day for a moment of today, and the day without its year for others."""
    day, _, clock = text.partition(" ")
    if not clock:
        return text
    today = time.strftime("%Y-%m-%d")
    if day == today:
        return clock
    return f"{day[5:]} {clock[:5]}" if day[:4] == today[:4] else day


def table(
    columns: Sequence[Column],
    rows: list[list[str]],
    on: Paper,
    *,
    colour_of: Callable[[int, str], str | None] = lambda _column, _cell: None,
) -> str:
    """Return the lines of a table; numbers go to the right."""
    laid = layout(columns, rows, on.columns)
    bold = BOLD if on.colour else None
    heads = [*laid.heads[:-1], laid.heads[-1].rstrip()]
    lines = [GAP.join(paint(head, bold) for head in heads)]
    for row, above, fitted, below in zip(rows, laid.above, laid.rows, laid.below, strict=True):
        painted = [
            paint(cell, colour_of(at, row[at]) if on.colour else None)
            for at, cell in zip(laid.kept, fitted, strict=True)
        ]
        lines += [*above, GAP.join(painted).rstrip(), *below]
    return "\n".join(lines)


def paint(text: str, colour: str | None) -> str:
    return text if colour is None else f"\x1b[{colour}m{text}\x1b[0m"


def layout(
    columns: Sequence[Column], rows: list[list[str]], width: int, *, below: bool = True
) -> Laid:
    """Fit rows into `width` columns, or into as many as they take if it is 0.

    Without `below` there are no lines below rows: what does not fit is not told.
    """
    texts = [[printable(cell) for cell in row] for row in rows]
    above: list[list[str]] = [[] for _ in rows]
    kept = list(range(len(columns)))
    taken = _taken(columns, texts)
    if width and _total(taken, kept) > width:
        if below:
            _put_above(columns, texts, above, int(width * NAME_SHARE))
        for at, column in enumerate(columns):
            if column.short is not None:
                for row in texts:
                    row[at] = column.short(row[at])
        taken = _taken(columns, texts)
        room = max(NAME_MIN, int(width * NAME_SHARE))
        kept = _with_room(columns, _least(columns, taken, room), width)
        while room > NAME_MIN and _total(_least(columns, taken, room), kept) > width:
            room -= 1
        _shorten_names(columns, texts, kept, room)
        taken = _taken(columns, texts)
    return _written(columns, texts, kept, taken, width, below=below)._replace(above=above)


def _put_above(
    columns: Sequence[Column], texts: list[list[str]], above: list[list[str]], room: int
) -> None:
    """Take cells that have to stay whole, and have no room, out of their rows."""
    for at, column in enumerate(columns):
        for row, lines in zip(texts, above, strict=True):
            if column.alone and cells(row[at]) > room:
                lines.append(row[at])
                row[at] = ""


def _taken(columns: Sequence[Column], texts: list[list[str]]) -> list[int]:
    """Return the width of each column."""
    return [
        max([cells(column.head), *(cells(row[at]) for row in texts)])
        for at, column in enumerate(columns)
    ]


def _least(columns: Sequence[Column], taken: list[int], room: int) -> list[int]:
    """Return the widths that do: names take `room` at most, and prose can go below."""
    least = [
        max(cells(column.head), min(width, room)) if column.name else width
        for column, width in zip(columns, taken, strict=True)
    ]
    if columns[-1].rank:
        least[-1] = min(least[-1], max(LAST_MIN, cells(columns[-1].head)))
    return least


def _total(taken: list[int], kept: list[int]) -> int:
    return sum(taken[at] for at in kept) + len(GAP) * (len(kept) - 1)


def _with_room(columns: Sequence[Column], least: list[int], width: int) -> list[int]:
    """Return the columns that stay."""
    kept = list(range(len(columns)))
    while _total(least, kept) > width:
        others = [at for at in kept if columns[at].rank]
        if not others:
            break
        kept.remove(min(others, key=lambda at: columns[at].rank))
    return kept


def _shorten_names(
    columns: Sequence[Column], texts: list[list[str]], kept: list[int], room: int
) -> None:
    """Shorten the names over `room`, such that different names stay different."""
    for at, column in enumerate(columns):
        if column.name:
            made: dict[str, str] = {}
            for row in texts if at in kept else ():
                if cells(name := row[at]) > room and name not in made:
                    made[name] = shorten(name, room, tuple(made.values()))
                row[at] = made.get(name, name)


def _written(
    columns: Sequence[Column],
    texts: list[list[str]],
    kept: list[int],
    taken: list[int],
    width: int,
    *,
    below: bool,
) -> Laid:
    last = kept[-1]
    room = taken[last]
    if width:
        room = min(room, max(0, width - (_total(taken, kept) - taken[last])))
    figures = [
        columns[at].right or (bool(texts) and all(_is_figure(row[at]) for row in texts))
        for at in kept
    ]
    rooms = [room if at == last else taken[at] for at in kept]
    heads = [columns[at].head for at in kept]
    laid = Laid([], [], [], [], kept)
    laid.heads[:] = _padded(heads, rooms, figures)
    for row in texts:
        shown = [row[at] for at in kept]
        words = [
            text
            for at, cell in enumerate(row)
            if at not in kept and cell not in NOTHING and (text := columns[at].below(cell))
        ]
        if len(columns) - 1 not in kept and words and row[-1] not in NOTHING:
            words.insert(0, words.pop())
        if cells(shown[-1]) > room:
            if below:
                words.insert(0, shown[-1])  # what is wrong, before any figures
                shown[-1] = ""
            else:
                shown[-1] = clip(shown[-1], room)
        laid.rows.append(_padded(shown, rooms, figures))
        lines = wrapped(
            "; ".join(words), width, indent=BELOW, first=BELOW, lines_max=BELOW_LINES_MAX
        )
        laid.below.append(lines if words and below else [])
    return laid


def _is_figure(cell: str) -> bool:
    return cell.isdecimal() or cell == "-"


def _padded(texts: list[str], rooms: list[int], figures: list[bool]) -> list[str]:
    return [
        padded(text, room, right=figure)
        for text, room, figure in zip(texts, rooms, figures, strict=True)
    ]
