"""The answer to the method `metrics` of control.sock: the figures behind /metrics.

Counters count since the daemon started. Durations are nanoseconds in buckets that double in width
(core/model/counters.py): `buckets[n]` counts durations from 2**(n-1) to below 2**n ns.
"""

from msgspec import Struct

from musterd.supervisor.api.cluster import ClusterFigures
from musterd.supervisor.api.status import MetricStatus


class Times(Struct, frozen=True):
    buckets: list[int]  # without empty ones at the end
    total_ns: int


class WorkerFigures(Struct, frozen=True, array_like=True):
    """One slot, whatever worker is in it; there are many, so the names of fields are left out."""

    name: str
    state: str
    tasks: int
    restarts: int
    memory_bytes: int  # PSS of the worker and all it started


class PoolFigures(Struct, frozen=True, kw_only=True):
    name: str
    submitted: int  # never falls, so withdrawn tasks are counted too
    rejected: int
    finished: dict[str, int]  # by state
    retried: int
    fallbacks: int = 0
    failures: dict[str, int]  # attempts, by the type of their error
    run_times: Times
    wait_times: Times
    queued: dict[str, int]  # by priority
    waiting: int
    running: int
    queue_size: int
    size: int  # workers that should be there now
    recommended: int = 0  # how many memory has room for
    fatal: bool  # the pool is given up
    busy: int  # workers that have tasks
    restarts: int
    lost: dict[str, int]  # workers, by cause; every cause is there
    recycled: int
    orphans: int
    workers: list[WorkerFigures]
    metrics: list[MetricStatus]
    metrics_dropped: int


class BreakerFigures(Struct, frozen=True, array_like=True):
    target: str
    state: str
    running: int
    waiting: int
    failed: int  # failures that the breaker has counted


class ScheduleFigures(Struct, frozen=True, array_like=True):
    name: str
    runs: int
    skipped: int
    next_at: float


class FleetFigures(Struct, frozen=True, kw_only=True):
    version: str
    python: str
    pid: int
    started_at: float
    state: str
    problem: str
    pools: list[PoolFigures]
    breakers: list[BreakerFigures]  # the most important ones
    breaker_states: dict[str, int]  # how many of all are in each state
    breaker_transitions: dict[str, int]  # how often breakers came to each state
    schedules: list[ScheduleFigures]
    memory_share: float
    memory_warning: float
    memory_critical: float
    memory_level: str
    commit_times: Times
    store_bytes: int
    turn_times: Times
    slow_turns: int
    cluster: ClusterFigures | None = None  # where this machine is a node of one
