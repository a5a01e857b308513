"""Events on a ZeroMQ socket: the subscriber of the documentation with a real daemon."""

import contextlib
import grp
import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from musterd.supervisor.publisher.process import QUEUED_MAX
from support.daemon import Jobs, Muster
from support.waiting import Waiting

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
SECONDS = 60.0
CHANGING = {
    "name": "kites",
    "task": "jobs.stamp",
    "every": "100ms",
    "notify": "task.changed",
}


class Subscriber:
    """The program of docs/events.md."""

    def __init__(self, folder: Path, endpoint: str, *topics: str) -> None:
        program = folder / "subscriber.py"
        text = PAGE.read_text()
        program.write_text(text.split("```python\n")[1].split("```")[0])
        self.process = subprocess.Popen(
            [sys.executable, str(program), endpoint, *topics], stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def next(self, topic: str) -> dict[str, Any]:
        """Return the next event of this topic; skip others."""
        deadline = time.monotonic() + SECONDS
        while True:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            found, _, body = line.partition(" ")
            if found == topic:
                event: dict[str, Any] = eval(body)  # as print() shows a dict
                return event

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def subscribe(tmp_path: Path) -> Iterator[Callable[..., Subscriber]]:
    with contextlib.ExitStack() as opened:

        def make(endpoint: str, *topics: str) -> Subscriber:
            subscriber = Subscriber(tmp_path, endpoint, *topics)
            opened.callback(subscriber.close)
            return subscriber

        yield make


@pytest.fixture
def published(jobs: Jobs, waiting: Waiting) -> Callable[..., Any]:
    """Make a daemon that publishes on `daemon.endpoint`: published(...)."""

    def make(endpoint: str = "", **settings: Any) -> Any:
        daemon = jobs(2, start=False, events__publish="ENDPOINT", **settings)
        daemon.events_path = daemon.folder / "events.sock"
        configure(daemon, lambda config: config["events"].update(publish=endpoint or ipc(daemon)))
        daemon.start()
        daemon.endpoint = waiting("events are published", lambda: publisher(daemon).address)
        return daemon

    return make


def ipc(daemon: Muster) -> str:
    return f"ipc://{daemon.events_path}"


def configure(daemon: Muster, change: Callable[[dict[str, Any]], object]) -> None:
    config = msgspec.json.decode(daemon.config_path.read_bytes())
    change(config)
    daemon.config_path.write_bytes(msgspec.json.encode(config))


def publisher(daemon: Muster) -> Any:
    return daemon.status().events


def lose_worker(daemon: Muster, waiting: Waiting) -> None:
    waiting("a worker", lambda: daemon.worker("jobs/0").pid)
    os.kill(daemon.worker("jobs/0").pid, signal.SIGKILL)


def test_the_pages_subscriber_hears_changes_and_lost_workers(
    published: Callable[..., Muster], subscribe: Callable[..., Subscriber], waiting: Waiting
) -> None:
    daemon = published(schedule__kites={k: v for k, v in CHANGING.items() if k != "name"})
    heard = subscribe(daemon.endpoint, "task.changed.", "worker.")
    event = heard.next("task.changed.kites")
    assert (event["event"], event["schedule"]) == ("task.changed", "kites")
    assert daemon.client().task(event["task"]).result(SECONDS) > 0
    lose_worker(daemon, waiting)
    event = heard.next("worker.crashed.jobs")
    assert (event["worker"], event["cause"]) == ("jobs/0", "signal")


def test_events_over_tcp_on_loopback(
    published: Callable[..., Muster], subscribe: Callable[..., Subscriber], waiting: Waiting
) -> None:
    daemon = published("tcp://127.0.0.1:0")
    assert daemon.endpoint.startswith("tcp://127.0.0.1:")
    heard = subscribe(daemon.endpoint)
    waiting("it hears", lambda: _nudge(daemon, heard))


def _nudge(daemon: Muster, heard: Subscriber) -> bool:
    """Cause events until one is heard: a subscription takes time."""
    daemon.ctl("pause", "jobs")
    daemon.ctl("resume", "jobs")
    return not heard._lines.empty()


def test_only_the_groups_may_connect_and_the_file_goes_with_the_daemon(
    published: Callable[..., Muster],
) -> None:
    daemon = published(events__group=grp.getgrgid(os.getgid()).gr_name)
    found = daemon.events_path.lstat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == os.getgid()
    assert f"events {daemon.endpoint}" in daemon.ctl("status").stdout
    daemon.stop()
    assert not daemon.events_path.exists()


def test_a_reload_adds_moves_and_removes_it(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs()
    assert publisher(daemon) is None
    one, two = daemon.folder / "one.sock", daemon.folder / "two.sock"

    def publish(endpoint: str) -> None:
        configure(daemon, lambda config: config.update(events={"publish": endpoint}))
        done = daemon.ctl("reload")
        assert done.returncode == 0, done.stderr

    publish(f"ipc://{one}")
    waiting("it is there", lambda: publisher(daemon) and publisher(daemon).state == "up")
    assert one.exists()
    publish(f"ipc://{two}")
    waiting("it has moved", lambda: publisher(daemon).address == f"ipc://{two}")
    assert two.exists()
    assert not one.exists()
    publish("")
    waiting("it is gone", lambda: publisher(daemon) is None)
    assert not two.exists()


def test_a_path_that_is_taken_is_left_alone_and_told(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(start=False, events__publish="ENDPOINT")
    path = daemon.folder / "precious"
    path.write_text("data")
    configure(daemon, lambda config: config["events"].update(publish=f"ipc://{path}"))
    daemon.start()
    waiting("it is given up", lambda: publisher(daemon).state == "fatal")
    assert "is not a socket" in publisher(daemon).reason
    assert path.read_text() == "data"
    assert daemon.client().submit("jobs.echo", {"value": 1}).result(SECONDS) == 1


def test_the_socket_of_another_program_is_not_taken(
    jobs: Jobs, waiting: Waiting, tmp_path: Path
) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        daemon = jobs(events__publish=f"ipc://{path}")
        waiting("it waits", lambda: publisher(daemon).state == "backoff")
        assert "another program listens there" in publisher(daemon).reason
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))


def test_a_subscriber_that_does_not_read_loses_events_and_holds_nobody_up(
    published: Callable[..., Muster], subscribe: Callable[..., Subscriber], waiting: Waiting
) -> None:
    """The buffer for a subscriber is bounded; another one hears the events after the flood."""
    daemon = published()
    context = zmq.Context()
    silent = context.socket(zmq.SUB)
    try:
        silent.setsockopt(zmq.LINGER, 0)
        silent.setsockopt(zmq.RCVHWM, 1)
        silent.setsockopt(zmq.RCVTIMEO, 1000)
        silent.connect(daemon.endpoint)
        silent.subscribe("pool.")
        heard = subscribe(daemon.endpoint, "pool.", "worker.")
        waiting("the other one hears", lambda: _nudge(daemon, heard))
        assert silent.poll(1000 * SECONDS)
        told = flood(daemon, 10 * QUEUED_MAX)
        lose_worker(daemon, waiting)
        heard.next("worker.crashed.jobs")
        received = 0
        with contextlib.suppress(zmq.Again):
            while True:
                silent.recv_multipart()
                received += 1
        assert 0 < received < told / 2
    finally:
        silent.close()
        context.term()


def flood(daemon: Muster, count: int) -> int:
    """Pause and resume a pool that many times; each is an event."""
    calls = [
        {"jsonrpc": "2.0", "id": 1, "method": method, "params": [["jobs"]]}
        for method in ("pause", "resume") * 32
    ]
    line = json.dumps(calls).encode() + b"\n"
    told = 0
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(SECONDS)
        caller.connect(daemon.control_socket)
        answers = caller.makefile("rb")
        while told < count:
            caller.sendall(line)
            told += sum("result" in each for each in json.loads(answers.readline()))
        answers.close()
    return told


def test_whatever_is_sent_to_it_the_fleet_does_not_notice(
    published: Callable[..., Muster], subscribe: Callable[..., Subscriber], waiting: Waiting
) -> None:
    daemon = published()
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, os.urandom(4096), b"\xff\0\0\0\0"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(daemon.events_path))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                caller.sendall(junk)
    heard = subscribe(daemon.endpoint)
    waiting("it publishes", lambda: _nudge(daemon, heard))
    assert daemon.client().submit("jobs.echo", {"value": 1}).result(SECONDS) == 1


def test_the_supervisor_itself_does_not_load_what_publishes() -> None:
    program = (
        "import sys; import musterd.supervisor.loop.perform, musterd.supervisor.settings.policy;"
        "print('musterd.supervisor.publisher.process' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.lower()) is False


def test_a_socket_file_that_was_removed_is_made_anew(
    published: Callable[..., Muster], waiting: Waiting, subscribe: Callable[..., Subscriber]
) -> None:
    daemon = published()
    path = Path(ipc(daemon).removeprefix("ipc://"))
    path.unlink()
    waiting("it is there again", path.exists, 30.0)
    heard = subscribe(ipc(daemon), "")
    waiting("it publishes there", lambda: _nudge(daemon, heard))
