"""Every key of the configuration, with its kind and default.

A section is one struct and one line in Config. A field's name ends with its unit where the value is
converted; `name=` gives the key that users write.
"""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

from msgspec import field, structs

from musterd.ipc.client.taskspec import FALLBACK_ON, ON_OPEN
from musterd.ipc.resilience.breaker import WINDOW_MAX
from musterd.ipc.secrets.access import fits
from musterd.ipc.secrets.names import SENSITIVE
from musterd.ipc.wire.messages import NOT_GIVEN, PRIORITY_NAMES, SESSION_CHARS_MAX
from musterd.supervisor.config.alerts import AlertConfig
from musterd.supervisor.config.artefacts import ArtefactsConfig
from musterd.supervisor.config.cluster import ClusterConfig
from musterd.supervisor.config.events import EventsConfig
from musterd.supervisor.config.http import HttpConfig
from musterd.supervisor.config.kinds import (
    AbsolutePath,
    Age,
    ArgumentNames,
    Choice,
    CronExpression,
    Duration,
    ExceptionNames,
    Flag,
    FunctionNames,
    GroupName,
    Label,
    Number,
    Options,
    Rate,
    Share,
    Size,
    StrategyName,
    TaskName,
    Text,
    TimeZone,
    Whole,
)
from musterd.supervisor.config.pool import (
    CACHE_ENTRIES_MAX,
    DebugConfig,
    ExecutorsConfig,
    ExecutorsOverride,
    PoolConfig,
)
from musterd.supervisor.config.redact import problem_of
from musterd.supervisor.config.secrets import Proxies
from musterd.supervisor.config.section import (
    COUNT_MAX,
    FACTOR_MAX,
    MEBIBYTE,
    MILLISECOND_NS,
    Conflict,
    Section,
    base_over_max,
)
from musterd.supervisor.config.sessions import SessionsConfig, args_problem
from musterd.supervisor.config.timezones import time_zone
from musterd.supervisor.config.watching import (
    ATTACH_SHARED,
    CONFIRM_MAX,
    KEEP_MAX,
    LIMIT_MAX,
    SCREENSHOT,
    STALE_MAX,
    FieldNames,
    Ignored,
    Step,
    attach_conflicts,
    watch_conflicts,
)
from musterd.supervisor.core.model.policy import SCHEDULES_MAX
from musterd.supervisor.text.units import SECOND_NS, format_duration

DAY_NS = 86_400 * SECOND_NS

# Results are rows on disk too: a hundred million of a few hundred bytes are some 50 GB.
RESULTS_MAX = 100_000_000
# The limit of the protocol (ipc.wire.messages.TaskSpec.max_retries).
RETRIES_MAX = 1000
CACHE_BYTES_MIN = 64 * 1024
CACHE_BYTES_MAX = 4096 * MEBIBYTE
CLASSES_MAX = 100
CLASS_NAME_LENGTH_MAX = 32  # ipc.wire.messages.TaskSpec.policy
TARGETS_MAX = 10_000
TARGET_LENGTH_MAX = 253  # ipc.wire.messages.TaskSpec.target
POOLS_SHOWN_MAX = 10  # in an error
# The name and the instant make a task's id of at most 64 characters.
SCHEDULE_NAME_LENGTH_MAX = 40
# A shorter interval belongs into a worker's loop: each run is written to disk twice.
EVERY_NS_MIN = 100 * MILLISECOND_NS
CHECK_NS_MIN = 100 * MILLISECOND_NS  # more frequent samples show nothing new


S = TypeVar("S", bound=Section)


