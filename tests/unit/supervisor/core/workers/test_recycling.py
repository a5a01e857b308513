"""Recycling: worn workers make room for fresh ones, one at a time, and nothing is interrupted."""

from typing import Any

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.workers.recycling import JITTER
from musterd.supervisor.views.fleet import pool_status
from support.core import Muster, of

ALL = (("p", -1),)


def reports(answer: list[Any]) -> list[str]:
    return [each.event for each in of(actions.Report, answer)]


def spawned(answer: list[Any]) -> list[int]:
    return [each.worker for each in of(actions.SpawnWorker, answer)]


def run_one(m: Any, id_: str, worker: int = 1) -> list[Any]:
    """Run one task from submit to result; return what the result brings about."""
    (given,) = of(actions.AssignLeases, m.submit(TaskSpec(id_, "p.x", b"")))
    assert given.worker == worker
    return m.complete(worker, given.leases[0].lease, run_ns=SECOND_NS)


def wear_out(m: Any) -> int:
    """Run the one task that wears worker 1 out; return the number of its successor."""
    (successor,) = spawned(run_one(m, "t"))
    return successor


# -- when -------------------------------------------------------------------------------------


def test_a_worker_that_ran_max_tasks_is_followed_by_a_fresh_one(muster: type[Muster]) -> None:
    m = muster(max_tasks=1)
    m.start()
    answer = run_one(m, "a")
    assert spawned(answer) == [2]
    assert m.slots[0].worker == 1, "the old one stays until the new one is ready"
    answer = m.bring_up(2)
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1)]
    assert reports(answer) == ["worker.ready", "worker.recycled"]
    assert "it has run 1 tasks (max_tasks)" in of(actions.Report, answer)[1].reason
    assert m.slots[0].worker == 2
    m.exit(1, code=0)
    assert (m.slots[0].recycled, m.slots[0].restarts, m.slots[0].lost) == (1, 0, {})
    assert m.fleet.pools["p"].counters.recycled == 1
    assert m.slots[0].failures == 0
    assert m.slots[0].tasks_done == 1


