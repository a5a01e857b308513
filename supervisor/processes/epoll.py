"""One epoll with a handler for each descriptor, for the spawner and the sidecars."""

import select
from collections.abc import Callable

from musterd.supervisor.system.threads import Wakeup

EVENTS_PER_TURN_MAX = 64  # descriptors served in one turn; the others stay ready


class Watch:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._removed: set[int] = set()  # in this turn: their events are out of date
        self._wakeup = Wakeup()
        self.add(self._wakeup.fileno(), self._wakeup.clear)

    def fileno(self) -> int:
        """Return the descriptor that is readable when turn() has work."""
        return self._epoll.fileno()

    def add(self, fd: int, handler: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor. Call this before closing it."""
        self._epoll.unregister(fd)
        del self._handlers[fd]
        self._removed.add(fd)

    def discard(self, fd: int) -> None:
        """Stop watching a descriptor if it is watched."""
        if fd in self._handlers:
            self.remove(fd)

    def wake(self) -> None:
        """Make fileno() readable for news that no descriptor announces."""
        self._wakeup.set()

    def wait(self, seconds: float) -> None:
        self._epoll.poll(seconds, 1)

    def turn(self) -> None:
        """Call the handlers of all descriptors that are readable now."""
        self._removed.clear()
        for fd, _ in self._epoll.poll(0, EVENTS_PER_TURN_MAX):
            if fd not in self._removed:  # an earlier handler may have closed and reused it
                self._handlers[fd]()

    def close(self) -> None:
        self.remove(self._wakeup.fileno())
        self._wakeup.close()
        self._epoll.close()
