"""Pool: its slots, its queue, its fork server, and what its worker class declares."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from musterd.ipc.resilience.policy import RetryPolicy
from musterd.ipc.wire.messages import NOT_GIVEN, TaskDeclaration, TaskSpec
from musterd.supervisor.core.model.counters import Counters, Histogram, Tally
from musterd.supervisor.core.model.policy import PoolPolicy
from musterd.supervisor.core.model.queue import UNKNOWN_COST_NS, DiskTail, GateSource, PoolQueue
from musterd.supervisor.core.model.scaler import Backlog, Scaler
from musterd.supervisor.core.model.slot import Slot
from musterd.supervisor.core.model.task import Route

# Of a pool's tasks in memory: a full queue must not fill a machine of 4 GB. Most tasks wait on disk
# (core/disk_queue/queue.py); those with a key, a delay or an expiry cannot.
QUEUE_BYTES_MAX = 256 * 1024 * 1024
ROUTES_MAX = 1000  # task names remembered: until a class is loaded, clients make up names


class ForkServerState(StrEnum):
    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    FAILED = "failed"  # the worker class cannot be loaded


class RolloutPhase(StrEnum):
    LOADING = "loading"
    TRIAL = "trial"
    ROLLING = "rolling"


class Rollout(Struct, eq=False):
    """A rolling replacement of a pool's workers by those of another build."""

    build: str
    phase: RolloutPhase = RolloutPhase.LOADING
    fork_server: ForkServerState = ForkServerState.STARTING  # of the new build, until committed
    since_ns: int = 0  # when the new fork server began to load, or came up
    tries: int = 0
    declarations: tuple[TaskDeclaration, ...] | None = None  # of the new worker class, if loaded
    slot: Slot | None = None  # the slot being replaced

    @property
    def knows(self) -> bool:
        """Whether the new build declares the tasks, while two builds are at work."""
        return self.phase == RolloutPhase.ROLLING and self.declarations is not None


