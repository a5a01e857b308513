"""Messages to systemd (sd_notify(3)): READY=1, STATUS=, WATCHDOG=1. Silent without systemd."""

import os
import socket
import time
from collections.abc import Mapping

from musterd.supervisor.text.printable import printable


class Notifier:
    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            if self._address
            else None
        )
        self._status = ""
        self.watchdog_ns = _watchdog_ns(environ)  # the longest silence that systemd accepts; 0: any

    def tell(self, *lines: str) -> None:
        """Send now; a full or vanished socket is systemd's affair and never stops the daemon."""
        if self._socket is not None:
            try:
                self._socket.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self.tell(f"STATUS={printable(text)}")  # a second line would be another message

    def reloading(self) -> None:
        """Tell that the configuration is being read again, until READY=1."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def extend_timeout(self, by_ns: int) -> None:
        """Ask for this much more time, from now, for the start or the end under way."""
        self.tell(f"EXTEND_TIMEOUT_USEC={by_ns // 1000}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _watchdog_ns(environ: Mapping[str, str]) -> int:
    """Return the unit's WatchdogSec=, if it is meant for this process."""
    usec = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", "")
    return int(usec) * 1000 if usec.isdecimal() and pid in ("", str(os.getpid())) else 0
