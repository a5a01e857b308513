"""Autoscaling: grows and shrinks pools between their `min` and `max`, within `workers_max`.

Each pool's scaler (core/model/scaler.py) says what size the pool would like; Autoscale decides what
it gets. All scalers are asked together, every LOOK_NS, so that growing pools are compared: the pool
with the more urgent tasks comes first, then the pool whose tasks have waited longest. A pool at its
`min` with an empty queue is not asked; its next task wakes it, and starts the first worker at once
where there is none.

Memory comes first: a pool grows only at the normal level, and by no more than fits. `workers_max`
bounds all pools together. A pool claims its size, its workers that are still leaving, and in any
case its `min` and one worker: the first task of an idle pool never waits for other pools.

A size that a person asks for (`scale`) holds until the person takes it back.
"""

from musterd.ipc.resilience.policy import POOL_SIZE_MAX, SECOND_NS
from musterd.ipc.wire.messages import Rejection
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Acknowledge
from musterd.supervisor.core.model.policy import PoolPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.scaler import Load, Scaler, Wish
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.workers import sizing
from musterd.supervisor.core.workers.demand import load_of, shared_backlog
from musterd.supervisor.core.workers.lifecycle import WorkerLifecycle

LOOK_NS = 1 * SECOND_NS
NO_SUCH_POOL, TOO_MANY_WORKERS = "NoSuchPool", "TooManyWorkers"  # why a scale is refused


