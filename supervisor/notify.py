"""Words to systemd: READY=1, STATUS=, STOPPING=1. Silent where nobody listens."""

import os
import socket


class Notifier:
    def __init__(self, address: str | None = None) -> None:
        address = address if address is not None else os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            if self._address
            else None
        )
        self._status = ""

    def tell(self, *lines: str) -> None:
        """Send now; a full or vanished socket is systemd's affair, never a reason to stop."""
        if self._socket is not None:
            try:
                self._socket.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self.tell(f"STATUS={text}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
