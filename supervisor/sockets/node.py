"""node.sock: what the cluster sidecar says becomes events, actions become messages to it.

The socket exists only where there is a cluster. Nobody can pose as the sidecar: a hello carries
the one-time token that the sidecar was started with, and the messages of other connections are
dropped. The connection of a new sidecar ends the one before.

A sidecar that does not read is put out when the router keeps QUEUE_MAX messages for it: what the
core has to tell is bounded there (core/tasks/claims.py), and the next sidecar is told all of it.
"""

import secrets
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.node_codec import decode_sidecar
from musterd.ipc.wire.node_messages import (
    ATTEMPTS_MAX,
    NODE_PROTOCOL,
    POLICY_BYTES_MAX,
    REQUESTS_MAX,
    AskLocks,
    AskStates,
    Begun,
    CancelAttempts,
    Confirmed,
    Content,
    Figures,
    FindTasks,
    Finish,
    FoundTasks,
    Granted,
    Greeting,
    Holds,
    LocksTold,
    LoginsTold,
    LoseAttempts,
    Membership,
    NewsTold,
    NodeMessage,
    Notice,
    Pools,
    ProgressMarks,
    ScheduleNews,
    Seen,
    SharedPolicy,
    SidecarHello,
    SidecarMessage,
    StatesTold,
    Want,
    portions,
)
from musterd.ipc.wire.router import Router
from musterd.ipc.wire.zmtp import Message
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.shared import ClusterPolicy
from musterd.supervisor.log import log
from musterd.supervisor.sockets.listen import listen

BACKLOG = 16  # one sidecar, and one that takes its place
QUEUE_MAX = 10_000  # messages kept for a sidecar that does not read
FINDS_MAX = 16  # looks for tasks that people wait for
NO_SIDECAR = "the cluster sidecar is not up: musterctl status says why"
TOO_MANY = "too many look for tasks of the cluster at once: try again"

Found = Callable[[FoundTasks], None]

_decode_content = msgspec.json.Decoder(Content).decode
_decode_policy = msgspec.msgpack.Decoder(ClusterPolicy).decode

ClusterAction = (
    actions.GreetCluster
    | actions.ShowPools
    | actions.WantAttempts
    | actions.TellCluster
    | actions.AskStates
    | actions.AskLocks
    | actions.NewsTold
)


class NodePort:
    def __init__(self, path: Path) -> None:
        self._router = Router(
            listen(str(path), None, 0o600, BACKLOG),
            self._complain,
            gone=self._gone,
            queue_max=QUEUE_MAX,
        )
        self.fileno = self._router.fileno
        self.tidy_up = self._router.tidy_up
        self.close = self._router.close
        self.malformed = 0
        self._token = ""  # of the sidecar that is expected; "": none
        self._peer = 0  # the connection of the sidecar, 0 for none
        self._complained = 0  # the connection whose first malformed message was logged
        self._found: list[object] = []
        self._finds: dict[int, Found] = {}  # by request: who waits for the answer
        self._requests = count(1)
        self._parts = bytearray()  # of a policy that is not complete

    def new_token(self) -> str:
        """Return the token for the next sidecar; one given before is not accepted any more."""
        self._token = secrets.token_hex(16)
        return self._token

    def receive(self) -> list[object]:
        """Return what came in, as events."""
        for peer, frame in self._router.receive():
            try:
                event = self._understand(peer, frame)
                if event is not None:
                    self._found.append(event)
            except ProtocolError as error:
                self._complain(peer, str(error))
        found, self._found = self._found, []
        return found

    def _understand(self, peer: int, frame: Message) -> object:
        if frame is None:
            raise ProtocolError("a message of several frames instead of one")
        message = decode_sidecar(frame)
        if type(message) is SidecarHello:
            return self._greet(peer, message)
        if peer != self._peer:
            raise ProtocolError("a message before the hello")
        if type(message) is FoundTasks:
            try:
                _ = message.tasks
            except msgspec.DecodeError as error:
                raise ProtocolError(f"tasks that cannot be read: {error}") from None
            self._answer(message)
            return None
        if type(message) is SharedPolicy:
            return self._collect(peer, message)
        return event_of(message)

    def _collect(self, peer: int, message: SharedPolicy) -> events.PolicyShared | None:
        """Return the policy of the cluster when its last part is there."""
        self._parts += message.part
        if len(self._parts) > POLICY_BYTES_MAX:
            self._parts.clear()
            raise ProtocolError(f"a policy of the cluster with more than {POLICY_BYTES_MAX} bytes")
        if message.more:
            return None
        encoded, self._parts = self._parts, bytearray()
        if not encoded:
            return events.PolicyShared(message.version, None)
        try:
            return events.PolicyShared(message.version, _decode_policy(encoded))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._complain(peer, f"a policy of the cluster that cannot be read: {error}")
            return events.PolicyShared(message.version, None)

    def _greet(self, peer: int, hello: SidecarHello) -> events.ClusterConnected:
        if hello.protocol != NODE_PROTOCOL:
            raise ProtocolError(
                f"the cluster sidecar speaks protocol {hello.protocol}, we {NODE_PROTOCOL}"
            )
        if not self._token or not secrets.compare_digest(
            hello.token.encode(), self._token.encode()
        ):
            raise ProtocolError("a hello with a token that was never given, or used already")
        self._token = ""
        if self._peer:
            self._router.end(self._peer)
        self._peer = peer
        self._parts.clear()
        return events.ClusterConnected()

    def _gone(self, peer: int) -> None:
        if peer == self._peer:
            self._peer = 0
            self._found.append(events.ClusterDisconnected())
            for request in list(self._finds):
                self._answer(FoundTasks(request, reason=NO_SIDECAR))

    def _complain(self, peer: int, what: str) -> None:
        if not peer:
            log.note("cluster.waiting", "warning", reason=what)
            return
        self.malformed += 1
        if peer != self._complained:
            self._complained = peer
            log.note("cluster.malformed", "warning", reason=what, peer=peer)

    # -- for people ---------------------------------------------------------------------------

    def find(self, wanted: FindTasks, found: Found) -> None:
        """Look for tasks of the cluster; `found` is called once, maybe at once."""
        if not self._peer or len(self._finds) >= FINDS_MAX:
            found(FoundTasks(0, reason=TOO_MANY if self._peer else NO_SIDECAR))
            return
        request = next(self._requests)
        self._finds[request] = found
        self._send(msgspec.structs.replace(wanted, request=request))

    def _answer(self, message: FoundTasks) -> None:
        found = self._finds.pop(message.request, None)
        if found is not None:
            found(message)

    # -- to the sidecar -----------------------------------------------------------------------

    def perform(self, action: ClusterAction) -> None:
        for message in messages_of(action):
            self._send(message)

    def _send(self, message: NodeMessage) -> None:
        peer = self._peer
        if peer and not self._router.send(peer, encode(message)):
            self._router.put_out(peer, "the cluster sidecar does not read")


