"""Submits, watches and cancellations: everything a client can ask about tasks.

A new task may run while the store writes it: writing is half of what a small task takes. The task
is acknowledged when it is on disk, and its result is delivered when the result is on disk. A task
that ran and was lost with the daemon was therefore never promised: its client submits it again. A
task waits for the disk before it runs in these cases: its place is in the disk queue
(core/disk_queue/queue.py), an earlier task of its pool waits for the disk (the order is kept), it
has a delay or an expiry, it joined another task, or nobody waits for it (a schedule's task).
"""

from msgspec import structs

from musterd.ipc.wire.messages import (
    CANCELLED,
    CRASH,
    FAILED,
    POISON,
    Failure,
    Outcome,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.disk_queue.unwritten import UnwrittenTasks
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Acknowledge, CheckResent, DropRequest, LookUp
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Route, Task, TaskState, add_watcher, same_task
from musterd.supervisor.core.tasks import bulk
from musterd.supervisor.core.tasks.coalescing import Coalescing
from musterd.supervisor.core.tasks.leases import Leases
from musterd.supervisor.core.tasks.pauses import DRAINED
from musterd.supervisor.core.tasks.reception import Reception
from musterd.supervisor.core.tasks.refusals import (
    UNREADABLE,
    elsewhere,
    id_taken,
    not_known,
    not_now,
    unknown_name,
    unknown_task,
)

Late = list[tuple[events.Recovered, Task]]  # recovered tasks that may end at once


class Intake:
    def __init__(
        self,
        state: State,
        ledger: Ledger,
        leases: Leases,
        coalescing: Coalescing,
        *,
        disk_queue: DiskQueue,
        reception: Reception,
        last_seq: int,
    ) -> None:
        self._state = state
        self._reception = reception
        self._ledger = ledger
        self._leases = leases
        self._coalescing = coalescing
        self._disk_queue = disk_queue
        self.unwritten = UnwrittenTasks(state, disk_queue)
        self._late: Late = []
        self._seq = last_seq
        self._cancelled: dict[str, None] = {}  # cancelled before a restart, and not ended by then

    def alive(self, id_: str) -> bool:
        """Return whether the task exists and has not ended."""
        return id_ in self._state.tasks or id_ in self._disk_queue.places

    # -- submits ------------------------------------------------------------------------------

    def submitted(self, event: events.TasksSubmitted) -> None:
        on_disk = self._disk_queue.places
        if not event.resend and bulk.alike(event) and self._take_run(event):
            self._ledger.acknowledge(event.peer, event.request, [], event.tasks)
        elif event.resend or (on_disk and any(spec.id in on_disk for spec in event.tasks)):
            # A repeated submit: only the store knows finished tasks and tasks in the disk queue.
            asked = self._state.asked
            for id_ in _asked_about(event):
                asked[id_] = asked.get(id_, 0) + 1
            self._ask_store(event)
        else:
            self._accept(event, frozenset())

    def _ask_store(self, event: events.TasksSubmitted) -> None:
        if not self.unwritten.hold(event, [spec.id for spec in event.tasks]):
            self._state.out.append(CheckResent(event))

    def go_on(self, _event: object) -> None:
        """Resume the requests that waited until their tasks were on disk."""
        for event in self.unwritten.let_go():
            if isinstance(event, events.CancelRequested):
                self.cancel(event)
            else:
                self._ask_store(event)

    def resend_checked(self, event: events.ResendChecked) -> None:
        on_disk, early = self._disk_queue.places, self._state.cancelled_early
        tasks = event.submitted.tasks
        if any(spec.id in on_disk and spec.id not in event.live for spec in tasks):
            self._ask_store(event.submitted)  # moved to disk after the store looked
            return
        submitted = _without_taken(event.submitted, event.stored)
        specs = submitted.tasks
        cancelled = [spec.id for spec in specs if spec.id in early]
        finished = event.finished | self.ended_since(_asked_about(event.submitted))
        self._accept(submitted, finished, event.live)
        if ids := [spec.id for spec in specs if spec.id in finished]:
            self._state.out.append(LookUp(submitted.peer, ids))
        if cancelled:
            self.cancel(events.CancelRequested(cancelled))

    def resend_unknown(self, event: events.ResendUnknown) -> None:
        """Neither accept nor refuse these tasks: an earlier submit may have been accepted."""
        submitted = event.submitted
        self.ended_since(_asked_about(submitted))
        if submitted.request:
            self._state.out.append(DropRequest(submitted.peer, submitted.request, UNREADABLE))
            return
        rejected = [*submitted.rejected, *map(not_known, submitted.tasks)]
        self._ledger.acknowledge(submitted.peer, 0, rejected, submitted.tasks, at_once=True)

    def peer_lost(self, event: events.PeerLost) -> None:
        """Give up waiting submits of a lost connection: its client sends them again."""
        for submitted in self.unwritten.give_up(event.peer):
            self.resend_unknown(events.ResendUnknown(submitted))

    def ended_since(self, ids: list[str]) -> frozenset[str]:
        """Return the tasks that ended after the store looked: its answer does not know them, and
        the fleet has forgotten them."""
        asked, ended_since = self._state.asked, self._state.ended_since
        ended = frozenset([id_ for id_ in ids if id_ in ended_since])
        for id_ in ids:
            asked[id_] -= 1
            if not asked[id_]:
                del asked[id_]
                ended_since.pop(id_, None)
                self._state.cancelled_early.pop(id_, None)
        return ended

    def _accept(
        self,
        event: events.TasksSubmitted,
        finished: frozenset[str],
        stored: frozenset[str] = frozenset(),
    ) -> None:
        """Accept or refuse each task; `stored` are unfinished ones that the store holds."""
        # Callers on the control socket (request 0) do not submit again to the next daemon.
        if self._state.sockets_survive and event.request:
            return
        tasks, on_disk = self._state.tasks, self._disk_queue.places
        rejected = list(event.rejected)
        routes: dict[str, Route] = {}
        for spec in event.tasks:
            known = tasks.get(spec.id)
            if known is not None:
                if same_task(known.spec, spec):
                    self._watch(known, event.peer)
                else:
                    rejected.append(id_taken(spec))
                continue
            if spec.id in finished:
                continue
            if spec.id in on_disk:  # with the same body: resend_checked() has refused the others
                self._disk_queue.watch(spec.id, event.peer)
                continue
            route = routes.get(spec.name)
            if route is None:
                absent = spec.id not in stored
                found = (absent and self._elsewhere(spec, event)) or self._route(spec)
                if isinstance(found, Rejection):
                    rejected.append(found)
                    continue
                route = routes[spec.name] = found
            rejection = self._take(spec, route, event)
            if rejection is not None:
                rejected.append(rejection)
        if self._reception.keeps(event, rejected):
            return
        refused = len(rejected) - len(event.rejected) == len(event.tasks)
        self._ledger.acknowledge(event.peer, event.request, rejected, event.tasks, at_once=refused)

    def _take_run(self, event: events.TasksSubmitted) -> bool:
        """Take the whole submit at once, if no task of it needs a decision."""
        route = self._elsewhere(event.tasks[0], event) or self._route(event.tasks[0])
        if isinstance(route, Rejection):
            return False
        last_seq = bulk.take(
            self._state, self._ledger, self._disk_queue, event, route=route, last_seq=self._seq
        )
        self._seq = last_seq or self._seq
        return last_seq > 0

    def run(self, spec: TaskSpec, wall_ns: int) -> Rejection | None:
        """Take a task of a schedule, for which nobody waits, or say why not."""
        if self.alive(spec.id):
            return id_taken(spec)
        route = self._route(spec)
        if isinstance(route, Rejection):
            return route
        return self._take(spec, route, events.TasksSubmitted(b"", 0, [spec], wall_ns))

    def has_room(self, spec: TaskSpec) -> bool:
        """Whether the queue of a task has room for retries in bulk; True where there is no queue,
        which reopen() tells better."""
        pool = self._state.pools.get(spec.name.partition(".")[0])
        if pool is None or not pool.is_open:
            return True
        waits = pool.halt == DRAINED or not pool.takes(spec)
        return not waits and pool.queue.takes_in_bulk(pool.held)

    def reopen(self, ended: events.EndedTask, wall_ns: int) -> Rejection | None:
        """Take a finished task again, or say why not. The task runs: no cached result will do."""
        spec = ended.spec
        route = self._route(spec)
        if isinstance(route, Rejection):
            return route
        rejection = self._take(
            spec, route, events.TasksSubmitted(b"", 0, [spec], wall_ns), fresh=True
        )
        if rejection is None:
            self._ledger.reopen(self._state.tasks[spec.id], ended.seq)
        return rejection

    def _take(
        self,
        spec: TaskSpec,
        route: Route,
        event: events.TasksSubmitted,
        *,
        fresh: bool = False,  # accept no remembered result
    ) -> Rejection | None:
        """Create the task, or say why not."""
        state, pool = self._state, route.pool
        if refusal := unknown_name(spec, pool, state):
            return refusal
        if state.store_problem:
            return not_now(spec, pool, state)
        answer: Outcome | None = None
        if spec.key and state.intake_open:
            asks = structs.replace(spec, cache_ns=0, debounce_ns=0) if fresh else spec
            found = self._coalescing.answer_to(asks, route)
            if isinstance(found, Rejection):
                pool.counters.rejected += 1
                return found
            answer = found
        # A task that is answered at once is not queued.
        is_open = state.intake_open and pool.halt != DRAINED
        if answer is None and not (is_open and pool.takes(spec)):
            return not_now(spec, pool, state)
        self._seq += 1
        task = Task(self._seq, spec, route, event.wall_ns, event.peer)
        if spec.expires_ns:
            task.expires_at_ns = state.now_ns + spec.expires_ns
        state.tasks[spec.id] = task
        pool.enter(spec)
        pool.counters.submitted += 1
        self._ledger.add(task)
        if answer is not None:
            task.early = True
            self._ledger.finish_as(task, answer)
            return None
        if spec.key:
            self._coalescing.enter(task, state.now_ns)
        waits = pool.unstored or spec.delay_ns or spec.expires_ns or task.follows or not event.peer
        task.early = not waits and pool.queue.push_early(task, state.now_ns)
        if not task.early:
            pool.unstored += 1
        return None

    def _elsewhere(self, spec: TaskSpec, event: events.TasksSubmitted) -> Rejection | None:
        """Refuse a client's new task that is the cluster's; unknown pools may be of other nodes."""
        if not self._reception.shares or not event.request:
            return None
        pool = self._state.pools.get(spec.name.partition(".")[0])
        if pool is not None and pool.is_open and not pool.policy.clustered:
            return None
        return elsewhere(spec)

    def _route(self, spec: TaskSpec) -> Route | Rejection:
        name = spec.name.partition(".")[0]
        pool = self._state.pools.get(name)
        if pool is not None and not pool.is_open:
            pool = None
        route = pool.route(spec.name) if pool is not None else None
        if route is not None:
            return route
        return unknown_task(spec, pool, self._state)

    # -- recovery -----------------------------------------------------------------------------

    def recovered(self, event: events.TasksRecovered) -> None:
        """Queue the tasks that the store held. They are on disk, so none waits for a commit."""
        self._state.recovering = event.more
        self.take_back(event.tasks, self._late)
        if not event.more:
            late, self._late = self._late, []
            self.take_back_late(late)

    def take_back(self, tasks: list[events.Recovered], late: Late) -> None:
        """Queue these tasks again; add those that may end at once to `late` instead."""
        for old in tasks:
            task = self._restore(old)
            if task is None:
                continue
            if old.begun or task.cancelled or self._leases.expired(task):
                late.append((old, task))
            else:
                self._leases.admit(task, old.ready_ns)

    def take_back_late(self, late: Late) -> None:
        """Queue or end late tasks, once all tasks are there: joined tasks end with their leader."""
        for old, task in reversed(late):
            if task.outcome is not None:
                continue
            if task.cancelled:
                self._ledger.finish(task, CANCELLED)
            elif not old.begun or self._survives(task):
                self._leases.admit(task, old.ready_ns, first=True)

    def cancelled_before(self, facts: list[tuple[str, bytes]]) -> None:
        """Note tasks that were cancelled and had not ended; called before they are recovered."""
        self._cancelled = {id_: None for id_, _ in facts}

    def _restore(self, old: events.Recovered) -> Task | None:
        pool = self._state.pools.get(old.spec.name.partition(".")[0])
        route = pool.route(old.spec.name) if pool is not None else None
        if pool is None or route is None:
            # The task stays on disk: the next configuration may bring its pool back.
            self._state.report(
                "task.stranded",
                "warning",
                reason=f"no pool for '{old.spec.name}' (task {old.spec.id})",
            )
            return None
        task = Task(
            old.seq,
            old.spec,
            route,
            old.submitted_wall_ns,
            b"",
            attempt=old.attempt,
            crashes=old.crashes,
            interruptions=old.interruptions,
            expires_at_ns=old.expires_at_ns,
            earned=bool(old.attempt or old.crashes or old.interruptions or old.begun),
        )
        if old.spec.id in self._cancelled:
            task.cancelled = task.cancel_noted = True
        self._state.tasks[old.spec.id] = task
        pool.enter(old.spec)
        for peer in self._state.stranded.pop(old.spec.id, ()):
            self._watch(task, peer)
        if old.spec.key:
            self._coalescing.enter(task, since_ns=0)
        return task

    def _survives(self, task: Task) -> bool:
        """Return whether a task that ran when the daemon died may run again."""
        self._ledger.failed(task, Failure(CRASH, message="the daemon died while it ran"), "")
        task.attempt -= 1  # the interrupted run is no attempt
        task.crashes += 1
        if task.crashes < task.route.pool.policy.max_crashes:
            self._ledger.change(task)
            return True
        task.attempt += task.crashes  # people are shown how often the task ran
        why = f"it was running each of the {task.crashes} times its worker or the daemon died"
        pool = task.route.pool
        self._state.report("task.quarantined", "error", pool=pool, task=task, reason=why)
        self._ledger.finish(task, FAILED, failure=Failure(CRASH, POISON, f"quarantined: {why}"))
        return False

    # -- watching and cancelling --------------------------------------------------------------

    def _watch(self, task: Task, peer: bytes) -> None:
        if not peer or peer == task.peer:
            return
        if not task.peer:
            task.peer = peer
            return
        if task.watchers is None:
            task.watchers = {}
        add_watcher(task.watchers, peer)

    def watched(self, event: events.TasksWatched) -> None:
        unknown = []
        for id_ in event.ids:
            task = self._state.tasks.get(id_)
            if task is None and id_ in self._disk_queue.places:
                self._disk_queue.watch(id_, event.peer)
            elif task is None:
                unknown.append(id_)
            else:
                self._watch(task, event.peer)
        if unknown:
            self._state.out.append(LookUp(event.peer, unknown))

    def disk_tasks_read(self, event: events.DiskTasksRead) -> None:
        rest = self._disk_queue.read(event)
        if rest is not None:
            self.cancel(rest)

    def cancel(self, event: events.CancelRequested) -> None:
        on_disk = [id_ for id_ in event.ids if id_ in self._disk_queue.places]
        if on_disk:
            asked = structs.replace(event, ids=on_disk)
            if not self.unwritten.hold(asked, on_disk):
                self._disk_queue.cancel(asked)
        for id_ in event.ids:
            task = self._state.tasks.get(id_)
            if task is None and id_ in self._state.asked:
                # The cancel follows a repeated submit that still waits for the store's answer.
                self._state.cancelled_early[id_] = None
                continue
            if task is None or task.cancelled or task.state == TaskState.ENDING:
                continue
            task.cancelled = True
            if task.state == TaskState.LEASED:
                self._ledger.note_cancel(task)
                self._leases.interrupt(task)
            elif task.state == TaskState.NEW:  # the task ends when it is on disk
                self._ledger.note_cancel(task)
            else:
                self._leases.withdraw(task, CANCELLED)
        if event.peer and not on_disk:  # else acknowledged when those are read
            self._ledger.tell(Acknowledge(event.peer, event.request, []))


def _without_taken(
    submitted: events.TasksSubmitted, stored: dict[str, TaskSpec]
) -> events.TasksSubmitted:
    """Reject the tasks whose id belongs to a stored task with another body."""
    taken = [spec for spec in submitted.tasks if not same_task(stored.get(spec.id, spec), spec)]
    if not taken:
        return submitted
    ids = {spec.id for spec in taken}
    return structs.replace(
        submitted,
        tasks=[spec for spec in submitted.tasks if spec.id not in ids],
        rejected=[*submitted.rejected, *map(id_taken, taken)],
    )


def _asked_about(submitted: events.TasksSubmitted) -> list[str]:
    """Return all ids of a repeated submit, refused ones included."""
    ids = [spec.id for spec in submitted.tasks]
    return ids + [rejection.id for rejection in submitted.rejected]
