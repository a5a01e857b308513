"""Requests of running handlers to the core: progress, states, locks."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import Completion, Failure, ProgressNote, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.actions import (
    AnswerLock,
    AnswerState,
    Fact,
    FindState,
    Persist,
    TellProgress,
)
from musterd.supervisor.core.tasks import handler_requests
from support.core import Muster, of

PEER = b"client"


def running(muster: type[Muster], size: int = 2) -> Any:
    """Return a fleet whose workers 1, 2, ... run the tasks t1, t2, ... under leases 1, 2, ..."""
    m = muster(size=size)
    m.start()
    m.submit(*[TaskSpec(f"t{number + 1}", "p.x", b"") for number in range(size)])
    return m


def lock(m: Any, worker: int, name: str = "l", seconds: float = 0, request: int = 7) -> list[Any]:
    event = events.LockWanted(worker, worker, request, name, int(seconds * SECOND_NS))
    return of(AnswerLock, m.tell(event))


def unlock(m: Any, worker: int, name: str = "l") -> list[Any]:
    return of(AnswerLock, m.tell(events.LockReturned(worker, worker, name)))


TAKEN = [(1, True), (2, True), (3, True)]


def taken(answer: list[Any]) -> list[tuple[int, bool]]:
    return [(each.worker, each.taken) for each in answer]


# -- progress -----------------------------------------------------------------------------------


def test_progress_is_told_to_the_submitter_and_to_watchers(muster: type[Muster]) -> None:
    m = running(muster)
    m.tell(events.TasksWatched(b"other", ["t1"]))
    told = of(TellProgress, m.tell(events.ProgressMade(1, 1, 0.5, "half")))
    assert told == [TellProgress([PEER, b"other"], ProgressNote("t1", 0.5, "half"))]


def test_progress_is_reported_once_a_second_and_always_told(muster: type[Muster]) -> None:
    m = running(muster)
    reports, told = [], 0
    for step in range(25):
        answer = m.tell(events.ProgressMade(1, 1, step / 25, ""))
        reports += [each for each in of(actions.Report, answer) if each.event == "task.progress"]
        told += len(of(TellProgress, answer))
        m.wait(100 * MILLISECOND_NS)
    assert told == 25
    assert [each.reason for each in reports] == ["0%", "40%", "80%"]
    assert {(each.task, each.level) for each in reports} == {("t1", "debug")}


def test_who_watches_later_learns_how_far_it_is(muster: type[Muster]) -> None:
    m = running(muster)
    m.tell(events.ProgressMade(1, 1, 0.25, "a quarter"))
    told = of(TellProgress, m.tell(events.TasksWatched(b"late", ["t1", "t2", "unknown"])))
    assert told == [TellProgress([b"late"], ProgressNote("t1", 0.25, "a quarter"))]


def test_progress_of_a_lease_that_ended_is_late_news(muster: type[Muster]) -> None:
    m = running(muster)
    m.complete(1, 1)
    assert not m.tell(events.ProgressMade(1, 1, 0.5, ""))
    assert not m.tell(events.ProgressMade(9, 1, 0.5, ""))


# -- states -------------------------------------------------------------------------------------


def test_a_save_is_answered_after_its_commit(muster: type[Muster]) -> None:
    m = running(muster)
    m.disk_works = False
    answer = m.tell(events.StateGiven(1, 5, "k", b"v", 9))
    assert [page.facts for page in of(Persist, answer)] == [[Fact("state", "k", b"v", 9)]]
    assert not of(AnswerState, answer)
    assert of(AnswerState, m.commit()) == [AnswerState(1, 5)]


def test_a_load_waits_for_what_was_saved_before_it(muster: type[Muster]) -> None:
    m = running(muster)
    assert m.tell(events.StateWanted(1, 4, "k")) == [FindState(1, 4, "state", "k")]
    m.disk_works = False
    m.tell(events.StateGiven(1, 5, "k", b"v", 0))
    assert not m.tell(events.StateWanted(2, 6, "k"))
    assert of(FindState, m.commit()) == [FindState(2, 6, "state", "k")]


def test_a_success_clears_the_state_with_its_result(muster: type[Muster]) -> None:
    m = running(muster)
    m.disk_works = False
    done = [Completion(1, MILLISECOND_NS, b"", clears="own")]
    (page,) = of(Persist, m.tell(events.LeasesCompleted(1, done)))
    assert [final.spec.id for final in page.finished] == ["t1"]
    assert page.facts == [Fact("state", "own", None)]


def test_a_failure_keeps_the_state(muster: type[Muster]) -> None:
    m = running(muster)
    done = [Completion(1, MILLISECOND_NS, b"", Failure("error"), clears="own")]
    assert all(not page.facts for page in of(Persist, m.tell(events.LeasesCompleted(1, done))))


def test_the_success_of_a_lease_that_is_not_known_clears_nothing(muster: type[Muster]) -> None:
    m = running(muster)
    done = [Completion(77, MILLISECOND_NS, b"", clears="own")]
    assert not of(Persist, m.tell(events.LeasesCompleted(1, done)))


def test_a_worker_that_is_gone_saves_nothing(muster: type[Muster]) -> None:
    m = running(muster)
    m.exit(1, lease=1)
    assert not m.tell(events.StateGiven(1, 5, "k", b"v", 0))
    assert not m.tell(events.StateWanted(1, 5, "k"))


# -- locks --------------------------------------------------------------------------------------


def test_a_lock_goes_to_one_at_a_time_in_the_order_of_asking(muster: type[Muster]) -> None:
    m = running(muster, 3)
    assert taken(lock(m, 1)) == TAKEN[:1]
    assert not lock(m, 3, seconds=10)
    assert not lock(m, 2, seconds=10)
    assert taken(unlock(m, 1)) == [(3, True)]
    assert taken(unlock(m, 3)) == [(2, True)]
    assert not unlock(m, 2)
    assert taken(lock(m, 1)) == TAKEN[:1]


def test_who_does_not_wait_is_told_who_has_it(muster: type[Muster]) -> None:
    m = running(muster)
    lock(m, 1)
    assert lock(m, 2, request=8) == [AnswerLock(2, 8, False, "p/0 (task t1)")]


def test_a_wait_ends_at_its_time_and_not_before(muster: type[Muster]) -> None:
    m = running(muster, 3)
    lock(m, 1)
    assert not lock(m, 2, seconds=2, request=8)
    assert not lock(m, 3, seconds=1, request=9)
    assert not of(AnswerLock, m.wait(SECOND_NS - 1))
    assert of(AnswerLock, m.wait(1)) == [AnswerLock(3, 9, False, "p/0 (task t1)")]
    assert of(AnswerLock, m.wait(SECOND_NS)) == [AnswerLock(2, 8, False, "p/0 (task t1)")]
    assert not unlock(m, 1)


@pytest.mark.parametrize("how", ["success", "failure", "death"])
def test_the_end_of_a_lease_gives_its_locks_to_the_next(muster: type[Muster], how: str) -> None:
    m = running(muster)
    lock(m, 1, "a")
    lock(m, 1, "b")
    assert not lock(m, 2, "a", seconds=10)
    assert not lock(m, 2, "b", seconds=10)
    if how == "success":
        answer = m.complete(1, 1)
    elif how == "failure":
        answer = m.fail(1, 1)
    else:
        answer = m.exit(1, lease=1)
    assert taken(of(AnswerLock, answer)) == [(2, True), (2, True)]


def test_a_dead_waiter_is_passed_over(muster: type[Muster]) -> None:
    m = running(muster, 3)
    lock(m, 1)
    lock(m, 2, seconds=10)
    lock(m, 3, seconds=10)
    m.exit(2, lease=2)
    assert taken(unlock(m, 1)) == [(3, True)]


def test_a_waiter_that_gives_up_is_passed_over(muster: type[Muster]) -> None:
    m = running(muster, 3)
    lock(m, 1)
    lock(m, 2, seconds=10)
    lock(m, 3, seconds=10)
    assert not unlock(m, 2)
    assert taken(unlock(m, 1)) == [(3, True)]


def test_a_lock_that_is_not_ones_own_cannot_be_given_back(muster: type[Muster]) -> None:
    m = running(muster)
    lock(m, 1)
    assert not unlock(m, 2)
    assert taken(lock(m, 2)) == [(2, False)]


def test_a_task_that_takes_its_own_lock_again_is_told_so(muster: type[Muster]) -> None:
    m = running(muster)
    lock(m, 1)
    (answer,) = lock(m, 1, seconds=10)
    assert not answer.taken
    assert "this very task" in answer.error


def test_locks_and_waiters_are_bounded(
    muster: type[Muster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_requests, "LOCKS_MAX", 2)
    monkeypatch.setattr(handler_requests, "WAITERS_MAX", 1)
    m = running(muster, 3)
    assert taken(lock(m, 1, "a") + lock(m, 1, "b")) == [(1, True), (1, True)]
    assert "use fewer names" in lock(m, 1, "c")[0].error
    assert not lock(m, 2, "a", seconds=10)
    assert "others wait" in lock(m, 3, "a", seconds=10)[0].error


def test_waits_leave_few_timers_behind(muster: type[Muster]) -> None:
    m = running(muster)
    lock(m, 1)
    before = len(m.fleet._state.timers)
    for _ in range(100):
        lock(m, 2, seconds=60)
        unlock(m, 1)
        lock(m, 1, seconds=60)
        unlock(m, 2)
    assert len(m.fleet._state.timers) <= before + 2


def test_a_task_that_joined_another_shows_its_progress(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    m.submit(TaskSpec("t1", "p.x", b"", key="k"))
    m.submit(TaskSpec("t2", "p.x", b"", key="k"), peer=b"other")
    told = of(TellProgress, m.tell(events.ProgressMade(1, 1, 0.5, "half")))
    assert told == [
        TellProgress([PEER], ProgressNote("t1", 0.5, "half")),
        TellProgress([b"other"], ProgressNote("t2", 0.5, "half")),
    ]
    assert m.fleet.tasks["t2"].progress.fraction == 0.5


# -- no worker speaks for another ---------------------------------------------------------------


def test_a_lock_is_given_back_by_its_own_worker_only(muster: type[Muster]) -> None:
    m = running(muster)
    assert taken(lock(m, 1)) == [(1, True)]
    m.tell(events.LockReturned(2, 1, "l"))
    assert lock(m, 2)[0].taken is False
    m.tell(events.LeasesCompleted(2, [Completion(1, 1, b"not so")]))
    assert lock(m, 2)[0].taken is False
    m.tell(events.LeasesReturned(2, [1]))
    assert lock(m, 2)[0].taken is False
    unlock(m, 1)
    assert lock(m, 2)[0].taken is True


def test_a_lease_that_is_given_back_has_nothing_locked(muster: type[Muster]) -> None:
    m = running(muster)
    lock(m, 1)
    waiting = lock(m, 2, seconds=60)
    assert waiting == []
    assert taken(of(AnswerLock, m.tell(events.LeasesReturned(1, [1])))) == [(2, True)]
