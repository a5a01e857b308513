"""Pauses grow by the formula, within their bounds, whatever the policy."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.resilience.backoff import EXPONENT_MAX, pause_ns
from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS, BackoffPolicy

policies = st.builds(
    BackoffPolicy,
    base_ns=st.integers(0, 3600 * SECOND_NS),
    factor=st.floats(1.0, 10.0),
    max_ns=st.integers(0, 24 * 3600 * SECOND_NS),
    jitter=st.floats(0.0, 1.0),
)
counts = st.integers(1, 10**9)


def test_pauses_double_up_to_the_cap() -> None:
    policy = BackoffPolicy(base_ns=500 * MILLISECOND_NS, factor=2.0, max_ns=5 * SECOND_NS, jitter=0)
    pauses = [pause_ns(policy, n, Random(1)) / SECOND_NS for n in range(1, 7)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


@given(policies, counts, st.integers())
def test_a_pause_is_never_negative_and_never_above_the_cap(
    policy: BackoffPolicy, n: int, seed: int
) -> None:
    assert 0 <= pause_ns(policy, n, Random(seed)) <= policy.max_ns


@given(policies, st.integers(1, 40), st.integers())
def test_jitter_stays_within_its_share(policy: BackoffPolicy, n: int, seed: int) -> None:
    exact = min(policy.max_ns, policy.base_ns * policy.factor ** (n - 1))
    pause = pause_ns(policy, n, Random(seed))
    assert exact * (1 - policy.jitter) - 1 <= pause <= exact * (1 + policy.jitter) + 1


@given(policies, counts)
def test_without_jitter_a_later_pause_is_never_shorter(policy: BackoffPolicy, n: int) -> None:
    exact = BackoffPolicy(policy.base_ns, policy.factor, policy.max_ns, jitter=0.0)
    assert pause_ns(exact, n, Random(0)) <= pause_ns(exact, n + 1, Random(0))


def test_jitter_spreads_what_failed_together() -> None:
    policy = BackoffPolicy(base_ns=SECOND_NS, jitter=0.1)
    rng = Random(7)
    pauses = [pause_ns(policy, 1, rng) for _ in range(200)]
    assert len(set(pauses)) > 190
    assert min(pauses) < 0.93 * SECOND_NS
    assert max(pauses) > 1.07 * SECOND_NS


def test_the_same_seed_makes_the_same_pauses() -> None:
    policy = BackoffPolicy()
    first, second = Random(3), Random(3)
    for n in range(1, 50):
        assert pause_ns(policy, n, first) == pause_ns(policy, n, second)


def test_a_huge_count_does_not_overflow() -> None:
    policy = BackoffPolicy(factor=10.0, jitter=0.0)
    assert pause_ns(policy, 10**12, Random(0)) == policy.max_ns
    assert policy.factor**EXPONENT_MAX < float("inf")
