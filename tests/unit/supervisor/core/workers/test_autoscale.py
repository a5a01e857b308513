"""Pools that grow and shrink by themselves, and the fleet's bound that they share."""

from random import Random
from typing import Any

import pytest

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS, BackoffPolicy
from musterd.ipc.wire.messages import CRITICAL, LOW, TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.memory import UNKNOWN_BYTES
from musterd.supervisor.core.model.policy import (
    FleetPolicy,
    GatePolicy,
    PoolPolicy,
    RestartPolicy,
    ScalingPolicy,
    TargetPolicy,
)
from musterd.supervisor.core.model.scaler import Load, Most, Scaler, Wish
from musterd.supervisor.core.workers.autoscale import LOOK_NS, NO_SUCH_POOL, TOO_MANY_WORKERS
from musterd.supervisor.core.workers.demand import load_of
from support.core import Muster, of

IDLE_NS = 10 * SECOND_NS


def scaled(answer: list[Any]) -> list[str]:
    return [each.reason for each in of(actions.Report, answer) if each.event == "pool.scaled"]


def scaling(low: int, high: int) -> ScalingPolicy:
    return ScalingPolicy(low, high, wait_ns=SECOND_NS, idle_ns=IDLE_NS)


def tasks(count: int, name: str = "p.x", **spec: Any) -> list[TaskSpec]:
    tasks.made += count  # type: ignore[attr-defined]
    made = tasks.made  # type: ignore[attr-defined]
    return [TaskSpec(f"{name}{made - n}", name, b"", **spec) for n in range(count)]


tasks.made = 0  # type: ignore[attr-defined]


def pass_time(m: Any, nanoseconds: int) -> list[Any]:
    """Let time pass; bring up each spawned worker at once."""
    answer = []
    for _ in range(nanoseconds // (LOOK_NS // 2)):
        news = m.wait(LOOK_NS // 2)
        answer += news
        for spawn in of(actions.SpawnWorker, news):
            answer += m.bring_up(spawn.worker)
    return answer


def finish_all(m: Any) -> None:
    """Complete every lease until none is left."""
    while busy := [
        (slot.worker, list(slot.leases))
        for pool in m.fleet.pools.values()
        for slot in pool.slots
        if slot.leases
    ]:
        for worker, leases in busy:
            m.complete(worker, *leases, run_ns=SECOND_NS)


def stopped_exit(m: Any, answer: list[Any]) -> None:
    for stop in of(actions.StopWorker, answer):
        m.exit(stop.worker, code=0)


# -- one pool ---------------------------------------------------------------------------------


def test_a_pool_grows_when_tasks_wait_and_says_why(muster: type[Muster]) -> None:
    m = muster(size=1, scaling=scaling(1, 8))
    m.start()
    m.submit(*tasks(10))
    answer = pass_time(m, 2 * SECOND_NS)
    assert scaled(answer) == ["from 1 to 2: queue waits 1.0 s"]
    answer = pass_time(m, 10 * SECOND_NS)
    assert m.fleet.pools["p"].size == 8
    assert scaled(answer)[0].startswith("from 2 to 4: queue waits ")
    assert len(of(actions.AssignLeases, answer)) == 6


def test_a_pool_without_bounds_keeps_its_size_and_sets_no_timer(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    m.submit(*tasks(10))
    assert scaled(pass_time(m, 30 * SECOND_NS)) == []
    assert m.fleet.pools["p"].scaler is None


def test_idle_workers_are_let_go_down_to_min_and_then_nobody_looks_any_more(
    muster: type[Muster],
) -> None:
    m = muster(size=4, scaling=scaling(1, 8))
    m.start()
    pool = m.fleet.pools["p"]
    assert scaled(pass_time(m, IDLE_NS - SECOND_NS)) == []
    for _ in range(10):
        stopped_exit(m, pass_time(m, 5 * SECOND_NS))
    assert (pool.size, len(pool.slots)) == (1, 1)
    assert "unused for 10 s" in pool.scaler.why
    assert not m.fleet._autoscale.looks, "it looks although there is nothing to see"


def test_the_first_task_of_an_empty_pool_starts_a_worker_at_once(muster: type[Muster]) -> None:
    m = muster(size=0, scaling=scaling(0, 4))
    m.start()
    m.wait(5 * SECOND_NS)
    assert not m.fleet._autoscale.looks
    answer = m.submit(*tasks(1))
    assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(1, "p", 0)]
    assert of(actions.AssignLeases, m.bring_up(1)) != []
    finish_all(m)
    answer = pass_time(m, IDLE_NS + 2 * SECOND_NS)
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1)]
    # A task comes while the old worker is still stopping.
    m.submit(*tasks(1))
    answer = m.exit(1, code=0)
    assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(2, "p", 0)]