def messages_of(action: ClusterAction) -> list[NodeMessage]:
    """Return the messages to the sidecar that an action means."""
    match action:
        case actions.GreetCluster(tenure, held, unconfirmed, member):
            parts = [held[at : at + ATTEMPTS_MAX] for at in range(0, len(held), ATTEMPTS_MAX)]
            first, *others = parts or [[]]
            last = len(others) - 1
            holds = [Holds(part, number < last) for number, part in enumerate(others)]
            more = bool(others)
            return [Greeting(NODE_PROTOCOL, tenure, first, unconfirmed, more, member), *holds]
        case actions.ShowPools(cards, local):
            return [Pools(cards, local)]
        case actions.WantAttempts() | actions.NewsTold():
            kind = Want if isinstance(action, actions.WantAttempts) else NewsTold
            return [kind(*msgspec.structs.astuple(action))]
        case actions.TellCluster(ends, begun, marks):
            messages: list[NodeMessage] = [Finish(part) for part in portions(ends)]
            size = ATTEMPTS_MAX
            messages += [Begun(begun[at : at + size]) for at in range(0, len(begun), size)]
            messages += [ProgressMarks(marks[at : at + size]) for at in range(0, len(marks), size)]
            return messages
        case actions.AskStates(asks):
            return [AskStates(part) for part in portions(asks)]
        case actions.AskLocks(tenure, wishes):
            size = REQUESTS_MAX
            starts = range(0, len(wishes), size)
            return [AskLocks(tenure, wishes[at : at + size]) for at in starts]


def event_of(message: SidecarMessage) -> object:
    """Return the event that a message of the sidecar means."""
    event: object
    match message:
        case Membership(tenure, until_ns, away, draining, policy):
            event = events.MembershipTold(tenure, until_ns, away, draining, policy)
        case ScheduleNews():
            event = _noted(message)
        case Granted(request, pool, attempts):
            event = events.AttemptsGranted(request, pool, attempts)
        case Confirmed(held):
            event = events.EndsConfirmed(held)
        case CancelAttempts(held):
            event = events.AttemptsCancelled(held)
        case LoseAttempts(held):
            event = events.AttemptsLost(held)
        case StatesTold(states):
            event = events.StatesTold(states)
        case LocksTold(tenure, locks):
            event = events.LocksTold(tenure, locks)
        case Notice() | Figures() | Seen() | LoginsTold():
            event = events.ClusterTold(message)
        case SidecarHello() | SharedPolicy() | FoundTasks():
            raise ProtocolError("a second hello, or no event")
    return event


def _noted(news: ScheduleNews) -> events.ScheduleNoted:
    try:
        content = _decode_content(news.content) if news.content else Content()
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a change that cannot be read: {error}") from None
    said = msgspec.structs.asdict(news) | msgspec.structs.asdict(content)
    del said["content"]
    return events.ScheduleNoted(**said)
