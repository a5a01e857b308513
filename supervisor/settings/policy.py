"""The core's policies, made from the configuration that people write."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct, structs

from musterd.ipc.client.taskspec import encode_args, key_of
from musterd.ipc.resilience.policy import BackoffPolicy, BreakerPolicy, RetryPolicy, Strategy
from musterd.ipc.secrets.reference import from_json
from musterd.ipc.watching.rules import encode_rules
from musterd.ipc.wire.messages import NOT_GIVEN, PRIORITY_NAMES
from musterd.supervisor.config.bulk import by_precision, is_pattern
from musterd.supervisor.config.kinds import STRATEGIES
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import (
    BreakerConfig,
    BreakerOverride,
    ClassConfig,
    Config,
    RetryConfig,
    RetryOverride,
    ScheduleConfig,
    TargetConfig,
    class_defaults,
    inherited,
    over,
)
from musterd.supervisor.config.section import Section
from musterd.supervisor.config.timezones import time_zone
from musterd.supervisor.config.watching import parse_step, rules_of
from musterd.supervisor.core.model.policy import (
    CachePolicy,
    FleetPolicy,
    GatePolicy,
    MemoryPolicy,
    PoolPolicy,
    RestartPolicy,
    ScalingPolicy,
    SchedulePolicy,
    TargetPolicy,
    WatchPolicy,
)
from musterd.supervisor.core.model.timing import Cron, Every, Timing
from musterd.supervisor.processes.forkserver_messages import WorkerSettings
from musterd.supervisor.settings.node import node_settings
from musterd.supervisor.settings.sessions import session_policy, session_rules, sessions_of
from musterd.supervisor.settings.sidecars import alert_settings, publisher_settings, web_settings
from musterd.supervisor.sockets.declarations import site_of
from musterd.supervisor.system import descriptors

T = TypeVar("T", bound=Struct)

BEATS_PER_TIMEOUT = 6  # heartbeats that must be missing before a worker is taken for dead
BEAT_SECONDS_MAX = 2.0
RULES_DIGITS = 16
BUILD_DIGITS = 16  # enough to tell builds of one pool apart


def fleet_policy(
    config: Config,
    replaced: Mapping[str, int] | None = None,
    origins: Mapping[str, str] | None = None,
) -> FleetPolicy:
    """Return the policy of the whole fleet.

    `replaced` changes the build of pools whose workers are to be replaced in any case; `origins`
    says which file a schedule is from.
    """
    files = origins or {}
    config = inherited(config)
    retry = config.retry
    again = replaced or {}
    return _same(
        FleetPolicy,
        config.supervisor,
        pools=tuple(
            _pool_policy(name, pool, config, again.get(name, 0))
            for name, pool in config.pools.items()
            if pool.enabled
        ),
        retry=RetryPolicy(retry.max_retries, _backoff(retry)),
        breaker=_breaker(config.breaker),
        classes={name: _class(name, each, retry) for name, each in config.classes.items()},
        class_breakers={
            name: _breaker(over(config.breaker, each.breaker))
            for name, each in config.classes.items()
        },
        targets={
            name: _target(config, each)
            for name, each in config.targets.items()
            if not is_pattern(name)
        },
        patterns=tuple(
            (name, _target(config, config.targets[name]))
            for name in by_precision([name for name in config.targets if is_pattern(name)])
        ),
        target=_any_target(config),
        cache=CachePolicy(
            config.cache.enabled,
            config.debounce.enabled,
            config.cache.entries,
            config.cache.bytes_max,
        ),
        schedules=tuple(
            schedule_policy(name, each, files.get(f"schedule.{name}.task", ""))
            for name, each in config.schedule.items()
        ),
        sessions={name: session_policy(name, each) for name, each in config.sessions.named.items()},
        memory=_same(
            MemoryPolicy,
            config.memory,
            watched=config.monitor.enabled,
            enabled=config.memory.enabled and config.monitor.enabled,
        ),
        # No build: the daemon has no such sidecar.
        web=_build(web_settings(config)) if config.http.listen and config.http.start else "",
        alerts=(
            _build(alert_settings(config))
            if any(alert.enabled for alert in config.alerts.values())
            else ""
        ),
        events=_build(publisher_settings(config)) if config.events.publish else "",
        cluster=_build(node_settings(config)) if config.cluster.wanted else "",
        node=node_settings(config).node if config.cluster.wanted else "",
        fence_stops=config.cluster.fence == "stop",
    )


def _same(kind: type[T], config: Section, **others: Any) -> T:
    """Make a policy: the others are given, and fields of the same name mean the same."""
    names = {*kind.__struct_fields__} & {*config.__struct_fields__} - {*others}
    return kind(**{name: getattr(config, name) for name in names}, **others)


def _backoff(retry: RetryConfig) -> BackoffPolicy:
    # A killed worker cannot be asked for its own strategy: then the usual one holds.
    custom = retry.strategy if retry.strategy not in STRATEGIES else ""
    strategy = cast(Strategy, retry.strategy) if not custom else "exponential"
    return BackoffPolicy(retry.base_ns, retry.factor, retry.max_ns, retry.jitter, strategy, custom)


def _breaker(breaker: BreakerConfig) -> BreakerPolicy:
    return _same(
        BreakerPolicy,
        breaker,
        open_max_ns=max(breaker.open_ns, breaker.open_max_ns),
        open_jitter=breaker.jitter,
        window_calls_min=breaker.window_min,
    )


def _max_retries(own: RetryOverride) -> int:
    return own.max_retries if own.max_retries is not None else NOT_GIVEN


def _class(name: str, config: ClassConfig, retry: RetryConfig) -> GatePolicy:
    own = config.retry
    return _same(
        GatePolicy,
        config,
        name=name,
        timeout_ns=config.timeout_ns or 0,
        max_retries=_max_retries(own),
        backoff=_backoff(over(retry, own)),
        on_open=config.on_open or "",
        fallback_on=config.fallback_on or "",
    )


def _target(config: Config, target: TargetConfig) -> TargetPolicy:
    retry, breaker = class_defaults(config, target.policy)
    own = target.retry
    return _same(
        TargetPolicy,
        target,
        timeout_ns=target.timeout_ns or 0,
        max_retries=_max_retries(own),
        # None: the backoff of the class that the task names, if that is not the target's.
        backoff=_backoff(over(retry, own)) if own != RetryOverride() else None,
        on_open=target.on_open or "",
        fallback_on=target.fallback_on or "",
        breaker=_breaker(over(breaker, target.breaker)),
        retry_share=target.retry_share if config.retry.budget else None,
    )


def _any_target(config: Config) -> TargetPolicy:
    """Return the policy of targets without a section; the classes of their tasks choose a breaker,
    unless [target_defaults] does."""
    own = config.target_defaults
    policy = _target(config, own)
    chosen = own.policy or own.breaker != BreakerOverride()
    return policy if chosen else structs.replace(policy, breaker=None)


def _scaling(pool: PoolConfig) -> ScalingPolicy | None:
    """Return the bounds of a pool that scales; a bound that is not given is the size."""
    low = pool.min if pool.min is not None else pool.size
    high = pool.max if pool.max is not None else pool.size
    if low == high:
        return None
    return ScalingPolicy(low, high, pool.scale_wait_ns, pool.scale_idle_ns)


def worker_settings_of(pool: PoolConfig) -> WorkerSettings:
    beat_ns = pool.heartbeat_timeout_ns // BEATS_PER_TIMEOUT
    beat_seconds = min(beat_ns / 1e9, BEAT_SECONDS_MAX) if beat_ns else BEAT_SECONDS_MAX
    health_seconds = pool.health_interval_ns / 1e9
    if health_seconds:
        beat_seconds = min(beat_seconds, health_seconds)
    threads = {name: count for name, count in structs.asdict(pool.executors).items() if count}
    return WorkerSettings(
        health_seconds,
        beat_seconds,
        pool.concurrency,
        threads,
        cache_seconds=(pool.cache_ttl_ns or 0) / 1e9,
        cache_entries=pool.cache_entries or 0,
    )


def build_of(name: str, pool: PoolConfig, config: Config) -> str:
    """Return a name for what a pool's workers are made of: all that a fork server is told."""
    given = config.sessions
    rules = {
        each: structs.replace(rule, concurrent=0 if rule.concurrent == 1 else 2)
        for each, rule in session_rules(name, pool, config).items()
    }
    sessions = (rules, given.key_secret, given.key_file) if rules else ()
    parts: tuple[object, ...] = (
        pool.worker,
        pool.options,
        pool.env,
        pool.secrets_dir,
        pool.secrets,
        worker_settings_of(pool),
    )
    return _build((*parts, sessions) if sessions else parts)


