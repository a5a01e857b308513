"""Several nodes around one engine: real fleets and claimers, the engine in memory.

`ClusterWorld(seed).run()` is one scenario: tasks come, nodes and sidecars die, nodes are cut off
from the engine, answers are lost before or after their effect, the engine restarts and forgets
claims; then a calm in which everything must end, and a shutdown. Every clock is another. What must
hold:

- every accepted task has one final state, which never changes;
- no attempt counts twice, and none that its node had lost;
- a site never has more attempts than places when one is granted, and of a key one task runs;
- failed logins of a session are counted once, and hold it everywhere (cluster_logins.py);
- no attempt is given to a worker after it has expired, or after the lease of its node;
- a node is granted no more than it wants, and keeps no end that was confirmed;
- a task that must not run never begins, and does not succeed;
- each node gets to know the policy that is applied last;
- each due time of a schedule is run once, no run begins beside its last, and none is left out for
  one that rests between attempts (cluster_timetable.py);
- what handlers share is as shared_watch.py says;
- a node that shuts down leaves nothing behind.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from msgspec import Struct, structs

from musterd.ipc.resilience.policy import BackoffPolicy, RetryPolicy
from musterd.ipc.wire.messages import FINAL_STATES, SUCCEEDED, TaskSpec
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    End,
    Told,
)
from musterd.supervisor.cluster.handling import (
    StateAsk,
    StateView,
)
from musterd.supervisor.cluster.model_engine import ModelEngine
from musterd.supervisor.cluster.sidecar_events import NodeNotified, PoolsNotified
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.held import HELD_TYPE, LOGIN_FAILED_TYPE
from musterd.supervisor.core.model.policy import (
    FleetPolicy,
    PoolPolicy,
    RestartPolicy,
    TargetPolicy,
)
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.task import TaskState
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.core.tasks.claims import HOLD_NS
from musterd.supervisor.core.tasks.reception import TAKE_OVER_NS
from simulation.cluster_logins import Logins
from simulation.cluster_sidecar import FORBIDDEN, LEASE_NS, WIRE_NS, Sidecar
from simulation.cluster_timetable import Timetable
from simulation.profile import METHODS, MS, SEC, US, Profile
from simulation.runner import SeedFailed
from simulation.shared_watch import NodeWatch, SharedWatch
from simulation.wide_workers import WideWorker
from simulation.workers import SIGKILL, ForkServer, Worker

POOL = "pool0"
FAULTS_NS = 8 * SEC
CALM_LIMIT_NS = 400 * SEC
CARE_NS = 1 * SEC
TICK_NS = 200 * MS
STEPS_MAX = 60_000
TRACE_LENGTH = 60
PLACES = 2  # of the site "narrow"
FORBIDDEN_SHARE = 17  # one task of so many

ASKING_SEED = 100  # from here on handlers compete for states and a lock
QUIET = Profile("quiet", faults_ns=FAULTS_NS, fail=0.0, surprise=0.0, deaf=0.0, late=0.0)
ROUGH = Profile(
    "rough",
    faults_ns=FAULTS_NS,
    fail=0.1,
    crash=0.05,
    hang=0.02,
    wedge=0.005,
    poison=0.03,
    spawn_fails=0.05,
    asks=0.2,
    kills=3,
)

# Reports that begin an incident, and those that end it.
INCIDENTS = {"cluster.unreachable": "outage", "cluster.draining": "drained"}
ENDS_OF = {"cluster.reachable": "outage", "cluster.resumed": "drained"}


class Faults(Struct, frozen=True):
    """How often things happen in the time of faults, at most."""

    node_deaths: int = 0
    sidecar_deaths: int = 0
    cuts: int = 0  # between one node and the engine
    restarts: int = 0  # of the engine
    shutdowns: int = 0
    reloads: int = 0
    stops: int = 0  # of a sidecar (SIGSTOP): its messages come late
    freezes: int = 0  # of a supervisor: what it is told waits
    pauses: int = 0
    cancels: int = 0
    drains: int = 0
    lost: float = 0.0  # chance that an answer of the engine is lost
    applies: int = 0  # of another policy


KINDS: tuple[tuple[Profile, Faults], ...] = (
    (QUIET, Faults()),
    (QUIET, Faults(lost=0.1, sidecar_deaths=3, cuts=2, freezes=3, applies=2)),
    (ROUGH, Faults(cancels=5, pauses=2)),
    (ROUGH, Faults(2, 3, 3, 2, 1, 2, 3, 2, 1, 5, 1, 0.08, 2)),
)


KEYS = 3  # of each method, while tasks have keys


class Seen:
    """What the workers of a node do, as the simulation of workers tells it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def handler_requests(self) -> NodeWatch:
        return self._node.requests

    def began(self, worker: Worker, lease: Any) -> None:
        assert lease.id not in self._node.world.forbidden, f"{lease.id} must not run"
        self._node.world.logins.began(lease)
        self._node.world.runs[lease.id] = self._node.world.runs.get(lease.id, 0) + 1

    def nothing(self, *_: Any) -> None: ...

    ended = failed_run = given_back = died = crashed = lied = nothing


