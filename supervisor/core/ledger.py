"""What waits for the disk.

Everything one event changes goes into one Persist with one ticket. What may only happen after the
commit (queueing a new task, acknowledging it, telling of a result) is kept here under that ticket
and is done, in order, when the ticket comes back.
"""

from collections import deque
from collections.abc import Callable

from msgspec import Struct

from musterd.ipc.messages import CANCELLED, EXPIRED, FAILED, SUCCEEDED, Failure, Outcome, Rejection
from musterd.supervisor.core.actions import (
    Acknowledge,
    Deliver,
    FinalRecord,
    LiveRecord,
    NewRecord,
    Persist,
)
from musterd.supervisor.core.state import State
from musterd.supervisor.core.task import Task, TaskState


class Pending(Struct, frozen=True, gc=False):
    """What to do once `ticket` is on disk."""

    ticket: int
    stored: list[Task]
    ended: list[Task]
    acknowledgements: list[Acknowledge]


class Ledger:
    def __init__(self, state: State, enqueue: Callable[[Task], None]) -> None:
        self._state = state
        self._enqueue = enqueue
        self._ticket = 0  # the last one given out
        self._persisted = 0  # the last one that came back
        self._pending: deque[Pending] = deque()
        self._open_page()

    def _open_page(self) -> None:
        self._stored: list[Task] = []
        self._ended: list[Task] = []
        self._acknowledgements: list[Acknowledge] = []
        self._added: list[NewRecord] = []
        self._changed: list[LiveRecord] = []
        self._finished: list[FinalRecord] = []

    @property
    def settled(self) -> bool:
        """Whether nothing waits for the disk."""
        return not self._pending

    def add(self, task: Task) -> None:
        """A new task: queued once it is on disk."""
        self._stored.append(task)
        pool = task.route.pool.name
        self._added.append(NewRecord(task.seq, task.spec, task.submitted_wall_ns, pool))

    def acknowledge(self, peer: bytes, request: int, rejected: list[Rejection]) -> None:
        """Tell the submitter, once everything added so far is on disk."""
        self._acknowledgements.append(Acknowledge(peer, request, rejected))

    def change(self, task: Task, *, wait_ns: int = 0, begun: bool = False) -> None:
        """Note the counts of a live task; nothing waits for it."""
        task.begun_recorded = begun
        self._changed.append(
            LiveRecord(task.seq, task.attempt, task.crashes, task.interruptions, wait_ns, begun)
        )

    def finish(
        self,
        task: Task,
        state: str,
        *,
        value: bytes = b"",
        failure: Failure | None = None,
        run_ns: int = 0,
    ) -> None:
        """The one way a task ends. Whoever waits is told once that is on disk."""
        assert task.outcome is None, f"task {task.spec.id} ends twice"
        outcome = Outcome(task.spec.id, state, value, failure, task.attempt, run_ns)
        task.outcome = outcome
        task.state = TaskState.ENDING
        pool = task.route.pool
        pool.live -= 1
        counters = pool.counters
        if state == SUCCEEDED:
            counters.succeeded += 1
        elif state == FAILED:
            counters.failed += 1
        elif state == CANCELLED:
            counters.cancelled += 1
        else:
            assert state == EXPIRED, state
            counters.expired += 1
        self._ended.append(task)
        self._finished.append(
            FinalRecord(task.seq, task.spec, task.submitted_wall_ns, outcome, task.crashes)
        )

    def close_page(self) -> None:
        """End of one event: what it changed becomes one Persist."""
        if self._added or self._changed or self._finished:
            self._ticket += 1
            self._state.out.append(
                Persist(self._ticket, self._added, self._changed, self._finished)
            )
        elif not self._acknowledgements:
            return
        elif self._persisted == self._ticket:
            self._state.told.extend(self._acknowledgements)
            self._acknowledgements = []
            return
        # Without a change of its own an acknowledgement still waits for the ticket before it: a
        # task named in it may be a repeated submit whose first one is not on disk yet.
        self._pending.append(
            Pending(self._ticket, self._stored, self._ended, self._acknowledgements)
        )
        self._open_page()

    def persisted(self, ticket: int) -> None:
        """Everything up to this ticket is on disk."""
        self._persisted = ticket
        deliveries: dict[bytes, list[Outcome]] = {}
        told = self._state.told
        while self._pending and self._pending[0].ticket <= ticket:
            page = self._pending.popleft()
            for task in page.stored:
                self._enqueue(task)
            told.extend(page.acknowledgements)
            for task in page.ended:
                self._tell(task, deliveries)
        for peer, outcomes in deliveries.items():
            told.append(Deliver(peer, outcomes))

    def _tell(self, task: Task, deliveries: dict[bytes, list[Outcome]]) -> None:
        outcome = task.outcome
        assert outcome is not None
        state, id_ = self._state, task.spec.id
        del state.tasks[id_]
        if id_ in state.asked:
            state.ended_since[id_] = None
        if task.peer:
            deliveries.setdefault(task.peer, []).append(outcome)
        for peer in task.watchers or ():
            deliveries.setdefault(peer, []).append(outcome)
