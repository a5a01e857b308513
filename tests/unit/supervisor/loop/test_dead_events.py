"""Tasks that failed for good are told to followers of events."""

from musterd.ipc.wire.messages import FAILED, SHUT, SHUT_TYPE, SUCCEEDED, Failure, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import FinalRecord, Report
from musterd.supervisor.loop.dead_events import BURST, DeadTasks


def record(number: int, state: str = FAILED, pool: str = "jobs") -> FinalRecord:
    failure = Failure("error", "ValueError", "boom") if state == FAILED else None
    spec = TaskSpec(f"t{number}", f"{pool}.run", b"", target="site.example")
    return FinalRecord(number, spec, 0, Outcome(spec.id, state, attempts=2, failure=failure), 0)


def test_each_is_told_with_why_and_those_that_succeeded_are_not() -> None:
    told: list[Report] = []
    DeadTasks(told.append).take([record(1), record(2, SUCCEEDED)])
    (report,) = told
    assert (report.event, report.level, report.pool) == ("task.dead", "error", "jobs")
    assert (report.task, report.attempt, report.target) == ("t1", 2, "site.example")
    assert report.reason == "ValueError: boom"


def test_a_task_that_did_not_wait_for_a_shut_site_is_not_dead() -> None:
    told: list[Report] = []
    refused = Outcome("t1", FAILED, failure=Failure(SHUT, SHUT_TYPE, "the breaker is open"))
    DeadTasks(told.append).take([FinalRecord(1, TaskSpec("t1", "jobs.run", b""), 0, refused, 0)])
    assert not told


def test_of_a_storm_a_few_are_told_and_the_others_are_counted_by_pool() -> None:
    told: list[Report] = []
    dead = DeadTasks(told.append)
    dead.take([record(number, pool="ab"[number % 2]) for number in range(10_000)])
    few = len(told)
    assert BURST <= few < BURST + 100
    dead.count()
    assert sorted(each.pool for each in told[few:]) == ["a", "b"]
    assert few + sum(each.count for each in told[few:]) == 10_000
    dead.count()
    assert len(told) == few + 2
