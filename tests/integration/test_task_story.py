"""Log lines of a real daemon about tasks."""

import json

import pytest

from musterd import TaskCancelled, TaskFailed

LEVELS = {"task.queued": "debug", "task.started": "debug", "task.succeeded": "info"}
TALK = """
from musterd import Worker, task

class Talk(Worker):
    @task
    def say(self, ctx) -> None:
        ctx.log.warning("no price on the page")
        print("[nonsense] only printed")
"""


@pytest.fixture
def daemon(jobs):
    """Start a daemon that logs everything."""
    return jobs(supervisor__log_format="json", supervisor__log_level="debug", breaker__failures=1)


def lines(daemon) -> list[dict]:
    return [json.loads(line) for line in daemon.log().splitlines()]


def story(daemon, task: str) -> list[dict]:
    """Return the lines that `journalctl MUSTERD_TASK=<id>` would show."""
    return [each for each in lines(daemon) if each.get("task") == task]


def events(daemon, task: str) -> list[str]:
    return [each["event"].removeprefix("task.") for each in story(daemon, task)]


def test_a_task_that_succeeds_is_followed_from_its_submit_to_its_end(daemon, waiting):
    with daemon.client() as client:
        task = client.submit("jobs.echo", {"value": 1}, priority="high", target="site.example")
        task.result(30)
    waiting("the end is told", lambda: "succeeded" in events(daemon, task.id))
    queued, started, succeeded = story(daemon, task.id)
    assert (queued["event"], queued["priority"], queued["name"]) == (
        *("task.queued", "high", "jobs.echo"),
    )
    assert started["event"] == "task.started"
    assert started["worker"] in ("jobs/0", "jobs/1")
    assert (succeeded["event"], succeeded["worker"]) == ("task.succeeded", started["worker"])
    assert succeeded["attempt"] == 1
    for each in (queued, started, succeeded):
        assert (each["pool"], each["target"]) == ("jobs", "site.example")
        assert each["level"] == LEVELS[each["event"]]


def test_each_failed_attempt_says_where_why_and_when_it_is_tried_again(daemon, waiting):
    with daemon.client() as client:
        path = str(daemon.folder / "attempts")
        task = client.submit("jobs.flaky", {"path": path, "times": 2})
        assert task.result(30) == 3
    waiting("the end is told", lambda: "succeeded" in events(daemon, task.id))
    assert events(daemon, task.id) == [
        *("queued", "started", "retry", "started", "retry", "started", "succeeded"),
    ]
    first, second = [each for each in story(daemon, task.id) if each["event"] == "task.retry"]
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert first["worker"].startswith("jobs/")
    assert "Retry" in first["reason"]
    assert first["seconds"] == "0.010"


def test_a_task_whose_worker_dies_of_it_tells_so_until_it_is_dead(daemon, waiting):
    with daemon.client() as client:
        task = client.submit("jobs.die", {})
        with pytest.raises(TaskFailed):
            task.result(60)
    waiting("the end is told", lambda: "failed" in events(daemon, task.id))
    assert events(daemon, task.id) == [
        *("queued", "started", "crashed", "started", "crashed", "started", "quarantined", "failed"),
    ]
    crash = story(daemon, task.id)[2]
    assert "ended by signal 9" in crash["reason"]
    assert "loss 1 of 3" in crash["reason"]
    assert story(daemon, task.id)[-1]["level"] == "warning"


def test_what_a_task_waits_for_is_told_once(daemon, waiting):
    daemon.ctl("breaker", "open", "sick.example")
    with daemon.client() as client:
        task = client.submit("jobs.echo", {}, target="sick.example")
        waiting("its wait is told", lambda: "waiting" in events(daemon, task.id))
        other = client.submit("jobs.nap", {"seconds": 2})
        other.result(30)
        daemon.ctl("breaker", "close", "sick.example")
        task.result(30)
    waiting("the end is told", lambda: "succeeded" in events(daemon, task.id))
    assert events(daemon, task.id) == ["queued", "waiting", "started", "succeeded"]
    assert story(daemon, task.id)[1]["reason"] == "breaker of sick.example is held open"
    assert float(story(daemon, task.id)[2]["waited"]) > 1


def test_what_the_handler_logs_belongs_to_the_story_of_its_task(muster, waiting):
    daemon = muster(
        {"talk": {"worker": "talk:Talk", "size": 1}},
        start=False,
        supervisor__log_format="json",
        supervisor__log_level="debug",
    )
    daemon.folder.joinpath("talk.py").write_text(TALK)
    daemon.start()
    with daemon.client() as client:
        task = client.submit("talk.say", {})
        task.result(30)
    waiting("all is told", lambda: len(story(daemon, task.id)) == 5)
    told = ["queued", "started", "succeeded", "worker.output", "worker.output"]
    assert sorted(events(daemon, task.id)) == told
    logged, printed = [each for each in story(daemon, task.id) if each["event"] == told[-1]]
    assert (logged["level"], logged["worker"]) == ("warning", "talk/0")
    assert logged["message"] == "no price on the page"
    assert (printed["level"], printed["message"]) == ("info", "[nonsense] only printed")


