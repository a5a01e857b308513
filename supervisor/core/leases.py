"""Leases: which worker runs which task, and what becomes of it.

A worker that runs long tasks holds one lease at a time, so that an urgent task waits for no
prefetched one. Tiny tasks come in a window that holds about WINDOW_NS of measured work: enough to
keep the worker busy while messages travel, little enough not to disturb priorities. A window that
makes no progress for STALL_NS is recalled: the worker gives back what it has not begun.

A task's hard deadline counts from the moment its handler began, which only the worker's
scoreboard knows; so when a deadline could have passed, the board is read before anything is done.
"""

from musterd.ipc.backoff import pause_ns
from musterd.ipc.messages import (
    CANCEL,
    CANCELLED,
    CRASH,
    ERROR,
    EXPIRED,
    FAILED,
    SUCCEEDED,
    TIMEOUT,
    Completion,
    Failure,
    Lease,
)
from musterd.ipc.policy import MILLISECOND_NS, SECOND_NS
from musterd.supervisor.core import events
from musterd.supervisor.core.actions import (
    AssignLeases,
    CancelRunning,
    KillWorker,
    ReadBoard,
    RecallLeases,
)
from musterd.supervisor.core.ledger import Ledger
from musterd.supervisor.core.pool import Pool
from musterd.supervisor.core.queue import UNKNOWN_COST_NS
from musterd.supervisor.core.slot import Slot, SlotState
from musterd.supervisor.core.state import State
from musterd.supervisor.core.task import Task, TaskState
from musterd.supervisor.core.task_timers import TaskTimers

WINDOW_NS = 5 * MILLISECOND_NS
WINDOW_MAX = 128  # leases a worker holds at most, however tiny
COST_MIN_NS = 10_000  # what a task costs at least: the worker's own work around it
COST_SMOOTHING = 8  # a new measurement moves the estimate by this fraction of the difference
STALL_NS = 20 * MILLISECOND_NS
HARD_GRACE_NS = 5 * SECOND_NS  # from the soft time-out inside to the kill from outside
CANCEL_GRACE_NS = 5 * SECOND_NS  # from the interruption of a cancelled task to the kill
BOARD_AGAIN_NS = 1 * SECOND_NS  # look again when the board shows nothing running
IDLE_LOOKS_MAX = 5  # ... and after so many the worker, which has leases all the while, is stuck
INTERRUPTIONS_MAX = 20  # shutdowns and recycles one task may live through: nothing runs for ever


