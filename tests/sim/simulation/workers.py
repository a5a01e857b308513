"""Worker processes and fork servers, with all their faults."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.messages import (
    CANCEL,
    ERROR,
    INVALID,
    PERMANENT,
    TIMEOUT,
    Completion,
    Failure,
    Lease,
    Sample,
    TaskDeclaration,
)
from musterd.ipc.wire.scoreboard import EXIT_UNHEALTHY
from musterd.supervisor.core.model.events import (
    BoardRead,
    ForkServerExited,
    ForkServerFailed,
    ForkServerReady,
    LeasesCompleted,
    LeasesReturned,
    LeftoversEnded,
    SpawnFailed,
    WorkerExited,
    WorkerForked,
    WorkerReady,
)
from simulation.asks import Asks
from simulation.debugging import Breakpoints
from simulation.nested import Nested
from simulation.profile import BEAT_NS, CALM_DURATION_MAX_NS, DURATIONS_NS, METHODS, MS, SEC, US

if TYPE_CHECKING:
    from simulation.world import World

WIRE_NS = (20 * US, 1 * MS)
LATE_NS = (1 * MS, 80 * MS)
EXIT_NOTICED_NS = (50 * US, 30 * MS)
SIGTERM, SIGKILL, SIGSEGV = 15, 9, 11
RUNS = "runs"  # the name under which workers count what they have run
DECLARATIONS = tuple(TaskDeclaration(method) for method in METHODS)


class Worker:
    width = 1  # tasks it runs at once

    def __init__(self, world: World, number: int, pool: str, index: int) -> None:
        self._world = world
        self.number = number
        self.pool = pool
        self.index = index
        self.name = f"{pool}/{index}"
        self.forked = False
        self.fork_reported = False
        self.counts = False  # its slot waits for its exit
        self.alive = False
        self.ready = False
        self.board = (0, 0)
        self.queue: deque[Lease] = deque()
        self.running: Lease | None = None
        self.asks = Asks(world, self)
        self.nested = Nested(world, self)
        self.breakpoints = Breakpoints(world, self)
        self.run = 0  # the number of the run, to tell a cancelled ending from the next one
        self._outbox: list[Completion] = []
        self._flush_at = world.rng.randint(1, 8)
        self.recalled = False  # the core has asked for its leases back and got no answer yet
        self.doomed = False  # the core has ordered its end
        self.lied: Lease | None = None  # the lease it runs although it returned it
        self.lied_ns = 0  # since when the core knows
        self._wedged = False
        self.frozen_ns = 0  # since when it does nothing, 0 if it works
        self.checking_ns = 0  # since when healthy() runs
        self.unhealthy = False  # it ended because healthy() said no
        self.oom = ""  # why the kernel killed it for memory
        self._stopping = False
        self._closing = False
        self._arrival_ns = 0
        self._order_ns = 0

    @property
    def runs(self) -> list[tuple[Lease, int]]:
        """Return the running leases and since when each runs; the oldest first."""
        return [(self.running, self.board[1])] if self.running is not None else []

    # -- start --------------------------------------------------------------------------------

    def fork(self) -> None:
        world = self._world
        self.forked = self.alive = True
        self.board = (0, world.now_ns)
        late = world.rng.random() < world.profile.late
        world.in_life(world.delay(*(LATE_NS if late else WIRE_NS)), self._report_fork)
        boot = world.delay(1 * MS, 150 * MS)
        chance = 1.0 if world.is_calm else world.rng.random()
        profile = world.profile
        if chance < profile.open_fails:
            world.in_life(boot, self.die, 1)
        elif chance < profile.open_fails + profile.slow_start:
            if world.rng.random() < 0.5:
                world.in_life(world.delay(1 * SEC, 4 * SEC), self._open)
        else:
            world.in_life(boot, self._open)

    def _report_fork(self) -> None:
        self.fork_reported = True
        self._world.tell(WorkerForked(self.number, 1000 + self.number))
        # A fork that took too long is answered by a kill; its slot goes on meanwhile.
        self.counts = self._world.up and self.number in self._world.fleet._state.workers

    def _open(self) -> None:
        if self.alive and not self.frozen_ns:
            self.ready = True
            self.board = (0, self._world.now_ns)
            self.send(WorkerReady(self.number, self.width))

    # -- messages -----------------------------------------------------------------------------

    def send(self, event: Any) -> None:
        """Send in order, late, and perhaps never if the worker dies meanwhile."""
        world = self._world
        late = not world.is_calm and world.rng.random() < world.profile.late
        wire_ns = world.delay(*(LATE_NS if late else WIRE_NS))
        self._arrival_ns = max(self._arrival_ns, world.now_ns + wire_ns)
        world.in_life(self._arrival_ns - world.now_ns, self._arrive, event)

    def _arrive(self, event: Any) -> None:
        if self.alive or self._world.rng.random() >= self._world.profile.lost:
            if isinstance(event, LeasesReturned):
                self.recalled = False
                if self.lied is not None and self.lied.lease in event.leases:
                    self.lied_ns = self._world.now_ns
            self._world.tell(event)

    def order(self, call: Any, *args: Any) -> None:
        """Send a command to this worker."""
        world = self._world
        self._order_ns = max(self._order_ns, world.now_ns + world.delay(*WIRE_NS))
        world.in_life(self._order_ns - world.now_ns, self._obey, call, args)

    def _obey(self, call: Any, args: Any) -> None:
        deaf = self._wedged or self.frozen_ns
        if self.alive and (not deaf or call in (self.assign, self.read_board)):
            call(*args)

    def _deaf(self) -> bool:
        return not self._world.is_calm and self._world.rng.random() < self._world.profile.deaf

    # -- running tasks ------------------------------------------------------------------------

    def assign(self, leases: list[Lease]) -> None:
        assert self.ready, f"worker {self.number} was given work before it was ready"
        assert not self._closing, f"worker {self.number} was given work after its end"
        self.queue.extend(leases)
        if self.running is None and not self._wedged and not self.frozen_ns:
            self._begin()

    def _begin(self) -> None:
        world = self._world
        if not self.queue:
            self._flush()
            self.board = (0, world.now_ns)
            if self._stopping:
                self._close()
            return
        if not world.is_calm and world.rng.random() < world.profile.wedge:
            self._flush()
            self.board = (0, world.now_ns)
            self._wedged = True
            return
        lease = self.running = self.queue.popleft()
        self.board = (lease.lease, world.now_ns)
        self.run += 1
        world.watch.began(self, lease)
        run_ns, ending = self._fate(lease)
        self.asks.began(lease, self.run, run_ns)
        self.breakpoints.began(lease, run_ns)
        if ending == "hang":
            world.watch.failed_run(lease)
            self._flush()
            return
        if ending == "success" and self.nested.begins(lease, self.run):
            self._flush()
            return
        if run_ns > 1 * MS or len(self._outbox) >= self._flush_at:
            self._flush()
        world.in_life(run_ns, self._ended, self.run, run_ns, ending)

    def _fate(self, lease: Lease) -> tuple[int, str]:
        """Decide how long this run takes and how it ends."""
        world = self._world
        if lease.method not in DURATIONS_NS:  # accepted before the class was loaded
            return 50 * US, INVALID
        run_ns = world.delay(*DURATIONS_NS[lease.method])
        if world.is_calm:
            return min(run_ns, CALM_DURATION_MAX_NS, lease.timeout_ns), "success"
        if lease.method == "tiny" and world.rng.random() < world.profile.surprise:
            run_ns = world.delay(5 * MS, 2 * SEC)
        ending = self._misfortune(lease)
        if ending == "crash":
            return run_ns // 2, ending
        if ending == TIMEOUT or run_ns > lease.timeout_ns:
            return lease.timeout_ns, ending if ending == "hang" else TIMEOUT
        return run_ns, ending

    def _misfortune(self, lease: Lease) -> str:
        profile, rng = self._world.profile, self._world.rng
        if lease.id in self._world.poison:
            return "crash"
        chance = rng.random()
        for share, ending in (
            (profile.crash, "crash"),
            (profile.hang / 2, "hang"),
            (profile.hang / 2, TIMEOUT),
            (profile.fail, rng.choice((ERROR, ERROR, ERROR, PERMANENT, INVALID))),
        ):
            if chance < share:
                return ending
            chance -= share
        return "success"

    def _ended(self, run: int, run_ns: int, ending: str) -> None:
        if not self.alive or run != self.run or self.running is None or self.frozen_ns:
            return
        if self.breakpoints.postpones(self._ended, run, run_ns, ending):
            return
        if ending == "crash":
            self.die(-SIGSEGV)
            return
        unwell = (
            ending != "success" and self._world.profile.gates and self._world.rng.random() < 0.7
        )
        failure = None if ending == "success" else Failure(ending, "Sim", "planned", unwell=unwell)
        self._complete(run_ns, failure)
        self._begin()

    def _complete(self, run_ns: int, failure: Failure | None) -> None:
        lease = self.running
        assert lease is not None
        self.running = None
        self.nested.stop()
        self._world.watch.ended(self, lease)
        self.asks.ended(lease)
        self.breakpoints.over(lease)
        value = b""
        failure, login = self._world.logins.ended(self.pool, lease, failure)
        if failure is None:
            value = b"value of " + lease.id.encode()
        elif failure.kind != CANCEL:
            self._world.watch.failed_run(lease)
        delay_ns = self._world.delay(0, 200 * MS) if self._world.rng.random() < 0.1 else -1
        done = Completion(
            lease.lease, run_ns, value, failure, delay_ns, self.asks.clears, login=login
        )
        self._outbox.append(done)

    def _flush(self) -> None:
        if self._outbox:
            completions, self._outbox = self._outbox, []
            samples = [Sample(RUNS, {"pool": self.pool}, len(completions))]
            self.send(LeasesCompleted(self.number, completions, samples))

    # -- orders -------------------------------------------------------------------------------

    def recall(self) -> None:
        self._flush()
        leases = [lease.lease for lease in self.queue]
        for lease in self.queue:
            self._world.watch.given_back(self, lease)
        self.queue.clear()
        self.send(LeasesReturned(self.number, leases))

    def cancel(self, number: int) -> None:
        if self.running is not None and self.running.lease == number:
            if not self._deaf():
                self._interrupt()
            return
        for lease in self.queue:
            if lease.lease == number:
                self.queue.remove(lease)
                self._world.watch.given_back(self, lease)
                self._outbox.append(Completion(number, 0, b"", Failure(CANCEL)))
                self._flush()
                return

    def _interrupt(self) -> None:
        self._complete(self._world.now_ns - self.board[1], Failure(CANCEL, "Cancelled"))
        self.run += 1
        self._flush()
        self._begin()

    def stop(self) -> None:
        if self._deaf():
            return
        self._stopping = True
        self.recall()
        if self.running is None:
            self._close()

    def _close(self) -> None:
        self._closing = True
        self._world.in_life(self._world.delay(100 * US, 50 * MS), self._exit)

    def _exit(self) -> None:
        if not self.frozen_ns:
            self.die(0)

    def terminate(self) -> None:
        if self._deaf():
            return
        if not self.ready or self._world.rng.random() < 0.3:
            self.die(-SIGTERM)
            return
        self._stopping = True
        self.recall()
        if self.running is not None:
            self._interrupt()
        else:
            self._close()

    def read_board(self) -> None:
        self._world.tell(self.look())

    def look(self) -> BoardRead:
        """Return its scoreboard. A healthy idle worker has stamped it recently."""
        lease, since_ns = self.board
        if not lease and not self.frozen_ns and not self._wedged:
            since_ns = max(since_ns, self._world.now_ns - BEAT_NS)
        return BoardRead(self.number, lease, since_ns, self.checking_ns)

    # -- hangs and illness --------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop doing anything, whatever the worker was doing."""
        if not self.frozen_ns:
            self.frozen_ns = self._world.now_ns
            if self.running is not None:
                self._world.watch.failed_run(self.running)

    def fall_ill(self) -> None:
        """Make healthy() say no, or nothing; only an idle worker is asked."""
        if self.running is not None or self.queue or self._closing or self._wedged:
            return
        if self.frozen_ns:
            return
        self._flush()
        if self._world.rng.random() < 0.5:
            self.unhealthy = True
            self.die(EXIT_UNHEALTHY)
        else:
            self.checking_ns = self._world.now_ns
            self.freeze()

    @property
    def lame_since_ns(self) -> int:
        """Return since when it idles without a sign of life, 0 if it gives one."""
        lease, since_ns = self.board
        if not self.ready or lease or not (self.frozen_ns or self._wedged):
            return 0
        return self.frozen_ns or since_ns

    # -- death --------------------------------------------------------------------------------

    def die(self, exit_code: int) -> None:
        """Die at once; unsent messages are lost, and the exit is noticed a little later."""
        if not self.alive:
            return
        self.alive = False
        world = self._world
        world.watch.died(self)
        if self.running is not None:
            self.asks.ended(self.running)
        world.in_life(world.delay(*EXIT_NOTICED_NS), self._report_exit, exit_code)

    def _report_exit(self, exit_code: int) -> None:
        if not self.fork_reported:  # kept by the shell until the fork report arrives
            self._world.in_life(1 * MS, self._report_exit, exit_code)
            return
        if exit_code == -SIGSEGV:
            self._world.watch.crashed(self)
        self._world.tell(
            WorkerExited(
                self.number,
                exit_code,
                self.board[0],
                detail="" if self.ready else "open() failed",
                oom=self.oom,
                unhealthy=self.unhealthy,
                beside=tuple(lease.lease for lease, _ in self.runs[1:]),
            )
        )


