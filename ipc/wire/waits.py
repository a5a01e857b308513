"""A client that waits for tasks inside a worker tells the worker's supervisor, which sees whether
that can ever end; see supervisor/core/tasks/waits.py. Outside of workers nothing of this happens.

The runtime of a worker says here how that is told (`tell_waits`); clients ask before they wait.
"""

from collections.abc import Callable
from typing import Protocol

from musterd.ipc.errors import WouldDeadlock
from musterd.ipc.wire.messages import BATCH_TASKS_MAX


class Wait(Protocol):
    """A wait that the supervisor knows of."""

    error: WouldDeadlock | None  # why it is in vain

    def end(self) -> None:
        """It is over, however it ended."""


# (ids, wake) -> the wait, or None where nobody has to know; `wake` is called with the error there.
Begin = Callable[[list[str], Callable[[], None]], Wait | None]

_begin: Begin | None = None


def tell_waits(begin: Begin) -> None:
    """From now on this process is a worker."""
    global _begin
    _begin = begin


def begin(ids: list[str], wake: Callable[[], None] = lambda: None) -> Wait | None:
    """To be called before a wait for the end of one of these tasks; None outside of a handler.

    Of more tasks than a message holds it is not told: one of so many can end, as a rule.
    """
    if _begin is None or not 0 < len(ids) <= BATCH_TASKS_MAX:
        return None
    return _begin(ids, wake)