class Leases:
    def __init__(self, state: State, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._last_lease = 0
        self._timers = TaskTimers(state)

    # -- into the queue and out of it ---------------------------------------------------------

    def admit(self, task: Task, ready_ns: int) -> None:
        """Queue a task now, or when it becomes ready."""
        now_ns = self._state.now_ns
        if task.expires_at_ns:
            self._timers.at(task.expires_at_ns, self._expire, task)
        if self._expired(task):  # while it was on its way to the disk, or the daemon was down
            self._ledger.finish(task, EXPIRED)
        elif ready_ns > now_ns:
            self._wait(task, ready_ns)
        else:
            task.route.pool.queue.push(task, now_ns)

    def _wait(self, task: Task, ready_ns: int) -> None:
        task.state = TaskState.WAITING
        task.queued_ns = ready_ns
        task.route.pool.waiting += 1
        self._timers.at(ready_ns, self._wake, task, ready_ns)

    def _wake(self, task: Task, ready_ns: int) -> None:
        if task.state != TaskState.WAITING or task.queued_ns != ready_ns:
            return
        pool = task.route.pool
        pool.waiting -= 1
        pool.queue.push(task, self._state.now_ns)

    def _expired(self, task: Task) -> bool:
        return 0 < task.expires_at_ns <= self._state.now_ns

    def _expire(self, task: Task) -> None:
        if task.state in (TaskState.QUEUED, TaskState.WAITING):
            self.withdraw(task, EXPIRED)

    def withdraw(self, task: Task, state: str) -> None:
        """End a task that is queued or waiting."""
        pool = task.route.pool
        if task.state == TaskState.WAITING:
            pool.waiting -= 1
        else:
            pool.queue.discard(task)
        self._ledger.finish(task, state)

    def interrupt(self, task: Task) -> None:
        """End a task that a worker holds: ask it, and kill it if it does not listen."""
        slot = task.slot
        assert slot is not None
        self._state.out.append(CancelRunning(slot.worker, task.lease))
        due_ns = self._state.now_ns + CANCEL_GRACE_NS
        self._timers.at(due_ns, self._cancel_overdue, task, task.lease)

    def _cancel_overdue(self, task: Task, lease: int) -> None:
        slot = task.slot
        if slot is None or task.lease != lease:
            return
        self._kill(slot, f"task {task.spec.id} was cancelled and did not stop", lease)

    def _kill(self, slot: Slot, why: str, lease: int) -> None:
        if not slot.killed_for:
            slot.killed_for = why
            slot.killed_lease = lease
            self._state.out.append(KillWorker(slot.worker, dump=True))

    # -- giving work --------------------------------------------------------------------------

    def feed(self, slot: Slot) -> None:
        """Let a slot take part in dispatch if it has room."""
        if slot.state != SlotState.RUNNING or slot.recalling or slot.killed_for:
            slot.pool.hungry.pop(slot, None)
        elif not slot.leases or self._room(slot):
            slot.pool.hungry[slot] = None

    def _room(self, slot: Slot) -> bool:
        # Half empty: refilled in batches, not one by one. Nothing is put behind a task that has
        # stalled already, however tiny others of its name are.
        return (
            len(slot.leases) * 2 <= WINDOW_MAX
            and not next(iter(slot.leases.values())).begun_recorded
            and self._outstanding_ns(slot) * 2 <= WINDOW_NS
        )

    def _outstanding_ns(self, slot: Slot) -> int:
        return sum([task.route.cost_ns for task in slot.leases.values()])

    def dispatch(self, pool: Pool) -> None:
        """Give queued tasks to the slots that have room, spread evenly over them."""
        queue, hungry = pool.queue, pool.hungry
        while queue.size and hungry:
            # In rounds: whoever still has room after his share waits for the next one.
            share = -(-queue.size // len(hungry))
            for slot in list(hungry):
                if not queue.size:
                    break
                room = WINDOW_MAX - len(slot.leases)
                budget_ns = WINDOW_NS - self._outstanding_ns(slot) if slot.leases else WINDOW_NS
                tasks = queue.take(
                    self._state.now_ns, min(share, room), budget_ns, idle=not slot.leases
                )
                del hungry[slot]
                if tasks:
                    self._lease(slot, tasks)
                    if self._room(slot):
                        hungry[slot] = None

    def _lease(self, slot: Slot, tasks: list[Task]) -> None:
        now_ns = self._state.now_ns
        lease = self._last_lease
        held = slot.leases
        if not held:  # more work behind what runs is no progress
            slot.progress_ns = now_ns
        leases = []
        soonest_ns = 0
        for task in tasks:
            lease += 1
            task.state = TaskState.LEASED
            task.lease = lease
            task.leased_ns = now_ns
            task.slot = slot
            task.attempt += 1
            held[lease] = task
            spec, route = task.spec, task.route
            timeout_ns = spec.timeout_ns or route.timeout_ns
            if not soonest_ns or timeout_ns < soonest_ns:
                soonest_ns = timeout_ns
            leases.append(Lease(lease, spec.id, route.method, spec.args, task.attempt, timeout_ns))
        self._last_lease = lease
        slot.pool.leased += len(tasks)
        self._state.out.append(AssignLeases(slot.worker, leases))
        self._watch_progress(slot)
        self._look_at(slot, now_ns + soonest_ns + HARD_GRACE_NS)

    # -- watching over them -------------------------------------------------------------------

    def _watch_progress(self, slot: Slot) -> None:
        if not slot.watching:
            slot.watching = True
            self._state.timers.at(slot.progress_ns + STALL_NS, self._stalled, slot, slot.worker)

    def _stalled(self, slot: Slot, worker: int) -> None:
        slot.watching = False
        if not slot.leases:
            return
        if slot.worker != worker or self._state.now_ns < slot.progress_ns + STALL_NS:
            self._watch_progress(slot)
            return
        oldest = next(iter(slot.leases.values()))
        if not oldest.begun_recorded:
            self._ledger.change(oldest, begun=True)
        slot.pool.hungry.pop(slot, None)
        if len(slot.leases) > 1 and not slot.recalling and slot.state == SlotState.RUNNING:
            slot.recalling = True
            self._state.out.append(RecallLeases(worker))

    def _look_at(self, slot: Slot, when_ns: int) -> None:
        """Make sure the slot's deadlines are looked at no later than this."""
        if slot.deadline_ns and slot.deadline_ns <= when_ns:
            return
        slot.deadline_ns = when_ns
        self._state.timers.at(when_ns, self._deadline, slot, slot.worker, when_ns)

    def _deadline(self, slot: Slot, worker: int, when_ns: int) -> None:
        if slot.worker != worker or slot.deadline_ns != when_ns:
            return
        slot.deadline_ns = 0
        if not slot.leases:
            return
        due_ns = min(task.leased_ns + task.timeout_ns for task in slot.leases.values())
        if due_ns + HARD_GRACE_NS > self._state.now_ns:
            self._look_at(slot, due_ns + HARD_GRACE_NS)
        else:
            self._state.out.append(ReadBoard(worker))

    def board_read(self, event: events.BoardRead) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None or not slot.leases:
            return
        now_ns = self._state.now_ns
        task = slot.leases.get(event.lease)
        if task is None:
            self._found_idle(slot)
            return
        slot.idle_looks = 0
        due_ns = event.since_ns + task.timeout_ns + HARD_GRACE_NS
        if due_ns > now_ns:
            self._look_at(slot, due_ns)
            return
        self._state.report(
            "task.hung",
            "error",
            slot=slot,
            task=task,
            seconds=(now_ns - event.since_ns) / SECOND_NS,
            reason="it did not stop at its time-out",
        )
        self._kill(slot, f"task {task.spec.id} did not stop at its time-out", task.lease)

    def _found_idle(self, slot: Slot) -> None:
        """Nothing of what it was given runs, long after it should have: a result may be on its way
        to us; if not, the worker is stuck where no deadline of a task reaches it."""
        slot.idle_looks += 1
        if slot.idle_looks < IDLE_LOOKS_MAX:
            self._look_at(slot, self._state.now_ns + BOARD_AGAIN_NS)
        else:
            self._kill(slot, f"it has {len(slot.leases)} tasks and runs none of them", 0)

    # -- taking it back -----------------------------------------------------------------------

    def completed(self, event: events.LeasesCompleted) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None:
            return  # late news of a worker that was given up: its tasks went to others
        leases = slot.leases
        finish = self._ledger.finish
        count = 0
        for completion in event.completions:
            task = leases.pop(completion.lease, None)
            if task is None:
                continue
            count += 1
            task.slot = None
            task.lease = 0
            route = task.route
            run_ns = completion.run_ns if completion.run_ns > COST_MIN_NS else COST_MIN_NS
            cost_ns = route.cost_ns
            route.cost_ns = (
                run_ns
                if cost_ns == UNKNOWN_COST_NS
                else cost_ns + (run_ns - cost_ns) // COST_SMOOTHING
            )
            if completion.failure is None:
                finish(task, SUCCEEDED, value=completion.value, run_ns=completion.run_ns)
            else:
                self._failed(task, completion.failure, completion)
        slot.pool.leased -= count
        slot.tasks_done += count
        slot.idle_looks = 0
        slot.progress_ns = self._state.now_ns
        if leases:
            self._watch_progress(slot)
        self.feed(slot)

    def _failed(self, task: Task, failure: Failure, completion: Completion) -> None:
        if task.cancelled:
            self._ledger.finish(task, CANCELLED, failure=failure, run_ns=completion.run_ns)
        elif failure.kind == CANCEL:
            self._interrupted(task)
        else:
            self._retry_or_fail(task, failure, completion.retry_delay_ns, completion.run_ns)

    def _retry_or_fail(self, task: Task, failure: Failure, delay_ns: int, run_ns: int) -> None:
        may_help = failure.kind in (ERROR, TIMEOUT)
        if not may_help or task.attempt > task.max_retries:
            self._ledger.finish(task, FAILED, failure=failure, run_ns=run_ns)
            return
        if self._expired(task):
            self._ledger.finish(task, EXPIRED, failure=failure, run_ns=run_ns)
            return
        if delay_ns < 0:
            backoff = task.route.pool.retry.backoff
            delay_ns = max(pause_ns(backoff, task.attempt, self._state.rng), failure.retry_after_ns)
        task.route.pool.counters.retried += 1
        self._ledger.change(task, wait_ns=delay_ns)
        self._state.report(
            "task.retry",
            "info",
            pool=task.route.pool,
            task=task,
            seconds=delay_ns / SECOND_NS,
            reason=f"{failure.type or failure.kind}: {failure.message}",
        )
        self._wait(task, self._state.now_ns + delay_ns)

    def _interrupted(self, task: Task) -> None:
        """It was stopped for our own reasons: not its fault, not an attempt, but not for ever."""
        task.interruptions += 1
        task.attempt -= 1
        if task.interruptions > INTERRUPTIONS_MAX:
            self._ledger.finish(
                task,
                FAILED,
                failure=Failure(
                    CRASH,
                    message=f"interrupted {task.interruptions} times by shutdowns or restarts",
                ),
            )
            return
        self._ledger.change(task)
        self._give_back(task)

    def _untouched(self, task: Task) -> None:
        """A lease that never began."""
        task.attempt -= 1
        if task.cancelled:
            self._ledger.finish(task, CANCELLED)
            return
        if task.begun_recorded:
            self._ledger.change(task)
        self._give_back(task)

    def _give_back(self, task: Task) -> None:
        """To the front of its lane, unless its time is over."""
        if self._expired(task):
            self._ledger.finish(task, EXPIRED)
        else:
            task.route.pool.queue.push_front(task)

    def returned(self, event: events.LeasesReturned) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None:
            return
        slot.recalling = False
        # From the last to the first, each to the front: they end up in their old order.
        for lease in sorted(event.leases, reverse=True):
            task = slot.leases.pop(lease, None)
            if task is not None:
                slot.pool.leased -= 1
                task.slot = None
                task.lease = 0
                self._untouched(task)
        self.feed(slot)

    def lost(self, slot: Slot, running: int, *, stopped: bool) -> bool:
        """The worker is gone. Returns whether a known poison task took it along.

        `stopped` says that we ended it in the middle of its task for our own reasons.
        """
        poison = False
        slot.pool.hungry.pop(slot, None)
        for lease, task in reversed(list(slot.leases.items())):
            del slot.leases[lease]
            slot.pool.leased -= 1
            task.slot = None
            task.lease = 0
            if lease != running:
                self._untouched(task)
            elif task.cancelled:
                self._ledger.finish(task, CANCELLED)
            elif lease == slot.killed_lease:
                seconds = task.timeout_ns / SECOND_NS
                self._retry_or_fail(
                    task,
                    Failure(
                        TIMEOUT,
                        "TimeoutError",
                        f"did not stop at its time-out of {seconds:g} s: its worker was killed",
                    ),
                    -1,
                    self._state.now_ns - task.leased_ns,
                )
            elif stopped or slot.killed_for:
                self._interrupted(task)
            else:
                poison = self._crashed(task)
        return poison

    def _crashed(self, task: Task) -> bool:
        task.crashes += 1
        task.attempt -= 1
        pool = task.route.pool
        if task.crashes >= pool.policy.max_crashes:
            self._state.report(
                "task.quarantined",
                "error",
                pool=pool,
                task=task,
                reason=f"it crashed its worker {task.crashes} times",
            )
            self._ledger.finish(
                task,
                FAILED,
                failure=Failure(
                    CRASH, message=f"quarantined: it crashed its worker {task.crashes} times"
                ),
            )
        else:
            self._ledger.change(task)
            self._give_back(task)
        return task.crashes > 1
