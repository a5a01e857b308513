"""Reloads at any moment, each with another policy, and their invariants.

A reload does not touch a pool whose build and size stay the same. Tasks that a removed pool had not
begun stay on disk and run when the pool comes back. At the end, every worker has the build that its
policy names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from musterd.supervisor.core.model.actions import (
    AssignLeases,
    KillWorker,
    StopForkServer,
    StopWorker,
    TerminateWorker,
)
from musterd.supervisor.core.model.events import PolicyChanged
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy
from musterd.supervisor.core.shutdown import Phase
from simulation.profile import MS, SEC, policy_of, scaling_of
from simulation.queue_watch import QueueWatch

if TYPE_CHECKING:
    from musterd.supervisor.core.model.queue import PoolQueue
    from simulation.world import World

BUILDS = ("a", "b", "c")


class Reloads:
    def __init__(self, world: World) -> None:
        self._world = world
        self._all = {pool.name: pool for pool in world.policy.pools}
        self._watched: dict[PoolQueue, QueueWatch] = {}

    # -- the operator -------------------------------------------------------------------------

    def at_random(self) -> None:
        world, rng = self._world, self._world.rng
        if not world.up or world.fleet.phase != Phase.UP:
            return
        there = [pool for pool in self._all.values() if rng.random() < 0.75]
        other = policy_of(world.profile, rng)
        keep = rng.random() < 0.4
        world.policy = structs.replace(
            world.policy if keep else other,
            pools=tuple(self._changed(pool) for pool in there),
            retry=structs.replace(other.retry, max_retries=world.policy.retry.max_retries),
            workers_max=0,  # limits scaling, not what a reload starts
        )
        self._reload()

    def _changed(self, pool: PoolPolicy) -> PoolPolicy:
        rng = self._world.rng
        if rng.random() < 0.5:
            pool = structs.replace(pool, build=rng.choice(BUILDS))
        if self._world.profile.scaling and rng.random() < 0.5:
            scaling = scaling_of(rng)
            low, high = (scaling.min, scaling.max) if scaling is not None else (0, 3)
            pool = structs.replace(pool, scaling=scaling, size=rng.randint(low, high))
        elif pool.scaling is None and rng.random() < 0.3:
            pool = structs.replace(pool, size=rng.randint(0, 3))
        if rng.random() < 0.3:
            pool = structs.replace(
                pool,
                queue_size=rng.choice((20, 1000)),
                aging_ns=rng.choice((50 * MS, 5 * SEC)),
                task_timeout_ns=rng.choice((1, 5)) * SEC,
            )
        self._all[pool.name] = pool
        return pool

    def put_in_order(self) -> None:
        """Restore every pool in the calm, and retry what was given up."""
        world = self._world
        pools = world.fleet.pools
        done = all(
            name in pools
            and pools[name].build == pool.build
            and not pools[name].rollout
            and not any(slot.worker and slot.build != pool.build for slot in pools[name].slots)
            for name, pool in self._all.items()
        )
        missing = len(world.policy.pools) < len(self._all)
        if missing or not (done or any(pool.rollout for pool in pools.values())):
            world.policy = structs.replace(world.policy, pools=tuple(self._all.values()))
            self._reload()

    @property
    def settled(self) -> bool:
        pools = self._world.fleet.pools
        return pools.keys() == self._all.keys() and all(
            not pool.rollout
            and pool.is_open
            and pool.build == self._all[pool.name].build
            and all(slot.build == pool.build for slot in pool.slots)
            for pool in pools.values()
        )

    def _reload(self) -> None:
        self._world.tell(PolicyChanged(self._world.policy))

    # -- invariants ---------------------------------------------------------------------------

    def before(self, event: Any) -> dict[str, tuple[int, ...]]:
        """Remember the workers of pools that this reload must not touch."""
        if not isinstance(event, PolicyChanged):
            return {}
        return {
            pool.name: tuple(slot.worker for slot in pool.slots if slot.worker)
            for pool in self._world.fleet.pools.values()
            if self._untouched(pool, event.policy)
        }

    def _untouched(self, pool: Any, policy: FleetPolicy) -> bool:
        wanted = next((each for each in policy.pools if each.name == pool.name), None)
        sizes = (pool.policy.size, pool.policy.scaling)
        same = wanted is not None and (wanted.size, wanted.scaling) == sizes
        outdated = any(slot.worker and slot.build != pool.build for slot in pool.slots)
        return (
            same
            and pool.is_open
            and not outdated
            and pool.rollout is None
            and wanted.build == pool.build
        )

    def handled(
        self, event: Any, actions: list[Any], untouched: dict[str, tuple[int, ...]]
    ) -> None:
        for pool in self._world.fleet.pools.values():
            if pool.queue not in self._watched:
                self._watched[pool.queue] = QueueWatch(pool.queue)
        if not isinstance(event, PolicyChanged):
            return
        workers = {worker for each in untouched.values() for worker in each}
        for action in actions:
            if isinstance(action, StopWorker | TerminateWorker | KillWorker):
                assert action.worker not in workers, f"{action}: its pool was not changed"
            elif isinstance(action, StopForkServer):
                assert action.pool not in untouched, f"{action}: its pool was not changed"
            elif isinstance(action, AssignLeases):
                slot = self._world.fleet._state.workers[action.worker]
                assert not slot.pool.removed, f"{slot.name} is removed and gets leases"
