"""Policies: what the operator decided, in the core's units; made from the configuration."""

from fnmatch import fnmatchcase

from msgspec import Struct

from musterd.ipc.resilience.policy import (
    MILLISECOND_NS,
    SECOND_NS,
    BackoffPolicy,
    BreakerPolicy,
    RetryPolicy,
)
from musterd.ipc.wire.messages import NORMAL, NOT_GIVEN, Fetching
from musterd.supervisor.core.model.timing import Timing

# Of files and added at run time, together. Each has a row in the store, and about 3 kB of memory.
SCHEDULES_MAX = 10_000


class RestartPolicy(Struct, frozen=True):
    """How a crashed worker comes back: the first time at once, then after growing pauses.

    From the `pause_after`-th failure in a row on, a pause is at least `pause_ns`. Stable uptime of
    `reset_ns` clears the crash history; more than `limit` crashes within `window_ns` make the slot
    FATAL.
    """

    backoff: BackoffPolicy = BackoffPolicy(base_ns=500 * MILLISECOND_NS)
    pause_after: int = 5
    pause_ns: int = 60 * SECOND_NS
    reset_ns: int = 60 * SECOND_NS
    limit: int = 10
    window_ns: int = 60 * SECOND_NS


class ScalingPolicy(Struct, frozen=True):
    """The bounds of a pool's autoscaling, and how eager it is."""

    min: int
    max: int
    wait_ns: int = 1 * SECOND_NS  # a task that waits this long asks for more workers
    idle_ns: int = 60 * SECOND_NS  # workers unused for this long are stopped


class PoolPolicy(Struct, frozen=True):
    name: str
    size: int
    build: str = ""  # of its workers: they are replaced when it changes
    queue_size: int = 10_000
    aging_ns: int = 60 * SECOND_NS
    task_timeout_ns: int = 120 * SECOND_NS
    start_timeout_ns: int = 30 * SECOND_NS
    heartbeat_timeout_ns: int = 30 * SECOND_NS  # of an idle worker; 0: never
    health_timeout_ns: int = 10 * SECOND_NS  # of healthy(); 0: never
    restart: RestartPolicy = RestartPolicy()
    max_crashes: int = 3
    scaling: ScalingPolicy | None = None  # None: it keeps its size
    # Queued tasks beyond these limits stay on disk: some 20 MB, and some 32 MB of arguments.
    resident_tasks: int = 20_000
    resident_bytes: int = 64 * 1024 * 1024
    max_tasks: int = 0  # of a worker until it is recycled; 0: never
    max_age_ns: int = 0
    max_memory_bytes: int = 0  # of a worker and all it started
    sacrifice: bool = False  # stop all its workers while memory stays critical
    spare: bool = True  # keep a process ready for the next worker
    cache_ns: int = 30 * SECOND_NS  # age of a cached result where a task gives none ...
    debounce_ns: int = 500 * MILLISECOND_NS  # ... and of a submit, for debounce
    debug: bool = False  # a handler may wait at a breakpoint for a person ...
    debug_wait_ns: int = 600 * SECOND_NS  # ... for so long
    clustered: bool = False  # its tasks come from the cluster
    sessions: tuple[str, ...] = ()  # names that its tasks may use


class GatePolicy(Struct, frozen=True):
    """A resilience class: what holds for its tasks unless a task says otherwise."""

    name: str = ""
    timeout_ns: int = 0  # 0: as the pool says
    max_retries: int = NOT_GIVEN
    backoff: BackoffPolicy | None = None
    max_concurrent: int = 0  # over all targets; 0: no limit
    on_open: str = ""  # what a task does while the breaker is open; "": it waits
    fallback_on: str = ""  # when a task falls back: "open", or also on "failure"; "": open
    counts: tuple[str, ...] | None = None  # exceptions that a breaker counts; None: the usual


class TargetPolicy(Struct, frozen=True):
    """What holds for one site; the rest is as its class says."""

    policy: str = ""  # its resilience class
    timeout_ns: int = 0
    max_retries: int = NOT_GIVEN
    backoff: BackoffPolicy | None = None
    on_open: str = ""
    fallback_on: str = ""
    counts: tuple[str, ...] | None = None
    proxies: tuple[str, ...] = ()  # its pages are fetched through these; none: as the pool says
    robots: bool | None = None  # keep to its robots.txt; None: as the pool says
    max_concurrent: int = 0
    rate: float = 0.0  # of beginning tasks, per second; 0: no limit
    burst: int = 1
    breaker: BreakerPolicy | None = None  # None: as its class says
    retry_share: float | None = 0.2  # retries, as a share of the traffic; None: no limit ...
    retry_reserve: float = 10.0  # ... plus these to begin with ...
    retry_every_ns: int = 10 * SECOND_NS  # ... plus one in this time, however rare the tasks

    @property
    def fetching(self) -> Fetching | None:
        """What workers are told; None where nothing is said."""
        if not self.proxies and self.robots is None:
            return None
        return Fetching(self.proxies, self.robots)


