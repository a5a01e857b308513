"""A ROUTER of ZeroMQ without libzmq: many peers behind one listening socket.

Theory of operation. What a peer sends waits in the kernel until `receive()` takes it, in the thread
that asks, and never in another one: so whoever knows that a peer's process has ended can have
everything that it said, at once (`receive_all()`). An epoll of its own tells which peers have
something; its descriptor is for the loop to wait on. In a turn each peer is read once, a bounded
portion: one that never stops does not keep the others waiting.

A message goes out with the call that sends it. What the kernel does not take is kept, and leaves in
a later turn; a peer that does not read for long is full, and is told nothing more.

Peers have numbers, which are never given again.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable

from musterd.ipc.errors import ProtocolError
from musterd.ipc.zmtp import CHUNK_BYTES, ROUTER_HANDSHAKE, ROUTER_PEERS, Message, Wire

PEERS_PER_TURN = 32  # the others are next
TURN_BYTES = 16 * 1024  # read of a peer in one turn: some thousand messages at worst ...
FRAME_BYTES = 256 * 1024  # ... or so much of a frame that has begun
QUEUE_MAX = 1000  # kept for a peer that does not read
ACCEPTED_MAX = 64  # in one turn
HANDSHAKE_SECONDS = 30.0  # who has said nothing of ZeroMQ until then is put out
LAST_LOOKS = 64  # at CHUNK_BYTES each: far more than the kernel keeps of one peer

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


class Router:
    """`receive()` when `fileno()` is readable, `tidy_up()` once a second.

    `complain` is told of peers that were put out, and why; of 0 when nobody can be let in.
    """

    def __init__(self, listener: socket.socket, complain: Callable[[int, str], object]) -> None:
        """A socket that listens and does not block; it is closed with the rest."""
        self._listener = listener
        self._complain = complain
        self._listening = listener.fileno()
        self._accepts = True
        self._last_number = 0
        self._wires: dict[int, Wire] = {}
        self._numbers: dict[int, int] = {}  # by descriptors
        self._strangers: dict[int, float] = {}  # in their handshake; until when it may last
        self._epoll = select.epoll()
        self._epoll.register(self._listening, _IN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    # -- from peers ---------------------------------------------------------------------------

    def receive(self) -> list[tuple[int, Message]]:
        """What has arrived, a bounded portion of it, with who sent it."""
        found: list[tuple[int, Message]] = []
        for fd, what in self._epoll.poll(0, PEERS_PER_TURN):
            number = self._numbers.get(fd)
            if number is None:
                if fd == self._listening:
                    self._accept()
                continue
            if what & _OUT:
                self._push(self._wires[number])
            if what != _OUT:
                found += [(number, message) for message in self._read(number)]
        return found

    def receive_all(self, number: int) -> list[Message]:
        """Everything that a peer has sent whose process has ended. The connection is over then."""
        wire = self._wires.get(number)
        if wire is None:
            return []
        found: list[Message] = []
        with contextlib.suppress(OSError, ProtocolError):
            for _ in range(LAST_LOOKS):
                found += wire.receive(CHUNK_BYTES)
                if wire.drained:
                    break
        self._drop(number)
        return found

    def _read(self, number: int) -> list[Message]:
        wire = self._wires[number]
        try:
            messages = wire.receive(max(TURN_BYTES, min(wire.missing, FRAME_BYTES)))
        except OSError:  # it has hung up
            self._drop(number)
            return []
        except ProtocolError as error:
            self._put_out(number, str(error))
            return []
        if wire.ready and self._strangers:
            self._strangers.pop(number, None)
        if wire.unsent:  # the answer to a PING, if nothing else
            self._epoll.modify(wire.fileno(), _IN | _OUT)
        return messages

    def _accept(self) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, no memory: those who come wait
                self._complain(0, f"{error.strerror}")
                self._epoll.unregister(self._listening)
                self._accepts = False
                return
            sock.setblocking(False)
            try:
                wire = Wire(sock, ROUTER_HANDSHAKE, ROUTER_PEERS)
                self._epoll.register(sock, _IN)
            except OSError:
                sock.close()
                continue
            self._last_number = number = self._last_number + 1
            self._wires[number] = wire
            self._numbers[wire.fileno()] = number
            self._strangers[number] = time.monotonic() + HANDSHAKE_SECONDS

    # -- to peers -----------------------------------------------------------------------------

    def send(self, number: int, frame: bytes) -> bool:
        """Whether it is on its way: else the peer is gone, full, or still in its handshake."""
        wire = self._wires.get(number)
        if wire is None or not wire.ready or wire.unsent >= QUEUE_MAX:
            return False
        waits = wire.unsent
        wire.put(frame)
        if waits:  # it goes behind that
            return True
        try:
            if not wire.flush():
                self._epoll.modify(wire.fileno(), _IN | _OUT)
        except OSError:  # most likely it has hung up; what it said before can still be read
            wire.fall_silent()
            return False
        return True

    def _push(self, wire: Wire) -> None:
        try:
            if not wire.flush():
                return
        except OSError:
            wire.fall_silent()
        self._epoll.modify(wire.fileno(), _IN)

    # -- who is there -------------------------------------------------------------------------

    def tidy_up(self) -> None:
        """Puts out who never finishes its handshake; lets others in again, if it can."""
        if self._strangers:
            now, ready = time.monotonic(), {fd for fd, _ in self._epoll.poll(0)}
            for number in [each for each, end in self._strangers.items() if end <= now]:
                if self._wires[number].fileno() not in ready:  # else it was we who were late
                    self._put_out(number, f"no handshake of ZeroMQ within {HANDSHAKE_SECONDS:g} s")
        if not self._accepts:
            with contextlib.suppress(OSError):  # not yet
                self._epoll.register(self._listening, _IN)
                self._accepts = True

    def _put_out(self, number: int, why: str) -> None:
        self._complain(number, why)
        self._drop(number)

    def _drop(self, number: int) -> None:
        wire = self._wires.pop(number)
        self._strangers.pop(number, None)
        del self._numbers[wire.fileno()]
        self._epoll.unregister(wire.fileno())
        wire.close()

    def close(self) -> None:
        for number in list(self._wires):
            self._drop(number)
        self._epoll.close()
        self._listener.close()
