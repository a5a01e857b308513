"""Gateways and their clients around one engine in memory, with everything that may go wrong.

Each node has tasks of its own too, in a model of its supervisor (local_side.py): a Splitter before
the Gateway divides what clients ask. Without a sidecar for long, the model serves clients itself.
The local pool of a node may become shared.

The world loses connections, ends gateways, takes the engine away, and makes calls fail before and
after their effect. Every message and every call takes a random time; messages of one connection
keep their order.

Checked at every step: a client is told that a task is accepted, or has ended, only after the engine
has it so; a rejected or a missing task is not there; progress is told that the engine was told. At
the end, when all is quiet: each task that was acknowledged has ended once, on one side, its client
knows the outcome, and no gateway holds anything. Who waits for a task in quiet times knows how far
it is.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

import msgspec

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import messages as wire
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import Outcome, ProgressNote, TaskDeclaration, TaskSpec
from musterd.supervisor.cluster.engine import (
    End,
    Grant,
    NodeCard,
    PoolCard,
    Want,
)
from musterd.supervisor.cluster.gateway import Gateway
from musterd.supervisor.cluster.handling import (
    ProgressMark,
)
from musterd.supervisor.cluster.model_engine import ModelEngine
from musterd.supervisor.cluster.sidecar_events import (
    AskLocal,
    Call,
    EndLocal,
    EndPeer,
    EngineAnswered,
    EngineFailed,
    LocalLost,
    LocalSaid,
    LookedUp,
    Notified,
    PassOn,
    PoolsTold,
    ShowView,
    ViewAsked,
)
from musterd.supervisor.cluster.splitter import Splitter
from musterd.supervisor.core.model import actions, events
from simulation.local_side import Connection, LocalSide

MS = SECOND_NS // 1000
_decode_results = msgspec.msgpack.Decoder(wire.Results).decode
BUSY_NS = 20 * SECOND_NS  # the time in which things go wrong
QUIET_NS = 60 * SECOND_NS  # the time in which all must come to its end
KNOWN_NS = 8 * SECOND_NS  # after which all who wait have been told the last progress
NODES, CLIENTS, TASKS = 2, 4, 12
NAMES = ("p.extract", "q.extract")
CARDS = tuple(
    PoolCard(name, 10, (TaskDeclaration("extract"),), queue_size=100_000) for name in ("p", "q")
)
TAKE_OVER_NS = 2 * SECOND_NS  # as core/tasks/reception.py


class Node:
    """A sidecar's place: the gateway that lives there now, and its connections."""

    def __init__(self, number: int, rng: Random) -> None:
        self.number = number
        self.local = LocalSide(rng)
        self.pairs: dict[bytes, Connection] = {}
        self.life = 0
        self.begun = 0  # the last life with a gateway
        self.gateway: Splitter | None = None
        self.ended_ns = 0
        self.woken_ns: int | None = None
        self.peers: dict[bytes, Client] = {}


class Running:
    """A task that says how far it is, now and then."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.said: list[float] = []
        self.said_ns = 0


class Client:
    """A client as ipc/client/session.py is one: it sends again what was not acknowledged."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.peer = b""  # the name of its connection; b"": it has none
        self.direct: Connection | None = None  # to the supervisor, while there is no sidecar
        self.views: dict[int, str] = {}  # questions that are not answered
        self.requests = count(1)
        self.unsent: list[TaskSpec] = []
        self.sent: dict[int, list[TaskSpec]] = {}  # not acknowledged
        self.again: list[TaskSpec] = []  # to be sent again
        self.accepted: dict[str, None] = {}  # without an outcome
        self.outcomes: dict[str, Outcome] = {}
        self.waits_since: dict[str, int] = {}
        self.progress: dict[str, float] = {}
        self.rejections = 0


