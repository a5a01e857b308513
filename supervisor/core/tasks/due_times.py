"""Due times: which schedules have to be looked at, soonest first.

A heap, so that thousands of schedules that are not due cost nothing. A schedule has at most one
time that counts, `look_ns` (wall clock). An entry of the heap with another time, or of a schedule
that was removed, is stale and dropped when its turn comes.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

STALE_MAX = 1000  # more stale entries than this, and than valid ones, are swept


class Listed(Protocol):
    look_ns: int | None  # None: not listed


L = TypeVar("L", bound=Listed)


class DueTimes(Generic[L]):
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, L]] = []
        self._order = 0  # equal times come in the order they were listed
        self._listed = 0

    def list(self, each: L, look_ns: int) -> None:
        """Look at it then, whatever was noted before."""
        self._listed += each.look_ns is None
        each.look_ns = look_ns
        self._order += 1
        heappush(self._heap, (look_ns, self._order, each))
        if len(self._heap) > 2 * self._listed + STALE_MAX:
            self._heap = [entry for entry in self._heap if entry[2].look_ns == entry[0]]
            heapify(self._heap)

    def leave(self, each: L) -> None:
        """Look at it no more, until it is listed again."""
        self._listed -= each.look_ns is not None
        each.look_ns = None

    def next_ns(self) -> int | None:
        """Return the time of the next one."""
        heap = self._heap
        while heap and heap[0][2].look_ns != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take(self, until_ns: int) -> L | None:
        """Return the next one that is due, which is listed no more; None if there is none."""
        due_ns = self.next_ns()
        if due_ns is None or due_ns > until_ns:
            return None
        each = heappop(self._heap)[2]
        self.leave(each)
        return each
