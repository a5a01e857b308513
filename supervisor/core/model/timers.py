"""Deadlines, soonest first.

A timer is never taken back: whoever set it looks, when it fires, whether it still means anything.
That keeps the hot path free of bookkeeping for deadlines that almost never come true. Those that
may lie far ahead of what they are for (a task ends long before it expires) are swept now and then.
"""

import heapq
from collections.abc import Callable
from typing import Any


class Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0  # equal deadlines fire in the order they were set

    def at(self, when_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when_ns, self._order, call, args))

    def next_deadline(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def run(self, now_ns: int) -> None:
        """Call everything that is due; what those calls add for now or earlier runs as well."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, call, args = heapq.heappop(self._heap)
            call(*args)

    def sweep(self, dead: Callable[[tuple[Any, ...]], bool]) -> None:
        """Drop the timers whose arguments say that they mean nothing any more."""
        self._heap = [timer for timer in self._heap if not dead(timer[3])]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
