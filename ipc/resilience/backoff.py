"""Pauses between attempts, with jitter and a cap.

The n-th pause (n counts from 1), by strategy:

    exponential   base·factor^(n-1)
    linear        base·n
    fixed         base
    random        evenly between base and base·factor^n: full jitter that grows, but never
                  a pause of almost nothing

Each pause is capped at max, then spread evenly over ± jitter, so that attempts that failed together
do not come back together. The cap holds for the spread value too.
"""

from random import Random

from musterd.ipc.resilience.policy import BackoffPolicy

# base·factor^n overflows a float long before anybody waits that long: beyond this it is max.
EXPONENT_MAX = 64


def pause_ns(policy: BackoffPolicy, n: int, rng: Random) -> int:
    """Return the n-th pause, n >= 1."""
    assert n >= 1, n
    pause = min(float(policy.max_ns), _uncapped_ns(policy, n, rng))
    if policy.jitter:
        pause *= 1.0 + policy.jitter * (2.0 * rng.random() - 1.0)
    return min(policy.max_ns, int(pause))


def _uncapped_ns(policy: BackoffPolicy, n: int, rng: Random) -> float:
    base_ns = policy.base_ns
    match policy.strategy:
        case "exponential":
            return float(base_ns * policy.factor ** min(n - 1, EXPONENT_MAX))
        case "linear":
            return float(base_ns * n)
        case "fixed":
            return float(base_ns)
        case "random":
            # The cap first: beyond it the draws would pile up at the cap.
            high_ns = min(float(policy.max_ns), base_ns * policy.factor ** min(n, EXPONENT_MAX))
            return base_ns + max(0.0, high_ns - base_ns) * rng.random()
