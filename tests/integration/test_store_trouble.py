"""A daemon with a full disk, or with a corrupt, old or newer store; and a large trim."""

import contextlib
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from musterd import QueueFull
from musterd.ipc.wire.messages import Outcome, TaskSpec
from musterd.supervisor.core.model.actions import FinalRecord, NewRecord, Persist
from musterd.supervisor.store.sqlite import SqliteStore
from support.daemon import Jobs, Muster
from support.waiting import wait_for

SECONDS = 60
EXIT_CONFIGURATION = 78


# -- a full disk ------------------------------------------------------------------------------


class SmallDisk:
    """A daemon whose state is on a file system of its own, which tests fill and empty."""

    def __init__(self, daemon: Muster) -> None:
        self.daemon = daemon
        self._ballast = daemon.state / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    def empty(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def small_disk(jobs: Jobs) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    daemon = jobs(size=1, start=False)
    daemon.state.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "musterd-test", str(daemon.state)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield SmallDisk(daemon.start())
    finally:
        daemon.close()
        subprocess.run(["umount", str(daemon.state)], check=True)


@pytest.mark.root
def test_on_a_full_disk_submits_are_refused_and_the_daemon_recovers(small_disk, waiting) -> None:
    daemon = small_disk.daemon
    filler = {"value": "x" * 100_000}
    with daemon.client() as client:
        kept = client.submit("jobs.echo", {"value": "before"})
        assert kept.result(SECONDS) == "before"
        end = daemon.folder / "end"  # not on the small disk
        long = client.submit("jobs.until", {"path": str(end)})
        waiting("it runs", lambda: daemon.worker("jobs/0").task_id == long.id)
        long.ack(SECONDS)  # it runs before it is on disk, and would take the reserve

        small_disk.fill()
        # The submit that finds the disk full is already on its way: the reserve is for it.
        last = client.submit("jobs.echo", {"value": "last"})
        last.ack(SECONDS)
        small_disk.fill()  # now the reserve is used up
        first = client.submit("jobs.echo", filler)
        with pytest.raises(QueueFull, match="cannot be stored"):
            first.ack(SECONDS)
        waiting("the status tells", lambda: "disk is full" in daemon.status().problem)
        with pytest.raises(QueueFull, match="disk is full") as caught:
            client.submit("jobs.echo", filler).ack(SECONDS)
        assert caught.value.retry_after == 1.0
        done = daemon.ctl("submit", "jobs.echo", "value=1")
        assert done.returncode == 1
        assert "QueueFull" in done.stderr
        end.touch()  # its result may still fit into a page of the log that is there

        waiter = client.submit("jobs.echo", {"value": "waited"}, wait=False)
        with pytest.raises(QueueFull):
            waiter.ack(SECONDS)
        small_disk.empty()
        assert long.result(SECONDS) == 0
        assert last.result(SECONDS) == "last"
        waiting("the daemon has recovered", lambda: not daemon.status().problem)
        assert client.submit("jobs.echo", {"value": "after"}, wait=True).result(SECONDS) == "after"
        # The refused task is not in the store.
        assert daemon.ctl("task", first.id).returncode == 4
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        assert client.task(kept.id).result(SECONDS) == "before"
    assert daemon.ctl("task", first.id).returncode == 4
    log = daemon.log()
    assert "store.failing" in log or "store fails" in log


@pytest.mark.root
def test_a_submit_that_waits_for_room_waits_for_room_on_the_disk(small_disk, waiting) -> None:
    daemon = small_disk.daemon
    with daemon.client() as client:
        small_disk.fill()
        last = client.submit("jobs.echo", {"value": "last"})  # the reserve is for this one
        assert last.result(SECONDS) == "last"
        refused = client.submit("jobs.echo", {"value": "x" * 100_000})
        with pytest.raises(QueueFull):
            refused.ack(SECONDS)
        handles: list[Any] = []
        thread = threading.Thread(
            target=lambda: handles.append(client.submit("jobs.echo", {"value": 1}, wait=True))
        )
        thread.start()
        waiting("the daemon refuses", lambda: daemon.status().problem)
        assert not handles
        small_disk.empty()
        thread.join(SECONDS)
        assert handles[0].result(SECONDS) == 1


# -- a file that cannot be used ---------------------------------------------------------------


def start_in_vain(daemon: Muster) -> str:
    daemon.start(wait=False)
    assert daemon.process.wait(SECONDS) == EXIT_CONFIGURATION, daemon.log()
    return str(daemon.log())


def test_a_corrupt_store_stops_the_daemon_and_is_kept(jobs) -> None:
    daemon = jobs(size=1)
    with daemon.client() as client:
        client.submit_many([("jobs.nap", {"seconds": 0, "tell": ""})] * 500)
        client.flush()
    assert daemon.stop() == 0
    path = daemon.state / "store.db"
    content = bytearray(path.read_bytes())
    # All but the first page: which other pages are in use depends on how commits were grouped.
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)

    log = start_in_vain(daemon)
    assert "set aside as store.db.corrupt-" in log
    assert "--set store.on_corrupt=set-aside" in log
    (aside,) = daemon.state.glob("store.db.corrupt-*Z")
    assert aside.read_bytes() == content
    assert not path.exists()
    start_in_vain(daemon)  # the next start does not lose tasks unasked either

    config = daemon.config_path.read_text()
    daemon.config_path.write_text(config.replace("{", '{"store": {"on_corrupt": "set-aside"}, ', 1))
    daemon.start()
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(SECONDS) == 1
    assert aside.read_bytes() == content


