"""Workers that run several tasks at once: which worker gets which task, and which is blamed."""

from typing import Any

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import CRASH, TIMEOUT, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.tasks.leases import (
    BOARD_AGAIN_NS,
    CANCEL_GRACE_NS,
    HARD_GRACE_NS,
    STALL_NS,
)
from support.core import Muster, of


def spec(id_: str, **fields: Any) -> TaskSpec:
    return TaskSpec(id_, "p.x", b"", **fields)


def specs(count: int, **fields: Any) -> list[TaskSpec]:
    return [spec(f"t{number}", **fields) for number in range(count)]


def leased(answer: list[Any]) -> list[tuple[int, str]]:
    """Return (worker, task id) for each lease."""
    given = of(actions.AssignLeases, answer)
    return [(each.worker, lease.id) for each in given for lease in each.leases]


def wide(muster: type[Muster], *widths: int, **policy: Any) -> Any:
    """Return a fleet whose workers, numbered from 1, run `widths` tasks at once."""
    m = muster(size=len(widths), **policy)
    m.bring_up = lambda worker: [
        *m.tell(events.WorkerForked(worker, 5000 + worker)),
        *m.tell(events.WorkerReady(worker, widths[(worker - 1) % len(widths)])),
    ]
    m.start()
    return m


def held(m: Any, slot: int = 0) -> dict[str, int]:
    return {task.spec.id: lease for lease, task in m.slots[slot].leases.items()}


def die(m: Any, worker: int, *leases: int, code: int = -11) -> list[Any]:
    lease, *beside = leases
    return m.tell(events.WorkerExited(worker, code, lease, beside=tuple(beside)))


def look(m: Any, worker: int, began: dict[int, int]) -> list[Any]:
    (lease, since_ns), *beside = began.items()
    return m.tell(events.BoardRead(worker, lease, since_ns, beside=tuple(beside)))


def test_a_worker_is_given_as_many_tasks_as_it_runs_and_no_more(muster: type[Muster]) -> None:
    m = wide(muster, 3)
    assert leased(m.submit(*specs(5))) == [(1, "t0"), (1, "t1"), (1, "t2")]
    assert leased(m.complete(1, 2, run_ns=SECOND_NS)) == [(1, "t3")]


def test_the_worker_with_the_least_to_do_comes_first(muster: type[Muster]) -> None:
    m = wide(muster, 4, 4)
    assert leased(m.submit(*specs(4))) == [(1, "t0"), (2, "t1"), (1, "t2"), (2, "t3")]
    m.complete(1, 1, 3, run_ns=SECOND_NS)
    assert leased(m.submit(spec("a"), spec("b"))) == [(1, "a"), (1, "b")]


def test_tiny_tasks_do_not_wait_in_such_a_worker(muster: type[Muster]) -> None:
    m = wide(muster, 2)
    m.learn_tiny()
    assert len(leased(m.submit(*specs(10)))) == 2
    assert not of(actions.RecallLeases, m.wait(10 * STALL_NS))


def test_all_that_run_are_noted_on_disk_as_begun(muster: type[Muster]) -> None:
    m = wide(muster, 2)
    m.submit(*specs(2))
    answer = m.wait(STALL_NS)
    begun = [change.seq for page in of(actions.Persist, answer) for change in page.changed]
    assert len(begun) == 2


def test_max_tasks_counts_all_that_run_at_once(muster: type[Muster]) -> None:
    m = wide(muster, 4, max_tasks=3)
    assert len(leased(m.submit(*specs(9)))) == 3


def test_of_those_in_a_worker_killed_for_one_only_that_one_has_failed(muster: type[Muster]) -> None:
    m = wide(muster, 3, max_retries=0)
    m.submit(spec("slow", timeout_ns=SECOND_NS), *specs(2))
    leases = held(m)
    assert of(actions.ReadBoard, m.wait(SECOND_NS + HARD_GRACE_NS))
    began = dict.fromkeys(leases.values(), m.now_ns - SECOND_NS - HARD_GRACE_NS)
    answer = look(m, 1, began)
    assert of(actions.KillWorker, answer) == [actions.KillWorker(1, dump=True)]
    answer = die(m, 1, *leases.values(), code=-9)
    (outcome,) = [each for told in of(actions.Deliver, answer) for each in told.outcomes]
    assert (outcome.id, outcome.failure.kind) == ("slow", TIMEOUT)
    for task in m.fleet.tasks.values():
        assert (task.attempt, task.crashes, task.interruptions) == (0, 0, 1), task


