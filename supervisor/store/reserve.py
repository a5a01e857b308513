"""Reserve disk space for tasks that are under way when the disk fills up.

A task may run before it is on disk (core/tasks/intake.py). A file beside the store holds some space
in advance, so that a full disk blocks neither the task nor its result. The daemon gives the reserve
up for them, and refuses new tasks until there is space for a new reserve.
"""

import os
from contextlib import suppress
from pathlib import Path

from musterd.supervisor.store.schema import FILE_MODE

RESERVE_BYTES = 1024 * 1024  # for hundreds of small tasks


def reserve_of(path: Path) -> Path:
    """Return the path of a store's reserve, which a clean end removes."""
    return path.with_name(f"{path.name}.reserve")


class Reserve:
    """The file that holds the space. One thread uses this."""

    def __init__(self, path: Path) -> None:
        self._file = reserve_of(path)
        self._kept = False

    def keep(self) -> bool:
        """Take the reserve unless it is there; return whether it is there now."""
        if not self._kept:
            try:
                self._take()
            except OSError:
                with suppress(OSError):  # a part of the reserve is of no use
                    self._file.unlink()
                return False
            self._kept = True
        return True

    def _take(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._file, flags, FILE_MODE)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)

    def give_up(self) -> bool:
        """Free the reserve; return whether that made space."""
        if not self._kept:
            return False
        self._kept = False
        try:
            self._file.unlink()
        except OSError:
            return False
        return True
