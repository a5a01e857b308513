"""Slow calls in threads of their own, answered in the loop.

The loop polls `fileno()` and calls `settle()`. A call knows by itself when to give up. An exception
of a call is our own mistake and is raised in the loop.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from musterd.supervisor.system.threads import Wakeup

T = TypeVar("T")

CALLS_MAX = 16  # calls without a thread yet: a reload and the clean-ups, each one at a time


class BackgroundCalls:
    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self._waiting: deque[threading.Thread] = deque()
        self._done: deque[Callable[[], None]] = deque()

    def fileno(self) -> int:
        """Return the descriptor that is readable when settle() has answers."""
        return self._wakeup.fileno()

    def run(self, name: str, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call `work()` in a thread, then call `then` with the result in the loop."""
        assert len(self._waiting) < CALLS_MAX, f"more than {CALLS_MAX} calls wait for a thread"

        def do() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - raised again in the loop
                self._finish(partial(_fail, error))
            else:
                self._finish(partial(then, result))

        self._waiting.append(threading.Thread(target=do, name=f"musterd-{name}", daemon=True))
        self.begin()

    def begin(self) -> None:
        """Start the calls that wait; once a second also those that found no thread before."""
        with contextlib.suppress(RuntimeError):  # the limit of processes allows no more threads
            while self._waiting:
                self._waiting[0].start()
                self._waiting.popleft()

    def _finish(self, answer: Callable[[], None]) -> None:
        self._done.append(answer)
        self._wakeup.set()

    def settle(self) -> None:
        """Hand out the answers that have come."""
        self._wakeup.clear()
        while self._done:
            self._done.popleft()()

    def close(self) -> None:
        """Drop the answers that are still to come."""
        self._wakeup.close()


def _fail(error: BaseException) -> NoReturn:
    raise error
