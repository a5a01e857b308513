"""Idle workers: signs of life, calls of healthy(), and what happens without an answer."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Muster, Musters

WORKERS = """
import asyncio, threading, time
from pathlib import Path
from musterd import Worker, task

class Patient(Worker):
    def open(self):
        self.health = Path(self.options["health"])

    def healthy(self):
        with open(self.options["asked"], "a") as f:
            f.write(f"{self.index}\\n")
        how = self.health.read_text() if self.health.exists() else "well"
        if how in ("well", ""):     # "": the answer is being written
            return True
        self.health.unlink()
        if how == "raise":
            raise RuntimeError("the browser is gone")
        while how == "hang":
            time.sleep(0.01)
        return False

    @task
    def echo(self, ctx, value: int = 0) -> int:
        return value

    @task
    def nap(self, ctx, seconds: float) -> None:
        time.sleep(seconds)

    @task
    def hog(self, ctx) -> None:
        def loop():
            time.sleep(0.2)
            sum(range(10**12))      # never gives the interpreter back

        threading.Thread(target=loop, daemon=True).start()


class AsyncPatient(Patient):
    async def healthy(self):
        await asyncio.sleep(0)
        return Patient.healthy(self)
"""


@pytest.fixture
def patients(muster: Musters, tmp_path: Path) -> Callable[..., Any]:
    """Make a daemon with the pool `ward`: patients(size=2, ...); `health` sets the answers."""

    def make(size: int = 1, worker: str = "Patient", **pool: Any) -> Any:
        options = {"health": str(tmp_path / "health"), "asked": str(tmp_path / "asked")}
        keys = {"worker": f"patients:{worker}", "size": size, "options": options, **pool}
        made = muster({"ward": keys}, start=False)
        Path(made.folder, "patients.py").write_text(WORKERS)
        made.health, made.asked = tmp_path / "health", tmp_path / "asked"
        return made.start()

    return make


def lost(daemon: Muster, cause: str) -> Callable[[], bool]:
    return lambda: daemon.pool("ward").lost == {cause: 1} and daemon.pool("ward").running >= 1


@pytest.mark.parametrize("worker", ["Patient", "AsyncPatient"])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("no", "unhealthy: healthy() returned False"),
        ("raise", "unhealthy: healthy() raised RuntimeError: the browser is gone"),
    ],
)
def test_an_unhealthy_worker_is_replaced(patients, waiting, worker, answer, reason):
    daemon = patients(worker=worker, health_interval="100ms")
    before = daemon.worker("ward/0").pid
    waiting("it is asked", daemon.asked.exists)
    assert daemon.worker("ward/0").pid == before, "and well"
    daemon.health.write_text(answer)
    waiting("it is replaced", lost(daemon, "unhealthy"))
    assert daemon.worker("ward/0").pid != before
    assert reason in daemon.log()
    assert "cause=unhealthy" in daemon.log()
    with daemon.client() as client:
        assert client.submit("ward.echo", {"value": 5}).result(30) == 5


def test_a_healthy_that_never_answers_is_ended_and_shown(patients, waiting):
    daemon = patients(health_interval="100ms", health_timeout="500ms")
    daemon.health.write_text("hang")
    waiting("it is replaced", lost(daemon, "unhealthy"))
    assert "healthy() has not answered for" in daemon.log()
    waiting("its stacks are in the log", lambda: "in healthy" in daemon.log())


def test_a_task_that_came_while_healthy_hung_is_run_by_the_next(patients, waiting):
    daemon = patients(health_interval="100ms", health_timeout="1s")
    daemon.health.write_text("hang")
    waiting("it is asked", lambda: not daemon.health.exists())
    with daemon.client() as client:
        handle = client.submit("ward.echo", {"value": 7})
        assert handle.result(60) == 7
    assert daemon.pool("ward").lost == {"unhealthy": 1}


def test_healthy_is_asked_only_while_idle_and_never_when_switched_off(patients, waiting):
    daemon = patients(health_interval="50ms")
    with daemon.client() as client:
        waiting("it is asked", daemon.asked.exists)
        nap = client.submit("ward.nap", {"seconds": 1.0})
        waiting("it runs", lambda: daemon.worker("ward/0").state == "BUSY")
        asked = daemon.asked.read_text()
        nap.result(30)
        # One health check may have been under way when the worker was given the task.
        assert len(daemon.asked.read_text()) - len(asked) <= 2 * len("0\n")
    daemon.stop()
    daemon.asked.unlink()
    off = patients(health_interval="0s", heartbeat_timeout="1s")
    with off.client() as client:
        client.submit("ward.nap", {"seconds": 0.5}).result(30)
        client.submit("ward.echo", delay=2).result(30)
    assert not off.asked.exists()
    assert off.pool("ward").lost == {}


def test_an_idle_worker_that_is_stopped_is_found_dumped_and_replaced(patients, waiting):
    daemon = patients(size=2, heartbeat_timeout="1s")
    pid = daemon.worker("ward/1").pid
    os.kill(pid, signal.SIGSTOP)
    waiting("it is replaced", lost(daemon, "hung"))
    assert daemon.worker("ward/0").restarts == 0
    assert daemon.worker("ward/1").pid != pid
    assert "no sign of life while idle for" in daemon.log()
    waiting("its stacks are in the log", lambda: "in serve" in daemon.log())


def test_an_idle_worker_whose_interpreter_is_held_by_a_loop_in_c_is_replaced(patients, waiting):
    daemon = patients(heartbeat_timeout="1s")
    with daemon.client() as client:
        client.submit("ward.hog").result(30)
        waiting("it is replaced", lost(daemon, "hung"))
        assert client.submit("ward.echo", {"value": 9}).result(30) == 9
    waiting("its stacks are in the log", lambda: "in loop" in daemon.log())


def test_idle_workers_that_are_well_are_left_alone(patients, waiting):
    daemon = patients(size=3, heartbeat_timeout="600ms", health_interval="50ms")
    waiting("they were asked", daemon.asked.exists)
    waiting("often", lambda: len(daemon.asked.read_text().split()) > 100)
    assert daemon.pool("ward").lost == {}
    assert daemon.pool("ward").restarts == 0