def test_a_cancelled_task_says_so(daemon, waiting):
    daemon.ctl("pause", "jobs")
    with daemon.client() as client:
        task = client.submit("jobs.echo", {})
        task.cancel()
        with pytest.raises(TaskCancelled):
            task.result(30)
    waiting("the end is told", lambda: "cancelled" in events(daemon, task.id))
    assert events(daemon, task.id) == ["queued", "cancelled"]


def test_a_story_goes_on_after_a_restart(daemon, waiting):
    daemon.ctl("pause", "jobs")
    with daemon.client() as client:
        task = client.submit("jobs.echo", {"value": 5})
        client.flush()
        assert daemon.stop() == 0
        daemon.start()
        daemon.ctl("resume", "jobs")
        assert task.result(30) == 5
    waiting("the end is told", lambda: "succeeded" in events(daemon, task.id))
    assert events(daemon, task.id) == ["queued", "recovered", "started", "succeeded"]


def test_a_finished_task_is_one_line_by_default(jobs, waiting):
    daemon = jobs(supervisor__log_format="json")
    with daemon.client() as client:
        good = client.submit("jobs.echo", {"value": 1}, target="site.example")
        good.result(30)
        bad = client.submit("jobs.fail", {"text": "no luck"})
        with pytest.raises(TaskFailed):
            bad.result(30)
        path = str(daemon.folder / "attempts")
        late = client.submit("jobs.flaky", {"path": path, "times": 1})
        late.result(30)
    waiting("all ends are told", lambda: "succeeded" in events(daemon, late.id))
    assert events(daemon, good.id) == ["succeeded"]
    (line,) = story(daemon, good.id)
    assert (line["name"], line["attempt"], line["target"]) == ("jobs.echo", 1, "site.example")
    assert line["worker"].startswith("jobs/")
    assert float(line["waited"]) >= 0
    assert events(daemon, bad.id) == ["failed"]
    assert events(daemon, late.id) == ["retry", "succeeded"]


def test_of_many_tasks_some_are_told_all_failures_and_the_others_counted(jobs, waiting):
    daemon = jobs(supervisor__log_format="json", supervisor__log_tasks=1)
    with daemon.client() as client:
        handles = client.submit_many([("jobs.echo", {"value": n}, {}) for n in range(2000)])
        bad = client.submit("jobs.fail", {"text": "no luck"})
        for handle in handles:
            handle.result(60)
        with pytest.raises(TaskFailed):
            bad.result(60)
    assert daemon.stop() == 0
    told = lines(daemon)
    by_event: dict[str, list[str]] = {}
    for each in told:
        by_event.setdefault(each["event"], []).append(each.get("task", ""))
    whole = by_event["task.succeeded"]
    assert 1 <= len(whole) < 100
    assert not by_event.keys() & {"task.queued", "task.started", "task.waiting"}
    assert by_event["task.failed"] == [bad.id]
    assert "no luck" in story(daemon, bad.id)[-1]["reason"]
    counted = sum(each["count"] for each in told if each["event"] == "tasks.finished")
    assert counted + len(whole) == 2000


def test_nothing_is_told_of_tasks_that_do_well_where_nobody_wants_it(jobs):
    daemon = jobs(supervisor__log_format="json", supervisor__log_tasks=0)
    with daemon.client() as client:
        client.submit("jobs.echo", {}).result(30)
        with pytest.raises(TaskFailed):
            client.submit("jobs.fail", {"text": "x"}).result(30)
    assert daemon.stop() == 0
    told = {each["event"] for each in lines(daemon) if each["event"].startswith("task.")}
    assert told == {"task.failed"}


NOISY = """
import logging
from musterd import Worker, task

class Noisy(Worker):
    @task
    def say(self, ctx) -> None:
        for name in ("urllib3.connectionpool", "httpx", "aiohttp.access", "PIL.Image", "mine"):
            log = logging.getLogger(name)
            log.debug("a byte came in")
            log.info("a request of %s", name)
            log.warning("a mishap of %s", name)
"""


@pytest.mark.parametrize("level", ["info", "debug"])
def test_chatty_libraries_are_turned_down_in_workers(muster, waiting, level):
    daemon = muster(
        {"noisy": {"worker": "noisy:Noisy", "size": 1}},
        start=False,
        supervisor__log_format="json",
        supervisor__log_level=level,
    )
    daemon.folder.joinpath("noisy.py").write_text(NOISY)
    daemon.start()

    def said() -> list[str]:
        return [each["message"] for each in lines(daemon) if each["event"] == "worker.output"]

    with daemon.client() as client:
        client.submit("noisy.say", {}).result(30)
    waiting("the last word is there", lambda: any("a mishap of mine" in each for each in said()))
    told = " ".join(said())
    for name in ("urllib3.connectionpool", "httpx", "aiohttp.access", "PIL.Image"):
        assert f"a mishap of {name}" in told
        assert (f"a request of {name}" in told) == (level == "debug")
    assert "a request of mine" in told
