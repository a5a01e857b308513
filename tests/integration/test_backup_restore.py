"""The commands of docs/operations.md: backup and restore under load, and those for each message."""

import re
import shlex
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from musterd import TaskMissing
from musterd.supervisor.store.queries import contents
from support.daemon import Jobs
from support.waiting import Waiting

PAGE = "docs/operations.md"
SECONDS = 60
BEFORE = 400  # tasks acknowledged before the backup begins
WORKER = """
# clerk.py
import os
import time
from pathlib import Path
from musterd import Worker, task

class Clerk(Worker):
    @task
    def stamp(self, ctx, number: int) -> int:
        with open(os.environ["STAMPS"], "a") as stamps:
            stamps.write(f"{ctx.task_id}\\n")
        time.sleep(0.005)
        return number
"""


class Clerks:
    """A daemon whose tasks record each run, and the page's commands for its store."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.daemon = page.daemon
        self.stamps = page.folder / "stamps.txt"
        (page.folder / "clerk.py").write_text(WORKER)
        (page.folder / "clerk.toml").write_text('[pools.clerk]\nworker = "clerk:Clerk"\nsize = 2\n')
        self.daemon.state.mkdir(mode=0o700, exist_ok=True)

    def start(self) -> None:
        self.page.start("clerk.toml", pools__clerk__env={"STAMPS": str(self.stamps)})

    def run(self, heading: str) -> None:
        """Run the shell commands of a section with our directories, without systemd."""
        script = self.page.commands(heading)
        assert "/var/lib/musterd" in script
        for there, here in (
            ("/var/lib/musterd", str(self.daemon.state)),
            ("/var/backups/musterd", str(self.page.folder / "backups")),
            ("/etc/musterd", str(self.daemon.config_path)),
            ("-o musterd -g musterd ", ""),
        ):
            script = script.replace(there, here)
        ours = ("systemctl", "musterctl status")
        lines = [line for line in script.splitlines() if not line.startswith(ours)]
        self.page.run("sh", "-euc", "\n".join(lines))

    def copy(self) -> Path:
        (copy,) = (self.page.folder / "backups").glob("store-*.db")
        return copy

    def runs(self) -> Counter[str]:
        return Counter(self.stamps.read_text().split() if self.stamps.exists() else [])


@pytest.fixture
def clerks(document: Callable[[str], Any]) -> Clerks:
    if shutil.which("sqlite3") is None:
        pytest.skip("the package sqlite3 is not installed")
    return Clerks(document(PAGE))


class Load(threading.Thread):
    """Submits as fast as acknowledgements arrive, until told to stop."""

    def __init__(self, client: Any) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.acknowledged: list[str] = []
        self.enough = threading.Event()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            request = ("clerk.stamp", {"number": len(self.acknowledged)})
            tasks = self.client.submit_many([request] * 20)
            for task in tasks:
                task.ack(SECONDS)
            self.acknowledged += [task.id for task in tasks]
            if len(self.acknowledged) >= BEFORE:
                self.enough.set()


def test_a_backup_under_load_has_each_acknowledged_task_exactly_once(
    clerks: Clerks, waiting: Waiting
) -> None:
    clerks.start()
    with clerks.daemon.client() as client:
        load = Load(client)
        load.start()
        assert load.enough.wait(SECONDS)
        waiting("some have ended", lambda: clerks.daemon.pool("clerk").succeeded > 20)
        before = list(load.acknowledged)
        clerks.run("Backup")
        load.stopped.set()
        load.join(SECONDS)
        after = [id_ for id_ in load.acknowledged if id_ not in set(before)]
        clerks.daemon.kill()  # its log file stays, and must not get into the restored store
    assert (clerks.daemon.state / "store.db-wal").stat().st_size > 0
    assert clerks.copy().stat().st_mode & 0o077 == 0, "arguments are nobody else's business"
    with closing(sqlite3.connect(clerks.copy())) as copy:
        live, ended = ({each.spec.id for each in tasks} for tasks in contents(copy))
    assert not live & ended
    assert set(before) <= live | ended, "acknowledged, and not in the backup"
    assert live & set(before), "nothing had to be run again: no test"
    assert ended & set(before)

    clerks.stamps.unlink()
    clerks.run("Restore")
    clerks.start()
    with clerks.daemon.client() as client:
        for id_ in {*before, *live}:
            assert client.task(id_).outcome(SECONDS).state == "succeeded"
        unknown = next((id_ for id_ in after if id_ not in live | ended), None)
        if unknown:
            with pytest.raises(TaskMissing):
                client.task(unknown).result(SECONDS)
    assert clerks.daemon.stop() == 0
    runs = clerks.runs()
    # A worker killed with its daemon may have begun a task before; each task has run once since.
    assert {id_: runs[id_] for id_ in live} == dict.fromkeys(live, 1)
    assert not set(runs) & ended, "it had ended before the backup"
    with closing(sqlite3.connect(clerks.daemon.state / "store.db")) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        unfinished, finished = contents(store)
    ids = [each.spec.id for each in finished]
    assert len(ids) == len(set(ids))
    assert set(ids) == live | ended
    assert unfinished == []


def content(path: Path) -> str:
    """Return the rows that SQLite reads from a file and the log beside it."""
    with closing(sqlite3.connect(path)) as store:
        try:
            faults = store.execute("PRAGMA integrity_check").fetchone()
            return f"{faults} {len(contents(store)[0])}"
        except sqlite3.DatabaseError as error:
            return str(error)


def test_a_restored_store_beside_the_old_log_is_not_what_was_saved(clerks: Clerks) -> None:
    clerks.start()
    with clerks.daemon.client() as client:
        numbers = [{"number": number} for number in range(BEFORE)]
        tasks = client.submit_many([("clerk.stamp", args) for args in numbers])
        client.flush()
        clerks.run("Backup")
        for task in tasks:
            task.result(SECONDS)
        clerks.daemon.kill()
    beside = clerks.page.folder / "beside"
    beside.mkdir()
    shutil.copy(clerks.copy(), beside / "store.db")
    shutil.copy(clerks.daemon.state / "store.db-wal", beside / "store.db-wal")
    assert content(beside / "store.db") != content(clerks.copy())
    clerks.run("Restore")
    clerks.start()


def test_a_store_is_made_small(clerks: Clerks) -> None:
    clerks.start()
    with clerks.daemon.client() as client:
        tasks = client.submit_many([("clerk.stamp", {"number": n}) for n in range(BEFORE)])
        for task in tasks:
            task.result(SECONDS)
    clerks.daemon.stop()
    path = clerks.daemon.state / "store.db"
    with closing(sqlite3.connect(path)) as store:
        store.execute("DELETE FROM results")
        store.commit()
    before = path.stat().st_size
    script = clerks.page.commands("The disk is full")
    (line,) = [line for line in script.splitlines() if line.endswith(" VACUUM")]
    line = line.removeprefix("runuser -u musterd -- ").replace("/var/lib/musterd", str(path.parent))
    clerks.page.run("sh", "-euc", line)
    assert path.stat().st_size < before
    clerks.start()


# -- the last table: every musterctl command in it can be typed -----------------------------------


def test_the_commands_for_each_message_can_be_typed(
    document: Callable[[str], Any], jobs: Jobs
) -> None:
    page = document(PAGE)
    sweep = {"task": "jobs.echo", "every": "1h"}
    daemon = jobs(
        size=1,
        breaker__failures=1,
        schedule__sweep=sweep,
        sessions__sweep={},
        pool={"sessions": ["sweep"]},
    )
    with daemon.client() as client:
        failed = client.submit("jobs.fail", {"text": "no"}, target="site.example")
        assert failed.outcome(SECONDS).state == "failed"
    table = page.section("What the messages mean")
    table += page.section("What the alerts of Prometheus mean")
    typed = dict.fromkeys(re.findall(r"`(musterctl [^`]+)`", table))
    assert len(typed) > 15
    names = {"WORKER": "jobs/0", "POOL": "jobs", "SITE": "site.example", "NAME": "sweep"}
    for command in typed:
        # A command that is impossible in the present state exits with 1 and says why; 3: `status`.
        with daemon.client() as client:
            dead = client.submit("jobs.fail", {"text": "no"}).id
            client.task(dead).outcome(SECONDS)
        own = {**names, "ID": dead, "N": "2"}
        words = [own.get(word, word) for word in shlex.split(command)[1:]]
        done = daemon.ctl(*words)
        if words[0] == "--cluster":  # tests/cluster type these; here the words are understood
            assert (done.returncode, "no [cluster]" in done.stderr) == (78, True), command
            continue
        may_fail = words[0] == "cancel" or words[:2] == ["schedule", "remove"]
        allowed = (0, 1) if may_fail else (0, 3) if words[0] == "status" else (0,)
        assert done.returncode in allowed, f"{command}: {done.returncode} {done.stderr}"
