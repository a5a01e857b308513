"""Requests of running handlers: they save, load and clear states, take and return locks, and report
progress, at random moments of their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.messages import Completion, Lease
from musterd.supervisor.core.model.events import (
    LeasesCompleted,
    LeasesReturned,
    LockReturned,
    LockWanted,
    ProgressMade,
    StateGiven,
    StateWanted,
)
from simulation.profile import MS, SEC

if TYPE_CHECKING:
    from simulation.workers import Worker
    from simulation.world import World

ASKS_MAX = 8  # per run
KEYS = ("x", "y")


class Asks:
    """One worker's side."""

    def __init__(self, world: World, worker: Worker) -> None:
        self._world = world
        self._worker = worker
        self._request = 0
        self._locks: dict[str, int] = {}  # held or waited for, with the request
        self._own: dict[int, bool] = {}  # its own states under way: request, whether with a value
        self.clears = ""

    def began(self, lease: Lease, run: int, run_ns: int) -> None:
        self._locks.clear()
        self._own.clear()
        self.clears = ""
        world = self._world
        if run_ns > 1 * MS and world.rng.random() < world.profile.asks:
            for _ in range(world.rng.randint(1, ASKS_MAX)):
                world.in_life(world.delay(0, run_ns), self._ask, lease, run)

    def ended(self, lease: Lease) -> None:
        """End the run's handler: its locks are really free now, whatever the core knows."""
        self._world.watch.handler_requests.let_go(lease.lease)

    def _ask(self, lease: Lease, run: int) -> None:
        worker, rng = self._worker, self._world.rng
        if not worker.alive or worker.running is not lease or worker.run != run:
            return
        self._request += 1
        lies = 0.0 if self._world.is_calm else self._world.profile.lies
        if lies and rng.random() < lies:
            worker.send(getattr(self, rng.choice(("_unlock_others", "_end_others", "_lie")))(lease))
            return
        kind = rng.choice(("save", "save", "load", "clear", "lock", "lock", "unlock", "progress"))
        worker.send(getattr(self, f"_{kind}")(lease))

    def _key(self, lease: Lease) -> str:
        return self._world.rng.choice((self._own_key(lease), *KEYS))

    def _own_key(self, lease: Lease) -> str:
        return f"{self._worker.pool}.{lease.method}"

    def _save(self, lease: Lease) -> StateGiven:
        key, value = self._key(lease), self._world.watch.handler_requests.new_value()
        if key == self._own_key(lease):
            self._own[self._request] = True
        return StateGiven(self._worker.number, self._request, key, value, 0, lease.lease)

    def _clear(self, lease: Lease) -> StateGiven:
        key = self._key(lease)
        if key == self._own_key(lease):
            self._own[self._request] = False
        return StateGiven(self._worker.number, self._request, key, None, 0, lease.lease)

    def _load(self, lease: Lease) -> StateWanted:
        key = self._key(lease)
        return StateWanted(self._worker.number, self._request, key, lease.lease)

    def _lock(self, lease: Lease) -> Any:
        world = self._world
        name = world.rng.choice(world.profile.locks)
        if name in self._locks:
            return self._unlock(lease)
        self._locks[name] = self._request
        timeout_ns = world.rng.choice((0, world.delay(1 * MS, 500 * MS), 5 * SEC))
        return LockWanted(self._worker.number, lease.lease, self._request, name, timeout_ns)

    def _unlock(self, lease: Lease) -> Any:
        if not self._locks:
            return self._progress(lease)
        name = self._world.rng.choice(list(self._locks))
        del self._locks[name]
        self._world.watch.handler_requests.gave_back(lease.lease, name)
        return LockReturned(self._worker.number, lease.lease, name)

    def _progress(self, lease: Lease) -> ProgressMade:
        return ProgressMade(self._worker.number, lease.lease, self._world.rng.random(), "")

    # -- lies ---------------------------------------------------------------------------------

    def _others(self) -> list[Lease]:
        """Return the leases that other workers run."""
        workers = self._world.workers.values()
        return [
            each.running
            for each in workers
            if each is not self._worker and each.alive and each.running is not None
        ]

    def _unlock_others(self, lease: Lease) -> Any:
        """Return a lock that another worker holds."""
        others = self._others()
        if not others:
            return self._progress(lease)
        rng = self._world.rng
        name = rng.choice(self._world.profile.locks)
        return LockReturned(self._worker.number, rng.choice(others).lease, name)

    def _end_others(self, lease: Lease) -> Any:
        """Report that a lease of another worker has ended."""
        others = self._others()
        if not others:
            return self._progress(lease)
        other = self._world.rng.choice(others)
        return LeasesCompleted(self._worker.number, [Completion(other.lease, 1, b"not so")])

    def _lie(self, lease: Lease) -> LeasesReturned:
        """Return a running lease and go on with it."""
        self._world.watch.lied(self._worker, lease)
        self._locks.clear()
        return LeasesReturned(self._worker.number, [lease.lease])

    # -- answers ------------------------------------------------------------------------------

    def state_answered(self, request: int) -> None:
        saved = self._own.pop(request, None)
        lease = self._worker.running
        if saved is not None and lease is not None:
            self.clears = self._own_key(lease) if saved else ""

    def lock_answered(self, request: int, taken: bool) -> None:
        if not taken:
            for name, asked in list(self._locks.items()):
                if asked == request:
                    del self._locks[name]