def test_a_store_of_a_newer_version_stops_the_daemon_and_is_left_alone(jobs) -> None:
    daemon = jobs(size=0)
    assert daemon.stop() == 0
    path = daemon.state / "store.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    content = path.read_bytes()
    assert "has version 99" in start_in_vain(daemon)
    assert path.read_bytes() == content


# -- kills while tasks are reopened -------------------------------------------------------------

# Each task fails and is reopened again and again; the parent kills the program at any moment.
REOPENER = """
import os, select, sys
from pathlib import Path
from musterd.ipc.wire.messages import Failure, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import (
    AttemptRecord, FinalRecord, NewRecord, Persist, ReopenRecord)
from musterd.supervisor.store.interface import FindTasks
from musterd.supervisor.store.sqlite import SqliteStore

TASKS = 50
store = SqliteStore(Path(sys.argv[1]), "full")
failure = Failure("error", "ValueError", "no")
specs = [TaskSpec(f"id-{n}", "noop.run", b"x") for n in range(TASKS)]
recovered = {task.spec.id: task.seq for page in store.recover(0, 1) for task in page}
seq, ticket = store.last_seq(), 0

def write(**fields):
    global ticket
    ticket += 1
    values = {"added": [], "changed": [], "finished": []}
    store.write(Persist(ticket, **(values | fields)))

def wait():
    seen = None
    while seen != ticket:
        select.select([store.fileno()], [], [])
        seen = store.completed() or seen

def end(spec, at):
    write(
        finished=[FinalRecord(at, spec, 1, Outcome(spec.id, "failed", b"", failure, 1), 0)],
        failed=[AttemptRecord(at, 1, 1, "noop/0", failure)],
    )

former = {}
for spec in specs:  # the first life, or what is left of the last one
    at = recovered.get(spec.id)
    if at is None and sys.argv[2] == "first":
        seq += 1
        at = seq
        write(added=[NewRecord(at, spec, 1, "noop")])
    if at is not None:
        end(spec, at)
        former[spec.id] = at
if ticket:
    wait()
assert store.ask(FindTasks([spec.id for spec in specs]), "all")
found = []
while not found:
    select.select([store.fileno()], [], [])
    store.completed()
    found = store.found()
former = {task.spec.id: task.seq for task in found[0][1]}
assert len(former) == TASKS, len(former)
os.write(1, b"ready\\n")
while True:
    for spec in specs:
        seq += 1
        record = ReopenRecord(spec.id, former[spec.id], seq)
        write(added=[NewRecord(seq, spec, 1, "noop")], reopened=[record])
        former[spec.id] = seq
    wait()
    for spec in specs:
        end(spec, former[spec.id])
    wait()
"""


