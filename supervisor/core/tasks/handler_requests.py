"""Requests of running handlers: progress, saved state, and locks that all workers share.

States are facts of the store. A save is answered after its commit. A load is put to the store when
everything noted before it is on disk, so that no handler reads a value that a crash takes back.

A lock belongs to a lease and lives in memory: the lock ends with its lease, and no worker outlives
the supervisor. Waiting handlers get the lock in the order in which they asked.
"""

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import ProgressNote
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import AnswerLock, AnswerState, FindState, TellProgress
from musterd.supervisor.core.model.ledger import STATE, Ledger
from musterd.supervisor.core.model.slot import Slot
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Mark, Task
from musterd.supervisor.core.tasks.claims import Claims
from musterd.supervisor.core.tasks.coalescing import Coalescing

PROGRESS_REPORT_NS = 1 * SECOND_NS  # between two entries of one task in `musterctl events`
# Names locked at once. Running tasks hold them, so this is far beyond any fleet; the limit stops a
# handler that makes up a new name for every page.
LOCKS_MAX = 10_000
# What is kept on one machine would mislead handlers that run on several.
NOT_SHARED = "pools of a cluster have no state and no locks that handlers share yet"
WAITERS_MAX = 1_000  # for one lock: as many as a pool may have workers


class Waiter(Struct, frozen=True, gc=False):
    worker: int
    request: int
    name: str  # of its slot and task, for messages that tell who has the lock
    until_ns: int


class Lock(Struct):
    lease: int
    holder: str
    waiters: dict[int, Waiter] = {}  # by lease, in the order of the requests


class Interest(Struct, frozen=True):
    """The locks that a lease has or waits for."""

    worker: int
    names: dict[str, None]


