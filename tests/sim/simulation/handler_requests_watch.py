"""Check states and locks, whatever dies.

A lock has one holder, which lives and has not returned it. A wait for a lock is answered in time. A
state whose save was answered is on disk from then on, across every restart, until another save or
a clear replaces it; no load returns anything older than what was written before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.model.actions import AnswerLock, AnswerState, FindState, Persist
from musterd.supervisor.core.model.events import (
    LeasesCompleted,
    LeasesReturned,
    LockReturned,
    LockWanted,
    StateGiven,
    StateWanted,
    WorkerExited,
)
from simulation.profile import MS

if TYPE_CHECKING:
    from simulation.world import World

LATE_NS = 1 * MS  # a poll wakes up a little late; this is far more


class HandlerRequestsWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self._values = 0
        self._log: dict[str, list[bytes | None]] = {}  # every value ever written under a key
        self._safe: dict[str, int] = {}  # the index in it that was reported to be on disk
        self.locks_given = self.saves_answered = 0
        self.new_life()

    def new_life(self) -> None:
        """Forget the core's memory, but not what the core said."""
        self._saves: dict[tuple[int, int], tuple[str, int]] = {}
        self._loads: dict[tuple[int, int], int] = {}  # the oldest index that each may return
        self._asked: dict[tuple[int, int], tuple[str, int, int]] = {}  # name, lease, deadline
        self._holders: dict[str, int] = {}  # lease
        self._own: frozenset[int] = frozenset()  # leases of the worker that sends the event
        for key, log in self._log.items():
            place = self._place(key, self._world.store.fact("state", key))
            del log[place + 1 :]

    def new_value(self) -> bytes:
        self._values += 1
        return b"%d" % self._values

    def _place(self, key: str, value: bytes | None, since: int | None = None) -> int:
        """Return the index of the value in the log; not before what was reported to be on disk."""
        log = self._log.setdefault(key, [None])
        first = self._safe.get(key, 0) if since is None else since
        for place in range(len(log) - 1, first - 1, -1):
            if log[place] == value:
                return place
        raise AssertionError(f"state {key} is {value!r}, and not one of {log[first:]}")

    # -- the truth ----------------------------------------------------------------------------

    def gave_back(self, lease: int, name: str) -> None:
        if self._holders.get(name) == lease:
            del self._holders[name]

    def let_go(self, lease: int) -> None:
        for name in [name for name, holder in self._holders.items() if holder == lease]:
            del self._holders[name]

    # -- the core -----------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        if isinstance(event, LockReturned | LeasesCompleted | LeasesReturned):
            slot = self._world.fleet._state.workers.get(event.worker)
            self._own = frozenset(slot.leases) if slot is not None else frozenset()
        if isinstance(event, StateWanted):
            log = self._log.setdefault(event.key, [None])
            self._loads[event.worker, event.request] = len(log) - 1
        elif isinstance(event, LockWanted):
            slot = self._world.fleet._state.workers.get(event.worker)
            if slot is not None and event.lease in slot.leases:
                until_ns = self._world.now_ns + event.timeout_ns
                self._asked[event.worker, event.request] = (event.name, event.lease, until_ns)

    def handled(self, event: Any, actions: list[Any]) -> None:
        if isinstance(event, LockReturned) and event.lease in self._own:
            self.gave_back(event.lease, event.name)
            self._forget(lambda name, lease: (name, lease) == (event.name, event.lease))
        elif isinstance(event, LeasesCompleted):
            self._over([each.lease for each in event.completions])
        elif isinstance(event, LeasesReturned):
            self._over(event.leases)
        elif isinstance(event, WorkerExited):
            self._forget_worker(event.worker)
        for action in actions:
            if type(action) is Persist:
                self._note_page(event, action)
            elif type(action) is AnswerState:
                self._check_saved(action)
            elif type(action) is AnswerLock:
                self._check_lock(action)
        for name, lease, until_ns in self._asked.values():
            assert self._world.now_ns <= until_ns + LATE_NS, f"lease {lease} waits for {name}"

    def _over(self, leases: list[int]) -> None:
        """Note that those of these leases that were the worker's have ended for the core."""
        for over in self._own.intersection(leases):
            self.let_go(over)
            self._forget(lambda _, lease, over=over: lease == over)

    def _forget(self, over: Any) -> None:
        for asked, (name, lease, _) in list(self._asked.items()):
            if over(name, lease):
                del self._asked[asked]

    def _forget_worker(self, worker: int) -> None:
        for asked, (_, lease, _) in list(self._asked.items()):
            if asked[0] == worker:
                self.let_go(lease)
                del self._asked[asked]

    def _note_page(self, event: Any, page: Persist) -> None:
        for fact in page.facts:
            if fact.kind == "state":
                log = self._log.setdefault(fact.key, [None])
                log.append(fact.value)
                if isinstance(event, StateGiven):
                    self._saves[event.worker, event.request] = (fact.key, len(log) - 1)

    def _check_saved(self, action: AnswerState) -> None:
        key, place = self._saves.pop((action.worker, action.request))
        self._place(key, self._world.store.fact("state", key), place)
        self._safe[key] = max(place, self._safe.get(key, 0))
        self.saves_answered += 1

    def _check_lock(self, action: AnswerLock) -> None:
        name, lease, until_ns = self._asked.pop((action.worker, action.request))
        if not action.taken:
            assert action.error or self._world.now_ns >= until_ns, f"{name} is refused too early"
            return
        self.locks_given += 1
        holder = self._holders.get(name)
        assert holder is None, f"{name} goes to lease {lease} while {holder} has it"
        worker = self._world.workers[action.worker]
        honest = worker.running is not None and worker.running is not worker.lied
        if worker.alive and honest and worker.running.lease == lease:
            self._holders[name] = lease

    def read(self, action: FindState, value: bytes | None) -> None:
        self._place(action.key, value, self._loads.pop((action.worker, action.request)))

    def over(self) -> None:
        """Check that nothing is locked and nobody waits when all work is done."""
        handler_requests = self._world.fleet._handler_requests
        assert not handler_requests.locks, f"still locked: {list(handler_requests.locks)}"
        assert not self._asked, f"never answered: {self._asked}"
        assert not self._saves or not self._world.store.settled, f"never said: {self._saves}"
