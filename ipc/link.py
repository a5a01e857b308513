"""A Session on a real socket: one DEALER, never blocking, driven by whoever holds it.

IMMEDIATE keeps libzmq from queueing for a supervisor that is not there, so "writable" means
"connected" (the high-water mark is off; the session bounds what is under way) and what a broken
connection had queued is dropped, to be sent again in order after the next Welcome.

The descriptor is edge-triggered: it tells that something happened, once. So every pump ends with a
look at EVENTS that finds nothing to read, and waiters poll with a bounded time-out all the same.
"""

import logging
import os
import time
from pathlib import Path

import zmq

from musterd.ipc.codec import decode_server
from musterd.ipc.errors import NotConnected, ProtocolError
from musterd.ipc.paths import find_tasks_socket, fitting
from musterd.ipc.session import Session

RECONNECT_MS = 20  # a supervisor that restarts is found again at once
RECONNECT_MAX_MS = 200  # and one that stays away costs five connect() a second
RECEIVED_MESSAGES_MAX = 1_000  # more wait on the supervisor's side, which is bounded too
NET_NS = 100_000_000  # longest poll: the net below the edge-triggered descriptor

log = logging.getLogger("musterd.client")


class Link:
    """Not thread-safe: one caller at a time."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = str(find_tasks_socket() if path is None else fitting(Path(path), "socket"))
        self.session = Session()
        self.malformed = 0  # messages of the supervisor that were dropped
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES_MAX)
            self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
            self._socket.connect(f"ipc://{self.path}")
        except zmq.ZMQError as error:
            self.close()
            raise NotConnected(f"cannot connect to {self.path!r}: {error}") from error
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def pump(self) -> None:
        """Send what there is to send, take in what has arrived, until neither is left."""
        now_ns = time.monotonic_ns()
        socket, session = self._socket, self.session
        events = int(socket.getsockopt(zmq.EVENTS))
        while True:
            while events & zmq.POLLIN:
                self._receive(now_ns)
                events = int(socket.getsockopt(zmq.EVENTS))
            if events & zmq.POLLOUT:
                session.connected(now_ns)
            else:
                session.disconnected()
            session.tick(now_ns)
            session.seal(now_ns)
            if not session.outbox:
                return
            self._send_outbox()
            events = int(socket.getsockopt(zmq.EVENTS))
            if not events & zmq.POLLIN:
                return

    def _send_outbox(self) -> None:
        outbox = self.session.outbox
        while outbox:
            try:
                self._socket.send(outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                self.session.disconnected()
                return
            outbox.popleft()

    def _receive(self, now_ns: int) -> None:
        try:
            message = decode_server(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return  # the connection broke since EVENTS was read, and took the message with it
        except ProtocolError as error:
            if self.malformed == 0:  # once is enough to know, the count tells the rest
                log.warning("a message of the supervisor at %s was dropped: %s", self.path, error)
            self.malformed += 1
            return
        self.session.receive(now_ns, message)

    def wait_ns(self, now_ns: int) -> int:
        """How long to wait for the descriptor before the next pump."""
        deadline_ns = self.session.next_deadline()
        if deadline_ns is None:
            return NET_NS
        return min(max(deadline_ns - now_ns, 0), NET_NS)

    def unreachable(self, seconds: float) -> NotConnected:
        """The error for a supervisor that did not answer."""
        if self.session.refusal:
            return NotConnected(f"the supervisor at {self.path} refused: {self.session.refusal}")
        if not os.path.exists(self.path):
            why = (
                "there is no such socket; start musterd, or set MUSTERD_TASKS or Client(socket=...)"
            )
        elif not os.access(self.path, os.W_OK):
            why = "this user may not write to the socket; join the daemon's tasks_group"
        else:
            why = "the socket is there but nobody answers; see whether musterd runs"
        return NotConnected(f"no supervisor at {self.path} within {seconds:g} s: {why}")

    def close(self) -> None:
        self._socket.close()
        self._context.term()
