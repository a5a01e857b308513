"""Ends of leases: a result, a retry, a crash, or back into the queue untouched.

A task is blamed for the crash of the worker that ran it, and quarantined after `max_crashes`. If
the worker ran several tasks, nobody knows which of them crashed it: none is blamed, and each runs
alone from then on, so that the next crash has a culprit. If a worker was killed because one of its
tasks did not stop, that task has failed and the others were interrupted. These run alone as well:
any of them may have kept the first from stopping.
"""

from musterd.ipc.resilience.backoff import pause_ns
from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    CANCEL,
    CANCELLED,
    CRASH,
    ERROR,
    EXPIRED,
    FAILED,
    POISON,
    TIMEOUT,
    Completion,
    Failure,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import ReadBoard
from musterd.supervisor.core.model.gates import Verdict, verdict_of
from musterd.supervisor.core.model.ledger import STATE, Ledger
from musterd.supervisor.core.model.queue import UNKNOWN_COST_NS
from musterd.supervisor.core.model.slot import Slot
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task
from musterd.supervisor.core.tasks.claims import Claims
from musterd.supervisor.core.tasks.gatekeeper import Gatekeeper
from musterd.supervisor.core.tasks.leases import Leases
from musterd.supervisor.core.tasks.logins import Logins
from musterd.supervisor.core.tasks.retries import Retries

COST_MIN_NS = 10_000  # the least a task costs: the worker's own work around it
COST_SMOOTHING = 8  # a new measurement moves the estimate by this fraction of the difference
INTERRUPTIONS_MAX = 20  # shutdowns and recycles that one task may survive: no task runs forever


