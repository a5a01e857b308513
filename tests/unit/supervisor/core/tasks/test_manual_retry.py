"""Manual retries of finished tasks, and the errors that attempts leave behind."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    CANCEL,
    CANCELLED,
    CRASH,
    ERROR,
    EXPIRED,
    FAILED,
    POISON,
    SUCCEEDED,
    TIMEOUT,
    Completion,
    Failure,
    TaskSpec,
)
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.tasks.manual_retry import (
    NO_SUCH_TASK,
    NOT_ENDED,
    NOT_FAILED,
    NOT_KNOWN,
)
from support.core import Muster, of

WALL = 10**18
ASKER = b"c1"


def task(id_: str, **fields: Any) -> TaskSpec:
    return TaskSpec(id_, "p.x", b"", **fields)


@pytest.fixture
def fleet(muster: type[Muster]) -> Any:
    fleet = muster(max_retries=1)
    fleet.start()
    return fleet


def ask(fleet: Any, *ids: str) -> actions.FindEnded:
    (find,) = of(actions.FindEnded, fleet.tell(events.RetryRequested(ASKER, 7, list(ids), WALL)))
    return find


def retry(fleet: Any, *ended: events.EndedTask, ids: tuple[str, ...] = ()) -> list[Any]:
    find = ask(fleet, *(ids or [each.spec.id for each in ended]))
    answer: list[Any] = fleet.tell(
        events.EndedFound(find.requested, find.ids, list(ended), find.rejected)
    )
    return answer


def codes(answer: list[Any]) -> dict[str, str]:
    (ack,) = of(actions.Acknowledge, answer)
    assert (ack.peer, ack.request) == (ASKER, 7)
    return {each.id: each.code for each in ack.rejected}


@pytest.mark.parametrize("state", [FAILED, CANCELLED, EXPIRED])
def test_what_did_not_succeed_becomes_a_new_task_under_its_id(fleet: Any, state: str) -> None:
    answer = retry(fleet, events.EndedTask(3, task("a"), state))
    (page,) = of(actions.Persist, answer)
    (new,) = page.added
    assert (new.spec, new.submitted_wall_ns) == (task("a"), WALL)
    assert page.reopened == [actions.ReopenRecord("a", 3, new.seq)]
    assert new.seq != 3
    assert codes(answer) == {}
    (leases,) = of(actions.AssignLeases, answer)
    assert [(lease.id, lease.attempt) for lease in leases.leases] == [("a", 1)]


def test_it_is_acknowledged_after_the_commit(fleet: Any) -> None:
    fleet.disk_works = False
    assert not of(actions.Acknowledge, retry(fleet, events.EndedTask(3, task("a"), FAILED)))
    assert codes(fleet.commit()) == {}


def test_whoever_watches_the_id_gets_the_new_result(fleet: Any) -> None:
    answer = retry(fleet, events.EndedTask(3, task("a"), FAILED))
    fleet.tell(events.TasksWatched(b"client", ["a"]))
    lease = of(actions.AssignLeases, answer)[0].leases[0].lease
    answer = fleet.tell(events.LeasesCompleted(1, [Completion(lease, 1000, b"new", None)]))
    (delivery,) = of(actions.Deliver, answer)
    assert delivery.peer == b"client"
    assert [(each.id, each.value) for each in delivery.outcomes] == [("a", b"new")]


def test_what_cannot_be_retried_is_named_with_its_reason(fleet: Any) -> None:
    fleet.submit(task("live"))
    answer = retry(
        fleet,
        events.EndedTask(2, task("good"), SUCCEEDED),
        events.EndedTask(3, TaskSpec("gone", "nowhere.x", b""), FAILED),
        ids=("live", "good", "gone", "none"),
    )
    assert codes(answer) == {
        "live": NOT_ENDED,
        "good": NOT_FAILED,
        "gone": "UnknownTask",
        "none": NO_SUCH_TASK,
    }
    assert not of(actions.Persist, answer)


def test_no_room_and_a_shutdown_refuse_a_retry_like_a_submit(muster: type[Muster]) -> None:
    fleet = muster(queue_size=1, size=0)
    fleet.start()
    fleet.submit(task("other"))
    assert codes(retry(fleet, events.EndedTask(3, task("a"), FAILED))) == {"a": "QueueFull"}
    fleet.tell(events.ShutdownRequested("now"))
    assert codes(retry(fleet, events.EndedTask(3, task("a"), FAILED))) == {"a": "ShuttingDown"}


def test_a_retry_in_bulk_leaves_room_and_counts_no_refusals(muster: type[Muster]) -> None:
    fleet = muster(queue_size=8, size=0)
    fleet.start()
    ids = [f"t{number}" for number in range(8)]
    requested = events.RetryRequested(ASKER, 7, ids, WALL, in_bulk=True)
    (find,) = of(actions.FindEnded, fleet.tell(requested))
    ended = [events.EndedTask(n, task(id_), FAILED) for n, id_ in enumerate(find.ids, 1)]
    answer = fleet.tell(events.EndedFound(find.requested, find.ids, ended, find.rejected))
    assert codes(answer) == {"t6": "QueueFull", "t7": "QueueFull"}
    fleet.submit(task("of-a-program"))
    assert "of-a-program" in fleet.fleet.tasks
    assert fleet.fleet.pools["p"].counters.rejected == 0


def test_a_queue_of_one_task_takes_a_retry_in_bulk(muster: type[Muster]) -> None:
    fleet = muster(queue_size=1, size=0)
    fleet.start()
    requested = events.RetryRequested(ASKER, 7, ["a"], WALL, in_bulk=True)
    (find,) = of(actions.FindEnded, fleet.tell(requested))
    ended = [events.EndedTask(3, task("a"), FAILED)]
    assert codes(fleet.tell(events.EndedFound(find.requested, find.ids, ended, []))) == {}


def test_a_task_that_was_retried_meanwhile_is_not_retried_twice(fleet: Any) -> None:
    ended = events.EndedTask(3, task("a"), FAILED)
    late = ask(fleet, "a")
    answer = retry(fleet, ended)
    again = events.EndedFound(late.requested, late.ids, [ended], late.rejected)
    assert codes(fleet.tell(again)) == {"a": NOT_ENDED}
    # A late answer about the first life counts for nothing even after the second life.
    late = ask(fleet, "b")
    other = events.EndedTask(4, task("b"), FAILED)
    lease = of(actions.AssignLeases, answer)[0].leases[0].lease
    fleet.tell(events.LeasesCompleted(1, [Completion(lease, 1000, b"", None)]))
    answer = retry(fleet, other)
    lease = of(actions.AssignLeases, answer)[0].leases[0].lease
    fleet.tell(events.LeasesCompleted(1, [Completion(lease, 1000, b"good", None)]))
    assert "b" not in fleet.fleet.tasks
    again = events.EndedFound(late.requested, late.ids, [other], late.rejected)
    answer = fleet.tell(again)
    assert codes(answer) == {"b": NOT_ENDED}
    assert not of(actions.Persist, answer)
    assert not fleet.fleet._state.asked


def test_a_cancel_right_behind_a_retry_is_kept(fleet: Any) -> None:
    find = ask(fleet, "a")
    fleet.tell(events.CancelRequested(["a"]))
    ended = [events.EndedTask(3, task("a"), FAILED)]
    answer = fleet.tell(events.EndedFound(find.requested, find.ids, ended, find.rejected))
    ends = [final for page in of(actions.Persist, answer) for final in page.finished]
    assert [final.outcome.state for final in ends] == [CANCELLED]


def test_a_retry_runs_whatever_is_remembered_of_its_key(fleet: Any) -> None:
    keyed = task("a", key="k", cache_ns=3600 * SECOND_NS, debounce_ns=3600 * SECOND_NS)
    other = task("b", key="k")
    lease = of(actions.AssignLeases, fleet.submit(other))[0].leases[0].lease
    fleet.tell(events.LeasesCompleted(1, [Completion(lease, 1000, b"old", None)]))
    answer = retry(fleet, events.EndedTask(9, keyed, FAILED))
    assert [lease.id for lease in of(actions.AssignLeases, answer)[0].leases] == ["a"]


# -- the errors of attempts -------------------------------------------------------------------


def attempts(answer: list[Any]) -> list[actions.AttemptRecord]:
    return [each for page in of(actions.Persist, answer) for each in page.failed]


def lease_of(answer: list[Any]) -> int:
    return int(of(actions.AssignLeases, answer)[0].leases[0].lease)


def test_each_failed_attempt_leaves_its_error_and_its_worker(fleet: Any) -> None:
    lease = lease_of(fleet.submit(task("a")))
    first = Failure(ERROR, "ValueError", "one")
    answer = fleet.tell(events.LeasesCompleted(1, [Completion(lease, 1000, b"", first, 0)]))
    assert attempts(answer) == [actions.AttemptRecord(1, 1, 1, "p/0", first)]
    lease = lease_of(answer + fleet.wait(SECOND_NS))
    second = Failure(ERROR, "ValueError", "two")
    answer = fleet.tell(events.LeasesCompleted(1, [Completion(lease, 1000, b"", second, 0)]))
    assert attempts(answer) == [actions.AttemptRecord(1, 2, 2, "p/0", second)]
    (page,) = of(actions.Persist, answer)
    assert page.finished[0].outcome.failure == second


def test_an_interruption_is_no_failed_attempt(fleet: Any) -> None:
    lease = lease_of(fleet.submit(task("a")))
    stopped = Completion(lease, 1000, b"", Failure(CANCEL))
    assert attempts(fleet.tell(events.LeasesCompleted(1, [stopped]))) == []


def test_a_crash_leaves_how_the_worker_ended_and_a_poison_task_is_named(fleet: Any) -> None:
    lease = lease_of(fleet.submit(task("a")))
    ordinals = []
    for worker in (1, 2, 3):
        answer = fleet.tell(events.WorkerExited(worker, -11, lease))
        (attempt,) = attempts(answer)
        ordinals.append(attempt.ordinal)
        assert (attempt.failure.kind, attempt.worker) == (CRASH, "p/0")
        assert "ended by signal 11" in attempt.failure.message
        ends = [final for page in of(actions.Persist, answer) for final in page.finished]
        if ends:
            break
        answer += fleet.wait(10 * SECOND_NS)
        answer += fleet.bring_up(worker + 1)
        lease = lease_of(answer)
    assert ordinals == [1, 2, 3]
    (end,) = ends
    assert end.outcome.failure.type == POISON
    assert "quarantined" in end.outcome.failure.message


def test_a_worker_killed_at_the_timeout_leaves_that(fleet: Any) -> None:
    lease = lease_of(fleet.submit(task("a", timeout_ns=SECOND_NS)))
    fleet.wait(10 * SECOND_NS)
    fleet.tell(events.BoardRead(1, lease, 1000 * SECOND_NS))
    (attempt,) = attempts(fleet.tell(events.WorkerExited(1, -9, lease)))
    assert (attempt.failure.kind, attempt.attempt) == (TIMEOUT, 1)


def test_a_death_of_the_daemon_is_an_error_of_the_task_that_ran(fleet: Any) -> None:
    old = events.Recovered(5, task("a"), WALL, 0, 0, 1, 0, 0, True)
    (attempt,) = attempts(fleet.tell(events.TasksRecovered([old])))
    assert (attempt.seq, attempt.ordinal, attempt.worker) == (5, 1, "")
    assert "the daemon died" in attempt.failure.message


def test_all_are_refused_where_the_store_cannot_be_read(muster: type[Muster]) -> None:
    fleet = muster()
    find = ask(fleet, "a", "b")
    answer = fleet.tell(events.EndedUnknown(find.requested, find.ids, find.rejected))
    assert codes(answer) == {"a": NOT_KNOWN, "b": NOT_KNOWN}
    assert fleet.fleet._state.asked == {}