def test_the_worker_that_goes_is_an_idle_one(muster: type[Muster]) -> None:
    m = muster(size=3, scaling=scaling(1, 3), task_timeout_ns=3600 * SECOND_NS)
    m.start()
    # The last worker has a long task; the other two of three are unused.
    m.submit(*tasks(3))
    for slot in m.slots[:2]:
        m.complete(slot.worker, *slot.leases, run_ns=SECOND_NS)
    answer = pass_time(m, 2 * IDLE_NS)
    assert [stop.worker for stop in of(actions.StopWorker, answer)] == [2, 1]
    assert of(actions.TerminateWorker, answer) == []
    for stop in (1, 2):
        m.exit(stop, code=0)
    assert [slot.name for slot in m.slots] == ["p/2"]
    # The next workers get the free indices.
    m.submit(*tasks(5))
    pass_time(m, 20 * SECOND_NS)
    assert [slot.name for slot in m.slots] == ["p/0", "p/1", "p/2"]


def test_work_that_is_spread_over_all_workers_does_not_keep_them(muster: type[Muster]) -> None:
    """Each of four workers did something all the time, but never two at once."""
    m = muster(size=4, scaling=scaling(1, 4))
    m.start()
    used = set()
    for _ in range(30):
        for lease in of(actions.AssignLeases, m.submit(*tasks(1))):
            used.add(lease.worker)
            m.complete(lease.worker, lease.leases[0].lease)
        stopped_exit(m, m.wait(SECOND_NS))
    assert len(used) == 4
    assert m.fleet.pools["p"].size == 1


def test_a_pool_whose_workers_crash_does_not_grow(muster: type[Muster]) -> None:
    restart = RestartPolicy(backoff=BackoffPolicy(base_ns=60 * SECOND_NS, jitter=0.0))
    m = muster(size=2, scaling=scaling(1, 8), restart=restart)
    m.start()
    m.submit(*tasks(9))
    m.exit(m.slots[0].worker, code=1)
    m.exit(m.slots[0].worker, code=1)  # the second restart has to wait
    assert m.slots[0].state == "BACKOFF"
    assert scaled(m.wait(20 * SECOND_NS)) == []


def test_what_a_person_stopped_is_left_alone(muster: type[Muster]) -> None:
    m = muster(size=2, scaling=scaling(0, 8))
    m.start()
    stopped_exit(m, m.tell(events.StopRequested((("p", -1),))))
    m.submit(*tasks(9))
    assert scaled(pass_time(m, 60 * SECOND_NS)) == []
    assert [slot.state for slot in m.slots] == ["STOPPED", "STOPPED"]


@pytest.mark.parametrize("index", [-1, 0], ids=["the pool", "one of its workers"])
def test_what_a_person_paused_is_left_alone_until_it_is_resumed(
    muster: type[Muster], index: int
) -> None:
    m = muster(size=2, scaling=scaling(0, 8))
    m.start()
    m.tell(events.PauseRequested((("p", index),)))
    m.submit(*tasks(9))
    assert scaled(pass_time(m, 60 * SECOND_NS)) == []
    m.tell(events.ResumeRequested((("p", index),)))
    assert scaled(pass_time(m, 60 * SECOND_NS)) != []


def test_an_empty_pool_that_is_resumed_starts_a_worker_for_what_waits(muster: type[Muster]) -> None:
    m = muster(size=0, scaling=scaling(0, 8))
    m.start()
    m.tell(events.PauseRequested((("p", -1),)))
    assert of(actions.SpawnWorker, m.submit(*tasks(1)) + m.wait(9 * SECOND_NS)) == []
    answer = m.tell(events.ResumeRequested((("p", -1),)))
    assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(1, "p", 0)]


def test_crashes_are_not_forgotten_by_letting_the_crashed_go(muster: type[Muster]) -> None:
    m = muster(size=1, scaling=scaling(0, 8))
    m.start()
    for _ in range(4):
        if m.slots[0].worker:
            m.exit(m.slots[0].worker, code=1)
        m.wait(5 * SECOND_NS)
    assert m.slots[0].state == "FATAL"
    assert scaled(pass_time(m, 60 * SECOND_NS)) == []
    assert [slot.state for slot in m.slots] == ["FATAL"]


