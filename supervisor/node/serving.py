"""Serve clients: their port, the pure part that decides (gateway or splitter), owed results.

A node's sidecar is a ClientServer of a Splitter, a program without a node an AdmittingServer of a
Gateway.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from musterd.supervisor.cluster.sidecar_events import Call, EndPeer, TellChange
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.node.engines import Engines, Job
from musterd.supervisor.node.lookups import Lookups
from musterd.supervisor.node.schedule_desk import ScheduleDesk
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.peers import AdviceWanted


class Core(Protocol):
    """What decides for clients."""

    def handle(self, now_ns: int, event: object) -> Sequence[object]: ...
    def next_deadline(self) -> int | None: ...
    def submits_of(self, peer: bytes) -> bool: ...


class ClientServer:
    def __init__(
        self,
        core: Core,
        clients: ClientPort,
        engines: Engines,
        desk: ScheduleDesk,
        do_other: Callable[[object], None],
    ) -> None:
        """`do_other` performs the actions of the core that are not for clients or the engine."""
        self._desk = desk
        self._core = core
        self._clients = clients
        self._engines = engines
        self._do_other = do_other
        self._lookups = Lookups(engines, clients, self.feed, core.submits_of)
        self.fileno = clients.fileno
        self.next_deadline = core.next_deadline

    @property
    def behind(self) -> bool:
        """Whether the next turn must not sleep."""
        return self._clients.behind

    @property
    def connections(self) -> int:
        return len(self._clients.router)

    def hear(self) -> None:
        """Take what clients have sent."""
        for event in self._clients.receive(time.time_ns()):
            self._take(event)

    def _take(self, event: object) -> None:
        """Hand what a client wants to the core, but for what it asks about schedules."""
        if isinstance(event, events.PeerLost):
            self._desk.forget_lost()
        if not self._desk.take(event):
            self.feed(event)

    def settle(self) -> None:
        """Send what waits, at the end of each turn of the loop."""
        self._clients.router.flush()
        for lost in self._clients.settle():
            self._take(lost)
        self._lookups.pump()

    def tidy_up(self, awaited_bytes: int = 0) -> None:
        """Look after slow clients, once a second.

        `awaited_bytes`: a client waits for so much, because others hold too much.
        """
        self._clients.tidy_up(max(awaited_bytes, self._lookups.awaited_bytes))
        self._lookups.try_again()

    def feed(self, event: object) -> None:
        for action in self._core.handle(time.monotonic_ns(), event):
            self._do(action)

    def _do(self, action: object) -> None:
        clients = self._clients
        match action:
            case Call():
                arguments, options = action.arguments, action.options
                job = Job(action.ticket, action.method, arguments, options, self.feed)
                self._engines.call(job)
            case actions.Acknowledge(_, request, rejected):
                clients.acknowledge(request, rejected)
            case actions.Deliver(peer, outcomes):
                clients.deliver(peer, outcomes)
            case actions.LookUp(peer, ids):
                clients.look_up(peer, ids)
            case actions.TellMissing(peer, ids):
                clients.missing(peer, ids)
            case actions.DropRequest(_, request, reason):
                clients.drop(request, reason)
            case actions.TellChanges(peer, changes):
                clients.newest_changes(peer, changes)
            case actions.TellProgress(peers, note):
                clients.progress(peers, note)
            case TellChange(change):
                clients.changed(change)
            case EndPeer(peer, reason):
                if peer.isdigit():
                    clients.router.put_out(int(peer), reason)
            case _:
                self._do_other(action)


class AdmittingServer(ClientServer):
    """Serves the clients of one program; submits may have to wait for what nodes declare."""

    def __init__(
        self,
        core: Core,
        clients: ClientPort,
        engines: Engines,
        desk: ScheduleDesk,
        admit: Callable[[events.TasksSubmitted], events.TasksSubmitted | None],
    ) -> None:
        """`admit` refuses tasks, and completes the others; None: not before `go_on`."""
        super().__init__(core, clients, engines, desk, _leave_out)
        self._admit = admit
        self._held: deque[object] | None = None  # what waits for `go_on`: at most one turn

    @property
    def behind(self) -> bool:
        return super().behind and self._held is None

    def hear(self) -> None:
        if self._held is None:
            super().hear()

    def go_on(self) -> None:
        """Go on with what could not be admitted."""
        held, self._held = self._held or (), None
        for event in held:
            self._take(event)

    def _take(self, event: object) -> None:
        if self._held is not None:
            self._held.append(event)
        elif isinstance(event, events.TasksSubmitted):
            admitted = self._admit(event)
            if admitted is None:
                self._held = deque([event])
            else:
                self.feed(admitted)
        elif isinstance(event, AdviceWanted):
            self._clients.advise(event, {})  # supervisors know their memory, and are not asked
        else:
            super()._take(event)


def _leave_out(_action: object) -> None:
    """Reports are for logs: a program has no log of ours."""
