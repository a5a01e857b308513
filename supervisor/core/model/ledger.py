"""The ledger: what waits for the disk.

All changes of one event go into one Persist with one ticket (into several, if the event ends tasks
with more than PAGE_BYTES_MAX of results). What may only happen after the commit (acknowledging a
new task, queueing a task that has to wait for the disk, telling of a result) is kept here under
that ticket, and happens in order when the ticket comes back.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from musterd.ipc.resilience.policy import MICROSECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import CANCEL as CANCEL_FAILURE
from musterd.ipc.wire.messages import (
    CANCELLED,
    EXPIRED,
    FAILED,
    INVALID,
    SUCCEEDED,
    Failure,
    Outcome,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    Acknowledge,
    Action,
    AttemptRecord,
    BulkRecord,
    Deliver,
    Fact,
    FinalRecord,
    LiveRecord,
    NewRecord,
    Persist,
    ReopenRecord,
)
from musterd.supervisor.core.model.clock import CLOCK
from musterd.supervisor.core.model.hooks import Hooks
from musterd.supervisor.core.model.lanes import Place
from musterd.supervisor.core.model.runs import RUN_PREFIX
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Route, Task, TaskState

if TYPE_CHECKING:
    from musterd.supervisor.core.model.pool import Pool

# A result that many tasks share is written for each of them; neither a page nor a transaction may
# grow with their number. A page cut here loses nothing: a task whose end is not written runs again.
PAGE_BYTES_MAX = 16 * 1024 * 1024
# A few new tasks that run already usually end before a commit would: their page may wait for the
# page with their ends, which halves the disk work for a small task that comes alone.
PATIENT_TASKS_MAX = 8
PATIENT_COST_NS = 100 * MICROSECOND_NS
# Kinds of facts.
STATE = "state"  # what handlers save by ctx.state
CANCEL = "cancel"  # a task that has not ended was cancelled
# The task ends within seconds, or at the next start; kept so long for tasks of removed pools.
CANCEL_TTL_NS = 30 * 24 * 3600 * SECOND_NS
UNPAID = "unpaid"  # the retry budget has not paid for the next attempt of a task


class UnwrittenBulk(Struct, frozen=True, gc=False):
    """Tasks of one submit that joined the disk queue before they are on disk."""

    route: Route
    place: Place
    new: BulkRecord
    size: int  # bytes that they take in memory


class Receipt(Struct, frozen=True, gc=False):
    """An acknowledgement that waits for the disk, and what it stands for.

    By ids: what a repeated submit has brought is not kept beside the tasks that are there already.
    """

    answer: Acknowledge
    ids: list[str]


class Pending(Struct, frozen=True, gc=False):
    """What to do once `ticket` is on disk."""

    ticket: int
    stored: list[Task]
    ended: list[Task]
    acknowledgements: list[Action]
    receipts: list[Receipt]  # of the acknowledgements that answer a submit
    unwritten: list[UnwrittenBulk]


class Ledger:
    def __init__(self, state: State, hooks: Hooks) -> None:
        self._state = state
        self._hooks = hooks
        self.last_ticket = 0  # of the last page that the store got
        self.persisted_ticket = 0  # of the last page that is on disk
        self.pending: deque[Pending] = deque()
        self._open_page()

    def _open_page(self) -> None:
        self._stored: list[Task] = []
        self._ended: list[Task] = []
        self._acknowledgements: list[Action] = []
        self._receipts: list[Receipt] = []
        self._unwritten: list[UnwrittenBulk] = []
        self._added: list[NewRecord] = []
        self._bulk: list[BulkRecord] = []
        self._changed: list[LiveRecord] = []
        self._finished: list[FinalRecord] = []
        self._finished_bytes = 0
        self._facts: list[Fact] = []
        self._failed: list[AttemptRecord] = []
        self._reopened: list[ReopenRecord] = []

    @property
    def settled(self) -> bool:
        """Whether nothing waits for the disk."""
        return not self.pending

    def unstored(self) -> dict[str, int]:
        """Count new tasks that wait for the disk, by pool; for validate()."""
        counts: dict[str, int] = {}
        for page in self.pending:
            for task in page.stored:
                if not task.early:
                    pool = task.route.pool.name
                    counts[pool] = counts.get(pool, 0) + 1
        return counts

    def add(self, task: Task) -> None:
        """Add a new task, which is queued once it is on disk."""
        self._stored.append(task)
        pool = task.route.pool.name
        self._added.append(NewRecord(task.seq, task.spec, task.submitted_wall_ns, pool))

    def add_many(self, tasks: list[Task], records: list[NewRecord]) -> None:
        """Add many new tasks, with their records."""
        self._stored += tasks
        self._added += records

    def add_unwritten(self, bulk: UnwrittenBulk) -> None:
        """Add new tasks that are in the disk queue already."""
        self._unwritten.append(bulk)
        self._bulk.append(bulk.new)

    def is_unwritten(self, pool: Pool) -> bool:
        """Whether tasks in the disk queue of a pool are still being written."""
        return any(bulk.route.pool is pool for page in self.pending for bulk in page.unwritten)

    def unwritten_bytes(self) -> Counter[str]:
        """Sum the bytes of tasks that are still being written, by pool; for validate()."""
        sizes: Counter[str] = Counter()
        for page in self.pending:
            for bulk in page.unwritten:
                sizes[bulk.route.pool.name] += bulk.size
        return sizes

    def reopen(self, task: Task, former_seq: int) -> None:
        """Let a new task replace the finished one of its id."""
        self._reopened.append(ReopenRecord(task.spec.id, former_seq, task.seq))
        if task.spec.id.startswith(RUN_PREFIX):
            self._hooks.schedule_retried(task.spec.id, True)

    def acknowledge(
        self,
        peer: bytes,
        request: int,
        rejected: list[Rejection],
        tasks: list[TaskSpec],
        *,
        at_once: bool = False,
    ) -> None:
        """Acknowledge a submit once everything added so far is on disk.

        `at_once` where nothing was accepted: a refusal need not wait for a disk that may be broken.
        """
        answer = Acknowledge(peer, request, rejected)
        if at_once:
            self._state.out.append(answer)
            return
        self._acknowledgements.append(answer)
        self._receipts.append(Receipt(answer, [spec.id for spec in tasks]))

    def tell(self, action: Action) -> None:
        """Carry out an action once everything noted so far is on disk."""
        self._acknowledgements.append(action)

    def change(self, task: Task, *, wait_ns: int = 0, begun: bool = False) -> None:
        """Note the counts of a live task; nothing waits for it."""
        task.begun_recorded = begun
        if task.claim is not None:
            if begun:
                self._hooks.claim_begun(task)
            return
        self._changed.append(
            LiveRecord(task.seq, task.attempt, task.crashes, task.interruptions, wait_ns, begun)
        )

    def failed(self, task: Task, failure: Failure, worker: str) -> None:
        """Note the failure of the attempt that has just ended, unless we stopped it."""
        if failure.kind != CANCEL_FAILURE and task.claim is None:
            ordinal = task.attempt + task.crashes
            self._failed.append(AttemptRecord(task.seq, ordinal, task.attempt, worker, failure))

    def note_cancel(self, task: Task) -> None:
        """Note that a task is to end as cancelled, also after a restart: the end takes a moment."""
        task.cancel_noted = True
        self.remember(CANCEL, task.spec.id, b"", ttl_ns=CANCEL_TTL_NS)

    def forget_cancel(self, task: Task) -> None:
        if task.cancel_noted:
            task.cancel_noted = False
            self.remember(CANCEL, task.spec.id, None)

    def settle_debt(self, task: Task) -> None:
        """Forget the debt of a task: its next attempt is paid for, or it will have none."""
        if task.debt is not None:
            task.debt.debtors.remove(task)
            task.debt = None
            self.remember(UNPAID, task.spec.id, None)

    def clock_read(self, event: events.ClockRead) -> None:
        if event.anchor:
            self.remember(CLOCK, "", event.anchor)

    def remember(self, kind: str, key: str, value: bytes | None, *, ttl_ns: int = 0) -> None:
        """Note a fact, or forget it if `value` is None; nothing waits for it."""
        self._facts.append(Fact(kind, key, value, ttl_ns))

    def finish(
        self,
        task: Task,
        state: str,
        *,
        value: bytes = b"",
        failure: Failure | None = None,
        run_ns: int = 0,
        stale: bool = False,
        fallback: bool = False,
    ) -> None:
        """End a task, in the one way there is. Clients are told once the end is on disk.

        An attempt of the cluster is not on disk: the end of its task is the engine's.
        """
        if task.claim is not None:
            self._hooks.claim_ended(task, state, failure, run_ns)
            return
        spec = task.spec
        own = Outcome(
            spec.id, state, value, failure, task.attempt, run_ns, stale, fallback=fallback
        )
        self._end(task, self._fall_back(task, own) if state == FAILED else own)
        if spec.key or task.wants_fallback:
            self._hooks.ended(task, own)

    def _fall_back(self, task: Task, own: Outcome) -> Outcome:
        """Return the outcome of a task that has failed for good: its last good result, else the
        fallback of its submit, if it asks for one. The outcome keeps the error.

        Invalid arguments are the caller's mistake, which a fallback would hide.
        """
        failure = own.failure
        if task.fallback_on != "failure" or (failure is not None and failure.kind == INVALID):
            return own
        good, brought = self._hooks.last_good(task.spec), task.spec.fallback
        value = good if good is not None else brought
        if value is None:
            return own
        what = "its last good result" if good is not None else "its fallback value"
        why = f"{failure.type or failure.kind}: {failure.message}" if failure is not None else ""
        reason = f"the task failed and ends with {what}: {why}"
        self._state.report(
            "task.fallback", "warning", pool=task.route.pool, task=task, reason=reason
        )
        return structs.replace(
            own, state=SUCCEEDED, value=value, stale=good is not None, fallback=good is None
        )

    def succeed(self, task: Task, value: bytes, run_ns: int) -> None:
        """End a task that has succeeded: a faster finish() where the end concerns nobody else."""
        spec = task.spec
        if (
            spec.key
            or spec.fallback is not None
            or spec.on_open
            or spec.fallback_on
            or task.route.fallback_on
            or task.gate is not None
            or task.cancel_noted
            or task.debt is not None
            or spec.id[0] == RUN_PREFIX
        ):
            self.finish(task, SUCCEEDED, value=value, run_ns=run_ns)
            return
        assert task.outcome is None, f"task {spec.id} ends twice"
        outcome = Outcome(spec.id, SUCCEEDED, value, None, task.attempt, run_ns)
        task.outcome = outcome
        task.state = TaskState.ENDING
        pool = task.route.pool
        pool.leave(spec)
        pool.counters.succeeded += 1
        self._ended.append(task)
        self._finished.append(
            FinalRecord(task.seq, spec, task.submitted_wall_ns, outcome, task.crashes)
        )
        self._finished_bytes += len(value)
        if self._finished_bytes > PAGE_BYTES_MAX:
            self.close_page()

    def finish_as(self, task: Task, other: Outcome) -> None:
        """End a task with the outcome of another task of its key."""
        own = structs.replace(other, id=task.spec.id, cached=True)
        self._end(task, self._fall_back(task, own) if own.state == FAILED else own)

    def _end(self, task: Task, outcome: Outcome) -> None:
        assert task.outcome is None, f"task {task.spec.id} ends twice"
        task.outcome = outcome
        task.state = TaskState.ENDING
        spec, pool = task.spec, task.route.pool
        pool.leave(spec)
        counters = pool.counters
        state = outcome.state
        if state == SUCCEEDED:
            counters.succeeded += 1
            counters.fallbacks += outcome.stale or outcome.fallback
        elif state == FAILED:
            counters.failed += 1
        elif state == CANCELLED:
            counters.cancelled += 1
        else:
            assert state == EXPIRED, state
            counters.expired += 1
        self._ended.append(task)
        if spec.session:
            self._hooks.session_ended(task, outcome)
        if task.cancel_noted:
            self.forget_cancel(task)
        if task.debt is not None:
            self.settle_debt(task)
        self._finished.append(
            FinalRecord(task.seq, spec, task.submitted_wall_ns, outcome, task.crashes)
        )
        if spec.id[0] == RUN_PREFIX:
            self._hooks.schedule_ended(task)
        self._finished_bytes += len(outcome.value)
        if self._finished_bytes > PAGE_BYTES_MAX:
            self.close_page()

    def close_page(self) -> None:
        """Turn all changes of one event into one Persist."""
        if self._added or self._bulk or self._changed or self._finished or self._facts:
            self.last_ticket += 1
            stored = self._stored
            patient = 0 < len(stored) <= PATIENT_TASKS_MAX and self._ends_follow(stored)
            self._state.out.append(
                Persist(
                    self.last_ticket,
                    self._added,
                    self._changed,
                    self._finished,
                    self._facts,
                    self._failed,
                    self._reopened,
                    patient,
                    self._bulk,
                )
            )
        elif not self._acknowledgements:
            return
        elif self.persisted_ticket == self.last_ticket:
            self._state.out.extend(self._acknowledgements)
            self._acknowledgements = []
            self._receipts = []
            return
        # An acknowledgement without a change still waits for the last ticket: it may name a task
        # that was submitted twice, and whose first submit is not on disk yet.
        self.pending.append(
            Pending(
                self.last_ticket,
                self._stored,
                self._ended,
                self._acknowledgements,
                self._receipts,
                self._unwritten,
            )
        )
        self._open_page()

    def _ends_follow(self, tasks: list[Task]) -> bool:
        """Whether the page holds only these new tasks, and all of them will end at once."""
        return not (self._bulk or self._changed or self._finished or self._facts) and all(
            task.state == TaskState.LEASED and task.route.cost_ns <= PATIENT_COST_NS
            for task in tasks
        )

    def persisted(self, ticket: int) -> None:
        """Do what waited for this ticket and those before it."""
        self.persisted_ticket = ticket
        deliveries: dict[bytes, list[Outcome]] = {}
        out = self._state.out
        while self.pending and self.pending[0].ticket <= ticket:
            page = self.pending.popleft()
            if page.stored:
                self._hooks.stored(page.stored)
            if page.unwritten:
                self._hooks.written(page.unwritten)
            out.extend(page.acknowledgements)
            for task in page.ended:
                self._tell(task, deliveries)
        for peer, outcomes in deliveries.items():
            out.append(Deliver(peer, outcomes))

    def _tell(self, task: Task, deliveries: dict[bytes, list[Outcome]]) -> None:
        outcome = task.outcome
        assert outcome is not None
        state, id_, peer = self._state, outcome.id, task.peer
        del state.tasks[id_]
        if id_ in state.asked:
            state.ended_since[id_] = None
        if peer in deliveries:
            deliveries[peer].append(outcome)
        elif peer:
            deliveries[peer] = [outcome]
        for peer in task.watchers or ():
            deliveries.setdefault(peer, []).append(outcome)
