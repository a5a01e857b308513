"""Leases: give tasks to workers and watch their deadlines.

A worker that runs long tasks holds one lease at a time, so that an urgent task waits for no
prefetched one. Tiny tasks come in a window that holds about WINDOW_NS of measured work: enough to
keep the worker busy while messages travel, little enough not to disturb priorities. A window that
makes no progress for STALL_NS is recalled: the worker gives back the tasks it has not begun.

A worker with a `width` (the pool's `concurrency`) runs several tasks at once. Such a worker is
given no more tasks than its width, so each task begins on arrival, and none waits in the worker or
is recalled. Workers with the least to do come first. A task that ran beside others when their
worker was lost runs alone from then on (endings.py): it waits for an idle worker.

A task's hard deadline counts from the moment its handler began. Only the worker's scoreboard knows
that moment, so the board is read whenever a deadline could have passed.
"""

from collections.abc import Callable

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import CANCELLED, EXPIRED, NOT_GIVEN, Failure, Lease
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    AssignLeases,
    CancelRunning,
    KillWorker,
    ReadBoard,
    RecallLeases,
)
from musterd.supervisor.core.model.hooks import Hooks
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Cause, Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Route, Task, TaskState
from musterd.supervisor.core.model.timers import TaskTimers

WINDOW_NS = 5 * MILLISECOND_NS
WINDOW_MAX = 256  # leases a worker holds at most, however tiny
STALL_NS = 20 * MILLISECOND_NS
HARD_GRACE_NS = 5 * SECOND_NS  # from the soft timeout inside to the kill from outside
CANCEL_GRACE_NS = 5 * SECOND_NS  # from the interruption of a cancelled task to the kill
DEBUGGED_AGAIN_NS = 1 * SECOND_NS  # nobody knows how long a person debugs
BOARD_AGAIN_NS = 1 * SECOND_NS  # read the board again when it shows nothing running
IDLE_LOOKS_MAX = 5  # after this many reads a worker that has leases and runs none is stuck


RETURNED_AND_RUN = "it runs a task that it has given back, which others may run by now"


