"""A named pool: its slots, its queue, and what its worker class declares."""

from __future__ import annotations

from enum import StrEnum

from musterd.ipc.messages import NOT_GIVEN, TaskDeclaration
from musterd.ipc.policy import RetryPolicy
from musterd.supervisor.core.policy import PoolPolicy
from musterd.supervisor.core.queue import UNKNOWN_COST_NS, PoolQueue
from musterd.supervisor.core.slot import Slot
from musterd.supervisor.core.task import Route

ROUTES_MAX = 1000  # names that are remembered: until a class is loaded, clients make them up


class NurseryState(StrEnum):
    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    FAILED = "failed"  # the worker class cannot be loaded


class Counters:
    """What a pool has done since the daemon started."""

    __slots__ = (
        "cancelled",
        "expired",
        "failed",
        "rejected",
        "restarts",
        "retried",
        "submitted",
        "succeeded",
    )

    def __init__(self) -> None:
        self.submitted = 0
        self.rejected = 0
        self.succeeded = 0
        self.failed = 0
        self.cancelled = 0
        self.expired = 0
        self.retried = 0
        self.restarts = 0


class Pool:
    def __init__(self, policy: PoolPolicy, retry: RetryPolicy) -> None:
        self.name = policy.name
        self.policy = policy
        self.retry = retry
        self.size = policy.size  # how many slots should run
        self.slots = [Slot(self, index) for index in range(policy.size)]
        self.queue = PoolQueue(policy.queue_size, policy.aging_ns)
        self.hungry: dict[Slot, None] = {}  # slots that can take a lease now, in turn
        self.counters = Counters()
        self.live = 0  # accepted and not ended
        self.leased = 0
        self.waiting = 0
        self.nursery = NurseryState.DOWN
        self.nursery_failures = 0
        self.reason = ""  # why it is FATAL
        self.declarations: dict[str, TaskDeclaration] | None = None  # None: not known yet
        self.routes: dict[str, Route] = {}

    @property
    def held(self) -> int:
        """Tasks that wait here: what the queue's bound counts."""
        return self.live - self.leased

    def route(self, name: str) -> Route | None:
        """Where a task of this name goes, or None if the worker class has no such task.

        As long as the class is not loaded every name is taken: the worker has the last word.
        """
        route = self.routes.get(name)
        if route is not None:
            return route
        method = name.partition(".")[2]
        declared = self.declarations.get(method) if self.declarations is not None else None
        if declared is None and (self.declarations is not None or not method):
            return None
        route = Route(
            self, name, method, self.policy.task_timeout_ns, self.retry.max_retries, UNKNOWN_COST_NS
        )
        if declared is not None:
            self._apply(route, declared)
        if len(self.routes) < ROUTES_MAX:  # beyond that a route lives as long as its tasks
            self.routes[name] = route
        return route

    def declare(self, declarations: tuple[TaskDeclaration, ...]) -> None:
        """The worker class is loaded; routes made before learn what it says."""
        self.declarations = {each.method: each for each in declarations}
        for route in self.routes.values():
            declared = self.declarations.get(route.method)
            if declared is not None:
                self._apply(route, declared)
        known = self.declarations
        self.routes = {name: route for name, route in self.routes.items() if route.method in known}

    def _apply(self, route: Route, declared: TaskDeclaration) -> None:
        route.timeout_ns = declared.timeout_ns or self.policy.task_timeout_ns
        given = declared.max_retries
        route.max_retries = given if given != NOT_GIVEN else self.retry.max_retries

    def validate(self) -> None:
        self.queue.validate()
        leased = 0
        for slot in self.slots:
            leased += len(slot.leases)
            for lease, task in slot.leases.items():
                assert task.lease == lease and task.slot is slot, (slot.name, lease)
        assert leased == self.leased, (leased, self.leased)
        assert 0 <= self.queue.size <= self.live, (self.queue.size, self.live)