class HandlerRequests:
    def __init__(
        self, state: State, ledger: Ledger, coalescing: Coalescing, claims: Claims
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._coalescing = coalescing
        self._claims = claims
        self.locks: dict[str, Lock] = {}  # that are held, by name
        self._interests: dict[int, Interest] = {}  # by lease
        self._due_ns = 0  # when the first waiter's time is over, 0 for none

    def _holder(self, worker: int, lease: int) -> tuple[Slot, Task] | None:
        """Return the slot and task of a lease under way; None if the lease has ended."""
        slot = self._state.workers.get(worker)
        task = slot.leases.get(lease) if slot is not None else None
        return None if slot is None or task is None else (slot, task)

    # -- progress -----------------------------------------------------------------------------

    def progressed(self, event: events.ProgressMade) -> None:
        found = self._holder(event.worker, event.lease)
        if found is None:
            return
        slot, task = found
        now_ns = self._state.now_ns
        mark = task.progress
        if mark is None:
            mark = task.progress = Mark(now_ns - PROGRESS_REPORT_NS)
        mark.fraction, mark.text = event.fraction, event.text
        self._tell(task, mark)
        for follower in self._coalescing.followers(task):
            follower.progress = mark
            self._tell(follower, mark)
        if now_ns - mark.reported_ns >= PROGRESS_REPORT_NS:
            mark.reported_ns = now_ns
            if task.claim is not None:
                self._claims.progressed(task, mark)
            reason = f"{event.fraction:.0%} {event.text}".rstrip()
            self._state.report("task.progress", "debug", slot=slot, task=task, reason=reason)

    def _tell(self, task: Task, mark: Mark) -> None:
        peers = [task.peer] if task.peer else []
        peers += task.watchers or ()
        if peers:
            note = ProgressNote(task.spec.id, mark.fraction, mark.text)
            self._state.out.append(TellProgress(peers, note))

    def watched(self, event: events.TasksWatched) -> None:
        """Send late watchers the latest progress."""
        for id_ in event.ids:
            task = self._state.tasks.get(id_)
            if task is not None and task.progress is not None:
                note = ProgressNote(id_, task.progress.fraction, task.progress.text)
                self._state.out.append(TellProgress([event.peer], note))

    def looked_up(self, event: events.LookedUp) -> None:
        """Tell the progress of those that are alive after all."""
        ids = [*event.absent, *(id_ for id_, _ in event.unfinished)]
        self.watched(events.TasksWatched(event.peer, ids))

    # -- state --------------------------------------------------------------------------------

    def state_wanted(self, event: events.StateWanted) -> None:
        if self._keeps_state(event):
            self._ledger.tell(FindState(event.worker, event.request, STATE, event.key))

    def state_given(self, event: events.StateGiven) -> None:
        if self._keeps_state(event):
            self._ledger.remember(STATE, event.key, event.value, ttl_ns=event.ttl_ns)
            self._ledger.tell(AnswerState(event.worker, event.request))

    def _keeps_state(self, event: events.StateWanted | events.StateGiven) -> bool:
        """Return whether the state of this worker is ours to keep; refuse it otherwise."""
        slot = self._state.workers.get(event.worker)
        if slot is not None and slot.pool.policy.clustered:
            self._state.out.append(AnswerState(event.worker, event.request, NOT_SHARED))
        return slot is not None and not slot.pool.policy.clustered

    # -- locks --------------------------------------------------------------------------------

    def lock_wanted(self, event: events.LockWanted) -> None:
        found = self._holder(event.worker, event.lease)
        if found is None:
            return
        slot, task = found
        name = f"{slot.name} (task {task.spec.id})"
        lock = self.locks.get(event.name)
        if slot.pool.policy.clustered:
            self._refuse(event, NOT_SHARED)
        elif lock is None and len(self.locks) < LOCKS_MAX:
            self.locks[event.name] = Lock(event.lease, name)
            self._note(event)
            self._state.out.append(AnswerLock(event.worker, event.request, True))
        elif lock is None:
            self._refuse(event, f"{LOCKS_MAX} other locks are held: use fewer names")
        elif event.lease == lock.lease or event.lease in lock.waiters:
            self._refuse(event, "this very task has it or waits for it: give it back first")
        elif len(lock.waiters) >= WAITERS_MAX:
            self._refuse(event, f"{WAITERS_MAX} others wait for it: try again later")
        elif not event.timeout_ns:
            self._state.out.append(AnswerLock(event.worker, event.request, False, lock.holder))
        else:
            until_ns = self._state.now_ns + event.timeout_ns
            lock.waiters[event.lease] = Waiter(event.worker, event.request, name, until_ns)
            self._note(event)
            self._look_at(until_ns)

    def _refuse(self, event: events.LockWanted, why: str) -> None:
        self._state.out.append(AnswerLock(event.worker, event.request, False, error=why))

    def _note(self, event: events.LockWanted) -> None:
        interest = self._interests.get(event.lease)
        if interest is None:
            interest = self._interests[event.lease] = Interest(event.worker, {})
        interest.names[event.name] = None

    def lock_returned(self, event: events.LockReturned) -> None:
        interest = self._interest(event.worker, event.lease)
        if interest is not None and event.name in interest.names:
            self._forget(event.lease, event.name)
            self._release(event.name, event.lease)

    def leases_over(self, event: events.LeasesCompleted | events.LeasesReturned) -> None:
        """Release the locks of leases that have ended or were given back."""
        for lease in event.leases if self._interests else ():
            if self._interest(event.worker, lease) is not None:
                self._let_go(lease)

    def _interest(self, worker: int, lease: int) -> Interest | None:
        """Return the locks of a lease, if it is that worker's: no worker speaks for another."""
        interest = self._interests.get(lease)
        return interest if interest is not None and interest.worker == worker else None

    def worker_exited(self, event: events.WorkerExited) -> None:
        for lease, interest in list(self._interests.items()):
            if interest.worker == event.worker:
                self._let_go(lease)

    def _let_go(self, lease: int) -> None:
        for name in self._interests.pop(lease).names:
            self._release(name, lease)

    def _release(self, name: str, lease: int) -> None:
        lock = self.locks[name]
        if lock.lease != lease:
            del lock.waiters[lease]
            return
        if not lock.waiters:
            del self.locks[name]
            return
        lock.lease = next(iter(lock.waiters))
        waiter = lock.waiters.pop(lock.lease)
        lock.holder = waiter.name
        self._state.out.append(AnswerLock(waiter.worker, waiter.request, True))

    def _forget(self, lease: int, name: str) -> None:
        names = self._interests[lease].names
        del names[name]
        if not names:
            del self._interests[lease]

    def _look_at(self, when_ns: int) -> None:
        """Set one timer for all waiters: most get their lock long before their time is over."""
        if not self._due_ns or when_ns < self._due_ns:
            self._due_ns = when_ns
            self._state.timers.at(when_ns, self._overdue, when_ns)

    def _overdue(self, when_ns: int) -> None:
        if when_ns != self._due_ns:
            return  # a sooner timer took its place
        self._due_ns = 0
        now_ns = self._state.now_ns
        for name, lock in self.locks.items():
            for lease, waiter in list(lock.waiters.items()):
                if waiter.until_ns <= now_ns:
                    del lock.waiters[lease]
                    self._forget(lease, name)
                    answer = AnswerLock(waiter.worker, waiter.request, False, lock.holder)
                    self._state.out.append(answer)
                else:
                    self._look_at(waiter.until_ns)

    def validate(self) -> None:
        """Check that every lock and every wait belongs to a lease under way."""
        noted = {(lease, name) for lease, each in self._interests.items() for name in each.names}
        for name, lock in self.locks.items():
            for lease in (lock.lease, *lock.waiters):
                assert (lease, name) in noted, (name, lease)
                noted.discard((lease, name))
        assert not noted, noted
        for lease, interest in self._interests.items():
            assert self._holder(interest.worker, lease) is not None, (lease, interest)