class ForkServer:
    """The process that forks the workers of one pool."""

    def __init__(self, world: World, pool: str, build: str) -> None:
        self._world = world
        self._pool = pool
        self._build = build
        self.alive = False
        self.stalled = False  # lives and does nothing: stopped, or stuck in a fork
        self._up = False
        self._run = 0  # the number of the process, to recognize messages of an earlier one
        self._forks: dict[int, Worker] = {}

    def start(self) -> None:
        assert not self.alive, f"a second fork server of {self._pool} was started beside the first"
        world = self._world
        self.alive = True
        self.stalled = False
        self._run += 1
        hangs = world.profile.fork_server_hangs
        if hangs and not world.is_calm and world.rng.random() < hangs:
            return  # an import that never ends
        chance = 1.0 if world.is_calm else world.rng.random()
        boot = world.delay(1 * MS, 300 * MS)
        if chance < world.profile.fork_server_fails:
            world.in_life(boot, self._fail, self._run)
        elif chance < world.profile.fork_server_fails + world.profile.fork_server_exits:
            world.in_life(boot, self._crash, self._run)
        else:
            world.in_life(boot, self._come_up, self._run)

    def _come_up(self, run: int) -> None:
        if self.alive and run == self._run:
            self._up = True
            self._world.tell(ForkServerReady(self._pool, DECLARATIONS, self._build))

    def _crash(self, run: int) -> None:
        if run == self._run:
            self.die()

    def _fail(self, run: int) -> None:
        if self.alive and run == self._run:
            self.alive = False
            why = "the class cannot be loaded"
            self._world.tell(ForkServerFailed(self._pool, why, self._build))

    def die(self) -> None:
        if not self.alive:
            return
        self.alive = self._up = False
        world = self._world
        forks, self._forks = self._forks, {}
        for worker in forks.values():
            world.in_life(world.delay(*WIRE_NS), self._refuse, worker, "the fork server is gone")
        world.in_life(world.delay(*EXIT_NOTICED_NS), self._report_exit, self._run)

    def _report_exit(self, run: int) -> None:
        if run == self._run:  # the shell reports nothing about one that it was told to stop
            self._world.tell(ForkServerExited(self._pool, "killed", self._build))

    def spawn(self, worker: Worker) -> None:
        world = self._world
        if not self._up:
            world.in_life(world.delay(*WIRE_NS), self._refuse, worker, "no fork server")
            return
        self._forks[worker.number] = worker
        slow = not world.is_calm and world.rng.random() < world.profile.slow_start
        pause = world.delay(1 * SEC, 4 * SEC) if slow else world.delay(2 * MS, 20 * MS)
        if world.profile.leaves and world.rng.random() < world.profile.leaves:
            found = LeftoversEnded(worker.pool, worker.index, world.rng.randint(0, 3), 1)
            world.in_life(world.delay(*WIRE_NS), world.tell, found)
            pause += world.delay(1 * MS, 2 * SEC)  # until those processes are gone
        world.in_life(pause, self._fork, worker)

    def _fork(self, worker: Worker) -> None:
        if self.stalled or self._forks.pop(worker.number, None) is None:
            return
        if not self._world.is_calm and self._world.rng.random() < self._world.profile.spawn_fails:
            self._refuse(worker, "fork: out of memory")
        else:
            worker.fork()

    def _refuse(self, worker: Worker, reason: str) -> None:
        self._world.tell(SpawnFailed(worker.number, reason))

    def stop(self) -> None:
        self.alive = self._up = False
        self._run += 1
        self._forks = {}