class Endings:
    def __init__(
        self,
        state: State,
        ledger: Ledger,
        leases: Leases,
        keeper: Gatekeeper,
        retries: Retries,
        *,
        claims: Claims,
        logins: Logins,
    ) -> None:
        self._state = state
        self._claims = claims
        self._logins = logins
        self._ledger = ledger
        self._leases = leases
        self._keeper = keeper
        self._retries = retries

    # -- at the gates -------------------------------------------------------------------------

    def _leave_gate(self, task: Task, completion: Completion) -> None:
        """Tell the gate how an attempt ended: it may say something about the site."""
        failure = completion.failure
        if task.spec.session:
            self._logins.attempt_over(task, completion)
        if task.gate is None:
            return  # an attempt of the cluster: the gates are the engine's
        task.gate.leave(
            task,
            verdict_of(failure),
            self._state.now_ns,
            self._state.rng,
            run_ns=completion.run_ns,
            retry_after_ns=failure.retry_after_ns if failure is not None else 0,
        )
        self._keeper.touch(task.gate.site)

    def _let_go(self, task: Task) -> None:
        """Leave the gate: the lease ended and says nothing about the site."""
        if task.gate is not None:
            task.gate.leave(task, Verdict.NOTHING, self._state.now_ns, self._state.rng)
            self._keeper.touch(task.gate.site)

    # -- from the workers ---------------------------------------------------------------------

    def completed(self, event: events.LeasesCompleted) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None:
            return  # news of a worker that was given up: its tasks went to others
        leases = slot.leases
        succeed = self._ledger.succeed
        claimed = self._state.claimed
        runs = slot.pool.run_times
        count = 0
        for completion in event.completions:
            task = leases.pop(completion.lease, None)
            if task is None:
                continue
            count += 1
            task.slot = None
            task.lease = 0
            if task.gate is not None or task.spec.session:
                self._leave_gate(task, completion)
            route = task.route
            run_ns = completion.run_ns
            runs.buckets[run_ns.bit_length()] += 1
            runs.total_ns += run_ns
            run_ns = max(run_ns, COST_MIN_NS)
            cost_ns = route.cost_ns
            route.cost_ns = (
                run_ns
                if cost_ns == UNKNOWN_COST_NS
                else cost_ns + (run_ns - cost_ns) // COST_SMOOTHING
            )
            if claimed and task.claim is not None and completion.failure is None:
                self._claims.succeeded(task, completion)
            elif completion.failure is None:
                if completion.clears:  # in the same transaction as the result
                    self._ledger.remember(STATE, completion.clears, None)
                task.view = completion.view
                succeed(task, completion.value, completion.run_ns)
            else:
                self._failed(task, completion.failure, completion, slot)
        if event.samples:
            slot.pool.tally.add(event.samples)
        slot.pool.leased -= count
        slot.tasks_done += count
        slot.worker_tasks += count
        max_tasks = slot.pool.policy.max_tasks
        if max_tasks and slot.worker_tasks >= max_tasks * slot.limit_factor:
            self._state.recycling_due = True
        slot.idle_looks = 0
        slot.progress_ns = self._state.now_ns
        if leases:
            self._leases.watch(slot)
        elif count:
            slot.pool.vacate()
        self._leases.feed(slot)

    def _note_failure(self, task: Task, failure: Failure, slot: Slot) -> None:
        if failure.kind != CANCEL:
            slot.pool.tally.failed(failure)
        self._ledger.failed(task, failure, slot.name)

    def _failed(self, task: Task, failure: Failure, completion: Completion, slot: Slot) -> None:
        if completion.login and self._logins.sends_back(task, completion):
            if task.claim is None:
                self._untouched(task)
            else:
                task.attempt -= 1
                self._claims.ended(task, CANCELLED, None, completion.run_ns)
            return
        self._note_failure(task, failure, slot)
        if task.cancelled:
            self._ledger.finish(task, CANCELLED, failure=failure, run_ns=completion.run_ns)
        elif failure.kind == CANCEL:
            self._interrupted(task)
        else:
            self._retry_or_fail(task, failure, completion.retry_delay_ns, completion.run_ns, slot)

    def login_failed(self, task: Task, failure: Failure) -> None:
        """Count the attempt of a task that has waited for a login in vain."""
        task.route.pool.queue.take_out(task)
        task.attempt += 1
        task.route.pool.tally.failed(failure)
        self._ledger.failed(task, failure, "")
        self._retry_or_fail(task, failure, -1, 0, None)

    def _retry_or_fail(
        self, task: Task, failure: Failure, delay_ns: int, run_ns: int, slot: Slot | None
    ) -> None:
        may_help = failure.kind in (ERROR, TIMEOUT)
        if task.claim is not None:
            self._claims.failed(task, failure, delay_ns, run_ns, may_help=may_help)
            return
        if not may_help or task.attempt > task.max_retries:
            self._ledger.finish(task, FAILED, failure=failure, run_ns=run_ns)
            return
        if self._leases.expired(task):
            self._ledger.finish(task, EXPIRED, failure=failure, run_ns=run_ns)
            return
        if delay_ns < 0:
            pause = pause_ns(task.backoff, task.attempt, self._state.rng)
            delay_ns = max(pause, failure.retry_after_ns)
        task.route.pool.counters.retried += 1
        self._ledger.change(task, wait_ns=delay_ns)
        self._retries.wait(task, failure, self._state.now_ns + delay_ns)
        budget = "; when its site's retry budget allows it" if task.debt is not None else ""
        self._state.report(
            "task.retry",
            "info",
            slot=slot,
            pool=task.route.pool,
            task=task,
            seconds=delay_ns / SECOND_NS,
            reason=f"{failure.type or failure.kind}: {failure.message}{budget}",
            traceback=failure.traceback,
        )

    def _interrupted(
        self, task: Task, why: str = "its worker was stopped in the middle of it"
    ) -> None:
        """Requeue a task that we stopped: no attempt, but INTERRUPTIONS_MAX times at most."""
        if task.claim is not None:
            self._claims.interrupted(task, why)
            return
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
        if task.outcome is None:
            self._state.report("task.interrupted", pool=task.route.pool, task=task, reason=why)

    def _untouched(self, task: Task) -> None:
        """Requeue a task whose lease never began."""
        task.attempt -= 1
        if task.cancelled:
            self._ledger.finish(task, CANCELLED)
            return
        if task.begun_recorded:
            self._ledger.change(task)
        self._give_back(task)

    def _give_back(self, task: Task) -> None:
        """Put a task at the front of its lane, unless it has expired."""
        if self._leases.expired(task):
            self._ledger.finish(task, EXPIRED)
        else:
            task.route.pool.queue.push_front(task)

    def returned(self, event: events.LeasesReturned) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None:
            return
        slot.recalling = False
        had_leases = bool(slot.leases)
        # Each goes to the front, the last one first: so they keep their order.
        for lease in sorted(event.leases, reverse=True):
            task = slot.leases.pop(lease, None)
            if task is not None:
                slot.pool.leased -= 1
                task.slot = None
                task.lease = 0
                slot.returned.append(lease)
                self._let_go(task)
                self._untouched(task)
        if had_leases and not slot.leases:
            slot.pool.vacate()
        self._leases.feed(slot)
        if slot.returned:
            self._state.out.append(ReadBoard(slot.worker))  # it may run one of them all the same

    def lost(self, slot: Slot, began: tuple[int, ...], how: str, *, stopped: bool) -> bool:
        """End the leases of a lost worker; return whether a known poison task crashed it.

        `began` are the leases that ran, `how` says in words how the worker ended, and `stopped`
        that we ended it in the middle of its task.
        """
        poison = False
        shared = sum(lease in slot.leases for lease in began) > 1
        suspects = shared and not stopped and (bool(slot.killed_lease) or not slot.killed_for)
        slot.pool.free_slots.pop(slot, None)
        if slot.leases:
            slot.pool.vacate()
        for lease, task in reversed(list(slot.leases.items())):
            del slot.leases[lease]
            slot.pool.leased -= 1
            task.slot = None
            task.lease = 0
            self._let_go(task)
            if lease not in began:
                self._untouched(task)
                continue
            task.alone = task.alone or suspects
            if task.cancelled:
                self._ledger.finish(task, CANCELLED)
            elif lease == slot.killed_lease:
                seconds = task.timeout_ns / SECOND_NS
                failure = Failure(
                    TIMEOUT,
                    "TimeoutError",
                    f"did not stop at its timeout of {seconds:g} s: its worker was killed",
                )
                self._note_failure(task, failure, slot)
                self._retry_or_fail(task, failure, -1, self._state.now_ns - task.leased_ns, slot)
            elif stopped or (slot.killed_for and not suspects):
                self._interrupted(task)
            elif suspects:
                self._interrupted(task, f"its worker {how}; it runs alone from now on")
            else:
                self._note_failure(task, Failure(CRASH, message=f"its worker {how}"), slot)
                poison = self._crashed(task, slot, how)
        return poison

    def _crashed(self, task: Task, slot: Slot, how: str) -> bool:
        task.crashes += 1
        if task.claim is not None:
            self._claims.crashed(task, slot, how)
            return task.crashes > 1
        task.attempt -= 1
        pool = task.route.pool
        if task.crashes >= pool.policy.max_crashes:
            task.attempt += task.crashes  # people are shown how often the task ran
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
                    CRASH, POISON, f"quarantined: it crashed its worker {task.crashes} times"
                ),
            )
        else:
            most = pool.policy.max_crashes
            why = f"its worker {how}: loss {task.crashes} of {most}, then it is quarantined"
            self._state.report("task.crashed", "warning", slot=slot, task=task, reason=why)
            self._ledger.change(task)
            self._give_back(task)
        return task.crashes > 1
