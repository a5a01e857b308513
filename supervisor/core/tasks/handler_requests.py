"""Requests of running handlers: progress, saved state, and locks that all workers share.

States are facts of the store. A save is answered after its commit. A load is put to the store when
everything noted before it is on disk, so that no handler reads a value that a crash takes back.

A session is a state whose key has SESSION_PREFIX before its name. Only the tasks that use the
session may read or write it: there are no more of them at once than its gate lets in (gates.py).

A lock belongs to a lease and lives in memory: the lock ends with its lease, and no worker outlives
the supervisor. Waiting handlers get the lock in the order in which they asked.

What attempts of the cluster ask for is shared by all its nodes (shared_requests.py): for them a
lock must be this node's first. Handlers of a pool that is not clustered share locks with all
handlers of this machine, and with no other one.
"""

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import SESSION_PREFIX, ProgressNote
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import AnswerLock, AnswerState, FindState, TellProgress
from musterd.supervisor.core.model.ledger import STATE, Ledger
from musterd.supervisor.core.model.slot import Slot
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Mark, Task
from musterd.supervisor.core.tasks.claims import Claims
from musterd.supervisor.core.tasks.coalescing import Coalescing
from musterd.supervisor.core.tasks.shared_requests import LOST, UNFIT, SharedLocks, SharedStates

PROGRESS_REPORT_NS = 1 * SECOND_NS  # between two entries of one task in `musterctl events`
# Names locked at once. Running tasks hold them, so this is far beyond any fleet; the limit stops a
# handler that makes up a new name for every page.
LOCKS_MAX = 10_000
WAITERS_MAX = 1_000  # for one lock: as many as a pool may have workers
TRY_NS = 5 * SECOND_NS  # for the cluster's answer to a handler that does not wait for a lock
UNKNOWN = "nobody knows who (the cluster's database does not answer)"


class Waiter(Struct, frozen=True, gc=False):
    worker: int
    request: int
    name: str  # of its slot and task, for messages that tell who has the lock
    until_ns: int
    shared: bool = False  # an attempt of the cluster: the lock must be this node's
    patient: bool = True  # False: it is answered as soon as the cluster has answered


