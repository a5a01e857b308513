"""A breaker opens when its site is unwell, probes, closes, and is never stuck."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from musterd.ipc.resilience.breaker import Breaker, BreakerState
from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN

policies = st.builds(
    BreakerPolicy,
    failures=st.integers(0, 4),
    open_ns=st.integers(1, 10 * SECOND_NS),
    open_factor=st.floats(1.0, 5.0),
    open_max_ns=st.integers(10 * SECOND_NS, 60 * SECOND_NS),
    open_jitter=st.floats(0.0, 1.0),
    successes=st.integers(1, 3),
    probes=st.integers(1, 3),
    window=st.integers(0, 10),
    window_calls_min=st.integers(1, 6),
    failure_rate=st.floats(0.0, 1.0),
    slow_rate=st.floats(0.0, 1.0),
)


class Driver:
    """Breaker with its running tasks, as the supervisor keeps them."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.breaker = Breaker(policy)
        self.rng = Random(1)
        self.now_ns = 0

    def fail(self, times: int = 1, **said: int) -> None:
        for _ in range(times):
            self.end(self.begin(), ok=False, **said)

    def succeed(self, times: int = 1, *, slow: bool = False) -> None:
        for _ in range(times):
            self.end(self.begin(), ok=True, slow=slow)

    def begin(self) -> bool:
        assert self.breaker.admits(self.now_ns), self.breaker.state
        return self.breaker.begin()

    def end(self, probe: bool, *, ok: bool, slow: bool = False, retry_after_ns: int = 0) -> None:
        self.breaker.record(
            self.now_ns, self.rng, ok=ok, probe=probe, slow=slow, retry_after_ns=retry_after_ns
        )

    def reopen(self) -> int:
        """Fail the next probe; return how long the breaker is open then."""
        self.now_ns = max(self.now_ns, self.breaker.open_until_ns)
        self.fail()
        return self.breaker.open_until_ns - self.now_ns

    @property
    def state(self) -> BreakerState:
        return self.breaker.state


def driver(**policy: object) -> Driver:
    return Driver(BreakerPolicy(open_jitter=0.0, **policy))  # type: ignore[arg-type]


# -- the simple count -------------------------------------------------------------------------


def test_three_failures_open_it_for_five_minutes_and_two_successes_close_it() -> None:
    d = Driver(BreakerPolicy())
    d.fail(2)
    assert d.state == CLOSED
    d.fail()
    assert (d.state, d.breaker.open_until_ns) == (OPEN, 300 * SECOND_NS)
    assert not d.breaker.admits(300 * SECOND_NS - 1)
    d.now_ns = 300 * SECOND_NS
    d.succeed()
    assert d.state == HALF_OPEN
    d.succeed()
    assert d.state == CLOSED
    assert d.breaker.as_new


def test_a_success_in_between_begins_the_count_anew() -> None:
    d = driver()
    for _ in range(10):
        d.fail(2)
        d.succeed()
    assert d.state == CLOSED


def test_what_it_was_told_of_in_all_is_kept_over_its_states() -> None:
    d = driver()
    d.fail(2)
    d.succeed()
    d.fail(3)
    assert (d.state, d.breaker.failed) == (OPEN, 5)
    d.now_ns = d.breaker.open_until_ns
    d.fail()
    d.breaker.close()
    assert d.breaker.failed == 6
    assert d.breaker.as_new


def test_what_says_nothing_about_the_site_neither_counts_nor_begins_anew() -> None:
    d = driver()
    d.fail(2)
    d.breaker.forget(probe=d.begin())
    assert d.breaker.failures == 2
    d.fail()
    assert d.state == OPEN


def test_zero_failures_mean_that_the_count_does_not_matter() -> None:
    d = driver(failures=0)
    d.fail(1000)
    assert d.state == CLOSED


# -- open time --------------------------------------------------------------------------------


