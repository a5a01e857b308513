"""The durable store under kill -9 and on a really full disk."""

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

import pytest

from musterd.ipc.wire.messages import SUCCEEDED, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import FinalRecord, NewRecord, Persist
from musterd.supervisor.store.interface import FindTasks, StoredTask
from musterd.supervisor.store.sqlite import SqliteStore
from support.waiting import wait_for

DEADLINE_SECONDS = 60.0
ROUNDS = 5
ADDED_PER_TICKET = 7
FINISHED_PER_TICKET = 5  # so live tasks grow by two per ticket

# Ticket t adds 7 tasks and finishes the 5 oldest live ones, so the parent can tell the expected
# content from the ticket alone. The child submits up to WINDOW tickets ahead without waiting, and
# prints each ticket when it completes.
CHILD = """
import os, select, sys
from pathlib import Path
from musterd.ipc.wire.messages import Outcome, TaskSpec
from musterd.supervisor.core.model.actions import FinalRecord, NewRecord, Persist
from musterd.supervisor.store.sqlite import SqliteStore

ADDED, FINISHED, WINDOW = int(sys.argv[2]), int(sys.argv[3]), 50
first = int(sys.argv[4])
store = SqliteStore(Path(sys.argv[1]), "full")

def spec(seq):
    return TaskSpec(f"id-{seq}", "noop.run", b"x" * 100)

ticket = completed = first - 1
while True:
    while ticket < completed + WINDOW:
        ticket += 1
        added = [
            NewRecord(s, spec(s), 1, "noop")
            for s in range((ticket - 1) * ADDED + 1, ticket * ADDED + 1)
        ]
        finished = [
            FinalRecord(s, spec(s), 1, Outcome(f"id-{s}", "succeeded", b"%d" % s, None, 1), 0)
            for s in range((ticket - 1) * FINISHED + 1, ticket * FINISHED + 1)
        ]
        store.write(Persist(ticket, added, [], finished))
    select.select([store.fileno()], [], [])
    news = store.completed()
    if news is not None:
        completed = news
        os.write(1, b"%d\\n" % completed)
"""


def killed_after(path: Path, first: int, tickets: int) -> int:
    """Run the child from ticket `first`, kill it some tickets later; return the last reported."""
    arguments = [str(path), str(ADDED_PER_TICKET), str(FINISHED_PER_TICKET), str(first)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        reported = first - 1
        while reported < first + tickets:
            line = child.stdout.readline()
            assert line, f"the child ended by itself with {child.wait()}"
            reported = int(line)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
        complete = rest[: rest.rfind(b"\n") + 1].split()
        return int(complete[-1]) if complete else reported
    finally:
        child.kill()
        child.wait(DEADLINE_SECONDS)
        assert child.stdout is not None
        child.stdout.close()


def find_all(store: SqliteStore, ids: list[str]) -> dict[str, StoredTask]:
    assert store.ask(FindTasks(ids), "all")
    readable, _, _ = select.select([store.fileno()], [], [], DEADLINE_SECONDS)
    assert readable
    store.completed()
    ((_, tasks),) = store.found()
    return {task.spec.id: task for task in tasks}


def test_what_was_reported_as_written_is_there_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    choice = random.Random(4)
    first = 1
    for _ in range(ROUNDS):
        reported = killed_after(path, first, choice.randint(1, 150))
        with closing(SqliteStore(path, "full")) as store:
            live = [task.seq for task in chain.from_iterable(store.recover(0, 1))]
            last_seq = live[-1]
            assert store.last_seq() >= last_seq
            # Whole tickets only; no reported ticket is missing, and none was made up.
            assert last_seq % ADDED_PER_TICKET == 0
            last = last_seq // ADDED_PER_TICKET
            assert last >= reported
            ended = last * FINISHED_PER_TICKET
            assert live == list(range(ended + 1, last_seq + 1))
            tasks = find_all(store, [f"id-{seq}" for seq in range(1, last_seq + 1)])
            for seq in range(1, ended + 1):
                outcome = tasks[f"id-{seq}"].outcome
                assert outcome == Outcome(f"id-{seq}", SUCCEEDED, b"%d" % seq, None, 1)
            assert all(tasks[f"id-{seq}"].outcome is None for seq in live)
            assert store._writer._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        first = last + 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Make a file system of three megabytes."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "musterd-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.root
def test_a_full_disk_holds_tasks_up_and_loses_none(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with closing(SqliteStore(small_disk / "store.db", "full")) as store:
        ballast.write_bytes(b"x" * (1024 * 1024))
        # More than fits, the store's reserve included.
        specs = [TaskSpec(f"id-{seq}", "noop.run", b"x" * 20_000) for seq in range(1, 151)]
        for ticket, spec in enumerate(specs, 1):
            store.write(Persist(ticket, [NewRecord(ticket, spec, 1, "noop")], [], []))
        outcome = Outcome("id-1", SUCCEEDED)
        store.write(Persist(151, [], [], [FinalRecord(1, specs[0], 1, outcome, 0)]))

        wait_for("the disk is full", store.problem)
        assert "full" in (store.problem() or "")
        completed = store.completed() or 0
        assert completed < 151

        ballast.unlink()
        # The log and a file of all tasks do not fit side by side: make the disk larger.
        subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
        wait_for("all are written", lambda: store.completed() == 151)
        assert [task.seq for task in chain.from_iterable(store.recover(0, 1))] == list(
            range(2, 151)
        )
        assert find_all(store, ["id-1"])["id-1"].outcome == outcome