class Lock(Struct):
    lease: int  # 0: nobody on this machine has it; the first waiter waits for the cluster
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
        self._shared_states = SharedStates(state)
        self._shared_locks = SharedLocks(state)
        self.locks: dict[str, Lock] = {}  # that are held, by name
        self._interests: dict[int, Interest] = {}  # by lease
        self._due_ns = 0  # when the first waiter's time is over, 0 for none
        self._forgotten: dict[int, int] = {}  # leases whose session is forgotten, and their workers

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
        if task.claim is not None:
            self._claims.progressed(task, mark)
        for follower in self._coalescing.followers(task):
            follower.progress = mark
            self._tell(follower, mark)
        if now_ns - mark.reported_ns >= PROGRESS_REPORT_NS:
            mark.reported_ns = now_ns
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
        if self._is_refused(event):
            return
        if not self._shares_state(event):
            self._ledger.tell(FindState(event.worker, event.request, STATE, event.key))

    def state_given(self, event: events.StateGiven) -> None:
        if self._is_refused(event):
            return
        if not self._shares_state(event):
            if not (event.key.startswith(SESSION_PREFIX) and event.lease in self._forgotten):
                self._ledger.remember(STATE, event.key, event.value, ttl_ns=event.ttl_ns)
            self._ledger.tell(AnswerState(event.worker, event.request))

    def session_forgotten(self, event: events.SessionForgotten) -> None:
        """Forget a session, also what its users would save at their end."""
        self._ledger.remember(STATE, f"{SESSION_PREFIX}{event.name}", None)
        for slot in self._state.workers.values():
            for lease, task in slot.leases.items():
                if task.spec.session == event.name:
                    self._forgotten[lease] = slot.worker

    def _is_refused(self, event: events.StateWanted | events.StateGiven) -> bool:
        """Refuse the state of a session to a task that does not use the session."""
        if not event.key.startswith(SESSION_PREFIX):
            return False
        found = self._holder(event.worker, event.lease)
        if found is not None and f"{SESSION_PREFIX}{found[1].spec.session}" == event.key:
            return False
        why = "this task was submitted without this session"
        self._state.out.append(AnswerState(event.worker, event.request, why))
        return True

    def _shares_state(self, event: events.StateWanted | events.StateGiven) -> bool:
        """Return whether the state is not of this machine; if so, ask the cluster for it."""
        slot = self._state.workers.get(event.worker)
        if slot is None:
            return True  # it is nobody's
        task = slot.leases.get(event.lease)
        if task is None or task.claim is None:
            # An attempt of the cluster that has ended has no state here.
            return task is None and slot.pool.policy.clustered
        self._shared_states.ask(event, task)
        return True

    def states_told(self, event: events.StatesTold) -> None:
        self._shared_states.answered(event)

    # -- locks --------------------------------------------------------------------------------

    def lock_wanted(self, event: events.LockWanted) -> None:
        found = self._holder(event.worker, event.lease)
        if found is None:
            return
        slot, task = found
        name = f"{slot.name} (task {task.spec.id})"
        lock = self.locks.get(event.name)
        shared = task.claim is not None
        if task.claim is not None and (task.claim.lost or "\0" in event.name):
            self._refuse(event, LOST if task.claim.lost else UNFIT)
        elif lock is None and len(self.locks) + self._shared_locks.leaving >= LOCKS_MAX:
            self._refuse(event, f"{LOCKS_MAX} other locks are held: use fewer names")
        elif lock is None and shared:
            self._ask_cluster(event, name)
        elif lock is None:
            self.locks[event.name] = Lock(event.lease, name)
            self._note(event)
            self._state.out.append(AnswerLock(event.worker, event.request, True))
        elif event.lease == lock.lease or event.lease in lock.waiters:
            self._refuse(event, "this very task has it or waits for it: give it back first")
        elif len(lock.waiters) >= WAITERS_MAX:
            self._refuse(event, f"{WAITERS_MAX} others wait for it: try again later")
        elif not event.timeout_ns:
            self._state.out.append(AnswerLock(event.worker, event.request, False, lock.holder))
        else:
            until_ns = self._state.now_ns + event.timeout_ns
            waiter = Waiter(event.worker, event.request, name, until_ns, shared)
            lock.waiters[event.lease] = waiter
            self._note(event)
            self._look_at(until_ns)

    def _ask_cluster(self, event: events.LockWanted, name: str) -> None:
        """Wait for a lock that nobody on this machine has."""
        until_ns = self._state.now_ns + (event.timeout_ns or TRY_NS)
        patient = event.timeout_ns > 0
        waiter = Waiter(event.worker, event.request, name, until_ns, True, patient)
        lock = self.locks[event.name] = Lock(0, UNKNOWN, {event.lease: waiter})
        self._note(event)
        self._look_at(until_ns)
        self._give(event.name, lock)

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
        for lease in event.leases if self._forgotten else ():
            if self._forgotten.get(lease) == event.worker:
                del self._forgotten[lease]
        if self._shared_states.asks:
            self._shared_states.leases_over(event.worker, event.leases)
        for lease in event.leases if self._interests else ():
            if self._interest(event.worker, lease) is not None:
                self._let_go(lease)

    def _interest(self, worker: int, lease: int) -> Interest | None:
        """Return the locks of a lease, if it is that worker's: no worker speaks for another."""
        interest = self._interests.get(lease)
        return interest if interest is not None and interest.worker == worker else None

    def worker_exited(self, event: events.WorkerExited) -> None:
        self._shared_states.leases_over(event.worker)
        for lease, worker in list(self._forgotten.items()):
            if worker == event.worker:
                del self._forgotten[lease]
        for lease, interest in list(self._interests.items()):
            if interest.worker == event.worker:
                self._let_go(lease)

    def _let_go(self, lease: int) -> None:
        for name in self._interests.pop(lease).names:
            self._release(name, lease)

    def _release(self, name: str, lease: int) -> None:
        lock = self.locks[name]
        if lock.lease == lease:
            lock.lease = 0
            self._give(name, lock, passes=True)
        else:
            del lock.waiters[lease]
            if not lock.lease:
                self._give(name, lock)

    def _give(self, name: str, lock: Lock, *, passes: bool = False) -> None:
        """Give a lock that nobody on this machine has to the first who waits for it.

        `passes`: it was just given back here, so other nodes that wait have it first.
        """
        if not lock.waiters:
            del self.locks[name]
            self._shared_locks.leave(name)
            return
        lease, waiter = next(iter(lock.waiters.items()))
        if not waiter.shared:
            self._shared_locks.leave(name)
        elif not self._shared_locks.is_ours(name, waiter.name, passes=passes):
            return  # locks_told() or membership() goes on
        del lock.waiters[lease]
        lock.lease, lock.holder = lease, waiter.name
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
        for name, lock in list(self.locks.items()):
            for lease, waiter in list(lock.waiters.items()):
                if waiter.until_ns <= now_ns:
                    self._give_up(name, lock, lease)
                else:
                    self._look_at(waiter.until_ns)
            if not lock.lease:
                self._give(name, lock)

    def _give_up(self, name: str, lock: Lock, lease: int) -> None:
        """Tell a handler that it does not get the lock."""
        waiter = lock.waiters.pop(lease)
        self._forget(lease, name)
        answer = AnswerLock(waiter.worker, waiter.request, False, lock.holder)
        self._state.out.append(answer)

    # -- the cluster --------------------------------------------------------------------------

    def locks_told(self, event: events.LocksTold) -> None:
        for name, holder in self._shared_locks.answered(event):
            lock = self.locks[name]
            if lock.lease:
                continue
            if holder:
                lock.holder = holder
                for lease, waiter in list(lock.waiters.items()):
                    if not waiter.patient:
                        self._give_up(name, lock, lease)
            self._give(name, lock)

    def membership(self, event: events.MembershipTold) -> None:
        if self._shared_locks.membership(event):
            for name, lock in list(self.locks.items()):
                if not lock.lease:
                    self._give(name, lock)

    def connected(self, _event: events.ClusterConnected) -> None:
        self._shared_states.connected()
        self._shared_locks.connected()

    def disconnected(self, _event: events.ClusterDisconnected) -> None:
        self._shared_states.disconnected()
        self._shared_locks.disconnected()

    def validate(self) -> None:
        """Check that every lock and every wait belongs to a lease under way."""
        noted = {(lease, name) for lease, each in self._interests.items() for name in each.names}
        for name, lock in self.locks.items():
            assert lock.lease or next(iter(lock.waiters.values())).shared, name
            for lease in (lock.lease, *lock.waiters) if lock.lease else lock.waiters:
                assert (lease, name) in noted, (name, lease)
                noted.discard((lease, name))
        assert not noted, noted
        for lease, worker in self._forgotten.items():
            assert self._holder(worker, lease) is not None, lease
        for lease, interest in self._interests.items():
            assert self._holder(interest.worker, lease) is not None, (lease, interest)
        self._shared_states.validate(lambda *lease: self._holder(*lease) is not None)
        self._shared_locks.validate(self.locks.keys())