class CachePolicy(Struct, frozen=True):
    """The cache of results; if disabled, `cache` and `debounce` of a submit are ignored."""

    enabled: bool = True
    debounce: bool = True  # false: `debounce` alone is ignored
    entries: int = 1000
    bytes: int = 16 * 1024 * 1024


class WatchPolicy(Struct, frozen=True, omit_defaults=True):
    """What counts as a change of a schedule's results, and how many of them are kept."""

    rules: bytes = b""  # for the worker (ipc.watching), which sends a View with each result
    name: str = ""  # of the rules: views by other rules cannot be compared; "": results as they are
    confirm: int = 1  # results in a row that must say so
    # Numbers: a change is told when one of these holds. None of them: whatever differs.
    above: float | None = None  # the limit was crossed upwards
    below: float | None = None
    by: float = 0.0  # at least so far from what was told last; 0: not asked for
    by_share: bool = False  # `by` is a share of that
    keep: int = 20  # different results
    stale: int = 3  # failed runs in a row that are reported; 0: never
    picture: bool = False  # the worker leaves one with each result; only those of changes stay

    @property
    def numeric(self) -> bool:
        return self.above is not None or self.below is not None or self.by > 0


class SchedulePolicy(Struct, frozen=True):
    """A task that is submitted at times."""

    name: str
    task: str  # POOL.METHOD
    timing: Timing
    args: bytes = b"\x80"  # msgpack of a table, by default an empty one
    priority: int = NORMAL
    target: str = ""
    sites: dict[str, str] = {}  # by argument: the site it names; the task declares which counts
    timeout_ns: int = 0
    max_retries: int = NOT_GIVEN
    key: str = ""
    cache_ns: int = 0  # as in a submit
    debounce_ns: int = 0
    jitter_ns: int = 0  # each run is delayed by a random part of it
    overlap: bool = False  # whether a run may begin while the last run is alive
    catch_up: str = "one"  # or "none" or "all": runs that were missed
    enabled: bool = True
    notify: bool = False  # report when the result has changed
    session: str = ""
    origin: str = ""  # the file that has it
    watching: WatchPolicy = WatchPolicy()  # if it reports


class SessionPolicy(Struct, frozen=True):
    """A named set of cookies and storage, which tasks use one at a time."""

    concurrent: int = 1
    login_task: str = ""  # "pool.method"; "": a function of the workers logs in, or nobody
    login_args: bytes = b"\x80"  # of the login task
    logins: BreakerPolicy = BreakerPolicy(enabled=False)  # when no further login is tried


class MemoryPolicy(Struct, frozen=True):
    """When memory is tight, as shares of the total, and when all is well again."""

    watched: bool = True  # false: memory is not measured
    enabled: bool = True  # false: memory is measured, and nothing is done
    warning: float = 0.70
    critical: float = 0.85
    margin: float = 0.05  # below a line, for all to be well again
    pressure: float = 0.40  # share of time in which processes wait for memory; 0: ignored
    calm_ns: int = 10 * SECOND_NS  # before each step back
    patience_ns: int = 10 * SECOND_NS  # how long memory may stay critical before the next stage


class FleetPolicy(Struct, frozen=True):
    pools: tuple[PoolPolicy, ...]
    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()
    classes: dict[str, GatePolicy] = {}
    class_breakers: dict[str, BreakerPolicy] = {}  # of classes with a breaker of their own
    targets: dict[str, TargetPolicy] = {}
    patterns: tuple[tuple[str, TargetPolicy], ...] = ()  # of names, the most specific first
    target: TargetPolicy = TargetPolicy()  # of targets without a policy of their own
    cache: CachePolicy = CachePolicy()
    schedules: tuple[SchedulePolicy, ...] = ()
    sessions: dict[str, SessionPolicy] = {}
    workers_max: int = 0  # of all pools together; 0: no limit
    page_tasks: int = 1024  # read from disk at once: takes a few ms, like a few hundred tiny tasks
    memory: MemoryPolicy = MemoryPolicy()
    drain_timeout_ns: int = 30 * SECOND_NS
    stop_timeout_ns: int = 5 * SECOND_NS
    cleanup_timeout_ns: int = 10 * SECOND_NS
    web: str = ""  # the build of the web process; "": none
    alerts: str = ""  # the build of the process that sends alerts
    events: str = ""  # the build of the process that publishes events
    cluster: str = ""  # the build of the process that speaks to the cluster
    node: str = ""  # the name of this machine in the cluster
    cleanup: tuple[str, ...] = ()  # functions that run at shutdown
    fence_stops: bool = False  # interrupt attempts of the cluster when the node's lease is over

    def target_of(self, name: str) -> TargetPolicy:
        """Return the policy of a target: its own, else of a pattern that it fits, else of all."""
        own = self.targets.get(name)
        if own is not None:
            return own
        return next((each for glob, each in self.patterns if fnmatchcase(name, glob)), self.target)
