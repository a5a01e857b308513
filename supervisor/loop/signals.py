"""Signals of the daemon: a handler only wakes the loop, which then reads the numbers."""

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
        """Return the descriptor that is readable when a signal has come."""
        return self._read.fileno()

    def open(self) -> None:
        for number in HEARD:
            signal.signal(number, _only_wake)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def hear(self) -> bytes:
        """Return the numbers of the signals that have come."""
        try:
            return self._read.recv(READ_BYTES)
        except BlockingIOError:
            return b""

    def ignore(self) -> None:
        """Hear no more signals."""
        signal.set_wakeup_fd(-1)

    def close(self) -> None:
        self._read.close()
        self._wake.close()


def _only_wake(_number: int, _frame: object) -> None:
    """Do nothing: Python needs a handler in order to write to the wake-up descriptor."""