def test_nothing_grows_during_the_shutdown(muster: type[Muster]) -> None:
    m = muster(size=1, scaling=scaling(1, 8))
    m.start()
    m.submit(*tasks(9))
    m.tell(events.ShutdownRequested("test"))
    assert of(actions.SpawnWorker, pass_time(m, 20 * SECOND_NS)) == []


def test_an_empty_pool_gets_no_worker_during_the_shutdown(muster: type[Muster]) -> None:
    m = muster(size=0, scaling=scaling(0, 8))
    m.start()
    m.disk_works = False
    m.submit(*tasks(1))
    m.tell(events.ShutdownRequested("test"))
    assert of(actions.SpawnWorker, m.commit()) == []


# -- what does not count ----------------------------------------------------------------------


def test_tasks_that_may_not_begin_are_no_reason_to_grow(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.policy = FleetPolicy(
        pools=(PoolPolicy("p", 2, scaling=scaling(1, 8)),),
        classes={"few": GatePolicy("few", max_concurrent=1)},
        targets={
            "slow": TargetPolicy(max_concurrent=1),
            "rare": TargetPolicy(rate=0.001, burst=1),
        },
    )
    m.fleet = Fleet(m.policy, Random(1))
    m.start()
    m.submit(*tasks(2))  # all workers are busy
    m.submit(*tasks(20, target="slow"), *tasks(20, target="rare"))
    m.submit(*tasks(10, target="one", policy="few"), *tasks(10, target="two", policy="few"))
    load = load_of(m.fleet.pools["p"], m.now_ns)
    assert load.ready == 3, "one for each site that has a limit, one for the class"
    finish_all(m)
    load = load_of(m.fleet.pools["p"], m.now_ns)
    assert load.ready == 0


def test_dead_entries_are_not_waited_for(muster: type[Muster]) -> None:
    m = muster(size=1, scaling=scaling(1, 8))
    m.start()
    first, *others = tasks(3)
    m.submit(first)
    m.submit(*others)
    m.tell(events.CancelRequested([task.id for task in others]))
    load = load_of(m.fleet.pools["p"], m.now_ns)
    assert (load.ready, load.waited_ns, load.work_ns) == (0, 0, 0)


def test_what_waits_on_disk_counts(muster: type[Muster]) -> None:
    m = muster(size=1, scaling=scaling(1, 8), resident_tasks=0)
    m.start()
    m.submit(*tasks(20))
    pool = m.fleet.pools["p"]
    lane = pool.queue.levels[2].ring[0]
    while lane.tasks:  # the disk reads nothing back
        m.complete(m.slots[0].worker, *m.slots[0].leases, run_ns=SECOND_NS)
    load = load_of(pool, m.now_ns)
    assert (load.ready, load.waited_ns, load.work_ns) == (lane.alive, 0, lane.alive * SECOND_NS)
    assert lane.alive > 10


# -- memory first -----------------------------------------------------------------------------


def memory(m: Any, share: float, workers: int = 100) -> None:
    """Tell of a machine with room for `workers`, of which `share` is in use."""
    total = workers * UNKNOWN_BYTES
    m.tell(events.MemorySampled((events.MemorySource("the machine", total, int(share * total)),)))


def test_nothing_grows_unless_memory_is_as_it_should_be(muster: type[Muster]) -> None:
    m = muster(size=1, scaling=scaling(1, 8))
    m.start()
    m.wait(10 * SECOND_NS)
    memory(m, 0.75)
    m.submit(*tasks(20))
    assert scaled(pass_time(m, 20 * SECOND_NS)) == []
    scaler = m.fleet.pools["p"].scaler
    assert "queue waits" in scaler.held
    assert "75% of the machine is in use" in scaler.held


def test_a_pool_grows_by_no_more_than_fits(muster: type[Muster]) -> None:
    m = muster(size=8, scaling=scaling(1, 32))
    m.start()
    m.wait(5 * SECOND_NS)
    memory(m, 0.595)  # five more workers fit below 65%
    m.submit(*tasks(99))
    answer = pass_time(m, 20 * SECOND_NS)
    assert scaled(answer) == ["from 8 to 13: queue waits 1.0 s"]
    assert len(of(actions.SpawnWorker, answer)) == 5
    assert "use may not go over 65%" in m.fleet.pools["p"].scaler.held


def test_the_first_worker_needs_no_more_than_that_it_fits_at_all(muster: type[Muster]) -> None:
    m = muster(size=0, scaling=scaling(0, 8))
    m.start()
    memory(m, 0.80)
    assert of(actions.SpawnWorker, m.submit(*tasks(1))) != []


def test_workers_that_memory_holds_back_are_not_taken_for_unneeded() -> None:
    scaler = Scaler(scaling(1, 8))
    scaler.wake(0)
    busy = Load(4, running=2, held=2, busy_most=2)
    idle = Load(4, running=2, held=2, busy_most=1, idle=1)
    for second in range(30):
        assert scaler.wish(second * SECOND_NS, busy) == Wish(4)
    sizes = [scaler.wish(second * SECOND_NS, idle).size for second in range(30, 60)]
    assert sizes[:5] == [4] * 5
    assert sizes[-1] == 3


def test_what_memory_holds_back_comes_before_any_growth() -> None:
    scaler = Scaler(scaling(1, 8))
    scaler.wake(0)
    load = Load(4, running=2, held=2, busy_most=2, ready=9, waited_ns=9 * SECOND_NS)
    assert scaler.wish(SECOND_NS, load) == Wish(4)


# -- commands of people -----------------------------------------------------------------------


def test_a_person_overrides_until_that_is_taken_back(muster: type[Muster]) -> None:
    m = muster(size=2, scaling=scaling(1, 4))
    m.start()
    pool = m.fleet.pools["p"]
    for spawn in of(actions.SpawnWorker, m.tell(events.ScaleRequested("p", 6))):
        m.bring_up(spawn.worker)
    assert pool.scaler.manual
    m.submit(*tasks(20))
    assert scaled(pass_time(m, 60 * SECOND_NS)) == []
    finish_all(m)
    assert scaled(pass_time(m, 60 * SECOND_NS)) == []
    assert pool.size == 6
    answer = m.tell(events.AutoscaleRequested("p"))
    assert scaled(answer) == ["from 6 to 4: between 1 and 4 again"]
    for _ in range(10):
        stopped_exit(m, pass_time(m, 5 * SECOND_NS))
    assert pool.size == 1


def test_an_empty_pool_that_a_person_made_so_stays_empty(muster: type[Muster]) -> None:
    m = muster(size=1, scaling=scaling(0, 4))
    m.start()
    stopped_exit(m, m.tell(events.ScaleRequested("p", 0)))
    assert of(actions.SpawnWorker, m.submit(*tasks(3)) + m.wait(9 * SECOND_NS)) == []
    answer = m.tell(events.AutoscaleRequested("p"))
    assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(2, "p", 0)]


