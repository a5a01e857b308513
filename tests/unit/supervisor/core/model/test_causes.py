"""Why a worker was lost: one cause each, counted for its slot and its pool."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.views.fleet import pool_status
from support.core import Muster


def crash_of(answer: list[Any]) -> actions.Report:
    (report,) = (each for each in answer if isinstance(each, actions.Report))
    assert report.event == "worker.crashed"
    return report


@pytest.mark.parametrize(
    ("exit_", "cause", "words"),
    [
        (events.WorkerExited(1, 7, 0), "exit", "exited with code 7"),
        (events.WorkerExited(1, -11, 0), "signal", "ended by signal 11"),
        (events.WorkerExited(1, -9, 0), "signal", "ended by signal 9"),
        (events.WorkerExited(1, -9, 0, oom="memory"), "oom", "ended by signal 9: memory"),
        (events.WorkerExited(1, 3, 0, "no browser", unhealthy=True), "unhealthy", "no browser"),
        (events.WorkerExited(1, 3, 0, "last words"), "exit", "exited with code 3: last words"),
    ],
)
def test_an_end_has_one_cause_and_its_words(
    muster: type[Muster], exit_: events.WorkerExited, cause: str, words: str
) -> None:
    m = muster()
    m.start()
    report = crash_of(m.tell(exit_))
    assert (report.cause, report.reason) == (cause, words)
    status = pool_status(m.fleet.pools["p"], m.now_ns)
    assert status.lost == status.workers[0].lost == {cause: 1}


def test_an_end_before_it_was_ready_is_a_boot_failure_whatever_ended_it(
    muster: type[Muster],
) -> None:
    m = muster()
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    m.tell(events.WorkerForked(1, 100))
    report = crash_of(m.tell(events.WorkerExited(1, 1, 0, "ImportError: nope")))
    assert (report.cause, report.reason) == ("boot", "exited with code 1: ImportError: nope")
    m.tell(events.WorkerForked(2, 100))
    assert crash_of(m.tell(events.WorkerExited(2, -11, 0))).cause == "boot"
    m.wait(2 * SECOND_NS)
    assert crash_of(m.tell(events.SpawnFailed(3, "no memory"))).cause == "boot"
    assert m.slots[0].lost == {"boot": 3}


def test_a_kernel_short_of_memory_is_to_blame_also_during_the_start(muster: type[Muster]) -> None:
    m = muster()
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    m.tell(events.WorkerForked(1, 100))
    assert crash_of(m.tell(events.WorkerExited(1, -9, 0, oom="memory"))).cause == "oom"


def test_what_we_killed_for_hanging_is_hung_whatever_its_exit_says(muster: type[Muster]) -> None:
    m = muster(start_timeout_ns=SECOND_NS)
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    m.tell(events.WorkerForked(1, 100))
    m.wait(SECOND_NS)
    report = crash_of(m.tell(events.WorkerExited(1, -9, 0, oom="memory")))
    assert report.cause == "hung"
    assert report.reason == "killed: not ready within its start_timeout of 1 s"


def test_a_task_that_does_not_stop_makes_its_worker_hung(muster: type[Muster]) -> None:
    m = muster(task_timeout_ns=SECOND_NS)
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    m.wait(6 * SECOND_NS)
    m.tell(events.BoardRead(1, 1, m.now_ns - 7 * SECOND_NS))
    answer = m.exit(1, lease=1, code=-9)
    assert [each.cause for each in answer if isinstance(each, actions.Report)][-1] == "hung"


def test_what_a_person_stops_is_not_lost(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.StopRequested((("p", -1),)))
    m.exit(1, code=0)
    assert m.slots[0].lost == {}
    assert m.fleet.pools["p"].counters.lost == {}


def test_losses_add_up_over_slots_and_causes(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.exit(1, code=-11)
    m.exit(2, code=5)
    m.bring_up(3)
    m.exit(3, code=-11)
    assert [slot.lost for slot in m.slots] == [{"signal": 2}, {"exit": 1}]
    assert m.fleet.pools["p"].counters.lost == {"signal": 2, "exit": 1}
