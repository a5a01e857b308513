"""Shutdown: every phase, its budget, and what cuts it short."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.shutdown import CLEANUP_SLACK_NS, CLOSE_BUDGET_NS, Phase
from support.core import Muster, of

TASK = TaskSpec("t", "p.x", b"")


def phases(answer: list[Any]) -> list[str]:
    return [each.phase for each in of(actions.Report, answer) if each.event == "shutdown.phase"]


def shut_down(m: Any) -> list[Any]:
    return m.tell(events.ShutdownRequested("asked"))  # type: ignore[no-any-return]


def test_an_idle_fleet_goes_through_every_phase(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    answer = shut_down(m)
    assert phases(answer) == ["intake", "drain", "stop"]
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1), actions.StopWorker(2)]
    assert m.exit(1, code=0) == []
    answer = m.exit(2, code=0)
    assert phases(answer) == ["cleanup"]
    assert isinstance(answer[-1], actions.RunCleanup)
    answer = m.tell(events.CleanupFinished())
    assert phases(answer) == ["close", "over"]
    assert of(actions.StopForkServer, answer) == [actions.StopForkServer("p")]
    assert answer[-1] == actions.Exit()


def test_a_fleet_without_workers_ends_at_once(muster: type[Muster]) -> None:
    m = muster()
    assert phases(shut_down(m)) == ["intake", "drain", "stop", "cleanup"]
    assert m.tell(events.CleanupFinished())[-1] == actions.Exit()


def test_new_tasks_get_a_clear_answer(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TASK)
    shut_down(m)
    (answer,) = m.submit(TaskSpec("late", "p.x", b""))
    assert [each.code for each in answer.rejected] == ["ShuttingDown"]


def test_new_tasks_are_left_to_the_next_daemon_where_it_has_the_same_socket(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.submit(TASK)
    (asked,) = m.submit(TaskSpec("again", "p.x", b""), resend=True)
    m.tell(events.ShutdownRequested("asked", sockets_survive=True))
    assert m.submit(TaskSpec("late", "p.x", b"")) == [], "no answer: the client will ask again"
    assert m.tell(events.ResendChecked(asked.submitted, frozenset())) == []
    ours = events.TasksSubmitted(b"musterctl", 0, [TaskSpec("own", "p.x", b"")], 10**18)
    (answer,) = m.tell(ours)
    assert [each.code for each in answer.rejected] == ["ShuttingDown"], "it does not ask again"


def test_a_running_task_may_end_and_its_result_is_kept(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TASK, TaskSpec("queued", "p.x", b""))
    assert phases(shut_down(m)) == ["intake", "drain"]
    answer = m.complete(1, 1)
    assert phases(answer) == ["stop"]
    assert [each.outcomes[0].state for each in of(actions.Deliver, answer)] == ["succeeded"]
    assert of(actions.AssignLeases, answer) == []
    assert list(m.fleet.tasks) == ["queued"]


def test_after_the_drain_timeout_tasks_are_interrupted_then_killed(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TASK)
    shut_down(m)
    assert m.wait(m.policy.drain_timeout_ns - 1) != []  # the look at the task's progress
    answer = m.wait(1)
    assert phases(answer) == ["stop"]
    assert of(actions.TerminateWorker, answer) == [actions.TerminateWorker(1)]
    assert of(actions.KillWorker, m.wait(m.policy.stop_timeout_ns)) == [actions.KillWorker(1)]
    answer = m.exit(1, lease=1, code=-9)
    assert phases(answer) == ["cleanup"]
    task = m.fleet.tasks["t"]
    assert (task.attempt, task.crashes, task.interruptions) == (0, 0, 1)


def test_a_second_request_ends_the_drain_and_a_third_kills(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TASK)
    shut_down(m)
    answer = shut_down(m)
    assert phases(answer) == ["stop"]
    assert of(actions.TerminateWorker, answer) == [actions.TerminateWorker(1)]
    assert of(actions.KillWorker, shut_down(m)) == [actions.KillWorker(1)]
    assert phases(m.exit(1, lease=1, code=-9)) == ["cleanup"]
    assert m.fleet.tasks["t"].crashes == 0


def test_a_second_request_after_the_drain_changes_nothing_and_a_third_kills(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.submit(TASK)
    shut_down(m)
    assert phases(m.wait(m.policy.drain_timeout_ns)) == ["stop"]
    assert shut_down(m) == []
    assert of(actions.KillWorker, shut_down(m)) == [actions.KillWorker(1)]


def test_an_idle_worker_that_does_not_leave_is_signalled_and_killed(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    shut_down(m)
    stop_ns = m.policy.stop_timeout_ns
    assert of(actions.TerminateWorker, m.wait(stop_ns)) == [actions.TerminateWorker(1)]
    assert of(actions.KillWorker, m.wait(stop_ns)) == [actions.KillWorker(1)]


def test_clean_up_has_a_budget(muster: type[Muster]) -> None:
    m = muster()
    shut_down(m)
    assert m.wait(m.policy.cleanup_timeout_ns + CLEANUP_SLACK_NS - 1) == []
    answer = m.wait(1)
    assert phases(answer) == ["close", "over"]
    assert answer[-1] == actions.Exit()


def test_the_exit_waits_for_the_disk(muster: type[Muster]) -> None:
    m = muster()
    m.disk_works = False
    m.submit(TASK)
    shut_down(m)
    assert phases(m.tell(events.CleanupFinished())) == ["close"]
    assert m.commit()[-1] == actions.Exit()


def test_the_exit_does_not_wait_for_ever_for_the_disk(muster: type[Muster]) -> None:
    m = muster()
    m.disk_works = False
    m.submit(TASK)
    shut_down(m)
    m.tell(events.CleanupFinished())
    assert m.wait(CLOSE_BUDGET_NS - 1) == []
    assert of(actions.Exit, m.wait(1)) == [actions.Exit()]
    assert m.fleet.phase == Phase.OVER
    assert of(actions.Exit, m.commit() + m.wait(3600 * SECOND_NS)) == []


@pytest.mark.parametrize(
    "command",
    [
        events.StartRequested((("p", -1),)),
        events.RestartRequested((("p", -1),)),
        events.ResetRequested((("p", -1),)),
        events.ScaleRequested("p", 5),
        events.Started(),
    ],
    ids=lambda command: type(command).__name__,
)
def test_nothing_is_started_during_the_shutdown(muster: type[Muster], command: Any) -> None:
    m = muster(size=2)
    m.start()
    m.tell(events.StopRequested((("p", 0),)))
    m.exit(1, code=0)
    shut_down(m)
    (report,) = m.tell(command)
    assert report.event == "command.ignored"
    assert "shutting down" in report.reason
    answer = m.exit(2, code=0) + m.tell(events.CleanupFinished()) + m.wait(3600 * SECOND_NS)
    assert of(actions.SpawnWorker, answer) == []
    assert of(actions.Exit, answer) == [actions.Exit()]


def test_a_worker_that_crashes_during_the_shutdown_is_not_replaced(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.submit(TASK)
    shut_down(m)
    answer = m.exit(1, lease=1) + m.wait(3600 * SECOND_NS)
    assert of(actions.SpawnWorker, answer) == []


def test_a_fork_server_that_dies_during_the_shutdown_stays_down(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TASK)
    shut_down(m)
    answer = m.tell(events.ForkServerExited("p", "killed")) + m.wait(10 * SECOND_NS)
    assert of(actions.StartForkServer, answer) == []
