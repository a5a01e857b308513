"""The core's policies, made from the configuration that people write."""

from collections.abc import Mapping
from hashlib import sha256
from typing import cast

import msgspec
from msgspec import structs

from musterd.ipc.client.taskspec import encode_args, key_of
from musterd.ipc.resilience.policy import BackoffPolicy, BreakerPolicy, RetryPolicy, Strategy
from musterd.ipc.secrets.reference import from_json
from musterd.ipc.wire.messages import NOT_GIVEN, PRIORITY_NAMES
from musterd.supervisor.config.kinds import STRATEGIES
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import (
    BreakerConfig,
    ClassConfig,
    Config,
    MemoryConfig,
    MonitorConfig,
    RetryConfig,
    RetryOverride,
    ScheduleConfig,
    TargetConfig,
    class_defaults,
    inherited,
    over,
)
from musterd.supervisor.config.timezones import time_zone
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
)
from musterd.supervisor.core.model.timing import Cron, Every, Timing
from musterd.supervisor.processes.forkserver_messages import WorkerSettings
from musterd.supervisor.settings.sidecars import alert_settings, publisher_settings, web_settings
from musterd.supervisor.sockets.declarations import site_of
from musterd.supervisor.system import descriptors

BEATS_PER_TIMEOUT = 6  # heartbeats that must be missing before a worker is taken for dead
BEAT_SECONDS_MAX = 2.0
BUILD_DIGITS = 16  # enough to tell builds of one pool apart


