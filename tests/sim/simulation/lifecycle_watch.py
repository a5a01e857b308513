"""Check the lives of workers, whatever freezes, falls ill or is replaced.

No healthy worker is killed for hanging. A worker that idles without a sign of life is killed in
time. No slot has two workers, except for the successor of a worker that is leaving. Processes that
outlive their worker are counted and reported, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.model.actions import KillWorker, Report, SpawnWorker, TerminateWorker
from musterd.supervisor.core.model.events import LeftoversEnded
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.workers.health_checks import CHECK_NS, CHECKS_PER_TIMEOUT, MISSED_MAX
from musterd.supervisor.core.workers.recycling import HOLD_NS
from simulation.profile import SEC

if TYPE_CHECKING:
    from simulation.world import World

WORN_NS = 120 * SEC  # four slots in turn, each with a task that hangs to its deadline, and delays
LIAR_NS = 2 * SEC  # from the lie to the kill: a look at the scoreboard, and the delay before a kill
SLACK_NS = 1 * SEC  # messages, late polls, the delay before a kill


class LifecycleWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.hung_found = self.sick_found = self.successors = self.recycled = 0
        self._orphans: dict[str, int] = {}  # by pool, in this life

    def new_life(self) -> None:
        self._orphans.clear()

    def handled(self, event: Any, actions: list[Any]) -> None:
        if isinstance(event, LeftoversEnded):
            self._check_leftovers(event, actions)
        for action in actions:
            if isinstance(action, KillWorker):
                self._check_kill(action)
            elif isinstance(action, SpawnWorker):
                self._check_spawn(action)
            elif isinstance(action, TerminateWorker):
                self._check_terminated(action)
            elif isinstance(action, Report) and action.event == "worker.recycled":
                self._check_recycled(action)

    def _check_leftovers(self, event: LeftoversEnded, actions: list[Any]) -> None:
        told = [each for each in actions if isinstance(each, Report)]
        assert [report.event for report in told] == ["worker.leftovers"], told
        self._orphans[event.pool] = self._orphans.get(event.pool, 0) + event.processes
        counted = self._world.fleet.pools[event.pool].counters.orphans
        assert counted == self._orphans[event.pool], f"{event.pool}: {counted} orphans"

    def _check_kill(self, action: KillWorker) -> None:
        """Check that a worker killed for giving no sign of life gives none."""
        slot = self._world.fleet._state.workers.get(action.worker)
        worker = self._world.workers[action.worker]
        if slot is None or not action.dump:
            return
        if "no sign of life" in slot.killed_for:
            self.hung_found += 1
            assert worker.lame_since_ns, f"{worker.name} is well and killed: {slot.killed_for}"
        elif "healthy()" in slot.killed_for:
            self.sick_found += 1
            assert worker.checking_ns, f"{worker.name} is well and killed: {slot.killed_for}"

    def _check_spawn(self, action: SpawnWorker) -> None:
        name = f"{action.pool}/{action.index}"
        living = [w for w in self._world.workers.values() if w.alive and w.counts]
        beside = [worker.number for worker in living if worker.name == name]
        successor = self._world.fleet.pools[action.pool].successor
        if successor is not None and successor.worker == action.worker:
            self.successors += 1
            assert len(beside) <= 1, f"{name} is started beside {beside}"
        else:
            assert not beside or self._was_left(action, beside), f"{name} is beside {beside}"

    def _was_left(self, action: SpawnWorker, beside: list[int]) -> bool:
        """Tell whether the other workers of the slot are its successor or are leaving."""
        pool = self._world.fleet.pools[action.pool]
        others = [slot for slot in (pool.successor, pool.leaving) if slot is not None]
        return {slot.worker for slot in others} >= set(beside)

    def soon_replaced(self, pool: Pool, slot: Slot) -> bool:
        """Tell whether a worker that has run its number of tasks may be left idle."""
        if pool.successor is not None:
            return pool.recycled is slot
        leaving = pool.leaving
        return leaving is not None and self._world.now_ns - pool.leaving_ns <= HOLD_NS

    def _check_recycled(self, report: Report) -> None:
        """Check that a successor that was reported ready is ready."""
        self.recycled += 1
        if "is ready" not in report.reason:
            return
        pool = self._world.fleet.pools[report.pool]
        (slot,) = (slot for slot in pool.slots if slot.name == report.worker)
        assert self._world.workers[slot.worker].ready, f"{slot.name} has no worker"
        assert slot.state == SlotState.RUNNING, f"{slot.name} is {slot.state}"

    def _check_terminated(self, action: TerminateWorker) -> None:
        """Check that a recycle interrupts no task within its timeout."""
        world = self._world
        slot = world.fleet._state.workers.get(action.worker)
        worker = world.workers[action.worker]
        if slot is None or slot is not slot.pool.leaving or not world.fleet._state.intake_open:
            return
        for lease, since_ns in worker.runs if worker.alive else ():
            ran_ns = world.now_ns - since_ns - world.watch.debugging.stood_ns(worker, since_ns)
            assert ran_ns >= lease.timeout_ns, f"{worker.name} is interrupted"

    def validate(self) -> None:
        self._check_lame()
        self._check_worn()
        self._check_liars()

    def _check_liars(self) -> None:
        """Check that a worker does not go on for long with a lease that it has returned."""
        world = self._world
        for worker in world.workers.values():
            if worker.alive and worker.lied is not None and worker.running is worker.lied:
                took_ns = world.now_ns - worker.lied_ns if worker.lied_ns else 0
                assert took_ns <= LIAR_NS, f"{worker.name} runs {worker.lied}, given back"

    def _check_worn(self) -> None:
        """Check that no pool has two extra workers, and that no worker stays worn forever."""
        world = self._world
        for pool in world.fleet.pools.values():
            workers = sum(1 for slot in pool.everyone if slot.worker)
            assert workers <= len(pool.slots) + 1, f"{pool.name} has {workers} workers"
            for slot in pool.slots if world.is_calm else ():
                worn_ns = world.now_ns - slot.worn_ns if slot.worn else 0
                assert worn_ns <= WORN_NS, f"{slot.name} is worn for {worn_ns / SEC} s"

    def _check_lame(self) -> None:
        """Check that no worker idles without a sign of life for longer than its detection takes."""
        world = self._world
        for slot in world.fleet._state.workers.values():
            worker = world.workers.get(slot.worker)
            if worker is None:
                continue  # requested in this very step
            policy = slot.pool.policy
            limit_ns = policy.health_timeout_ns if worker.checking_ns else 0
            limit_ns = limit_ns or policy.heartbeat_timeout_ns
            if slot.state != SlotState.RUNNING or slot.killed_for or not limit_ns:
                continue
            if worker.alive and worker.lame_since_ns:
                gap_ns = min(CHECK_NS, limit_ns // CHECKS_PER_TIMEOUT)
                most_ns = limit_ns + (MISSED_MAX + 1) * gap_ns + SLACK_NS
                took_ns = world.now_ns - max(worker.lame_since_ns, slot.ready_ns)
                assert took_ns <= most_ns, f"{worker.name} is lame for {took_ns / SEC} s"
