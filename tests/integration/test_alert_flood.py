"""The alert process gets more events than any daemon sends: it stays small."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from musterd.supervisor.alerts.changes import PENDING_MAX
from musterd.supervisor.alerts.rules import CHANGES_MAX, Rule
from musterd.supervisor.alerts.settings import AlertSettings, Destination
from musterd.supervisor.api.status import FleetStatus
from support.waiting import Waiting

EVENTS = 100_000
# Measured: 18 MB at rest; 500 subjects take some hundred kilobytes.
RSS_BYTES_MAX = 45_000_000
MILLISECOND_NS = 1_000_000


ANSWERS = {
    "events": {"recent": []},
    "status": FleetStatus(
        version="1", pid=os.getpid(), uptime_seconds=1.0, state="running", pools=[]
    ),
    "version": {"version": "1", "pid": os.getpid()},
    "memory": {"enabled": True, "level": "normal", "stage": "normal"},
    "breaker.list": {"breakers": [{"target": f"t{n}", "state": "open"} for n in range(1000)]},
    "schedule.list": {"schedules": []},
    "changes": {"changes": []},
    "sessions.list": {"sessions": []},
}


class Daemon:
    """Answers requests of the alert process, and streams the events it is given."""

    def __init__(self, path: Path, lines: list[bytes], answers: Any = None) -> None:
        self._lines = lines
        self._answers = {**ANSWERS, **(answers or {})}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self._open: list[socket.socket] = []
        self.sent = threading.Event()
        self.reported: dict[str, Any] = {}

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # The alert process may close the connection while we write.
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as requests:
            for line in requests:
                request = json.loads(line)
                result = self._answer(request["method"], request.get("params", {}))
                connection.sendall(
                    msgspec.json.encode({"jsonrpc": "2.0", "id": request["id"], "result": result})
                    + b"\n"
                )
                if request["method"] == "events":
                    for each in self._lines:
                        connection.sendall(each)
                    self._lines = []
                    self.sent.set()

    def _answer(self, method: str, params: dict[str, Any]) -> Any:
        if method == "alerts.report":
            self.reported = params["status"]
        return self._answers.get(method, True)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)


@pytest.fixture
def process(short_folder: Path) -> Iterator[Callable[..., Any]]:
    made: list[subprocess.Popen[bytes]] = []
    fds: list[int] = []

    def start(rule: Rule, destination: Destination) -> "subprocess.Popen[bytes]":
        settings = AlertSettings(
            control_socket=str(short_folder / "control.sock"),
            state_file=str(short_folder / "alerts.json"),
            rules=[rule],
            destinations={rule.name: destination},
        )
        told = os.memfd_create("settings")
        beats, theirs = os.pipe()
        fds.extend((told, beats, theirs))
        os.write(told, msgspec.json.encode(settings))
        os.lseek(told, 0, os.SEEK_SET)
        child = subprocess.Popen(
            [sys.executable, "-m", "musterd.supervisor.alerts", str(os.getpid()), str(theirs)],
            stdin=told,
            pass_fds=[theirs],
            stderr=subprocess.DEVNULL,
        )
        made.append(child)
        return child

    yield start
    for each in made:
        each.terminate()
        assert each.wait(20) == 0
    for fd in fds:
        os.close(fd)


def test_a_hundred_thousand_events_cost_a_few_messages_and_little_memory(
    short_folder: Path, process: Callable[..., Any], waiting: Waiting
) -> None:
    kinds = (
        lambda n: {"event": "breaker.open", "target": f"t{n % 5000}"},
        lambda n: {"event": "task.dead", "pool": f"p{n % 3}", "task": str(n), "reason": "x" * 900},
        lambda n: {"event": "breaker.closed", "target": f"t{n % 700}"},
        lambda n: {"event": "worker.crashed", "pool": "p", "worker": f"p/{n % 900}"},
    )
    lines = [
        msgspec.json.encode({"at": 1.0 + n / 1000, **kinds[n % 4](n)}) + b"\n"
        for n in range(EVENTS)
    ]
    daemon = Daemon(short_folder / "control.sock", lines)
    try:
        heard = short_folder / "heard"
        rule = Rule(
            "ops",
            ("breaker.open", "task.dead", "worker.crashed"),
            group_ns=500 * MILLISECOND_NS,
            every_ns=3600 * 1000 * MILLISECOND_NS,
        )
        command = ("/bin/sh", "-c", f"cat >> {heard}")
        child = process(rule, Destination(command=command))
        watched = psutil.Process(child.pid)
        assert daemon.sent.wait(60)
        waiting("something is told", lambda: heard.exists() and heard.read_text())
        waiting("it says how it stands", lambda: daemon.reported.get("alerts"))
        assert watched.memory_info().rss < RSS_BYTES_MAX
        assert len(heard.read_text().splitlines()) <= 10
        assert (short_folder / "alerts.json").stat().st_size < 1_000_000
        assert daemon.reported["pid"] == child.pid
    finally:
        daemon.close()


def test_a_stream_of_nonsense_ends_nothing(
    short_folder: Path, process: Callable[..., Any], waiting: Waiting
) -> None:
    lines = [b"nonsense\n", b'{"event":5}\n', b"[]\n", b"{}\n", b"\xff\xfe\n"]
    daemon = Daemon(short_folder / "control.sock", lines)
    try:
        child = process(Rule("ops", ("*",)), Destination(command=("/bin/true",)))
        assert daemon.sent.wait(30)
        waiting("it says how it stands", lambda: daemon.reported.get("alerts"))
        assert child.poll() is None
    finally:
        daemon.close()


def test_a_thousand_changes_that_nobody_takes_cost_little_memory(
    short_folder: Path, process: Callable[..., Any], waiting: Waiting
) -> None:
    """While nobody is reachable, as many wait in the file as it has room for."""
    count = 1000
    lines = [
        msgspec.json.encode(
            {
                "at": 1.0 + n,
                "event": "task.changed",
                "schedule": f"site{n}",
                "number": 2,
                "changed_at": 4e9 + n,  # after the alert was configured
                "task": f"@site{n}.1",
                "summary": f"price {n} € → 1 €",
                "before": "x" * 4000,
                "after": "y" * 4000,
            }
        )
        + b"\n"
        for n in range(count)
    ]
    listed = [
        {"schedule": f"site{n}", "at": 4e9 + n, "task": "", "number": 2, "digest": "", "cut": True}
        for n in range(count)
    ]
    daemon = Daemon(short_folder / "control.sock", lines, {"changes": {"changes": listed}})
    try:
        heard = short_folder / "heard"
        rule = Rule("me", ("task.changed",), group_ns=MILLISECOND_NS)
        command = ("/bin/sh", "-c", f"cat >> {heard}; test -e {short_folder / 'up'}")
        child = process(rule, Destination(command=command))
        watched = psutil.Process(child.pid)
        assert daemon.sent.wait(60)
        waiting("it is tried", lambda: heard.exists() and heard.read_text())
        waiting("it says how it stands", lambda: daemon.reported.get("alerts"))
        assert watched.memory_info().rss < RSS_BYTES_MAX
        assert (short_folder / "alerts.json").stat().st_size < 1_000_000
        told = [json.loads(line) for line in heard.read_text().splitlines()]
        assert all(0 < len(each["changes"]) <= CHANGES_MAX for each in told)
        state = json.loads((short_folder / "alerts.json").read_text())["rules"]["me"]["changes"]
        assert len(state["pending"]) <= PENDING_MAX
    finally:
        daemon.close()