class Node:
    """One machine: a supervisor with its workers, and its sidecar. It is a World to the workers."""

    def __init__(self, world: ClusterWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"node{number}"
        self.rng = world.rng
        self.profile = world.profile
        self.logins = world.logins
        self.poison = world.poison
        self.offset_ns = self.rng.randrange(10**15)
        self.policy = self._policy()
        self.watch = Seen(self)
        self.life = 0
        self.up = False
        self.cut = False  # off from the engine
        self.lives = 0
        self.over = False
        self.gave_up = False  # its last ends were not told: the engine did not answer
        self.until_ns = 0  # the end of the lease, as the core was told
        self.tenure = 0
        self.granted: dict[tuple[str, int], None] = {}  # to the core, in this life
        self.lost: dict[tuple[str, int], None] = {}  # which the core was told
        self._open: dict[tuple[str, str], None] = {}  # incidents that were reported
        self._claims = 0  # as metrics count them
        self._queued: dict[str, int] = {}  # since when attempts wait for a worker
        self._backlog: list[Any] | None = None  # of a supervisor that is stopped
        self._stored_ns = 0  # when the store has done everything
        self.workers: dict[int, Worker] = {}
        self.fork_servers: dict[tuple[str, str], ForkServer] = {}
        self.sidecar: Sidecar | None = None
        self.sidecars = 0  # that there were
        self.caller = 0  # the newest of them whose calls have reached the engine
        self._connected = False  # to a sidecar, as far as the core was told
        self._serves = False  # the core has tasks.sock served by the supervisor
        self._kills = 0  # of sidecars
        self.requests = NodeWatch(self, world.shared)
        self.fleet: Fleet

    def _policy(self) -> FleetPolicy:
        pool = PoolPolicy(
            POOL,
            self.rng.randint(1, 3),
            task_timeout_ns=2 * SEC,
            start_timeout_ns=3 * SEC,
            restart=RestartPolicy(backoff=BackoffPolicy(base_ns=50 * MS), limit=50),
            clustered=True,
        )
        return FleetPolicy(
            pools=(pool,),
            retry=RetryPolicy(2, BackoffPolicy(base_ns=20 * MS, max_ns=200 * MS)),
            drain_timeout_ns=2 * SEC,
            stop_timeout_ns=1 * SEC,
            fence_stops=self.rng.random() < 0.5,
            sessions=self.logins.policies,
        )

    @property
    def now_ns(self) -> int:
        return self.world.now_ns + self.offset_ns

    @property
    def is_calm(self) -> bool:
        return self.world.is_calm

    def delay(self, low_ns: int, high_ns: int) -> int:
        return self.world.delay(low_ns, high_ns)

    def in_life(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        self.world.after(delay_ns, self._if_alive, self.life, call, args)

    def _if_alive(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life == self.life:
            call(*args)

    # -- life and death -----------------------------------------------------------------------

    def boot(self) -> None:
        self.life += 1
        self.lives += 1
        self.up = True
        self.until_ns = self.tenure = 0
        self.granted, self.lost, self._queued, self._backlog = {}, {}, {}, None
        self._open, self._claims = {}, 0
        self.workers, self.fork_servers = {}, {}
        self._connected = self._serves = False
        self.requests = NodeWatch(self, self.world.shared)
        self.fleet = Fleet(self.policy, Random(self.rng.random()))
        self.tell(events.TasksRecovered([]))
        self.tell(events.Started())
        self.in_life(self.delay(1 * MS, 50 * MS), self.start_sidecar)

    def start_sidecar(self) -> None:
        if self._backlog is not None:  # the supervisor starts it, when it goes on
            self.in_life(self.delay(1 * MS, 50 * MS), self.start_sidecar)
        elif self.sidecar is None and self.up:
            self.sidecar = Sidecar(self)
            self.tell(events.ClusterConnected())

    def kill_sidecar(self) -> None:
        """The next one is started soon, as the core does with any sidecar, or after a pause."""
        if self.sidecar is not None:
            self.sidecar.alive = False
            self.sidecar = None
            self.in_life(self.delay(*WIRE_NS), self.tell, events.ClusterDisconnected())
            self._kills += 1
            longest_ns = 2 * TAKE_OVER_NS if self._kills % 2 == 0 else 1 * SEC
            self.in_life(self.delay(2 * MS, longest_ns), self.start_sidecar)

    def die(self, pause_ns: int) -> None:
        """With all its processes. What is under way to the engine may arrive."""
        if not self.up:
            return
        if self.sidecar is not None:
            self.sidecar.alive = False
            self.sidecar = None
        for worker in self.workers.values():
            worker.alive = False
        for pool in self.fleet.pools.values():
            for slot in pool.everyone:
                slot.leases.clear()
            for level in pool.queue.levels:
                for lane in level.lanes.values():
                    lane.tasks.clear()
        self.up = False
        self.life += 1
        if not self.over:
            self.world.after(pause_ns, self.boot)

    # -- the core -----------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        if not self.up:
            return
        if self._backlog is not None:
            self._backlog.append(event)
            return
        world = self.world
        world.steps += 1
        assert world.steps < STEPS_MAX, f"more than {STEPS_MAX} steps"
        world.trace.append((world.now_ns, f"{self.name} ->", event))
        self._note(event)
        actions = self.fleet.handle(self.now_ns, event)
        for action in actions:
            world.trace.append((world.now_ns, f"{self.name}   ", action))
        self.fleet.validate()
        self._check(actions)
        self.requests.handled(actions)
        for action in actions:
            table = ClusterWorld.carried_out
            carry_out = table.get(type(action)) or _LOCAL[type(action)]
            carry_out(self, action)
        assert not (self._connected and self._serves), "two serve tasks.sock"

    def serve(self, action: act.ServeClients) -> None:
        assert action.serve != self._serves, "it is so already"
        self._serves = action.serve
        self.world.takeovers += action.serve

    def freeze(self, for_ns: int) -> None:
        if self.up and self._backlog is None:
            self._backlog = []
            self.in_life(for_ns, self._thaw)

    def _thaw(self) -> None:
        backlog, self._backlog = self._backlog, None
        self._queued = {}
        self.requests.excused_ns = self.now_ns
        for event in backlog or ():
            self.tell(event)

    @property
    def next_deadline_ns(self) -> int | None:
        """By the clock of the world."""
        if not self.up or self._backlog is not None:
            return None
        deadline_ns = self.fleet.next_deadline()
        return None if deadline_ns is None else deadline_ns - self.offset_ns

    def _note(self, event: Any) -> None:
        self.requests.before(event)
        match event:
            case events.MembershipTold():
                self.until_ns = event.until_ns
                if event.tenure != self.tenure:
                    self.tenure = event.tenure
                    self.lost |= self.granted
                    self.requests.lost_tenure()
            case events.AttemptsGranted():
                self.granted |= {(each.spec.id, each.claim): None for each in event.attempts}
            case events.ScheduleNoted():
                self.world.timetable.reported(event)
            case events.ClusterConnected() | events.ClusterDisconnected():
                self._connected = isinstance(event, events.ClusterConnected)
            case events.AttemptsLost():
                self.lost |= {(each.id, each.claim): None for each in event.held}

    def _follow(self, report: act.Report) -> None:
        """Check that each incident of the cluster has one beginning and one end."""
        incident = INCIDENTS.get(report.event)
        if incident is not None:
            assert (incident, report.node) not in self._open, f"{report} was reported already"
            self._open[incident, report.node] = None
        elif (incident := ENDS_OF.get(report.event)) is not None:
            assert (incident, report.node) in self._open, f"{report} had no beginning"
            del self._open[incident, report.node]

    def _check(self, actions: list[Any]) -> None:
        claims = self.fleet.cluster.figures.claims
        assert claims >= self._claims, "a counter falls"
        self._claims = claims
        for action in actions:
            if isinstance(action, act.Report):
                self._follow(action)
                self.world.logins.told += action.event == "session.held"
            for end in action.ends if isinstance(action, act.TellCluster) else ():
                key = (end.id, end.claim)
                assert key in self.granted, f"{key} ends and was never granted"
                assert key not in self.lost, f"{key} is told of after it was lost"
            if isinstance(action, act.Report) and action.phase == "over":
                self.gave_up = bool(action.reason)
            if isinstance(action, act.Report) and action.phase == "over" and not action.reason:
                unconfirmed = self.fleet._claims._unconfirmed
                assert not unconfirmed or self.sidecar is None, "it does not wait for its ends"
        queued = {
            key: self._queued.get(key, self.now_ns)
            for key, task in self.fleet._state.claimed.items()
            if task.state == TaskState.QUEUED
        }
        self._queued = queued
        late = [key for key, since_ns in queued.items() if self.now_ns - since_ns > 2 * HOLD_NS]
        assert not late, f"attempts wait here for too long: {late}"

    def hear_from_sidecar(self, sidecar: Sidecar, event: Any) -> None:
        if sidecar is self.sidecar:
            self.tell(event)

    def to_sidecar(self, action: Any) -> None:
        if self.sidecar is not None:
            self.sidecar.hear(action)

    def assign(self, action: act.AssignLeases) -> None:
        assert self.now_ns < self.until_ns, "an attempt begins after the lease of its node"
        for lease in action.leases:
            expires_ns = self.world.expiries.get(lease.id, 0)
            assert not 0 < expires_ns <= self.world.now_ns, f"{lease.id} begins after its expiry"
        self.order(action.worker, "assign", action.leases)

    def order(self, number: int, name: str, *args: Any) -> None:
        worker = self.workers[number]
        target: Any = worker
        for part in name.split("."):
            target = getattr(target, part)
        worker.order(target, *args)

    def spawn(self, action: act.SpawnWorker) -> None:
        width = self.world.width
        worker = (
            Worker(self, action.worker, action.pool, action.index)  # type: ignore[arg-type]
            if width == 1
            else WideWorker(self, action.worker, action.pool, action.index, width)  # type: ignore[arg-type]
        )
        self.workers[action.worker] = worker
        self.fork_server(action).spawn(worker)

    def fork_server(self, action: Any) -> ForkServer:
        key = (action.pool, action.build)
        if key not in self.fork_servers:
            self.fork_servers[key] = ForkServer(self, *key)  # type: ignore[arg-type]
        return self.fork_servers[key]

    def kill(self, action: act.KillWorker) -> None:
        worker = self.workers[action.worker]
        worker.doomed = True
        if worker.fork_reported or worker.ready:
            self.in_life(self.delay(10 * US, 5 * MS), worker.die, -SIGKILL)

    def read_boards(self, action: act.ReadBoards) -> None:
        alive = [self.workers[number] for number in action.workers]
        boards = [worker.look() for worker in alive if worker.alive]
        self.in_life(10 * US, self.tell, events.BoardsRead(boards))

    def persist(self, action: act.Persist) -> None:
        written = [*action.added, *action.changed, *action.finished, *action.failed]
        assert not written, "an attempt of the cluster is written to the disk of a node"
        # The store does one thing after another.
        self._stored_ns = max(self._stored_ns + 1, self.now_ns + self.delay(200 * US, 5 * MS))
        self.in_life(self._stored_ns - self.now_ns, self.tell, events.Persisted(action.ticket))

    def exit(self, _: act.Exit) -> None:
        self.world.exited(self)

    def put_in_order(self) -> None:
        """Do what waits for a person."""
        if not self.up or self.fleet.phase != Phase.UP:
            return
        if self.fleet.policy is not self.policy:
            self.tell(events.PolicyChanged(self.policy))
        self.tell(events.ResumeRequested(((POOL, -1),)))
        for pool in list(self.fleet.pools.values()):
            for slot in list(pool.slots):
                if slot.state == SlotState.FATAL:
                    self.tell(events.ResetRequested(((POOL, slot.index),)))


class WatchedEngine(ModelEngine):
    """Tells the watch what becomes of states."""

    watch: SharedWatch
    timetable: Timetable
    silent_ns = LEASE_NS

    def note_seen(self, name: str, kind: Any, *, task: str = "", **how: Any) -> None:
        super().note_seen(name, kind, task=task, **how)
        self.timetable.ended.append(self.board.seen[-1][1])

    def state_save(self, key: str, value: bytes | None, *, ttl_ns: int = 0) -> None:
        super().state_save(key, value, ttl_ns=ttl_ns)
        self.watch.wrote(key, value)

    def states(self, tenure: int, asks: Sequence[StateAsk]) -> list[StateView]:
        views = super().states(tenure, asks)
        for ask, view in zip(asks, views, strict=True):
            task = self.board.live.get(ask.id)
            current = task is not None and (task.tenure, task.claim) == (tenure, ask.claim)
            assert current or not ask.saves or not view.held, f"{ask} was saved too late"
        return views

    def finish(self, tenure: int, ends: Sequence[End]) -> list[Told]:
        kept = dict.fromkeys(self.board.state)
        told = super().finish(tenure, ends)
        for key in kept:
            if key not in self.board.state:
                self.watch.wrote(key, None)
        return told


class ClusterWorld:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.profile, self.faults = KINDS[seed % len(KINDS)]
        self.slow = seed // len(KINDS) % 3 == 1  # retries come later than the next due time
        if self.slow and self.profile.fail:
            self.profile = replace(self.profile, fail=0.4)
        if seed >= ASKING_SEED:
            self.profile = replace(self.profile, asks=1.0, locks=("a",), weights=(1, 3, 3))
            faults = self.faults
            self.faults = structs.replace(
                faults,
                sidecar_deaths=4 * faults.sidecar_deaths,
                cuts=4 * faults.cuts,
                restarts=4 * faults.restarts,
                freezes=4 * faults.freezes,
            )
        self.width = 3 if seed % 5 == 4 else 1
        self.keys = seed // len(KINDS) % 5 == 0  # tasks join others
        self.joined = 0
        self.now_ns = 1
        self.is_calm = self.over = False
        self.steps = 0
        self.trace: deque[tuple[int, str, Any]] = deque(maxlen=TRACE_LENGTH)
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.poison: dict[str, None] = {}
        self.runs: dict[str, int] = {}  # of each task, on all nodes
        self.accepted: dict[str, None] = {}
        self.forbidden: dict[str, None] = {}  # no node may run these
        self.expiries: dict[str, int] = {}
        self.finals: dict[str, str] = {}
        self.counted: dict[tuple[str, int], None] = {}  # ends that counted
        self.ended: dict[str, int] = {}  # ends that were told, by their kind
        self.fenced = self.reaped = self.takeovers = 0
        skew_ns = self.rng.randrange(10**15)
        self.shared = SharedWatch(self)
        self.engine = WatchedEngine(lambda: self.now_ns + skew_ns, Random(seed + 1))
        self.engine.watch = self.shared
        self.pool = POOL
        kind = seed // len(KINDS) % 10
        self.logins = Logins(self, used=kind in (1, 6), by_task=kind == 6)
        self.nodes = [Node(self, number) for number in range(self.rng.randint(1, 3))]
        self._tasks = 0
        self.puts = seed // len(KINDS) % 4 == 2
        self.timetable = Timetable(self, used=seed // len(KINDS) % 2 == 0)
        self.engine.timetable = self.timetable

    # -- time ---------------------------------------------------------------------------------

    def delay(self, low_ns: int, high_ns: int) -> int:
        return low_ns + int(self.rng.random() * (high_ns - low_ns))

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, call, args))

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            story = "\n".join(
                f"{(when_ns - self.now_ns) / 1e6:12.3f} ms {mark} {what}"
                for when_ns, mark, what in self.trace
            )
            again = f"python tests/sim --cluster --start {self.seed} --seeds 1"
            raise SeedFailed(
                f"cluster seed {self.seed} ({self.profile.name}): {type(error).__name__}: {error}\n"
                f"again: {again}\n{story}"
            ) from error

    def _run(self) -> None:
        self._plan()
        heap = self._heap
        while not self.over:
            due = [
                (deadline_ns, node.number)
                for node in self.nodes
                if (deadline_ns := node.next_deadline_ns) is not None
            ]
            if due and (not heap or min(due)[0] <= heap[0][0]):
                when_ns, number = min(due)
                self.now_ns = max(self.now_ns, when_ns)
                self.nodes[number].tell(events.Ticked())
                continue
            when_ns, _, call, args = heapq.heappop(heap)
            self.now_ns = max(self.now_ns, when_ns)
            call(*args)

    # -- the scenario -------------------------------------------------------------------------

    def _plan(self) -> None:
        rng, faults = self.rng, self.faults
        self.timetable.plan()
        self.logins.plan()
        narrow = TargetPolicy(max_concurrent=PLACES)
        backoff = BackoffPolicy(
            base_ns=(400 if self.slow else 20) * MS, max_ns=(900 if self.slow else 200) * MS
        )
        retry = RetryPolicy(2, backoff)
        policy = ClusterPolicy(
            retry=retry, targets={"narrow": narrow}, schedules=self.timetable.cards
        )
        self.engine.apply(policy, 0)
        for node in self.nodes:
            node.boot()
        for _ in range(rng.randint(3, 10)):
            self.after(self.delay(1 * SEC, FAULTS_NS // 2), self._submit)
        planned: tuple[tuple[int, Callable[[], None]], ...] = (
            (faults.node_deaths, self._kill_node),
            (faults.sidecar_deaths, lambda: self.some_node().kill_sidecar()),
            (faults.cuts, self._cut),
            (faults.restarts, self._restart_engine),
            (faults.shutdowns, self._shut_down),
            (faults.reloads, self._reload),
            (faults.stops, self._stop_sidecar),
            (faults.freezes, self._freeze),
            (faults.pauses, self._pause),
            (faults.cancels, self._cancel),
            (faults.drains, self._drain),
            (faults.applies, self._apply),
            (self.profile.kills, self._kill_worker),
        )
        for count, call in planned:
            for _ in range(rng.randint(0, count)):
                self.after(self.delay(100 * MS, FAULTS_NS), call)
        self.after(FAULTS_NS, self._calm_down)
        self.after(TICK_NS, self._tick)

    def _apply(self) -> None:
        """Other retries, which each node gets to know; schedules go on as they are."""
        found = self.engine.policy()
        retry = RetryPolicy(self.rng.randint(1, 3), found.policy.retry.backoff)
        self.engine.apply(structs.replace(found.policy, retry=retry), found.version)
        self._notify(NodeNotified())

    def some_node(self) -> Node:
        return self.rng.choice(self.nodes)

    def _submit(self) -> None:
        specs = []
        for _ in range(self.rng.randint(1, 12)):
            self._tasks += 1
            id_ = f"t{self._tasks}"
            if self.rng.random() < self.profile.poison:
                self.poison[id_] = None
            expires_ns = self.delay(50 * MS, 3 * SEC) if self.rng.random() < 0.1 else 0
            if expires_ns:
                self.expiries[id_] = self.now_ns + expires_ns
            if self._tasks % FORBIDDEN_SHARE == 0:
                self.forbidden[id_] = None
            method = self.rng.choices(METHODS, self.profile.weights)[0]
            keyed = self.keys and id_ not in self.forbidden and self._tasks % 2
            specs.append(
                TaskSpec(
                    id_,
                    f"{POOL}.{method}",
                    FORBIDDEN if id_ in self.forbidden else b"\x80",
                    self.rng.randrange(4),
                    self.rng.choice(("", "", "wide", "narrow")),
                    key=f"{method} {self._tasks // 2 % KEYS}" if keyed else "",
                    expires_ns=expires_ns,
                    session=self.logins.session(),
                )
            )
        for verdict in self.engine.submit(specs):
            if verdict.rejection is None:
                self.accepted[verdict.id] = None
            self.joined += verdict.state == "joined"
        self._notify(PoolsNotified((POOL,)))

    def _notify(self, event: PoolsNotified | NodeNotified) -> None:
        """Some notifications are lost."""
        for node in self.nodes:
            if node.sidecar is not None and self.rng.random() < 0.7:
                node.sidecar.notify(event)

    def _tick(self) -> None:
        self.check()
        if not self.over:
            self.after(TICK_NS, self._tick)

    def _kill_node(self) -> None:
        long_ns = self.delay(LEASE_NS, 2 * LEASE_NS)
        self.some_node().die(self.rng.choice((self.delay(5 * MS, 500 * MS), long_ns)))

    def _cut(self) -> None:
        node = self.some_node()
        node.cut = True
        self.after(self.delay(10 * MS, 2 * LEASE_NS), self._heal, node)

    def _heal(self, node: Node) -> None:
        node.cut = False

    def _restart_engine(self) -> None:
        """Claims of the last moment are forgotten, but those of sites with limits.

        Somebody may cancel such a task before its node has registered it again: then it is lost.
        """
        recent = [
            task.spec.id
            for task in self.engine.board.claimed()
            if task.spec.target != "narrow" and not task.spec.session and self.rng.random() < 0.3
        ]
        self.engine.restart(lost=recent)
        if self.rng.random() < 0.5:
            self.engine.cancel([id_ for id_ in recent if id_ not in self.timetable.asked][:1])

    def _shut_down(self) -> None:
        node = self.some_node()
        if node.up:
            node.tell(events.ShutdownRequested("asked"))

    def _reload(self) -> None:
        """The pool leaves the cluster, or is removed; or all is as it was."""
        node = self.some_node()
        [pool] = node.policy.pools
        alone = structs.replace(pool, clustered=False)
        choices = ((pool,), (alone,), ())
        if node.up:
            changed = structs.replace(node.policy, pools=self.rng.choice(choices))
            node.tell(events.PolicyChanged(changed))
            self.after(self.delay(10 * MS, 2 * SEC), node.put_in_order)

    def _stop_sidecar(self) -> None:
        sidecar = self.some_node().sidecar
        if sidecar is not None:
            sidecar.stop(self.delay(10 * MS, 2 * LEASE_NS))

    def _freeze(self) -> None:
        self.some_node().freeze(self.delay(10 * MS, 2 * LEASE_NS))

    def _pause(self) -> None:
        node = self.some_node()
        kind = self.rng.choice((events.PauseRequested, events.DrainRequested))
        node.tell(kind(((POOL, -1),)))

    def _cancel(self) -> None:
        accepted = self.accepted.keys() - self.timetable.asked.keys() - self.finals.keys()
        alive = [id_ for id_ in self.accepted if id_ in accepted]
        self.engine.cancel(self.rng.sample(alive, min(len(alive), 3)))
        self._notify(NodeNotified())

    def _drain(self) -> None:
        name = self.some_node().name
        self.engine.drain(name, draining=True)
        self.after(self.delay(100 * MS, 2 * SEC), lambda: self.engine.drain(name, draining=False))

    def _kill_worker(self) -> None:
        alive = [worker for worker in self.some_node().workers.values() if worker.alive]
        if alive:
            self.rng.choice(alive).die(-SIGKILL)

    def _calm_down(self) -> None:
        self.is_calm = True
        self.poison.clear()
        self.after(self.delay(1 * SEC, 3 * SEC), self.timetable.pause)
        for node in self.nodes:
            node.cut = False
        self._care(self.now_ns + CALM_LIMIT_NS)

    def _care(self, limit_ns: int) -> None:
        for node in self.nodes:
            node.put_in_order()
        left = [id_ for id_ in self.accepted if id_ not in self.finals]
        left += [f"lock {name}" for name in self.engine.board.locks]
        version = self.engine.policy().version
        known = all(node.up and node.fleet._claims.rules.version == version for node in self.nodes)
        rests = not left and known and self.timetable.is_paused and self.timetable.all_told
        if rests and all(node.up and node.fleet.phase == Phase.UP for node in self.nodes):
            for node in self.nodes:
                node.over = True
                node.tell(events.ShutdownRequested("the end"))
            return
        states = [
            (node.name, node.up and [slot.shown_state for slot in node.fleet.pools[POOL].slots])
            for node in self.nodes
            if not node.up or POOL in node.fleet.pools
        ]
        assert self.now_ns < limit_ns, f"not everything ended: {left}, {states}"
        self.after(CARE_NS, self._care, limit_ns)

    def exited(self, node: Node) -> None:
        if node.sidecar is not None:
            if self.is_calm and not node.gave_up:
                # What was granted in a lost answer goes back when the node leaves.
                mine = [
                    task
                    for task in self.engine.board.claimed()
                    if task.tenure == node.sidecar.tenure
                    and (task.spec.id, task.claim) in node.granted
                ]
                assert not mine, f"{node.name} leaves claims behind: {mine}"
            node.sidecar.leave()
        node.die(self.delay(5 * MS, 500 * MS))
        if all(each.over and not each.up for each in self.nodes):
            self._finish()

    def _finish(self) -> None:
        self.over = True
        self.check()
        assert self.accepted.keys() == self.finals.keys()
        assert not list(self.engine.board.claimed()), "claims are left"
        self.timetable.check()
        self.timetable.check_results()

    # -- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """Check that no final state changes."""
        done = self.engine.board.done
        for id_ in self.accepted:
            if id_ in done:
                state = done[id_].outcome.state
                assert state in FINAL_STATES, state
                assert id_ not in self.forbidden or state != SUCCEEDED, f"{id_} must not run"
                assert self.finals.setdefault(id_, state) == state, f"{id_} has two final states"
            else:
                assert id_ not in self.finals, f"{id_} lives after its end"
                assert id_ in self.engine.board.live, f"{id_} is lost"

    def finished(self, ends: list[End], counted: set[tuple[str, int]]) -> None:
        """Check that no end counts twice. `counted`: claims that were held, and are ended."""
        for end in ends:
            kind = "refused" if end.id in self.forbidden else end.kind
            if end.failure is not None and end.failure.type in (HELD_TYPE, LOGIN_FAILED_TYPE):
                kind = "held"
            elif end.login is not None and end.login.said == "wanted":
                kind = "wanted"
            self.ended[kind] = self.ended.get(kind, 0) + 1
            key = (end.id, end.claim)
            if key in counted:
                assert key not in self.counted, f"{key} counts twice"
                self.counted[key] = None
                self.logins.said(end)

    def check_keys(self) -> None:
        keys = [task.spec.key for task in self.engine.board.claimed() if task.spec.key]
        assert len(keys) == len(set(keys)), f"two tasks of one key run: {sorted(keys)}"

    def check_places(self) -> None:
        inside = self.engine.inside("narrow")
        assert inside <= PLACES, f"{inside} attempts of a site with {PLACES} places"

    # The actions that concern the cluster; _LOCAL has the others.
    carried_out: dict[type, Callable[[Node, Any], None]] = {  # noqa: RUF012  # a table
        act.GreetCluster: Node.to_sidecar,
        act.ShowPools: Node.to_sidecar,
        act.WantAttempts: Node.to_sidecar,
        act.TellCluster: Node.to_sidecar,
        act.AskStates: Node.to_sidecar,
        act.AskLocks: Node.to_sidecar,
        act.NewsTold: Node.to_sidecar,
        act.ServeClients: Node.serve,
    }


def _ignore(*_: Any) -> None: ...


_LOCAL: dict[type, Callable[[Node, Any], None]] = {
    act.Persist: Node.persist,
    act.StartForkServer: lambda node, action: node.fork_server(action).start(),
    act.StopForkServer: lambda node, action: node.fork_server(action).stop(),
    act.SpawnWorker: Node.spawn,
    act.AssignLeases: Node.assign,
    act.RecallLeases: lambda node, a: node.order(a.worker, "recall"),
    act.CancelRunning: lambda node, a: node.order(a.worker, "cancel", a.lease),
    act.StopWorker: lambda node, a: node.order(a.worker, "stop"),
    act.TerminateWorker: lambda node, a: node.order(a.worker, "terminate"),
    act.KillWorker: Node.kill,
    act.ReadBoard: lambda node, a: node.order(a.worker, "read_board"),
    act.ReadBoards: Node.read_boards,
    act.AnswerState: lambda node, a: node.order(a.worker, "asks.state_answered", a.request),
    act.FindState: lambda node, a: node.order(a.worker, "asks.state_answered", a.request),
    act.AnswerLock: lambda node, a: node.order(a.worker, "asks.lock_answered", a.request, a.taken),
    act.FindStranded: lambda node, a: node.in_life(
        1 * MS, node.tell, events.StrandedFound(a.pool, a.request, [])
    ),
    act.RunCleanup: lambda node, _: node.in_life(1 * MS, node.tell, events.CleanupFinished()),
    act.Exit: Node.exit,
    act.Report: _ignore,
    act.Declare: _ignore,
    act.KeepSpares: _ignore,
}