class Autoscale:
    def __init__(self, state: State, lifecycle: WorkerLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._watched: dict[Pool, Scaler] = {}
        self.looks = False  # whether the timer is set

    def started(self) -> None:
        for pool in self._state.pools.values():
            self.begin(pool)

    def begin(self, pool: Pool) -> None:
        """Scale this pool anew."""
        self.leave(pool)
        self.notice(pool)

    def notice(self, pool: Pool) -> None:
        """Scale this pool from now on, if there is anything to do."""
        scaler = pool.scaler
        pool.watched = True
        if scaler is None or scaler.manual or not self._state.intake_open:
            return
        if self._at_rest(pool, scaler):
            pool.watched = False
            return
        scaler.wake(self._state.now_ns)
        self._watched[pool] = scaler
        if not pool.size and self._has_work(pool):
            self._resize(pool, scaler, 1, "a task waits and there is no worker")
        self._look_later()

    def _look_later(self) -> None:
        if not self.looks:
            self.looks = True
            self._state.timers.at(self._state.now_ns + LOOK_NS, self._look)

    def _look(self) -> None:
        self.looks = False
        if not self._state.intake_open:
            return
        growing: list[tuple[Load, Pool, Wish]] = []
        for pool, scaler in self._watched.items():
            load = load_of(pool, self._state.now_ns)
            wish = scaler.wish(self._state.now_ns, load)
            scaler.held = ""
            if wish.size < load.size:
                self._resize(pool, scaler, wish.size, wish.reason)
            elif wish.size > load.size:
                growing.append((load, pool, wish))
        growing.sort(key=lambda each: (each[0].level, -each[0].waited_ns))
        for _, pool, wish in growing:
            self._grow(pool, self._watched[pool], wish)
        for pool, scaler in list(self._watched.items()):
            if self._at_rest(pool, scaler):
                del self._watched[pool]
                pool.watched = False
        if self._watched:
            self._look_later()

    def _at_rest(self, pool: Pool, scaler: Scaler) -> bool:
        """Return whether there is nothing to do until tasks wait again."""
        return not self._has_work(pool) and pool.size <= scaler.policy.min

    def _has_work(self, pool: Pool) -> bool:
        busy = max(pool.busy, pool.busy_most)
        return bool(
            pool.queue.size
            or (pool.backlog and shared_backlog(pool, self._state.now_ns, busy) is not None)
        )

    def cluster_told(self, _event: events.ClusterTold) -> None:
        """Scale the clustered pools for which there is more to do than is here."""
        for pool in self._state.pools.values():
            if not pool.watched and pool.backlog is not None and not pool.halt:
                self.notice(pool)

    def _grow(self, pool: Pool, scaler: Scaler, wish: Wish) -> None:
        memory = self._state.memory
        size, why = wish.size, ""
        bound, fitting = self.bound(pool), memory.fitting(pool)
        if bound < size:
            size, why = bound, f"workers_max of {self._state.policy.workers_max} is reached"
        # The pool's claim is always granted; memory may still hold workers back (sizing.py).
        least = max(1, scaler.policy.min)
        if fitting is not None and size > max(least, pool.size + fitting):
            size, why = max(least, pool.size + fitting), memory.shortage(pool)
        if size > pool.size:
            self._resize(pool, scaler, size, wish.reason)
        if why:
            scaler.held = f"{wish.reason}, but {why}"

    def bound(self, pool: Pool) -> int:
        """Return how many workers this pool may have beside those of the others."""
        workers_max = self._state.policy.workers_max
        if not workers_max:
            return POOL_SIZE_MAX
        others = [each for each in self._state.pools.values() if each is not pool]
        # Its own leaving workers come back first, except those that a recycle added.
        beside = sum(slot.alive for slot in pool.beside)
        return workers_max - beside - sum(sizing.claimed(each) for each in others)

    def _resize(self, pool: Pool, scaler: Scaler, size: int, reason: str) -> None:
        before = pool.size
        scaler.changed(self._state.now_ns, before, size)
        scaler.why = f"from {before} to {size}: {reason}"
        self._state.report("pool.scaled", pool=pool, reason=scaler.why)
        pool.size = size
        self._lifecycle.fit(pool)

    # -- another policy -----------------------------------------------------------------------

    def follow(self, pool: Pool, before: PoolPolicy) -> None:
        """Apply the pool's changed policy; a size that a person asked for still holds."""
        policy = pool.policy
        if (policy.size, policy.scaling) == (before.size, before.scaling):
            return
        manual = pool.scaler is not None and pool.scaler.manual
        size = policy.size if policy.size != before.size else pool.size
        if policy.scaling != before.scaling:
            self.leave(pool)
            pool.scaler = Scaler(policy.scaling) if policy.scaling is not None else None
        if pool.scaler is None:
            size = policy.size
        else:
            pool.scaler.manual = manual
            bounds = pool.scaler.policy
            size = size if manual else min(max(size, bounds.min), bounds.max)
            pool.scaler.changed(self._state.now_ns, pool.size, size)
        if size != pool.size:
            self._lifecycle.resize(pool, size)
        self.begin(pool)

    def leave(self, pool: Pool) -> None:
        """Stop scaling this pool."""
        self._watched.pop(pool, None)
        pool.watched = True

    # -- what people ask for ------------------------------------------------------------------

    def scale(self, event: events.ScaleRequested) -> None:
        """Set the size that a person asks for: beyond `min` and `max`, not beyond `workers_max`."""
        pool = self._state.pools.get(event.pool)
        refusal = self._refusal(pool, event)
        if event.peer:
            rejected = [] if refusal is None else [refusal]
            self._state.out.append(Acknowledge(event.peer, 0, rejected))
        if pool is None or refusal is not None:
            return
        scaler = pool.scaler
        size = max(0, event.size)
        if scaler is not None and self._state.intake_open:
            self._watched.pop(pool, None)
            pool.watched = True  # until the person takes it back
            scaler.manual = True
            scaler.held = ""
            scaler.why = f"from {pool.size} to {size}: asked for"
            scaler.changed(self._state.now_ns, pool.size, size)
        if not self._lifecycle.closed("scale"):
            self._lifecycle.resize(pool, size)

    def _refusal(self, pool: Pool | None, event: events.ScaleRequested) -> Rejection | None:
        """Why the pool cannot be scaled to that size, if it cannot."""
        if pool is None or not pool.is_open:
            why = "there is no such pool any more"
            return Rejection(event.pool, NO_SUCH_POOL, f"{event.pool} was not scaled: {why}")
        workers_max = self._state.policy.workers_max
        bound = self.bound(pool)
        if not workers_max or event.size <= max(bound, pool.size):
            return None
        return Rejection(
            event.pool,
            TOO_MANY_WORKERS,
            f"{event.pool} may have {max(0, bound)} workers beside those of the other "
            f"pools: supervisor.workers_max is {workers_max}",
        )

    def resumed(self, event: events.AutoscaleRequested) -> None:
        """Scale the pool as the configuration says again."""
        pool = self._state.pools.get(event.pool)
        if pool is None or not pool.is_open or not self._state.intake_open:
            return
        scaler = pool.scaler
        if scaler is None:
            self._lifecycle.resize(pool, pool.policy.size)
        elif scaler.manual:
            scaler.manual = False
            scaler.why = ""
            policy = scaler.policy
            size = min(max(pool.size, policy.min), policy.max)
            if size != pool.size:
                self._resize(pool, scaler, size, f"between {policy.min} and {policy.max} again")
            self.notice(pool)