class World:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now_ns = 0
        self.steps = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self._ids = count(1)
        self._lines: dict[tuple[bytes, str], int] = {}  # when the last message of each arrives
        self.engine = ModelEngine(lambda: self.now_ns, Random(seed))
        self.tenure = self.engine.join(NodeCard("id", "worker", 3600 * SECOND_NS, "", CARDS))
        self.away = False
        self.calm = False
        self.said: dict[str, list[float]] = {}  # by tasks that have ended
        self.ends: dict[str, int] = {}
        self.told: list[str] = []
        self.resent = self.lost_answers = self.deaths = self.moves = self.direct = 0
        self.progress_told = 0
        self.running: dict[str, Running] = {}
        self.quiet_ns = 0  # since when nothing goes wrong
        self.nodes = [Node(number, self.rng) for number in range(NODES)]
        self.clients = [Client(self.rng.choice(self.nodes)) for _ in range(CLIENTS)]

    # -- time ---------------------------------------------------------------------------------

    def later(self, by_ns: int, deed: Callable[[], None]) -> None:
        heappush(self._heap, (self.now_ns + max(1, by_ns), next(self._numbers), deed))

    def some_ns(self) -> int:
        usual = self.rng.randrange(1, 20) * MS
        return usual if self.calm or self.rng.random() < 0.97 else self.rng.randrange(8000) * MS

    def run(self) -> None:
        for node in self.nodes:
            self.begin(node)
        for client in self.clients:
            self.connect(client)
            for _ in range(TASKS):
                self.later(self.rng.randrange(BUSY_NS), lambda c=client: self.submit(c))  # type: ignore[misc]
        for chance, deed in (
            (1500, self.kill),
            (1200, self.cut),
            (4000, self.take_away),
            (8000, self.move),
            (1000, self.cut_local),
        ):
            self.every(chance, deed)
        self.every(200, self.work)
        self.every(700, self.tick)
        self.go_on_until(BUSY_NS)
        self.calm, self.away, self.quiet_ns = True, False, self.now_ns
        self.go_on_until(BUSY_NS + QUIET_NS)
        self.check_the_end()

    def every(self, mean_ms: int, deed: Callable[[], None]) -> None:
        def again() -> None:
            deed()
            self.every(mean_ms, deed)

        self.later(self.rng.randrange(1, 2 * mean_ms) * MS, again)

    def go_on_until(self, end_ns: int) -> None:
        while self._heap and self._heap[0][0] <= end_ns:
            self.now_ns, _, deed = heappop(self._heap)
            deed()
            self.steps += 1
            assert self.steps < 300_000, "it never comes to rest"

    # -- what goes wrong ----------------------------------------------------------------------

    def kill(self) -> None:
        if not self.calm:
            self.deaths += 1
            self.end(self.rng.choice(self.nodes))

    def cut(self) -> None:
        client = self.rng.choice(self.clients)
        if client.peer and not self.calm:
            self.disconnect(client, seen=True)

    def cut_local(self) -> None:
        """The supervisor ends the connection of a client to local.sock."""
        node = self.rng.choice(self.nodes)
        if node.pairs and not self.calm and self.rng.random() < 0.3:
            peer = self.rng.choice(list(node.pairs))
            node.pairs.pop(peer).over = True
            self.feed(node, LocalLost(peer, "dropped"))

    def move(self) -> None:
        """The local pool of a node becomes shared, at a restart of its daemon."""
        node = self.rng.choice(self.nodes)
        if not self.calm and node.local.pools and self.rng.random() < 0.3:
            self.moves += 1
            self.end(node)
            for client in [each for each in self.clients if each.node is node and each.direct]:
                self.disconnect(client, seen=False)
            for pair in node.pairs.values():
                pair.over = True
            node.pairs.clear()
            node.local.pools = ()

    def take_away(self) -> None:
        if self.calm:
            return
        self.away = True

        def back() -> None:
            self.away = False

        self.later(self.rng.randrange(200, 9000) * MS, back)

    # -- the fleet behind the engine ----------------------------------------------------------

    def work(self) -> None:
        """Run some tasks, and say how they ended."""
        tenure = self.tenure.tenure
        number = self.rng.randrange(60 if self.calm else 6)
        for node in self.nodes:
            node.local.work(number)
        grants = self.engine.claim(tenure, [Want(pool, number, NAMES) for pool in ("p", "q")])
        ends = []
        ends += self.go_on(tenure)
        for grant in grants:
            value = bytes(self.rng.randrange(1, 50))
            if self.rng.random() < 0.1:
                self.running[grant.id] = Running(grant)
            elif self.rng.random() < 0.2:
                ends.append(End(grant.id, grant.claim, "failed", retry_ns=300 * MS))
            else:
                ends.append(End(grant.id, grant.claim, "succeeded", value=value))
        self.note_ends([each.id for each in self.engine.finish(tenure, ends) if each.state])

    def go_on(self, tenure: int) -> list[End]:
        """Let running tasks say how far they are; return the ends of some."""
        ends = []
        for id_, task in list(self.running.items()):
            silent = self.calm and self.now_ns > self.quiet_ns + SECOND_NS
            if not silent:
                mark = ProgressMark(id_, len(task.said) / 1000, "")
                if not self.engine.progress(tenure, [mark]):
                    task.said.append(mark.fraction)
                    task.said_ns = self.now_ns
            known_ns = self.now_ns - KNOWN_NS
            settled = silent and known_ns > max(task.said_ns, self.quiet_ns)
            if settled and task.said:
                for client in self.clients:
                    if client.waits_since.get(id_, self.now_ns) < known_ns:
                        assert client.progress.get(id_) == task.said[-1], f"{id_}: not told"
            if settled or (not self.calm and self.rng.random() < 0.1):
                del self.running[id_]
                self.said[id_] = task.said
                ends.append(End(id_, task.grant.claim, "succeeded"))
        return ends

    def note_ends(self, ids: list[str]) -> None:
        for id_ in ids:
            self.ends[id_] = self.ends.get(id_, 0) + 1
            assert self.ends[id_] == 1, f"{id_} has ended twice"
        for node in self.nodes:
            if ids and self.rng.random() < 0.7:  # a notification may be lost
                self.later(self.some_ns(), lambda n=node, life=node.life: self.notify(n, life))  # type: ignore[misc]

    def notify(self, node: Node, life: int) -> None:
        if life == node.life:
            self.feed(node, Notified())

    def tick(self) -> None:
        self.engine.beat(self.tenure.tenure)
        self.engine.tick()

    # -- sidecars -----------------------------------------------------------------------------

    def begin(self, node: Node) -> None:
        node.life += 1
        node.begun = node.life
        for client in [each for each in self.clients if each.node is node and each.direct]:
            self.disconnect(client, seen=False)  # the supervisor leaves tasks.sock to the sidecar
        gateway = Gateway(node.number + 1, Random(self.rng.random()))
        node.gateway = Splitter(gateway, lambda event: event)
        self.feed(node, PoolsTold(node.local.pools))
        self.feed(node, events.Started())

    def end(self, node: Node) -> None:
        if node.gateway is None:
            return
        node.gateway = None
        node.life += 1
        node.ended_ns = self.now_ns
        for client in list(node.peers.values()):
            self.disconnect(client, seen=False)
        node.pairs.clear()  # what they have sent may still be read
        longest = 800 if self.calm or self.rng.random() < 0.8 else 6000
        self.later(self.rng.randrange(5, longest) * MS, lambda: self.begin(node))

    def feed(self, node: Node, event: object) -> None:
        gateway = node.gateway
        if gateway is None:
            return
        for action in gateway.handle(self.now_ns, event):
            self.do(node, action)
        gateway.validate()
        due_ns = gateway.next_deadline()
        if due_ns is not None and (node.woken_ns is None or due_ns < node.woken_ns):
            node.woken_ns = due_ns
            self.later(due_ns - self.now_ns, lambda: self.wake(node))

    def wake(self, node: Node) -> None:
        node.woken_ns = None
        self.feed(node, events.Ticked())

    def do(self, node: Node, action: object) -> None:
        match action:
            case Call():
                self.call(node, action)
            case actions.LookUp(peer, ids):
                self.look_up(node, node.life, peer, list(ids))
            case actions.Acknowledge(peer, request, rejected):
                refused = [each.id for each in rejected]
                client = node.peers.get(peer)
                if client is not None:
                    self.check_acknowledged(client, request, refused)
                self.to_client(node, peer, lambda c: self.acknowledged(c, request, refused))
            case actions.Deliver(peer, outcomes):
                self.deliver(node, peer, outcomes)
            case actions.TellMissing(peer, ids):
                for id_ in ids:
                    assert not self.is_there(id_), f"{id_} is told to be missing"
                self.to_client(node, peer, lambda c: self.missing(c, ids))
            case actions.TellProgress(peers, note):
                self.tell_progress(node, peers, note)
            case actions.DropRequest(peer) | EndPeer(peer):
                client = node.peers.get(peer)
                if client is not None:
                    self.disconnect(client, seen=True)
            case actions.Report():
                pass
            case _:
                self.do_with_local(node, action)

    def do_with_local(self, node: Node, action: object) -> None:
        match action:
            case AskLocal(peer, message):
                self.ask_local(node, peer, message)
            case EndLocal(peer):
                node.pairs.pop(peer, None)
            case PassOn(peer, frame):
                outcomes = _decode_results(bytes(frame)).outcomes
                self.to_client(node, peer, lambda c: self.delivered(c, outcomes))
            case ShowView(request, id_, view):
                self.show_view(node, request, id_, found=view is not None)
            case _:
                raise AssertionError(action)

    def is_there(self, id_: str) -> bool:
        shared = id_ in self.engine.board.live or id_ in self.engine.board.done
        places = shared + sum(node.local.has(id_) for node in self.nodes)
        assert places <= 1, f"{id_} is in several places"
        return places == 1

    def ask_local(self, node: Node, peer: bytes, message: wire.ClientMessage) -> None:
        pair = node.pairs.get(peer)
        if pair is None:
            life, session = node.life, self.clients.index(node.peers[peer])

            def send(said: wire.ServerMessage) -> None:
                self.in_order((peer, "local down"), lambda: self.local_said(node, life, peer, said))

            pair = node.pairs[peer] = Connection(session, send, direct=False)

            def hello(made: Connection = pair) -> None:
                if not made.over:
                    node.local.greet(made)

            self.in_order((peer, "local up"), hello)
        self.in_order((peer, "local up"), lambda: node.local.hear(pair, message))

    def local_said(self, node: Node, life: int, peer: bytes, message: wire.ServerMessage) -> None:
        if life == node.life and peer in node.pairs:
            self.feed(node, LocalSaid(peer, message, encode(message)))

    def show_view(self, node: Node, request: int, id_: str, *, found: bool) -> None:
        for client in node.peers.values():
            if client.views.pop(request, None) is not None:
                assert found == any(each.local.has(id_) for each in self.nodes), id_

    def call(self, node: Node, call: Call) -> None:
        life = node.life

        def take_effect() -> None:
            if life != node.begun:
                return  # a gateway calls nothing before the sessions of the one before have ended
            fails, event = self.rng.random(), None
            if self.away or (fails < 0.05 and not self.calm):
                event = EngineFailed(call.ticket, "away")
            if event is None or (self.away and fails < 0.2):
                result = getattr(self.engine, call.method)(*call.arguments, **call.options)
                if call.method == "cancel":
                    ended = [id_ for id_ in result if id_ in self.engine.board.done]
                    self.note_ends([id_ for id_ in ended if id_ not in self.ends])
                self.lost_answers += event is not None
                event = event or EngineAnswered(call.ticket, result)
            self.later(self.some_ns(), lambda: self.answer(node, life, event))

        self.later(self.some_ns(), take_effect)

    def answer(self, node: Node, life: int, event: object) -> None:
        if life == node.life:
            self.feed(node, event)

    def look_up(self, node: Node, life: int, peer: bytes, ids: list[str]) -> None:
        """Be the shell's lookups: portions while there are some, again when the engine is away."""

        def take_effect() -> None:
            if life != node.life or peer not in node.peers:
                return
            if self.away:
                self.look_up(node, life, peer, ids)
                return
            found = self.engine.fetch(ids, self.rng.randrange(50, 200))
            self.deliver(node, peer, list(found.outcomes))
            ended = tuple([each.id for each in found.outcomes])
            later = LookedUp(peer, ended, found.absent, found.marks)
            self.later(self.some_ns(), lambda: self.answer(node, life, later))
            if found.unread:
                self.look_up(node, life, peer, list(found.unread))

        self.later(self.some_ns(), take_effect)

    # -- clients ------------------------------------------------------------------------------

    def to_client(self, node: Node, peer: bytes, deed: Callable[[Client], None]) -> None:
        def arrive() -> None:
            client = node.peers.get(peer)
            if client is not None:
                deed(client)

        self.in_order((peer, "down"), arrive)

    def to_gateway(self, client: Client, event: object) -> None:
        node, peer, direct = client.node, client.peer, client.direct

        def arrive() -> None:
            if peer in node.peers:
                self.feed(node, event)

        if direct is None:
            self.in_order((peer, "up"), arrive)
        else:
            message = _message_of(event)
            self.in_order((peer, "up"), lambda: node.local.hear(direct, message))

    def in_order(self, line: tuple[bytes, str], deed: Callable[[], None]) -> None:
        at_ns = max(self.now_ns + self.rng.randrange(1, 5) * MS, self._lines.get(line, 0) + 1)
        self._lines[line] = at_ns
        self.later(at_ns - self.now_ns, deed)

    def connect(self, client: Client) -> None:
        node = client.node
        if node.gateway is None:
            if self.now_ns >= node.ended_ns + TAKE_OVER_NS and self.rng.random() < 0.5:
                self.connect_directly(client)
            else:
                self.later(50 * MS, lambda: self.connect(client))
            return
        client.peer = b"%d" % next(self._numbers)
        node.peers[client.peer] = client
        self.begin_again(client)

    def connect_directly(self, client: Client) -> None:
        """Connect to the supervisor: the sidecar is away for long."""
        self.direct += 1
        client.peer = b"%d" % next(self._numbers)
        peer = client.peer

        def send(said: wire.ServerMessage) -> None:
            self.in_order((peer, "down"), lambda: self.heard_directly(client, peer, said))

        client.direct = Connection(self.clients.index(client), send, direct=True)
        client.node.local.greet(client.direct)
        self.begin_again(client)

    def heard_directly(self, client: Client, peer: bytes, message: wire.ServerMessage) -> None:
        if client.peer != peer:
            return
        match message:
            case wire.Accepted(request, rejected):
                refused = [each.id for each in rejected]
                self.check_acknowledged(client, request, refused)
                self.acknowledged(client, request, refused)
            case wire.Results(outcomes):
                self.delivered(client, outcomes)
            case wire.Missing(ids):
                self.missing(client, ids)

    def check_acknowledged(self, client: Client, request: int, refused: list[str]) -> None:
        for spec in client.sent.get(request, ()):
            there = self.is_there(spec.id)
            assert there == (spec.id not in refused), f"a lie about {spec.id}"

    def begin_again(self, client: Client) -> None:
        again, client.again = client.again, []
        if again:
            self.resent += len(again)
            self.send(client, again, resend=True)
        if client.accepted:
            self.to_gateway(client, events.TasksWatched(client.peer, list(client.accepted)))
        self.flush(client)

    def disconnect(self, client: Client, *, seen: bool) -> None:
        """End a connection. `seen`: the gateway lives, and sees it."""
        node, peer = client.node, client.peer
        node.peers.pop(peer, None)
        if client.direct is not None:
            client.direct = None
            seen = False
        client.peer = b""
        client.views = {}
        for specs in client.sent.values():
            client.again += specs
        client.sent = {}
        if seen:
            self.feed(node, events.PeerLost(peer))
        self.later(self.rng.randrange(1, 300) * MS, lambda: self.connect(client))

    def submit(self, client: Client) -> None:
        client.unsent += [
            TaskSpec(f"t{next(self._ids)}", self.rng.choice(NAMES), b"\x80")
            for _ in range(self.rng.choice((1, 1, 2, 30)))
        ]
        self.flush(client)

    def flush(self, client: Client) -> None:
        if client.peer and client.unsent:
            specs, client.unsent = client.unsent, []
            self.send(client, specs)

    def send(self, client: Client, specs: list[TaskSpec], *, resend: bool = False) -> None:
        request = next(client.requests)
        client.sent[request] = specs
        event = events.TasksSubmitted(client.peer, request, specs, 0, resend)
        self.to_gateway(client, event)
        if self.rng.random() < 0.1:
            ids = [self.rng.choice(specs).id]
            self.to_gateway(client, events.CancelRequested(ids, client.peer, 0))
        if self.rng.random() < 0.1 and client.direct is None:
            request = next(client.requests)
            client.views[request] = specs[0].id
            self.to_gateway(client, ViewAsked(client.peer, request, specs[0].id))

    def acknowledged(self, client: Client, request: int, refused: list[str]) -> None:
        specs = client.sent.pop(request, [])
        for spec in specs:
            if spec.id in refused:
                client.rejections += 1
                again = [spec]
                self.later(1000 * MS, lambda c=client, s=again: self.once_more(c, s))  # type: ignore[misc]
            elif spec.id not in client.outcomes:
                client.accepted[spec.id] = None
                client.waits_since[spec.id] = self.now_ns
                self.told.append(spec.id)
                if self.rng.random() < 0.3:
                    self.watch(self.rng.choice(self.clients), spec.id)

    def watch(self, client: Client, id_: str) -> None:
        """Wait for a task, perhaps of another client on another node; a local task is of one."""
        home = [node for node in self.nodes if node.local.has(id_)]
        if client.peer and id_ not in client.outcomes and home in ([], [client.node]):
            client.accepted[id_] = None
            client.waits_since.setdefault(id_, self.now_ns)
            self.to_gateway(client, events.TasksWatched(client.peer, [id_]))

    def once_more(self, client: Client, specs: list[TaskSpec]) -> None:
        client.unsent += specs
        self.flush(client)

    def deliver(self, node: Node, peer: bytes, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.id in self.engine.board.done, f"{outcome.id} was told before its end"
            assert not any(each.local.has(outcome.id) for each in self.nodes), "on two sides"
        self.to_client(node, peer, lambda client: self.delivered(client, outcomes))

    def delivered(self, client: Client, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            known = client.outcomes.setdefault(outcome.id, outcome)
            assert known.state == outcome.state, f"two ends of {outcome.id}"
            client.accepted.pop(outcome.id, None)
            client.waits_since.pop(outcome.id, None)

    def tell_progress(self, node: Node, peers: list[bytes], note: ProgressNote) -> None:
        task = self.running.get(note.id)
        said = task.said if task is not None else self.said.get(note.id, [])
        assert note.fraction in said, f"{note} was never said"
        for peer in peers:
            self.to_client(node, peer, lambda client: self.progressed(client, note))

    def progressed(self, client: Client, note: ProgressNote) -> None:
        self.progress_told += 1
        client.progress[note.id] = note.fraction

    def missing(self, client: Client, ids: list[str]) -> None:
        raise AssertionError(f"{ids} were accepted, and are missing")

    # -- the end ------------------------------------------------------------------------------

    def check_the_end(self) -> None:
        board = self.engine.board
        assert not board.live, f"{list(board.live)} never ended"
        for id_ in self.told:
            assert self.is_there(id_), f"{id_} is lost"
        for client in self.clients:
            assert not client.unsent, "not sent"
            assert not client.again, "not sent again"
            assert not client.sent, f"never acknowledged: {client.sent}"
            assert not client.accepted, f"nobody told how these ended: {client.accepted}"
        assert {id_ for client in self.clients for id_ in client.outcomes} >= set(self.told)
        for node in self.nodes:
            assert not node.local.live, f"{list(node.local.live)} never ended"
            assert node.gateway is not None
            assert node.gateway.is_idle, f"gateway {node.number} still holds something"


def _message_of(event: object) -> wire.ClientMessage:
    """Return the message that a client has sent."""
    match event:
        case events.TasksSubmitted(_, request, tasks, _, resend):
            return wire.Submit(request, tasks, resend)
        case events.TasksWatched(_, ids):
            return wire.Watch(ids)
        case events.CancelRequested(ids):
            return wire.Cancel(ids)
    raise AssertionError(event)
