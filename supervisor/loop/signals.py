"""Signals of the daemon: handlers only wake the loop, which then hears what came."""

import signal
import socket

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
READ_BYTES = 64  # signals heard in one turn


class Signals:
    def __init__(self) -> None:
        self._read, self._wake = socket.socketpair()
        self._read.setblocking(False)
        self._wake.setblocking(False)

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._read.fileno()

    def open(self) -> None:
        for number in HEARD:
            signal.signal(number, _only_wake)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def hear(self) -> bytes:
        """The numbers of those that came."""
        try:
            return self._read.recv(READ_BYTES)
        except BlockingIOError:
            return b""

    def ignore(self) -> None:
        """From now on none is heard."""
        signal.set_wakeup_fd(-1)

    def close(self) -> None:
        self._read.close()
        self._wake.close()


def _only_wake(_number: int, _frame: object) -> None:
    """Python needs a handler to write to the wake-up descriptor; the loop does the rest."""
