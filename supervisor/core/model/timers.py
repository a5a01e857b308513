"""Deadlines, soonest first.

A timer is never taken back: its callback looks, when the timer fires, whether the deadline still
means anything. That keeps the hot path free of bookkeeping for deadlines that almost never come.

The timers of a task keep the task in memory, and a task that ends after a millisecond may expire in
a day. When ended tasks could hold the majority of these timers, `TaskTimers` sweeps them all.
"""

import heapq
from collections.abc import Callable
from typing import Any

from musterd.supervisor.core.model.task import Task, TaskState

TIMERS_PER_TASK = 4  # of a live task (expiry, wake, cancel) before a sweep pays ...
TIMERS_SLACK = 1024  # ... and how many may be there in any case


class Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0  # equal deadlines fire in the order they were set

    def at(self, when_ns: int, callback: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when_ns, self._order, callback, args))

    def next_deadline(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def run(self, now_ns: int) -> None:
        """Call everything that is due, including what these calls add for now or earlier."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, callback, args = heapq.heappop(self._heap)
            callback(*args)

    def sweep(self, dead: Callable[[tuple[Any, ...]], bool]) -> None:
        """Drop the timers whose arguments are `dead`."""
        self._heap = [timer for timer in self._heap if not dead(timer[3])]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class TaskTimers:
    def __init__(self, timers: Timers, tasks: dict[str, Task]) -> None:
        self._timers = timers
        self._tasks = tasks
        self._count = 0  # set since the last sweep, or left by it

    def at(self, when_ns: int, callback: Callable[..., None], task: Task, *args: int) -> None:
        """Call `callback(task, *args)` then, unless the task has ended."""
        timers = self._timers
        self._count += 1
        if self._count > TIMERS_SLACK + TIMERS_PER_TASK * len(self._tasks):
            timers.sweep(_of_ended_task)
            self._count = len(timers)
        timers.at(when_ns, callback, task, *args)


def _of_ended_task(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Task) and args[0].state == TaskState.ENDING
