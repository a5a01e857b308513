"""What clients have asked for and have not got: ids of results, and views of single tasks.

The daemon looks it up in the store (lookups.py), a cluster sidecar in PostgreSQL (node/lookups.py).
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct

from musterd.supervisor.core.tasks.client_limits import ID_BYTES

PORTIONS_MAX = 4  # under way: one turn of the loop may have to deal with all of them
PORTION_BYTES = 1024 * 1024
PORTION_TASKS = 500  # ids in one portion


class Inspection(Struct, frozen=True, gc=False):
    """A request for the view of one task."""

    request: int
    id: str


class Owed:
    """What one client has asked for and has not got, in order."""

    __slots__ = ("_items", "asked")

    def __init__(self) -> None:
        self._items: deque[str | Inspection] = deque()
        self.asked = False  # the first part is being looked up

    def __len__(self) -> int:
        return len(self._items)

    def add(self, what: Iterable[str | Inspection]) -> int:
        """Append; return the cost in bytes."""
        before = len(self._items)
        self._items.extend(what)
        return (len(self._items) - before) * ID_BYTES

    def clear(self) -> int:
        """Forget all; return the bytes that this gives back."""
        size = len(self._items) * ID_BYTES
        self._items.clear()
        return size

    def first(self) -> list[str] | Inspection:
        """Return the ids of the next results, or the inspection that comes before them."""
        if isinstance(self._items[0], Inspection):
            return self._items[0]
        ids: list[str] = []
        for item in islice(self._items, PORTION_TASKS):
            if isinstance(item, Inspection):
                break
            ids.append(item)
        return ids

    def drop(self, count: int) -> int:
        """Remove this many of the first; return the bytes that this frees."""
        count = min(count, len(self._items))
        for _ in range(count):
            self._items.popleft()
        return count * ID_BYTES
