"""Every strategy keeps its formula, its cap and its jitter."""

from random import Random
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.resilience.backoff import pause_ns
from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, Strategy

STRATEGIES = get_args(Strategy)

policies = st.builds(
    BackoffPolicy,
    base_ns=st.integers(0, 3600 * SECOND_NS),
    factor=st.floats(1.0, 10.0),
    max_ns=st.integers(0, 24 * 3600 * SECOND_NS),
    jitter=st.floats(0.0, 1.0),
    strategy=st.sampled_from(STRATEGIES),
)
counts = st.integers(1, 10**9)


def exact(strategy: Strategy, **changes: float) -> BackoffPolicy:
    return BackoffPolicy(jitter=0.0, strategy=strategy, **changes)  # type: ignore[arg-type]


def seconds(policy: BackoffPolicy, count: int) -> list[float]:
    return [pause_ns(policy, n, Random(1)) / SECOND_NS for n in range(1, count + 1)]


def test_exponential_pauses_double_up_to_the_cap() -> None:
    assert seconds(exact("exponential"), 8) == [1, 2, 4, 8, 16, 32, 60, 60]


def test_linear_pauses_grow_by_the_base_up_to_the_cap() -> None:
    policy = exact("linear", base_ns=15 * SECOND_NS)
    assert seconds(policy, 6) == [15, 30, 45, 60, 60, 60]


def test_fixed_pauses_are_the_base() -> None:
    assert seconds(exact("fixed", base_ns=3 * SECOND_NS), 4) == [3, 3, 3, 3]


def test_random_pauses_fill_the_room_between_base_and_the_growing_bound() -> None:
    policy, rng = exact("random"), Random(5)
    for n, bound in ((1, 2), (2, 4), (3, 8), (10, 60)):
        drawn = [pause_ns(policy, n, rng) / SECOND_NS for _ in range(2000)]
        assert all(1 <= pause <= bound for pause in drawn)
        width = bound - 1
        assert min(drawn) < 1 + 0.05 * width
        assert max(drawn) > bound - 0.05 * width
        assert sum(drawn) / len(drawn) == pytest.approx(1 + width / 2, rel=0.05)
        assert drawn.count(bound) < 20, "the draws pile up at the cap"


@given(policies, counts, st.integers())
def test_a_pause_is_never_negative_and_never_above_the_cap(
    policy: BackoffPolicy, n: int, seed: int
) -> None:
    assert 0 <= pause_ns(policy, n, Random(seed)) <= policy.max_ns


@given(policies, counts, st.integers())
def test_a_pause_is_never_below_the_base_less_jitter(
    policy: BackoffPolicy, n: int, seed: int
) -> None:
    least = min(policy.base_ns, policy.max_ns) * (1 - policy.jitter)
    assert pause_ns(policy, n, Random(seed)) >= int(least * (1 - 1e-12)) - 1


@given(policies.filter(lambda policy: policy.strategy != "random"), counts)
def test_without_jitter_a_later_pause_is_never_shorter(policy: BackoffPolicy, n: int) -> None:
    steady = msgspec.structs.replace(policy, jitter=0.0)
    assert pause_ns(steady, n, Random(0)) <= pause_ns(steady, n + 1, Random(0))


@given(policies, counts, st.integers())
def test_the_same_seed_makes_the_same_pause(policy: BackoffPolicy, n: int, seed: int) -> None:
    assert pause_ns(policy, n, Random(seed)) == pause_ns(policy, n, Random(seed))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_jitter_spreads_what_failed_together(strategy: Strategy) -> None:
    policy, rng = BackoffPolicy(jitter=0.1, strategy=strategy), Random(7)
    assert len({pause_ns(policy, 1, rng) for _ in range(200)}) > 190


def test_an_unknown_strategy_is_refused_where_policies_are_read() -> None:
    with pytest.raises(msgspec.ValidationError, match="strategy"):
        msgspec.convert({"strategy": "quadratic"}, BackoffPolicy)
