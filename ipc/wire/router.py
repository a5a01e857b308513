"""A ROUTER of ZeroMQ without libzmq: many peers behind one listening socket.

Theory of operation. What a peer sends waits in the kernel until `turn()` takes it, in the thread
that asks, and never in another one: so whoever knows that a peer's process has ended can have
everything that it said, at once (`receive_all()`). An epoll of its own tells which peers have
something; its descriptor is for the loop to wait on. In a turn each peer is read once, a bounded
portion: one that never stops does not keep the others waiting. Where the owner leaves a turn
early, the next one begins with the peers that were not read.

A message goes out with the call that sends it, or with flush() if it was posted. What the kernel
does not take is kept, and leaves in a later turn; the owner looks at `unsent()` and decides how
much is too much. A peer that is not to say more for now is not read (`hush()`): what it sends fills
the kernel's buffer, and then it waits.

Peers have numbers, which are never given again. The identities that peers announce mean nothing.
Every byte that is held for a peer is in `held`, the sum of `held_by()` over all peers.
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

PEERS_PER_TURN = 32  # the others are next
TURN_BYTES = 16 * 1024  # read of a peer in one turn: some thousand messages at worst ...
FRAME_BYTES = 256 * 1024  # ... or so much of a frame that has begun
POSTED_BYTES_MAX = 64 * 1024  # then it leaves at once
COARSE_MAX = 64  # messages of a portion that are few
QUEUE_MAX = 1000  # buffers kept for a peer that does not read
ACCEPTED_MAX = 64  # in one turn
HANDSHAKE_SECONDS = 30.0  # who has said nothing of ZeroMQ until then is put out
ROOM_LOOKS = 64  # connections of a process, of which the most silent makes room
LAST_LOOKS = 64  # at CHUNK_BYTES each: far more than the kernel keeps of one peer

Owner = tuple[int, int]  # process and user at the other end; a process that we cannot see is 0

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_IN, _OUT, _HUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP


class _Peer(Wire):
    """The end of a ROUTER."""

    def __init__(self, sock: socket.socket, message_bytes_max: int) -> None:
        self.counted = 0  # of what it holds, in the sum over all
        self.owner: Owner = (0, 0)
        self.hushed = False
        self.turn = 0  # when it was last read
        self.coarse = False  # and brought few messages then
        self.blocked = False  # the kernel takes nothing more for now
        super().__init__(
            sock,
            ROUTER_GREETING,
            ROUTER_PEERS,
            answer=ROUTER_READY,
            message_bytes_max=message_bytes_max,
        )


class Router:
    """`turn()` or `receive()` when `fileno()` is readable, `tidy_up()` once a second.

    `complain` is told of peers that are put out, before they are, and why; of 0 when nobody can be
    let in. `gone` is told of every connection that is over, `drained` of each that has taken what
    was kept for it. `has_room` tells whether there may be one connection more; where there may not,
    the process that has most of them loses one: the first that says nothing of ZeroMQ, else one
    that has been silent for long.
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
        """A socket that listens and does not block; it is closed with the rest."""
        self.held = 0
        self.crowded = False  # somebody had to make room, or waits to be let in
        self._listener = listener
        self._complain = complain
        self._gone = gone
        self._drained = drained
        self._has_room = has_room
        self._bytes_max = message_bytes_max
        self._queue_max = queue_max
        self._listening = listener.fileno()
        self._accepts = True
        self._last_number = 0
        self._turns = 0
        self._wires: dict[int, _Peer] = {}
        self._numbers: dict[int, int] = {}  # by descriptors
        self._strangers: dict[int, float] = {}  # in their handshake; until when it may last
        self._owned: dict[Owner, dict[int, None]] = {}  # where somebody may have to make room
        self._posted: dict[int, _Peer] = {}  # have something to leave with the next flush()
        self._ready: deque[tuple[int, int]] = deque()  # what the epoll told and was not looked at
        self._epoll = select.epoll()
        self._epoll.register(self._listening, _IN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._wires)

    # -- from peers ---------------------------------------------------------------------------

    def receive(self) -> list[tuple[int, Message]]:
        """What has arrived, a bounded portion of it, with who sent it."""
        return [(number, message) for number, found in self.turn() for message in found]

    def turn(
        self, turn_bytes: int = TURN_BYTES, frame_bytes: int = FRAME_BYTES
    ) -> Iterator[tuple[int, list[Message]]]:
        """The same peer by peer, each read when it is its turn: so much of it, less where it sends
        tiny messages, or so much of a frame that has begun. Peers are told without messages, too:
        of some more is held then."""
        self._turns += 1
        if not self._ready:
            self._ready.extend(self._epoll.poll(0, PEERS_PER_TURN))
        while self._ready:
            fd, what = self._ready.popleft()
            number = self._numbers.get(fd)
            if number is None:
                if fd == self._listening:
                    self._accept()
                continue
            wire = self._wires[number]
            if what & _OUT:
                self._push(number, wire)
            if wire.hushed:
                if what & _HUP:  # it cannot be read, and this would be told for ever
                    self._drop(number)
            elif what != _OUT:
                yield number, self._read(number, wire, turn_bytes, frame_bytes)

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

    def _read(self, number: int, wire: _Peer, turn_bytes: int, frame_bytes: int) -> list[Message]:
        wire.turn = self._turns
        try:
            size = turn_bytes if wire.coarse else TURN_BYTES
            messages = wire.receive(max(size, min(wire.missing, frame_bytes)))
        except OSError:  # it has hung up
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

    def _accept(self) -> None:
        for _ in range(ACCEPTED_MAX):
            if self._has_room is not None and not self._has_room():
                self.crowded = True
                if not self._make_room():
                    self._stop_accepting()
                    return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, no memory: those who come wait
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
            wire.turn = self._turns
            self._count(wire)
            if self._has_room is not None:
                wire.owner = _owner_of(sock)
                self._owned.setdefault(wire.owner, {})[number] = None

    def _stop_accepting(self) -> None:
        self.crowded = True
        self._epoll.unregister(self._listening)
        self._accepts = False

    def _make_room(self) -> bool:
        """Put one out, of the process that has most connections: whoever opens them without end
        keeps nobody else out. It may be no fault of the process, so nobody complains."""
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
            self._wires[number].refuse("others come, and there is no room")
        else:
            some = islice(owned, ROOM_LOOKS)
            number = min(some, key=lambda number: self._wires[number].turn)
        self._drop(number)
        return True

    # -- to peers -----------------------------------------------------------------------------

    def send(self, number: int, frame: bytes) -> bool:
        """Whether it is on its way: else the peer is gone, full, or still in its handshake."""
        wire = self._wires.get(number)
        if wire is None or not wire.ready or wire.unsent >= self._queue_max:
            return False
        waits = wire.unsent
        wire.put(frame)
        if waits:  # it goes behind that
            self._count(wire)
            return True
        try:
            if not wire.flush():
                self._block(wire)
                self._count(wire)
        except OSError:  # most likely it has hung up; what it said before can still be read
            wire.fall_silent()
            return False
        return True

    def post(self, number: int, frame: bytes) -> None:
        """Send a frame with the next flush(), in one system call with others; sooner if they are
        many. To one that is gone nothing is sent."""
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
        """Send what was posted."""
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
        """Bytes kept for a peer until it reads; 0 for one that is gone."""
        wire = self._wires.get(number)
        return wire.unsent_bytes if wire is not None else 0

    # -- who is there -------------------------------------------------------------------------

    def __contains__(self, number: int) -> bool:
        return number in self._wires

    def hush(self, number: int, hushed: bool = True) -> None:
        """Do not read a peer for now; or do again."""
        wire = self._wires.get(number)
        if wire is not None and wire.hushed != hushed:
            wire.hushed = hushed
            self._watch(wire)

    def held_by(self, number: int) -> int:
        wire = self._wires.get(number)
        return wire.held if wire is not None else 0

    def half_read(self, number: int) -> int:
        """Bytes of a message of a peer whose rest has not arrived."""
        wire = self._wires.get(number)
        return wire.half_read if wire is not None else 0

    def moved(self, number: int) -> int:
        """A number that grows with each byte that a peer sends or takes."""
        wire = self._wires.get(number)
        return wire.sent_bytes + wire.received_bytes if wire is not None else 0

    def tidy_up(self) -> None:
        """Puts out who never finishes its handshake; lets others in again, if it can."""
        if self._strangers:
            now, ready = time.monotonic(), {fd for fd, _ in self._epoll.poll(0)}
            for number in [each for each, end in self._strangers.items() if end <= now]:
                if self._wires[number].fileno() not in ready:  # else it was we who were late
                    self.put_out(number, f"no handshake of ZeroMQ within {HANDSHAKE_SECONDS:g} s")
        if not self._accepts:
            with contextlib.suppress(OSError):  # not yet
                self._epoll.register(self._listening, _IN)
                self._accepts = True
        self.crowded = not self._accepts or (self._has_room is not None and not self._has_room())

    def put_out(self, number: int, why: str) -> None:
        """End a connection, and tell the peer why if it is still in its handshake."""
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
        if wire is None:  # put out while it was complained of
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
        self._listener.close()


def _owner_of(sock: socket.socket) -> Owner:
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:  # not a Unix socket
        return 0, 0
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid
