"""Lru: the entries used last, up to a number of entries and of bytes."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

ENTRY_BYTES = 300  # of the objects around an entry's text

Value = TypeVar("Value")


class Lru(Generic[Value]):
    def __init__(
        self, entries_max: int, bytes_max: int, dropped: Callable[[str], None] | None = None
    ) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._dropped = dropped  # called with the name of a dropped entry
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()  # oldest use first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> list[str]:
        """Return the names, from the oldest use to the latest."""
        return list(self._entries)

    def get(self, name: str) -> Value | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        self._entries.move_to_end(name)
        return entry[0]

    def put(self, name: str, value: Value, size: int) -> bool:
        """Keep a value in place of the old one; False, and neither is kept, if it is too large."""
        size += ENTRY_BYTES + len(name)
        former = self._entries.pop(name, None)
        if former is not None:
            self.bytes -= former[1]
        if size > self._bytes_max:
            return False
        self._entries[name] = (value, size)
        self.bytes += size
        self._shrink()
        return True

    def follow(self, entries_max: int, bytes_max: int) -> None:
        """Take over changed limits."""
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._shrink()

    def _shrink(self) -> None:
        while len(self._entries) > self._entries_max or self.bytes > self._bytes_max:
            self.drop(next(iter(self._entries)))

    def drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.bytes -= entry[1]
            if self._dropped is not None:
                self._dropped(name)
