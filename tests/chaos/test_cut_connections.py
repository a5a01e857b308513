"""A relay cuts, delays and half-closes the connections of clients at random bytes, while workers,
fork servers and the daemon itself are killed."""

import contextlib
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from musterd import Client, MusterdError
from support.daemon import Muster, Musters
from support.waiting import Waiting

CLIENTS = 4
STORM_SECONDS = 8.0
CALL_SECONDS = 3.0
LATE_SECONDS = 60.0  # how late a call may return, and a daemon answer, on a busy machine
SETTLE_SECONDS = 60.0
DAEMON_EVERY_SECONDS = 2.0
DESCRIPTORS_MORE_MAX = 10

ECHO = """
from musterd import Worker
from musterd import task

class Echo(Worker):
    @task
    def echo(self, ctx, value: object = None) -> object:
        return value
"""


class Relay:
    """Forwards bytes between clients and tasks.sock."""

    def __init__(self, path: Path, target: str, seed: int) -> None:
        self.cuts = 0
        self._target = target
        self._rng = random.Random(seed)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as daemon:
            if daemon.connect_ex(self._target):
                return
            way_out = threading.Thread(target=self._pump, args=(client, daemon))
            way_out.start()
            self._pump(daemon, client)
            way_out.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        """Copy up to some byte; the other direction may go on for a moment."""
        rng = self._rng
        left = int(10 ** rng.uniform(0, 5.5))
        slow = rng.random() < 0.3
        with contextlib.suppress(OSError):
            while left and (data := source.recv(min(left, rng.choice((1, 17, 4096, 65536))))):
                if slow:
                    time.sleep(rng.uniform(0, 0.02))
                target.sendall(data)
                left -= len(data)
            self.cuts += not left
            if rng.random() < 0.4:
                target.shutdown(socket.SHUT_WR)
                time.sleep(rng.uniform(0, 0.3))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Caller(threading.Thread):
    """Submits, waits, and notes the acknowledgements it got."""

    def __init__(self, path: Path, number: int, over: threading.Event) -> None:
        super().__init__()
        self.promised: dict[str, object] = {}
        self.wrong: list[str] = []
        self._path, self._number, self._over = path, number, over

    def run(self) -> None:
        count = 0
        with Client(self._path, LATE_SECONDS) as client:
            while not self._over.is_set():
                count += 1
                value = [self._number, count, "x" * (count * 37 % 3000)]
                handle = client.submit("echo.echo", {"value": value})
                began = time.monotonic()
                try:
                    handle.ack(CALL_SECONDS)
                    self.promised[handle.id] = value
                    if handle.result(CALL_SECONDS) != value:
                        self.wrong.append(f"{handle.id} has another result")
                except (TimeoutError, MusterdError):
                    pass
                if time.monotonic() - began > 2 * CALL_SECONDS + LATE_SECONDS:
                    self.wrong.append(f"{handle.id} was waited for too long")


CHANCES = {"musterd: fork server": 0.1, "musterd: worker": 0.3}  # of a process, at each look


def kill_something(daemon: Muster, rng: random.Random, killed: set[str]) -> None:
    """Kill workers and fork servers, or not; the first of each kind for sure."""
    for process in daemon.processes():
        with contextlib.suppress(psutil.Error, IndexError):
            title = process.cmdline()[0]
            for kind, share in CHANCES.items():
                if title.startswith(kind) and (kind not in killed or rng.random() < share):
                    process.kill()
                    killed.add(kind)


@pytest.mark.timeout(180)
def test_every_promise_is_kept_over_cut_connections_and_kills(
    muster: Musters,
    waiting: Waiting,
    chaos_seed: int,
    tell: Callable[[str, object], None],
) -> None:
    rng = random.Random(chaos_seed)
    pool = {"worker": "echo:Echo", "size": 2, "max_crashes": 100}
    daemon = muster({"echo": pool}, start=False)
    Path(daemon.folder, "echo.py").write_text(ECHO)
    daemon.start()
    descriptors = psutil.Process(daemon.pid).num_fds()
    path = daemon.folder / "relay.sock"
    relay, over = Relay(path, daemon.tasks_socket, chaos_seed), threading.Event()
    callers = [Caller(path, number, over) for number in range(CLIENTS)]
    killed: set[str] = set()
    for caller in callers:
        caller.start()
    try:
        begun = time.monotonic()
        # A busy machine needs longer until each has happened.
        while (now := time.monotonic()) < begun + STORM_SECONDS or (
            now < begun + SETTLE_SECONDS
            and not (killed == CHANCES.keys() and any(each.promised for each in callers))
        ):
            kill_something(daemon, rng, killed)
            if rng.random() < 0.2 / DAEMON_EVERY_SECONDS:
                daemon.kill()
                daemon.start(wait=False)
            time.sleep(max(0.0, now + 0.2 - time.monotonic()))
    finally:
        over.set()
        for caller in callers:
            caller.join(SETTLE_SECONDS)
        relay.close()
    assert not any(caller.is_alive() for caller in callers), "somebody waits for ever"
    assert not [text for caller in callers for text in caller.wrong]
    waiting("the daemon is up", daemon._is_up)
    promised = {id_: value for caller in callers for id_, value in caller.promised.items()}
    with daemon.client() as client:
        for id_, value in promised.items():
            assert client.task(id_).result(SETTLE_SECONDS) == value
    waiting(
        "connections that are over cost nothing",
        lambda: psutil.Process(daemon.pid).num_fds() <= descriptors + DESCRIPTORS_MORE_MAX,
    )
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()
    with closing(sqlite3.connect(daemon.state / "store.db")) as store:
        ids = [id_ for (id_,) in store.execute("SELECT id FROM finished")]
        ids += [id_ for (id_,) in store.execute("SELECT id FROM result_ids")]
    assert len(ids) == len(set(ids)), "a task has two final states"
    assert promised.keys() <= set(ids)
    assert relay.cuts
    assert killed == CHANCES.keys()
    assert promised
    tell("tasks promised, connections cut", f"{len(promised)}, {relay.cuts}")
