"""Report to the supervisor that a handler's client waits for tasks, so that deadlocks are seen.

The supervisor decides whether the wait can end; see supervisor/core/tasks/waits.py. A worker's
runtime registers how a wait is reported (`tell_waits`); clients wait inside reported().
Outside of workers nothing is reported.
"""

from collections.abc import Callable
from typing import Protocol

from musterd.ipc.errors import WouldDeadlock
from musterd.ipc.wire.messages import BATCH_TASKS_MAX


class Wait(Protocol):
    """Wait that the supervisor knows of."""

    error: WouldDeadlock | None  # why the wait is in vain

    def end(self) -> None:
        """End the wait, whatever its outcome."""


# (ids, wake) -> the wait, or None where none is reported; `wake` is called once `error` is set.
Begin = Callable[[list[str], Callable[[], None]], Wait | None]

_begin: Begin | None = None


def tell_waits(begin: Begin) -> None:
    """Register how this process, which is a worker, reports its waits."""
    global _begin
    _begin = begin


class reported:
    """Report a wait until done() holds, which the end of one of these tasks causes.

    A `with` block gets the condition to wait for, and raises WouldDeadlock in a handler whose tasks
    can never end. A wait for more tasks than a message holds is not reported: one of that many can
    usually end.
    """

    __slots__ = ("_done", "_wait")  # each result() that waits makes one

    def __init__(
        self, ids: list[str], done: Callable[[], bool], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._done = done
        self._wait: Wait | None = None
        if _begin is not None and 0 < len(ids) <= BATCH_TASKS_MAX:
            self._wait = _begin(ids, wake)

    def __enter__(self) -> Callable[[], bool]:
        wait, done = self._wait, self._done
        return done if wait is None else lambda: done() or wait.error is not None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        wait = self._wait
        if wait is not None:
            wait.end()
            if kind is None and wait.error is not None and not self._done():
                raise wait.error
