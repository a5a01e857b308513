"""What the operator decided, in the core's units. The shell makes these from the configuration."""

from msgspec import Struct

from musterd.ipc.resilience.policy import (
    MILLISECOND_NS,
    SECOND_NS,
    BackoffPolicy,
    BreakerPolicy,
    RetryPolicy,
)
from musterd.ipc.wire.messages import NORMAL, NOT_GIVEN
from musterd.supervisor.core.model.timing import Timing


class RestartPolicy(Struct, frozen=True):
    """How a crashed worker comes back: the first time at once, then with growing pauses.

    From the failure number `pause_after` in a row on, a pause is at least `pause_ns`. `reset_ns` of
    stable uptime forgets earlier crashes; more than `limit` crashes within `window_ns` make the
    slot FATAL.
    """

    backoff: BackoffPolicy = BackoffPolicy(base_ns=500 * MILLISECOND_NS)
    pause_after: int = 5
    pause_ns: int = 60 * SECOND_NS
    reset_ns: int = 60 * SECOND_NS
    limit: int = 10
    window_ns: int = 60 * SECOND_NS


class ScalingPolicy(Struct, frozen=True):
    """Between what numbers of workers a pool moves by itself, and how eagerly."""

    min: int
    max: int
    wait_ns: int = 1 * SECOND_NS  # a task that waits so long asks for more workers
    idle_ns: int = 60 * SECOND_NS  # workers that were not needed for so long are let go


class PoolPolicy(Struct, frozen=True):
    name: str
    size: int
    build: str = ""  # names what its workers are made of: another one, and they are replaced
    queue_size: int = 10_000
    aging_ns: int = 60 * SECOND_NS
    task_timeout_ns: int = 120 * SECOND_NS
    start_timeout_ns: int = 30 * SECOND_NS
    heartbeat_timeout_ns: int = 30 * SECOND_NS  # of an idle worker; 0: never
    health_timeout_ns: int = 10 * SECOND_NS  # of one that asks its healthy(); 0: never
    restart: RestartPolicy = RestartPolicy()
    max_crashes: int = 3
    scaling: ScalingPolicy | None = None  # None: it keeps its size
    # Beyond that in memory, what is queued stays on disk: some 20 MB, and some 32 of arguments.
    resident_tasks: int = 20_000
    resident_bytes: int = 64 * 1024 * 1024
    max_tasks: int = 0  # of a worker, until it is recycled; 0: never
    max_age_ns: int = 0
    max_memory_bytes: int = 0  # of a worker and all it started
    sacrifice: bool = False  # it has no worker at all when memory stays critical
    spare: bool = True  # a process is kept ready for its next worker
    cache_ns: int = 30 * SECOND_NS  # how old a result may be where a task asks without a number ...
    debounce_ns: int = 500 * MILLISECOND_NS  # ... and how long ago a submit


class GatePolicy(Struct, frozen=True):
    """A resilience class: what holds for its tasks unless they say otherwise themselves."""

    name: str = ""
    timeout_ns: int = 0  # 0: as the pool says
    max_retries: int = NOT_GIVEN
    backoff: BackoffPolicy | None = None
    max_concurrent: int = 0  # over all targets; 0: no limit
    on_open: str = ""  # what becomes of a task whose target's breaker is open; "": it waits
    fallback_on: str = ""  # when it falls back: "open", or also on "failure"; "": open
    counts: tuple[str, ...] | None = None  # exceptions that a breaker counts; None: the usual


class TargetPolicy(Struct, frozen=True):
    """What holds for one site; what it does not say is as its class says."""

    policy: str = ""  # its resilience class
    timeout_ns: int = 0
    max_retries: int = NOT_GIVEN
    backoff: BackoffPolicy | None = None
    on_open: str = ""
    fallback_on: str = ""
    counts: tuple[str, ...] | None = None
    max_concurrent: int = 0
    rate: float = 0.0  # beginnings per second; 0: no limit
    burst: int = 1
    breaker: BreakerPolicy | None = None  # None: as its class says
    retry_share: float | None = 0.2  # retries it may get, as a share of its traffic; None: any ...
    retry_reserve: float = 10.0  # ... and beyond that share, to begin with ...
    retry_every_ns: int = 10 * SECOND_NS  # ... and one more in this time, however rare its tasks


class CachePolicy(Struct, frozen=True):
    """What is remembered of results; disabled, `cache` and `debounce` of a submit mean nothing."""

    enabled: bool = True
    debounce: bool = True  # else `debounce` alone means nothing
    entries: int = 1000
    bytes: int = 16 * 1024 * 1024


class SchedulePolicy(Struct, frozen=True):
    """A task that is to be made again and again."""

    name: str
    task: str  # POOL.METHOD
    timing: Timing
    args: bytes = b"\x80"  # msgpack of a table, by default an empty one
    priority: int = NORMAL
    target: str = ""
    sites: dict[str, str] = {}  # which site each argument names: the task declares which counts
    timeout_ns: int = 0
    max_retries: int = NOT_GIVEN
    key: str = ""
    cache_ns: int = 0  # as of a submit
    debounce_ns: int = 0
    jitter_ns: int = 0  # each run waits for a random part of it
    overlap: bool = False  # whether a run may begin while the last one is alive
    catch_up: str = "one"  # or none, or all: of what was due while nobody could run it
    enabled: bool = True
    notify: bool = False  # report when a result is not the one before


class MemoryPolicy(Struct, frozen=True):
    """When memory is tight (shares of what there is), and how calm it has to be again."""

    watched: bool = True  # else nothing is looked at, and nothing is known
    enabled: bool = True  # else it is looked at, and nothing is done about it
    warning: float = 0.70
    critical: float = 0.85
    margin: float = 0.05  # below a line, to be well again
    pressure: float = 0.40  # of the time that processes wait for memory; 0: not looked at
    calm_ns: int = 10 * SECOND_NS  # before each step back
    patience_ns: int = 10 * SECOND_NS  # how long it may stay critical before more is done


class FleetPolicy(Struct, frozen=True):
    pools: tuple[PoolPolicy, ...]
    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()
    classes: dict[str, GatePolicy] = {}
    class_breakers: dict[str, BreakerPolicy] = {}  # where a class has its own
    targets: dict[str, TargetPolicy] = {}
    target: TargetPolicy = TargetPolicy()  # of those that are not named
    cache: CachePolicy = CachePolicy()
    schedules: tuple[SchedulePolicy, ...] = ()
    workers_max: int = 0  # of all pools together; 0: no limit
    page_tasks: int = 1024  # read from disk at once: it takes a few ms, as a few hundred tiny tasks
    memory: MemoryPolicy = MemoryPolicy()
    drain_timeout_ns: int = 30 * SECOND_NS
    stop_timeout_ns: int = 5 * SECOND_NS
    cleanup_timeout_ns: int = 10 * SECOND_NS
    web: str = ""  # names what the web process is made of; "": there is none
    alerts: str = ""  # the same of the process that sends alerts
    events: str = ""  # and of the one that publishes events
    cleanup: tuple[str, ...] = ()  # functions to be run at the end of the daemon
