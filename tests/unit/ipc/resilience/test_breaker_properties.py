"""A breaker keeps its promises whatever happens in whatever order."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from musterd.ipc.resilience.breaker import Breaker, BreakerState
from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
BY_HAND = (BreakerState.FORCED_OPEN, BreakerState.DISABLED)
FOLLOWS = {
    CLOSED: {CLOSED, OPEN},
    OPEN: {OPEN, HALF_OPEN},
    HALF_OPEN: {HALF_OPEN, OPEN, CLOSED},
}


class BreakerMachine(RuleBasedStateMachine):
    """Tasks begin where they are admitted and end, or never report, in any order."""

    @initialize(
        failures=st.integers(0, 3),
        successes=st.integers(1, 3),
        probes=st.integers(1, 3),
        factor=st.sampled_from((1.0, 2.0)),
        window=st.sampled_from((0, 4)),
    )
    def begin(self, failures: int, successes: int, probes: int, factor: float, window: int) -> None:
        self.policy = BreakerPolicy(
            failures=failures,
            successes=successes,
            probes=probes,
            open_ns=10 * SECOND_NS,
            open_factor=factor,
            open_max_ns=60 * SECOND_NS,
            window=window,
            window_calls_min=2,
            failure_rate=0.5 if window else 0.0,
        )
        self.breaker = Breaker(self.policy)
        self.rng = Random(1)
        self.now_ns = 0
        self.round = 0  # half-open times so far
        self.running: list[int] = []  # round that each task probes for, 0 for no probe
        self.state = CLOSED
        self.in_a_row = 0  # failures while closed

    def _changed(self) -> None:
        """Check that every change of state is one that FOLLOWS allows."""
        state = self.breaker.state
        if self.state not in BY_HAND:
            assert state in FOLLOWS[self.state], (self.state, state)
        if state == HALF_OPEN and self.state != HALF_OPEN:
            self.round += 1
        if state == OPEN and self.state != OPEN:
            left_ns = self.breaker.open_until_ns - self.now_ns
            assert left_ns > 0
            self.in_a_row = 0
        if state == CLOSED and self.state != CLOSED:
            self.in_a_row = 0
        self.state = state

    @rule(seconds=st.sampled_from((0, 1, 9, 10, 70)))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND_NS

    @rule()
    def a_task_comes(self) -> None:
        admitted = self.breaker.admits(self.now_ns)
        self._changed()
        if self.state == OPEN:
            assert not admitted
            assert self.now_ns < self.breaker.open_until_ns, "its time is over"
        if self.state == CLOSED:
            assert admitted
        if admitted:
            probe = self.breaker.begin()
            assert probe == (self.state == HALF_OPEN)
            self.running.append(self.round if probe else 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), verdict=st.sampled_from(("well", "unwell", "nothing")))
    def a_task_ends(self, data: st.DataObject, verdict: str) -> None:
        number = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        probe = number != 0 and number == self.round
        before, until_ns = self.state, self.breaker.open_until_ns
        if verdict == "nothing":
            self.breaker.forget(probe=probe)
        else:
            well = verdict == "well"
            if before == CLOSED:
                self.in_a_row = 0 if well else self.in_a_row + 1
            self.breaker.record(self.now_ns, self.rng, ok=well, probe=probe)
        in_a_row = self.in_a_row
        self._changed()
        if before == OPEN:
            assert self.breaker.open_until_ns == until_ns, "a late result changes nothing"
        if before == HALF_OPEN and probe and verdict == "unwell":
            assert self.state == OPEN
        if before == CLOSED and self.policy.failures and in_a_row >= self.policy.failures:
            assert self.state == OPEN
        if before == CLOSED and verdict != "unwell" and not self.policy.window:
            assert self.state == CLOSED

    @rule(word=st.sampled_from(("force_open", "disable", "close", "reset")))
    def a_person_decides(self, word: str) -> None:
        getattr(self.breaker, word)()
        if word in ("close", "reset"):
            assert self.breaker.as_new
        self.state = self.breaker.state
        self.round += 1  # earlier probes do not count any more
        self.in_a_row = 0

    @invariant()
    def no_more_probe_than_may(self) -> None:
        breaker = getattr(self, "breaker", None)
        if breaker is None:
            return
        probing = sum(number == self.round != 0 for number in self.running)
        if self.state == HALF_OPEN:
            assert breaker.probes == probing <= self.policy.probes

    @invariant()
    def it_is_never_stuck(self) -> None:
        """Check that without a running probe the next one may run, now or at a known time."""
        breaker = getattr(self, "breaker", None)
        if breaker is None or self.state not in (OPEN, HALF_OPEN):
            return
        if self.state == OPEN:
            assert breaker.open_until_ns <= self.now_ns + self.policy.open_max_ns * 1.1
        elif not any(number == self.round for number in self.running):
            assert breaker.probes == 0


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