def _build(parts: object) -> str:
    encoded = msgspec.msgpack.encode(parts, order="deterministic")
    return sha256(encoded).hexdigest()[:BUILD_DIGITS]


def _pool_policy(name: str, pool: PoolConfig, config: Config, replaced: int) -> PoolPolicy:
    backoff = _same(BackoffPolicy, pool.restart)
    return _same(
        PoolPolicy,
        pool,
        name=name,
        build=f"{build_of(name, pool, config)}.{replaced}",
        clustered=config.cluster.shares(name),
        sessions=tuple(sessions_of(name, pool, config)),
        cache_ns=pool.cache_ttl_ns or 0,
        debounce_ns=pool.debounce_window_ns or 0,
        scaling=_scaling(pool),
        debug=bool(pool.debug),
        debug_wait_ns=config.debug.wait_ns,
        restart=_same(RestartPolicy, pool.restart, backoff=backoff),
    )


def schedule_policy(name: str, schedule: ScheduleConfig, origin: str = "") -> SchedulePolicy:
    key, args = schedule.key, from_json(schedule.args)
    if not key and (schedule.cache_ns or schedule.debounce_ns):
        key = key_of(schedule.task, args, schedule.session)
    return _same(
        SchedulePolicy,
        schedule,
        name=name,
        timing=_timing(schedule),
        args=encode_args(schedule.task, args),
        priority=PRIORITY_NAMES.index(schedule.priority),
        sites={
            name: site_of(text) for name, text in schedule.args.items() if isinstance(text, str)
        },
        key=key,
        notify=bool(schedule.notify),
        origin=origin,
        watching=_watching(schedule),
    )


def _watching(schedule: ScheduleConfig) -> WatchPolicy:
    if not schedule.notify:
        return WatchPolicy()
    rules = rules_of(schedule)
    compared = encode_rules(structs.replace(rules, picture=False))
    by, by_share = parse_step(schedule.by) if schedule.by else (0.0, False)
    return _same(
        WatchPolicy,
        schedule,
        rules=encode_rules(rules),
        name="" if rules.plain else sha256(compared).hexdigest()[:RULES_DIGITS],
        picture=rules.picture,
        by=by,
        by_share=by_share,
    )


def _timing(schedule: ScheduleConfig) -> Timing:
    if schedule.every_ns:
        return Every(schedule.every_ns)
    return Cron(schedule.cron, time_zone(schedule.timezone))


def descriptors_needed(config: Config) -> int:
    """Return how many descriptors a daemon with this configuration needs."""
    pools = fleet_policy(config).pools
    return descriptors.needed_for(len(pools), sum(pool.size for pool in pools))
