"""Pauses that grow, with jitter and a cap.

The n-th pause (n counts from 1) is base·factor^(n-1), never more than max, then spread evenly
over ± jitter so that what failed together does not come back together. The cap holds for the
spread value too.
"""

from random import Random

from musterd.ipc.policy import BackoffPolicy

# base·factor^n overflows a float long before anybody waits that long: beyond this it is max.
EXPONENT_MAX = 64


def pause_ns(policy: BackoffPolicy, n: int, rng: Random) -> int:
    """The n-th pause, n >= 1."""
    assert n >= 1, n
    exponent = min(n - 1, EXPONENT_MAX)
    pause = min(float(policy.max_ns), policy.base_ns * policy.factor**exponent)
    if policy.jitter:
        pause *= 1.0 + policy.jitter * (2.0 * rng.random() - 1.0)
    return min(policy.max_ns, int(pause))