def fleet_policy(config: Config, replaced: Mapping[str, int] | None = None) -> FleetPolicy:
    """Return the policy of the whole fleet.

    `replaced` changes the build of pools whose workers are to be replaced in any case.
    """
    config = inherited(config)
    retry = config.retry
    again = replaced or {}
    return FleetPolicy(
        pools=tuple(
            _pool_policy(name, pool, again.get(name, 0))
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
        targets={name: _target(config, each) for name, each in config.targets.items()},
        target=TargetPolicy() if retry.budget else TargetPolicy(retry_share=None),
        cache=CachePolicy(
            config.cache.enabled,
            config.debounce.enabled,
            config.cache.entries,
            config.cache.bytes_max,
        ),
        schedules=tuple(_schedule(name, each) for name, each in config.schedule.items()),
        memory=_memory(config.memory, config.monitor),
        drain_timeout_ns=config.supervisor.drain_timeout_ns,
        stop_timeout_ns=config.supervisor.stop_timeout_ns,
        cleanup_timeout_ns=config.supervisor.cleanup_timeout_ns,
        cleanup=config.supervisor.cleanup,
        workers_max=config.supervisor.workers_max,
        # No build: the daemon has no such sidecar.
        web=_build(web_settings(config)) if config.http.listen and config.http.start else "",
        alerts=(
            _build(alert_settings(config))
            if any(alert.enabled for alert in config.alerts.values())
            else ""
        ),
        events=_build(publisher_settings(config)) if config.events.publish else "",
    )


def _memory(memory: MemoryConfig, monitor: MonitorConfig) -> MemoryPolicy:
    return MemoryPolicy(
        watched=monitor.enabled,
        enabled=memory.enabled and monitor.enabled,
        warning=memory.warning,
        critical=memory.critical,
        margin=memory.margin,
        pressure=memory.pressure,
        calm_ns=memory.calm_ns,
        patience_ns=memory.patience_ns,
    )


def _backoff(retry: RetryConfig) -> BackoffPolicy:
    # A killed worker cannot be asked for its own strategy: then the usual one holds.
    custom = retry.strategy if retry.strategy not in STRATEGIES else ""
    strategy = cast(Strategy, retry.strategy) if not custom else "exponential"
    return BackoffPolicy(retry.base_ns, retry.factor, retry.max_ns, retry.jitter, strategy, custom)


def _breaker(breaker: BreakerConfig) -> BreakerPolicy:
    return BreakerPolicy(
        enabled=breaker.enabled,
        failures=breaker.failures,
        open_ns=breaker.open_ns,
        open_factor=breaker.open_factor,
        open_max_ns=max(breaker.open_ns, breaker.open_max_ns),
        open_jitter=breaker.jitter,
        successes=breaker.successes,
        probes=breaker.probes,
        window=breaker.window,
        window_calls_min=breaker.window_min,
        failure_rate=breaker.failure_rate,
        slow_ns=breaker.slow_ns,
        slow_rate=breaker.slow_rate,
    )


def _max_retries(own: RetryOverride) -> int:
    return own.max_retries if own.max_retries is not None else NOT_GIVEN


def _class(name: str, config: ClassConfig, retry: RetryConfig) -> GatePolicy:
    own = config.retry
    return GatePolicy(
        name=name,
        timeout_ns=config.timeout_ns or 0,
        max_retries=_max_retries(own),
        backoff=_backoff(over(retry, own)),
        max_concurrent=config.max_concurrent,
        on_open=config.on_open or "",
        fallback_on=config.fallback_on or "",
        counts=config.counts,
    )


def _target(config: Config, target: TargetConfig) -> TargetPolicy:
    retry, breaker = class_defaults(config, target.policy)
    own = target.retry
    return TargetPolicy(
        policy=target.policy,
        timeout_ns=target.timeout_ns or 0,
        max_retries=_max_retries(own),
        # None: the backoff of the class that the task names, if that is not the target's.
        backoff=_backoff(over(retry, own)) if own != RetryOverride() else None,
        on_open=target.on_open or "",
        fallback_on=target.fallback_on or "",
        counts=target.counts,
        max_concurrent=target.max_concurrent,
        rate=target.rate,
        burst=target.burst,
        breaker=_breaker(over(breaker, target.breaker)),
        retry_share=target.retry_share if config.retry.budget else None,
    )


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


def build_of(pool: PoolConfig) -> str:
    """Return a name for what a pool's workers are made of: all that a fork server is told."""
    parts = (
        pool.worker,
        pool.options,
        pool.env,
        pool.secrets_dir,
        pool.secrets,
        worker_settings_of(pool),
    )
    return _build(parts)


def _build(parts: object) -> str:
    encoded = msgspec.msgpack.encode(parts, order="deterministic")
    return sha256(encoded).hexdigest()[:BUILD_DIGITS]


def _pool_policy(name: str, pool: PoolConfig, replaced: int) -> PoolPolicy:
    restart = pool.restart
    return PoolPolicy(
        name=name,
        size=pool.size,
        build=f"{build_of(pool)}.{replaced}",
        queue_size=pool.queue_size,
        aging_ns=pool.aging_ns,
        task_timeout_ns=pool.task_timeout_ns,
        start_timeout_ns=pool.start_timeout_ns,
        heartbeat_timeout_ns=pool.heartbeat_timeout_ns,
        health_timeout_ns=pool.health_timeout_ns,
        max_crashes=pool.max_crashes,
        sacrifice=pool.sacrifice,
        spare=pool.spare,
        cache_ns=pool.cache_ttl_ns or 0,
        debounce_ns=pool.debounce_window_ns or 0,
        scaling=_scaling(pool),
        max_tasks=pool.max_tasks,
        max_age_ns=pool.max_age_ns,
        max_memory_bytes=pool.max_memory_bytes,
        restart=RestartPolicy(
            BackoffPolicy(restart.base_ns, restart.factor, restart.max_ns, restart.jitter),
            pause_after=restart.pause_after,
            pause_ns=restart.pause_ns,
            reset_ns=restart.reset_ns,
            limit=restart.limit,
            window_ns=restart.window_ns,
        ),
    )


def _schedule(name: str, schedule: ScheduleConfig) -> SchedulePolicy:
    key, args = schedule.key, from_json(schedule.args)
    if not key and (schedule.cache_ns or schedule.debounce_ns):
        key = key_of(schedule.task, args)
    return SchedulePolicy(
        name=name,
        task=schedule.task,
        timing=_timing(schedule),
        args=encode_args(schedule.task, args),
        priority=PRIORITY_NAMES.index(schedule.priority),
        target=schedule.target,
        sites={
            name: site_of(text) for name, text in schedule.args.items() if isinstance(text, str)
        },
        timeout_ns=schedule.timeout_ns,
        max_retries=schedule.max_retries,
        key=key,
        cache_ns=schedule.cache_ns,
        debounce_ns=schedule.debounce_ns,
        jitter_ns=schedule.jitter_ns,
        overlap=schedule.overlap,
        catch_up=schedule.catch_up,
        enabled=schedule.enabled,
        notify=bool(schedule.notify),
    )


def _timing(schedule: ScheduleConfig) -> Timing:
    if schedule.every_ns:
        return Every(schedule.every_ns)
    return Cron(schedule.cron, time_zone(schedule.timezone))


def descriptors_needed(config: Config) -> int:
    """Return how many descriptors a daemon with this configuration needs."""
    pools = fleet_policy(config).pools
    return descriptors.needed_for(len(pools), sum(pool.size for pool in pools))
