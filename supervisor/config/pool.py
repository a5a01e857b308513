"""The keys of [pools.NAME], and of sections with defaults of pools alone."""

from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import field

from musterd.ipc.resilience.policy import POOL_SIZE_MAX
from musterd.ipc.secrets.access import EVERYTHING
from musterd.ipc.wire.messages import CONCURRENCY_MAX
from musterd.supervisor.config.kinds import (
    AbsolutePath,
    Duration,
    Flag,
    Number,
    Options,
    Share,
    Size,
    Variables,
    Whole,
    WorkerName,
)
from musterd.supervisor.config.secrets import SecretPatterns
from musterd.supervisor.config.section import (
    FACTOR_MAX,
    MEBIBYTE,
    MILLISECOND_NS,
    Conflict,
    Section,
    base_over_max,
)
from musterd.supervisor.config.sessions import EVERY_SESSION, SessionPatterns
from musterd.supervisor.text.units import SECOND_NS

# Each pool costs a process, its fork server.
POOLS_MAX = 100
# A pool's name is part of process titles, task names and journal fields.
POOL_NAME_LENGTH_MAX = 64
# Queued tasks are rows on disk: about 1 KB each, so some 10 GB.
QUEUE_SIZE_MAX = 10_000_000
CRASHES_MAX = 100
RESTARTS_MAX = 10_000
TASKS_MAX = 1_000_000_000  # of one worker: as good as unlimited
MEMORY_MAX = 1024 * 1024 * MEBIBYTE  # a tebibyte: more than any worker gets
# A cache is all in memory, and an invalidation by prefix looks at every entry.
CACHE_ENTRIES_MAX = 100_000
THREADS_MAX = 1000  # in an executor of a worker: more is a typing error
RESERVED_POOL_NAMES = frozenset({"all"})  # musterctl's word for every pool


class RestartConfig(Section, frozen=True):
    base_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="base", default=500 * MILLISECOND_NS
    )
    factor: Annotated[float, Number(1, FACTOR_MAX)] = 2.0
    max_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="max", default=60 * SECOND_NS)
    jitter: Annotated[float, Share()] = 0.1
    pause_after: Annotated[int, Whole(1, RESTARTS_MAX)] = 5
    pause_ns: Annotated[int, Duration()] = field(name="pause", default=60 * SECOND_NS)
    reset_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="reset", default=60 * SECOND_NS)
    limit: Annotated[int, Whole(1, RESTARTS_MAX)] = 10
    window_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="window", default=60 * SECOND_NS
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from base_over_max(self.base_ns, self.max_ns)


class ExecutorsConfig(Section, frozen=True):
    """Threads of the named executors in a worker's own code."""

    io: Annotated[int, Whole(1, THREADS_MAX)] = 3  # more do not make a disk faster
    calculation: Annotated[int, Whole(1, THREADS_MAX)] = 20
    api: Annotated[int, Whole(1, THREADS_MAX)] = 10


class ExecutorsOverride(Section, frozen=True):
    """Overrides of [executors] for one pool."""

    io: Annotated[int | None, Whole(1, THREADS_MAX)] = None
    calculation: Annotated[int | None, Whole(1, THREADS_MAX)] = None
    api: Annotated[int | None, Whole(1, THREADS_MAX)] = None


class DebugConfig(Section, frozen=True):
    """Whether handlers may wait at a breakpoint for a person."""

    enabled: Annotated[bool, Flag()] = False
    wait_ns: Annotated[int, Duration(SECOND_NS)] = field(name="wait", default=600 * SECOND_NS)


class PoolConfig(Section, frozen=True):
    entries_max = POOLS_MAX
    name_is = "a pool name"
    name_length_max = POOL_NAME_LENGTH_MAX
    worker: Annotated[str, WorkerName()]
    enabled: Annotated[bool, Flag()] = True
    size: Annotated[int, Whole(0, POOL_SIZE_MAX)] = 1
    concurrency: Annotated[int, Whole(1, CONCURRENCY_MAX)] = 1
    queue_size: Annotated[int, Whole(1, QUEUE_SIZE_MAX)] = 10_000
    aging_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="aging", default=60 * SECOND_NS)
    task_timeout_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="task_timeout", default=120 * SECOND_NS
    )
    start_timeout_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="start_timeout", default=30 * SECOND_NS
    )
    heartbeat_timeout_ns: Annotated[int, Duration()] = field(
        name="heartbeat_timeout", default=30 * SECOND_NS
    )
    health_interval_ns: Annotated[int, Duration()] = field(
        name="health_interval", default=60 * SECOND_NS
    )
    health_timeout_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="health_timeout", default=10 * SECOND_NS
    )
    max_crashes: Annotated[int, Whole(1, CRASHES_MAX)] = 3
    sacrifice: Annotated[bool, Flag()] = False
    spare: Annotated[bool, Flag()] = True
    max_tasks: Annotated[int, Whole(0, TASKS_MAX)] = 0
    max_age_ns: Annotated[int, Duration()] = field(name="max_age", default=0)
    max_memory_bytes: Annotated[int, Size(0, MEMORY_MAX)] = field(name="max_memory", default=0)
    debug: Annotated[bool | None, Flag()] = None
    env: Annotated[dict[str, str], Variables()] = {}
    options: Annotated[dict[str, Any], Options()] = {}
    secrets_dir: Annotated[str, AbsolutePath()] = ""
    secrets: Annotated[tuple[str, ...], SecretPatterns()] = EVERYTHING
    sessions: Annotated[tuple[str, ...], SessionPatterns()] = EVERY_SESSION
    restart: RestartConfig = RestartConfig()
    executors: ExecutorsOverride = ExecutorsOverride()
    cache_ttl_ns: Annotated[int | None, Duration(MILLISECOND_NS)] = field(
        name="cache_ttl", default=None
    )
    cache_entries: Annotated[int | None, Whole(1, CACHE_ENTRIES_MAX)] = None
    debounce_window_ns: Annotated[int | None, Duration(MILLISECOND_NS)] = field(
        name="debounce_window", default=None
    )
    min: Annotated[int | None, Whole(0, POOL_SIZE_MAX)] = None
    max: Annotated[int | None, Whole(1, POOL_SIZE_MAX)] = None
    scale_wait_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="scale_wait", default=1 * SECOND_NS
    )
    scale_idle_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="scale_idle", default=60 * SECOND_NS
    )

    @property
    def scales(self) -> bool:
        """Return whether the pool scales automatically."""
        return self.min is not None or self.max is not None

    @property
    def workers_held(self) -> int:
        """Return how many of workers_max the pool takes at the start."""
        return max(self.size, 1) if self.scales else self.size

    def conflicts(self) -> Iterator[Conflict]:
        if self.min is not None and self.max is not None and self.min > self.max:
            yield ("min",), f"is more than max ({self.max}): lower min or raise max"
            return
        at_start = f"size ({self.size}), the number at the start"
        if self.min is not None and self.min > self.size:
            yield ("min",), f"is more than {at_start}: lower min or raise size"
        if self.max is not None and self.max < self.size:
            yield ("max",), f"is less than {at_start}: raise max or lower size"

    @classmethod
    def name_problem(cls, name: str) -> str:
        if name in RESERVED_POOL_NAMES:
            return f'the name "{name}" means all pools in musterctl: choose another'
        return super().name_problem(name)
