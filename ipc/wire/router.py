"""ZeroMQ ROUTER without libzmq: many peers behind one listening socket.

Theory of operation. Data of a peer wait in the kernel until `turn()` reads them in the calling
thread, never in another one. So an owner that knows that a peer's process has ended can read all of
its messages at once (`receive_all()`). An epoll tells which peers are readable; its descriptor is
for the loop to wait on. A turn reads each peer once, a bounded portion: an endless sender does not
keep the others waiting. Where the owner leaves a turn early, the next turn begins with the peers
that were not read.

send() sends a message at once, post() with the next flush(). What the kernel does not take is kept
and sent in a later turn; the owner looks at `unsent()` and decides how much is too much. A hushed
peer (`hush()`) is not read: its data fill the kernel's buffer, and then the peer waits.

Peers have numbers, which are never reused. The identities that peers announce mean nothing. `held`
counts every byte held for a peer.
"""

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.messages import WIRE_BYTES_MAX
from musterd.ipc.wire.zmtp import (
    CHUNK_BYTES,
    ROUTER_GREETING,
    ROUTER_PEERS,
    ROUTER_READY,
    Message,
    Wire,
)

PEERS_PER_TURN = 32  # the others come first in the next turn
TURN_BYTES = 16 * 1024  # read of a peer in one turn: some thousand messages at worst ...
FRAME_BYTES = 256 * 1024  # ... or this much of a frame that has begun
POSTED_BYTES_MAX = 64 * 1024  # posted messages of more bytes are sent at once
COARSE_MAX = 64  # messages of one portion that count as few
QUEUE_MAX = 1000  # buffers kept for a peer that does not read
ACCEPTED_MAX = 64  # in one turn
HANDSHAKE_SECONDS = 30.0  # a peer without a ZeroMQ handshake by then is disconnected
ROOM_LOOKS = 64  # connections of one process compared when the most silent makes room
LAST_LOOKS = 64  # at CHUNK_BYTES each: far more than the kernel keeps of one peer

Owner = tuple[int, int]  # process and user at the other end; a process that we cannot see is 0

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_IN, _OUT, _HUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP


class _Peer(Wire):
    """ROUTER end of a connection."""

    def __init__(self, sock: socket.socket, message_bytes_max: int) -> None:
        self.counted = 0  # bytes of this peer in the sum over all
        self.owner: Owner = (0, 0)
        self.hushed = False
        self.door = 0  # the listening descriptor that it came through
        self.turn = 0  # number of the turn that last read this peer
        self.coarse = False  # that turn brought few messages
        self.blocked = False  # the kernel takes nothing more for now
        super().__init__(
            sock,
            ROUTER_GREETING,
            ROUTER_PEERS,
            answer=ROUTER_READY,
            message_bytes_max=message_bytes_max,
        )


