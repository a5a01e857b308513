"""What may take long and must not hold up the loop: done in a thread, answered in the loop.

The loop polls `fileno()` and calls `settle()`. An errand knows by itself when to give up; what it
raises is our own mistake, and is raised in the loop.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

T = TypeVar("T")


class BackgroundCalls:
    def __init__(self) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: deque[threading.Thread] = deque()
        self._done: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # the descriptor's number may be another's after close()
        self._closed = False

    def fileno(self) -> int:
        """Readable when settle() has something to tell."""
        return self._wake_fd

    def run(self, name: str, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call `work()` in a thread, and `then` with what it returns in the loop."""

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
        """Start what waits; once a second also what could not be started before."""
        with contextlib.suppress(RuntimeError):  # no thread to be had, by a limit of processes
            while self._waiting:
                self._waiting[0].start()
                self._waiting.popleft()

    def _finish(self, answer: Callable[[], None]) -> None:
        self._done.append(answer)
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def settle(self) -> None:
        """Hand out the answers that have come."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        while self._done:
            self._done.popleft()()

    def close(self) -> None:
        """Nobody waits for the answers any more."""
        with self._lock:
            self._closed = True
            os.close(self._wake_fd)


def _fail(error: BaseException) -> NoReturn:
    raise error