class SupervisorConfig(Section, frozen=True):
    runtime_dir: Annotated[str, AbsolutePath()] = ""
    state_dir: Annotated[str, AbsolutePath()] = ""
    log_level: Annotated[str, Choice(("debug", "info", "warning", "error"))] = "info"
    log_file: Annotated[str, AbsolutePath()] = ""
    log_format: Annotated[str, Choice(("auto", "lines", "json"))] = "auto"
    log_tasks: Annotated[int, Whole(0, COUNT_MAX)] = 10
    drain_timeout_ns: Annotated[int, Duration()] = field(
        name="drain_timeout", default=30 * SECOND_NS
    )
    stop_timeout_ns: Annotated[int, Duration()] = field(name="stop_timeout", default=5 * SECOND_NS)
    cleanup_timeout_ns: Annotated[int, Duration()] = field(
        name="cleanup_timeout", default=10 * SECOND_NS
    )
    cleanup: Annotated[tuple[str, ...], FunctionNames()] = ()
    profile: Annotated[str, Text()] = "production"
    containment: Annotated[str, Choice(("auto", "pidns", "cgroup", "reaper"))] = "auto"
    control_group: Annotated[str, GroupName()] = ""
    view_group: Annotated[str, GroupName()] = ""
    tasks_group: Annotated[str, GroupName()] = ""
    redact: Annotated[tuple[str, ...], ArgumentNames()] = SENSITIVE
    workers_max: Annotated[int, Whole(0, COUNT_MAX)] = 0


class StoreConfig(Section, frozen=True):
    durability: Annotated[str, Choice(("full", "normal", "memory"))] = "full"
    keep_results_ns: Annotated[int, Duration()] = field(name="keep_results", default=DAY_NS)
    keep_results_max: Annotated[int, Whole(0, RESULTS_MAX)] = 1_000_000
    on_corrupt: Annotated[str, Choice(("stop", "set-aside"))] = "stop"


class RetryConfig(Section, frozen=True):
    max_retries: Annotated[int, Whole(0, RETRIES_MAX)] = 3
    strategy: Annotated[str, StrategyName()] = "exponential"
    base_ns: Annotated[int, Duration()] = field(name="base", default=SECOND_NS)
    factor: Annotated[float, Number(1, FACTOR_MAX)] = 2.0
    max_ns: Annotated[int, Duration()] = field(name="max", default=60 * SECOND_NS)
    jitter: Annotated[float, Share()] = 0.1
    budget: Annotated[bool, Flag()] = True

    def conflicts(self) -> Iterator[Conflict]:
        yield from base_over_max(self.base_ns, self.max_ns)


class BreakerConfig(Section, frozen=True):
    enabled: Annotated[bool, Flag()] = True
    failures: Annotated[int, Whole(0, COUNT_MAX)] = 3
    open_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="open", default=300 * SECOND_NS)
    open_factor: Annotated[float, Number(1, FACTOR_MAX)] = 2.0
    open_max_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="open_max", default=3600 * SECOND_NS
    )
    jitter: Annotated[float, Share()] = 0.1
    successes: Annotated[int, Whole(1, COUNT_MAX)] = 2
    probes: Annotated[int, Whole(1, COUNT_MAX)] = 1
    window: Annotated[int, Whole(0, WINDOW_MAX)] = 0
    window_min: Annotated[int, Whole(1, COUNT_MAX)] = 10
    failure_rate: Annotated[float, Share()] = 0.0
    slow_ns: Annotated[int, Duration()] = field(name="slow", default=0)
    slow_rate: Annotated[float, Share()] = 0.0

    def conflicts(self) -> Iterator[Conflict]:
        rated = self.failure_rate or self.slow_rate
        if rated and not self.window:
            yield ("window",), "is missing: a rate needs the number of calls that it is a share of"
        elif self.window and not rated:
            yield ("window",), "has no effect without failure_rate or slow_rate: give one of them"
        elif self.window and self.window_min > self.window:
            yield ("window_min",), f"is more than window ({self.window}): lower it"
        if bool(self.slow_rate) != bool(self.slow_ns):
            yield ("slow",), "and slow_rate need each other: give both"


