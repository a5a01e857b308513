"""Handlers on two real daemons with one PostgreSQL: states, locks and progress over both."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import Cluster, Server, servers
from test_node import prepared, sidecar_of

from musterd import TaskFailed
from support.daemon import Muster
from support.waiting import wait_for

WORKER = """
import os, time
from pathlib import Path
from musterd import task

HERE = Path(__file__).parent
SHARED = HERE.parent

def note(name, text):
    with open(SHARED / name, "a") as file:
        file.write(text + "\\n")

def wait_for(name):
    while not (SHARED / name).exists():
        time.sleep(0.01)

@task(timeout=120, max_retries=5)
def pages(ctx, pages: int) -> list:
    done = ctx.state.load(default=[])
    note("loads", str(len(done)))
    while len(done) < pages:
        done = [*done, HERE.name]
        ctx.state.save(done)
        note("saves", str(len(done)))
        wait_for(f"page{len(done)}")
    return done

@task(timeout=120)
def keyed(ctx, key: str, value: int) -> list:
    before = ctx.state.load(key)
    ctx.state.save(value, key)
    loaded = ctx.state.load(key)
    if value == 0:
        ctx.state.clear(key)
    return [before, loaded, ctx.state.load(key)]

@task(timeout=120)
async def akeyed(ctx, key: str, value: int) -> list:
    before = await ctx.state.aload(key)
    await ctx.state.asave(value, key)
    return [before, await ctx.state.aload(key)]

