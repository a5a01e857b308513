"""Results that clients are owed, fetched from the store while the clients read.

A client may ask for the results of many tasks at once, each of up to megabytes. Only the ids are
kept (`Owed`). When the client has taken everything that it was sent, the next portion is looked up:
as many results as fit into PORTION_BYTES. A single larger result is fetched alone, when the limit
of all clients has room for it. Few portions are under way at a time, in turn over all clients, so
the store's reader is never far behind and no client waits for a crowd.
"""

from collections import deque
from typing import TYPE_CHECKING

from musterd.supervisor.core.model import events
from musterd.supervisor.core.tasks import client_limits
from musterd.supervisor.core.tasks.refusals import UNREADABLE
from musterd.supervisor.shell import Shell
from musterd.supervisor.sockets.owed import PORTION_BYTES, PORTIONS_MAX, Inspection
from musterd.supervisor.store.interface import FindSome, Portion, StoredTask, pool_of
from musterd.supervisor.views.task import live_view_of, view_of

if TYPE_CHECKING:
    from musterd.supervisor.sockets.clients import ClientPort
    from musterd.supervisor.sockets.peers import Peer

LARGE_MAX = 2  # single results over PORTION_BYTES that are under way


class ClientLookups:
    def __init__(self, shell: Shell, clients: "ClientPort") -> None:
        self._shell = shell
        self._clients = clients
        self._portions = 0
        self._large = 0
        self._waiting: deque[tuple[Peer, int]] = deque()  # a peer for room, and how much

    @property
    def awaited_bytes(self) -> int:
        """Size of the result that a reading peer waits for because others hold too much, or 0."""
        return self._waiting[0][1] if self._waiting and self._large < LARGE_MAX else 0

    def pump(self) -> None:
        """Look up for the peers that are next, after each turn of the loop."""
        clients, ready = self._clients, self._clients.ready
        while self._waiting and self._large < LARGE_MAX:
            peer, size = self._waiting[0]
            if not peer.gone and not client_limits.fits(size, clients.held):
                break
            self._waiting.popleft()
            if not peer.gone and peer.owed:
                self._ask(peer, size)
        while ready and self._portions < PORTIONS_MAX and not self._shell.store_requests.full:
            peer, _ = ready.popitem(last=False)
            if peer.owed and not peer.owed.asked and clients.is_reading(peer):
                self._ask(peer, PORTION_BYTES)

    def _ask(self, peer: "Peer", bytes_max: int) -> None:
        """Look up the first part of what a peer is owed; `bytes_max` over a portion: one result."""
        large = bytes_max > PORTION_BYTES
        first = peer.owed.first()
        peer.owed.asked = True
        if isinstance(first, Inspection):
            view = live_view_of(self._shell, first.id)
            if view is not None:
                if len(view.args) > bytes_max:
                    self._waiting.append((peer, len(view.args)))
                    return
                self._clients.inspected(peer, first.request, view)
                self._go_on(peer, 1)
                return
            ids = [first.id]
        else:
            ids = first[:1] if large else first
        if large:
            self._large += 1
            self._clients.charge(peer, bytes_max)
        else:
            self._portions += 1

        def over() -> None:
            if large:
                self._large -= 1
                self._clients.charge(peer, -bytes_max)
            else:
                self._portions -= 1

        def found(portion: Portion) -> None:
            over()
            if peer.gone:
                return
            if portion.unread == ids:
                self._waiting.append((peer, portion.next_bytes))
                return
            read = len(ids) - len(portion.unread)
            if isinstance(first, Inspection):
                view = view_of(self._shell, first.id, portion.tasks)
                self._clients.inspected(peer, first.request, view)
            else:
                self._tell(peer, ids[:read], portion.tasks)
            self._go_on(peer, read)

        def lost() -> None:
            over()
            self._clients.give_up(peer, UNREADABLE)

        attempts = isinstance(first, Inspection)
        self._shell.store_requests.ask(FindSome(ids, bytes_max, attempts), found, lost)

    def _go_on(self, peer: "Peer", count: int) -> None:
        if peer.gone:
            return
        owed = peer.owed
        self._clients.charge(peer, -owed.drop(count))
        owed.asked = False
        if owed and self._clients.is_reading(peer):
            self._clients.ready[peer] = None

    def _tell(self, peer: "Peer", ids: list[str], stored: list[StoredTask]) -> None:
        outcomes = [each.outcome for each in stored if each.outcome is not None]
        if outcomes:
            self._clients.results(peer, outcomes)
        tell_unfinished(self._shell, peer.name, ids, stored)


def tell_unfinished(shell: Shell, peer: bytes, ids: list[str], stored: list[StoredTask]) -> None:
    """Tell the core which of these tasks have not ended, and which the store does not have."""
    known = {each.spec.id for each in stored}
    unfinished = [(each.spec.id, pool_of(each.spec)) for each in stored if each.outcome is None]
    absent = [id_ for id_ in ids if id_ not in known]
    if unfinished or absent:
        shell.feed(events.LookedUp(peer, unfinished, absent))
