"""tasks.sock: clients' messages become events, actions become messages to clients.

Each connection gets an epoch of its own in its Welcome. A client that sees another epoch than
before (the daemon restarted, or the connection was lost) sends again what was not acknowledged and
watches again what it waits for. So no message is kept for a connection that was dropped. A copy
that is still unread on the client's earlier connection would be taken for new if its task had ended
meanwhile: so the Hello of a client ends the connection that it had before.

This module counts what each connection makes the daemon hold; core/tasks/client_limits.py decides
which connections are read and which are dropped. A request is charged from the moment it is read
until its answer is sent. Results are sent while the peer reads them. Results that the peer does not
take are owed to it, by their ids, and looked up when it reads again (lookups.py).
"""

import socket
import time
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

from msgspec import structs

from musterd import __version__
from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.codec import decode_client, encode
from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import (
    CLIENT_BYTES_MAX,
    PROTOCOL,
    Advice,
    Advise,
    Cancel,
    Change,
    Changes,
    Fault,
    Follow,
    Hello,
    History,
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
from musterd.ipc.wire.messages import Accepted as AcceptedMessage
from musterd.ipc.wire.messages import Missing as MissingMessage
from musterd.ipc.wire.resolving import Resolve, Resolved
from musterd.ipc.wire.router import TURN_BYTES, Router
from musterd.ipc.wire.schedule_messages import (
    UNKNOWN_SCHEDULE,
    ScheduleAnswer,
    ScheduleMessage,
    Schedules,
    ScheduleView,
    ShowSchedules,
)
from musterd.ipc.wire.zmtp import BUFFER_BYTES, Message
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.watching import HISTORY_BYTES_MAX
from musterd.supervisor.core.tasks import client_limits
from musterd.supervisor.core.tasks.client_limits import (
    ALL_BYTES_MAX,
    FAULTS_MAX,
    ID_BYTES,
    OUTBOX_BYTES_LAST,
    OWED_MAX,
    REQUEST_BYTES,
    TASK_BYTES,
    Holding,
)
from musterd.supervisor.log import log
from musterd.supervisor.sockets import schedule_requests
from musterd.supervisor.sockets.listen import adopt, listen
from musterd.supervisor.sockets.owed import Inspection
from musterd.supervisor.sockets.peers import (
    AdviceWanted,
    HistoryWanted,
    Peer,
    Request,
    ResolutionWanted,
    SchedulesWanted,
)
from musterd.supervisor.system import descriptors

BACKLOG = 4096  # connections not accepted yet: more than one process may open by default
PORTION_BYTES = 64 * 1024  # read of a client in one turn; many submits, and cheap to allocate
TURN_NS = 10_000_000  # spent on messages in one turn of the loop: workers must be heard too
RESULTS_BYTES_MAX = 1024 * 1024  # outcomes are cut into messages of about this size
PROGRESS_BYTES_MAX = 64 * 1024  # with more than this unsent, a peer is told the next progress
FAULT_CHARS_MAX = 500  # of the answer to a malformed message
MODE = 0o660
PRIVATE_MODE = 0o600


class ClientPort:
    def __init__(
        self,
        path: Path,
        epoch: str,
        group_id: int | None,
        handed: socket.socket | None = None,
    ) -> None:
        """`handed` is a socket that listens on `path` already."""
        if handed is not None:
            listener = adopt(handed, str(path), group_id, MODE)
        else:
            listener = listen(str(path), group_id, MODE, BACKLOG)
        self.router = Router(
            listener,
            self._put_out,
            gone=self._forget,
            drained=self._drained,
            has_room=descriptors.enough,
            message_bytes_max=CLIENT_BYTES_MAX,
            queue_max=OUTBOX_BYTES_LAST // BUFFER_BYTES,  # bytes are what is limited
        )
        self.fileno = self.router.fileno
        self.close = self.router.close
        self.malformed = 0
        self.pending = 0  # bytes of requests under way, of all connections
        self.ready: OrderedDict[Peer, None] = OrderedDict()  # peers that read and are owed results
        self._epoch = epoch
        self._partial = 0  # the door whose peers are told only of what is here
        self._peers: dict[int, Peer] = {}
        self._named: dict[bytes, Peer] = {}
        self._sessions: dict[str, Peer] = {}
        # Read and not dealt with; at most one turn.
        self._heard: deque[tuple[int, Message]] = deque()
        self._requests: dict[int, Request] = {}
        self._tokens = count(1)
        self._lost: list[events.PeerLost] = []
        self._followers: dict[bytes, Peer] = {}
        self._hushed: dict[int, Peer] = {}
        self._relieved = False  # one of the hushed may be read again

    # -- doors --------------------------------------------------------------------------------

    def serve_apart(self, path: Path) -> None:
        """Serve a second socket, for the daemon's own user; its first one only when told to.

        Tasks, schedules and handlers that are not here may be elsewhere: peers of the first socket
        are not told that there are none. Their connections end when another process serves it, and
        they ask that one.
        """
        self.router.add_door(listen(str(path), None, PRIVATE_MODE, BACKLOG))
        self._partial = self.router.listener_fd
        self.serve(False)

    def serve(self, serve: bool) -> None:
        """Serve the first socket, or leave it to another process and end the connections there."""
        self.router.open_door(self.router.listener_fd, serve)

    def _is_partial(self, peer: Peer) -> bool:
        return self._partial != 0 and self.router.door_of(peer.number) == self._partial

    # -- from clients -------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether messages are read and not dealt with: the next turn must not sleep."""
        return bool(self._heard)

    def receive(self, wall_ns: int) -> Iterator[object]:
        """Yield what came in, as events, as long as there is time in this turn."""
        end_ns = time.monotonic_ns() + TURN_NS
        heard = self._heard
        if not (yield from self._hear_all(wall_ns, end_ns)):
            return
        if self.held <= ALL_BYTES_MAX:
            turn = self.router.turn(PORTION_BYTES)
        else:
            turn = self.router.turn(TURN_BYTES, TURN_BYTES)
        for number, messages in turn:
            heard.extend([(number, message) for message in messages])
            in_time = yield from self._hear_all(wall_ns, end_ns)
            if (peer := self._meet(number)) is not None:
                self._weigh(peer)
            if not in_time or time.monotonic_ns() > end_ns:
                return

    def _hear_all(self, wall_ns: int, end_ns: int) -> Generator[object, None, bool]:
        """Deal with the messages that were read; False if the time is over."""
        heard = self._heard
        while heard:
            event = self._hear(*heard.popleft(), wall_ns)
            if event is not None:
                yield event
            if time.monotonic_ns() > end_ns:
                return False
        return True

    def _hear(self, number: int, frame: Message, wall_ns: int) -> object | None:
        peer = self._meet(number)
        if peer is None:  # dropped meanwhile
            return None
        try:
            if frame is None:
                raise ProtocolError("a message of several frames instead of one")
            message = decode_client(frame)
        except ProtocolError as error:
            self._blame(peer, str(error))
            return None
        if type(message) is Hello:
            self._greet(peer, message)
            return None
        if not peer.greeted:
            # The client has reconnected without knowing: its Welcome makes it ask again.
            self._welcome(peer)
            return None
        return self._event_of(peer, message, len(frame), wall_ns)

    def _meet(self, number: int) -> Peer | None:
        """Return the peer of that connection; None if the connection is gone."""
        peer = self._peers.get(number)
        if peer is None and number in self.router:
            peer = self._peers[number] = Peer(number, f"{self._epoch}.{number}")
            self._named[peer.name] = peer
        return peer

    def _event_of(self, peer: Peer, message: object, size: int, wall_ns: int) -> object | None:
        name = peer.name
        event: object | None = None
        if type(message) is Submit:
            peer.known = True
            size += TASK_BYTES * len(message.tasks)
            token = self._begin(peer, message.request, size)
            event = events.TasksSubmitted(name, token, message.tasks, wall_ns, message.resend)
        elif type(message) is Watch:
            peer.known = True
            event = events.TasksWatched(name, message.ids)
        elif type(message) is Cancel:
            token = self._begin(peer, None, size + ID_BYTES * len(message.ids))
            event = events.CancelRequested(message.ids, name, token)
        elif type(message) is Inspect:
            self._owe(peer, [Inspection(message.request, message.id)])
        elif type(message) is Advise:
            event = AdviceWanted(peer, message.request)
        elif type(message) is History:
            token = self._begin(peer, message.request, size + HISTORY_BYTES_MAX)
            event = HistoryWanted(token, message)
        elif type(message) is Resolve:
            token = self._begin(peer, message.request, size)
            event = ResolutionWanted(token, message.place)
        elif type(message) is Invalidate:
            event = events.InvalidateRequested(message.key, message.prefix)
        elif type(message) is Follow:
            self._followers[name] = peer
            if not peer.follows:
                peer.follows = True
                event = events.ChangesFollowed(name)
        elif isinstance(message, ScheduleMessage):
            event = self._about_schedules(peer, message, size)
        else:  # from a newer client, perhaps
            self._blame(peer, f"a {type(message).__name__}, which means nothing here")
        return event

    def _about_schedules(self, peer: Peer, message: ScheduleMessage, size: int) -> object | None:
        if isinstance(message, ShowSchedules):
            return SchedulesWanted(peer, message)
        if problem := schedule_requests.problem_of(message):
            self._blame(peer, problem)
            return None
        token = self._begin(peer, message.request, size, schedules=True)
        return schedule_requests.event_of(peer.name, token, message)

    def _begin(self, peer: Peer, number: int | None, size: int, *, schedules: bool = False) -> int:
        """Charge a request to its connection; return the token that the core answers to."""
        token = next(self._tokens)
        size += REQUEST_BYTES
        self._requests[token] = Request(peer, number, size, schedules)
        self.charge(peer, size)
        return token

    def _end_request(self, token: int) -> Request | None:
        """Take a request that is answered back from its connection; None if that is done."""
        request = self._requests.pop(token, None)
        if request is not None:
            self.charge(request.peer, -request.bytes)
        return request

    def _greet(self, peer: Peer, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self._complain(peer, f"protocol {hello.protocol} instead of {PROTOCOL}")
            reason = (
                f"this daemon (musterd {__version__}) speaks protocol {PROTOCOL}, the "
                f"client {hello.protocol}: install the same musterd on both sides"
            )
            self._send(peer, encode(Refused(PROTOCOL, reason)))
            return
        self._supersede(peer, hello.session)
        self._welcome(peer)

    def _supersede(self, peer: Peer, session: str) -> None:
        """End the earlier connection of the same client."""
        if not session or peer.session:
            return
        before = self._sessions.get(session)
        if before is not None:
            self.router.end(before.number)
        peer.session = session
        self._sessions[session] = peer

    def _welcome(self, peer: Peer) -> None:
        peer.greeted = True
        self._send(peer, encode(Welcome(PROTOCOL, peer.epoch, __version__)))

    # -- malformed messages and dropped connections ---------------------------------------------

    def _blame(self, peer: Peer, what: str) -> None:
        """Answer a malformed message, if its sender has said hello; drop a hopeless sender."""
        self._complain(peer, what)
        peer.faults += 1
        if peer.faults >= FAULTS_MAX:
            self.router.put_out(peer.number, f"{FAULTS_MAX} malformed messages; the last: {what}")
        elif peer.greeted:
            self._send(peer, encode(Fault(what[:FAULT_CHARS_MAX])))

    def _complain(self, peer: Peer, what: str) -> None:
        """Count every malformed message; log the first of each peer."""
        self.malformed += 1
        if not peer.complained:
            peer.complained = True
            log.note("client.malformed", "warning", reason=what, peer=peer.number)

    def _put_out(self, number: int, why: str) -> None:
        """Tell why the router ends a connection; number 0: why it cannot accept one."""
        if not number:
            return  # problem() tells it, as long as it lasts
        self.malformed += 1
        peer = self._peers.get(number)
        if peer is None:  # it never sent a whole message
            log.note("client.malformed", "warning", reason=why, peer=number)
            return
        log.note("client.dropped", "warning", reason=why, peer=number)
        if peer.greeted and not self.router.unsent(number):
            self.router.send(number, encode(Fault(f"the connection ends: {why}"[:FAULT_CHARS_MAX])))

    def _forget(self, number: int) -> None:
        """Forget a connection that is over."""
        peer = self._peers.pop(number, None)
        if peer is None:
            return
        peer.gone = True
        del self._named[peer.name]
        self._sessions.pop(peer.session, None)
        self.ready.pop(peer, None)
        self._hushed.pop(number, None)
        self._followers.pop(peer.name, None)
        self.charge(peer, -peer.owed.clear())
        self._relieved = True
        if peer.known:
            self._lost.append(events.PeerLost(peer.name))

    # -- what they make the daemon hold -----------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes that all connections make the daemon hold."""
        return self.router.held + self.pending

    def charge(self, peer: Peer, size: int) -> None:
        """Add to what a connection has under way; a negative size takes it back."""
        peer.pending += size
        self.pending += size
        if size < 0:
            self._relieved = True

    def _weigh(self, peer: Peer) -> None:
        """Go on reading a connection, or stop, as its holding allows."""
        number = peer.number
        if client_limits.may_speak(self._holding(peer), self.held, len(self.router)):
            if self._hushed.pop(number, None) is not None:
                self.router.hush(number, False)
        elif number not in self._hushed:
            self._hushed[number] = peer
            self.router.hush(number)

    def _holding(self, peer: Peer) -> Holding:
        router, number = self.router, peer.number
        return Holding(
            number,
            router.half_read(number),
            router.unsent(number),
            peer.pending,
            peer.looks,
            peer.slow,
        )

    def settle(self) -> list[events.PeerLost]:
        """Send what waits; read connections that may speak again; return those that are gone.

        To be called after each turn of the loop.
        """
        self.router.flush()
        if self._relieved:
            self._relieved = False
            for peer in list(self._hushed.values()):
                self._weigh(peer)
        lost, self._lost = self._lost, []
        return lost

    def tidy_up(self, awaited_bytes: int) -> None:
        """Drop the connections that give way, once a second.

        `awaited_bytes` is the size of a result for which a peer that reads waits.
        """
        self.router.tidy_up()
        holdings: list[Holding] = []
        for peer in self._peers.values():
            moved = self.router.moved(peer.number)
            waits = self.router.half_read(peer.number) + self.router.unsent(peer.number)
            peer.looks = peer.looks + 1 if moved == peer.moved else 0
            peer.slow = peer.slow + 1 if waits and moved - peer.moved < peer.waited else 0
            peer.moved, peer.waited = moved, waits
            holdings.append(self._holding(peer))
        for each in client_limits.who_gives_way(holdings, self.held, awaited_bytes=awaited_bytes):
            what = "half a message" if each.half_read > each.unsent else "answers it does not read"
            why = f"it makes the daemon hold {each.of_the_peer} bytes: {what}"
            self.router.put_out(each.number, why)
        self._relieved = True

    def problem(self) -> str:
        """Return why clients cannot be let in and what to do, or ""."""
        return descriptors.problem()

    # -- to clients ---------------------------------------------------------------------------

    def knows(self, name: bytes) -> bool:
        """Whether a peer of this name is connected."""
        return name in self._named

    def acknowledge(self, token: int, rejected: list[Rejection]) -> None:
        request = self._end_request(token)
        if request is None:
            return
        unknown = any(each.code == UNKNOWN_SCHEDULE for each in rejected)
        if request.number is None or (unknown and self._is_partial(request.peer)):
            return
        answer = ScheduleAnswer if request.schedules else AcceptedMessage
        self._send(request.peer, encode(answer(request.number, rejected)))

    def drop(self, token: int, reason: str) -> None:
        """End the connection of a request that cannot be answered: the client asks again."""
        request = self._end_request(token)
        if request is not None:
            self.router.put_out(request.peer.number, reason)

    def give_up(self, peer: Peer, reason: str) -> None:
        """End the connection of a peer whose lookup failed: the client asks again."""
        self.router.put_out(peer.number, reason)

    def deliver(self, name: bytes, outcomes: list[Outcome]) -> None:
        """Send results as far as the peer takes them; owe the others."""
        peer = self._named.get(name)
        if peer is None:
            return
        if peer.owed or self._is_full(peer, 0):
            self._owe(peer, [outcome.id for outcome in outcomes])
            return
        size = start = 0
        for index, outcome in enumerate(outcomes):
            size += len(outcome.value)
            if size > RESULTS_BYTES_MAX:
                if self._is_full(peer, size):
                    self._owe(peer, [outcome.id for outcome in outcomes[start:]])
                    return
                self._send(peer, encode(Results(outcomes[start : index + 1])))
                start, size = index + 1, 0
        if start < len(outcomes):
            self._send(peer, encode(Results(outcomes[start:] if start else outcomes)))

    def _is_full(self, peer: Peer, size: int) -> bool:
        unsent = self.router.unsent(peer.number)
        return not client_limits.takes(size, unsent, self.held, len(self.router))

    def look_up(self, name: bytes, ids: list[str]) -> None:
        """Have these results looked up in the store when the peer can take them."""
        peer = self._named.get(name)
        if peer is not None:
            self._owe(peer, ids)

    def _owe(self, peer: Peer, what: list[str] | list[Inspection]) -> None:
        owed = peer.owed
        idle = not owed and not owed.asked
        self.charge(peer, owed.add(what))
        if len(owed) > OWED_MAX:
            self.router.put_out(peer.number, f"it does not take {len(owed)} answers that it wants")
        elif idle and not self.router.unsent(peer.number):
            self.ready[peer] = None

    def _drained(self, number: int) -> None:
        """Note that a peer has taken all that was kept for it."""
        self._relieved = True
        peer = self._peers.get(number)
        if peer is not None and peer.owed and not peer.owed.asked:
            self.ready[peer] = None

    def is_reading(self, peer: Peer) -> bool:
        """Whether the peer has taken everything that it was sent."""
        return not peer.gone and not self.router.unsent(peer.number)

    def missing(self, name: bytes, ids: list[str]) -> None:
        """Tell the peer that there are no such tasks."""
        peer = self._named.get(name)
        if peer is not None and not self._is_partial(peer):
            self._send(peer, encode(MissingMessage(ids)))

    def results(self, peer: Peer, outcomes: list[Outcome]) -> None:
        """Send results that were looked up, all in one message."""
        self._send(peer, encode(Results(outcomes)))

    def inspected(self, peer: Peer, request: int, view: TaskView | None) -> None:
        if view is not None or not self._is_partial(peer):
            self._send(peer, encode(Inspected(request, view)))

    def progress(self, names: list[bytes], note: ProgressNote) -> None:
        """Send progress to the peers that keep up; the others get the next one."""
        frame = encode(note)
        for name in names:
            peer = self._named.get(name)
            if peer is not None and self.router.unsent(peer.number) <= PROGRESS_BYTES_MAX:
                self._send(peer, frame)

    def newest_changes(self, name: bytes, changes: list[Change]) -> None:
        """Answer a Follow with the newest change of each schedule."""
        peer = self._named.get(name)
        if peer is not None:
            peer.follows = False
            self._send(peer, encode(Changes(changes, newest=True)))

    def changed(self, change: Change) -> None:
        """Send a change to all followers."""
        frame = encode(Changes([change]))
        for peer in list(self._followers.values()):
            self._send(peer, frame)

    def show_schedules(
        self, wanted: SchedulesWanted, schedules: list[ScheduleView], more: bool
    ) -> None:
        if self._is_partial(wanted.peer) and not (wanted.message.name and schedules):
            return
        self._send(wanted.peer, encode(Schedules(wanted.message.request, schedules, more)))

    def hold(self, peer: Peer, number: int) -> int:
        """Charge a question that others answer later; return its token."""
        return self._begin(peer, number, 0)

    def holds(self, token: int) -> bool:
        """Whether a request waits for its answer, and its client too."""
        return token in self._requests and not self._requests[token].peer.gone

    def holder(self, token: int) -> bytes:
        return self._requests[token].peer.name

    def show_later(self, token: int, schedules: list[ScheduleView], more: bool) -> None:
        """Answer a question for schedules that was held."""
        request = self._end_request(token)
        if request is not None and request.number is not None:
            self._send(request.peer, encode(Schedules(request.number, schedules, more)))

    def advise(self, wanted: AdviceWanted, workers: dict[str, int]) -> None:
        self._send(wanted.peer, encode(Advice(wanted.request, workers)))

    def resolve(self, wanted: ResolutionWanted, found: Resolved) -> None:
        """Answer the question which tasks run a function."""
        request = self._end_request(wanted.token)
        if request is None or request.number is None:
            return
        if found.tasks or not self._is_partial(request.peer):
            self._send(request.peer, encode(structs.replace(found, request=request.number)))

    def recall(
        self,
        wanted: HistoryWanted,
        entries: list[HistoryEntry],
        error: str = "",
        *,
        unknown: bool = False,
    ) -> None:
        """Answer the question for results of a schedule."""
        request = self._end_request(wanted.token)
        if request is not None and not (unknown and self._is_partial(request.peer)):
            answer = Entries(wanted.question.request, entries, error, unknown)
            self._send(request.peer, encode(answer))

    def _send(self, peer: Peer, frame: bytes) -> None:
        """Send, or drop a peer that does not read: it asks again on its next connection."""
        if peer.gone:
            return
        self.router.post(peer.number, frame)  # if the peer is gone, _forget() follows
        if self.router.unsent(peer.number) > OUTBOX_BYTES_LAST:
            self.router.put_out(peer.number, "it does not read its answers")