@task(timeout=120, max_retries=0)
def alone(ctx, name: str, number: int) -> str:
    with ctx.lock(name, timeout=60):
        try:
            fd = os.open(SHARED / f"{name}.held", os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            note("clashes", str(number))
            return "two at once"
        os.close(fd)
        time.sleep(0.01)
        (SHARED / f"{name}.held").unlink()
    return HERE.name

@task(timeout=120, max_retries=0)
def hold(ctx, name: str, timeout: float, until: str) -> str:
    with ctx.lock(name, timeout=timeout):
        note("holders", HERE.name)
        wait_for(until)
    return HERE.name

@task(timeout=120, max_retries=0)
def steps(ctx) -> str:
    for step in range(1, 6):
        ctx.progress(step / 10, f"step {step}")
        wait_for(f"step{step}")
    return HERE.name
"""


class Nodes:
    """Two daemons with one folder between them: files there tell handlers to go on."""

    def __init__(self, database: Cluster, folder: Path, **more: str) -> None:
        self.folder = folder
        self.database = database
        self._more = more
        self.made: list[Muster] = []

    def start(self, name: str, lease: str = "5s") -> Muster:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        (home / "jobs.py").write_text(WORKER)
        url = home / "url"
        host = self.database.server.folder
        url.write_text(f"postgresql://u_daemon:hunter2@/{self.database.name}?host={host}&port=5432")
        url.chmod(0o600)
        pool = {"worker": "jobs", "size": 2, "env": {"PYTHONPATH": str(home)}}
        cluster = {"cluster__url_file": str(url), "cluster__node": name, "cluster__lease": lease}
        node = Muster(home, {"jobs": pool}, **cluster, **self._more)
        self.made.append(node)
        return node.start()

    def let(self, *names: str) -> None:
        for name in names:
            (self.folder / name).touch()

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_lines(self, name: str, number: int) -> list[str]:
        wait_for(f"{number} lines of {name}", lambda: len(self.lines(name)) >= number)
        return self.lines(name)

    def stop(self) -> None:
        for node in self.made:
            if node.process is not None and node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
                node.stop()


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    return prepared(server, "handlers")


@pytest.fixture
def nodes(database: Cluster, tmp_path: Path) -> Iterator[Nodes]:
    database.reset()
    nodes = Nodes(database, tmp_path)
    try:
        yield nodes
    finally:
        nodes.stop()


def states(database: Cluster) -> list[tuple[object, ...]]:
    return database.sql("SELECT key FROM musterd.state ORDER BY key")


# -- states ---------------------------------------------------------------------------------------


def test_a_task_goes_on_on_another_node_where_it_was_and_its_success_clears_the_state(
    nodes: Nodes, database: Cluster
) -> None:
    first = nodes.start("shed")
    with first.client() as client:
        task = client.submit("jobs.pages", {"pages": 4})
        nodes.let("page1")
        nodes.wait_for_lines("saves", 2)
        second = nodes.start("barn")
        first.kill()
    assert len(states(database)) == 1
    nodes.let("page2", "page3", "page4")
    with second.client() as client:
        assert client.task(task.id).result(timeout=60) == ["shed", "shed", "barn", "barn"]
    assert nodes.lines("loads") == ["0", "2"]
    assert states(database) == []


def test_states_with_a_key_are_shared_by_the_handlers_of_all_nodes(
    nodes: Nodes, database: Cluster
) -> None:
    first, second = nodes.start("shed"), nodes.start("barn")
    first.ctl("pause", "jobs")
    with first.client() as client:
        got = client.submit("jobs.keyed", {"key": "k", "value": 5}).result(timeout=60)
        assert got == [None, 5, 5]
    first.ctl("resume", "jobs")
    second.ctl("pause", "jobs")
    with second.client() as client:
        got = client.submit("jobs.akeyed", {"key": "k", "value": 6}).result(timeout=60)
        assert got == [5, 6]
        got = client.submit("jobs.keyed", {"key": "k", "value": 0}).result(timeout=60)
        assert got == [6, 0, None]
    assert states(database) == []


def test_a_save_waits_for_a_database_that_is_away_and_for_the_next_sidecar(
    tmp_path: Path,
) -> None:
    with servers() as server:
        nodes = Nodes(prepared(server, "handlers"), tmp_path)
        try:
            node = nodes.start("shed", "60s")
            with node.client() as client:
                task = client.submit("jobs.pages", {"pages": 3})
                nodes.wait_for_lines("saves", 1)
                server.stop()
                nodes.let("page1")
                os.kill(sidecar_of(node).pid, signal.SIGKILL)
                time.sleep(0.5)
                assert nodes.lines("saves") == ["1"]
                server.start()
                nodes.wait_for_lines("saves", 2)
                nodes.let("page2", "page3")
                assert task.result(timeout=60) == ["shed"] * 3
        finally:
            nodes.stop()
    assert nodes.lines("loads") == ["0"]  # it went on meanwhile


# -- locks ----------------------------------------------------------------------------------------


def test_of_all_handlers_of_both_nodes_one_has_a_lock(nodes: Nodes) -> None:
    first, second = nodes.start("shed"), nodes.start("barn")
    with first.client() as client, second.client() as other:
        # As many as there are workers: when all of them run, both nodes are at work.
        tasks = [
            client.submit("jobs.hold", {"name": f"h{number}", "timeout": 60, "until": "go"})
            for number in range(4)
        ]
        nodes.wait_for_lines("holders", 4)
        tasks += [
            (client, other)[number % 2].submit(
                "jobs.alone", {"name": f"l{number % 2}", "number": number}
            )
            for number in range(60)
        ]
        nodes.let("go")
        places = [task.result(timeout=120) for task in tasks]
    assert set(places) == {"shed", "barn"}
    assert nodes.lines("clashes") == []


def test_a_lock_that_another_node_has_is_not_given_and_the_error_says_who_has_it(
    nodes: Nodes,
) -> None:
    first, second = nodes.start("shed"), nodes.start("barn")
    second.ctl("pause", "jobs")
    with first.client() as client:
        held = client.submit("jobs.hold", {"name": "l", "timeout": 0, "until": "first"})
        nodes.wait_for_lines("holders", 1)
        first.ctl("pause", "jobs")
        second.ctl("resume", "jobs")
        for timeout in (0, 0.2):
            args = {"name": "l", "timeout": timeout, "until": "never"}
            with pytest.raises(TaskFailed, match=r"jobs/\d \(task .*\) on shed has it"):
                client.submit("jobs.hold", args).result(timeout=60)
        args = {"name": "l", "timeout": 60, "until": "second"}
        waits = client.submit("jobs.hold", args)
        wait_for("it waits", lambda: waits.status().state == "running")
        nodes.let("first", "second")
        assert [held.result(timeout=60), waits.result(timeout=60)] == ["shed", "barn"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("killed", marks=pytest.mark.long),
        "its sidecar is killed",
        "its task is killed",
    ],
)
def test_a_lock_ends_with_its_holder_and_outlives_a_sidecar(
    nodes: Nodes, database: Cluster, how: str
) -> None:
    first, second = nodes.start("shed"), nodes.start("barn")
    second.ctl("pause", "jobs")
    with second.client() as client:
        held = client.submit("jobs.hold", {"name": "l", "timeout": 60, "until": "first"})
        nodes.wait_for_lines("holders", 1)
        first.ctl("pause", "jobs")
        second.ctl("resume", "jobs")
        waits = client.submit("jobs.hold", {"name": "l", "timeout": 60, "until": "second"})
        wait_for("it waits", lambda: len(database.sql("SELECT FROM musterd.lock")) == 2)
        nodes.let("second")
        if how == "killed":
            first.kill()
        elif how == "its task is killed":
            worker = next(each for each in first.pool("jobs").workers if each.state == "BUSY")
            os.kill(worker.pid, signal.SIGKILL)
        else:
            sidecar = sidecar_of(first).pid
            os.kill(sidecar, signal.SIGKILL)
            wait_for("another one", lambda: _new_sidecar(first, sidecar))
            assert nodes.lines("holders") == ["shed"]
            nodes.let("first")
            assert held.result(timeout=60) == "shed"
        assert waits.result(timeout=60) == "barn"
        nodes.let("first")
    wait_for("no lock is left", lambda: not database.sql("SELECT FROM musterd.lock"))


def _new_sidecar(node: Muster, before: int) -> bool:
    try:
        return sidecar_of(node).pid != before
    except ValueError:
        return False


@pytest.mark.long
def test_a_node_that_was_stopped_for_longer_than_its_lease_has_lost_its_locks_and_says_so(
    nodes: Nodes,
) -> None:
    first, second = nodes.start("shed"), nodes.start("barn")
    second.ctl("pause", "jobs")
    with second.client() as client:
        client.submit("jobs.hold", {"name": "l", "timeout": 60, "until": "never"})
        nodes.wait_for_lines("holders", 1)
        second.ctl("resume", "jobs")
        stopped = [first.pid, sidecar_of(first).pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            nodes.let("second")
            args = {"name": "l", "timeout": 60, "until": "second"}
            assert client.submit("jobs.hold", args).result(timeout=60) == "barn"
        finally:
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
        wait_for("it says so", lambda: "cluster.locks_" in first.log())
        assert "'l'" in first.log()
        nodes.let("never")


@pytest.mark.long
def test_while_the_database_is_away_a_lock_goes_on_to_the_next_here(tmp_path: Path) -> None:
    with servers() as server:
        database = prepared(server, "handlers")
        nodes = Nodes(database, tmp_path)
        try:
            node = nodes.start("shed", "60s")
            with node.client() as client:
                tasks = [
                    client.submit("jobs.hold", {"name": "l", "timeout": 60, "until": "go"})
                    for _ in range(2)
                ]
                nodes.wait_for_lines("holders", 1)
                wait_for("both run", lambda: all(t.status().state == "running" for t in tasks))
                server.stop()
                wait_for("it is seen", lambda: "cluster.away" in node.log())
                nodes.let("go")
                nodes.wait_for_lines("holders", 2)
                server.start()
                assert [task.result(timeout=60) for task in tasks] == ["shed"] * 2
            wait_for("none is left", lambda: not database.sql("SELECT FROM musterd.lock"))
        finally:
            nodes.stop()


# -- progress -------------------------------------------------------------------------------------


def test_progress_is_seen_on_every_node_and_late_watchers_get_the_latest(nodes: Nodes) -> None:
    first, third = nodes.start("shed"), nodes.start("loft")
    nodes.start("barn")
    first.ctl("pause", "jobs")
    third.ctl("pause", "jobs")
    with first.client() as client, third.client() as watcher:
        task = client.submit("jobs.steps")
        seen: dict[str, list[str]] = {"submitter": [], "watcher": []}
        reading = task.progress()
        for step in (1, 2):
            seen["submitter"].append(next(reading).text)
            nodes.let(f"step{step}")
        late = watcher.task(task.id).progress()
        seen["watcher"].append(next(late).text)
        seen["submitter"].append(next(reading).text)
        nodes.let("step3")
        # A mark may be told again to who watches tasks of others.
        seen["watcher"].append(next(each.text for each in late if each.text != seen["watcher"][0]))
        nodes.let("step4", "step5")
        assert task.result(timeout=60) == "barn"
        assert watcher.task(task.id).result(timeout=60) == "barn"
    assert seen["submitter"] == ["step 1", "step 2", "step 3"]
    assert seen["watcher"][0] in ("step 2", "step 3")
    assert seen["watcher"][1] in ("step 3", "step 4")
