"""tasks.sock: clients' messages become events, actions become messages to clients.

Each connection gets an epoch of its own in its Welcome. A client that sees another epoch than
before (the daemon restarted, the connection was lost, or answers had to be dropped because it did
not read them) sends again what was not acknowledged and watches again what it waits for. So no
message needs to be kept for a peer that cannot take it.
"""

import socket
from collections import OrderedDict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from musterd import __version__
from musterd.ipc.codec import decode_client, encode
from musterd.ipc.errors import ProtocolError
from musterd.ipc.messages import (
    PROTOCOL,
    Advice,
    Advise,
    Cancel,
    Change,
    Changes,
    Follow,
    Hello,
    Inspect,
    Inspected,
    Invalidate,
    Outcome,
    ProgressNote,
    Refused,
    Rejection,
    Results,
    Submit,
    TaskView,
    Watch,
    Welcome,
)
from musterd.ipc.messages import Accepted as AcceptedMessage
from musterd.ipc.messages import Missing as MissingMessage
from musterd.ipc.sockets import make_router, receive, send
from musterd.supervisor import journal
from musterd.supervisor.core import events
from musterd.supervisor.door import Door

RECEIVE_MAX = 200  # messages taken per turn of the loop: others get their turn as well
PEERS_MAX = 4096  # connections remembered; the one silent for longest is forgotten
OUTBOX_MAX = 1000  # messages kept for a peer that does not read, beyond ZeroMQ's own queue ...
OUTBOX_BYTES_MAX = 32 * 1024 * 1024  # ... and bytes of them
SOCKET_MESSAGES_MAX = 100  # ZeroMQ's own queue per peer: it counts messages, and some are large
RESULTS_BYTES_MAX = 1024 * 1024  # outcomes are cut into messages of about this size


class Peer:
    __slots__ = ("bytes", "complained", "epoch", "outbox")

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.outbox: deque[bytes] = deque()
        self.bytes = 0  # in the outbox
        self.complained = False


class Inspection:
    """A question about one task, to be answered with its view."""

    __slots__ = ("id", "peer", "request")

    def __init__(self, peer: bytes, request: int, id_: str) -> None:
        self.peer = peer
        self.request = request
        self.id = id_


class AdviceWanted:
    """A question how many workers the pools should have."""

    __slots__ = ("peer", "request")

    def __init__(self, peer: bytes, request: int) -> None:
        self.peer = peer
        self.request = request