def test_a_task_that_is_reopened_is_there_exactly_once_whenever_the_daemon_dies(tmp_path) -> None:
    path = tmp_path / "store.db"
    for life in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", REOPENER, str(path), "first" if life == 0 else "again"],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        try:
            assert select.select([child.stdout], [], [], SECONDS)[0], "it never got ready"
            assert child.stdout.readline() == b"ready\n"
            time.sleep(random.Random(life).uniform(0.0, 0.2))
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(SECONDS)
            child.stdout.close()
        with closing(SqliteStore(path, "normal")):
            pass
        with closing(sqlite3.connect(path)) as connection:
            ids = connection.execute(
                "SELECT id FROM live UNION ALL SELECT id FROM finished"
            ).fetchall()
            assert sorted(ids) == sorted((f"id-{n}",) for n in range(50))
            (strays,) = connection.execute(
                "SELECT count(*) FROM attempts WHERE seq NOT IN"
                " (SELECT seq FROM live UNION ALL SELECT seq FROM finished)"
            ).fetchone()
            assert strays == 0


MIGRATOR = """
import sys
from pathlib import Path
from musterd.supervisor.store.sqlite import SqliteStore
SqliteStore(Path(sys.argv[1]), "full").close()
"""


def test_a_migration_that_is_killed_is_made_at_the_next_start(tmp_path) -> None:
    path = tmp_path / "store.db"
    with closing(SqliteStore(path, "normal")) as store:
        added = [
            NewRecord(n, TaskSpec(f"id-{n}", "noop.run", b"x" * 1000), 1, "noop")
            for n in range(1, 20_001)
        ]
        store.write(Persist(1, added, [], []))
    with closing(sqlite3.connect(path)) as connection:  # downgrade to the first version
        tables = ("attempts", "facts", "sheets", "sheet_masks", "results", "result_ids")
        drops = "".join(f"DROP TABLE {table};" for table in tables)
        connection.executescript(f"{drops} PRAGMA user_version = 1;")
    chance = random.Random(1)
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", MIGRATOR, str(path)])
        try:
            child.wait(chance.uniform(0.05, 0.4))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(SECONDS)
    with closing(SqliteStore(path, "normal")) as store:
        assert len(list(chain.from_iterable(store.recover(0, 1)))) == 20_000
        assert store.facts("any") == []
    with closing(sqlite3.connect(tmp_path / "store.db.v1.bak")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM live").fetchone() == (20_000,)


# -- a large trim -----------------------------------------------------------------------------

TRIMMED = 200_000


def test_commits_go_on_while_many_results_are_trimmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SqliteStore(tmp_path / "store.db", "normal")) as store:
        ticket = 0
        for start in range(0, TRIMMED, 4000):
            ticket += 1
            ends = [
                FinalRecord(
                    n,
                    TaskSpec(f"id-{n}", "noop.run", b"x" * 100),
                    1,
                    Outcome(f"id-{n}", "succeeded", b"y" * 100, None, 1),
                    0,
                )
                for n in range(start + 1, start + 4001)
            ]
            store.write(Persist(ticket, [], [], ends))
        wait(store, ticket)
        commit, trim_slice = store._writer.commit, store._writer.trim_slice
        slices = most = commits = 0

        def counted(*args: Any) -> int:
            nonlocal slices, most
            slices += store._writes.qsize() > 0  # begun while a page waits
            most = max(most, slices)
            return trim_slice(*args)

        def committed(*args: Any) -> None:
            nonlocal slices
            slices = 0
            commit(*args)

        monkeypatch.setattr(store._writer, "trim_slice", counted)
        monkeypatch.setattr(store._writer, "commit", committed)
        store.trim(0, 10**6)
        while store._trims:
            ticket += 1
            spec = TaskSpec(f"new-{ticket}", "noop.run", b"")
            store.write(Persist(ticket, [NewRecord(TRIMMED + ticket, spec, 1, "noop")], [], []))
            wait(store, ticket)
            commits += 1
        with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
            assert connection.execute("SELECT count(*) FROM results").fetchone() == (0,)
            assert connection.execute("SELECT count(*) FROM result_ids").fetchone() == (0,)
    assert commits >= TRIMMED // 1000 // 2, "it took turns with the trim"
    assert most <= 1, f"a page waited for {most} slices"


def wait(store: SqliteStore, ticket: int) -> None:
    def completed() -> bool:
        select.select([store.fileno()], [], [], SECONDS)
        return store.completed() == ticket

    wait_for("it is written", completed)