def test_nobody_is_recycled_unless_it_is_asked_for(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    for number in range(50):
        assert spawned(run_one(m, f"t{number}")) == []
    assert m.wait(100 * 3600 * SECOND_NS) == []


def test_a_worker_that_is_old_is_recycled(muster: type[Muster]) -> None:
    m = muster(max_age_ns=100 * SECOND_NS)
    m.start()
    assert spawned(m.wait(79 * SECOND_NS)) == []
    assert spawned(m.wait(26 * SECOND_NS)) == [2]
    answer = m.bring_up(2)
    assert "old (max_age)" in of(actions.Report, answer)[1].reason


def test_a_worker_is_worn_a_little_below_the_limits_of_its_pool(muster: type[Muster]) -> None:
    m = muster(size=500, max_tasks=1000)
    m.start()
    limit_factor = [slot.limit_factor for slot in m.slots]
    assert max(limit_factor) <= 1
    assert min(limit_factor) >= 1 - JITTER
    assert len({round(each, 3) for each in limit_factor}) > 100


def test_workers_started_together_are_not_recycled_together(muster: type[Muster]) -> None:
    m = muster(size=5, max_age_ns=1000 * SECOND_NS)
    m.start()
    pool = m.fleet.pools["p"]
    times = []
    while len(times) < 5:
        for action in m.wait(SECOND_NS):
            if isinstance(action, actions.SpawnWorker):
                times.append(m.now_ns)
                assert pool.successor is not None
                old = next(slot for slot in m.slots if slot.index == pool.successor.index)
                m.bring_up(action.worker)
                m.exit(old.worker, code=0)
        assert m.now_ns < 2000 * 1000 * SECOND_NS
    assert max(times) - min(times) > 10 * SECOND_NS


def test_only_one_of_a_pool_is_recycled_at_a_time(muster: type[Muster]) -> None:
    m = muster(size=3, max_age_ns=100 * SECOND_NS)
    m.start()
    answer = m.wait(80 * SECOND_NS)
    while not spawned(answer):
        answer = m.wait(SECOND_NS)
    assert spawned(answer) == [4]
    assert spawned(m.bring_up(4)) == []
    old = m.fleet.pools["p"].leaving.worker
    assert spawned(m.wait(25 * SECOND_NS)) == [], "the old one has not gone yet"
    assert spawned(m.exit(old, code=0)) == [5]


# -- what runs --------------------------------------------------------------------------------


def test_the_old_worker_ends_its_task_in_its_own_time(muster: type[Muster]) -> None:
    m = muster(max_age_ns=10 * SECOND_NS, task_timeout_ns=1000 * SECOND_NS)
    m.start()
    (given,) = of(actions.AssignLeases, m.submit(TaskSpec("long", "p.x", b"")))
    (successor,) = spawned(m.wait(11 * SECOND_NS))
    m.bring_up(successor)
    answer = m.wait(900 * SECOND_NS)
    assert of(actions.TerminateWorker, answer) == []
    assert of(actions.KillWorker, answer) == []
    status = pool_status(m.fleet.pools["p"], m.now_ns)
    assert [(each.name, each.state) for each in status.leaving] == [("p/0", "DRAINING")]
    assert status.leaving[0].task_id == "long"
    answer = m.complete(1, given.leases[0].lease)
    assert of(actions.Persist, answer)[0].finished[0].outcome.attempts == 1
    m.exit(1, code=0)
    assert m.fleet.pools["p"].leaving is None


def test_new_tasks_go_to_the_successor(muster: type[Muster]) -> None:
    m = muster(max_tasks=1)
    m.start()
    m.bring_up(wear_out(m))
    (given,) = of(actions.AssignLeases, m.submit(TaskSpec("next", "p.x", b"")))
    assert given.worker == 2


def test_no_worker_runs_more_than_max_tasks_while_another_is_on_its_way(
    muster: type[Muster],
) -> None:
    m = muster(max_tasks=1)
    m.start()
    m.learn_tiny()  # one task wears the worker out
    answer = m.submit(*[TaskSpec(f"t{n}", "p.x", b"") for n in range(40)])
    assert of(actions.AssignLeases, answer) == []
    (given,) = of(actions.AssignLeases, m.bring_up(2))
    assert (given.worker, len(given.leases)) == (2, 1), "not a whole window"


def test_a_window_is_no_larger_than_what_is_left_of_max_tasks(muster: type[Muster]) -> None:
    m = muster(max_tasks=10)
    m.start()
    m.learn_tiny()
    (given,) = of(
        actions.AssignLeases, m.submit(*[TaskSpec(f"t{n}", "p.x", b"") for n in range(40)])
    )
    assert len(given.leases) == 9


def test_tasks_of_an_old_worker_that_dies_on_its_way_out_count_as_crashed(
    muster: type[Muster],
) -> None:
    m = muster(max_age_ns=10 * SECOND_NS)
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    m.bring_up(spawned(m.wait(11 * SECOND_NS))[0])
    answer = m.exit(1, lease=1)
    (given,) = of(actions.AssignLeases, answer)
    assert given.worker == 2
    assert m.fleet.tasks["t"].crashes == 1
    assert m.slots[0].lost == {}, "it was on its way out"


# -- what goes wrong --------------------------------------------------------------------------


def test_a_successor_that_fails_leaves_the_old_worker_at_work(muster: type[Muster]) -> None:
    m = muster(max_tasks=1)
    m.start()
    answer = m.exit(wear_out(m), code=1)
    assert reports(answer) == ["worker.not_recycled"]
    assert m.slots[0].state == "RUNNING"
    assert m.slots[0].failures == 0
    (given,) = of(actions.AssignLeases, m.submit(TaskSpec("more", "p.x", b"")))
    assert given.worker == 1, "rather one task too many than none"
    assert spawned(m.wait(SECOND_NS - 1)) == []
    assert spawned(m.wait(1)) == [3], "after a pause it is tried again"
    assert spawned(m.exit(3, code=1) + m.wait(2 * SECOND_NS - 1)) == [], "a longer one"
    assert spawned(m.wait(1)) == [4]
    m.bring_up(4)
    m.complete(1, given.leases[0].lease)
    m.exit(1, code=0)
    assert m.slots[0].worker == 4


def test_a_successor_that_hangs_is_killed_and_tried_again(muster: type[Muster]) -> None:
    m = muster(max_tasks=1, start_timeout_ns=SECOND_NS)
    m.start()
    successor = wear_out(m)
    m.tell(events.WorkerForked(successor, 100))
    answer = m.wait(SECOND_NS)
    assert of(actions.KillWorker, answer) == [actions.KillWorker(successor, dump=True)]
    assert reports(m.exit(successor, code=-9)) == ["worker.not_recycled"]


def test_a_fork_server_that_does_not_fork_the_successor_is_replaced(muster: type[Muster]) -> None:
    m = muster(max_tasks=1, start_timeout_ns=SECOND_NS)
    m.start()
    wear_out(m)
    answer = m.wait(SECOND_NS)
    assert of(actions.StopForkServer, answer) == [actions.StopForkServer("p")]
    assert m.fleet.pools["p"].successor is None
    assert spawned(m.tell(events.ForkServerReady("p", ()))) == []
    assert spawned(m.wait(SECOND_NS)) == [3]


def test_a_successor_takes_over_also_when_the_old_worker_has_died_meanwhile(
    muster: type[Muster],
) -> None:
    m = muster(max_tasks=1)
    m.start()
    successor = wear_out(m)
    assert spawned(m.exit(1)) == [3], "the slot is restarted as ever"
    answer = m.bring_up(successor)
    assert m.slots[0].worker == successor
    assert of(actions.TerminateWorker, answer) == [actions.TerminateWorker(3)]
    m.exit(3, code=-15)
    assert len(m.slots) == 1
    assert m.slots[0].lost == {"signal": 1}


# -- what people ask for ----------------------------------------------------------------------


def test_a_stop_takes_the_successor_along(muster: type[Muster]) -> None:
    m = muster(max_tasks=1)
    m.start()
    successor = wear_out(m)
    answer = m.tell(events.StopRequested(ALL))
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1)]
    assert of(actions.TerminateWorker, answer) == [actions.TerminateWorker(successor)]
    m.tell(events.WorkerForked(successor, 100))
    m.tell(events.WorkerReady(successor))
    m.exit(1, code=0)
    m.exit(successor, code=-15)
    assert m.slots[0].state == "STOPPED"
    assert m.fleet.pools["p"].successor is None
    assert m.slots[0].recycled == 0


