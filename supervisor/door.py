"""The door of tasks.sock: shut before the descriptors run out.

libzmq accepts connections in a thread of its own, and ends the whole process when there is no
descriptor left for one (`Too many open files (src/ipc_listener.cpp:297)`, then SIGABRT). So the
listening socket is ours, and libzmq has a duplicate of it that is taken away while descriptors are
short. With it libzmq closes every connection that came that way, which is what helps: a crowd that
leaves nothing to others is put out. Clients come back by themselves, wait in the kernel's queue or
try again, and then send and ask again, as after a restart of the daemon.

Nobody but our own workers can come to workers.sock, so that one is never shut.
"""

import contextlib
import os
import resource
import select
import socket
from pathlib import Path
from typing import NamedTuple

import zmq

from musterd.supervisor.control_socket import adopt, listen

# What is kept free of descriptors. Between two looks of ours libzmq goes on accepting, some
# thousands a second: that has to fit in there, and workers that are started meanwhile.
RESERVE_SHARE = 4  # of the limit, a quarter
RESERVE_MAX = 8192
BACKLOG = 64  # who comes while it is shut; libzmq's clients come again when this is full


class Descriptors(NamedTuple):
    used: int
    limit: int

    @property
    def free(self) -> int:
        return self.limit - self.used


def descriptors() -> Descriptors:
    """Of this process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = os.stat("/proc/self/fd").st_size  # since Linux 6.2; before it says 0
    if not used:
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # that takes a descriptor itself
            used = limit
    return Descriptors(used, limit)


def _enough() -> bool:
    found = descriptors()
    return found.free >= min(found.limit // RESERVE_SHARE, RESERVE_MAX)


class Door:
    """`look()` when `fileno()` is readable, `look_again()` once a second."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        path: Path,
        mode: int,
        group_id: int | None,
        handed: socket.socket | None = None,
    ) -> None:
        self._router = router
        self._endpoint = f"ipc://{path}"
        if handed is not None:
            self._listener = adopt(handed, str(path), group_id, mode)
        else:
            self._listener = listen(str(path), group_id, mode, BACKLOG)
        self._epoll = select.epoll()
        # Told once for each who comes: what libzmq has not accepted yet is not told again.
        self._epoll.register(self._listener, select.EPOLLIN | select.EPOLLET)
        self._is_open = False
        self._open()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def look(self) -> None:
        """Somebody comes: shut it if descriptors are short."""
        self._epoll.poll(0)
        if self._is_open and not _enough():
            self._router.unbind(self._endpoint)
            self._is_open = False

    def look_again(self) -> None:
        """Open it if there are descriptors again. Not sooner: a crowd would be back at once."""
        if not self._is_open and _enough():
            with contextlib.suppress(OSError):  # none to be had after all
                self._open()
        self.look()

    def problem(self) -> str:
        """What is wrong and what to do, or ""."""
        if self._is_open:
            return ""
        found = descriptors()
        return (
            f"{found.used} of {found.limit} descriptors are in use: clients were put out and wait "
            "at the door: raise the limit of open files, or see who opens so many connections"
        )

    def _open(self) -> None:
        # libzmq closes what it is given, and leaves a file that it did not make alone.
        self._router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        self._router.bind(self._endpoint)
        self._is_open = True

    def close(self) -> None:
        self._epoll.close()
        self._listener.close()