def test_a_pool_that_scales_by_itself_again_is_ready_for_its_first_task(
    muster: type[Muster],
) -> None:
    m = muster(size=0, scaling=scaling(0, 4))
    m.start()
    m.tell(events.ScaleRequested("p", 0))
    m.tell(events.AutoscaleRequested("p"))
    assert of(actions.SpawnWorker, m.submit(*tasks(1))) != []


def test_auto_gives_a_fixed_pool_its_configured_size(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    m.tell(events.ScaleRequested("p", 3))
    assert scaled(m.tell(events.AutoscaleRequested("p"))) == ["from 3 to 1"]


# -- several pools ----------------------------------------------------------------------------


def fleet_of(m: Any, workers_max: int, **pools: tuple[int, int, int]) -> None:
    """Make pools of (size, min, max) by name, with all workers up."""
    m.policy = FleetPolicy(
        pools=tuple(
            PoolPolicy(name, size, scaling=scaling(low, high))
            for name, (size, low, high) in pools.items()
        ),
        workers_max=workers_max,
    )
    m.fleet = Fleet(m.policy, Random(1))
    m.tell(events.Started())
    for name in pools:
        for spawn in of(
            actions.SpawnWorker, m.tell(events.ForkServerReady(name, (TaskDeclaration("x"),)))
        ):
            m.bring_up(spawn.worker)


def sizes(m: Any) -> dict[str, int]:
    return {name: pool.size for name, pool in m.fleet.pools.items()}


def test_the_pools_share_what_the_fleet_may_have(muster: type[Muster]) -> None:
    m = muster()
    fleet_of(m, 6, a=(1, 1, 9), b=(1, 1, 9))
    m.submit(*tasks(40, "a.x"), *tasks(40, "b.x"))
    pass_time(m, 30 * SECOND_NS)
    assert sum(sizes(m).values()) == 6
    assert any("workers_max of 6 is reached" in pool.scaler.held for pool in m.fleet.pools.values())


@pytest.mark.parametrize(
    ("first", "later", "winner"),
    [
        ({"name": "a.x"}, {"name": "b.x"}, "a"),
        ({"name": "b.x"}, {"name": "a.x"}, "b"),
        ({"name": "a.x", "priority": LOW}, {"name": "b.x", "priority": CRITICAL}, "b"),
    ],
    ids=["who waits for longer", "whatever its name", "but urgent tasks first"],
)
def test_the_last_place_goes_to_the_most_urgent_then_to_who_waits_for_longest(
    muster: type[Muster], first: dict[str, Any], later: dict[str, Any], winner: str
) -> None:
    m = muster()
    fleet_of(m, 3, a=(1, 1, 9), b=(1, 1, 9))
    m.submit(*tasks(9, **first))
    m.wait(200 * MILLISECOND_NS)
    m.submit(*tasks(9, **later))
    pass_time(m, 5 * SECOND_NS)
    assert sizes(m) == {"a": 1, "b": 1} | {winner: 2}


def test_a_place_is_kept_for_the_first_worker_of_an_idle_pool(muster: type[Muster]) -> None:
    m = muster()
    fleet_of(m, 4, a=(1, 0, 9), b=(0, 0, 9))
    m.submit(*tasks(90, "a.x"))
    pass_time(m, 30 * SECOND_NS)
    assert sizes(m) == {"a": 3, "b": 0}
    answer = m.submit(*tasks(1, "b.x"))
    assert [spawn.pool for spawn in of(actions.SpawnWorker, answer)] == ["b"]


def test_a_worker_that_is_still_draining_counts(muster: type[Muster]) -> None:
    m = muster()
    fleet_of(m, 4, a=(2, 0, 9), b=(1, 1, 9))
    m.submit(*tasks(2, "a.x"))
    m.tell(events.ScaleRequested("a", 0))
    m.submit(*tasks(9, "b.x"))
    pass_time(m, 20 * SECOND_NS)
    assert sizes(m) == {"a": 0, "b": 2}
    finish_all(m)
    for slot in list(m.fleet.pools["a"].slots):
        m.exit(slot.worker, code=0)
    m.submit(*tasks(30, "b.x"))
    pass_time(m, 20 * SECOND_NS)
    assert sizes(m) == {"a": 0, "b": 3}


def test_a_person_is_refused_more_than_the_fleet_may_have(muster: type[Muster]) -> None:
    m = muster()
    fleet_of(m, 4, a=(1, 0, 9), b=(1, 1, 9))
    (answer,) = m.tell(events.ScaleRequested("a", 4, b"token"))
    (rejected,) = answer.rejected
    assert (answer.peer, rejected.id, rejected.code) == (b"token", "a", TOO_MANY_WORKERS)
    assert rejected.message == (
        "a may have 3 workers beside those of the other pools: supervisor.workers_max is 4"
    )
    assert sizes(m) == {"a": 1, "b": 1}
    answer = m.tell(events.ScaleRequested("a", 3, b"token"))
    assert of(actions.Acknowledge, answer) == [actions.Acknowledge(b"token", 0, [])]
    assert sizes(m) == {"a": 3, "b": 1}


def test_a_pool_that_is_gone_is_not_scaled_and_that_is_said(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    (answer,) = m.tell(events.ScaleRequested("q", 1, b"token"))
    assert [each.code for each in answer.rejected] == [NO_SUCH_POOL]


# -- the scaler alone -------------------------------------------------------------------------


def test_what_is_outside_its_bounds_is_brought_back() -> None:
    scaler = Scaler(scaling(2, 4))
    scaler.wake(0)
    assert scaler.wish(1, Load(size=1, running=1)) == Wish(2, "min is 2")
    assert scaler.wish(2, Load(size=7, running=7)) == Wish(4, "max is 4")


def test_much_queued_work_is_a_reason_before_anything_has_waited_for_long() -> None:
    scaler = Scaler(scaling(1, 8))
    scaler.wake(0)
    load = Load(2, running=2, busy_most=2, ready=40, waited_ns=1, work_ns=40 * SECOND_NS)
    assert scaler.wish(SECOND_NS, load) == Wish(4, "20.0 s of work queued for each worker")


def test_no_more_are_asked_for_than_there_are_tasks() -> None:
    scaler = Scaler(scaling(1, 8))
    scaler.wake(0)
    load = Load(4, running=4, busy_most=4, ready=1, waited_ns=SECOND_NS, work_ns=60 * SECOND_NS)
    assert scaler.wish(SECOND_NS, load).size == 5


def test_the_most_within_a_stretch_of_time() -> None:
    most = Most(10)
    for now_ns, number in enumerate((3, 5, 2, 1, 0, 0)):
        most.add(now_ns, number)
    assert most.most(11) == 5
    assert most.most(12) == 2
    assert most.most(14) == 0
    assert len(most) == 1
