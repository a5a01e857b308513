"""The splitter: divides what clients ask between the engine and this machine's own pools. Pure.

A node may share some of its pools and keep others to itself. The tasks of a local pool are in the
supervisor's store. The supervisor serves them on local.sock as any daemon serves tasks.sock, with
the same checks and limits. Each client that needs it has a connection of its own there.

    client ──► Splitter ──► Gateway ──► engine          tasks of shared and of unknown pools
                   └──────► local.sock ──► supervisor   tasks of local pools

submit      Divided by pool. The client gets one acknowledgement when all parts are answered. What
            is sent again goes to local.sock first, because a pool may have been local when it was
            sent before; what is ELSEWHERE goes on to the engine.
watch       Asked on both sides. A task is missing if both say so.
view        Asked on local.sock, then of the engine: the first answer takes no database.
cancel,     Told to both sides. A cancel does not overtake a submit of its client that is on its way
invalidate  to the engine.
schedules,  Asked on local.sock; who asks goes on to the engine (node/schedule_desk.py).
history
changes     Of both sides. The first answer holds those of both, because a client takes it for its
            starting point; while the engine is away it holds those of this machine.

While the engine is away everything of local pools goes on. If a client's connection to local.sock
ends, so does the client's own: the client sends and asks again. Nothing is kept here that a client
was promised.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct, field

from musterd.ipc.wire import messages as wire
from musterd.ipc.wire.history import Entries
from musterd.ipc.wire.messages import ELSEWHERE, Change, Rejection, TaskSpec
from musterd.ipc.wire.resolving import Resolved
from musterd.ipc.wire.schedule_messages import ScheduleAnswer, ScheduleMessage, Schedules
from musterd.supervisor.cluster.gateway import WATCHES_MAX, Gateway
from musterd.supervisor.cluster.sidecar_events import (
    Action,
    AdviceAsked,
    AskLocal,
    EndLocal,
    EndPeer,
    GiveAdvice,
    Invalidated,
    LocalAction,
    LocalLost,
    LocalSaid,
    LookedUp,
    PassOn,
    PoolsTold,
    SchedulesAnswer,
    SchedulesAsked,
    ShowView,
    ToldOfSchedules,
    ViewAsked,
)
from musterd.supervisor.core.model import actions, events

TOO_MANY = "its client waits for too many tasks"
GONE = "its client is gone"

# What is known of a watched task.
NOT_LOCAL, NOT_SHARED, TOLD = 1, 2, 4


class _Submit(Struct, eq=False):
    """A submit of which parts are not answered."""

    event: events.TasksSubmitted
    rejected: list[Rejection]
    local: bool = False  # local.sock has to answer
    engine: int = 0  # answers of the gateway to come
    on_the_way: bool = False  # parts of it may go to the engine when local.sock has answered


class _Follow(Struct, eq=False):
    """What is known of the newest changes that a client waits for."""

    local: list[Change] | None = None
    shared: list[Change] | None = None


class _Client(Struct, eq=False):
    """What one client has asked for, apart from what only the gateway knows."""

    paired: bool = False  # it has a connection to local.sock
    lost: bool = False  # that connection is over, and so is the client's own in a moment
    submits: dict[int, _Submit] = field(default_factory=dict)  # by request
    on_the_way: int = 0  # submits that may go on to the engine
    cancels: list[events.CancelRequested] = field(default_factory=list)  # behind those
    asked: dict[int, str] = field(default_factory=dict)  # by request: a task; "" asks for advice
    watched: dict[str, int] = field(default_factory=dict)
    follow: _Follow | None = None

    @property
    def is_idle(self) -> bool:
        held = (self.submits, self.cancels, self.asked, self.watched, self.follow)
        return not any(held) and not self.on_the_way


class Splitter:
    def __init__(
        self,
        gateway: Gateway,
        prepare: Callable[[events.TasksSubmitted], events.TasksSubmitted],
    ) -> None:
        """`prepare` completes and checks what goes to the engine; the supervisor does so itself."""
        self._gateway = gateway
        self._prepare = prepare
        self._now_ns = 0
        self._out: list[Action | LocalAction] = []
        self._local: frozenset[str] = frozenset()
        self._clients: dict[bytes, _Client] = {}
        self._watches = 0
        self._follows: dict[bytes, None] = {}  # clients that wait for the newest changes

    @property
    def has_local(self) -> bool:
        """Whether pools of this machine alone are known."""
        return bool(self._local)

    def submits_of(self, peer: bytes) -> bool:
        """Whether a client has submits that the engine has not answered."""
        client = self._clients.get(peer)
        on_the_way = client is not None and client.on_the_way > 0
        return on_the_way or self._gateway.submits_of(peer)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for any client."""
        return all(each.is_idle for each in self._clients.values()) and self._gateway.is_idle

    def next_deadline(self) -> int | None:
        return self._gateway.next_deadline()

    def handle(self, now_ns: int, event: object) -> list[Action | LocalAction]:
        self._now_ns = now_ns
        match event:
            case LocalSaid():
                self._heard(event)
            case LocalLost(peer, reason):
                client = self._clients.get(peer)
                if client is not None and not client.lost:
                    client.lost = True
                    self._out.append(EndPeer(peer, reason))
            case PoolsTold(local):
                self._local = frozenset(local)
            case LookedUp(peer, ended):
                self._forget(peer, ended)
                self._feed(event)
            case _:
                self._hear_client(event)
        if self._follows and self._gateway.refusing:
            for peer in list(self._follows):
                self._tell_newest(peer, self._clients[peer])
        out, self._out = self._out, []
        return out

    def _hear_client(self, event: object) -> None:
        match event:
            case events.TasksSubmitted():
                self._submitted(event)
            case events.TasksWatched(peer, ids):
                self._watch(peer, ids)
            case events.CancelRequested():
                self._cancel(event)
            case Invalidated(peer, key, prefix):
                self._ask(peer, wire.Invalidate(key, prefix))
                self._feed(events.InvalidateRequested(key, prefix))
            case events.ChangesFollowed(peer):
                self._ask(peer, wire.Follow()).follow = _Follow()
                self._follows[peer] = None
                self._feed(event)
            case ViewAsked(peer, request, id_):
                self._ask(peer, wire.Inspect(request, id_)).asked[request] = id_
            case SchedulesAsked(peer, request, asked):
                self._ask(peer, asked).asked[request] = ""
            case AdviceAsked(peer, request):
                self._ask(peer, wire.Advise(request)).asked[request] = ""
            case events.PeerLost(peer):
                self._lose(peer)
                self._feed(event)
            case _:  # the clock, or the engine
                self._feed(event)

    def _ask(self, peer: bytes, message: wire.ClientMessage | ScheduleMessage) -> _Client:
        client = self._clients.get(peer)
        if client is None:
            client = self._clients[peer] = _Client()
        if not client.lost:
            client.paired = True
            self._out.append(AskLocal(peer, message))
        return client

    def _feed(self, event: object) -> None:
        """Let the gateway handle an event; keep back what waits for the other side."""
        for action in self._gateway.handle(self._now_ns, event):
            match action:
                case actions.Acknowledge(peer, request, rejected):
                    client = self._clients.get(peer)
                    if client is None or request not in client.submits:
                        self._out.append(action)
                    else:
                        client.submits[request].engine -= 1
                        self._answered(client, request, rejected)
                case actions.DropRequest(peer, request):
                    client = self._clients.get(peer)
                    if client is not None and request in client.submits:
                        self._arrived(client, client.submits.pop(request))
                    self._out.append(action)
                case actions.TellMissing(peer, ids):
                    self._tell_missing(peer, [id_ for id_ in ids if self._not_shared(peer, id_)])
                case actions.Deliver(peer, outcomes):
                    self._forget(peer, [outcome.id for outcome in outcomes])
                    self._out.append(action)
                case actions.TellChanges(peer, changes):
                    self._newest(peer, shared=changes)
                case _:
                    self._out.append(action)

    # -- submits ------------------------------------------------------------------------------

    def _submitted(self, event: events.TasksSubmitted) -> None:
        local = {spec.name for spec in event.tasks if self._is_local(spec)}
        if not event.resend and not local:
            self._feed(self._prepare(event))
            return
        shared = [spec for spec in event.tasks if spec.name not in local]
        here = event.tasks
        if shared and not event.resend:
            here = [spec for spec in here if spec.name in local]
        client = self._ask(event.peer, wire.Submit(event.request, here, event.resend))
        submit = client.submits[event.request] = _Submit(event, [], local=True)
        if shared and event.resend:
            submit.on_the_way = True
            client.on_the_way += 1
        elif shared:
            self._to_engine(submit, shared)

    def _is_local(self, spec: TaskSpec) -> bool:
        return spec.name.partition(".")[0] in self._local

    def _to_engine(self, submit: _Submit, tasks: list[TaskSpec]) -> None:
        event = submit.event
        submit.engine += 1
        part = events.TasksSubmitted(event.peer, event.request, tasks, event.wall_ns, event.resend)
        self._feed(self._prepare(part))

    def _accepted(self, client: _Client, message: wire.Accepted) -> None:
        """Take the answer of local.sock to a submit."""
        submit = client.submits.get(message.request)
        if submit is None or not submit.local:
            return
        elsewhere = {each.id for each in message.rejected if each.code == ELSEWHERE}
        if elsewhere:
            self._to_engine(submit, [spec for spec in submit.event.tasks if spec.id in elsewhere])
        self._arrived(client, submit)
        submit.local = False
        if message.request in client.submits:  # else the gateway has dropped the request
            others = [each for each in message.rejected if each.code != ELSEWHERE]
            self._answered(client, message.request, others)

    def _arrived(self, client: _Client, submit: _Submit) -> None:
        """Note that a submit is on its way no more: cancels behind it may follow."""
        if not submit.on_the_way:
            return
        submit.on_the_way = False
        client.on_the_way -= 1
        if not client.on_the_way:
            cancels, client.cancels = client.cancels, []
            for cancel in cancels:
                self._feed(cancel)

    def _answered(self, client: _Client, request: int, rejected: list[Rejection]) -> None:
        submit = client.submits[request]
        submit.rejected += rejected
        if not submit.local and not submit.engine:
            del client.submits[request]
            self._out.append(actions.Acknowledge(submit.event.peer, request, submit.rejected))

    def _cancel(self, event: events.CancelRequested) -> None:
        client = self._ask(event.peer, wire.Cancel(event.ids))
        if client.on_the_way:
            client.cancels.append(event)
        else:
            self._feed(event)

    def _lose(self, peer: bytes) -> None:
        """Forget a client that is gone. Its requests are charged to nobody any more."""
        client = self._clients.pop(peer, None)
        if client is None:
            return
        if client.paired:
            self._out.append(EndLocal(peer))
        self._follows.pop(peer, None)
        self._watches -= len(client.watched)
        requests = [*client.submits, *client.asked, *(each.request for each in client.cancels)]
        self._out.extend([actions.DropRequest(peer, request, GONE) for request in requests])

    # -- what the supervisor says -------------------------------------------------------------

    def _heard(self, event: LocalSaid) -> None:
        peer, message = event.peer, event.message
        client = self._clients.get(peer)
        if client is None:
            return
        match message:
            case wire.Results(outcomes):
                if client.watched:
                    for outcome in outcomes:
                        self._note(peer, outcome.id, TOLD)
                self._out.append(PassOn(peer, event.frame))
            case wire.Accepted():
                self._accepted(client, message)
            case wire.ProgressNote():
                self._out.append(actions.TellProgress([peer], message))
            case wire.Missing(ids):
                self._tell_missing(peer, [id_ for id_ in ids if self._note(peer, id_, NOT_LOCAL)])
            case wire.Changes(changes, newest=True):
                self._newest(peer, local=changes)
            case wire.Changes():
                self._out.append(PassOn(peer, event.frame))
            case (
                wire.Inspected()
                | wire.Advice()
                | Entries()
                | ScheduleAnswer()
                | Schedules()
                | Resolved()
            ):
                self._show(client, message)
            case wire.Refused(_, reason):
                self._out.append(EndPeer(peer, reason))
            case _:
                assert isinstance(message, wire.Welcome | wire.Fault), message

    def _show(
        self, client: _Client, message: wire.Inspected | wire.Advice | SchedulesAnswer
    ) -> None:
        request = message.request
        id_ = client.asked.pop(request, None)
        if id_ is None:
            return
        if isinstance(message, wire.Advice):
            self._out.append(GiveAdvice(request, message.workers))
        elif isinstance(message, wire.Inspected):
            self._out.append(ShowView(request, id_, message.view))
        else:
            self._out.append(ToldOfSchedules(request, message))

    # -- watched tasks ------------------------------------------------------------------------

    def _watch(self, peer: bytes, ids: list[str]) -> None:
        client = self._ask(peer, wire.Watch(ids))
        before = len(client.watched)
        client.watched.update(dict.fromkeys(ids, 0))
        self._watches += len(client.watched) - before
        if self._watches > WATCHES_MAX:
            self._out.append(EndPeer(peer, TOO_MANY))
        else:
            self._feed(events.TasksWatched(peer, ids))

    def _not_shared(self, peer: bytes, id_: str) -> bool:
        """Note that the engine does not have a task; return whether nobody has it."""
        client = self._clients.get(peer)
        if client is None or id_ not in client.watched:
            return True  # it was submitted to the engine alone
        return self._note(peer, id_, NOT_SHARED)

    def _note(self, peer: bytes, id_: str, what: int) -> bool:
        """Note what one side says of a watched task; return whether nobody has it.

        What is known is kept until the engine has said its word, and this machine too.
        """
        watched = self._clients[peer].watched
        if id_ not in watched:
            return False
        known = watched[id_] | what
        watched[id_] = known
        if not (known & NOT_SHARED and known & (NOT_LOCAL | TOLD)):
            return False
        self._forget(peer, (id_,))
        return not known & TOLD

    def _forget(self, peer: bytes, ids: Iterable[str]) -> None:
        """Forget watched tasks of which there is nothing more to tell."""
        client = self._clients.get(peer)
        if client is not None and client.watched:
            for id_ in ids:
                if client.watched.pop(id_, None) is not None:
                    self._watches -= 1

    def _tell_missing(self, peer: bytes, ids: list[str]) -> None:
        if ids:
            self._out.append(actions.TellMissing(peer, ids))

    # -- changes of schedules -----------------------------------------------------------------

    def _newest(
        self, peer: bytes, *, local: list[Change] | None = None, shared: list[Change] | None = None
    ) -> None:
        client = self._clients.get(peer)
        if client is None or client.follow is None:
            return  # it has its starting point; it follows again now and then, and is told
        follow = client.follow
        follow.local = local if local is not None else follow.local
        follow.shared = shared if shared is not None else follow.shared
        self._tell_newest(peer, client)

    def _tell_newest(self, peer: bytes, client: _Client) -> None:
        follow = client.follow
        assert follow is not None
        if follow.local is None or (follow.shared is None and not self._gateway.refusing):
            return
        client.follow = None
        del self._follows[peer]
        self._out.append(actions.TellChanges(peer, [*follow.local, *(follow.shared or ())]))

    def validate(self) -> None:
        """Check what must hold between two events."""
        self._gateway.validate()
        clients = self._clients.values()
        assert self._watches == sum(len(each.watched) for each in clients)
        for client in clients:
            submits = client.submits.values()
            assert all(each.local or each.engine > 0 for each in submits), client
            assert client.on_the_way == sum(each.on_the_way for each in submits), client
            assert not client.cancels or client.on_the_way, client
        follows = [peer for peer, each in self._clients.items() if each.follow is not None]
        assert sorted(follows) == sorted(self._follows)