class BreakerOverride(Section, frozen=True):
    """Overrides of [breaker] for a class or a target."""

    enabled: Annotated[bool | None, Flag()] = None
    failures: Annotated[int | None, Whole(0, COUNT_MAX)] = None
    open_ns: Annotated[int | None, Duration(MILLISECOND_NS)] = field(name="open", default=None)
    open_factor: Annotated[float | None, Number(1, FACTOR_MAX)] = None
    open_max_ns: Annotated[int | None, Duration(MILLISECOND_NS)] = field(
        name="open_max", default=None
    )
    jitter: Annotated[float | None, Share()] = None
    successes: Annotated[int | None, Whole(1, COUNT_MAX)] = None
    probes: Annotated[int | None, Whole(1, COUNT_MAX)] = None
    window: Annotated[int | None, Whole(0, WINDOW_MAX)] = None
    window_min: Annotated[int | None, Whole(1, COUNT_MAX)] = None
    failure_rate: Annotated[float | None, Share()] = None
    slow_ns: Annotated[int | None, Duration()] = field(name="slow", default=None)
    slow_rate: Annotated[float | None, Share()] = None


class RetryOverride(Section, frozen=True):
    """Overrides of [retry] for a class or a target."""

    max_retries: Annotated[int | None, Whole(0, RETRIES_MAX)] = None
    strategy: Annotated[str | None, StrategyName()] = None
    base_ns: Annotated[int | None, Duration()] = field(name="base", default=None)
    factor: Annotated[float | None, Number(1, FACTOR_MAX)] = None
    max_ns: Annotated[int | None, Duration()] = field(name="max", default=None)
    jitter: Annotated[float | None, Share()] = None


class ClassConfig(Section, frozen=True):
    """A resilience class."""

    entries_max = CLASSES_MAX
    name_is = "a class name"
    name_length_max = CLASS_NAME_LENGTH_MAX
    timeout_ns: Annotated[int | None, Duration(MILLISECOND_NS)] = field(
        name="timeout", default=None
    )
    max_concurrent: Annotated[int, Whole(0, COUNT_MAX)] = 0
    on_open: Annotated[str | None, Choice(ON_OPEN)] = None
    fallback_on: Annotated[str | None, Choice(FALLBACK_ON)] = None
    counts: Annotated[tuple[str, ...] | None, ExceptionNames()] = None
    retry: RetryOverride = RetryOverride()
    breaker: BreakerOverride = BreakerOverride()


class TargetConfig(Section, frozen=True):
    """One site."""

    entries_max = TARGETS_MAX
    policy: Annotated[str, Text()] = field(name="class", default="")
    timeout_ns: Annotated[int | None, Duration(MILLISECOND_NS)] = field(
        name="timeout", default=None
    )
    max_concurrent: Annotated[int, Whole(0, COUNT_MAX)] = 0
    rate: Annotated[float, Rate()] = 0.0
    burst: Annotated[int, Whole(1, COUNT_MAX)] = 1
    retry_share: Annotated[float, Share()] = 0.2
    on_open: Annotated[str | None, Choice(ON_OPEN)] = None
    fallback_on: Annotated[str | None, Choice(FALLBACK_ON)] = None
    counts: Annotated[tuple[str, ...] | None, ExceptionNames()] = None
    proxies: Annotated[tuple[str, ...], Proxies()] = ()
    robots: Annotated[bool | None, Flag()] = None
    retry: RetryOverride = RetryOverride()
    breaker: BreakerOverride = BreakerOverride()

    @classmethod
    def name_problem(cls, name: str) -> str:
        if name == "*":
            return "stands for every target: write [target_defaults]"
        return "" if 0 < len(name) <= TARGET_LENGTH_MAX else "a target has 1 to 253 characters"


