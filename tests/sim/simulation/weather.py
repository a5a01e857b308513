"""Memory in the simulated world: what others use, what the workers use, and what must follow.

Other programs use a share that jumps, climbs or swings; each worker uses a part of its own, more
while it runs a task. When nothing is left, the kernel kills the largest worker. The core gets a
sample once a second, as from the probe. Checked against the truth of this world:

- at a threshold, every pool has its lower target with the answer to the sample;
- pools with `sacrifice` have no worker where memory stays critical; the others may always have one;
- a worker that has to go is gone within the budget of a stop, or at once in the last stage;
- nothing comes back before use was below the threshold, by the margin, for the whole of `calm`;
- no worker is added beside others when the last sample said critical;
- in the calm at the end, everything comes back by itself (World._settled).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.model.actions import Report, SpawnWorker
from musterd.supervisor.core.model.events import MemorySampled, MemorySource
from musterd.supervisor.core.model.memory import Level
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.sizes import MEBIBYTE
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.core.tasks.leases import HARD_GRACE_NS
from musterd.supervisor.core.workers.pressure import Stage
from musterd.supervisor.core.workers.sizing import active
from simulation.profile import MS, SEC
from simulation.workers import SIGKILL, Worker

if TYPE_CHECKING:
    from simulation.world import World

TOTAL = 16_000 * MEBIBYTE  # in the calm, the largest fleet fits
SAMPLE_NS = (900 * MS, 1100 * MS)
CALM_SHARE = 0.1
RECYCLE_NS = 5 * SEC + HARD_GRACE_NS  # a recycled worker gets its task's whole timeout
SLACK_NS = 3 * SEC  # signals, exits and messages take time
FALLS = ("memory.recovering", "memory.normal")

Curve = Callable[[int], float]


class Weather:
    def __init__(self, world: World) -> None:
        self._world = world
        rng = world.rng
        self._idle = {name: rng.randint(20, 150) * MEBIBYTE for name in world.pool_names}
        self._busy = {name: rng.randint(0, 300) * MEBIBYTE for name in world.pool_names}
        self._curve: Curve = lambda _: CALM_SHARE
        self._calm_since_ns: int | None = None
        self._excess_since: dict[str, tuple[int, int | None]] = {}
        self.rises = 0
        self.sacrificed = 0  # times a pool was seen to have given way entirely

    # -- what happens -------------------------------------------------------------------------

    def plan(self) -> None:
        world = self._world
        for _ in range(world.rng.randint(1, 5)):
            world.after(world.delay(0, world.profile.faults_ns), self._change)

    def _change(self) -> None:
        """Give other programs another share."""
        rng, began_ns = self._world.rng, self._world.now_ns
        low, high = rng.uniform(0.05, 0.6), rng.uniform(0.5, 0.95)
        span_ns = self._world.delay(1 * SEC, 15 * SEC)

        def climb(now_ns: int) -> float:
            return low + (high - low) * min(1.0, (now_ns - began_ns) / span_ns)

        def swing(now_ns: int) -> float:
            return high if (now_ns - began_ns) // (span_ns // 4) % 2 else low

        self._curve = rng.choice((lambda _: low, lambda _: high, climb, swing))

    def new_life(self) -> None:
        """Start a supervisor, which looks at memory first."""
        self._excess_since = {}
        self._calm_since_ns = None
        self._look()
        self._world.in_life(self._world.delay(*SAMPLE_NS), self._sample)

    def _takes(self, worker: Worker) -> int:
        if not worker.alive:
            return 0
        return self._idle[worker.pool] + (self._busy[worker.pool] if worker.running else 0)

    def _used(self) -> int:
        world = self._world
        others = CALM_SHARE if world.is_calm else self._curve(world.now_ns)
        return int(others * TOTAL) + sum(self._takes(each) for each in world.workers.values())

    def _sample(self) -> None:
        world = self._world
        while self._used() >= TOTAL:
            largest = max(world.workers.values(), key=self._takes)
            if not self._takes(largest):
                break
            largest.oom = "the kernel killed it: memory ran out"
            largest.die(-SIGKILL)
        self._look()
        world.in_life(world.delay(*SAMPLE_NS), self._sample)

    def _look(self) -> None:
        world = self._world
        known = {
            worker.number: self._takes(worker)
            for worker in world.workers.values()
            if worker.ready and worker.alive and world.rng.random() < 0.9
        }
        source = MemorySource("memory", TOTAL, self._used())
        world.tell(MemorySampled((source,), workers=known))

    # -- invariants ---------------------------------------------------------------------------

    def handled(self, event: Any, actions: list[Any]) -> None:
        fleet = self._world.fleet
        if fleet.phase != Phase.UP:
            return
        if isinstance(event, MemorySampled):
            self._check_sample(event.sources[0].share, actions)
        for action in actions:
            if isinstance(action, SpawnWorker):
                self._check_spawn(action)

    def _check_last(self, pool: Pool) -> None:
        """Check that marked pools go first, to the last worker; the others may always have one."""
        stage, sacrifice = self._world.fleet.stage, pool.policy.sacrifice
        if stage >= Stage.SACRIFICE:
            assert pool.limit == (0 if sacrifice else 1), f"{pool.name} may have {pool.limit}"
            assert not (sacrifice and active(pool)), f"{pool.name} is not given up"
            self.sacrificed += sacrifice
        else:
            assert pool.limit != 0, f"{pool.name} is given up too early"

    def _check_sample(self, share: float, actions: list[Any]) -> None:
        world, fleet, policy = self._world, self._world.fleet, self._world.policy.memory
        told = [each.event for each in actions if isinstance(each, Report)]
        self.rises += sum(name in ("memory.warning", "memory.critical") for name in told)
        for pool in fleet.pools.values():
            running = len(active(pool))
            self._check_last(pool)
            if share >= policy.critical:
                assert running <= 1, f"critical, and {pool.name} has {running} workers"
                assert fleet.memory.level == Level.CRITICAL
            elif share >= policy.warning:
                assert pool.limit is not None, pool.name
                assert running <= pool.limit, f"{pool.name} has {running} workers"
                half = max(1, pool.size // 2)  # the size may change later on
                assert running <= half or "memory.warning" not in told, pool.name
                assert fleet.memory.level >= Level.WARNING
            self._check_gone(pool.name)
        if any(name in FALLS for name in told):
            since_ns = self._calm_since_ns
            assert since_ns is not None, f"at {share:.0%} there is nothing to be glad about"
            assert world.now_ns - since_ns >= policy.calm_ns, "it comes back too soon"
        line = (policy.warning, policy.warning, policy.critical)[fleet.memory.level]
        if share >= line - policy.margin:
            self._calm_since_ns = None
        elif self._calm_since_ns is None or any(name in FALLS for name in told):
            self._calm_since_ns = world.now_ns

    def _check_gone(self, name: str) -> None:
        """Check that workers beyond the limit get the time of a stop, and no more."""
        world = self._world
        pool = world.fleet.pools[name]
        beyond = [slot for slot in pool.slots if slot.held and slot.state == SlotState.DRAINING]
        if not beyond:
            self._excess_since.pop(name, None)
            return
        oldest = min(slot.worker for slot in beyond)
        since_ns, worker = self._excess_since.get(name, (0, None))
        if worker != oldest:
            self._excess_since[name] = (world.now_ns, oldest)
            return
        policy = world.policy
        budget_ns = policy.drain_timeout_ns + policy.stop_timeout_ns + SLACK_NS
        if world.profile.recycles:
            budget_ns += RECYCLE_NS
        took_ns = world.now_ns - since_ns
        assert took_ns <= budget_ns, f"{name}: held, and there after {took_ns / SEC} s"
        if world.fleet.stage == Stage.KILL:
            killed = all(slot.killed_for for slot in beyond)
            assert killed, f"{name}: memory stays critical, and {beyond} live"

    def _check_spawn(self, action: SpawnWorker) -> None:
        memory = self._world.fleet.memory
        pool = self._world.fleet.pools[action.pool]
        others = [slot for slot in pool.slots if slot.worker not in (0, action.worker)]
        if memory.level == Level.CRITICAL:
            working = [slot for slot in others if slot.state != SlotState.DRAINING]
            assert not working, f"{pool.name} gets one more worker while memory is critical"
