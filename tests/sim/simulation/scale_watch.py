"""Check pools that scale by themselves, and the bound that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.model import scaler
from musterd.supervisor.core.model.actions import Report, SpawnWorker, StopWorker
from musterd.supervisor.core.model.events import AutoscaleRequested, PolicyChanged, ScaleRequested
from musterd.supervisor.core.model.memory import Level
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.shutdown import Phase

if TYPE_CHECKING:
    from simulation.world import World


class ScaleWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self._busy: dict[int, bool] = {}
        self._sizes: dict[str, int] = {}
        self._moved_ns: dict[tuple[str, bool], int] = {}  # by (pool, whether up): the last change

    def new_life(self) -> None:
        self._sizes = {name: pool.size for name, pool in self._world.fleet.pools.items()}
        self._moved_ns = {}

    def before(self) -> None:
        self._busy = {
            slot.worker: bool(slot.leases) for slot in self._world.fleet._state.workers.values()
        }

    def handled(self, event: Any, actions: list[Any]) -> None:
        asked = isinstance(event, ScaleRequested | AutoscaleRequested | PolicyChanged)
        if isinstance(event, PolicyChanged):
            self._moved_ns = {}  # new scalers know nothing of earlier changes
        sizes, self._sizes = self._sizes, {}
        for pool in self._world.fleet.pools.values():
            before = sizes.get(pool.name, pool.size)
            self._sizes[pool.name] = pool.size
            if pool.scaler is None or pool.scaler.manual or not pool.is_open:
                continue
            policy = pool.scaler.policy
            assert policy.min <= pool.size <= policy.max, f"{pool.name} has size {pool.size}"
            if self._world.fleet.phase == Phase.UP:
                assert pool.size or pool.halt or not pool.queue.size, (
                    f"{pool.name} starts no worker"
                )
            if before != pool.size and not asked:
                self._check_pauses(pool, before)
        if any(isinstance(action, SpawnWorker) for action in actions):
            self._check_bound()
        if not asked:
            self._check_drained(actions)

    def _check_pauses(self, pool: Pool, before: int) -> None:
        """Check pauses between changes: no quick repeat, no turn within `idle` except from zero."""
        assert pool.scaler is not None
        now_ns, up = self._world.now_ns, pool.size > before
        same_ns = now_ns - self._moved_ns.get((pool.name, up), 0)
        other_ns = now_ns - self._moved_ns.get((pool.name, not up), 0)
        self._moved_ns[pool.name, up] = now_ns
        if up:
            assert pool.size <= max(1, before * scaler.GROWTH), f"{before} to {pool.size}"
            tight = self._world.fleet.memory.level != Level.NORMAL
            assert not before or not tight, f"{pool.name} grows although memory is tight"
            assert not before or same_ns >= scaler.UP_PAUSE_NS, f"{pool.name} grows again"
            assert not before or other_ns >= scaler.TURN_PAUSE_NS, f"{pool.name} flaps"
        else:
            assert before - pool.size <= max(1, before // scaler.SHRINK_PART)
            assert same_ns >= scaler.DOWN_PAUSE_NS, f"{pool.name} shrinks again"
            assert other_ns >= pool.scaler.policy.idle_ns, f"{pool.name} flaps"

    def _check_bound(self) -> None:
        workers_max = self._world.policy.workers_max
        alive = len(self._world.fleet._state.workers)
        assert not workers_max or alive <= workers_max, f"{alive} workers of {workers_max}"

    def _check_drained(self, actions: list[Any]) -> None:
        """Check that the scaler stops only idle workers."""
        scaled = {
            action.pool
            for action in actions
            if isinstance(action, Report) and action.event == "pool.scaled"
        }
        for action in actions:
            if isinstance(action, StopWorker):
                slot = self._world.fleet._state.workers[action.worker]
                by_scaler = slot.pool.name in scaled and slot.pool.rollout is None
                assert not by_scaler or not self._busy[action.worker], slot.name