class Router:
    """Call `turn()` or `receive()` when `fileno()` is readable, `tidy_up()` once a second.

    `complain` is called with a peer and a reason before the peer is put out, and with 0 when nobody
    can be let in; `gone` with every connection that is over; `drained` with each peer that has
    taken what was kept for it. `has_room` tells whether one more connection is allowed; if not, the
    process with most connections loses one: the first without a ZeroMQ handshake, else one that has
    been silent for long.
    """

    def __init__(
        self,
        listener: socket.socket,
        complain: Callable[[int, str], object],
        *,
        gone: Callable[[int], object] | None = None,
        drained: Callable[[int], object] | None = None,
        has_room: Callable[[], bool] | None = None,
        message_bytes_max: int = WIRE_BYTES_MAX,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        """Take over a listening, non-blocking socket; close() closes it too."""
        self.held = 0
        self._doors: dict[int, socket.socket] = {listener.fileno(): listener}
        self._shut: set[int] = set()  # doors through which nobody is let in
        self.listener_fd = listener.fileno()  # for a process that accepts in our place
        self._complain = complain
        self._gone = gone
        self._drained = drained
        self._has_room = has_room
        self._bytes_max = message_bytes_max
        self._queue_max = queue_max
        self._accepts = True
        self._last_number = 0
        self._turns = 0
        self._wires: dict[int, _Peer] = {}
        self._numbers: dict[int, int] = {}  # descriptor -> peer
        self._strangers: dict[int, float] = {}  # peers in their handshake, each with its deadline
        # connections by owner, to find the one that makes room
        self._owned: dict[Owner, dict[int, None]] = {}
        self._posted: dict[int, _Peer] = {}  # peers with messages for the next flush()
        # events of the epoll that no turn has handled
        self._ready: deque[tuple[int, int]] = deque()
        self._epoll = select.epoll()
        self._epoll.register(self.listener_fd, _IN)

    def add_door(self, listener: socket.socket) -> None:
        """Listen on one more socket; close() closes it too."""
        self._doors[listener.fileno()] = listener
        self._epoll.register(listener.fileno(), _IN)

    def open_door(self, fd: int, opened: bool) -> None:
        """Accept connections of a listening socket, or none, and end those that came there."""
        if opened == (fd not in self._shut):
            return
        if opened:
            self._shut.remove(fd)
            if self._accepts:
                self._epoll.register(fd, _IN)
            return
        self._shut.add(fd)
        if self._accepts:
            self._epoll.unregister(fd)
        for number in [each for each, wire in self._wires.items() if wire.door == fd]:
            self.end(number)

    def door_of(self, number: int) -> int:
        """Return the listening descriptor that a peer came through; 0 for one that is gone."""
        wire = self._wires.get(number)
        return wire.door if wire is not None else 0

    def fileno(self) -> int:
        return self._epoll.fileno()

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._wires)

    # -- from peers ---------------------------------------------------------------------------

    def receive(self) -> list[tuple[int, Message]]:
        """Return a bounded portion of what has arrived, with its senders."""
        return [(number, message) for number, found in self.turn() for message in found]

    def turn(
        self, turn_bytes: int = TURN_BYTES, frame_bytes: int = FRAME_BYTES
    ) -> Iterator[tuple[int, list[Message]]]:
        """Read peer by peer, each in its turn: at most `turn_bytes`, less for tiny messages, or
        `frame_bytes` of a frame that has begun. Yields peers without messages too: more may be held
        for them.
        """
        self._turns += 1
        if not self._ready:
            self._ready.extend(self._epoll.poll(0, PEERS_PER_TURN))
        while self._ready:
            fd, what = self._ready.popleft()
            number = self._numbers.get(fd)
            if number is None:
                if fd in self._doors and fd not in self._shut:
                    self._accept(fd)
                continue
            wire = self._wires[number]
            if what & _OUT:
                self._push(number, wire)
            if wire.hushed:
                if what & _HUP:  # cannot be read, and epoll would report it forever
                    self._drop(number)
            elif what != _OUT:
                yield number, self._read(number, wire, turn_bytes, frame_bytes)

    def receive_all(self, number: int) -> list[Message]:
        """Return all messages of a peer whose process has ended, and end the connection."""
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

    def _read(self, number: int, wire: _Peer, turn_bytes: int, frame_bytes: int) -> list[Message]:
        wire.turn = self._turns
        try:
            size = turn_bytes if wire.coarse else TURN_BYTES
            messages = wire.receive(max(size, min(wire.missing, frame_bytes)))
        except OSError:  # the peer has hung up
            self._drop(number)
            return []
        except ProtocolError as error:
            self.put_out(number, str(error))
            return []
        wire.coarse = len(messages) <= COARSE_MAX
        if wire.ready and self._strangers:
            self._strangers.pop(number, None)
        self._count(wire)
        if wire.unsent and number not in self._posted:  # the answer to a PING, if nothing else
            self._block(wire)
        return messages

    def _accept(self, door: int) -> None:
        listener = self._doors[door]
        for _ in range(ACCEPTED_MAX):
            if self._has_room is not None and not self._has_room() and not self._make_room():
                self._stop_accepting()
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory: newcomers wait
                self._complain(0, f"{error.strerror}")
                self._stop_accepting()
                return
            sock.setblocking(False)
            try:
                wire = _Peer(sock, self._bytes_max)
                self._epoll.register(sock, _IN)
            except OSError:
                sock.close()
                continue
            self._last_number = number = self._last_number + 1
            self._wires[number] = wire
            self._numbers[wire.fileno()] = number
            self._strangers[number] = time.monotonic() + HANDSHAKE_SECONDS
            wire.door, wire.turn = door, self._turns
            self._count(wire)
            if self._has_room is not None:
                wire.owner = _owner_of(sock)
                self._owned.setdefault(wire.owner, {})[number] = None

    def _stop_accepting(self) -> None:
        if not self._accepts:
            return
        for door in self._doors.keys() - self._shut:
            self._epoll.unregister(door)
        self._accepts = False

    def _make_room(self) -> bool:
        """Disconnect one connection of the process with most of them, so that a process that opens
        connections without end keeps no other process out. The process may be innocent, so this is
        not reported.
        """
        if not self._owned:
            return False
        owned = max(self._owned.values(), key=len)
        of_equals = (
            number
            for number in self._strangers
            if len(self._owned[self._wires[number].owner]) == len(owned)
        )
        number = next(of_equals, 0)
        if number:
            self._wires[number].refuse("there is no room for more connections")
        else:
            some = islice(owned, ROOM_LOOKS)
            number = min(some, key=lambda number: self._wires[number].turn)
        self._drop(number)
        return True

    # -- to peers -----------------------------------------------------------------------------

    def send(self, number: int, frame: bytes) -> bool:
        """Send a frame; return False if the peer is gone, full, or still in its handshake."""
        wire = self._wires.get(number)
        if wire is None or not wire.ready or wire.unsent >= self._queue_max:
            return False
        waits = wire.unsent
        wire.put(frame)
        if waits:  # the frame queues behind the waiting ones
            self._count(wire)
            return True
        try:
            if not wire.flush():
                self._block(wire)
                self._count(wire)
        except OSError:  # most likely it has hung up; its earlier messages can still be read
            wire.fall_silent()
            return False
        return True

    def post(self, number: int, frame: bytes) -> None:
        """Send a frame with the next flush(), in one system call with others; sooner if they are
        many. A frame for a peer that is gone is dropped."""
        wire = self._wires.get(number)
        if wire is None or not wire.ready:
            return
        waits = wire.unsent
        wire.put(frame)
        if not waits:
            self._posted[number] = wire
        if wire.unsent_bytes > POSTED_BYTES_MAX and number in self._posted:
            self._leave(number)
        else:
            self._count(wire)

    def flush(self) -> None:
        """Send the posted frames."""
        while self._posted:
            self._leave(next(iter(self._posted)))

    def _leave(self, number: int) -> None:
        wire = self._posted.pop(number, None)
        if wire is not None and self._wires.get(number) is wire:
            self._push(number, wire)

    def _push(self, number: int, wire: _Peer) -> None:
        try:
            done = wire.flush()
        except OSError:
            wire.fall_silent()
            done = True
        self._count(wire)
        if done == wire.blocked:
            wire.blocked = not done
            self._watch(wire)
        if done and self._drained is not None:
            self._drained(number)

    def unsent(self, number: int) -> int:
        """Return the bytes kept for a peer until it reads; 0 for one that is gone."""
        wire = self._wires.get(number)
        return wire.unsent_bytes if wire is not None else 0

    # -- who is there -------------------------------------------------------------------------

    def __contains__(self, number: int) -> bool:
        return number in self._wires

    def hush(self, number: int, hushed: bool = True) -> None:
        """Stop reading a peer for now, or read it again."""
        wire = self._wires.get(number)
        if wire is not None and wire.hushed != hushed:
            wire.hushed = hushed
            self._watch(wire)

    def half_read(self, number: int) -> int:
        """Return the bytes of a peer's message whose rest has not arrived."""
        wire = self._wires.get(number)
        return wire.half_read if wire is not None else 0

    def moved(self, number: int) -> int:
        """Return a number that grows with each byte that a peer sends or takes."""
        wire = self._wires.get(number)
        return wire.sent_bytes + wire.received_bytes if wire is not None else 0

    def tidy_up(self) -> None:
        """Disconnect peers that never finish their handshake; accept new ones again if possible."""
        if self._strangers:
            now, ready = time.monotonic(), {fd for fd, _ in self._epoll.poll(0)}
            for number in [each for each, end in self._strangers.items() if end <= now]:
                if self._wires[number].fileno() not in ready:  # else we are late, not the peer
                    self.put_out(number, f"no ZeroMQ handshake within {HANDSHAKE_SECONDS:g} s")
        if not self._accepts:
            with contextlib.suppress(OSError):  # still no room
                for door in self._doors.keys() - self._shut:
                    with contextlib.suppress(FileExistsError):
                        self._epoll.register(door, _IN)
                self._accepts = True

    def put_out(self, number: int, why: str) -> None:
        """End a connection; tell the peer why if it is still in its handshake."""
        wire = self._wires.get(number)
        if wire is None:
            return
        self._leave(number)
        self._complain(number, why)
        if not wire.ready:
            wire.refuse(why)
        self._drop(number)

    def end(self, number: int) -> None:
        """End a connection without a word; what the peer has sent there is not read any more."""
        self._leave(number)
        self._drop(number)

    def _block(self, wire: _Peer) -> None:
        """Wait until the kernel takes more."""
        if not wire.blocked:
            wire.blocked = True
            self._watch(wire)

    def _watch(self, wire: _Peer) -> None:
        events = (0 if wire.hushed else _IN) | (_OUT if wire.blocked else 0)
        self._epoll.modify(wire.fileno(), events)

    def _count(self, wire: _Peer) -> None:
        held = wire.held
        self.held += held - wire.counted
        wire.counted = held

    def _drop(self, number: int) -> None:
        wire = self._wires.pop(number, None)
        if wire is None:  # disconnected while `complain` was called
            return
        self._strangers.pop(number, None)
        self._posted.pop(number, None)
        if (owned := self._owned.get(wire.owner)) is not None:
            owned.pop(number, None)
            if not owned:
                del self._owned[wire.owner]
        self.held -= wire.counted
        del self._numbers[wire.fileno()]
        self._epoll.unregister(wire.fileno())
        wire.close()
        if self._gone is not None:
            self._gone(number)

    def close(self) -> None:
        self._gone = None
        for number in list(self._wires):
            self._drop(number)
        self._epoll.close()
        for listener in self._doors.values():
            listener.close()


def _owner_of(sock: socket.socket) -> Owner:
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:  # not a Unix socket
        return 0, 0
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid
