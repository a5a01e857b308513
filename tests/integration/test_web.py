"""The web process of a real daemon, over real HTTP."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd.supervisor.api import rpc
from musterd.supervisor.web import protocol
from support.daemon import Jobs, Muster
from support.waiting import Waiting


class Http(http.client.HTTPConnection):
    """A connection to "http://HOST:PORT" or "unix:/path"."""

    def __init__(self, url: str, timeout: float = 20) -> None:
        self._path = url.removeprefix("unix:") if url.startswith("unix:") else ""
        host = "localhost" if self._path else url.removeprefix("http://")
        super().__init__(host, timeout=timeout)

    def connect(self) -> None:
        if not self._path:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(url: str, path: str, **headers: str) -> tuple[int, Any]:
    connection = Http(url)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, json.loads(body) if is_json else body.decode()


def questions(url: str) -> float:
    """Return how many questions the web process has asked the supervisor."""
    _, text = get(url, "/metrics")
    return float(re.findall(r"^musterd_web_questions_total (.+)$", text, re.MULTILINE)[0])


def web(daemon: Muster) -> Any:
    return daemon.status().web


def up(daemon: Muster, waiting: Waiting) -> str:
    """Return the address, as soon as there is one."""
    return waiting("the web process is up", lambda: web(daemon).address)


@pytest.fixture
def fleet(jobs: Jobs, waiting: Waiting) -> tuple[Muster, str]:
    daemon = jobs(2, http__listen="127.0.0.1:0")
    waiting("both workers are up", lambda: daemon.pool("jobs").running == 2)
    url = up(daemon, waiting)
    # The web process may still have a status from before both workers were up.
    waiting("it knows that they are", lambda: _if(get(url, "/readyz"), 200))
    return daemon, url


def test_health_readiness_and_status_are_told(fleet: tuple[Muster, str]) -> None:
    daemon, url = fleet
    status, found = get(url, "/healthz")
    assert (status, found["status"], found["pid"]) == (200, "ok", daemon.pid)
    status, found = get(url, "/readyz")
    assert (status, found["status"]) == (200, "ready")
    assert found["pools"][0]["minimum"] == 2
    status, found = get(url, "/status")
    assert status == 200
    assert found["daemon"]["pid"] == daemon.pid
    assert [worker["name"] for worker in found["pools"][0]["workers"]] == ["jobs/0", "jobs/1"]
    assert set(found["queue"]) == {"critical", "high", "normal", "low", "waiting"}
    assert found["breakers"] == found["schedules"] == []
    assert found["memory"]["machine"]
    assert found["versions"]["musterd"] == daemon.status().version


def test_a_pool_without_its_workers_is_not_ready(
    fleet: tuple[Muster, str], waiting: Waiting
) -> None:
    daemon, url = fleet
    waiting("ready", lambda: _if(get(url, "/readyz"), 200))
    assert daemon.ctl("stop", "jobs/0").returncode == 0
    _, found = waiting("not ready", lambda: _if(get(url, "/readyz"), 503))
    assert found["reasons"] == ["jobs is RUNNING, 1 of 2 workers are up"]
    assert daemon.ctl("start", "jobs/0").returncode == 0
    waiting("ready again", lambda: _if(get(url, "/readyz"), 200))
    assert daemon.ctl("drain", "jobs").returncode == 0
    _, found = waiting("not ready", lambda: _if(get(url, "/readyz"), 503))
    assert "drained" in found["reasons"][0]
    assert get(url, "/healthz")[0] == 200


def _if(answer: tuple[int, Any], status: int) -> Any:
    return answer if answer[0] == status else None


def test_a_draining_daemon_is_healthy_and_not_ready(
    fleet: tuple[Muster, str], waiting: Waiting, tmp_path: Path
) -> None:
    daemon, url = fleet
    tell = tmp_path / "told"
    daemon.client().submit("jobs.nap", {"seconds": 3.0, "tell": str(tell)})
    waiting("the task runs", tell.exists)
    daemon.process.send_signal(signal.SIGTERM)
    _, found = waiting("not ready", lambda: _if(get(url, "/readyz"), 503))
    assert found["reasons"][0] == "the daemon is draining"
    assert get(url, "/healthz")[0] == 200
    assert daemon.process.wait(60) == 0


def test_a_killed_web_process_comes_back_and_no_worker_notices(
    fleet: tuple[Muster, str], waiting: Waiting
) -> None:
    daemon, _ = fleet
    workers = [worker.pid for worker in daemon.pool("jobs").workers]
    first = web(daemon).pid
    os.kill(first, signal.SIGKILL)
    waiting("another one is up", lambda: web(daemon).pid not in (0, first))
    assert get(web(daemon).address, "/healthz")[0] == 200
    assert web(daemon).restarts == 1
    assert [worker.pid for worker in daemon.pool("jobs").workers] == workers
    assert "web.crashed" in daemon.log()


def test_a_stopped_supervisor_is_unhealthy_in_time_and_well_again(
    fleet: tuple[Muster, str], waiting: Waiting
) -> None:
    daemon, url = fleet
    assert get(url, "/healthz")[0] == 200
    time.sleep(0.2)  # an answer of a moment ago does not count as an answer now
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        status, found = get(url, "/healthz")
        assert status == 503
        assert "did not answer within 2 s" in found["reason"]
        assert get(url, "/readyz")[0] == 503
        assert get(url, "/status")[0] == 503
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    waiting("healthy again", lambda: get(url, "/healthz")[0] == 200)
    assert get(url, "/status")[0] == 200


def test_nothing_is_left_of_it_when_the_daemon_is_killed(
    fleet: tuple[Muster, str], waiting: Waiting, gone: Callable[..., bool]
) -> None:
    daemon, url = fleet
    process = psutil.Process(web(daemon).pid)
    daemon.kill()
    waiting("the web process is gone", lambda: gone(process))
    with pytest.raises(ConnectionRefusedError):
        get(url, "/healthz")
    daemon.start()
    up(daemon, waiting)


def test_a_reload_moves_it_to_another_address_and_away(
    fleet: tuple[Muster, str], waiting: Waiting
) -> None:
    daemon, url = fleet
    path = f"unix:{daemon.runtime}/http.sock"
    config = json.loads(daemon.config_path.read_text())
    config["http"]["listen"] = path
    daemon.config_path.write_text(json.dumps(config))
    assert daemon.ctl("reload").returncode == 0
    waiting("it listens at the path", lambda: web(daemon).address == path)
    assert get(path, "/healthz", Host="whatever.example")[0] == 200
    assert os.stat(path.removeprefix("unix:")).st_mode & 0o777 == 0o660
    with pytest.raises(ConnectionRefusedError):
        get(url, "/healthz")
    config["http"]["listen"] = ""
    daemon.config_path.write_text(json.dumps(config))
    assert daemon.ctl("reload").returncode == 0
    waiting("there is none", lambda: web(daemon) is None)
    assert not os.path.exists(path.removeprefix("unix:"))


def test_an_address_that_is_taken_is_tried_again(jobs: Jobs, waiting: Waiting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = jobs(1, http__listen=f"127.0.0.1:{port}")
        found = waiting("it was tried", lambda: web(daemon).restarts and web(daemon))
        assert "Address already in use" in waiting("the reason", lambda: web(daemon).reason)
        assert "http.listen" in daemon.log()
        assert daemon.status().state == "running"
        assert found.state in ("backoff", "starting")
    assert up(daemon, waiting) == f"http://127.0.0.1:{port}"


def test_it_runs_alone_and_outlives_the_daemon(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(1)
    assert web(daemon) is None
    path = f"unix:{daemon.folder}/http.sock"
    command = [sys.executable, "-m", "musterd.supervisor", "web", "-c", str(daemon.config_path)]
    process = subprocess.Popen([*command, "--listen", path], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert path in process.stderr.readline().decode()
        assert get(path, "/healthz")[0] == 200
        daemon.stop()
        status, found = get(path, "/healthz")
        assert status == 503
        assert found["status"] == "unhealthy"
        daemon.start()
        waiting("it finds the next daemon", lambda: get(path, "/healthz")[0] == 200)
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stderr.close()
    assert not os.path.exists(path.removeprefix("unix:"))


def test_a_check_by_http_1_0_without_a_host_is_answered_on_health_only(
    fleet: tuple[Muster, str],
) -> None:
    host, port = fleet[1].removeprefix("http://").rsplit(":", 1)
    for path, status in {"/healthz": b"200", "/readyz": b"200", "/status": b"421"}.items():
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert connection.makefile("rb").readline().split()[1] == status


def test_it_answers_no_name_that_is_not_its_own(fleet: tuple[Muster, str]) -> None:
    _, url = fleet
    assert get(url, "/healthz", Host="evil.example")[0] == 421
    assert get(url, "/status", Host="evil.example:80")[0] == 421
    for host in ("localhost", "127.0.0.1:1234", "[::1]:80", "LOCALHOST:7717"):
        assert get(url, "/healthz", Host=host)[0] == 200


def test_a_body_nobody_asked_for_is_refused(fleet: tuple[Muster, str]) -> None:
    _, url = fleet
    connection = Http(url)
    connection.request("GET", "/status", body=b"x" * 100_000)
    assert connection.getresponse().status == 413
    connection.close()


def test_status_is_for_people_too(fleet: tuple[Muster, str]) -> None:
    daemon, url = fleet
    assert f"web {url}" in daemon.ctl("status").stdout


def test_several_who_ask_at_once_are_one_question(fleet: tuple[Muster, str]) -> None:
    daemon, url = fleet
    before = questions(url)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        connections = [Http(url) for _ in range(20)]
        for each in connections:
            each.request("GET", "/healthz")
        assert [each.getresponse().status for each in connections] == [503] * 20
        for each in connections:
            each.close()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert daemon.ask(rpc.Version())["pid"] == daemon.pid
    assert questions(url) - before <= 3  # one for all of them, one for each reading of this number


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /status HTTP/1.1\r\nHost: x\r\nX-Slow:",
        b"POST /api/v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["silent", "half a request", "half a body", "answered"],
)
def test_connections_that_wait_for_their_clients_keep_nobody_out(
    fleet: tuple[Muster, str], said: bytes
) -> None:
    _, url = fleet
    host, _, port = url.removeprefix("http://").rpartition(":")
    idle = []
    try:
        for _ in range(protocol.ANSWERED_MAX + 16):
            idle.append(socket.create_connection((host, int(port)), timeout=20))
            idle[-1].sendall(said)
            if said.startswith(b"GET /healthz"):
                assert idle[-1].recv(65536)  # one that is being answered is not idle
        assert [get(url, "/healthz")[0] for _ in range(5)] == [200] * 5
    finally:
        for each in idle:
            each.close()


def test_of_those_that_wait_the_address_with_most_gives_way(fleet: tuple[Muster, str]) -> None:
    _, url = fleet
    host, _, port = url.removeprefix("http://").rpartition(":")
    place = (host, int(port))
    kept = http.client.HTTPConnection(*place, timeout=20, source_address=("127.0.0.2", 0))
    idle = []
    try:
        kept.request("GET", "/healthz")
        kept.getresponse().read()
        ours = kept.sock
        for _ in range(protocol.ANSWERED_MAX + 16):
            idle.append(socket.create_connection(place, timeout=20))
        kept.request("GET", "/healthz")
        assert kept.getresponse().status == 200
        assert kept.sock is ours, "it was closed, although it is the only one of its address"
    finally:
        for each in (kept, *idle):
            each.close()
