"""Leases: which worker gets which task, and how each lease ends."""

from typing import Any

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import CRITICAL, LOW, Failure, Outcome, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.queue import WORTH_NS
from musterd.supervisor.core.model.task import TaskState
from musterd.supervisor.core.model.timers import TIMERS_SLACK
from musterd.supervisor.core.tasks.endings import INTERRUPTIONS_MAX
from musterd.supervisor.core.tasks.leases import (
    BOARD_AGAIN_NS,
    CANCEL_GRACE_NS,
    HARD_GRACE_NS,
    IDLE_LOOKS_MAX,
    STALL_NS,
    WINDOW_MAX,
)
from support.core import Muster, of


def spec(id_: str = "t", **fields: Any) -> TaskSpec:
    return TaskSpec(id_, "p.x", b"", **fields)


def specs(count: int, **fields: Any) -> list[TaskSpec]:
    return [spec(f"t{number}", **fields) for number in range(count)]


def leases(answer: list[Any]) -> list[Any]:
    return [lease for each in of(actions.AssignLeases, answer) for lease in each.leases]


def leased(answer: list[Any]) -> list[tuple[int, str]]:
    """Return (worker, task id) for each lease."""
    return [
        (each.worker, lease.id)
        for each in of(actions.AssignLeases, answer)
        for lease in each.leases
    ]


def outcomes(answer: list[Any]) -> list[Outcome]:
    return [each for delivery in of(actions.Deliver, answer) for each in delivery.outcomes]


def states(answer: list[Any]) -> list[tuple[str, str]]:
    return [(each.id, each.state) for each in outcomes(answer)]


# -- giving work ------------------------------------------------------------------------------


