"""Cut the output of a process into lines, and keep the last lines of each name.

A process may write anything: bytes that are no text, lines without end, a flood. So everything here
is bounded, and everything cut off or left out is counted and reported.
"""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

RING_LINES_MAX = 500  # of each name, for `musterctl tail`
RING_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 4096  # a longer line is cut, and says by how many bytes
LAST_WORDS_LINES = 5  # shown with the report of a crash
LAST_WORDS_CHARACTERS = 500


class Said(Struct, frozen=True):
    """One line of output."""

    at: float  # wall-clock time
    text: str


class Lines:
    """Joins pieces of output into lines."""

    def __init__(self) -> None:
        self._begun = b""  # a line that has not ended
        self._cut = 0  # bytes that were cut off that line

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Return the lines that are complete now, at most the last RING_LINES_MAX, and how many
        were left out."""
        parts = data.rsplit(b"\n", RING_LINES_MAX)
        left_out = parts[0].count(b"\n")
        if left_out:  # a flood: the line that was begun is left out too
            parts[0] = parts[0][parts[0].rindex(b"\n") + 1 :]
            self._begun, self._cut = b"", 0
        lines = []
        for part in parts[:-1]:
            self._add(part)
            lines.append(self._end())
        self._add(parts[-1])
        return lines, left_out

    def _add(self, part: bytes) -> None:
        room = LINE_BYTES_MAX - len(self._begun)
        self._begun += part[:room]
        self._cut += max(0, len(part) - room)

    def _end(self) -> bytes:
        line, cut = self._begun.rstrip(b"\r"), self._cut
        self._begun, self._cut = b"", 0
        return line + f" ... and {cut} bytes more".encode() if cut else line

    @property
    def begun(self) -> bytes:
        """Return the line that has not ended, b"" for none."""
        return self._begun

    def finish(self) -> list[bytes]:
        """Return the line that has not ended: no more output comes."""
        return [self._end()] if self._begun else []


class Ring:
    """The last lines of one name, those of former workers included."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def add(self, at: float, lines: Iterable[bytes]) -> None:
        kept = self._lines
        for line in lines:
            kept.append((at, line))
            self._bytes += len(line)
        while len(kept) > RING_LINES_MAX or self._bytes > RING_BYTES_MAX:
            self._bytes -= len(kept.popleft()[1])

    def last(self, count: int) -> list[Said]:
        found = list(self._lines)[-count:] if count else []
        return [Said(at, text_of(line)) for at, line in found]

    def __len__(self) -> int:
        return len(self._lines)


def text_of(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def last_words(lines: Iterable[bytes]) -> str:
    """Return the end of the output, short enough for a report."""
    text = "\n".join(text_of(line) for line in lines).strip()
    if len(text) <= LAST_WORDS_CHARACTERS:
        return text
    return "..." + text[-LAST_WORDS_CHARACTERS:]