class CacheConfig(Section, frozen=True):
    enabled: Annotated[bool, Flag()] = True
    ttl_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="ttl", default=30 * SECOND_NS)
    entries: Annotated[int, Whole(1, CACHE_ENTRIES_MAX)] = 1000
    bytes_max: Annotated[int, Size(CACHE_BYTES_MIN, CACHE_BYTES_MAX)] = field(
        name="bytes", default=16 * MEBIBYTE
    )


class DebounceConfig(Section, frozen=True):
    enabled: Annotated[bool, Flag()] = True
    window_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="window", default=500 * MILLISECOND_NS
    )


class MonitorConfig(Section, frozen=True):
    """Monitoring of the machine and the workers: memory, processors, disk, network."""

    enabled: Annotated[bool, Flag()] = True


class MemoryConfig(Section, frozen=True):
    enabled: Annotated[bool, Flag()] = True
    warning: Annotated[float, Share()] = 0.7
    critical: Annotated[float, Share()] = 0.85
    margin: Annotated[float, Share()] = 0.05
    pressure: Annotated[float, Share()] = 0.4
    check_interval_ns: Annotated[int, Duration(CHECK_NS_MIN)] = field(
        name="check_interval", default=SECOND_NS
    )
    calm_ns: Annotated[int, Duration()] = field(name="calm", default=10 * SECOND_NS)
    patience_ns: Annotated[int, Duration()] = field(name="patience", default=10 * SECOND_NS)
    statistics_ns: Annotated[int, Duration()] = field(name="statistics", default=300 * SECOND_NS)

    def conflicts(self) -> Iterator[Conflict]:
        if self.warning >= self.critical:
            yield ("warning",), f"is not below critical ({self.critical:.0%}): lower it"
        elif self.margin >= self.warning:
            yield ("margin",), f"is not below warning ({self.warning:.0%}): lower it"


class ScheduleConfig(Section, frozen=True):
    """Written as [[schedule]] with a `name`, or as [schedule.NAME]."""

    entries_max = SCHEDULES_MAX
    name_is = "the name of a schedule"
    name_length_max = SCHEDULE_NAME_LENGTH_MAX
    task: Annotated[str, TaskName()]
    args: Annotated[dict[str, Any], Options()] = {}
    every_ns: Annotated[int, Duration()] = field(name="every", default=0)
    cron: Annotated[str, CronExpression()] = ""
    timezone: Annotated[str, TimeZone()] = ""
    priority: Annotated[str, Choice(PRIORITY_NAMES)] = "normal"
    jitter_ns: Annotated[int, Duration()] = field(name="jitter", default=0)
    overlap: Annotated[bool, Flag()] = False
    catch_up: Annotated[str, Choice(("one", "none", "all"))] = "one"
    enabled: Annotated[bool, Flag()] = True
    target: Annotated[str, Label(253)] = ""
    timeout_ns: Annotated[int, Duration()] = field(name="timeout", default=0)
    max_retries: Annotated[int, Whole(NOT_GIVEN, RETRIES_MAX)] = NOT_GIVEN
    key: Annotated[str, Label(200)] = ""
    cache_ns: Annotated[int, Age(MILLISECOND_NS)] = field(name="cache", default=0)
    debounce_ns: Annotated[int, Age(MILLISECOND_NS)] = field(name="debounce", default=0)
    notify: Annotated[str, Choice(("", "task.changed"))] = ""
    watch: Annotated[tuple[str, ...], FieldNames()] = ()
    ignore: Annotated[tuple[str, ...], Ignored()] = ()
    confirm: Annotated[int, Whole(1, CONFIRM_MAX)] = 1
    above: Annotated[float | None, Number(-LIMIT_MAX, LIMIT_MAX)] = None
    below: Annotated[float | None, Number(-LIMIT_MAX, LIMIT_MAX)] = None
    by: Annotated[str, Step()] = ""
    keep: Annotated[int, Whole(2, KEEP_MAX)] = 20
    stale: Annotated[int, Whole(0, STALE_MAX)] = 3
    attach: Annotated[str, Choice(("", SCREENSHOT))] = ""
    session: Annotated[str, Label(SESSION_CHARS_MAX)] = ""

    def conflicts(self) -> Iterator[Conflict]:
        yield from watch_conflicts(self)
        if self.every_ns and self.cron:
            yield ("cron",), "is given beside every: remove one of them"
        elif not self.every_ns and not self.cron:
            yield ("every",), 'is missing: give every = "5m", or cron = "*/5 * * * *"'
        elif self.every_ns:
            if self.every_ns < EVERY_NS_MIN:
                yield ("every",), f'is too short: give at least "{format_duration(EVERY_NS_MIN)}"'
            elif self.jitter_ns >= self.every_ns:
                yield ("jitter",), "is not shorter than every: lower it"
            if self.timezone:
                yield ("timezone",), "has no effect with every: remove it"
        elif not self.timezone:
            try:
                time_zone("")
            except ValueError as error:
                yield ("timezone",), str(error)


