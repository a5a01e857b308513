"""The commands of musterctl, typed at a real daemon."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from musterd import QueueFull


def ran(done: Any, code: int = 0) -> str:
    assert done.returncode == code, (done.args, done.stdout, done.stderr)
    return str(done.stdout)


# -- pause and drain ----------------------------------------------------------------------------


def test_a_paused_pool_takes_tasks_and_runs_them_when_it_is_resumed(jobs):
    daemon = jobs(size=1)
    assert ran(daemon.ctl("pause", "jobs")) == "jobs: paused\n"
    assert ran(daemon.ctl("pause", "jobs")) == "jobs: paused\n"
    with daemon.client() as client:
        task = client.submit("jobs.echo", {"value": 1})
        task.ack(20)
        assert "the pool is paused" in ran(daemon.ctl("task", task.id))
        shown = ran(daemon.ctl("status"))
        assert "paused: musterctl resume jobs" in shown
        assert daemon.pool("jobs").halt == "paused"
        assert ran(daemon.ctl("resume", "jobs")) == "jobs: resumed\n"
        assert task.result(20) == 1


def test_a_drain_waits_for_what_runs_and_refuses_what_comes(jobs, tmp_path, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        running = client.submit("jobs.nap", {"seconds": 3.0, "tell": str(tmp_path / "began")})
        queued = client.submit("jobs.echo", {"value": 2})
        waiting("the task runs", (tmp_path / "began").exists)
        answer = ran(daemon.ctl("--no-block", "drain"))
        assert answer.startswith("jobs: drained: 1 still running\n")
        assert ran(daemon.ctl("drain", "jobs")) == "jobs: drained: 1 tasks wait in its queue\n"
        assert running.done() or running.result(20) == 0
        with pytest.raises(QueueFull, match="drained until somebody says musterctl resume jobs"):
            client.submit("jobs.echo", {"value": 3}).result(20)
        assert "QueueFull" in daemon.ctl("submit", "jobs.echo").stderr
        with ThreadPoolExecutor(1) as patient:
            waits = patient.submit(client.submit, "jobs.echo", {"value": 4}, wait=True)
            assert ran(daemon.ctl("resume")) == "jobs: resumed\n"
            assert queued.result(20) == 2
            assert waits.result(20).result(20) == 4


def test_a_drain_that_is_undone_meanwhile_says_so(jobs, tmp_path, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        running = client.submit("jobs.nap", {"seconds": 60, "tell": str(tmp_path / "began")})
        waiting("the task runs", (tmp_path / "began").exists)
        command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
        drain = subprocess.Popen([*command, "drain"], stdout=subprocess.PIPE, text=True)
        waiting("it is drained", lambda: daemon.pool("jobs").halt == "drained")
        ran(daemon.ctl("resume"))
        assert drain.communicate(timeout=30)[0] == "jobs: resumed: it was resumed meanwhile\n"
        assert drain.returncode == 1
        running.cancel()


def test_a_pause_outlives_workers_and_the_daemon(jobs, waiting):
    daemon = jobs(size=1)
    ran(daemon.ctl("pause", "jobs"))
    ran(daemon.ctl("restart", "jobs"))
    assert daemon.pool("jobs").halt == "paused"
    daemon.kill()
    daemon.start()
    assert daemon.pool("jobs").halt == "paused"
    assert "pool is paused" in daemon.log()
    ran(daemon.ctl("resume"))
    assert daemon.stop() == 0
    daemon.start()
    assert daemon.pool("jobs").halt == ""


def test_one_slot_is_held_back_and_the_others_work(jobs):
    daemon = jobs(size=2)
    ran(daemon.ctl("pause", "jobs/0"))
    with daemon.client() as client:
        naps = [client.submit("jobs.nap", {"seconds": 0.01}) for _ in range(4)]
        assert {nap.result(20) for nap in naps} == {1}
    ran(daemon.ctl("pause", "jobs"))
    refused = daemon.ctl("resume", "jobs/0")
    assert refused.returncode == 1
    assert "its pool is paused: musterctl resume jobs" in refused.stdout
    ran(daemon.ctl("resume", "jobs"))
    assert [worker.halt for worker in daemon.pool("jobs").workers] == ["", ""]


@pytest.mark.parametrize("command", ["pause", "drain", "resume"])
def test_a_name_that_is_none_is_an_error(jobs, command):
    daemon = jobs(size=1)
    for name in ("nosuch", "jobs/7", "x*"):
        assert daemon.ctl(command, name).returncode == 4
    answer = json.loads(ran(daemon.ctl("--json", command, "job*")))
    assert [slot["name"] for slot in answer["slots"]] == ["jobs"]
