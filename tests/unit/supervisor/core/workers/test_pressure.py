"""Memory pressure: what the core does when memory gets tight, and when there is room again."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.events import MemorySampled, MemorySource
from musterd.supervisor.core.model.memory import UNKNOWN_BYTES, Level
from musterd.supervisor.core.model.policy import FleetPolicy, MemoryPolicy, PoolPolicy
from musterd.supervisor.core.workers.pressure import CALM_GROWTH_MAX, Stage
from musterd.supervisor.core.workers.sizing import HELD_BACK
from support.core import Muster, of

GIB = 1024**3
CALM = MemoryPolicy().calm_ns // SECOND_NS
PATIENCE = MemoryPolicy().patience_ns // SECOND_NS


class Bench:
    """A fleet that is told of its memory once a second."""

    def __init__(self, **sizes: int) -> None:
        self.total = 100 * GIB
        pools = tuple(
            PoolPolicy(name, size, sacrifice=name.startswith("browser"))
            for name, size in sizes.items()
        )
        self.fleet = Fleet(FleetPolicy(pools=pools), Random(1))
        self.now_ns = 1000 * SECOND_NS
        self.reports: list[actions.Report] = []
        self.killed: list[int] = []
        self.obedient = True  # idle workers stop as soon as they are asked
        self.pss: dict[int, int] = {}
        self.used = 0.1
        self.sample()
        self.tell(events.Started())
        for name in sizes:
            self.tell(events.ForkServerReady(name, (TaskDeclaration("x"),)))

    def tell(self, event: Any) -> list[Any]:
        answer = self.fleet.handle(self.now_ns, event)
        self.fleet.validate()
        self.reports += of(actions.Report, answer)
        self.killed += [each.worker for each in of(actions.KillWorker, answer)]
        for each in list(answer):
            match each:
                case actions.Persist():
                    self.tell(events.Persisted(each.ticket))
                case actions.SpawnWorker():
                    self.tell(events.WorkerForked(each.worker, 5000 + each.worker))
                    self.tell(events.WorkerReady(each.worker))
                case actions.StopWorker() if self.obedient and not self.busy(each.worker):
                    self.tell(events.WorkerExited(each.worker, 0, 0))
                case actions.KillWorker():
                    self.tell(events.WorkerExited(each.worker, -9, self.busy(each.worker)))
        return answer

    def busy(self, worker: int) -> int:
        """Return the lease that a worker holds, 0 for none."""
        for pool in self.fleet.pools.values():
            for slot in pool.slots:
                if slot.worker == worker:
                    return next(iter(slot.leases), 0)
        return 0

    def sample(self, used: float | None = None, **more: Any) -> list[Any]:
        self.used = self.used if used is None else used
        source = MemorySource("the machine's memory", self.total, int(self.used * self.total))
        return self.tell(MemorySampled((source,), workers=dict(self.pss), **more))

    def seconds(self, count: float, used: float | None = None, **more: Any) -> None:
        """Let seconds pass; tell one sample a second, and keep the deadlines in between."""
        for _ in range(int(count)):
            self.now_ns += SECOND_NS
            if (due_ns := self.fleet.next_deadline()) is not None and due_ns <= self.now_ns:
                self.tell(events.Ticked())
            self.sample(used, **more)

    def running(self, pool: str) -> int:
        return sum(slot.state == "RUNNING" for slot in self.fleet.pools[pool].slots)

    @property
    def told(self) -> list[str]:
        return [each.event for each in self.reports if each.event.startswith("memory.")]

    def reason(self, event: str) -> str:
        return next(each.reason for each in self.reports if each.event == event)


# -- shrinking --------------------------------------------------------------------------------


def test_a_warning_halves_each_pool_but_leaves_one() -> None:
    b = Bench(a=4, b=3, c=1)
    b.sample(0.71)
    assert [b.running(name) for name in "abc"] == [2, 1, 1]
    assert b.told == ["memory.warning"]
    assert "71% of the machine's memory is in use (71.0 GiB of 100.0 GiB), over warning = 70%" in (
        b.reason("memory.warning")
    )


def test_the_largest_workers_are_named_to_who_has_to_look() -> None:
    b = Bench(a=4)
    b.pss = {1: GIB, 2: 2 * GIB, 3: 5 * GIB, 4: GIB // 2}
    b.sample(0.71)
    assert "the largest workers: a/2 5.0 GiB, a/1 2.0 GiB, a/0 1.0 GiB" in (
        b.reason("memory.warning")
    )


def test_of_idle_workers_the_largest_gives_way() -> None:
    b = Bench(a=2)
    b.pss = {1: 2 * GIB, 2: GIB}
    b.sample(0.71)
    assert [slot.state for slot in b.fleet.pools["a"].slots] == ["STOPPED", "RUNNING"]


def test_critical_leaves_one_worker_per_pool_at_once() -> None:
    b = Bench(a=8, browser=4)
    b.sample(0.86)
    assert (b.running("a"), b.running("browser")) == (1, 1)
    assert b.told == ["memory.critical"]


def test_a_worker_that_gives_way_ends_its_task_first() -> None:
    b = Bench(a=2)
    for name in ("t1", "t2"):
        b.tell(events.TasksSubmitted(b"", 0, [TaskSpec(name, "a.x", b"")], 1))
    b.seconds(PATIENCE, 0.86)
    assert b.killed == []
    assert sorted(slot.shown_state for slot in b.fleet.pools["a"].slots) == ["BUSY", "DRAINING"]


def test_what_stays_critical_costs_the_sacrifice_and_then_the_patience() -> None:
    b = Bench(a=2, browser=2)
    for name in ("a.x", "a.x", "browser.x", "browser.x"):
        b.tell(events.TasksSubmitted(b"", 0, [TaskSpec(f"{name}{b.now_ns}", name, b"")], 1))
        b.now_ns += 1
    b.seconds(1, 0.9)
    b.seconds(PATIENCE, 0.9)
    assert b.fleet.stage == Stage.SACRIFICE
    assert (b.fleet.pools["a"].target, b.fleet.pools["browser"].target) == (1, 0)
    assert b.killed == []
    b.seconds(PATIENCE, 0.9)
    assert b.fleet.stage == Stage.KILL
    assert len(b.killed) == 3, "all that were asked to go and did not"
    assert (b.running("a"), b.running("browser")) == (1, 0)
    assert len(b.fleet.tasks) == 4, "their tasks wait"
    assert all(task.crashes == 0 for task in b.fleet.tasks.values()), "it is not their fault"
    assert b.told == ["memory.critical", "memory.sacrifice", "memory.kill"]
    b.seconds(600, 0.9)
    assert len(b.killed) == 3


def test_tasks_that_wait_for_a_sacrificed_pool_run_when_it_is_back() -> None:
    b = Bench(browser=1)
    b.seconds(1 + 2 * PATIENCE, 0.9)
    assert b.running("browser") == 0
    b.tell(events.TasksSubmitted(b"", 0, [TaskSpec("t", "browser.x", b"")], 1))
    b.seconds(4 * CALM, 0.2)
    assert b.running("browser") == 1
    assert b.fleet.tasks["t"].slot is not None


# -- growing back -----------------------------------------------------------------------------


def test_the_fleet_comes_back_step_by_step() -> None:
    b = Bench(a=8, browser=2)
    b.seconds(1 + PATIENCE, 0.9)
    assert b.fleet.stage == Stage.SACRIFICE
    sizes = []
    for _ in range(4 * int(CALM)):
        b.seconds(1, 0.3)
        now = (b.running("a"), b.running("browser"))
        if not sizes or sizes[-1] != now:
            sizes.append(now)
    assert sizes == [(1, 0), (1, 1), (4, 1), (8, 2)]
    assert b.told == [
        "memory.critical",
        "memory.sacrifice",
        "memory.recovering",
        "memory.recovering",
        "memory.normal",
    ]
    assert [slot.reason for slot in b.fleet.pools["a"].slots] == [""] * 8


def test_a_use_just_below_the_line_is_no_recovery() -> None:
    b = Bench(a=4)
    b.sample(0.71)
    b.seconds(10 * CALM, 0.68)
    assert (b.fleet.memory.level, b.running("a")) == (Level.WARNING, 2)


def test_the_calm_has_to_be_unbroken() -> None:
    b = Bench(a=4)
    b.sample(0.71)
    for _ in range(10):
        b.seconds(CALM - 1, 0.6)
        b.seconds(1, 0.69)
    assert b.fleet.memory.level == Level.WARNING


def test_the_calm_of_one_level_is_not_that_of_the_next() -> None:
    b = Bench(a=4)
    b.sample(0.9)
    b.seconds(CALM + 1, 0.75)
    assert b.fleet.memory.level == Level.WARNING
    b.seconds(CALM, 0.3)
    assert b.fleet.memory.level == Level.WARNING
    b.seconds(1, 0.3)
    assert b.fleet.memory.level == Level.NORMAL


def test_a_use_that_swings_does_not_make_the_fleet_swing() -> None:
    b = Bench(a=4)
    swings = 40
    for _ in range(swings):
        b.seconds(5, 0.72)
        b.seconds(2 * CALM, 0.3)
    recoveries = b.told.count("memory.normal")
    assert 1 <= recoveries <= 2, recoveries
    b.seconds(CALM_GROWTH_MAX * CALM + 2, 0.3)
    assert b.fleet.memory.level == Level.NORMAL, "but it comes back"


# -- stalls -----------------------------------------------------------------------------------


def test_processes_that_wait_for_memory_count_as_a_warning_and_all_of_them_as_critical() -> None:
    b = Bench(a=4)
    b.sample(0.6, stalled_some=0.5)
    assert b.fleet.memory.level == Level.WARNING
    assert "processes wait for memory 50% of the time, over pressure = 40%" in (
        b.reason("memory.warning")
    )
    b.sample(0.6, stalled_some=0.9, stalled_full=0.5)
    assert b.fleet.memory.level == Level.CRITICAL
    b.seconds(10 * CALM, 0.6, stalled_full=0.3)
    assert b.fleet.memory.level == Level.CRITICAL, "not calm yet"
    b.seconds(2 * CALM + 2, 0.6)
    assert b.fleet.memory.level == Level.NORMAL


def test_a_stall_where_most_memory_is_free_is_somebody_elses() -> None:
    b = Bench(a=4)
    b.seconds(5, 0.2, stalled_some=1.0, stalled_full=1.0)
    assert b.fleet.memory.level == Level.NORMAL


# -- admission --------------------------------------------------------------------------------


def test_no_more_workers_are_made_than_fit() -> None:
    b = Bench(a=1)
    b.pss = {1: 10 * GIB}
    b.seconds(5, 0.3)  # the worker is measured and has settled
    b.tell(events.ScaleRequested("a", 10))
    assert b.running("a") == 4, "three more of 10% each stay below 65%"
    assert b.told == ["memory.held"]
    assert "one more needs about 10.0 GiB, and use may not go over 65%" in b.reason("memory.held")
    held = [slot for slot in b.fleet.pools["a"].slots if slot.held]
    assert [(slot.state, slot.reason) for slot in held] == [("STOPPED", HELD_BACK)] * 6
    b.pss = dict.fromkeys(range(1, 5), 10 * GIB)
    b.seconds(5, 0.6)
    assert b.running("a") == 4
    b.seconds(2, 0.4)
    assert b.running("a") == 6, "there is room again"


def test_workers_that_are_on_their_way_are_counted() -> None:
    b = Bench(a=0)
    b.total = 10 * UNKNOWN_BYTES
    b.sample(0.0)
    b.tell(events.ScaleRequested("a", 100))
    assert b.running("a") == 6, "65% of the room for ten that nobody measured yet"
    b.now_ns += 1
    b.sample(0.0)
    assert b.running("a") == 6, "they are young: the figures do not show them yet"
    b.pss = dict.fromkeys(range(1, 7), UNKNOWN_BYTES // 4)
    b.seconds(5, 0.15)
    assert b.running("a") > 6, "they took less"


def test_the_first_worker_of_a_pool_is_made_even_where_memory_is_always_tight() -> None:
    b = Bench(a=0)
    b.seconds(1, 0.9)
    b.tell(events.ScaleRequested("a", 4))
    assert b.running("a") == 1
    b.tell(events.WorkerExited(1, -11, 0))
    assert b.running("a") == 1


def test_not_even_the_first_is_made_where_it_cannot_fit() -> None:
    b = Bench(a=0)
    b.total = 10 * UNKNOWN_BYTES
    b.seconds(1, 0.95)
    b.tell(events.ScaleRequested("a", 1))
    assert b.running("a") == 0
    b.seconds(1, 0.8)
    assert b.running("a") == 1


def test_a_crashed_worker_is_replaced_where_the_fleet_could_not_grow() -> None:
    b = Bench(a=4)
    b.pss = dict.fromkeys(range(1, 5), 10 * GIB)
    b.seconds(5, 0.68)
    b.tell(events.WorkerExited(1, -11, 0))
    assert b.running("a") == 4, "what it had is free"


def test_each_source_has_to_have_room() -> None:
    b = Bench(a=1)
    machine = MemorySource("the machine's memory", 100 * GIB, 50 * GIB)
    group = MemorySource("the control group", 10 * UNKNOWN_BYTES, 4 * UNKNOWN_BYTES)
    b.now_ns += 10 * SECOND_NS
    b.tell(MemorySampled((machine, group)))
    assert b.fleet.memory.share == pytest.approx(0.5)
    b.tell(events.ScaleRequested("a", 9))
    assert b.running("a") == 3, "two more are 60% of the group"


def test_pools_share_what_there_is() -> None:
    b = Bench(a=0, b=0)
    b.total = 10 * UNKNOWN_BYTES
    b.sample(0.66)
    for name in "ab":
        b.tell(events.ScaleRequested(name, 10))
    assert (b.running("a"), b.running("b")) == (1, 1)
    b.seconds(1, 0.05)
    b.seconds(10, 0.25)
    assert abs(b.running("a") - b.running("b")) <= 1


def test_nothing_is_held_before_the_first_look(muster: type[Muster]) -> None:
    m = muster(size=3)
    m.start()
    assert [slot.state for slot in m.slots] == ["RUNNING"] * 3


# -- the end ----------------------------------------------------------------------------------


def test_a_shutdown_is_not_disturbed() -> None:
    b = Bench(a=4)
    b.sample(0.71)
    b.tell(events.ShutdownRequested("test"))
    b.seconds(3 * CALM, 0.1)
    assert b.running("a") == 0


# -- how many workers fit ---------------------------------------------------------------------


def test_recommended_are_those_that_are_there_and_those_that_would_still_fit() -> None:
    b = Bench(a=2, b=1)
    b.total = 100 * GIB
    b.pss = {1: 10 * GIB, 2: 10 * GIB, 3: GIB}
    b.seconds(5, 0.245)  # 40.5 GiB are left below the line of 70 % less the margin of 5
    memory, pools = b.fleet.memory, b.fleet.pools
    assert memory.recommended(pools["a"]) == 2 + 4
    assert memory.recommended(pools["b"]) == 1 + 40


def test_while_memory_is_tight_the_lowered_size_is_recommended() -> None:
    b = Bench(a=8, browsers=4)
    found = []
    for used in (0.71, 0.86):
        b.sample(used)
        found.append([b.fleet.memory.recommended(pool) for pool in b.fleet.pools.values()])
    assert found == [[4, 2], [1, 1]]
    b.seconds(PATIENCE + 1, 0.86)
    assert [b.fleet.memory.recommended(pool) for pool in b.fleet.pools.values()] == [1, 0]


def test_where_nobody_looks_the_size_is_recommended_and_nothing_is_known() -> None:
    b = Bench(a=3)
    b.sample(0.71)
    assert b.running("a") == 1
    unwatched = MemoryPolicy(watched=False, enabled=False)
    b.tell(events.PolicyChanged(structs.replace(b.fleet.policy, memory=unwatched)))
    assert b.fleet.memory.sample is None
    assert b.fleet.memory.recommended(b.fleet.pools["a"]) == 3
    assert b.running("a") == 3


def test_one_worker_is_recommended_where_none_is_there_and_none_fits() -> None:
    b = Bench(a=0)
    b.sample(0.69)  # below the line of 70 %, above that for growing pools
    assert b.fleet.memory.fitting(b.fleet.pools["a"]) == 0
    assert b.fleet.memory.recommended(b.fleet.pools["a"]) == 1
