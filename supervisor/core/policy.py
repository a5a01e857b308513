"""What the operator decided, in the core's units. The shell makes these from the configuration."""

from msgspec import Struct

from musterd.ipc.policy import MILLISECOND_NS, SECOND_NS, BackoffPolicy, RetryPolicy


class RestartPolicy(Struct, frozen=True):
    """How a crashed worker comes back: the first time at once, then with growing pauses.

    `reset_ns` of stable uptime forgets earlier crashes; more than `limit` crashes within
    `window_ns` make the slot FATAL.
    """

    backoff: BackoffPolicy = BackoffPolicy(base_ns=500 * MILLISECOND_NS)
    reset_ns: int = 60 * SECOND_NS
    limit: int = 10
    window_ns: int = 60 * SECOND_NS


class PoolPolicy(Struct, frozen=True):
    name: str
    size: int
    queue_size: int = 10_000
    aging_ns: int = 60 * SECOND_NS
    task_timeout_ns: int = 120 * SECOND_NS
    start_timeout_ns: int = 30 * SECOND_NS
    restart: RestartPolicy = RestartPolicy()
    max_crashes: int = 3


class FleetPolicy(Struct, frozen=True):
    pools: tuple[PoolPolicy, ...]
    retry: RetryPolicy = RetryPolicy()
    drain_timeout_ns: int = 30 * SECOND_NS
    stop_timeout_ns: int = 5 * SECOND_NS
