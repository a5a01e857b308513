"""Report to the supervisor that a handler's client waits for tasks, so that deadlocks are seen.

The supervisor decides whether the wait can end; see supervisor/core/tasks/waits.py. A worker's
runtime registers how a wait is reported (`tell_waits`); clients call begin() before they wait.
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


def begin(ids: list[str], wake: Callable[[], None] = lambda: None) -> Wait | None:
    """Report a wait for the end of one of these tasks; None outside of a handler.

    A wait for more tasks than a message holds is not reported: one of that many can usually end.
    """
    if _begin is None or not 0 < len(ids) <= BATCH_TASKS_MAX:
        return None
    return _begin(ids, wake)