class ClientPort:
    def __init__(
        self,
        context: zmq.Context[Any],
        path: Path,
        epoch: str,
        group_id: int | None,
        handed: socket.socket | None = None,
    ) -> None:
        """`handed` listens on `path` already."""
        self.socket = make_router(context, SOCKET_MESSAGES_MAX)
        self.door = Door(self.socket, path, 0o660, group_id, handed)
        self.malformed = 0
        self._epoch = epoch
        self._connections = 0
        self._peers: OrderedDict[bytes, Peer] = OrderedDict()
        self._full: set[bytes] = set()
        self._followers: set[bytes] = set()

    # -- from clients -------------------------------------------------------------------------

    def receive(self, wall_ns: int) -> list[object]:
        """What came in: core events, and Inspections for the daemon to answer."""
        found: list[object] = []
        for identity, frame in receive(self.socket, RECEIVE_MAX):
            try:
                if frame is None:
                    raise ProtocolError("a message of several frames instead of one")
                message = decode_client(frame)
            except ProtocolError as error:
                self._complain(identity, str(error))
                continue
            event = self._understand(identity, message, wall_ns)
            if event is not None:
                found.append(event)
        return found

    def _understand(self, identity: bytes, message: object, wall_ns: int) -> object | None:
        if type(message) is Hello:
            self._greet(identity, message)
            return None
        peer = self._peers.get(identity)
        if peer is None:
            # A connection made anew under the client's feet: it must say again what it wants.
            self._welcome(identity)
            return None
        self._peers.move_to_end(identity)
        event = self._event_of(identity, message, wall_ns)
        if event is None:  # of a newer client, perhaps
            self._complain(identity, f"a {type(message).__name__}, which means nothing here")
        return event

    def _event_of(self, identity: bytes, message: object, wall_ns: int) -> object | None:
        event: object | None = None
        if type(message) is Submit:
            event = events.TasksSubmitted(
                identity, message.request, message.tasks, wall_ns, message.resend
            )
        elif type(message) is Watch:
            event = events.TasksWatched(identity, message.ids)
        elif type(message) is Cancel:
            event = events.CancelRequested(message.ids)
        elif type(message) is Inspect:
            event = Inspection(identity, message.request, message.id)
        elif type(message) is Advise:
            event = AdviceWanted(identity, message.request)
        elif type(message) is Invalidate:
            event = events.InvalidateRequested(message.key, message.prefix)
        elif type(message) is Follow:
            self._followers.add(identity)
            event = events.ChangesFollowed(identity)
        return event

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self._complain(identity, f"protocol {hello.protocol} instead of {PROTOCOL}")
            self._send(
                identity,
                encode(
                    Refused(
                        PROTOCOL,
                        f"this daemon (musterd {__version__}) speaks protocol {PROTOCOL}, the "
                        f"client {hello.protocol}: install the same musterd on both sides",
                    )
                ),
            )
            return
        self._welcome(identity)

    def _welcome(self, identity: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            self._connections += 1
            peer = self._peers[identity] = Peer(f"{self._epoch}.{self._connections}")
            if len(self._peers) > PEERS_MAX:
                self._forget(next(iter(self._peers)))
        self._peers.move_to_end(identity)
        self._send(identity, encode(Welcome(PROTOCOL, peer.epoch, __version__)))

    def _complain(self, identity: bytes, what: str) -> None:
        """Count every bad message, log the first of each peer."""
        self.malformed += 1
        peer = self._peers.get(identity)
        if peer is None:
            self._connections += 1
            peer = self._peers[identity] = Peer(f"{self._epoch}.{self._connections}")
        if not peer.complained:
            peer.complained = True
            journal.note("client.malformed", "warning", reason=what, peer=identity.hex())

    # -- to clients ---------------------------------------------------------------------------

    def acknowledge(self, peer: bytes, request: int, rejected: list[Rejection]) -> None:
        self._send(peer, encode(AcceptedMessage(request, rejected)))

    def deliver(self, peer: bytes, outcomes: list[Outcome]) -> None:
        size = 0
        start = 0
        for index, outcome in enumerate(outcomes):
            size += len(outcome.value)
            if size > RESULTS_BYTES_MAX:
                self._send(peer, encode(Results(outcomes[start : index + 1])))
                start, size = index + 1, 0
        if start < len(outcomes):
            self._send(peer, encode(Results(outcomes[start:] if start else outcomes)))

    def missing(self, peer: bytes, ids: list[str]) -> None:
        self._send(peer, encode(MissingMessage(ids)))

    def progress(self, peers: list[bytes], note: ProgressNote) -> None:
        """Tell those who keep up; the next word will do for the others."""
        frame = encode(note)
        for peer in peers:
            if peer not in self._full:
                with suppress(zmq.ZMQError):  # full or gone: its next message finds out
                    send(self.socket, peer, frame)

    def newest_changes(self, peer: bytes, changes: list[Change]) -> None:
        """The answer to a Follow."""
        self._send(peer, encode(Changes(changes, newest=True)))

    def changed(self, change: Change) -> None:
        """Tell everybody who follows."""
        frame = encode(Changes([change]))
        for peer in list(self._followers):
            self._send(peer, frame)

    def inspected(self, inspection: Inspection, view: TaskView | None) -> None:
        self._send(inspection.peer, encode(Inspected(inspection.request, view)))

    def advise(self, wanted: AdviceWanted, workers: dict[str, int]) -> None:
        self._send(wanted.peer, encode(Advice(wanted.request, workers)))

    def _send(self, identity: bytes, frame: bytes) -> None:
        if identity in self._full:
            self._keep(identity, frame)
            return
        try:
            send(self.socket, identity, frame)
        except zmq.Again:
            self._keep(identity, frame)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(identity)

    def _keep(self, identity: bytes, frame: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            return
        self._full.add(identity)
        if len(peer.outbox) >= OUTBOX_MAX or peer.bytes > OUTBOX_BYTES_MAX:
            # It reads too slowly. What is dropped it asks for again when it sees the new epoch.
            peer.outbox.clear()
            peer.bytes = 0
            self._connections += 1
            peer.epoch = f"{self._epoch}.{self._connections}"
            frame = encode(Welcome(PROTOCOL, peer.epoch, __version__))
            journal.note("client.slow", "warning", peer=identity.hex())
        peer.outbox.append(frame)
        peer.bytes += len(frame)

    @property
    def has_full(self) -> bool:
        """Whether something waits for a client that could not take it."""
        return bool(self._full)

    def flush(self) -> bool:
        """Try again what could not be sent; whether some of it still waits."""
        for identity in list(self._full):
            self._full.discard(identity)
            peer = self._peers.get(identity)
            while peer is not None and peer.outbox and identity not in self._full:
                frame = peer.outbox.popleft()
                peer.bytes -= len(frame)
                before = len(peer.outbox)
                self._send(identity, frame)
                if len(peer.outbox) > before:  # it went to the end: put it back to the front
                    peer.outbox.rotate(1)
        return bool(self._full)

    def _forget(self, identity: bytes) -> None:
        self._peers.pop(identity, None)
        self._full.discard(identity)
        self._followers.discard(identity)

    def close(self) -> None:
        self.door.close()
        self.socket.close()
