"""Real daemons with one PostgreSQL: clients, tasks and sidecars that die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from postgres import Cluster, Server, servers

from musterd import QueueFull, TaskFailed
from support.daemon import Muster
from support.waiting import wait_for

WORKER = """
import time
from musterd import task, Permanent

@task
def double(ctx, x: int) -> int:
    return 2 * x

@task
def fail(ctx) -> int:
    raise Permanent("no price")

@task(timeout=60)
def slow(ctx, seconds: float) -> str:
    with open(__file__ + ".runs", "a") as file:
        file.write("run\\n")
    time.sleep(seconds)
    return "done"
"""


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    return prepared(server)


def prepared(server: Server, name: str = "nodes") -> Cluster:
    """Return a new cluster, with a user for daemons."""
    cluster = Cluster(server, name)
    known = cluster.sql("SELECT FROM pg_roles WHERE rolname = 'u_daemon'")
    if not known:
        cluster.sql("CREATE ROLE u_daemon LOGIN PASSWORD 'hunter2' IN ROLE musterd_node")
    return cluster


@pytest.fixture
def node(database: Cluster, tmp_path: Path) -> Iterator[Muster]:
    database.reset()
    muster = make_node(database, tmp_path, "shed")
    muster.start()
    try:
        yield muster
    finally:
        muster.stop()


def make_node(
    database: Cluster, folder: Path, name: str, worker: str = WORKER, **settings: Any
) -> Muster:
    home = folder / name
    home.mkdir()
    (home / "jobs.py").write_text(worker)
    url = home / "url"
    host = database.server.folder
    url.write_text(f"postgresql://u_daemon:hunter2@/{database.name}?host={host}&port=5432")
    url.chmod(0o600)
    pool = {"worker": "jobs", "size": 2, "env": {"PYTHONPATH": str(home)}}
    cluster = {"cluster__url_file": str(url), "cluster__node": name, "cluster__lease": "5s"}
    return Muster(home, {"jobs": pool}, **cluster, **settings)


def sidecar_of(muster: Muster) -> psutil.Process:
    assert muster.process is not None
    children = psutil.Process(muster.process.pid).children()
    (found,) = [each for each in children if "musterd.supervisor.node" in _words(each)]
    return found


def _words(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    return "musterd.supervisor.node" if "musterd: cluster" in words else words


def test_tasks_run_through_postgresql(node: Muster, database: Cluster) -> None:
    with node.client() as client:
        handles = [client.submit("jobs.double", {"x": n}) for n in range(50)]
        assert [handle.result(timeout=60) for handle in handles] == [2 * n for n in range(50)]
        with pytest.raises(TaskFailed, match="no price"):
            client.submit("jobs.fail").result(timeout=60)
    ((number,),) = database.sql("SELECT count(*) FROM musterd.done")
    assert number == 51
    assert "hunter2" not in node.log()


def test_a_sidecar_that_is_killed_loses_nothing(node: Muster, database: Cluster) -> None:
    with node.client() as client:
        running = client.submit("jobs.slow", {"seconds": 3})
        wait_for("it runs", lambda: running.status().state == "running")
        handles = [client.submit("jobs.double", {"x": n}) for n in range(20)]
        client.flush()
        before = sidecar_of(node).pid
        os.kill(before, signal.SIGKILL)
        later = [client.submit("jobs.double", {"x": n}) for n in range(20)]
        assert [each.result(timeout=60) for each in (*handles, *later)] == [
            2 * n for n in (*range(20), *range(20))
        ]
        assert running.result(timeout=60) == "done"
    assert (node.folder / "jobs.py.runs").read_text() == "run\n"  # it went on meanwhile
    assert sidecar_of(node).pid != before
    rows = database.sql("SELECT max(attempts), max(crashes), count(*) FROM musterd.done")
    assert rows == [(1, 0, 41)]


def test_without_postgresql_new_submits_are_refused_and_old_ones_come_to_their_end(
    tmp_path: Path,
) -> None:
    with servers() as server:
        database = prepared(server)
        node = make_node(database, tmp_path, "shed").start()
        try:
            with node.client() as client:
                running = client.submit("jobs.slow", {"seconds": 2})
                wait_for("it runs", lambda: running.status().state == "running")
                server.stop()
                with pytest.raises(QueueFull, match="database"):
                    client.submit("jobs.double", {"x": 1}).result(timeout=60)
                server.start()
                assert running.result(timeout=60) == "done"
                assert client.submit("jobs.double", {"x": 2}, wait=True).result(timeout=60) == 4
        finally:
            node.stop()
        assert "hunter2" not in node.log()
        assert "cluster.unreachable" in node.log()
    assert [each for each in node.processes() if each.is_running()] == []