def test_a_smaller_pool_needs_no_successor(muster: type[Muster]) -> None:
    m = muster(max_tasks=1)
    m.start()
    successor = wear_out(m)
    m.tell(events.ScaleRequested("p", 0))
    m.exit(1, code=0)
    m.exit(successor, code=-15)
    assert m.slots == []


def test_a_shutdown_waits_for_the_old_and_the_new(muster: type[Muster]) -> None:
    m = muster(max_age_ns=10 * SECOND_NS)
    m.start()
    (given,) = of(actions.AssignLeases, m.submit(TaskSpec("t", "p.x", b"")))
    m.bring_up(spawned(m.wait(11 * SECOND_NS))[0])
    answer = m.tell(events.ShutdownRequested("asked"))
    assert of(actions.StopWorker, answer) == [actions.StopWorker(2)]
    assert of(actions.RunCleanup, m.exit(2, code=0)) == []
    m.complete(1, given.leases[0].lease)
    assert len(of(actions.RunCleanup, m.exit(1, code=0))) == 1


def test_a_pause_of_the_slot_holds_for_its_successor(muster: type[Muster]) -> None:
    m = muster(max_tasks=1)
    m.start()
    successor = wear_out(m)
    m.tell(events.PauseRequested((("p", 0),)))
    m.bring_up(successor)
    assert of(actions.AssignLeases, m.submit(TaskSpec("waits", "p.x", b""))) == []
    answer = m.tell(events.ResumeRequested((("p", 0),)))
    assert of(actions.AssignLeases, answer)[0].worker == successor


def test_where_memory_is_tight_the_old_worker_ends_before_the_new_one_starts(
    muster: type[Muster],
) -> None:
    m = muster(size=2, max_tasks=1)
    m.start()
    pool = m.fleet.pools["p"]
    pool.limit = 2
    answer = run_one(m, "a")
    assert spawned(answer) == []
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1)]
    assert reports(answer) == ["worker.recycled"]
    assert "there is no room for two" in of(actions.Report, answer)[0].reason
    assert spawned(run_one(m, "b", worker=2)) == [], "the other has to wait"
    assert spawned(m.exit(1, code=0)) == [3]
    assert of(actions.StopWorker, m.bring_up(3)) == [actions.StopWorker(2)], "now it is its turn"
    assert [slot.restarts for slot in m.slots] == [0, 0]


# -- memory -----------------------------------------------------------------------------------

MEGABYTE = 1024 * 1024


def weigh(m: Any, used: float = 0.1, **workers: int) -> list[Any]:
    """Tell a sample of the memory: the share in use, and megabytes of workers w1, w2, ..."""
    total = 100_000 * MEGABYTE
    source = events.MemorySource("the machine's memory", total, int(used * total))
    sizes = {int(name[1:]): size * MEGABYTE for name, size in workers.items()}
    return m.tell(events.MemorySampled((source,), workers=sizes))


def test_a_worker_that_takes_too_much_memory_is_recycled(muster: type[Muster]) -> None:
    m = muster(size=2, max_memory_bytes=400 * MEGABYTE)
    m.start()
    run_one(m, "a")
    run_one(m, "b", worker=2)
    assert spawned(weigh(m, w1=300, w2=319)) == []
    assert spawned(weigh(m, w1=300, w2=401)) == [3]
    answer = m.bring_up(3)
    assert of(actions.StopWorker, answer) == [actions.StopWorker(2)]
    assert "it takes 401 MiB (max_memory)" in of(actions.Report, answer)[1].reason


def test_a_worker_that_was_too_big_from_the_start_is_not_recycled_for_nothing(
    muster: type[Muster],
) -> None:
    m = muster(max_memory_bytes=400 * MEGABYTE)
    m.start()
    assert spawned(weigh(m, w1=800)) == [], "the next one would be as big"
    run_one(m, "a")
    assert spawned(weigh(m, w1=800)) == [2]


def test_where_a_second_worker_does_not_fit_the_old_one_ends_first(muster: type[Muster]) -> None:
    m = muster(size=2, max_memory_bytes=400 * MEGABYTE)
    m.start()
    run_one(m, "a")
    answer = weigh(m, used=0.699, w1=500, w2=100)
    assert spawned(answer) == []
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1)]
    assert spawned(m.exit(1, code=0)) == [3], "what it had is free"
