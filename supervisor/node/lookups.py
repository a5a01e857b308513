"""Results that clients are owed, fetched from the engine while the clients read.

As sockets/lookups.py does it for the store: the ids are kept, a portion is fetched when the client
has taken everything before, a result that is larger than a portion is fetched alone.
"""

from collections.abc import Callable
from itertools import count

from musterd.ipc.wire.messages import TaskView
from musterd.supervisor.cluster.engine import Fetched
from musterd.supervisor.cluster.sidecar_events import EngineAnswered, EngineFailed, LookedUp
from musterd.supervisor.core.tasks import client_limits
from musterd.supervisor.node.engines import Engines, Job
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.owed import PORTION_BYTES, PORTIONS_MAX, Inspection
from musterd.supervisor.sockets.peers import Peer


class Lookups:
    def __init__(
        self,
        engines: Engines,
        clients: ClientPort,
        feed: Callable[[LookedUp], None],
        submits: Callable[[bytes], bool],
    ) -> None:
        """`submits` says whether a peer has submits that the engine has not answered."""
        self._engines = engines
        self._clients = clients
        self._feed = feed
        self._submits = submits
        self._tickets = count(1)
        self._under_way = 0
        self._waiting: dict[Peer, int] = {}  # for room for a large result, and how much
        self._failed: dict[Peer, None] = {}
        self._early: dict[Peer, None] = {}  # they ask for tasks that may not be there yet

    @property
    def awaited_bytes(self) -> int:
        """Size of a result that a reading peer waits for because others hold too much, or 0."""
        return next(iter(self._waiting.values()), 0)

    def try_again(self) -> None:
        """Look up once more what the engine did not answer, once a second."""
        failed, self._failed = self._failed, {}
        for peer in failed:
            if not peer.gone and peer.owed:
                self._clients.ready[peer] = None

    def pump(self) -> None:
        """Look up for the peers that are next, after each turn of the loop."""
        clients = self._clients
        for peer, size in list(self._waiting.items()):
            if peer.gone or client_limits.fits(size, clients.held):
                del self._waiting[peer]
                if not peer.gone and peer.owed:
                    self._ask(peer, size)
        early, self._early = self._early, {}
        clients.ready.update(dict.fromkeys([peer for peer in early if not peer.gone]))
        while clients.ready and self._under_way < PORTIONS_MAX:
            peer, _ = clients.ready.popitem(last=False)
            if peer.owed and isinstance(peer.owed.first(), Inspection) and self._submits(peer.name):
                self._early[peer] = None
            elif peer.owed and not peer.owed.asked and clients.is_reading(peer):
                self._ask(peer, PORTION_BYTES)

    def _ask(self, peer: Peer, bytes_max: int) -> None:
        first = peer.owed.first()
        peer.owed.asked = True
        self._under_way += 1
        self._clients.charge(peer, bytes_max)

        def answered(event: EngineAnswered | EngineFailed) -> None:
            self._under_way -= 1
            self._clients.charge(peer, -bytes_max)
            peer.owed.asked = False
            if peer.gone:
                return
            if isinstance(event, EngineFailed):
                self._failed[peer] = None
            elif isinstance(first, Inspection):
                view = event.result
                assert view is None or isinstance(view, TaskView)
                self._clients.inspected(peer, first.request, view)
                self._go_on(peer, 1)
            else:
                assert isinstance(event.result, Fetched)
                self._tell(peer, first, event.result)

        if isinstance(first, Inspection):
            job = Job(next(self._tickets), "view", (first.id,), {}, answered)
        else:
            ids = first if bytes_max <= PORTION_BYTES else first[:1]
            job = Job(next(self._tickets), "fetch", (ids, bytes_max), {}, answered)
        self._engines.call(job)

    def _tell(self, peer: Peer, ids: list[str], found: Fetched) -> None:
        asked = len(found.outcomes) + len(found.alive) + len(found.absent) + len(found.unread)
        ids = ids[:asked]
        read = ids.index(found.unread[0]) if found.unread else len(ids)
        if not read:
            peer.owed.asked = True
            self._waiting[peer] = found.next_bytes
            return
        if found.outcomes:
            self._clients.results(peer, list(found.outcomes))
        absent = set(found.absent).intersection(ids[:read])
        ended = tuple([each.id for each in found.outcomes])
        self._go_on(peer, read)
        self._feed(LookedUp(peer.name, ended, tuple(absent), found.marks))

    def _go_on(self, peer: Peer, number: int) -> None:
        if peer.gone:
            return
        self._clients.charge(peer, -peer.owed.drop(number))
        if peer.owed and self._clients.is_reading(peer):
            self._clients.ready[peer] = None
