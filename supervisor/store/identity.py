"""Check that the store's files are still those that were opened.

SQLite goes on writing to an open file that was removed or moved. Such writes are gone with the
process, or are where the next start does not look. So the writer checks the files after each
commit, before anybody learns of the commit, and once a second.

SQLite's wal-index, `store.db-shm`, says how long the files have to be; its format is documented
(sqlite.org/walformat.html). The wal-index is read through one descriptor that is closed after the
last connection: closing any descriptor of a file gives up the process's locks on it.
"""

import os
import struct
from contextlib import suppress
from enum import Enum
from pathlib import Path

from msgspec import Struct

ENDINGS = ("", "-wal", "-shm")  # the files of a store that is in use

_INDEX = struct.Struct("=IxxxxIBBHII")  # version, changes, ready, byte order, page, frames, pages
_INDEX_BYTES = 48  # with checksums; there are two copies, alike unless a change is under way
_INDEX_VERSION = 3007000
_LOG_HEAD_BYTES = 32
_FRAME_HEAD_BYTES = 24


class Loss(Enum):
    """How the files were lost."""

    AWAY = "away"  # their directory was replaced or cannot be read
    MISSING = "missing"  # a file is gone, or the log was replaced
    REPLACED = "replaced"  # another database is in its place
    TRUNCATED = "truncated"  # a file is shorter than what was written to it


class Lost(Struct, frozen=True):
    kind: Loss
    reason: str


class Seen(Struct, frozen=True):
    """A file as stat() sees it; `place`, device and inode, names it forever."""

    place: tuple[int, int]
    size: int


class Index(Struct, frozen=True):
    """The sizes that SQLite expects of its files."""

    log_bytes: int  # the part of the log that is in use
    file_bytes: int  # the database after the whole log has moved into it


def judge(known: dict[str, Seen], seen: dict[str, Seen | None], index: Index | None) -> Lost | None:
    """Compare the files, by their endings, with those we opened; None when all is well."""
    for ending, before in known.items():
        now = seen[ending]
        name = f"store.db{ending}"
        if now is None:
            return Lost(Loss.MISSING, f"{name} was removed or moved")
        if now.place != before.place:
            kind = Loss.MISSING if ending else Loss.REPLACED
            return Lost(kind, f"{name} was replaced by another file")
    if index is None:
        return None
    file, log = seen[""], seen["-wal"]
    assert file is not None
    assert log is not None
    # SQLite itself may shorten the file, but never below its content.
    if file.size < min(known[""].size, index.file_bytes):
        return Lost(Loss.TRUNCATED, f"store.db was cut to {file.size} bytes")
    if log.size < index.log_bytes:
        words = f"store.db-wal was cut to {log.size} bytes, of which {index.log_bytes} are in use"
        return Lost(Loss.TRUNCATED, words)
    return None


def read_index(data: bytes) -> Index | None:
    """Decode the head of a wal-index; None during a change or for another version."""
    first, second = data[:_INDEX_BYTES], data[_INDEX_BYTES : 2 * _INDEX_BYTES]
    if first != second or len(second) < _INDEX_BYTES:
        return None
    version, _, ready, _, page, frames, pages = _INDEX.unpack_from(first)
    if version != _INDEX_VERSION or not ready:
        return None
    page_bytes = 65536 if page == 1 else page
    log_bytes = _LOG_HEAD_BYTES + frames * (_FRAME_HEAD_BYTES + page_bytes) if frames else 0
    return Index(log_bytes, pages * page_bytes)


class Identity:
    """The files of an open store. Create this after the connections and close it after them."""

    def __init__(self, path: Path) -> None:
        self._places = {ending: f"{path}{ending}" for ending in ENDINGS}
        self._folder = str(path.parent)
        self._folder_place = _look_at(self._folder).place
        self._known = {ending: _look_at(place) for ending, place in self._places.items()}
        self._index_fd = os.open(self._places["-shm"], os.O_RDONLY | os.O_CLOEXEC)
        self._folder_fd = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def look(self) -> Lost | None:
        """Return how the files were lost; None when all is well. Only the writer calls this."""
        if self._as_before():
            return None
        index = self._read_index()
        try:
            seen = {ending: _find(place) for ending, place in self._places.items()}
        except OSError as error:
            return Lost(Loss.AWAY, f"{self._folder} cannot be looked into: {error.strerror}")
        lost = judge(self._known, seen, index)
        if lost is None:
            self._known = {ending: each for ending, each in seen.items() if each is not None}
        elif lost.kind is Loss.TRUNCATED and self._read_index() != index:
            return None  # another process shortens the log at this moment
        elif lost.kind is not Loss.TRUNCATED and self._folder_is_away():
            return Lost(Loss.AWAY, f"the directory {self._folder} was moved, or another is mounted")
        return lost

    def _as_before(self) -> bool:
        """Tell whether all files are in place and none is shorter: the quick check."""
        try:
            for ending, place in self._places.items():
                status, known = os.stat(place), self._known[ending]
                if (
                    (status.st_dev, status.st_ino) != known.place
                    or status.st_size < known.size
                    or status.st_size == 0
                ):
                    return False
                if status.st_size > known.size:
                    self._known[ending] = Seen(known.place, status.st_size)
        except OSError:
            return False
        return True

    def still_there(self) -> list[str]:
        """Return the endings of the files that are in place and ours."""
        with suppress(OSError):
            found = {ending: _find(place) for ending, place in self._places.items()}
            return [
                ending
                for ending, seen in found.items()
                if seen is not None and seen.place == self._known[ending].place
            ]
        return []

    def _read_index(self) -> Index | None:
        return read_index(os.pread(self._index_fd, 2 * _INDEX_BYTES, 0))

    def _folder_is_away(self) -> bool:
        """Tell whether the directory was moved. A removed directory cannot come back."""
        if os.fstat(self._folder_fd).st_nlink == 0:
            return False
        with suppress(OSError):
            return _look_at(self._folder).place != self._folder_place
        return True

    def close(self) -> None:
        os.close(self._index_fd)
        os.close(self._folder_fd)


def is_at(fd: int, path: Path) -> bool:
    """Tell whether the open file is the one at this path."""
    status = os.fstat(fd)
    with suppress(OSError):
        return _look_at(str(path)).place == (status.st_dev, status.st_ino)
    return False


def _look_at(place: str) -> Seen:
    status = os.stat(place)
    return Seen((status.st_dev, status.st_ino), status.st_size)


def _find(place: str) -> Seen | None:
    try:
        return _look_at(place)
    except FileNotFoundError:
        return None