class Config(Section, frozen=True):
    supervisor: SupervisorConfig = SupervisorConfig()
    store: StoreConfig = StoreConfig()
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    classes: dict[str, ClassConfig] = {}
    target_defaults: TargetConfig = TargetConfig()
    targets: dict[str, TargetConfig] = {}
    cache: CacheConfig = CacheConfig()
    debounce: DebounceConfig = DebounceConfig()
    executors: ExecutorsConfig = ExecutorsConfig()
    debug: DebugConfig = DebugConfig()
    memory: MemoryConfig = MemoryConfig()
    monitor: MonitorConfig = MonitorConfig()
    http: HttpConfig = HttpConfig()
    events: EventsConfig = EventsConfig()
    cluster: ClusterConfig = ClusterConfig()
    pools: dict[str, PoolConfig] = {}
    schedule: dict[str, ScheduleConfig] = {}
    sessions: SessionsConfig = SessionsConfig()
    alerts: dict[str, AlertConfig] = {}
    artefacts: ArtefactsConfig = ArtefactsConfig()

    @property
    def own_secrets(self) -> dict[str, str]:
        """Return secrets that only the daemon uses: their names, and the keys that name them."""
        own = {each.url_secret: f"alerts.{name}" for name, each in self.alerts.items()}
        own[self.http.token_file] = "http.token_file"
        own[self.cluster.url_secret] = "cluster.url_secret"
        own[self.sessions.key_secret] = "sessions.key_secret"
        return {name: key for name, key in own.items() if name and not name.startswith("/")}

    @property
    def own_files(self) -> dict[str, str]:
        """Return files with secrets that only the daemon uses, and the keys that name them."""
        own = {each.url_file: f"alerts.{name}.url_file" for name, each in self.alerts.items()}
        own[self.http.token_file] = "http.token_file"
        own[self.cluster.url_file] = "cluster.url_file"
        own[self.sessions.key_file] = "sessions.key_file"
        return {path: key for path, key in own.items() if path.startswith("/")}

    def conflicts(self) -> Iterator[Conflict]:
        yield from _secret_conflicts(self)
        yield from class_conflicts(self)
        yield from target_conflicts(self)
        yield from _workers_conflicts(self)
        for name in self.cluster.pools:
            if name not in self.pools:
                yield ("cluster", "pools"), f"has no pool '{name}': {_pools(self.pools)}"
        for name, each in self.pools.items():
            if each.max_memory_bytes and not self.monitor.enabled:
                why = "has no effect where monitor.enabled is false: remove one of them"
                yield ("pools", name, "max_memory"), why
        for name, schedule in self.schedule.items():
            for (key,), why in schedule_conflicts(self, schedule):
                yield ("schedule", name, key), why
        for name, session in self.sessions.named.items():
            if problem := args_problem(name, session, self.supervisor.redact):
                yield ("sessions", name, "args"), problem
            if session.login_task and (why := self.login_problem(name, session.login_task)):
                yield ("sessions", name, "login_task"), why

    def login_problem(self, name: str, task: str) -> str:
        """Return why a task cannot be the login of a session; "" for no reason."""
        pool = task.partition(".")[0]
        if pool not in self.pools:
            return f"has no pool: {_pools(self.pools)}"
        if not self.pools[pool].enabled:
            return "has a pool that is not enabled: enable it"
        return self._not_for(name, pool)

    def _not_for(self, session: str, pool: str) -> str:
        """Return why a session is not for the tasks of a pool."""
        if self.cluster.shares(pool) and not self.sessions.has_shared_key:
            return (
                f"stays on one machine, and pool '{pool}' is shared by the cluster: give "
                "sessions.key_secret or sessions.key_file, the same on all machines, or take the "
                "pool out of cluster.pools"
            )
        login = self.sessions.named[session].login_task.partition(".")[0]
        if login and self.cluster.shares(pool) != self.cluster.shares(login):
            shared, own = (pool, login) if self.cluster.shares(pool) else (login, pool)
            return (
                f"has a login task of pool '{login}' and is for pool '{pool}', and of these only "
                f"'{shared}' is shared by the cluster: take '{own}' into cluster.pools, too, or "
                "both out of it"
            )
        if pool in self.pools and not fits(session, self.pools[pool].sessions):
            return f"is not for pool '{pool}': add the session to the pool's key sessions"
        return ""

    def session_problem(self, schedule: ScheduleConfig) -> str:
        """Return why a schedule cannot use its session; "" for no reason."""
        pool = schedule.task.partition(".")[0]
        if schedule.session not in self.sessions.named:
            known = ", ".join(sorted(self.sessions.named)[:POOLS_SHOWN_MAX]) or "none"
            return f"is not a session of [sessions]: known are {known}"
        return self._not_for(schedule.session, pool)


