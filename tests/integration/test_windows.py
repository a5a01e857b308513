"""The tasks given to a worker at once are bounded, and a task that kills its worker is counted."""

import pytest

from musterd import InvalidTask, TaskFailed
from musterd.supervisor.api.rpc import RpcError, SubmitTask

EVIL = """
import os
from musterd import task

@task
def noop(ctx, n: int = 0, pad: str = "") -> int:
    return n

@task
def closes(ctx) -> str:
    os.closerange(3, 4096)      # the runtime cannot send its result any more
    return "gone"
"""


@pytest.fixture
def evil(muster):
    def start(**settings):
        daemon = muster({"evil": {"worker": "evil", "size": 2}}, start=False, **settings)
        (daemon.folder / "evil.py").write_text(EVIL)
        return daemon.start()

    return start


def test_a_backlog_of_large_tasks_is_worked_off(evil):
    daemon = evil()
    with daemon.client() as client:
        for handle in client.submit_many([("evil.noop", {"n": n}) for n in range(500)]):
            handle.result(30)  # known as tiny, so windows are wide
        daemon.ctl("stop", "evil")
        pad = "x" * 200_000
        handles = client.submit_many([("evil.noop", {"n": n, "pad": pad}) for n in range(150)])
        client.flush()
        daemon.ctl("start", "evil")
        assert [handle.result(60) for handle in handles] == list(range(150))


def test_a_task_that_kills_its_worker_by_its_result_is_quarantined(evil):
    daemon = evil()
    with daemon.client() as client:
        with pytest.raises(TaskFailed, match="quarantined"):
            client.submit("evil.closes").result(60)
        assert client.submit("evil.noop", {"n": 1}).result(30) == 1


def test_an_id_of_a_finished_task_is_not_given_to_another(evil):
    daemon = evil()
    first = SubmitTask(name="evil.noop", id="x", args={"n": 1}, wait=True)
    assert daemon.ask(first)["value"] == 1
    assert daemon.ask(first)["value"] == 1  # the same task again
    with pytest.raises(RpcError, match=InvalidTask.__name__):
        daemon.ask(SubmitTask(name="evil.noop", id="x", args={"n": 2}, wait=True))
