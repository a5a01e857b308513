"""What the loop waits for.

Nearly all turns of the loop are about a few of them, and looking at each costs: so those are looked
at by themselves, and all the others behind one descriptor.
"""

import select
from collections.abc import Iterable
from typing import Any

import zmq


class Sources:
    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._others = select.epoll()

    def open(self, busy: Iterable[Any], others: Iterable[int]) -> None:
        for source in busy:
            self._poller.register(source, zmq.POLLIN)
        for fd in others:
            self._others.register(fd, select.EPOLLIN)
        self._poller.register(self._others.fileno(), zmq.POLLIN)

    def wait(self, milliseconds: int) -> dict[Any, int]:
        """Those that have something, sockets and descriptors, at the latest after that time."""
        ready = dict(self._poller.poll(milliseconds))
        if self._others.fileno() in ready:
            ready.update(self._others.poll(0))
        return ready

    def close(self) -> None:
        self._others.close()
