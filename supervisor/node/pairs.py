"""Connections to local.sock: one for each client that asks about tasks of this machine.

To the supervisor each is a client like any other, with the limits of one. It names the session of
its client, so that what an earlier connection of that client has sent and nobody has read is not
read any more.

What a client does not take is not read for it: then the supervisor keeps the results, or owes them.
The bytes that a connection holds here are charged to its client. A message over SHARE_BYTES_MAX is
read when the limit of all clients has room for it.
"""

import select
from collections.abc import Callable
from itertools import islice

from musterd import __version__
from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.codec import decode_server, encode
from musterd.ipc.wire.messages import PROTOCOL, ClientMessage, Hello
from musterd.ipc.wire.router import FRAME_BYTES
from musterd.ipc.wire.schedule_messages import ScheduleMessage
from musterd.ipc.wire.zmtp import CHUNK_BYTES, Connection
from musterd.supervisor.cluster.sidecar_events import LocalLost, LocalSaid
from musterd.supervisor.core.tasks import client_limits
from musterd.supervisor.core.tasks.client_limits import SHARE_BYTES_MAX
from musterd.supervisor.node.relay_port import RelayPort
from musterd.supervisor.sockets.peers import Peer
from musterd.supervisor.system import descriptors

PAIRS_PER_TURN = 64  # the others have their turn next
LOOKS_PER_TURN = 256  # at connections that are not read

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


class _Pair:
    """A client and its connection to the supervisor."""

    __slots__ = ("admitted", "charged", "events", "hushed", "peer", "wire")

    def __init__(self, peer: Peer, wire: Connection) -> None:
        self.peer = peer
        self.wire = wire
        self.charged = 0  # bytes charged to the client
        self.admitted = False  # there is room for the large message that has begun
        self.hushed = False
        self.events = 0  # that its descriptor is watched for


class Pairs:
    def __init__(
        self, path: str, clients: RelayPort, heard: Callable[[LocalSaid | LocalLost], None]
    ) -> None:
        self._path = path
        self._clients = clients
        self._heard = heard
        self._epoll = select.epoll()
        self._pairs: dict[bytes, _Pair] = {}
        self._numbers: dict[int, _Pair] = {}  # by descriptor
        self._unsent: dict[_Pair, None] = {}  # to be flushed in this turn
        self._hushed: dict[_Pair, None] = {}
        self._lost: list[LocalLost] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def awaited_bytes(self) -> int:
        """Size of a message for a client that reads, for which others hold too much; or 0."""
        for pair in islice(self._hushed, LOOKS_PER_TURN):
            if pair.wire.missing > SHARE_BYTES_MAX and self._clients.is_reading(pair.peer):
                return pair.wire.missing
        return 0

    # -- to the supervisor --------------------------------------------------------------------

    def ask(self, name: bytes, message: ClientMessage | ScheduleMessage) -> None:
        """Send a message for a client, with the next settle()."""
        peer = self._clients.peer_of(name)
        if peer is None:
            return
        pair = self._pairs.get(name)
        if pair is None:
            pair = self._open(name, peer)
            if pair is None:
                return
        pair.wire.put(encode(message))
        self._unsent[pair] = None

    def _open(self, name: bytes, peer: Peer) -> _Pair | None:
        try:
            if not descriptors.enough():
                raise OSError("no descriptors are left for it")
            wire = Connection(self._path)
        except OSError as error:
            self._lost.append(LocalLost(name, f"no connection to {self._path}: {error}"))
            return None
        pair = self._pairs[name] = self._numbers[wire.fileno()] = _Pair(peer, wire)
        self._epoll.register(wire.fileno(), 0)
        wire.put(encode(Hello(PROTOCOL, f"cluster {__version__}", peer.session)))
        self._watch(pair)
        return pair

    def end(self, name: bytes) -> None:
        """End the connection of a client that is gone."""
        pair = self._pairs.pop(name, None)
        if pair is None:
            return
        self._unsent.pop(pair, None)
        self._hushed.pop(pair, None)
        del self._numbers[pair.wire.fileno()]
        self._epoll.unregister(pair.wire.fileno())
        pair.wire.close()
        self._clients.charge(pair.peer, -pair.charged)

    def _lose(self, pair: _Pair, error: Exception) -> None:
        self.end(pair.peer.name)
        self._lost.append(LocalLost(pair.peer.name, f"the supervisor's connection ended: {error}"))

    # -- from the supervisor ------------------------------------------------------------------

    def receive(self) -> None:
        """Hand on what the supervisor has said, of each client a bounded portion."""
        for fd, what in self._epoll.poll(0, PAIRS_PER_TURN):
            pair = self._numbers.get(fd)
            if pair is None:
                continue
            if what & _OUT:
                self._unsent[pair] = None
            if what & ~_OUT:
                self._read(pair)
        self.tell_lost()

    def _read(self, pair: _Pair) -> None:
        wire, name = pair.wire, pair.peer.name
        try:
            found = wire.receive(max(CHUNK_BYTES, min(wire.missing, FRAME_BYTES)))
            for frame in found:
                if frame is None:
                    raise ProtocolError("a message of several frames instead of one")
                self._heard(LocalSaid(name, decode_server(frame), frame))
        except (OSError, ProtocolError) as error:
            if self._pairs.get(name) is pair:
                self._lose(pair, error)
            return
        if self._pairs.get(name) is pair:  # else its client is gone
            self._weigh(pair)

    def tell_lost(self) -> None:
        lost, self._lost = self._lost, []
        for each in lost:
            self._heard(each)

    # -- what is held -------------------------------------------------------------------------

    def settle(self) -> None:
        """Send what waits; read connections again whose clients take more. After each turn."""
        while self._unsent:
            pair, _ = self._unsent.popitem()
            try:
                pair.wire.flush()
            except OSError as error:
                self._lose(pair, error)
            else:
                self._weigh(pair)
        for pair in list(islice(self._hushed, LOOKS_PER_TURN)):
            del self._hushed[pair]  # to the end, if it stays there
            self._weigh(pair)
        self.tell_lost()

    def _weigh(self, pair: _Pair) -> None:
        """Charge what a connection holds, and read it or not."""
        missing, clients = pair.wire.missing, self._clients
        large = missing > SHARE_BYTES_MAX
        if large and not pair.admitted:
            pair.admitted = client_limits.fits(missing, clients.held)
        elif not missing:
            pair.admitted = False
        held = pair.wire.held + (missing if pair.admitted else 0)
        clients.charge(pair.peer, held - pair.charged)
        pair.charged = held
        pair.hushed = not pair.admitted and (large or not clients.takes_more(pair.peer))
        if pair.hushed:
            self._hushed[pair] = None
        else:
            self._hushed.pop(pair, None)
        self._watch(pair)

    def _watch(self, pair: _Pair) -> None:
        wanted = (0 if pair.hushed else _IN) | (_OUT if pair.wire.unsent else 0)
        if wanted != pair.events:
            pair.events = wanted
            self._epoll.modify(pair.wire.fileno(), wanted)

    def close(self) -> None:
        for name in list(self._pairs):
            self.end(name)
        self._epoll.close()