def test_each_reopening_is_longer_up_to_the_cap() -> None:
    d = driver(failures=1, open_ns=10 * SECOND_NS, open_factor=2.0, open_max_ns=60 * SECOND_NS)
    assert [d.reopen() // SECOND_NS for _ in range(6)] == [10, 20, 40, 60, 60, 60]


def test_closing_makes_the_open_time_short_again() -> None:
    d = driver(failures=1, successes=1, open_ns=10 * SECOND_NS)
    d.reopen()
    d.reopen()
    d.now_ns = d.breaker.open_until_ns
    d.succeed()
    assert d.state == CLOSED
    assert d.reopen() == 10 * SECOND_NS


@given(policies, st.integers(1, 200), st.integers())
def test_the_open_time_is_never_longer_than_its_cap(
    policy: BreakerPolicy, times: int, seed: int
) -> None:
    d = Driver(msgspec.structs.replace(policy, failures=1))
    d.rng = Random(seed)
    for _ in range(times):
        assert 0 <= d.reopen() <= policy.open_max_ns


def test_the_first_opening_is_exact_and_later_ones_are_spread() -> None:
    spread = BreakerPolicy(failures=1, open_ns=100 * SECOND_NS, open_jitter=0.1)
    d = Driver(spread)
    assert d.reopen() == 100 * SECOND_NS
    again = d.reopen()
    assert 180 * SECOND_NS <= again <= 220 * SECOND_NS
    assert again != 200 * SECOND_NS


@pytest.mark.parametrize(("said", "lasts"), [(0, 10), (5, 10), (90, 90), (7200, 7200)])
def test_the_site_s_own_word_on_when_to_come_back_is_kept(said: int, lasts: int) -> None:
    d = driver(failures=1, open_ns=10 * SECOND_NS, open_max_ns=60 * SECOND_NS)
    d.fail(retry_after_ns=said * SECOND_NS)
    assert d.breaker.open_until_ns == lasts * SECOND_NS


# -- probes -----------------------------------------------------------------------------------


def test_half_open_lets_in_no_more_probes_than_allowed() -> None:
    d = driver(failures=1, probes=2)
    d.fail()
    d.now_ns = d.breaker.open_until_ns
    assert d.begin()
    assert d.begin()
    assert not d.breaker.admits(d.now_ns)
    d.breaker.forget(probe=True)  # the probe's worker died
    assert d.begin()
    assert not d.breaker.admits(d.now_ns)


def test_a_failed_probe_opens_it_again_at_once() -> None:
    d = driver(failures=3, successes=2)
    d.fail(3)
    d.now_ns = d.breaker.open_until_ns
    d.succeed()
    d.fail()
    assert (d.state, d.breaker.reopenings) == (OPEN, 2)


def test_successes_of_an_earlier_half_open_time_do_not_count() -> None:
    d = driver(failures=1, successes=2)
    d.fail()
    d.now_ns = d.breaker.open_until_ns
    d.succeed()
    d.fail()
    d.now_ns = d.breaker.open_until_ns
    d.succeed()
    assert d.state == HALF_OPEN


def test_a_late_result_never_extends_open_nor_closes_it() -> None:
    d = driver(failures=1)
    late = [d.begin() for _ in range(4)]
    d.fail()
    until_ns = d.breaker.open_until_ns
    d.now_ns = until_ns - 1
    d.end(late[0], ok=False, retry_after_ns=1000 * SECOND_NS)
    d.end(late[1], ok=True)
    assert (d.state, d.breaker.open_until_ns, d.breaker.reopenings) == (OPEN, until_ns, 1)
    d.now_ns = until_ns
    assert d.begin()
    d.end(late[2], ok=False)
    d.end(late[3], ok=True)
    assert (d.state, d.breaker.probes, d.breaker.successes) == (HALF_OPEN, 1, 0)


# -- the window -------------------------------------------------------------------------------


def test_a_failure_rate_of_the_window_opens_it() -> None:
    d = driver(failures=0, window=10, window_calls_min=4, failure_rate=0.5)
    for _ in range(3):
        d.succeed()
    for _ in range(2):
        d.fail()
    assert d.state == CLOSED, "2 of 5"
    d.fail()
    assert d.state == OPEN, "3 of 6"


def test_too_few_calls_say_nothing() -> None:
    d = driver(failures=0, window=10, window_calls_min=5, failure_rate=0.5)
    d.fail(4)
    assert d.state == CLOSED
    d.fail()
    assert d.state == OPEN


def test_what_has_left_the_window_is_forgotten() -> None:
    d = driver(failures=0, window=4, window_calls_min=4, failure_rate=0.75)
    d.fail(2)
    d.succeed(4)
    d.fail(2)
    assert d.state == CLOSED, "2 of the last 4"
    d.fail()
    assert d.state == OPEN, "3 of the last 4"


def test_slow_calls_open_it_though_they_succeed() -> None:
    d = driver(window=10, window_calls_min=4, slow_rate=1.0)
    d.succeed(3, slow=True)
    assert d.state == CLOSED
    d.succeed(slow=True)
    assert d.state == OPEN


def test_the_window_begins_anew_after_each_opening() -> None:
    d = driver(failures=0, window=4, window_calls_min=2, failure_rate=0.5, successes=1)
    d.fail(2)
    d.now_ns = d.breaker.open_until_ns
    d.succeed()
    assert d.state == CLOSED
    d.fail()
    assert d.state == CLOSED


# -- commands of people -----------------------------------------------------------------------


def test_held_open_it_lets_nobody_in_whatever_the_time() -> None:
    d = driver()
    d.breaker.force_open()
    assert not d.breaker.admits(10**18)
    d.breaker.close()
    assert d.breaker.admits(0)


def test_disabled_it_counts_nothing() -> None:
    d = driver(failures=1)
    d.breaker.disable()
    d.fail(100)
    assert d.breaker.admits(0)
    assert (d.state, d.breaker.failed) == (BreakerState.DISABLED, 0)


@pytest.mark.parametrize("enabled", [True, False])
def test_reset_makes_it_as_its_policy_makes_a_new_one(enabled: bool) -> None:
    policy = BreakerPolicy(enabled=enabled, failures=1)
    d = Driver(policy)
    d.breaker.force_open()
    assert not d.breaker.as_new
    d.breaker.reset()
    assert d.breaker.as_new
    assert d.state == Breaker(policy).state


def test_another_policy_changes_what_is_to_come_and_not_what_is() -> None:
    d = driver(failures=1)
    d.fail()
    until_ns = d.breaker.open_until_ns
    d.breaker.follow(BreakerPolicy(enabled=False, successes=1))
    assert (d.state, d.breaker.open_until_ns) == (OPEN, until_ns)
    fresh = driver()
    fresh.breaker.follow(BreakerPolicy(enabled=False))
    assert fresh.state == BreakerState.DISABLED


# -- any order of events ----------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Tasks begin, end, vanish; time passes; people give orders: in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker: Breaker | None = None

    @precondition(lambda self: self.breaker is None)
    @rule(policy=policies, seed=st.integers(0, 1000))
    def make(self, policy: BreakerPolicy, seed: int) -> None:
        self.breaker = Breaker(policy)
        self.rng = Random(seed)
        self.now_ns = 0
        self.round = 0  # rounds of probes, as gates.Site counts them
        self.running: list[tuple[bool, int]] = []

    def admits(self) -> bool:
        assert self.breaker is not None
        before = self.breaker.state
        admitted = self.breaker.admits(self.now_ns)
        self.round += self.breaker.state != before
        return admitted

    def take(self, index: int) -> bool:
        """End a running task; return whether it probes in this half-open time."""
        probe, of_round = self.running.pop(index % len(self.running))
        return probe and of_round == self.round

    @precondition(lambda self: self.breaker is not None and len(self.running) < 20)
    @rule()
    def begin(self) -> None:
        if self.admits():
            self.running.append((self.breaker.begin(), self.round))  # type: ignore[union-attr]

    @precondition(lambda self: self.breaker is not None and self.running)
    @rule(index=st.integers(0, 20), ok=st.booleans(), slow=st.booleans(), said=st.integers(0, 9))
    def record(self, index: int, ok: bool, slow: bool, said: int) -> None:
        breaker = self.breaker
        assert breaker is not None
        before = (breaker.state, breaker.open_until_ns)
        breaker.record(
            self.now_ns,
            self.rng,
            ok=ok,
            probe=self.take(index),
            slow=slow,
            retry_after_ns=said * SECOND_NS,
        )
        if before[0] == OPEN:
            assert (breaker.state, breaker.open_until_ns) == before, "a late result changed it"

    @precondition(lambda self: self.breaker is not None and self.running)
    @rule(index=st.integers(0, 20))
    def forget(self, index: int) -> None:
        self.breaker.forget(probe=self.take(index))  # type: ignore[union-attr]

    @precondition(lambda self: self.breaker is not None)
    @rule(nanoseconds=st.integers(0, 30 * SECOND_NS))
    def time_passes(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds

    @precondition(lambda self: self.breaker is not None)
    @rule(order=st.sampled_from(("close", "reset", "force_open", "disable")))
    def order(self, order: str) -> None:
        getattr(self.breaker, order)()

    @invariant()
    def probes_are_those_that_run(self) -> None:
        breaker = self.breaker
        if breaker is None:
            return
        assert 0 <= breaker.probes <= breaker.policy.probes
        if breaker.state == HALF_OPEN:
            mine = [True for probe, of_round in self.running if probe and of_round == self.round]
            assert breaker.probes == len(mine)

    @invariant()
    def it_is_not_stuck(self) -> None:
        """Check that the breaker admits a task once all tasks ended and the open time is over."""
        breaker = self.breaker
        if breaker is None or breaker.state == BreakerState.FORCED_OPEN:
            return
        if breaker.state == OPEN:
            longest_ns = max(breaker.policy.open_max_ns, 9 * SECOND_NS)
            assert breaker.open_until_ns <= self.now_ns + longest_ns
        elif breaker.state == HALF_OPEN and not self.running:
            assert breaker.admits(self.now_ns)


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestAnyOrder = AnyOrder.TestCase


def test_an_open_breaker_tells_the_failures_that_opened_it() -> None:
    d = Driver(BreakerPolicy(failures=3, successes=2))
    d.fail(3)
    assert (d.breaker.state, d.breaker.failures) == (OPEN, 3)
    d.reopen()  # a failed probe is one more failure in a row
    assert (d.breaker.state, d.breaker.failures) == (OPEN, 4)
    d.now_ns = d.breaker.open_until_ns
    d.succeed(1)
    assert (d.breaker.state, d.breaker.failures) == (HALF_OPEN, 0)
    d.succeed(1)
    assert (d.breaker.state, d.breaker.failures) == (CLOSED, 0)


def test_a_breaker_opened_by_a_rate_tells_the_failures_of_its_window() -> None:
    policy = BreakerPolicy(failures=0, window=4, window_calls_min=4, failure_rate=0.5)
    d = Driver(policy)
    d.fail(1)
    d.succeed(2)
    d.fail(1)
    assert (d.breaker.state, d.breaker.failures) == (OPEN, 2)