def schedule_conflicts(config: Config, schedule: ScheduleConfig) -> Iterator[Conflict]:
    """Yield keys of a schedule that conflict with other sections."""
    pool = config.pools.get(schedule.task.partition(".")[0])
    if pool is None:
        yield ("task",), f"has no pool: {_pools(config.pools)}"
    elif schedule.enabled and not pool.enabled:
        yield ("task",), "has a pool that is not enabled: enable one of them"
    if schedule.attach:
        worker = pool.worker if pool is not None else ""
        parses = worker == USUAL_POOLS["parser"]["worker"]
        yield from attach_conflicts(schedule.task, parses=parses, kept=config.artefacts.enabled)
        if config.cluster.shares(schedule.task.partition(".")[0]):
            yield ("attach",), ATTACH_SHARED
    problem = problem_of(schedule.task, schedule.args, config.supervisor.redact)
    if problem:
        yield ("args",), problem
    if schedule.session and (why := config.session_problem(schedule)):
        yield ("session",), why


# Fields of a pool that default to values of other sections.
_INHERITED = (
    ("cache_ttl_ns", "cache", "ttl_ns"),
    ("cache_entries", "cache", "entries"),
    ("debounce_window_ns", "debounce", "window_ns"),
    ("debug", "debug", "enabled"),
)
# The keys of these fields as users write them.
INHERITED_KEYS = {
    "executors.io": "executors.io",
    "executors.calculation": "executors.calculation",
    "executors.api": "executors.api",
    "cache_ttl": "cache.ttl",
    "cache_entries": "cache.entries",
    "debounce_window": "debounce.window",
    "debug": "debug.enabled",
}


def inherited(config: Config) -> Config:
    """Return the configuration with every default of the pools filled in."""
    threads = ExecutorsOverride(**structs.asdict(config.executors))
    pools = {
        name: structs.replace(
            pool,
            executors=over(threads, pool.executors),
            **{
                own: getattr(getattr(config, section), field)
                for own, section, field in _INHERITED
                if getattr(pool, own) is None
            },
        )
        for name, pool in config.pools.items()
    }
    return structs.replace(config, pools=pools)


