"""Recycling: replaces worn workers by fresh ones.

`max_tasks`, `max_age` and `max_memory` (of the worker and all it started) say when a worker is
worn. Each worker draws limits somewhat below these, and a pool recycles one worker at a time:
workers that started together do not end together.

    before   the successor is started beside the old worker, which goes on working. When the
             successor is ready it takes over the slot; the old worker ends its task and exits.
    after    where memory does not allow for both: the old worker ends its task and exits, then the
             new one is started.

A running task has its whole timeout: a recycle interrupts nothing, so it is neither a crash nor an
attempt. If a successor does not get ready, the old worker goes on, and the next try follows after a
pause.
"""

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.events import MemorySampled
from musterd.supervisor.core.model.memory_use import shown
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import Slot, SlotState, restart_pause_ns
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.leases import HARD_GRACE_NS, Leases
from musterd.supervisor.core.workers import sizing
from musterd.supervisor.core.workers.forkservers import SlotActions

JITTER = 0.2  # a worker's limits are up to this share below those of its pool
# A worker that has run max_tasks waits so long for a leaving worker of its pool to be gone; then it
# is given tasks again, as closing a worker may take long.
HOLD_NS = 1 * SECOND_NS
OVERTIME = 10  # a worn worker that cannot be replaced runs another max_tasks / OVERTIME tasks


