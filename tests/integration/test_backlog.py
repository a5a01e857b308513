"""More queued tasks than fit in memory, with real processes and a real disk."""

import json
from collections.abc import Callable
from typing import Any

from musterd import Client
from musterd.supervisor.core.model.policy import PoolPolicy
from support.daemon import Jobs

COUNT = PoolPolicy("p", 1).resident_tasks + 6000
BATCH = 2000


def fill(client: Client) -> list[Any]:
    tasks: list[Any] = []
    for start in range(0, COUNT, BATCH):
        numbers = range(start, min(start + BATCH, COUNT))
        tasks += client.submit_many([("jobs.echo", {"value": number}) for number in numbers])
        client.flush()
    return tasks


def test_a_backlog_beyond_the_memory_is_lost_by_nobody(
    jobs: Jobs, waiting: Callable[..., None]
) -> None:
    """Such a backlog is listed, cancelled and found by id, survives kill -9, and runs once."""
    daemon = jobs(size=0, pool={"queue_size": 2 * COUNT})
    client = daemon.client()
    tasks = fill(client)
    assert daemon.pool("jobs").queued["normal"] == COUNT

    listed = json.loads(daemon.ctl("--json", "tasks", "--limit", "5").stdout)
    assert [each["id"] for each in listed["tasks"]] == [task.id for task in tasks[:-6:-1]]
    shown = json.loads(daemon.ctl("--json", "task", tasks[-1].id).stdout)
    assert (shown["state"], shown["waits_for"]) == ("queued", "a free worker")

    cancelled = tasks[-2]
    assert daemon.ctl("cancel", cancelled.id).returncode == 0
    assert cancelled.status().state == "cancelled"

    daemon.kill()
    daemon.start()
    assert daemon.pool("jobs").queued["normal"] == COUNT - 1
    assert daemon.ctl("scale", "jobs", "2").returncode == 0
    for number, task in enumerate(tasks):
        if task is not cancelled:
            assert task.result(timeout=120) == number
    waiting("all are done", lambda: daemon.pool("jobs").succeeded == COUNT - 1)
    assert daemon.pool("jobs").queued["normal"] == 0


def test_an_urgent_task_overtakes_a_backlog_on_disk(jobs: Jobs) -> None:
    daemon = jobs(size=0, pool={"queue_size": 2 * COUNT})
    client = daemon.client()
    tasks = fill(client)
    urgent = client.submit("jobs.echo", {"value": "now"}, priority="critical")
    client.flush()
    assert daemon.ctl("scale", "jobs", "1").returncode == 0
    assert urgent.result(timeout=60) == "now"
    assert tasks[-1].status().state == "queued", "it was waited for"
    assert tasks[-1].result(timeout=120) == COUNT - 1