def over(base: S, override: Section) -> S:
    """Return `base` with the values of the override."""
    said = {name: value for name, value in structs.asdict(override).items() if value is not None}
    return structs.replace(base, **said)


def class_defaults(config: Config, name: str) -> tuple[RetryConfig, BreakerConfig]:
    """Return the defaults for targets of a class; of no class, the global ones."""
    of_class = config.classes.get(name, ClassConfig())
    return over(config.retry, of_class.retry), over(config.breaker, of_class.breaker)


def _under(path: tuple[str, ...], base: Section, override: Section) -> Iterator[Conflict]:
    """Yield conflicts of the resulting values, at the section that overrides them."""
    if override != type(override)():
        yield from (((*path, *name), why) for name, why in over(base, override).conflicts())


def _secret_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield pools that could use secrets of the daemon."""
    for name, pool in config.pools.items():
        for secret, key in config.own_secrets.items():
            if secret in pool.secrets:
                yield (
                    ("pools", name, "secrets"),
                    f"names {secret}, which is the daemon's own ({key}) and never for workers: "
                    "give the pool a secret of its own",
                )
        for path, key in config.own_files.items():
            file = PurePath(path)
            inside = pool.secrets_dir and file.parent == PurePath(pool.secrets_dir)
            if inside and fits(file.name, pool.secrets):
                yield (
                    ("pools", name, "secrets_dir"),
                    f"holds {file.name}, which is the daemon's own ({key}): give the pool a "
                    "directory of its own",
                )


def class_conflicts(config: Config) -> Iterator[Conflict]:
    for name, each in config.classes.items():
        path = ("classes", name)
        yield from _under((*path, "retry"), config.retry, each.retry)
        yield from _under((*path, "breaker"), config.breaker, each.breaker)


def target_conflicts(config: Config) -> Iterator[Conflict]:
    sections = [(("targets", name), each) for name, each in config.targets.items()]
    for path, each in [(("target_defaults",), config.target_defaults), *sections]:
        if each.policy and each.policy not in config.classes:
            known = ", ".join(sorted(config.classes)) or "none"
            yield (*path, "class"), f"is not a class of [classes]: known are {known}"
        retry, breaker = class_defaults(config, each.policy)
        yield from _under((*path, "retry"), retry, each.retry)
        yield from _under((*path, "breaker"), breaker, each.breaker)


def _workers_conflicts(config: Config) -> Iterator[Conflict]:
    most = config.supervisor.workers_max
    needed = sum(pool.workers_held for pool in config.pools.values() if pool.enabled)
    if 0 < most < needed:
        yield (
            ("supervisor", "workers_max"),
            f"is less than the {needed} workers that the pools start with (a pool with min and max "
            "counts as at least one): raise it or lower their size",
        )


def _pools(pools: dict[str, PoolConfig]) -> str:
    names = ", ".join(sorted(pools)[:POOLS_SHOWN_MAX])
    return f"the pools are {names}" if names else "there are no pools"


# Defaults of pools: by name, and the size also by worker.
USUAL_POOLS: dict[str, dict[str, Any]] = {
    "parser": {"worker": "musterd.workers.parser:ParserWorker", "size": 5},
    "browser": {"worker": "musterd.workers.browser:BrowserWorker", "size": 3},
}

# Pools where no file has a [pools] table.
BUILT_IN_POOLS = {"parser": USUAL_POOLS["parser"]}

# Profiles that need no file. They change pools named here, but add none.
BUILT_IN_PROFILES: dict[str, dict[str, Any]] = {
    "development": {
        "supervisor": {"log_level": "debug"},
        "debug": {"enabled": True},
        "store": {"durability": "normal"},
        "pools": {"parser": {"size": 2}},
    },
    "production": {},  # the defaults are those of production
}
