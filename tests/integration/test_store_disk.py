"""A daemon whose disk fails to sync or becomes read-only: no client hears anything untrue."""

import shutil
import time
from typing import Any

import pytest

from musterd import QueueFull
from musterd.supervisor.core.tasks.outage import PATIENCE_NS

SECONDS = 60

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="it needs a C compiler")


@pytest.fixture
def daemon(jobs, disk) -> Any:
    daemon = jobs(size=1, start=False)
    daemon.popen_options["env"] = disk.environment
    daemon.start()
    assert daemon.ctl("pause", "jobs").returncode == 0  # no worker gets a task before its commit
    return daemon


def answers(handles: list[Any], seconds: float) -> dict[str, str]:
    """Return what each submitter has heard after that time: accepted, refused or nothing yet."""
    heard = {}
    deadline = time.monotonic() + seconds
    for handle in handles:
        try:
            handle.ack(max(0.01, deadline - time.monotonic()))
        except QueueFull:
            heard[handle.id] = "refused"
        except TimeoutError:
            heard[handle.id] = "nothing"
        else:
            heard[handle.id] = "accepted"
    return heard


def test_no_task_that_was_refused_after_a_failed_sync_comes_back(daemon, disk, waiting) -> None:
    with daemon.client() as client:
        kept = client.submit("jobs.echo", {"value": "kept"})
        kept.ack(SECONDS)
        disk.turn_on("nosync-once")
        doubtful = client.submit("jobs.echo", {"value": "doubtful"})
        waiting("the sync has failed", lambda: disk.is_on("readonly"))
        waiting("the status tells", lambda: "store.db" in daemon.status().problem)
        refused = client.submit("jobs.echo", {"value": "refused"})
        heard = answers([refused, doubtful], 2 * PATIENCE_NS / 1e9)
        assert heard[refused.id] == "refused"
        daemon.kill()
        disk.mend()
        daemon.start()
        waiting("the daemon answers", lambda: daemon.status().state == "running")
        live = {id_: daemon.ctl("task", id_).returncode == 0 for id_ in (kept.id, *heard)}
        assert live[kept.id]
        assert not live[refused.id]
        assert not (live[doubtful.id] and heard[doubtful.id] == "refused"), "refused, yet run"
        assert heard[doubtful.id] == "nothing"
        assert daemon.ctl("resume", "jobs").returncode == 0
        # The client sends unanswered submits again: each is the same task and runs once.
        assert doubtful.result(SECONDS) == "doubtful"
        assert client.task(kept.id).result(SECONDS) == "kept"


def test_what_was_in_doubt_is_accepted_when_the_disk_works_again(daemon, disk, waiting) -> None:
    with daemon.client() as client:
        disk.turn_on("nosync-once")
        doubtful = client.submit("jobs.echo", {"value": "doubtful"})
        waiting("the sync has failed", lambda: disk.is_on("readonly"))
        assert answers([doubtful], 2 * PATIENCE_NS / 1e9) == {doubtful.id: "nothing"}
        disk.mend()
        assert answers([doubtful], SECONDS) == {doubtful.id: "accepted"}
        assert daemon.ctl("resume", "jobs").returncode == 0
        assert doubtful.result(SECONDS) == "doubtful"
