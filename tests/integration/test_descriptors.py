"""A daemon that runs out of descriptors: it survives, serves whom it can, and answers operators."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from musterd.supervisor.api import rpc
from musterd.supervisor.ctl.connection import Connection
from support.daemon import Jobs

LIMIT = 400
CROWD_MAX = 10_000
SECONDS = 60
CALLERS = 20
SYSTEM = 71  # EX_OSERR of sysexits.h


@pytest.fixture
def short(jobs: Jobs) -> Any:
    """Make a daemon with few descriptors."""
    made = jobs(
        size=2,
        start=False,
        pool={"spare": False, "start_timeout": "10s", "restart": {"base": "50ms"}},
    )
    made.limit_descriptors(LIMIT)
    return made.start()


@contextlib.contextmanager
def crowding(path: str) -> Iterator[list[socket.socket]]:
    """Open more and more silent connections."""
    over = threading.Event()
    with contextlib.ExitStack() as held:
        crowd: list[socket.socket] = []

        def come() -> None:
            while not over.is_set() and len(crowd) < CROWD_MAX:
                caller = held.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                with contextlib.suppress(BlockingIOError):  # the kernel's queue is full
                    caller.connect(path)
                    crowd.append(caller)
                time.sleep(0.001)

        thread = threading.Thread(target=come)
        thread.start()
        try:
            yield crowd
        finally:
            over.set()
            thread.join()


def used(made: Any) -> int:
    return int(psutil.Process(made.pid).num_fds())


def test_a_crowd_of_connections_is_put_out_and_the_daemon_lives(short, waiting) -> None:
    before = used(short)
    with short.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(SECONDS) == 1
        with crowding(short.tasks_socket) as crowd:
            problem = waiting("it is told", lambda: short.status().problem)
            assert f"of {LIMIT} descriptors are in use: clients are disconnected" in problem
            waiting("they are many more", lambda: len(crowd) > 2 * LIMIT)
            assert client.submit("jobs.echo", {"value": 2}).result(SECONDS) == 2
            with short.client(connect_timeout=SECONDS) as late:
                assert late.submit("jobs.echo", {"value": 3}).result(SECONDS) == 3
        waiting("nothing is wrong", lambda: not short.status().problem)
    waiting("all is given back", lambda: used(short) <= before)
    log = short.log()
    assert log.count("event=door.shut") == 1, "once a minute"
    assert log.count("worker.crashed") == 0, "workers were left alone"


def test_without_any_descriptor_it_answers_and_recovers(short, waiting) -> None:
    def limit(soft: int) -> None:
        resource.prlimit(short.pid, resource.RLIMIT_NOFILE, (soft, LIMIT))

    limit(used(short))
    waiting("the door is shut", lambda: "descriptors are in use" in short.status().problem)
    fork_server_of(short).kill()
    waiting("it cannot make another", lambda: "Too many open files" in short.log())
    with contextlib.ExitStack() as held:
        for _ in range(CALLERS):  # more than the descriptors that a fork server could leave
            caller = Connection(short.control_socket, timeout=SECONDS)
            held.enter_context(caller).request(rpc.Version())
        assert short.ctl("status").returncode == 0, "the workers are still there"
    with short.client(connect_timeout=SECONDS) as client:
        task = client.submit("jobs.echo", {"value": 1})
        limit(LIMIT)
        assert task.result(SECONDS) == 1
    short.ctl("restart", "jobs")
    assert short.stop() == 0
    assert "Traceback" not in short.log()


def fork_server_of(made: Any) -> psutil.Process:
    children = psutil.Process(made.pid).children()
    (fork_server,) = [child for child in children if "fork server" in child.cmdline()[0]]
    return fork_server


@pytest.mark.parametrize("limit", [16, 32, 64])
def test_a_limit_that_is_too_low_to_start_with_is_told_with_what_is_needed(
    jobs: Jobs, limit: int
) -> None:
    made = jobs(size=2, start=False)
    done = run_limited(made, limit)
    assert done.returncode == SYSTEM
    (line,) = done.stderr.splitlines()
    assert f"the limit of open files is {limit}, and" in line
    assert "LimitNOFILE=" in line
    assert "ulimit -n" in line
    needed = int(line.split(", and ")[1].split()[0])
    made.limit_descriptors(needed)
    made.start()
    with made.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(SECONDS) == 1
    assert made.status().problem == ""


def test_a_soft_limit_that_is_too_low_is_raised(jobs: Jobs) -> None:
    made = jobs(size=2, start=False)
    made._launcher = ["sh", "-c", 'ulimit -Sn 32 && ulimit -Hn 4096 && exec "$@"', "sh"]
    made.start()
    assert 32 < resource.prlimit(made.pid, resource.RLIMIT_NOFILE)[0] <= 4096


def run_limited(made: Any, limit: int) -> "subprocess.CompletedProcess[str]":
    shell = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"]
    return subprocess.run(
        [*shell, sys.executable, "-m", "musterd.supervisor", "run", "-c", made.config_path],
        cwd=made.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