def test_a_deadline_counts_from_when_its_own_lease_began(muster: type[Muster]) -> None:
    m = wide(muster, 2)
    m.submit(*specs(2, timeout_ns=SECOND_NS))
    first, second = held(m).values()
    m.wait(SECOND_NS + HARD_GRACE_NS)
    began = {first: m.now_ns - HARD_GRACE_NS, second: m.now_ns}
    assert not of(actions.KillWorker, look(m, 1, began))
    assert of(actions.ReadBoard, m.wait(SECOND_NS)), "the first of them is looked at next"
    assert of(actions.KillWorker, look(m, 1, began))
    assert m.slots[0].killed_lease == first


def test_a_result_on_its_way_is_no_reason_to_kill(muster: type[Muster]) -> None:
    m = wide(muster, 2)
    m.submit(spec("done", timeout_ns=SECOND_NS), spec("long", timeout_ns=60 * SECOND_NS))
    long = held(m)["long"]
    m.wait(SECOND_NS + HARD_GRACE_NS)
    for _ in range(20):
        assert not of(actions.KillWorker, look(m, 1, {long: m.now_ns - SECOND_NS}))
        assert of(actions.ReadBoard, m.wait(BOARD_AGAIN_NS))


def test_nobody_is_blamed_for_a_crash_of_a_worker_that_ran_several(muster: type[Muster]) -> None:
    m = wide(muster, 3, max_crashes=1)
    m.submit(*specs(3))
    die(m, 1, *held(m).values())
    assert len(m.fleet.tasks) == 3
    for task in m.fleet.tasks.values():
        assert (task.crashes, task.attempt) == (0, 1 if task.lease else 0), task


def test_after_such_a_crash_each_of_them_runs_alone(muster: type[Muster]) -> None:
    m = wide(muster, 3, 3, max_crashes=1)
    m.submit(*specs(3))
    assert list(held(m)) == ["t0", "t2"]
    answer = die(m, 1, *held(m, 0).values())
    assert leased(answer) == [], "the other worker is not idle"
    (restarted,) = [each.worker for each in of(actions.SpawnWorker, answer)]
    assert leased(m.bring_up(restarted)) == [(restarted, "t0")]
    assert leased(m.submit(spec("new"))) == [], "nothing beside it, and nothing before t2"
    assert leased(m.complete(2, *held(m, 1).values(), run_ns=SECOND_NS)) == [(2, "t2")]
    answer = m.complete(restarted, *held(m, 0).values(), run_ns=SECOND_NS)
    assert leased(answer) == [(restarted, "new")]


def test_alone_the_one_that_crashes_is_found_and_the_others_end_well(muster: type[Muster]) -> None:
    m = wide(muster, 2, max_crashes=1)
    m.submit(spec("poison"), spec("innocent"))
    answer = die(m, 1, *held(m).values())
    worker = of(actions.SpawnWorker, answer)[0].worker
    assert leased(m.bring_up(worker)) == [(worker, "poison")]
    answer = die(m, worker, *held(m).values())
    (outcome,) = [each for told in of(actions.Deliver, answer) for each in told.outcomes]
    assert (outcome.id, outcome.failure.kind) == ("poison", CRASH)
    assert list(m.fleet.tasks) == ["innocent"]


def test_the_others_of_a_worker_that_was_stopped_may_share_again(muster: type[Muster]) -> None:
    m = wide(muster, 2)
    m.submit(*specs(2))
    leases = held(m)
    m.tell(events.RestartRequested((("p", 0),)))
    m.wait(60 * SECOND_NS)
    answer = die(m, 1, *leases.values(), code=-9)
    worker = of(actions.SpawnWorker, answer)[0].worker
    assert leased(m.bring_up(worker)) == [(worker, "t0"), (worker, "t1")]


def test_a_cancelled_task_that_does_not_stop_takes_no_other_along(muster: type[Muster]) -> None:
    m = wide(muster, 2)
    m.submit(*specs(2))
    leases = held(m)
    m.tell(events.CancelRequested(["t0"]))
    assert of(actions.KillWorker, m.wait(CANCEL_GRACE_NS))
    answer = die(m, 1, *leases.values(), code=-9)
    assert [(each.id, each.state) for d in of(actions.Deliver, answer) for each in d.outcomes] == [
        ("t0", "cancelled")
    ]
    assert m.fleet.tasks["t1"].interruptions == 1


def test_a_worker_of_before_a_reload_is_given_one_at_a_time(muster: type[Muster]) -> None:
    m = wide(muster, 1, 4)
    m.learn_tiny()
    given = [worker for worker, _ in leased(m.submit(*specs(20)))]
    assert (given.count(1), given.count(2)) == (1, 4)
