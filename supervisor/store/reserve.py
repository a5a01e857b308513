"""Room on the disk for what is under way when it gets full.

A task may run before it is on disk (core/tasks/intake.py). So that neither it nor its result is
stuck when the disk gets full at that moment, some room is taken beforehand, by a file beside the
store. It is given up for them, and new tasks are refused from then on, until there is room for it
again.
"""

import os
from contextlib import suppress
from pathlib import Path

from musterd.supervisor.store.schema import FILE_MODE

RESERVE_BYTES = 1024 * 1024  # for hundreds of small tasks


def reserve_of(path: Path) -> Path:
    """Where the reserve of a store is, which a clean end removes."""
    return path.with_name(f"{path.name}.reserve")


class Reserve:
    """Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._file = reserve_of(path)
        self._kept = False

    def keep(self) -> bool:
        """Whether there is one, taken now if it was given up."""
        if not self._kept:
            try:
                self._take()
            except OSError:
                with suppress(OSError):  # a part of it is of no use
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
        """Whether there is more room now."""
        if not self._kept:
            return False
        self._kept = False
        try:
            self._file.unlink()
        except OSError:
            return False
        return True
