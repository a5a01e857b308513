"""Hostile callers at the control socket of a real daemon, while tasks run."""

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd.supervisor.api import rpc
from support.daemon import Muster

ATTACKER = Path(__file__).with_name("control_attacker.py")
ATTACK_SECONDS = 3.0
LINES = 1_000_000  # control_attacker.LINES
END_SECONDS = 90.0
# The attackers use part of a small machine, so tasks are slower but are not held up. A daemon that
# serves one caller to the end before the others exceeds both limits by far.
SLOWER_MAX = 25
LATENCY_SECONDS_MAX = 2.0
GROWTH_BYTES_MAX = 40 * 1024 * 1024


class Work(threading.Thread):
    """Runs tasks one after the other and notes how long each took."""

    def __init__(self, daemon: Muster) -> None:
        super().__init__()
        self._client = daemon.client()
        self._enough = threading.Event()
        self.seconds: list[float] = []
        self.failed: list[BaseException] = []

    def run(self) -> None:
        with self._client as client:
            while not self._enough.is_set():
                began = time.monotonic()
                try:
                    value = len(self.seconds)
                    assert client.submit("jobs.echo", {"value": value}).result(60) == value
                except Exception as error:  # noqa: BLE001 - looked at by the test
                    self.failed.append(error)
                    return
                self.seconds.append(time.monotonic() - began)

    def end(self) -> None:
        self._enough.set()
        self.join(60)


def median_of_work(daemon: Muster, during: Any) -> float:
    """Return the median time of tasks that run while `during` does."""
    work = Work(daemon)
    work.start()
    try:
        during()
    finally:
        work.end()
    assert not work.failed, work.failed
    assert work.seconds, "no task has ended"
    return statistics.median(work.seconds)


def attack(daemon: Muster, *kinds: str) -> tuple[dict[str, int], int]:
    """Attack in these ways at once; return what each has done, and the daemon's peak memory."""
    made = {}
    process = psutil.Process(daemon.pid)
    most = 0
    with contextlib.ExitStack() as running:
        for number, kind in enumerate(kinds):
            words = (daemon.control_socket, kind, str(ATTACK_SECONDS), str(number))
            made[kind] = running.enter_context(
                subprocess.Popen(
                    [sys.executable, str(ATTACKER), *words], stdout=subprocess.PIPE, text=True
                )
            )
        for each in made.values():
            assert each.stdout is not None
            assert each.stdout.readline() == "begun\n"
        while any(each.poll() is None for each in made.values()):
            # A well-behaved caller is served meanwhile.
            assert daemon.status().state == "running"
            most = max(most, process.memory_info().rss)
            time.sleep(0.05)
        done = {kind: each.communicate()[0] for kind, each in made.items()}
    assert [each.returncode for each in made.values()] == [0] * len(kinds)
    return {kind: int(said) for kind, said in done.items()}, most


LINES_OF_JSON = pytest.param("lines", marks=pytest.mark.long)


@pytest.mark.timeout(300)  # a million lines, on a busy machine
@pytest.mark.parametrize("kind", ["bytes", "halves", LINES_OF_JSON, "slow", "crowd"])
def test_a_hostile_caller_disturbs_no_task_and_leaves_nothing(jobs, waiting, kind):
    daemon = jobs(size=2)
    process = psutil.Process(daemon.pid)
    idle = median_of_work(daemon, lambda: time.sleep(1.0))
    waiting("its clients are gone", lambda: daemon.status().state == "running")
    before, fds = process.memory_info().rss, process.num_fds()
    pids = {worker.pid for worker in daemon.pool("jobs").workers}
    found: list[tuple[dict[str, int], int]] = []
    attacked = median_of_work(daemon, lambda: found.append(attack(daemon, kind)))
    done, most = found[0]
    assert most < before + GROWTH_BYTES_MAX
    assert done[kind] > 50, f"that was no attack: {done}"
    if kind == "lines":
        assert done[kind] == LINES
    assert attacked < max(idle * SLOWER_MAX, LATENCY_SECONDS_MAX)
    waiting("descriptors are given back", lambda: process.num_fds() <= fds)
    assert process.memory_info().rss < before + GROWTH_BYTES_MAX
    assert {worker.pid for worker in daemon.pool("jobs").workers} == pids
    assert "internal error" not in daemon.log()
    assert "Traceback" not in daemon.log()


