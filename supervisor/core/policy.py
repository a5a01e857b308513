"""What the operator decided, in the core's units. The shell makes these from the configuration."""

from msgspec import Struct

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


class BackoffPolicy(Struct, frozen=True):
    """Growing pauses: base, base·factor, base·factor², ... up to max, each ± jitter."""

    base_ns: int = SECOND_NS
    factor: float = 2.0
    max_ns: int = 60 * SECOND_NS
    jitter: float = 0.1


class RestartPolicy(Struct, frozen=True):
    """How a crashed worker comes back: the first time at once, then with growing pauses.

    `reset_ns` of stable uptime forgets earlier crashes; more than `limit` crashes within
    `window_ns` make the slot FATAL.
    """

    backoff: BackoffPolicy = BackoffPolicy(base_ns=500 * MILLISECOND_NS)
    reset_ns: int = 60 * SECOND_NS
    limit: int = 10
    window_ns: int = 60 * SECOND_NS


class RetryPolicy(Struct, frozen=True):
    max_retries: int = 3
    backoff: BackoffPolicy = BackoffPolicy()


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
