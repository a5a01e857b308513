"""Marks in the output of workers: which task says a line, and at which level.

A worker writes a mark at the beginning of each line that is said within an attempt; the supervisor
takes it out again. Output without marks (of children, of C code) is nobody's:

    RS LEVEL TASK US     RS and US are control characters; LEVEL is a letter, or absent
"""

import re
from typing import NamedTuple

BEGIN, END = "\x1e", "\x1f"
LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "C": "CRITICAL"}

_MARK = re.compile(rb"\x1e([DIWEC]?) ([!-~]{0,64})\x1f")
_TASK = re.compile(r"[!-~]{1,64}")


class Spoken(NamedTuple):
    """A line of output without its mark."""

    line: bytes
    task: str = ""  # id of the task that says it; "" if that is not known
    level: str = ""  # name of a level of `logging`; "": the line itself may tell


def mark(task: str, level: str = "") -> str:
    """Return the mark for a line of this task; ids that cannot be told apart from text are left
    out."""
    letter = level[:1] if LEVELS.get(level[:1]) == level else ""
    named = task if _TASK.fullmatch(task) else ""
    return f"{BEGIN}{letter} {named}{END}" if letter or named else ""


def unmarked(line: bytes) -> Spoken:
    """Take the mark out of a line."""
    if b"\x1e" not in line:
        return Spoken(line)
    found = _MARK.search(line)
    if found is None:
        return Spoken(line)
    level = LEVELS.get(found[1].decode(), "")
    # Threads that write at once can bring one mark into the line of another.
    return Spoken(_MARK.sub(b"", line), found[2].decode(), level)
