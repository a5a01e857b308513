"""Workers that run several tasks at once: each lease begins on arrival and ends by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from musterd.ipc.wire.messages import CANCEL, Completion, Failure, Lease
from musterd.supervisor.core.model.events import BoardRead, LeasesCompleted, LeasesReturned
from simulation.profile import MS
from simulation.workers import SIGSEGV, SIGTERM, Worker

if TYPE_CHECKING:
    from simulation.world import World


class WideWorker(Worker):
    def __init__(self, world: World, number: int, pool: str, index: int, width: int) -> None:
        super().__init__(world, number, pool, index)
        self.width = width
        self._runs: dict[int, tuple[Lease, int]] = {}

    @property
    def runs(self) -> list[tuple[Lease, int]]:
        return list(self._runs.values())

    def _note_oldest(self) -> None:
        """Note the oldest run, as narrow workers have only one."""
        runs = self.runs
        self.running = runs[0][0] if runs else None
        self.board = (runs[0][0].lease, runs[0][1]) if runs else (0, self._world.now_ns)

    # -- running tasks ------------------------------------------------------------------------

    def assign(self, leases: list[Lease]) -> None:
        assert self.ready, f"worker {self.number} was given work before it was ready"
        assert not self._closing, f"worker {self.number} was given work after its end"
        self.queue.extend(leases)
        if self._stopping:
            self.recall()
        while self.queue and not self._wedged and not self.frozen_ns:
            self._begin()

    def _begin(self) -> None:
        world = self._world
        if not self._runs and not world.is_calm and world.rng.random() < world.profile.wedge:
            self._wedged = True
            return
        lease = self.queue.popleft()
        self._runs[lease.lease] = (lease, world.now_ns)
        self._note_oldest()
        world.watch.began(self, lease)
        run_ns, ending = self._fate(lease)
        self.breakpoints.began(lease, run_ns)
        if ending == "hang":
            world.watch.failed_run(lease)
        else:
            world.in_life(run_ns, self._over, lease.lease, run_ns, ending)

    def _over(self, number: int, run_ns: int, ending: str) -> None:
        if not self.alive or number not in self._runs or self.frozen_ns:
            return
        if self.breakpoints.postpones(self._over, number, run_ns, ending):
            return
        if ending == "crash":
            self.die(-SIGSEGV)
            return
        unwell = (
            ending != "success" and self._world.profile.gates and self._world.rng.random() < 0.7
        )
        failure = None if ending == "success" else Failure(ending, "Sim", "planned", unwell=unwell)
        self._conclude(number, run_ns, failure)

    def _conclude(self, number: int, run_ns: int, failure: Failure | None) -> None:
        world = self._world
        lease, _ = self._runs.pop(number)
        self._note_oldest()
        world.watch.ended(self, lease)
        self.breakpoints.over(lease)
        failure, login = world.logins.ended(self.pool, lease, failure)
        if failure is not None and failure.kind != CANCEL:
            world.watch.failed_run(lease)
        value = b"value of " + lease.id.encode() if failure is None else b""
        delay_ns = world.delay(0, 200 * MS) if world.rng.random() < 0.1 else -1
        done = Completion(number, run_ns, value, failure, delay_ns, login=login)
        self.send(LeasesCompleted(self.number, [done]))
        if self._stopping and not self._runs:
            self._close()

    # -- orders -------------------------------------------------------------------------------

    def recall(self) -> None:
        leases = [lease.lease for lease in self.queue]
        for lease in self.queue:
            self._world.watch.given_back(self, lease)
        self.queue.clear()
        self.send(LeasesReturned(self.number, leases))

    def cancel(self, number: int) -> None:
        if number in self._runs and not self._deaf():
            self._cancel_run(number)

    def _cancel_run(self, number: int) -> None:
        run_ns = self._world.now_ns - self._runs[number][1]
        self._conclude(number, run_ns, Failure(CANCEL, "Cancelled"))

    def terminate(self) -> None:
        if self._deaf():
            return
        if not self.ready or self._world.rng.random() < 0.3:
            self.die(-SIGTERM)
            return
        self._stopping = True
        self.recall()
        if not self._runs:
            self._close()
        for number in list(self._runs):
            self._cancel_run(number)

    def look(self) -> BoardRead:
        beside = tuple((lease.lease, since_ns) for lease, since_ns in self.runs[1:])
        narrow = super().look()
        return BoardRead(
            self.number, narrow.lease, narrow.since_ns, narrow.checking_ns, beside=beside
        )

    def freeze(self) -> None:
        if not self.frozen_ns:
            self.frozen_ns = self._world.now_ns
            for lease, _ in self.runs:
                self._world.watch.failed_run(lease)
