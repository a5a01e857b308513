"""What must hold of the life of workers, whatever freezes, falls ill or is replaced.

Nobody who is well is killed for hanging. Whoever idles without a sign of life is killed in time.
No slot has two workers, but for the one that follows a worker on its way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.actions import KillWorker, SpawnWorker
from musterd.supervisor.core.rounds import MISSED_MAX, ROUND_NS, ROUNDS_PER_TIMEOUT
from musterd.supervisor.core.slot import SlotState
from simulation.profile import SEC

if TYPE_CHECKING:
    from simulation.world import World

SLACK_NS = 1 * SEC  # messages, polls that wake up late, the pause before a kill


class StaffWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.hung_found = self.sick_found = 0

    def handled(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, KillWorker):
                self._check_kill(action)
            elif isinstance(action, SpawnWorker):
                self._check_spawn(action)

    def _check_kill(self, action: KillWorker) -> None:
        """Who is killed for giving no sign of life gives none."""
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
        for worker in self._world.workers.values():
            assert worker.name != name or not (worker.alive and worker.counts), (
                f"{name} is started beside the living worker {worker.number}"
            )

    def validate(self) -> None:
        """Nobody idles without a sign of life for longer than it takes to be found."""
        world = self._world
        for slot in world.fleet._state.workers.values():
            worker = world.workers.get(slot.worker)
            if worker is None:
                continue  # asked for in this very step
            policy = slot.pool.policy
            limit_ns = policy.health_timeout_ns if worker.checking_ns else 0
            limit_ns = limit_ns or policy.heartbeat_timeout_ns
            if slot.state != SlotState.RUNNING or slot.killed_for or not limit_ns:
                continue
            if worker.alive and worker.lame_since_ns:
                gap_ns = min(ROUND_NS, limit_ns // ROUNDS_PER_TIMEOUT)
                most_ns = limit_ns + (MISSED_MAX + 1) * gap_ns + SLACK_NS
                took_ns = world.now_ns - max(worker.lame_since_ns, slot.ready_ns)
                assert took_ns <= most_ns, f"{worker.name} is lame for {took_ns / SEC} s"
