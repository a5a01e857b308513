"""Lost connections: removes their watchers from all tasks.

The tasks run on, and clients find them again by id. Watchers are noted with each task, not with
each connection, so every task is searched: in portions, because there may be a million tasks, and
for all connections lost since the last search. A connection's number is never reused, so a watcher
that is not removed yet is told nothing.
"""

from collections.abc import Iterator
from itertools import chain, islice

from musterd.ipc.resilience.policy import MILLISECOND_NS
from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.state import State

PORTION = 10_000  # tasks searched in one go: about two milliseconds
PAUSE_NS = 2 * MILLISECOND_NS  # between two portions


class LostPeers:
    def __init__(self, state: State, disk_queue: DiskQueue) -> None:
        self._state = state
        self._disk_queue = disk_queue
        self._peers: dict[bytes, None] = {}  # removed by the search under way
        self._next: dict[bytes, None] = {}  # removed by the next search
        self._ids: Iterator[str] = iter(())

    def lost(self, event: events.PeerLost) -> None:
        self._next[event.peer] = None
        if not self._peers:
            self._begin()

    def _begin(self) -> None:
        self._peers, self._next = self._next, {}
        state = self._state
        self._ids = chain(list(state.tasks), list(self._disk_queue.places), list(state.stranded))
        self._go_on()

    def _go_on(self) -> None:
        looked_at = 0
        for id_ in islice(self._ids, PORTION):
            looked_at += 1
            self._forget(id_)
        if looked_at == PORTION:
            self._state.timers.at(self._state.now_ns + PAUSE_NS, self._go_on)
            return
        self._peers = {}
        if self._next:
            self._begin()

    def _forget(self, id_: str) -> None:
        state, lost = self._state, self._peers
        task = state.tasks.get(id_)
        if task is not None:
            if task.peer in lost:
                task.peer = b""
            if task.watchers is not None:
                task.watchers = _without(task.watchers, lost)
            return
        self._disk_queue.forget_peers(id_, lost)
        if (peers := state.stranded.get(id_)) is not None:
            left = _without(peers, lost)
            if left is None:
                del state.stranded[id_]
            else:
                state.stranded[id_] = left


def _without(peers: dict[bytes, None], lost: dict[bytes, None]) -> dict[bytes, None] | None:
    """Return the watchers that are left; None if none is."""
    if peers.keys().isdisjoint(lost):
        return peers or None
    return {peer: None for peer in peers if peer not in lost} or None
