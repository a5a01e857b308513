"""Resilience policies, shared by the supervisor's core and the workers' toolkit."""

from typing import Literal

from msgspec import Struct

POOL_SIZE_MAX = 1000  # workers in a pool: more is a typing mistake
SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000
MICROSECOND_NS = 1_000


Strategy = Literal["exponential", "linear", "fixed", "random"]


class BackoffPolicy(Struct, frozen=True):
    """Pauses up to max, each ± jitter; the strategy says how they grow, see backoff.pause_ns()."""

    base_ns: int = SECOND_NS
    factor: float = 2.0
    max_ns: int = 60 * SECOND_NS
    jitter: float = 0.1
    strategy: Strategy = "exponential"
    custom: str = ""  # function of the worker's side that replaces the strategy


class RetryPolicy(Struct, frozen=True):
    max_retries: int = 3
    backoff: BackoffPolicy = BackoffPolicy()


class BreakerPolicy(Struct, frozen=True):
    """When to leave a target alone. `window` 0: only consecutive failures count."""

    enabled: bool = True
    failures: int = 3  # consecutive; 0: only the rates count
    open_ns: int = 300 * SECOND_NS
    open_factor: float = 2.0  # open longer each time it opens again
    open_max_ns: int = 3600 * SECOND_NS
    open_jitter: float = 0.1
    successes: int = 2  # of probes, to close
    probes: int = 1  # at once, while half-open
    window: int = 0  # calls
    window_calls_min: int = 10
    failure_rate: float = 0.0  # of the window; 0: ignored
    slow_ns: int = 0  # a call that takes longer is slow
    slow_rate: float = 0.0