# -- many well-behaved callers --------------------------------------------------------------------


def at_once(daemon: Muster, commands: list[list[str]]) -> list[Any]:
    with contextlib.ExitStack() as opened:
        running = []
        for words in commands:
            # Output goes to files, because nothing reads all pipes at the same time.
            out, err = (opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
            process = subprocess.Popen([*command, *words], stdout=out, stderr=err)
            running.append((opened.enter_context(process), out, err))
        deadline = time.monotonic() + END_SECONDS
        while any(process.poll() is None for process, _, _ in running):
            if time.monotonic() > deadline:
                for process, _, _ in running:
                    process.kill()
                left = [process.args for process, _, _ in running if process.wait()]
                pytest.fail(f"not ended: {left}")
            daemon.ask(rpc.Resume())  # the last pause may have no resume after it
            time.sleep(0.2)
        done = []
        for process, out, err in running:
            out.seek(0)
            err.seek(0)
            words = process.args
            done.append(
                subprocess.CompletedProcess(words, process.returncode, out.read(), err.read())
            )
        return done


def test_commands_at_the_same_time_do_not_conflict(jobs):
    """Twenty callers give conflicting commands; each command ends and reports its true outcome."""
    daemon = jobs(size=4)
    rng = random.Random(1)
    commands = [
        *(["restart", f"jobs/{number}"] for number in range(4)),
        *(["scale", "jobs", str(size)] for size in (3, 5, 4)),
        *(["stop", "jobs/1"], ["start", "jobs/1"], ["restart", "all"], ["reset", "all"]),
        *(["pause", "jobs"], ["resume", "jobs"], ["status"], ["memory"], ["tasks"]),
        *(["reload"], ["reload", "jobs"], ["update"], ["reread"]),
        *(["submit", "jobs.echo", f"value={number}", "--wait"] for number in range(5)),
    ]
    for _ in range(2):
        rng.shuffle(commands)
        for words, done in zip(commands, at_once(daemon, commands), strict=True):
            if words[0] in ("submit", "memory", "tasks", "reread", "pause", "resume"):
                assert done.returncode == 0, (words, done)
            # A command whose effect another one undid says so.
            assert done.returncode in (0, 1, 3, 4), (words, done)
            assert "Traceback" not in done.stderr
    # A stop may have been the last command for jobs/1.
    after = (["start", "all"], ["scale", "jobs", "4"], ["resume", "jobs"], ["restart", "all"])
    for words in (*after, ["status"]):
        done = daemon.ctl(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    with daemon.client() as client:
        assert [client.submit("jobs.echo", {"value": n}).result(30) for n in range(20)] == [
            *range(20)
        ]
    assert "Traceback" not in daemon.log()


def test_a_stop_that_somebody_undoes_says_so_instead_of_waiting_for_ever(jobs, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        task = client.submit("jobs.nap", {"seconds": 3})
        waiting("it runs", lambda: daemon.worker("jobs/0").state == "BUSY")
        command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
        with subprocess.Popen(
            [*command, "stop", "jobs/0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as stop:
            waiting("it drains", lambda: daemon.worker("jobs/0").state == "DRAINING")
            assert daemon.ctl("start", "jobs/0").returncode == 0
            out, _ = stop.communicate(timeout=END_SECONDS)
        assert task.result(30) == 0
    assert stop.returncode == 1
    assert "it was started meanwhile" in out


def test_hundreds_of_requests_at_once_are_all_answered(jobs):
    daemon = jobs(size=2)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(20):
                daemon.ask(rpc.Status())
        except Exception as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_SECONDS)
    assert not failed
    assert os.path.exists(daemon.control_socket)
