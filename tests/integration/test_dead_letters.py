"""Failed tasks of a real daemon: listed, retried, purged, and kept across its death."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from musterd import TaskFailed
from musterd.supervisor.api import rpc

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECONDS = 30


def fail(daemon, *ids: str) -> None:
    for id_ in ids:
        done = daemon.ctl("submit", "jobs.fail", f"text={id_} is bad", "--id", id_, "--wait")
        assert done.returncode == 1, done.stderr


def dead(daemon, *options: str) -> list[dict]:
    done = daemon.ctl("--json", "dead", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["tasks"]


def test_the_example_of_the_document_works(muster):
    daemon = muster({}, start=False)
    blocks = BLOCK.findall((ROOT / "docs/store.md").read_text())
    for _, text in blocks:
        if match := re.match(r"# ([\w.]+\.(?:py|toml))\n", text):
            (daemon.folder / match[1]).write_text(text)
    config = tomllib.loads((daemon.folder / "orders.toml").read_text())
    config["supervisor"] = {"runtime_dir": str(daemon.runtime), "state_dir": str(daemon.state)}
    daemon.config_path.write_bytes(msgspec.json.encode(config))
    daemon.start()
    (script,) = (text for kind, text in blocks if kind == "sh" and "musterctl dead" in text)
    outputs = []
    for line in script.splitlines():
        command = line.partition("#")[0].split()
        if command[0] == "musterctl":
            outputs.append(daemon.ctl(*command[1:]))
        else:
            subprocess.run(command, cwd=daemon.folder, check=True)
    submit, listed, task, retried, again, purged = outputs
    assert (submit.returncode, "the gateway is down" in submit.stderr) == (1, True)
    assert "order-1  orders.send" in listed.stdout
    assert "ConnectionError: the gateway is down" in listed.stdout
    attempts = task.stdout.partition("failed attempts:\n")[2].splitlines()
    assert [line.split()[0] for line in attempts] == ["1", "2"]
    assert all("orders/0  ConnectionError: the gateway is down" in line for line in attempts)
    assert (retried.returncode, retried.stdout) == (0, "order-1: queued\n")
    assert (again.returncode, again.stdout) == (0, "order 1 is sent\n")
    assert (purged.returncode, purged.stdout) == (0, "0 failed tasks deleted\n")


def test_dead_lists_failed_tasks_newest_first(jobs):
    daemon = jobs(size=1, others={"other": {"worker": "jobs:Jobs", "size": 1}})
    assert daemon.ctl("dead").stdout == "no failed tasks\n"
    fail(daemon, "a", "b")
    daemon.ctl("submit", "other.fail", "text=elsewhere", "--id", "c", "--wait")
    daemon.ctl("submit", "jobs.echo", "--wait")
    assert [task["id"] for task in dead(daemon)] == ["c", "b", "a"]
    assert [task["id"] for task in dead(daemon, "--pool", "jobs", "--limit", "1")] == ["b"]
    (task, *_) = dead(daemon, "--pool", "jobs")
    assert task["failure"]["message"] == "b is bad"
    assert daemon.ctl("dead", "--limit", "1").stdout.endswith("... and more: see --limit\n")


def test_the_longest_list_says_that_there_are_more(jobs):
    daemon = jobs(size=1)
    with daemon.client() as client:
        for handle in client.submit_many([("jobs.fail", {"text": "x"})] * (rpc.LIST_MAX + 1)):
            handle.outcome(SECONDS)
    for command in ("tasks", "dead"):
        done = daemon.ctl("--json", command, "--limit", str(rpc.LIST_MAX))
        found = json.loads(done.stdout)
        assert (len(found["tasks"]), found["more"]) == (rpc.LIST_MAX, True), command
    with pytest.raises(rpc.RpcError, match="limit"):
        daemon.ask(rpc.ListDead(limit=rpc.LIST_MAX + 1))
    everything = json.loads(daemon.ctl("--json", "dead", "--limit", "5000").stdout)
    assert (len(everything["tasks"]), everything["more"]) == (rpc.LIST_MAX + 1, False)
    assert daemon.ctl("purge", "--all").returncode == 0
    assert not json.loads(daemon.ctl("--json", "dead").stdout).get("more")


def test_a_poison_task_is_named_as_such(jobs):
    daemon = jobs(size=1, pool={"max_crashes": 2})
    daemon.ctl("submit", "jobs.die", "--id", "poison", "--wait")
    assert "PoisonTask: quarantined: it crashed its worker 2 times" in daemon.ctl("dead").stdout
    with daemon.client() as client:
        handle = client.task("poison")
        with pytest.raises(TaskFailed, match="quarantined"):
            handle.result(SECONDS)
        attempts = handle.status().attempts
    assert [each.worker for each in attempts] == ["jobs/0", "jobs/0"]
    assert all("ended by signal 9" in each.failure.message for each in attempts)


def test_a_retried_task_is_run_and_its_new_result_is_told(jobs, tmp_path):
    daemon = jobs(size=1, pool={"max_crashes": 1})
    with daemon.client() as client:
        mark = tmp_path / "mark"
        handle = client.submit("jobs.die", {"unless": str(mark)})
        with pytest.raises(TaskFailed):
            handle.result(SECONDS)
        done = daemon.ctl("retry", handle.id)
        assert (done.returncode, done.stdout) == (0, f"{handle.id}: queued\n")
        again = client.task(handle.id)
        assert again.result(SECONDS) == "spared"
        status = again.status()
    assert (status.state, status.attempt, status.crashes) == ("succeeded", 1, 0)
    assert len(status.attempts) == 1  # the attempt before the restart
    assert dead(daemon) == []


def test_what_cannot_be_retried_is_said_and_the_rest_is_retried(jobs):
    daemon = jobs(size=1)
    fail(daemon, "a")
    daemon.ctl("submit", "jobs.echo", "--id", "good", "--wait")
    daemon.ctl("submit", "jobs.nap", "seconds=60", "--id", "runs")
    done = daemon.ctl("retry", "good", "runs")
    assert (done.returncode, done.stdout) == (1, "")
    assert "task 'good' has succeeded" in done.stderr
    assert "task 'runs' has not ended" in done.stderr
    done = daemon.ctl("retry", "none", "a")
    assert (done.returncode, done.stdout) == (4, "a: queued\n")
    assert "no such task: 'none'" in done.stderr
    answer = daemon.ask(rpc.RetryTasks(ids=["good"]))
    assert answer["refused"][0]["code"] == "NotFailed"
    assert daemon.ctl("cancel", "runs").returncode == 0


def test_a_cancelled_task_can_be_retried(jobs):
    daemon = jobs(size=1)
    daemon.ctl("submit", "jobs.echo", "value=1", "--delay", "1000", "--id", "a")
    assert daemon.ctl("cancel", "a").returncode == 0
    assert daemon.ctl("retry", "a").returncode == 0
    assert "delay in" in daemon.ctl("task", "a").stdout  # the delay begins again
    assert daemon.ctl("cancel", "a").returncode == 0


def test_purge_forgets_what_was_named_and_nothing_else(jobs):
    daemon = jobs(size=1)
    fail(daemon, "a", "b", "c")
    daemon.ctl("submit", "jobs.echo", "--id", "good", "--wait")
    done = daemon.ctl("purge", "a", "good")
    assert (done.returncode, done.stdout) == (1, "1 failed tasks deleted\n")
    assert "task 'good' is succeeded: only failed tasks are purged" in done.stderr
    assert daemon.ctl("task", "a").returncode == 4
    assert daemon.ctl("purge", "a").returncode == 4
    assert [task["id"] for task in dead(daemon)] == ["c", "b"]
    assert daemon.ctl("purge", "--older-than", "1h").stdout == "0 failed tasks deleted\n"
    assert daemon.ctl("purge", "--all").stdout == "2 failed tasks deleted\n"
    assert daemon.ctl("task", "good").returncode == 0


@pytest.mark.parametrize(
    "arguments", [(), ("a", "--all"), ("--all", "--older-than", "1h"), ("--older-than", "soon")]
)
def test_purge_wants_exactly_one_thing(jobs, arguments):
    daemon = jobs(size=0)
    assert daemon.ctl("purge", *arguments).returncode == 2


def test_attempts_and_retries_survive_the_daemons_death(jobs, tmp_path, waiting):
    daemon = jobs(size=1, retry__base="10ms")
    fail(daemon, "a")
    daemon.ctl("submit", "jobs.nap", "seconds=60", "--id", "busy")
    waiting("it runs", lambda: daemon.worker("jobs/0").task_id == "busy")
    assert daemon.ctl("retry", "a").returncode == 0  # acknowledged, so it is on disk
    daemon.kill()
    daemon.start()
    assert daemon.ctl("cancel", "busy").returncode == 0
    done = daemon.ctl("submit", "jobs.fail", "text=a is bad", "--id", "a", "--wait")
    assert done.returncode == 1
    daemon.kill()
    daemon.start()
    (task,) = dead(daemon)
    assert (task["id"], task["failure"]["message"]) == ("a", "a is bad")
    attempts = daemon.ask(rpc.GetTask(id="a"))["attempts"]
    assert [each["failure"]["message"] for each in attempts] == ["a is bad", "a is bad"]


def test_a_task_that_waits_for_its_next_attempt_shows_its_errors(jobs, waiting):
    daemon = jobs(size=1, retry__base="60s", retry__max="60s")
    with daemon.client() as client:
        handle = client.submit("jobs.flaky", {"path": "/nonexistent/file", "times": 1})
        status = waiting("it failed once", lambda: handle.status().attempts and handle.status())
        assert status.state == "waiting"
        assert status.attempts[0].failure.type == "FileNotFoundError"
        assert status.attempts[0].worker == "jobs/0"
        handle.cancel()


def test_a_task_without_a_pool_is_not_said_to_be_cancelled(jobs):
    other = {"other": {"worker": "jobs:Jobs", "size": 1}}
    daemon = jobs(size=1, others=other)
    daemon.ctl("stop", "other")
    with daemon.client() as client:
        stranded = client.submit("other.echo", {"value": 1}).id
    assert daemon.stop() == 0
    config = msgspec.json.decode(daemon.config_path.read_bytes())
    kept = config["pools"].pop("other")
    daemon.config_path.write_bytes(msgspec.json.encode(config))
    daemon.start()
    done = daemon.ctl("cancel", stranded)
    assert (done.returncode, done.stdout) == (1, f"{stranded}: queued\n")
    assert "their pool is not configured" in done.stderr
    config["pools"]["other"] = kept | {"size": 0}
    daemon.config_path.write_bytes(msgspec.json.encode(config))
    assert daemon.ctl("update").returncode == 0
    done = daemon.ctl("cancel", stranded)
    assert (done.returncode, done.stdout) == (0, f"{stranded}: cancelled\n")