class Pool:
    def __init__(
        self,
        policy: PoolPolicy,
        retry: RetryPolicy,
        keeper: GateSource | None = None,
        disk_queue: DiskTail | None = None,
    ) -> None:
        self.name = policy.name
        self.policy = policy
        self.retry = retry
        self.size = policy.size  # how many slots should run, as asked for
        self.limit: int | None = None  # how many memory allows to run; None for any number
        self.short = False  # some slots are held because their workers would not fit in memory
        self.slots = [Slot(self, index) for index in range(policy.size)]
        self.recycled: Slot | None = None  # the slot being recycled, or recycled last
        self.recycled_for = ""  # why
        self.successor: Slot | None = None  # of the recycled slot, until it takes its place
        self.leaving: Slot | None = None  # the replaced slot, until its worker is gone
        self.leaving_ns = 0  # since when
        self.recycle_failures = 0  # successors in a row that did not get ready
        self.recycle_after_ns = 0  # no other recycle before
        self.queue = PoolQueue(
            policy.queue_size,
            policy.aging_ns,
            policy.resident_tasks,
            policy.resident_bytes,
            keeper=keeper,
            disk_queue=disk_queue,
        )
        self.halt = ""  # "paused" or "drained" by an operator: core/tasks/pauses.py
        self.free_slots: dict[Slot, None] = {}  # slots that can take a lease now, in turn
        self.counters = Counters()
        self.run_times = Histogram()  # of attempts that a worker has ended
        self.wait_times = Histogram()  # of tasks, from ready to given to a worker
        self.tally = Tally()
        self.live = 0  # accepted and not ended
        self.leased = 0
        self.unstored = 0  # new tasks that wait for the disk before they may run
        self.width = 1  # tasks that a worker runs at once; over 1, no lease waits in a worker
        self.busy = 0  # slots that have leases
        self.busy_most = 0  # the most slots busy at once since the scaler looked
        self.waiting = 0
        self.fork_server = ForkServerState.DOWN
        self.fork_server_since_ns = 0  # when it began to load, or came up
        self.fork_server_failures = 0  # in a row
        self.forked_ns = 0  # when it last forked a worker
        self.reason = ""  # why its fork server is not up
        self.declarations: dict[str, TaskDeclaration] | None = None  # None: not known yet
        self.routes: dict[str, Route] = {}
        self.scaler = Scaler(policy.scaling) if policy.scaling is not None else None
        self.backlog: Backlog | None = None  # of a clustered pool, as the cluster told it last
        self.watched = self.scaler is None  # false: the scaler wants to know when tasks wait
        self.build = policy.build  # of its fork server
        self.rollout: Rollout | None = None  # to another build
        self.rollout_problem = ""  # why the last one was given up
        self.removed = False  # gone from the policy: the pool drains, then it is forgotten
        self.arriving = False  # its tasks are being read back: nothing is accepted or runs yet

    def follow(self, policy: PoolPolicy) -> None:
        """Take over a changed policy; the worker lifecycle changes size and build."""
        self.policy = policy
        self.queue.follow(
            policy.queue_size, policy.aging_ns, policy.resident_tasks, policy.resident_bytes
        )

    @property
    def is_open(self) -> bool:
        """Whether the pool takes tasks and may start workers."""
        return not (self.removed or self.arriving)

    def arrive(self) -> None:
        """Begin as a pool that a reload adds: no slots until its tasks are read back."""
        self.arriving = True
        self.slots = []

    def settle_in(self) -> None:
        """Make the slots: the tasks are read back; the policy may have changed meanwhile."""
        self.arriving = False
        self.size, self.build = self.policy.size, self.policy.build
        self.slots = [Slot(self, index) for index in range(self.size)]
        self.scaler = Scaler(self.policy.scaling) if self.policy.scaling is not None else None

    @property
    def target(self) -> int:
        """Return how many slots should run now."""
        return self.size if self.limit is None else min(self.size, self.limit)

    @property
    def beside(self) -> list[Slot]:
        """Return the slots that a recycle adds: the successor and the one that leaves."""
        return [slot for slot in (self.successor, self.leaving) if slot is not None]

    @property
    def everyone(self) -> list[Slot]:
        return [*self.slots, *self.beside]

    def dismiss(self, slot: Slot) -> None:
        """Forget a slot that has stopped for good."""
        if slot is self.successor:
            self.successor = None
        elif slot is self.leaving:
            self.leaving = None
            for successor in self.slots:
                if successor.index == slot.index:
                    successor.tasks_done += slot.tasks_done
        else:
            self.slots.remove(slot)

    def enter(self, spec: TaskSpec) -> None:
        """Count an accepted task."""
        self.live += 1
        self.queue.enters_memory(spec)

    def leave(self, spec: TaskSpec) -> None:
        """Uncount a task that has ended."""
        self.live -= 1
        self.queue.leaves_memory(spec)

    def occupy(self) -> None:
        """Count a slot that got its first lease; `vacate` when it has none any more."""
        self.busy += 1
        self.busy_most = max(self.busy_most, self.busy)

    def vacate(self) -> None:
        self.busy -= 1

    def takes(self, spec: TaskSpec) -> bool:
        """Whether the pool takes one more task."""
        queue = self.queue
        if queue.bytes + len(spec.args) > QUEUE_BYTES_MAX:
            return False
        return queue.takes(spec.priority, self.live - self.leased)

    @property
    def held(self) -> int:
        """Count the tasks that wait here, which the queue's bound limits."""
        return self.live - self.leased

    def route(self, name: str) -> Route | None:
        """Return the route of a task name, or None if the worker class has no such task.

        Until the class is loaded every name is accepted: the worker has the last word.
        """
        route = self.routes.get(name)
        if route is not None:
            return route
        method = name.partition(".")[2]
        declared = self.declarations.get(method) if self.declarations is not None else None
        if declared is None and (self.declarations is not None or not method):
            return None
        route = Route(self, name, method, 0, NOT_GIVEN, UNKNOWN_COST_NS)
        if declared is not None:
            self._apply(route, declared)
        if len(self.routes) < ROUTES_MAX:  # beyond that a route lives as long as its tasks
            self.routes[name] = route
        return route

    def declare(self, declarations: tuple[TaskDeclaration, ...]) -> None:
        """Take over what the loaded worker class declares, also for routes made before."""
        self.declarations = {each.method: each for each in declarations}
        for route in self.routes.values():
            declared = self.declarations.get(route.method)
            if declared is not None:
                self._apply(route, declared)
        known = self.declarations
        self.routes = {name: route for name, route in self.routes.items() if route.method in known}

    def _apply(self, route: Route, declared: TaskDeclaration) -> None:
        route.timeout_ns = declared.timeout_ns
        route.max_retries = declared.max_retries
        route.fallback_on = declared.fallback_on
        route.cache_ns = declared.cache_ns
        route.debounce_ns = declared.debounce_ns

    def validate(self) -> None:
        self.queue.validate()
        leased = busy = 0
        for slot in self.everyone:
            leased += len(slot.leases)
            busy += bool(slot.leases)
            if len(slot.leases) > 1 and any(task.alone for task in slot.leases.values()):
                assert slot.width == 1, f"{slot.name} runs others beside one that is to run alone"
            for lease, task in slot.leases.items():
                assert task.lease == lease and task.slot is slot, (slot.name, lease)
        assert leased == self.leased, (leased, self.leased)
        assert busy == self.busy <= self.busy_most, (busy, self.busy, self.busy_most)
        assert self.successor is None or self.successor not in self.slots, self.name
        assert self.leaving is None or self.leaving not in self.slots, self.name
        queued = self.queue.size + self.queue.waiting
        assert 0 <= queued <= self.live, (queued, self.live)
