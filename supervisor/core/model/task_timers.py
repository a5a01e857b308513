"""Timers of tasks. Each keeps its task in memory, so it may not outlive it for long.

A task that ends after a millisecond may expire in a day. Timers are never taken back one by one;
when those of ended tasks could be the majority, all of them are swept.
"""

from collections.abc import Callable
from typing import Any

from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState

TIMERS_PER_TASK = 4  # of a live one (expiry, wake, cancel) before a sweep is worth its while ...
TIMERS_SLACK = 1024  # ... and how many may be there in any case


class TaskTimers:
    def __init__(self, state: State) -> None:
        self._state = state
        self._count = 0  # set since the last sweep, or left by it

    def at(self, when_ns: int, call: Callable[..., None], task: Task, *args: int) -> None:
        """Call `call(task, *args)` then, unless the task has ended."""
        timers = self._state.timers
        self._count += 1
        if self._count > TIMERS_SLACK + TIMERS_PER_TASK * len(self._state.tasks):
            timers.sweep(_of_ended_task)
            self._count = len(timers)
        timers.at(when_ns, call, task, *args)


def _of_ended_task(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Task) and args[0].state == TaskState.ENDING
