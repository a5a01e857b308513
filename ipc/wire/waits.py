"""Report to the supervisor that a handler's client waits for tasks, so that deadlocks are seen.

The supervisor decides whether the wait can end; see supervisor/core/tasks/waits.py. A worker's
runtime registers how a wait is reported (`tell_waits`); clients wait inside reported().
Outside of workers nothing is reported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from musterd.ipc.errors import WouldDeadlock
from musterd.ipc.wire.messages import BATCH_TASKS_MAX


class Wait(Protocol):
    """Wait that the supervisor knows of."""

    error: WouldDeadlock | None  # why the wait is in vain

    def end(self) -> None:
        """End the wait, whatever its outcome."""


# (ids, wake) -> the wait, or None where nobody has to know; `wake` is called once `error` is set.
Begin = Callable[[list[str], Callable[[], None]], Wait | None]

_begin: Begin | None = None


def tell_waits(begin: Begin) -> None:
    """Register how this process, which is a worker, reports its waits."""
    global _begin
    _begin = begin


@contextmanager
def reported(
    ids: list[str], done: Callable[[], bool], wake: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], bool]]:
    """Report a wait until done() holds, which the end of one of these tasks causes.

    Yields the condition to wait for; raises WouldDeadlock in a handler whose tasks can never end. A
    wait for more tasks than a message holds is not reported: one of so many can usually end.
    """
    wait = None
    if _begin is not None and 0 < len(ids) <= BATCH_TASKS_MAX:
        wait = _begin(ids, wake)
    if wait is None:
        yield done
        return
    try:
        yield lambda: done() or wait.error is not None
    finally:
        wait.end()
    if wait.error is not None and not done():
        raise wait.error
