"""What the loop waits for: the ROUTER of the clients, and descriptors.

A ROUTER's descriptor only tells that something has happened to it, and that once: so each is asked
itself before every sleep, and after it if its descriptor told. zmq.Poller asks more often.
"""

import select
from collections.abc import Iterable
from typing import Any

import zmq

from musterd.ipc.sockets import has_message

Router = zmq.Socket[bytes]
Ready = dict[Any, bool]  # ROUTERs and descriptors


class Sources:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._routers: dict[int, Router] = {}  # by their descriptors

    def open(self, routers: Iterable[Router], descriptors: Iterable[int]) -> None:
        self._routers = {int(router.getsockopt(zmq.FD)): router for router in routers}
        for fd in (*self._routers, *descriptors):
            self._epoll.register(fd, select.EPOLLIN)

    def wait(self, milliseconds: int) -> Ready:
        """Those that have something, at the latest after that time."""
        routers = self._routers
        ready: Ready = {router: True for router in routers.values() if has_message(router)}
        for fd, _ in self._epoll.poll(0 if ready else milliseconds / 1000):
            router = routers.get(fd)
            if router is None:
                ready[fd] = True
            elif router not in ready and has_message(router):
                ready[router] = True
        return ready

    def close(self) -> None:
        self._epoll.close()
