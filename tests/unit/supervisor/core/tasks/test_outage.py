"""Submits while the store cannot write: refused or stored, never both."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import QUEUE_FULL, SUCCEEDED, Completion, Rejection, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.tasks.bulk import RUN_MIN
from musterd.supervisor.core.tasks.outage import PATIENCE_NS
from musterd.supervisor.core.tasks.refusals import STORE_FAILS_RETRY_NS
from support.core import Muster, of

FULL = events.StoreFailing("the store /x/store.db cannot be used: disk is full")


def task(id_: str, **fields: Any) -> TaskSpec:
    return TaskSpec(id_, "p.x", b"", **fields)


def rejections(answer: list[Any]) -> list[Rejection]:
    return [each for ack in of(actions.Acknowledge, answer) for each in ack.rejected]


@pytest.fixture
def fleet(muster: type[Muster]) -> Any:
    """Return a fleet with one worker, up and paused, and a disk that does not answer."""
    fleet = muster()
    fleet.start()
    fleet.tell(events.PauseRequested((("p", -1),)))
    fleet.disk_works = False
    return fleet


@pytest.fixture
def working(muster: type[Muster]) -> Any:
    """Return a fleet with one worker at work, and a disk that does not answer."""
    fleet = muster()
    fleet.start()
    fleet.disk_works = False
    return fleet


def test_what_a_worker_has_had_is_not_withdrawn_and_ends_when_the_disk_works(working: Any) -> None:
    answer = working.submit(task("runs"), task("queued"))
    (leases,) = of(actions.AssignLeases, answer)
    assert [lease.id for lease in leases.leases] == ["runs"]
    working.tell(FULL)
    answer = working.complete(1, leases.leases[0].lease)
    assert not of(actions.AssignLeases, answer)  # the queued task goes to no worker
    (withdraw,) = of(actions.Withdraw, working.wait(PATIENCE_NS))
    assert withdraw.seqs == [2]
    answer = working.tell(events.TasksWithdrawn([2]))
    assert not of(actions.Acknowledge, answer)  # the same submit has `runs`, not on disk yet
    working.tell(events.StoreRecovered())
    answer = working.commit()
    (ack,) = of(actions.Acknowledge, answer)
    assert [each.id for each in ack.rejected] == ["queued"]
    (told,) = of(actions.Deliver, answer)
    assert [(each.id, each.state) for each in told.outcomes] == [("runs", SUCCEEDED)]


def test_what_came_back_from_a_worker_is_not_withdrawn(working: Any) -> None:
    working.submit(task("runs"))
    working.tell(FULL)
    working.exit(1, lease=1)
    assert not of(actions.Withdraw, working.wait(PATIENCE_NS))


@pytest.mark.parametrize("count", [2, 2 * RUN_MIN])  # one by one, and as one run
def test_a_submit_is_refused_at_once_with_the_reason_and_a_retry_after(
    fleet: Any, count: int
) -> None:
    fleet.tell(FULL)
    ids = [str(number) for number in range(count)]
    answer = fleet.submit(*map(task, ids))
    assert not of(actions.Persist, answer)
    refused = rejections(answer)
    assert [each.id for each in refused] == ids
    assert {(each.code, each.retry_after_ns) for each in refused} == {
        (QUEUE_FULL, STORE_FAILS_RETRY_NS)
    }
    assert all("disk is full" in each.message for each in refused)
    assert not fleet.fleet.tasks


def test_a_refusal_does_not_wait_for_the_disk(fleet: Any) -> None:
    fleet.submit(task("a"))  # waits for the disk
    (rejection,) = rejections(fleet.submit(TaskSpec("b", "nowhere.x", b"")))
    assert rejection.id == "b"


def test_submits_are_accepted_again_after_the_recovery(fleet: Any) -> None:
    fleet.tell(FULL)
    fleet.tell(events.StoreRecovered())
    fleet.disk_works = True
    (ack,) = of(actions.Acknowledge, fleet.submit(task("a")))
    assert ack.rejected == []


def test_what_was_on_its_way_waits_a_while_and_is_acknowledged_if_it_gets_there(fleet: Any) -> None:
    fleet.submit(task("a"))
    fleet.tell(FULL)
    assert not of(actions.Withdraw, fleet.wait(PATIENCE_NS - 1))
    fleet.tell(events.StoreRecovered())
    assert not of(actions.Withdraw, fleet.wait(10 * PATIENCE_NS))
    (ack,) = of(actions.Acknowledge, fleet.commit())
    assert ack.rejected == []


def test_after_that_it_is_withdrawn_and_refused(fleet: Any) -> None:
    fleet.submit(task("a"), task("b"))
    fleet.tell(FULL)
    (withdraw,) = of(actions.Withdraw, fleet.wait(PATIENCE_NS))
    assert withdraw.seqs == [1, 2]
    assert "a" in fleet.fleet.tasks  # the store has not answered yet
    answer = fleet.tell(events.TasksWithdrawn([1, 2]))
    assert [each.id for each in rejections(answer)] == ["a", "b"]
    assert not fleet.fleet.tasks
    fleet.tell(events.StoreRecovered())
    assert not of(actions.Acknowledge, fleet.commit())  # the client has its answer
    assert fleet.fleet.pools["p"].live == 0
    assert fleet.fleet.pools["p"].counters.submitted == 0


def test_what_the_store_does_not_withdraw_is_acknowledged_and_run(fleet: Any) -> None:
    fleet.submit(task("a"))
    fleet.submit(task("b"))
    fleet.tell(FULL)
    fleet.wait(PATIENCE_NS)
    answer = fleet.tell(events.TasksWithdrawn([2]))
    (ack,) = of(actions.Acknowledge, answer)
    assert (ack.request, [each.id for each in ack.rejected]) == (2, ["b"])
    (ack,) = of(actions.Acknowledge, fleet.tell(events.Persisted(fleet.ticket - 1)))
    assert (ack.request, ack.rejected) == (1, [])
    (leases,) = of(actions.AssignLeases, fleet.tell(events.ResumeRequested((("p", -1),))))
    assert [lease.id for lease in leases.leases] == ["a"]


def test_everyone_who_submitted_a_withdrawn_task_is_told(fleet: Any) -> None:
    fleet.submit(task("a"), peer=b"one")
    fleet.submit(task("a"), task("b"), peer=b"two")
    fleet.tell(events.TasksWatched(b"three", ["a"]))
    fleet.tell(FULL)
    fleet.wait(PATIENCE_NS)
    answer = fleet.tell(events.TasksWithdrawn([1, 2]))
    told = {ack.peer: [each.id for each in ack.rejected] for ack in of(actions.Acknowledge, answer)}
    assert told == {b"one": ["a"], b"two": ["a", "b"]}
    assert actions.LookUp(b"three", ["a"]) in answer


def test_a_request_whose_other_tasks_wait_for_the_disk_is_answered_with_them(fleet: Any) -> None:
    fleet.submit(task("a"), peer=b"one")
    fleet.submit(task("a"), task("b"), peer=b"two")
    fleet.tell(FULL)
    fleet.wait(PATIENCE_NS)
    assert not of(actions.Acknowledge, fleet.tell(events.TasksWithdrawn([2])))
    answer = fleet.commit()
    told = {ack.peer: [each.id for each in ack.rejected] for ack in of(actions.Acknowledge, answer)}
    assert told == {b"one": [], b"two": ["b"]}


def test_a_task_of_the_daemons_own_is_not_withdrawn(fleet: Any) -> None:
    """No client waits for an answer, and a schedule counts on its run."""
    fleet.fleet._intake.run(task("own"), 0)
    fleet.submit(task("a"))
    fleet.tell(FULL)
    (withdraw,) = of(actions.Withdraw, fleet.wait(PATIENCE_NS))
    assert withdraw.seqs == [2]


def test_a_withdrawn_task_does_not_get_the_result_of_its_key(muster: type[Muster]) -> None:
    fleet = muster()
    fleet.start()
    (leases,) = of(actions.AssignLeases, fleet.submit(task("first", key="k")))
    fleet.disk_works = False
    fleet.submit(task("second", key="k"))
    fleet.submit(task("third", key="k"))
    fleet.tell(FULL)
    fleet.wait(PATIENCE_NS)
    done = Completion(leases.leases[0].lease, 1000, b"value", None)
    (page,) = of(actions.Persist, fleet.tell(events.LeasesCompleted(1, [done])))
    assert [final.outcome.id for final in page.finished] == ["first"]
    answer = fleet.tell(events.TasksWithdrawn([3]))
    assert [each.id for each in rejections(answer)] == ["third"]
    answer = fleet.commit()  # the second task got to the disk after all, and runs by itself
    (leases,) = of(actions.AssignLeases, answer)
    assert [lease.id for lease in leases.leases] == ["second"]
    fleet.disk_works = True
    done = Completion(leases.leases[0].lease, 1000, b"value", None)
    answer = fleet.tell(events.LeasesCompleted(1, [done]))
    ends = [final for page in of(actions.Persist, answer) for final in page.finished]
    assert [(final.outcome.id, final.outcome.state) for final in ends] == [("second", SUCCEEDED)]


def test_failing_again_and_again_starts_only_one_wait(fleet: Any) -> None:
    fleet.submit(task("a"))
    for _ in range(4):
        fleet.tell(FULL)
        assert not of(actions.Withdraw, fleet.wait(SECOND_NS))
    assert len(of(actions.Withdraw, fleet.wait(2 * SECOND_NS))) == 1
