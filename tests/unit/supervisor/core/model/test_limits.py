"""Rates, bulkheads and retry budgets keep what they promise, whatever the order of events."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.supervisor.core.model.limits import RETRY_UNITS, Bulkhead, RetryBudget, TokenBucket
from musterd.supervisor.core.model.policy import TargetPolicy

rates = st.sampled_from((0.5, 1.0, 3.0, 7.5, 1000.0))
bursts = st.integers(1, 20)
gaps = st.lists(st.integers(0, 3 * SECOND_NS), min_size=1, max_size=60)


def beginnings(bucket: TokenBucket, gaps_ns: list[int]) -> list[int]:
    """Return when tasks began, if each begins as soon as it may."""
    now_ns, begun = 0, []
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        while bucket.ready_ns(now_ns) <= now_ns and len(begun) < 500:
            bucket.take(now_ns)
            begun.append(now_ns)
    return begun


# -- the token bucket -------------------------------------------------------------------------


@given(rates, bursts, gaps)
def test_no_interval_holds_more_than_its_rate_and_one_burst(
    rate: float, burst: int, gaps_ns: list[int]
) -> None:
    bucket = TokenBucket(rate, burst, 0)
    begun = beginnings(bucket, gaps_ns)
    for first, from_ns in enumerate(begun):
        for last, until_ns in enumerate(begun[first:], first):
            allowed = (until_ns - from_ns) // bucket.cost_ns + burst
            assert last - first + 1 <= allowed, (from_ns, until_ns)


@given(rates, bursts, gaps)
def test_it_never_starves(rate: float, burst: int, gaps_ns: list[int]) -> None:
    bucket = TokenBucket(rate, burst, 0)
    begun = beginnings(bucket, gaps_ns)
    now_ns = sum(gaps_ns)
    wait_ns = bucket.ready_ns(now_ns) - now_ns
    assert 0 <= wait_ns <= bucket.cost_ns
    bucket.take(now_ns + wait_ns)  # the bucket keeps its promise
    assert begun or wait_ns == 0


def test_in_the_long_run_it_is_exactly_the_rate() -> None:
    bucket = TokenBucket(4.0, 1, 0)
    begun = beginnings(bucket, [0, *[10 * MILLISECOND_NS] * 1000])
    assert len(begun) == 41, "ten seconds, and the one at the start"
    assert {later - earlier for earlier, later in pairwise(begun)} == {250 * MILLISECOND_NS}


def test_a_burst_is_saved_up_to_its_size_and_no_further() -> None:
    bucket = TokenBucket(1.0, 3, 0)
    assert len(beginnings(bucket, [0])) == 3
    assert not bucket.full(2 * SECOND_NS)
    assert len(beginnings(bucket, [3600 * SECOND_NS])) == 3
    assert bucket.full(7200 * SECOND_NS)


def test_a_rate_faster_than_the_clock_is_no_mistake() -> None:
    bucket = TokenBucket(1e12, 1, 0)
    bucket.take(0)
    assert bucket.ready_ns(0) == 1


def test_taking_before_it_is_ready_is_our_own_mistake() -> None:
    bucket = TokenBucket(1.0, 1, 0)
    bucket.take(0)
    with pytest.raises(AssertionError, match="before it was ready"):
        bucket.take(SECOND_NS - 1)


# -- the bulkhead -----------------------------------------------------------------------------


@given(st.integers(1, 10), st.lists(st.booleans(), max_size=100))
def test_a_bulkhead_holds_no_more_than_its_places(limit: int, comings: list[bool]) -> None:
    bulkhead = Bulkhead("few", limit)
    inside = 0
    for comes in comings:
        if comes and bulkhead.free:
            bulkhead.enter()
            inside += 1
        elif not comes and inside:
            bulkhead.leave()
            inside -= 1
        assert bulkhead.used == inside <= limit
        assert bulkhead.free == limit - inside


def test_a_full_bulkhead_is_not_entered_and_an_empty_one_not_left() -> None:
    bulkhead = Bulkhead("few", 1)
    with pytest.raises(AssertionError, match="few is empty"):
        bulkhead.leave()
    bulkhead.enter()
    with pytest.raises(AssertionError, match="few is full"):
        bulkhead.enter()


# -- the retry budget -------------------------------------------------------------------------


def budget_of(share: float, reserve: float, every_ns: int = 0) -> RetryBudget:
    return RetryBudget(
        TargetPolicy(retry_share=share, retry_reserve=reserve, retry_every_ns=every_ns), now_ns=0
    )


@given(
    st.sampled_from((0.0, 0.1, 0.2, 0.5, 1.0)),
    st.sampled_from((0.0, 1.0, 10.0)),
    st.lists(st.booleans(), max_size=300),
)
def test_retries_are_a_share_of_the_traffic_and_the_reserve(
    share: float, reserve: float, firsts: list[bool]
) -> None:
    budget = budget_of(share, reserve)
    traffic = retries = 0
    for first in firsts:
        if first:
            budget.earn()
            traffic += 1
        elif budget.spend():
            retries += 1
        assert retries <= share * traffic + reserve + 1e-6
        assert budget.affords == (budget.units >= RETRY_UNITS)


@given(st.sampled_from((0.1, 0.2, 0.5, 1.0)), st.integers(1, 10))
def test_no_share_of_a_retry_is_lost(share: float, retries: int) -> None:
    """Ten tenths make one, however floats round."""
    budget = budget_of(share, 0.0)
    spent = 0
    for _ in range(retries * round(1 / share)):
        budget.earn()
        spent += budget.spend()
    assert spent == retries


@given(st.integers(-(10**9), 10**9))
def test_a_budget_is_restored_within_its_bounds(units: int) -> None:
    budget = budget_of(0.2, 10.0)
    budget.restore(units)
    assert 0 <= budget.units <= 10 * RETRY_UNITS
    assert budget.full == (budget.units == 10 * RETRY_UNITS)


def test_a_quiet_time_saves_no_more_than_the_reserve() -> None:
    budget = budget_of(0.5, 2.0)
    for _ in range(1000):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_the_share_is_earned_again() -> None:
    budget = budget_of(0.25, 1.0)
    assert budget.spend()
    assert not budget.spend()
    for _ in range(4):
        budget.earn()
    assert budget.spend()


@given(st.lists(st.integers(0, 5 * SECOND_NS), max_size=50), st.integers(SECOND_NS, 20 * SECOND_NS))
def test_no_time_is_paid_twice_or_lost(pauses: list[int], every_ns: int) -> None:
    """The number of calls of `pass_time` does not matter."""
    often, once = (budget_of(0.1, 1000.0, every_ns) for _ in range(2))
    now_ns = 0
    for budget in (often, once):
        budget.restore(0)
    for pause_ns in pauses:
        now_ns += pause_ns
        often.pass_time(now_ns)
    once.pass_time(now_ns)
    assert abs(often.units - once.units) <= 1
    assert once.units <= now_ns * RETRY_UNITS // every_ns


@given(st.integers(0, 2 * RETRY_UNITS), st.integers(1, 20 * SECOND_NS))
def test_a_retry_is_there_when_it_was_foretold(units: int, every_ns: int) -> None:
    budget = budget_of(0.1, 2.0, every_ns)
    budget.restore(units)
    at_ns = budget.affords_at_ns()
    budget.pass_time(at_ns)
    assert budget.affords