class Leases:
    def __init__(self, state: State, ledger: Ledger, hooks: Hooks) -> None:
        self._state = state
        self._ledger = ledger
        self._last_lease = 0
        self._timers = TaskTimers(state.timers, state.tasks)
        self._hooks = hooks

    # -- into the queue and out of it ---------------------------------------------------------

    def admit(self, task: Task, ready_ns: int, *, first: bool = False) -> None:
        """Queue a task now, or when it becomes ready; a joined task waits for its leader.

        `first` puts the task before all others of its lane, as it ran before.
        """
        if task.expires_at_ns:
            self._timers.at(task.expires_at_ns, self._expire, task)
        if self.expired(task):  # on its way to the disk, or while the daemon was down
            self._ledger.finish(task, EXPIRED)
        elif task.follows:
            task.state = TaskState.JOINED
            task.queued_ns = ready_ns
            task.route.pool.waiting += 1
        elif task.attempt and self._hooks.owes(task, ready_ns):
            return  # the task waits until its retry can be paid for
        elif first and ready_ns <= self._state.now_ns:
            task.queued_ns = self._state.now_ns
            task.route.pool.queue.push_front(task)
        else:
            self.enqueue(task, ready_ns)

    def stored(self, tasks: list[Task]) -> None:
        """Queue new tasks that have waited to be on disk."""
        now_ns = self._state.now_ns
        run: list[Task] = []  # tasks of one kind, to be queued in one go
        for task in tasks:
            if task.early:
                task.early = False
                continue
            route, spec = task.route, task.spec
            route.pool.unstored -= 1
            if task.outcome is not None:
                continue  # ended with the result of another task meanwhile
            plain = not (task.cancelled or task.expires_at_ns or spec.delay_ns or spec.key)
            if run and not (plain and route is run[0].route and spec.priority == run[0].priority):
                run[0].route.pool.queue.push_many(run, now_ns)
                run = []
            if plain and not (spec.target or spec.policy or spec.session):
                run.append(task)
            elif task.cancelled:
                self._ledger.finish(task, CANCELLED)
            else:
                self.admit(task, now_ns + spec.delay_ns if spec.delay_ns else 0)
        if run:
            run[0].route.pool.queue.push_many(run, now_ns)

    def enqueue(self, task: Task, ready_ns: int) -> None:
        now_ns = self._state.now_ns
        if ready_ns > now_ns:
            self.wait(task, ready_ns)
        else:
            task.route.pool.queue.push(task, now_ns)

    def enqueue_claimed(self, task: Task) -> None:
        """Queue an attempt of the cluster."""
        if task.expires_at_ns:
            self._timers.at(task.expires_at_ns, self._expire, task)
        task.route.pool.queue.push_claimed(task, self._state.now_ns)

    def wait(self, task: Task, ready_ns: int) -> None:
        task.state = TaskState.WAITING
        task.queued_ns = ready_ns
        task.route.pool.waiting += 1
        self._timers.at(ready_ns, self._wake, task, ready_ns)

    def put_off(
        self, task: Task, ready_ns: int, until_ns: int, give_up: Callable[[Task, int], None]
    ) -> None:
        """Let a task wait until take_up() is called, or until give_up() is due."""
        task.state = TaskState.WAITING
        task.queued_ns = ready_ns
        task.put_off_ns = until_ns
        task.route.pool.waiting += 1
        self._timers.at(until_ns, give_up, task, until_ns)

    def take_up(self, task: Task) -> None:
        """Queue a task that was put off, as soon as its time has come."""
        task.put_off_ns = 0
        task.route.pool.waiting -= 1
        self.enqueue(task, task.queued_ns)

    def hasten(self, task: Task) -> None:
        """Queue a task that waits for its next attempt now; the attempt is not a retry to pay."""
        self._ledger.settle_debt(task)
        self._ledger.change(task)
        task.queued_ns = self._state.now_ns
        self.take_up(task)

    def _wake(self, task: Task, ready_ns: int) -> None:
        if task.state != TaskState.WAITING or task.queued_ns != ready_ns:
            return
        pool = task.route.pool
        pool.waiting -= 1
        pool.queue.push(task, self._state.now_ns)

    def expired(self, task: Task) -> bool:
        return 0 < task.expires_at_ns <= self._state.now_ns

    def _expire(self, task: Task) -> None:
        if task.state in (TaskState.QUEUED, TaskState.WAITING, TaskState.JOINED):
            self.withdraw(task, EXPIRED)

    def withdraw(self, task: Task, state: str, failure: Failure | None = None) -> None:
        """End a task that is queued or waiting."""
        pool = task.route.pool
        if task.state in (TaskState.WAITING, TaskState.JOINED):
            pool.waiting -= 1
        else:
            pool.queue.discard(task)
        self._ledger.finish(task, state, failure=failure)

    def interrupt(self, task: Task) -> None:
        """End a task that a worker holds: ask the worker, and kill it if it ignores that."""
        slot = task.slot
        assert slot is not None
        self._state.out.append(CancelRunning(slot.worker, task.lease))
        due_ns = self._state.now_ns + CANCEL_GRACE_NS
        self._timers.at(due_ns, self._cancel_overdue, task, task.lease)

    def _cancel_overdue(self, task: Task, lease: int) -> None:
        slot = task.slot
        if slot is None or task.lease != lease:
            return
        self.kill(slot, f"task {task.spec.id} was cancelled and did not stop", lease)

    def kill(self, slot: Slot, why: str, lease: int, cause: Cause = Cause.HUNG) -> None:
        """Kill a worker that ignores orders; `lease` is the one to blame, 0 for none."""
        if not slot.killed_for:
            slot.pool.free_slots.pop(slot, None)
            slot.killed_for = why
            slot.killed_cause = cause
            slot.killed_lease = lease
            self._state.out.append(KillWorker(slot.worker, dump=True))

    # -- giving work --------------------------------------------------------------------------

    def feed(self, slot: Slot) -> None:
        """Let a slot take part in dispatch if it takes one more task."""
        if (
            slot.state != SlotState.RUNNING
            or slot.recalling
            or slot.killed_for
            or slot.debugged_ns
            or slot.halt
            or (slot.pool.policy.max_tasks and slot.spent)
        ):
            slot.pool.free_slots.pop(slot, None)
        elif not slot.leases or self._takes_more(slot):
            slot.pool.free_slots[slot] = None

    def _takes_more(self, slot: Slot) -> bool:
        if slot.pool.width > 1:
            oldest = next(iter(slot.leases.values()))
            return len(slot.leases) < slot.width and not (oldest.alone or slot.spent)
        # A window is refilled in batches, when it is half empty. No task is put behind one that
        # has stalled, however tiny other tasks of its name are.
        return (
            len(slot.leases) * 2 <= WINDOW_MAX
            and not next(iter(slot.leases.values())).begun_recorded
            and self._outstanding_ns(slot) * 2 <= WINDOW_NS
            and not slot.spent
        )

    def _outstanding_ns(self, slot: Slot) -> int:
        return sum([task.route.cost_ns for task in slot.leases.values()])

    def dispatch(self, pool: Pool) -> None:
        """Give queued tasks to the free slots, spread evenly over them."""
        queue, free_slots = pool.queue, pool.free_slots
        if pool.width > 1:
            self._spread(pool)
            return
        while queue.size and free_slots:
            # A slot that is free after its share waits for the next round.
            share = -(-queue.size // len(free_slots))
            all_busy = all(slot.leases for slot in free_slots)
            for slot in list(free_slots):
                if not queue.size:
                    break
                places = min(WINDOW_MAX - len(slot.leases), slot.tasks_left)
                budget_ns = WINDOW_NS - self._outstanding_ns(slot) if slot.leases else WINDOW_NS
                tasks = queue.take(
                    self._state.now_ns,
                    min(share, places),
                    budget_ns,
                    idle=not slot.leases,
                    count_max=places if all_busy or not slot.leases else 0,
                )
                if not tasks and not slot.leases:
                    return  # all tasks left wait at gates
                del free_slots[slot]
                if tasks:
                    self._lease(slot, tasks)
                    if self._takes_more(slot):
                        free_slots[slot] = None

    def _spread(self, pool: Pool) -> None:
        """Give tasks to workers that run several at once: one by one, to the least busy."""
        queue, free_slots = pool.queue, pool.free_slots
        while queue.size and free_slots:
            slot = min(free_slots, key=lambda each: len(each.leases))
            tasks = queue.take(self._state.now_ns, 1, WINDOW_NS, idle=True, alone=not slot.leases)
            if not tasks:
                return  # all tasks left wait at gates, or for an idle worker
            self._lease(slot, tasks)
            if not self._takes_more(slot):
                del free_slots[slot]

    def _lease(self, slot: Slot, tasks: list[Task]) -> None:
        now_ns = self._state.now_ns
        lease = self._last_lease
        held = slot.leases
        if not held or slot.width > 1:  # more work behind a running task is no progress
            slot.progress_ns = now_ns
        if not held:
            slot.pool.occupy()
        leases = []
        soonest_ns = 0
        waits, waited_ns = slot.pool.wait_times.buckets, 0
        same: Route | None = None  # the last task's settings hold for all tasks of this route
        for task in tasks:
            lease += 1
            wait_ns = now_ns - task.queued_ns
            waits[wait_ns.bit_length()] += 1
            waited_ns += wait_ns
            task.state = TaskState.LEASED
            task.lease = lease
            task.leased_ns = now_ns
            task.slot = slot
            task.attempt += 1
            held[lease] = task
            spec, route = task.spec, task.route
            plain = task.gate is None and spec.timeout_ns == 0 and spec.max_retries == NOT_GIVEN
            if route is not same or not plain:
                same = route if plain else None
                timeout_ns = task.timeout_ns
                max_retries, backoff = task.max_retries, task.backoff.custom
                counts = task.gate.counts if task.gate is not None else None
                fetching = task.gate.fetching if task.gate is not None else None
                if task.claim is not None:
                    counts, fetching = task.claim.counts, task.claim.fetching
                if not soonest_ns or timeout_ns < soonest_ns:
                    soonest_ns = timeout_ns
            attempt = task.attempt
            last = attempt > max_retries
            leases.append(
                Lease(
                    lease,
                    spec.id,
                    route.method,
                    spec.args,
                    attempt,
                    timeout_ns,
                    last,
                    backoff,
                    counts,
                    spec.session,
                    spec.watch,
                    fetching,
                )
            )
        self._last_lease = lease
        slot.pool.wait_times.total_ns += waited_ns
        slot.pool.leased += len(tasks)
        self._state.out.append(AssignLeases(slot.worker, leases))
        self.watch(slot)
        self._look_at(slot, now_ns + soonest_ns + HARD_GRACE_NS)

    # -- watching over them -------------------------------------------------------------------

    def watch(self, slot: Slot) -> None:
        if not slot.watching:
            slot.watching = True
            self._state.timers.at(slot.progress_ns + STALL_NS, self._stalled, slot, slot.worker)

    def _stalled(self, slot: Slot, worker: int) -> None:
        slot.watching = False
        if not slot.leases:
            return
        if slot.worker != worker or self._state.now_ns < slot.progress_ns + STALL_NS:
            self.watch(slot)
            return
        if slot.width > 1:  # all of them run
            for task in slot.leases.values():
                if not task.begun_recorded:
                    self._ledger.change(task, begun=True)
            return
        oldest = next(iter(slot.leases.values()))
        if not oldest.begun_recorded:
            self._ledger.change(oldest, begun=True)
        slot.pool.free_slots.pop(slot, None)
        self.recall(slot)

    def recall(self, slot: Slot) -> None:
        """Ask a worker to give back what it has not begun."""
        if len(slot.leases) > 1 and not slot.recalling and slot.state == SlotState.RUNNING:
            slot.recalling = True
            self._state.out.append(RecallLeases(slot.worker))

    def _look_at(self, slot: Slot, when_ns: int) -> None:
        """Check the slot's deadlines no later than this."""
        if slot.deadline_ns and slot.deadline_ns <= when_ns:
            return
        slot.deadline_ns = when_ns
        self._state.timers.at(when_ns, self._deadline, slot, slot.worker, when_ns)

    def _deadline(self, slot: Slot, worker: int, when_ns: int) -> None:
        if slot.worker != worker or slot.deadline_ns != when_ns:
            return
        slot.deadline_ns = 0
        if not slot.leases or slot.debugged_ns:
            return
        due_ns = self._due_ns(slot)
        if due_ns > self._state.now_ns:
            self._look_at(slot, due_ns)
        else:
            self._state.out.append(ReadBoard(worker))

    def _due_ns(self, slot: Slot) -> int:
        """Return when the first of its leases could have passed its hard deadline."""
        return min(map(self._hard_deadline_ns, slot.leases.values()))

    def _hard_deadline_ns(self, task: Task, since_ns: int = 0) -> int:
        """Return when a task must have ended that began then; 0: when it was leased."""
        stood_ns = self._state.suspended.get(task.lease, 0)
        return (since_ns or task.leased_ns) + task.timeout_ns + stood_ns + HARD_GRACE_NS

    def resume(self, slot: Slot) -> None:
        """Look at the deadlines of a slot again, whose time stood still."""
        if slot.leases:
            self._look_at(slot, self._due_ns(slot))
        self.feed(slot)

    def last_due_ns(self, slot: Slot) -> int:
        """Return when all tasks of a slot must have ended, as far as that can be said by now."""
        if slot.debugged_ns:
            return self._state.now_ns + DEBUGGED_AGAIN_NS
        return max(map(self._hard_deadline_ns, slot.leases.values()), default=0)

    def board_read(self, event: events.BoardRead) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None:
            return
        began = {event.lease: event.since_ns, **dict(event.beside)}
        if slot.runs_returned(began):
            self._state.report("worker.hung", "error", slot=slot, reason=RETURNED_AND_RUN)
            self.kill(slot, RETURNED_AND_RUN, 0)
            return
        if not slot.leases or slot.debugged_ns:
            return
        now_ns = self._state.now_ns
        running = [task for lease, task in slot.leases.items() if lease in began]
        if not running:
            if self._due_ns(slot) <= now_ns:
                self._found_idle(slot)
            return
        slot.idle_looks = 0
        due_ns, _, task = min(
            (self._hard_deadline_ns(task, began[task.lease]), task.lease, task) for task in running
        )
        if due_ns > now_ns:
            if slot.width > 1 and len(running) < len(slot.leases):  # results are on their way
                due_ns = min(due_ns, now_ns + BOARD_AGAIN_NS)
            self._look_at(slot, due_ns)
            return
        self._state.report(
            "task.hung",
            "error",
            slot=slot,
            task=task,
            seconds=(now_ns - began[task.lease]) / SECOND_NS,
            reason="it did not stop at its timeout",
        )
        self.kill(slot, f"task {task.spec.id} did not stop at its timeout", task.lease)

    def _found_idle(self, slot: Slot) -> None:
        """Kill a worker that runs none of its tasks, after some looks: a result may be on its way;
        if not, the worker is stuck where no deadline of a task reaches it."""
        slot.idle_looks += 1
        if slot.idle_looks < IDLE_LOOKS_MAX:
            self._look_at(slot, self._state.now_ns + BOARD_AGAIN_NS)
        else:
            self.kill(slot, f"it has {len(slot.leases)} tasks and runs none of them", 0)
