"""What people are told of tasks of the cluster: lists are short, one task is whole."""

from typing import Any

from musterd.ipc.wire.messages import ERROR, FailedAttempt, Failure, TaskView
from musterd.ipc.wire.node_messages import FOUND_MAX, FindTasks, FoundTasks
from musterd.supervisor.cluster.engine import TaskFilter
from musterd.supervisor.cluster.sidecar_events import EngineAnswered, EngineFailed
from musterd.supervisor.node.engines import Job
from musterd.supervisor.node.finds import ARGUMENTS_BYTES_MAX, find_tasks

FAILURE = Failure(ERROR, "ValueError", "no price", traceback="line 1")


class Engines:
    """Keeps the call that is made."""

    job: Job

    def call(self, job: Job) -> None:
        self.job = job


def asked(wanted: FindTasks, result: object) -> tuple[Job, FoundTasks]:
    """Return the call of the engine, and what is told after this answer."""
    engines, told = Engines(), []
    find_tasks(engines, wanted, told.append)  # type: ignore[arg-type]
    event: Any = result if isinstance(result, EngineFailed) else EngineAnswered(0, result)
    engines.job.answered(event)
    [answer] = told
    return engines.job, answer


def task(number: int, node: str = "barn", **more: Any) -> TaskView:
    attempts = [FailedAttempt(1, 0.0, "", FAILURE)]
    fields = {"failure": FAILURE, "attempts": attempts, "value": b"v", "args": b"a", **more}
    return TaskView(f"t{number}", "p.x", "running", "low", worker=node, **fields)


def test_a_list_has_no_arguments_no_results_and_no_tracebacks() -> None:
    job, told = asked(FindTasks(5, "running", "p", limit=2), [task(n) for n in range(3)])
    assert (job.method, job.arguments) == ("find", (TaskFilter("p", state="running", limit=3),))
    assert (told.request, told.more, [each.id for each in told.tasks]) == (5, True, ["t0", "t1"])
    [first, _] = told.tasks
    assert first.failure == Failure(ERROR, "ValueError", "no price")
    assert (first.attempts, first.value, first.args) == ([], b"", b"")


def test_the_tasks_of_a_node_are_picked_from_as_many_as_fit() -> None:
    job, told = asked(
        FindTasks(1, node="shed", limit=9), [task(1), task(2, "shed"), task(3, "shed")]
    )
    assert job.arguments == (TaskFilter(state="running", limit=FOUND_MAX),)
    assert [each.id for each in told.tasks] == ["t2", "t3"]
    assert not told.more
    _, told = asked(FindTasks(1, node="shed"), [task(n) for n in range(FOUND_MAX)])
    assert (told.tasks, told.more) == ([], True)  # there may be some beyond those


def test_one_task_has_its_arguments_if_they_are_not_too_long() -> None:
    job, told = asked(FindTasks(1, id="t1"), task(1))
    assert (job.method, job.arguments) == ("view", ("t1",))
    assert (told.tasks[0].args, told.tasks[0].value) == (b"a", b"")
    assert told.tasks[0].attempts
    _, told = asked(FindTasks(1, id="t1"), task(1, args=bytes(ARGUMENTS_BYTES_MAX + 1)))
    assert told.tasks[0].args == b""
    assert asked(FindTasks(1, id="t1"), None)[1].tasks == []


def test_a_database_that_is_away_is_said_to_be() -> None:
    _, told = asked(FindTasks(4), EngineFailed(0, "connection\n refused"))
    assert told.reason == "the cluster's database does not answer: connection refused"