class Recycling:
    def __init__(self, state: State, leases: Leases, slots: SlotActions) -> None:
        self._state = state
        self._leases = leases
        self._slots = slots

    # -- which workers are worn ---------------------------------------------------------------

    def welcome(self, slot: Slot) -> None:
        """Draw the limits of a worker that is ready."""
        policy = slot.pool.policy
        if policy.max_tasks or policy.max_age_ns or policy.max_memory_bytes:
            slot.limit_factor = 1.0 - JITTER * self._state.rng.random()
        self._state.recycling_due = True  # another recycle may have waited for it

    def look_at(self, slot: Slot) -> None:
        """Mark a worker as worn if it is too old; called by the health checks."""
        max_age_ns = slot.pool.policy.max_age_ns
        age_ns = self._state.now_ns - slot.ready_ns
        if max_age_ns and age_ns >= max_age_ns * slot.limit_factor:
            self._worn(slot, f"it is {age_ns / SECOND_NS:.0f} s old (max_age)")

    def weighed(self, _: MemorySampled) -> None:
        """Mark workers as worn that take too much memory.

        A worker that has run no task is as big as its successor would be.
        """
        for slot in self._state.workers.values():
            limit = slot.pool.policy.max_memory_bytes
            if limit and slot.worker_tasks and slot.pss_bytes >= limit * slot.limit_factor:
                self._worn(slot, f"it takes {shown(slot.pss_bytes)} (max_memory)")

    def _worn(self, slot: Slot, why: str) -> None:
        if not slot.worn:
            slot.worn = why
            slot.worn_ns = self._state.now_ns
        self._state.recycling_due = True

    # -- one at a time ------------------------------------------------------------------------

    def advance(self) -> None:
        """Begin a recycle in each pool that has a worn worker and may replace one."""
        self._state.recycling_due = False
        if not self._state.intake_open:
            return
        for pool in self._state.pools.values():
            worn = [slot for slot in pool.slots if self._is_worn(slot)]
            if worn:
                slot = min(worn, key=lambda each: each.worn_ns)
                if self._may_begin(pool):
                    worn.remove(slot)
                    self.replace(slot)
                for each in worn:
                    if not self._soon(each):
                        self._work_on(each)

    def _is_worn(self, slot: Slot) -> bool:
        if slot.state != SlotState.RUNNING or slot.killed_for:
            return False
        max_tasks = slot.pool.policy.max_tasks
        if not slot.worn and max_tasks and slot.worker_tasks >= max_tasks * slot.limit_factor:
            self._worn(slot, f"it has run {slot.worker_tasks} tasks (max_tasks)")
        return bool(slot.worn)

    def _may_begin(self, pool: Pool) -> bool:
        return (
            pool.fork_server == ForkServerState.UP
            and pool.rollout is None
            and self.may_replace(pool)
        )

    def may_replace(self, pool: Pool) -> bool:
        """Return whether no worker is being replaced here, and the last failure is long ago."""
        if pool.successor is not None or pool.leaving is not None:
            return False
        last = pool.recycled
        if last is not None and last.state in (SlotState.DRAINING, SlotState.STARTING):
            return False  # stopped first, and its next worker is not ready yet
        return self._state.now_ns >= pool.recycle_after_ns

    def _soon(self, slot: Slot) -> bool:
        """Return whether the slot's successor is on its way, or can be in a moment."""
        pool = slot.pool
        if pool.successor is not None:
            return slot is pool.recycled
        leaving = pool.leaving
        held_ns = self._state.now_ns - pool.leaving_ns
        return leaving is not None and not leaving.leases and held_ns < HOLD_NS

    def _work_on(self, slot: Slot) -> None:
        """Let a spent worker without a successor run some more tasks."""
        if slot.spent:
            slot.overtime += max(1, slot.pool.policy.max_tasks // OVERTIME)
            self._leases.feed(slot)

    def replace(self, slot: Slot, why: str = "", *, trial: bool = False) -> Slot:
        """Begin a replacement; return the slot of the new worker, which may be the same slot."""
        pool = slot.pool
        pool.recycled = slot
        pool.recycled_for = why or slot.worn
        if self._fits(pool):
            pool.successor = successor = Slot(pool, slot.index)
            successor.removed = True  # until it takes over, a stop removes it
            successor.trial = trial
            successor.become(SlotState.STARTING)
            self._slots.spawn(successor)
            return successor
        self._count(slot, "stopped first: there is no room for two")
        slot.trial = trial
        slot.restart_after_stop = True
        self._slots.stop(slot, within_ns=self._patience_ns(slot))
        return slot

    def _fits(self, pool: Pool) -> bool:
        """Return whether one worker more than the pool's size is allowed."""
        workers_max = self._state.policy.workers_max
        pools = self._state.pools.values()
        if workers_max and sum(sizing.claimed(each) for each in pools) >= workers_max:
            return False
        return pool.limit is None and self._state.memory.admits(pool)

    def _patience_ns(self, slot: Slot) -> int:
        """Return the time in which its tasks and the worker itself must have ended."""
        timeouts = [task.timeout_ns + HARD_GRACE_NS for task in slot.leases.values()]
        return max(timeouts, default=0) + self._state.policy.drain_timeout_ns

    def _count(self, slot: Slot, how: str) -> None:
        slot.recycled += 1
        slot.pool.counters.recycled += 1
        seconds = (self._state.now_ns - slot.ready_ns) / SECOND_NS if slot.ready_ns else 0.0
        self._state.report(
            "worker.recycled", slot=slot, reason=f"{slot.pool.recycled_for}; {how}", seconds=seconds
        )

    # -- the successor ------------------------------------------------------------------------

    def take_over(self, new: Slot) -> None:
        """Put a successor that is ready in the place of the old slot."""
        pool, old = new.pool, new.pool.recycled
        assert old is not None and old in pool.slots, new.name
        pool.successor = None
        pool.recycle_failures = 0
        self._count(old, "its successor is ready")
        new.inherit(old)
        new.removed = False
        pool.slots[pool.slots.index(old)] = new
        pool.leaving = old
        pool.leaving_ns = self._state.now_ns
        self._state.timers.at(pool.leaving_ns + HOLD_NS, self._again)
        pool.recycled = None
        old.removed = True
        old.restart_after_stop = False
        self._slots.stop(old, within_ns=self._patience_ns(old))

    def failed(self, successor: Slot, why: str) -> None:
        """Keep the old worker: its successor did not get ready."""
        pool = successor.pool
        pool.successor = None
        old, pool.recycled = pool.recycled, None
        pool.recycle_failures += 1
        failures = pool.recycle_failures + 1  # one more: the old worker works on, so there is time
        pause = restart_pause_ns(pool.policy.restart, failures, self._state.rng)
        pool.recycle_after_ns = self._state.now_ns + pause
        self._state.timers.at(pool.recycle_after_ns, self._again)
        self._state.report(
            "worker.not_recycled",
            "warning",
            slot=successor,
            reason=f"its successor failed: {why}",
            seconds=pause / SECOND_NS,
        )
        if old is not None and old.state == SlotState.RUNNING:
            self._work_on(old)

    def _again(self) -> None:
        self._state.recycling_due = True

    def abandon(self, slot: Slot) -> None:
        """Stop the successor of a slot that is to be stopped."""
        pool = slot.pool
        successor = pool.successor
        if successor is not None and pool.recycled is slot:
            pool.recycled = None
            self._slots.stop(successor, within_ns=0)