def test_tasks_of_unknown_cost_are_spread_one_by_one(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    assert leased(m.submit(*specs(5))) == [(1, "t0"), (2, "t1")]
    assert leased(m.complete(2, 2, run_ns=SECOND_NS)) == [(2, "t2")]


def test_a_worker_with_a_long_task_is_given_no_second_one(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"))
    m.complete(1, 1, run_ns=SECOND_NS)
    m.submit(spec("b"))
    assert leased(m.submit(spec("c"))) == []
    assert leased(m.submit(spec("urgent", priority=CRITICAL))) == []
    assert leased(m.complete(1, 2, run_ns=SECOND_NS)) == [(1, "urgent")]


def test_tiny_tasks_come_in_windows_shared_by_the_workers(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.learn_tiny()
    given = [worker for worker, _ in leased(m.submit(*specs(100)))]
    assert (given.count(1), given.count(2)) == (50, 50)


def test_a_worker_is_woken_for_what_is_worth_it(muster: type[Muster]) -> None:
    m = muster(size=3)
    m.start()
    m.learn_tiny()  # a run takes 10 us
    given = [worker for worker, _ in leased(m.submit(*specs(60)))]
    assert [given.count(worker) for worker in (1, 2, 3)] == [0, 50, 10]


def test_a_busy_worker_is_given_no_more_than_its_share(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.learn_tiny()
    m.submit(*specs(4))
    busy = next(number for number, slot in enumerate(m.slots) if slot.leases)
    m.slots[busy].pool.slots_with_room = {m.slots[busy]: None, m.slots[1 - busy]: None}
    given = [worker for worker, _ in leased(m.submit(spec("a"), spec("b")))]
    assert sorted(given) == [1, 2]


def test_what_takes_longer_is_shared_one_by_one(muster: type[Muster]) -> None:
    m = muster(size=3)
    m.start()
    m.submit(spec("learn"))
    m.complete(1, 1, run_ns=WORTH_NS * 3 // 4)
    given = [worker for worker, _ in leased(m.submit(*specs(3)))]
    assert sorted(given) == [1, 2, 3]


def test_a_window_is_refilled_when_it_is_half_empty(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.learn_tiny()
    first = leased(m.submit(*specs(1000)))
    assert len(first) == WINDOW_MAX
    held = list(m.slots[0].leases)
    assert leased(m.complete(1, *held[: WINDOW_MAX // 2 - 1], run_ns=10_000)) == []
    assert len(leased(m.complete(1, held[WINDOW_MAX // 2 - 1], run_ns=10_000))) == WINDOW_MAX // 2


def test_a_window_that_stalls_is_recalled_and_shared_again(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.learn_tiny()
    m.submit(*specs(4))
    mine = m.slots[1].leases
    running, *waiting = list(mine)
    ids = [mine[lease].spec.id for lease in waiting]
    assert of(actions.RecallLeases, m.wait(STALL_NS)) == [actions.RecallLeases(2)]
    assert leased(m.tell(events.LeasesReturned(2, waiting))) == [(1, id_) for id_ in ids]
    assert list(mine) == [running]


def test_nothing_is_given_away_before_the_worker_confirms(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.learn_tiny()
    m.submit(*specs(4))
    assert not m.slots[0].leases
    assert leased(m.wait(10 * STALL_NS)) == []


def test_nothing_more_is_put_behind_a_task_that_has_stalled(muster: type[Muster]) -> None:
    """Tasks put there were once recalled STALL_NS later, again and again."""
    m = muster()
    m.start()
    m.learn_tiny()
    m.submit(*specs(3))
    m.wait(STALL_NS)
    running, *rest = m.slots[0].leases
    assert leased(m.tell(events.LeasesReturned(1, rest))) == []
    assert leased(m.submit(spec("new"))) == []
    assert of(actions.RecallLeases, m.wait(SECOND_NS)) == []
    assert len(leased(m.complete(1, running, run_ns=20_000))) == 3


def test_new_work_behind_it_does_not_hide_a_stall(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.learn_tiny()
    m.submit(spec("slow"))
    answer = []
    for number in range(30):
        answer += m.wait(MILLISECOND_NS)
        answer += m.submit(spec(f"t{number}"))
    assert of(actions.RecallLeases, answer) == [actions.RecallLeases(1)]


def test_a_long_run_is_noted_on_disk_as_begun(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    (page,) = of(actions.Persist, m.wait(STALL_NS))
    assert page.changed == [actions.LiveRecord(1, 1, 0, 0, 0, True)]


# -- ends and retries -------------------------------------------------------------------------


def test_a_result_is_told_only_after_its_commit(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    m.disk_works = False
    assert states(m.complete(1, 1)) == []
    assert states(m.commit()) == [("t", "succeeded")]
    assert m.fleet.tasks == {}


def test_a_failure_is_retried_after_growing_pauses_and_then_final(muster: type[Muster]) -> None:
    m = muster(max_retries=2)
    m.start()
    m.submit(spec())
    for lease, pause in ((1, SECOND_NS), (2, 2 * SECOND_NS)):
        assert outcomes(m.fail(1, lease)) == []
        assert leased(m.wait(pause - 1)) == []
        assert leased(m.wait(1)) == [(1, "t")]
    (outcome,) = outcomes(m.fail(1, 3, message="no luck"))
    assert (outcome.state, outcome.attempts) == ("failed", 3)
    assert outcome.failure == Failure("error", message="no luck")


def test_permanent_and_invalid_failures_are_not_retried(muster: type[Muster]) -> None:
    for kind in ("permanent", "invalid"):
        m = muster()
        m.start()
        m.submit(spec())
        assert states(m.fail(1, 1, kind)) == [("t", "failed")]


def test_retry_after_of_the_site_is_honoured(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    m.fail(1, 1, retry_after_ns=30 * SECOND_NS)
    assert leased(m.wait(30 * SECOND_NS - 1)) == []
    assert leased(m.wait(1)) == [(1, "t")]


def test_a_crash_gives_the_running_task_back_without_an_attempt(muster: type[Muster]) -> None:
    m = muster(max_retries=0)
    m.start()
    m.submit(spec())
    m.exit(1, lease=1)
    (again,) = of(actions.AssignLeases, m.bring_up(2))
    assert again.leases[0].attempt == 1


def test_a_task_that_crashes_its_workers_is_quarantined(muster: type[Muster]) -> None:
    m = muster(max_crashes=2)
    m.start()
    m.submit(spec())
    assert outcomes(m.exit(1, lease=1)) == []
    m.bring_up(2)
    (outcome,) = outcomes(m.exit(2, lease=2))
    assert outcome.state == "failed"
    assert outcome.failure is not None
    assert outcome.failure.kind == "crash"
    assert "quarantined" in outcome.failure.message


def test_a_crash_leaves_the_rest_of_the_window_untouched(muster: type[Muster]) -> None:
    m = muster(size=2, max_crashes=1)
    m.start()
    m.learn_tiny()
    m.submit(*specs(6))
    running, *rest = [(lease, task.spec.id) for lease, task in m.slots[1].leases.items()]
    answer = m.exit(2, lease=running[0])
    assert states(answer) == [(running[1], "failed")]
    assert leased(answer) == [(1, id_) for _, id_ in rest]
    assert all(task.crashes == 0 for task in m.fleet.tasks.values())


def test_late_news_of_a_dead_worker_is_ignored(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    m.exit(1, lease=1)
    m.bring_up(2)
    assert m.complete(1, 1) == []
    assert m.tell(events.LeasesReturned(1, [1])) == []
    assert m.tell(events.BoardRead(1, 1, 0)) == []
    assert states(m.complete(2, 2)) == [("t", "succeeded")]


def test_a_crash_of_a_draining_worker_is_charged_to_its_task(muster: type[Muster]) -> None:
    m = muster(max_crashes=1)
    m.start()
    m.submit(spec())
    m.tell(events.StopRequested((("p", -1),)))
    assert states(m.exit(1, lease=1)) == [("t", "failed")]


def test_an_interruption_is_no_attempt_but_has_a_limit(muster: type[Muster]) -> None:
    m = muster(max_retries=0)
    m.start()
    m.submit(spec())
    for number in range(1, INTERRUPTIONS_MAX + 1):
        (again,) = of(actions.AssignLeases, m.fail(1, number, "cancel"))
        assert again.leases[0].attempt == 1
    assert states(m.fail(1, INTERRUPTIONS_MAX + 1, "cancel")) == [("t", "failed")]


# -- deadlines --------------------------------------------------------------------------------


def test_a_deadline_counts_from_the_beginning_the_scoreboard_tells(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec(timeout_ns=2 * SECOND_NS))
    began_ns = m.now_ns + SECOND_NS
    (look,) = of(actions.ReadBoard, m.wait(2 * SECOND_NS + HARD_GRACE_NS))
    assert look == actions.ReadBoard(1)
    assert m.tell(events.BoardRead(1, 1, began_ns)) == []
    assert of(actions.ReadBoard, m.wait(SECOND_NS)) == [actions.ReadBoard(1)]
    answer = m.tell(events.BoardRead(1, 1, began_ns))
    assert of(actions.KillWorker, answer) == [actions.KillWorker(1, dump=True)]


def test_a_hung_task_is_a_timeout_and_may_be_retried(muster: type[Muster]) -> None:
    m = muster(max_retries=1)
    m.start()
    m.submit(spec(timeout_ns=SECOND_NS))
    for worker in (1, 2):
        m.wait(SECOND_NS + HARD_GRACE_NS)
        m.tell(events.BoardRead(worker, worker, 0))
        answer = m.exit(worker, lease=worker, code=-9)
        m.bring_up(worker + 1)
        answer += m.wait(SECOND_NS)
    (outcome,) = outcomes(answer)
    assert (outcome.state, outcome.attempts) == ("failed", 2)
    assert outcome.failure is not None
    assert outcome.failure.kind == "timeout"


def test_a_worker_that_has_tasks_and_runs_none_is_killed(muster: type[Muster]) -> None:
    m = muster(task_timeout_ns=SECOND_NS)
    m.start()
    m.submit(spec())
    answer = m.wait(SECOND_NS + HARD_GRACE_NS)
    for _ in range(IDLE_LOOKS_MAX):
        assert of(actions.ReadBoard, answer) == [actions.ReadBoard(1)]
        told = m.tell(events.BoardRead(1, 0, 0))
        answer = m.wait(BOARD_AGAIN_NS)
    assert of(actions.KillWorker, told) == [actions.KillWorker(1, dump=True)]
    m.exit(1, code=-9)
    assert m.fleet.tasks["t"].attempt == 0


# -- cancelling -------------------------------------------------------------------------------


def test_a_queued_task_is_cancelled_at_once(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec())
    assert states(m.tell(events.CancelRequested(["t"]))) == [("t", "cancelled")]
    assert leased(m.start()) == []


def test_a_running_task_is_interrupted_and_its_worker_killed_if_that_does_not_help(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    assert of(actions.CancelRunning, m.tell(events.CancelRequested(["t"]))) == [
        actions.CancelRunning(1, 1)
    ]
    assert m.tell(events.CancelRequested(["t"])) == []
    assert of(actions.KillWorker, m.wait(CANCEL_GRACE_NS)) == [actions.KillWorker(1, dump=True)]
    assert states(m.exit(1, lease=1, code=-9)) == [("t", "cancelled")]


def test_a_cancelled_task_that_succeeds_all_the_same_has_succeeded(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    m.tell(events.CancelRequested(["t"]))
    assert states(m.complete(1, 1)) == [("t", "succeeded")]
    assert of(actions.KillWorker, m.wait(2 * CANCEL_GRACE_NS)) == []


# -- waiting and expiring ---------------------------------------------------------------------


def test_a_delayed_task_runs_when_its_time_has_come(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    assert leased(m.submit(spec(delay_ns=SECOND_NS))) == []
    assert leased(m.wait(SECOND_NS - 1)) == []
    assert leased(m.wait(1)) == [(1, "t")]


def test_a_task_expires_in_the_queue_and_while_it_waits(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec("queued", expires_ns=SECOND_NS))
    m.submit(spec("waiting", expires_ns=SECOND_NS, delay_ns=60 * SECOND_NS))
    assert states(m.wait(SECOND_NS)) == [("queued", "expired"), ("waiting", "expired")]


def test_a_task_that_expires_on_its_way_to_the_disk_never_runs(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.disk_works = False
    m.submit(spec(expires_ns=SECOND_NS))
    m.wait(SECOND_NS)
    assert leased(m.commit()) == []
    assert states(m.commit()) == [("t", "expired")]


def test_a_task_that_expires_while_it_runs_may_finish_but_not_begin_again(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.submit(spec("good", expires_ns=SECOND_NS))
    m.wait(2 * SECOND_NS)
    assert states(m.complete(1, 1)) == [("good", "succeeded")]
    m.submit(spec("bad", expires_ns=SECOND_NS))
    m.wait(2 * SECOND_NS)
    (outcome,) = outcomes(m.fail(1, 2))
    assert outcome.state == "expired"
    assert outcome.failure is not None
    m.submit(spec("interrupted", expires_ns=SECOND_NS))
    m.wait(2 * SECOND_NS)
    assert states(m.fail(1, 3, "cancel")) == [("interrupted", "expired")]


def test_timers_of_ended_tasks_do_not_pile_up(muster: type[Muster]) -> None:
    """A task that ends in a millisecond and expires in a day leaves no timer for that day."""
    m = muster()
    m.start()
    day_ns = 24 * 3600 * SECOND_NS
    for number in range(3 * TIMERS_SLACK):
        (assigned,) = of(actions.AssignLeases, m.submit(spec(f"{number}", expires_ns=day_ns)))
        m.now_ns += MILLISECOND_NS
        m.complete(1, assigned.leases[0].lease)
        m.wait(0)
    assert len(m.fleet._state.timers) <= TIMERS_SLACK + 10


def test_a_low_task_is_not_held_up_for_ever_by_a_flood(muster: type[Muster]) -> None:
    m = muster(aging_ns=SECOND_NS)
    m.start()
    m.submit(spec("low", priority=LOW))
    for number in range(40):
        m.submit(spec(f"a{number}"), spec(f"b{number}"))
        (lease,) = m.slots[0].leases
        m.wait(100 * MILLISECOND_NS)
        m.complete(1, lease, run_ns=100 * MILLISECOND_NS)
    low = m.fleet.tasks.get("low")
    assert low is None or low.state == TaskState.LEASED


def test_a_worker_that_runs_what_it_has_given_back_is_killed(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    lease = leases(m.submit(TaskSpec("a", "p.x", b"")))[0].lease
    answer = m.tell(events.LeasesReturned(1, [lease]))
    assert of(actions.ReadBoard, answer) == [actions.ReadBoard(1)]
    again = leases(answer)[0].lease  # the worker says that it has room
    answer = m.tell(events.BoardRead(1, lease, m.now_ns))
    assert of(actions.KillWorker, answer) == [actions.KillWorker(1, dump=True)]
    assert "given back" in of(actions.Report, answer)[0].reason
    answer = m.exit(1, lease, code=-9)
    assert m.fleet.tasks["a"].crashes == 0
    assert again not in m.slots[0].leases


def test_a_worker_that_has_given_back_what_it_has_not_begun_lives_on(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    lease = leases(m.submit(TaskSpec("a", "p.x", b"")))[0].lease
    answer = m.tell(events.LeasesReturned(1, [lease]))
    for board in (0, leases(answer)[0].lease):
        assert not of(actions.KillWorker, m.tell(events.BoardRead(1, board, m.now_ns)))
    assert m.slots[0].idle_looks == 0


def test_rounds_find_a_worker_that_runs_what_it_has_given_back(muster: type[Muster]) -> None:
    m = muster(size=1, heartbeat_timeout_ns=4 * SECOND_NS)
    m.start()
    lease = leases(m.submit(TaskSpec("a", "p.x", b"")))[0].lease
    m.tell(events.LeasesReturned(1, [lease]))
    board = events.BoardsRead([events.BoardRead(1, lease, m.now_ns)])
    assert not of(actions.KillWorker, m.tell(board))
    assert of(actions.KillWorker, m.tell(board))
