"""From the configuration people write to the policies the core decides by."""

from musterd.ipc.policy import BackoffPolicy, RetryPolicy
from musterd.supervisor.config_schema import Config, PoolConfig
from musterd.supervisor.core.policy import FleetPolicy, PoolPolicy, RestartPolicy


def fleet_policy(config: Config) -> FleetPolicy:
    retry = config.retry
    return FleetPolicy(
        pools=tuple(
            _pool_policy(name, pool) for name, pool in config.pools.items() if pool.enabled
        ),
        retry=RetryPolicy(
            retry.max_retries,
            BackoffPolicy(retry.base_ns, retry.factor, retry.max_ns, retry.jitter),
        ),
        drain_timeout_ns=config.supervisor.drain_timeout_ns,
        stop_timeout_ns=config.supervisor.stop_timeout_ns,
    )


def _pool_policy(name: str, pool: PoolConfig) -> PoolPolicy:
    restart = pool.restart
    return PoolPolicy(
        name=name,
        size=pool.size,
        queue_size=pool.queue_size,
        aging_ns=pool.aging_ns,
        task_timeout_ns=pool.task_timeout_ns,
        start_timeout_ns=pool.start_timeout_ns,
        max_crashes=pool.max_crashes,
        restart=RestartPolicy(
            BackoffPolicy(restart.base_ns, restart.factor, restart.max_ns, restart.jitter),
            reset_ns=restart.reset_ns,
            limit=restart.limit,
            window_ns=restart.window_ns,
        ),
    )
