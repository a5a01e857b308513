"""One epoll for everything the spawner waits for: descriptors, each with what to do about it."""

import os
import select
from collections.abc import Callable

EVENTS_PER_TURN_MAX = 64  # descriptors looked at in one turn; the rest stays ready


class Watch:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._removed: set[int] = set()  # in this turn: what is still told of them is not for us
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add(self._wake_fd, lambda: None)

    def fileno(self) -> int:
        """Readable when turn() has something to do."""
        return self._epoll.fileno()

    def add(self, fd: int, handler: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """To be called before the descriptor is closed."""
        self._epoll.unregister(fd)
        del self._handlers[fd]
        self._removed.add(fd)

    def discard(self, fd: int) -> None:
        """The same for one that may not be watched any more."""
        if fd in self._handlers:
            self.remove(fd)

    def wake(self) -> None:
        """There is something to do that no descriptor tells."""
        os.eventfd_write(self._wake_fd, 1)

    def wait(self, seconds: float) -> None:
        self._epoll.poll(seconds, 1)

    def turn(self) -> None:
        """Calls the handlers of what is readable now."""
        self._removed.clear()
        for fd, _ in self._epoll.poll(0, EVENTS_PER_TURN_MAX):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd not in self._removed:  # else closed by a handler before; it may be another now
                self._handlers[fd]()

    def close(self) -> None:
        self.remove(self._wake_fd)
        os.close(self._wake_fd)
        self._epoll.close()
