"""Serve the clients of one program: their port, the gateway that decides, results they are owed.

What the gateway reports is for logs, and is left out: a program has no log of ours.
"""

import time
from collections import deque
from collections.abc import Callable

from musterd.supervisor.cluster.gateway import Gateway
from musterd.supervisor.cluster.sidecar_events import Call, EndPeer, TellChange
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.node.engines import Engines, Job
from musterd.supervisor.node.lookups import Lookups
from musterd.supervisor.sockets.clients import AdviceWanted, ClientPort


class ClientServer:
    def __init__(
        self,
        gateway: Gateway,
        clients: ClientPort,
        engines: Engines,
        admit: Callable[[events.TasksSubmitted], events.TasksSubmitted | None],
    ) -> None:
        """`admit` refuses tasks, and completes the others; None: not before `go_on`."""
        self._gateway = gateway
        self._clients = clients
        self._engines = engines
        self._admit = admit
        self._held: deque[object] | None = None  # what waits for `go_on`: at most one turn
        self._lookups = Lookups(engines, clients, self.feed, gateway.submits_of)
        self.fileno = clients.fileno
        self.next_deadline = gateway.next_deadline

    @property
    def behind(self) -> bool:
        """Whether the next turn must not sleep."""
        return self._clients.behind and self._held is None

    @property
    def connections(self) -> int:
        return len(self._clients.router)

    def hear(self) -> None:
        """Take what clients have sent."""
        if self._held is None:
            for event in self._clients.receive(time.time_ns()):
                self._take(event)

    def go_on(self) -> None:
        """Go on with what could not be admitted."""
        held, self._held = self._held or (), None
        for event in held:
            self._take(event)

    def _take(self, event: object) -> None:
        """Hand what a client wants to the gateway."""
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
            self.feed(event)

    def settle(self) -> None:
        """Send what waits, at the end of each turn of the loop."""
        self._clients.router.flush()
        for lost in self._clients.settle():
            self._take(lost)
        self._lookups.pump()

    def tidy_up(self) -> None:
        """Look after slow clients, once a second."""
        self._clients.tidy_up(self._lookups.awaited_bytes)
        self._lookups.try_again()

    def feed(self, event: object) -> None:
        for action in self._gateway.handle(time.monotonic_ns(), event):
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
