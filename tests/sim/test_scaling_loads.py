"""The scaler of one pool under loads that rise, fall, jump and tremble."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import NORMAL
from musterd.supervisor.core.model.policy import ScalingPolicy
from musterd.supervisor.core.model.scaler import UNKNOWN_RUN_NS, Load, Scaler

STEP_NS = 50 * MILLISECOND_NS
LOOK_NS = 1 * SECOND_NS
MIN, MAX = 1, 20
POLICY = ScalingPolicy(MIN, MAX, wait_ns=1 * SECOND_NS, idle_ns=30 * SECOND_NS)

# How many workers a load needs at a second: arrivals per second times the run time.
Shape = Callable[[float], float]


@dataclass
class Yard:
    """A pool as queueing theory sees it: arrivals, one queue, workers that take time to start."""

    shape: Shape
    run_seconds: float = 0.5
    start_seconds: float = 0.2
    tremble: Random | None = None  # None: arrivals and run times are exact
    scaler: Scaler = field(default_factory=lambda: Scaler(POLICY))
    size: int = MIN
    now_ns: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)  # at each change
    waits: list[tuple[float, float]] = field(default_factory=list)  # (begun, waited), in seconds
    queue: deque[int] = field(default_factory=deque)  # when each task was queued
    starting: list[int] = field(default_factory=list)  # when each is up
    ends: list[int] = field(default_factory=list)  # of busy workers
    running: int = MIN
    busy_most: int = 0
    due: float = 0.0  # arrivals, with fractions
    measured: bool = False

    def run(self, seconds: float) -> Yard:
        self.scaler.wake(0)
        until_ns = self.now_ns + int(seconds * SECOND_NS)
        while self.now_ns < until_ns:
            self.now_ns += STEP_NS
            self._end_and_start()
            self._arrive()
            self._begin()
            if self.now_ns % LOOK_NS == 0:
                self._look()
        return self

    def _end_and_start(self) -> None:
        while self.ends and self.ends[0] <= self.now_ns:
            heapq.heappop(self.ends)
            self.measured = True
        up = [when for when in self.starting if when <= self.now_ns]
        self.starting = self.starting[len(up) :]
        self.running += len(up)

    def _arrive(self) -> None:
        rate = self.shape(self.now_ns / SECOND_NS) / self.run_seconds * STEP_NS / SECOND_NS
        if self.tremble is None:
            self.due += rate
        else:  # a coin for each moment: nearly a Poisson process
            self.due += sum(self.tremble.random() < rate / 50 for _ in range(50))
        while self.due >= 1:
            self.due -= 1
            self.queue.append(self.now_ns)

    def _begin(self) -> None:
        while self.queue and len(self.ends) < self.running:
            queued_ns = self.queue.popleft()
            run = self.run_seconds * (self.tremble.uniform(0.2, 1.8) if self.tremble else 1)
            heapq.heappush(self.ends, self.now_ns + int(run * SECOND_NS))
            self.waits.append((self.now_ns / SECOND_NS, (self.now_ns - queued_ns) / SECOND_NS))
        self.busy_most = max(self.busy_most, len(self.ends))

    def _look(self) -> None:
        run_ns = int(self.run_seconds * SECOND_NS) if self.measured else UNKNOWN_RUN_NS
        load = Load(
            size=self.size,
            running=self.running,
            starting=len(self.starting),
            idle=self.running - len(self.ends),
            busy_most=self.busy_most,
            ready=len(self.queue),
            waited_ns=self.now_ns - self.queue[0] if self.queue else 0,
            work_ns=len(self.queue) * run_ns,
            level=NORMAL,
        )
        self.busy_most = len(self.ends)
        wish = self.scaler.wish(self.now_ns, load)
        assert MIN <= wish.size <= MAX, wish
        assert (wish.size != self.size) == bool(wish.reason), wish
        if wish.size == self.size:
            return
        self.scaler.changed(self.now_ns, self.size, wish.size)
        if wish.size > self.size:
            up_ns = self.now_ns + int(self.start_seconds * SECOND_NS)
            self.starting += [up_ns] * (wish.size - self.size)
        else:
            self.running -= self.size - wish.size
            assert self.running >= len(self.ends), "a busy worker was let go"
        self.size = wish.size
        self.sizes.append((self.now_ns / SECOND_NS, self.size))

    # -- results ------------------------------------------------------------------------------

    def size_at(self, second: float) -> int:
        return next((size for when, size in reversed(self.sizes) if when <= second), MIN)

    @property
    def turns(self) -> int:
        """How often the direction changed."""
        sizes = [MIN, *(size for _, size in self.sizes)]
        ups = [after > before for before, after in itertools.pairwise(sizes)]
        return sum(a != b for a, b in itertools.pairwise(ups))

    def longest_wait(self, begin: float, end: float) -> float:
        return max((waited for when, waited in self.waits if begin <= when < end), default=0.0)


def step(low: float, high: float, at: float) -> Shape:
    return lambda second: high if second >= at else low


def test_no_load_changes_nothing() -> None:
    assert Yard(lambda _: 0.0).run(600).sizes == []


def test_a_load_that_one_worker_manages_changes_nothing() -> None:
    assert Yard(lambda _: 0.8).run(600).sizes == []


@pytest.mark.parametrize("start_seconds", [0.1, 3.0], ids=["quick starts", "slow starts"])
@pytest.mark.parametrize("run_seconds", [0.1, 0.5, 5.0])
def test_a_step_is_followed_within_half_a_minute_and_kept(
    run_seconds: float, start_seconds: float
) -> None:
    yard = Yard(step(0.5, 10, 60), run_seconds, start_seconds).run(360)
    assert yard.size_at(90) >= 10, yard.sizes
    assert yard.longest_wait(100, 360) <= 1.5, yard.sizes
    # Workers that cleared the initial queue may be stopped once; none is started again.
    assert yard.turns <= 1, yard.sizes
    assert 10 <= yard.size_at(360) <= 13, yard.sizes


def test_a_step_down_leads_back_to_min_and_no_further() -> None:
    yard = Yard(lambda second: 10.0 if second < 60 else 0.0).run(300)
    assert yard.size_at(60) >= 10
    assert yard.size == MIN, yard.sizes
    assert yard.turns == 1, yard.sizes
    down = [size for when, size in yard.sizes if when > 60]
    assert down == sorted(down, reverse=True)


def test_steps_up_are_bigger_than_steps_down() -> None:
    yard = Yard(lambda second: 16.0 if second < 60 else 0.0).run(300)
    sizes = [MIN, *(size for _, size in yard.sizes)]
    changes = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(changes) > -min(changes)


def test_a_ramp_is_followed() -> None:
    yard = Yard(lambda second: min(15.0, second / 20)).run(600)
    assert yard.size_at(330) >= 15, yard.sizes
    assert yard.longest_wait(360, 600) <= 1.5
    assert yard.turns <= 1, yard.sizes


def test_a_short_burst_is_worked_off_and_forgotten() -> None:
    yard = Yard(lambda second: 30.0 if 60 <= second < 65 else 0.2).run(300)
    assert yard.longest_wait(0, 300) <= 30, "one worker would need 150 s for it"
    assert yard.size == MIN, yard.sizes
    assert yard.turns == 1, yard.sizes


def test_bursts_that_come_again_before_workers_are_idle_find_them_there() -> None:
    yard = Yard(lambda second: 10.0 if second % 20 < 5 else 0.0).run(600)
    assert yard.longest_wait(120, 600) <= 1.5, yard.sizes
    assert yard.turns <= 1, yard.sizes


@pytest.mark.parametrize("period", [20, 60, 200])
def test_a_sawtooth_never_makes_it_flap(period: int) -> None:
    yard = Yard(lambda second: 12.0 * (second % period) / period).run(1200)
    teeth = 1200 // period
    # It may follow each tooth once up and once down, or stay up; nothing else.
    assert yard.turns <= 2 * teeth, yard.sizes
    if period <= 30:
        assert yard.turns <= 1, yard.sizes


@pytest.mark.parametrize("seed", range(6))
def test_a_load_that_trembles_does_not_make_it_flap(seed: int) -> None:
    yard = Yard(lambda _: 6.0, tremble=Random(seed)).run(900)
    assert yard.turns <= 3, yard.sizes  # within a quarter of an hour
    assert yard.longest_wait(60, 900) <= 5.0, yard.sizes
    assert 6 <= yard.size <= 16, yard.sizes


@pytest.mark.parametrize("seed", range(12))
def test_no_load_drives_it_out_of_its_bounds_or_faster_than_its_pauses(seed: int) -> None:
    rng = Random(seed)
    levels = [rng.choice((0.0, 0.5, 3.0, 10.0, 60.0)) for _ in range(60)]
    yard = Yard(
        lambda second: levels[min(59, int(second / 20))],
        run_seconds=rng.choice((0.1, 1.0, 8.0)),
        start_seconds=rng.choice((0.05, 2.0)),
        tremble=rng,
    ).run(1200)
    assert all(MIN <= size <= MAX for _, size in yard.sizes)
    changes = [(0.0, MIN), *yard.sizes]
    last_up = last_down = -100.0
    for (_, before), (when, after) in itertools.pairwise(changes):
        if after > before:
            assert when - last_down >= 5, yard.sizes
            assert when - last_up >= 2, yard.sizes
            last_up = when
        else:
            assert when - last_up >= 30, yard.sizes
            assert when - last_down >= 5, yard.sizes
            last_down = when
