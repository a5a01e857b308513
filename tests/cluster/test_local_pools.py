"""Pools of one machine beside shared ones: one Client() for both, whatever happens to others."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from postgres import Cluster, Server, servers
from test_node import prepared, sidecar_of

from musterd import (
    Context,
    InvalidTask,
    QueueFull,
    TaskFailed,
    TaskMissing,
    UnknownTask,
    call,
    task,
)
from musterd.ipc.client.sync_submit import TaskHandle
from musterd.ipc.wire.messages import RESULT_BYTES_MAX
from support.daemon import Muster
from support.waiting import wait_for

ATTACKER = Path(__file__).parents[1] / "integration" / "client_attacker.py"
RSS_BYTES_MAX = 300 * 1024 * 1024  # as of a daemon without a cluster

WORKER = """
import os
import time
from musterd import Client, task, Permanent

POOL = os.environ["POOL"]

@task
def where(ctx, x: int) -> str:
    return f"{POOL} {x}"

@task
def large(ctx, size: int) -> bytes:
    return bytes(size)

@task
def fail(ctx) -> int:
    raise Permanent("no price")

@task(timeout=60)
def slow(ctx, seconds: float) -> str:
    with open(__file__ + "." + POOL, "a") as file:
        file.write("run\\n")
    ctx.progress(0.5, "half")
    time.sleep(seconds)
    return "done"

@task(timeout=60)
def nested(ctx, name: str, x: int) -> str:
    with Client() as client:
        return "through " + client.submit(name, {"x": x}).result(timeout=50)

@task
def read(ctx, path: str) -> str:
    with open(path) as file:
        return file.read()

@task
def remember(ctx, value: int) -> int:
    with ctx.lock("all", timeout=10):
        before = ctx.state.load() or 0
        ctx.state.save(before + value)
    return before
"""


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    """For nodes of single tests."""
    return prepared(server, "others")


@pytest.fixture(scope="module")
def node(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Muster]:
    """A node that shares the pool `shared` and keeps the pool `own` to itself."""
    folder = tmp_path_factory.mktemp("one")
    muster = make_node(prepared(server, "local"), folder).start()
    try:
        yield muster
    finally:
        muster.stop()


def make_node(database: Cluster, folder: Path, *shared: str, **more: object) -> Muster:
    home = folder / "shed"
    home.mkdir(exist_ok=True)
    (home / "jobs.py").write_text(WORKER)
    url = home / "url"
    host = database.server.folder
    url.write_text(f"postgresql://u_daemon:hunter2@/{database.name}?host={host}&port=5432")
    url.chmod(0o600)
    pools = {
        name: {"worker": "jobs", "size": 2, "env": {"PYTHONPATH": str(home), "POOL": name}}
        for name in ("shared", "own")
    }
    settings = {
        "cluster__url_file": str(url),
        "cluster__node": "shed",
        "cluster__lease": "5s",
        "cluster__pools": shared or ("shared",),
    }
    return Muster(home, pools, **{**settings, **more})


def runs(node: Muster, pool: str) -> int:
    path = node.folder / f"jobs.py.{pool}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def in_postgresql(database: Cluster) -> int:
    ((number,),) = database.sql("SELECT count(*) FROM musterd.done")
    assert isinstance(number, int)
    return number


def later(submit: Callable[[], TaskHandle]) -> "Future[TaskHandle]":
    """Begin a submit that blocks until the task is accepted."""
    future: Future[TaskHandle] = Future()
    Thread(target=lambda: future.set_result(submit()), daemon=True).start()
    return future


def test_one_client_reaches_both_kinds_of_pools(node: Muster) -> None:
    with node.client() as client:
        names = [f"{('own', 'shared')[n % 2]}.where" for n in range(60)]
        handles = client.submit_many([(name, {"x": n}) for n, name in enumerate(names)])
        found = [handle.result(timeout=60) for handle in handles]
        assert found == [f"{('own', 'shared')[n % 2]} {n}" for n in range(60)]
        with pytest.raises(TaskFailed, match="no price"):
            client.submit("own.fail").result(timeout=60)
        with pytest.raises(UnknownTask):
            client.submit("nobody.where", {"x": 1}).result(timeout=60)
        with pytest.raises(UnknownTask):
            client.submit("own.nothing").result(timeout=60)


def test_a_typed_call_finds_both_kinds_of_pools(node: Muster) -> None:
    @task
    def where(ctx: Context, x: int) -> str: ...

    @task
    def strange(ctx: Context) -> None: ...

    for function in (where, strange):  # as if it were imported from the module of the workers
        function.__module__, function.__qualname__ = "jobs", function.__name__
    with node.client(connect_timeout=60) as client:
        with pytest.raises(InvalidTask, match=r"several pools \(own, shared\): say which one"):
            client.submit(where, x=1)
        for pool in ("own", "shared"):
            assert client.submit(call(where, x=1), pool=pool).result(timeout=60) == f"{pool} 1"
        with pytest.raises(UnknownTask, match=r"no pool runs jobs:strange \(pools: own, shared\)"):
            client.submit(strange)


def test_tasks_are_found_again_wherever_they_are(node: Muster) -> None:
    with node.client() as client:
        ids = [client.submit(f"{pool}.where", {"x": 1}).id for pool in ("own", "shared")]
        client.flush()
    with node.client() as client:
        assert [client.task(id_).result(timeout=60) for id_ in ids] == ["own 1", "shared 1"]
        assert [client.task(id_).status().state for id_ in ids] == ["succeeded"] * 2
        with pytest.raises(TaskMissing):
            client.task("nobody-has-it").result(timeout=60)


def test_progress_cancel_and_advice_of_local_tasks(node: Muster) -> None:
    with node.client() as client:
        running = client.submit("own.slow", {"seconds": 50})
        seen = next(iter(running.progress()))
        assert (seen.fraction, seen.text) == (0.5, "half")
        running.cancel()
        wait_for("it is cancelled", lambda: running.status().state == "cancelled")
        assert client.recommended_workers(timeout=60).keys() == {"own", "shared"}


def test_a_task_may_wait_for_one_of_the_other_kind(node: Muster) -> None:
    with node.client() as client:
        out = client.submit("own.nested", {"name": "shared.where", "x": 1})
        back = client.submit("shared.nested", {"name": "own.where", "x": 2})
        assert out.result(timeout=60) == "through shared 1"
        assert back.result(timeout=60) == "through own 2"


def test_schedules_of_local_pools_are_followed_like_before(
    database: Cluster, tmp_path: Path
) -> None:
    database.reset()
    page = tmp_path / "page"
    daily = {"args": {"path": str(page)}, "cron": "0 0 1 1 *", "notify": "task.changed"}
    node = make_node(database, tmp_path, schedule__tea={"task": "own.read", **daily}).start()

    def turn(text: str) -> None:
        page.write_text(text)
        done = node.ctl("schedule", "run", "tea")
        assert done.returncode == 0, done.stderr

    try:
        with node.client() as client:
            turn("one")
            wait_for("its run", lambda: client.submit("own.where", {"x": 1}).result(timeout=60))
            changes = client.changes(timeout=60)
            follower = Thread(target=lambda: found.append(next(changes)), daemon=True)
            found: list[Any] = []
            follower.start()
            wait_for("a change", lambda: turn(f"{time.monotonic_ns()}") or found)
            assert found[0].schedule == "tea"
            assert found[0].task.result(timeout=60).isdigit()
        assert in_postgresql(database) == 0  # local tasks are nowhere but here
    finally:
        node.stop()


def test_state_and_locks_of_local_pools_are_as_on_one_machine(node: Muster) -> None:
    with node.client() as client:
        assert client.submit("own.remember", {"value": 3}).result(timeout=60) == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_hostile_clients_are_bounded_in_both_processes(node: Muster) -> None:
    """They ask for large results of local tasks, and do not read them."""
    size = RESULT_BYTES_MAX - 1000
    before = node.log().count("Traceback")  # of tasks that failed
    with node.client() as honest:
        ids: list[str] = []
        for _ in range(4):  # one at a time: this test is not about workers' messages
            task = honest.submit("own.large", {"size": size})
            assert len(task.result(timeout=60)) == size
            ids.append(task.id)
        command = [sys.executable, str(ATTACKER), "watch", node.tasks_socket, "50", "0", *ids]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"begun\n"
            wait_for("somebody is put out", lambda: "event=client.dropped" in node.log(), 120.0)
            for pool in ("own", "shared"):
                found = honest.submit(f"{pool}.where", {"x": 1}).result(timeout=60)
                assert found == f"{pool} 1"
            attacker.communicate(timeout=120)
        for pid in (node.pid, sidecar_of(node).pid):
            assert peak_bytes(pid) < RSS_BYTES_MAX
        for id_ in ids:  # a client that reads gets every result
            assert len(honest.task(id_).result(timeout=60)) == size
    assert node.log().count("Traceback") == before


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# -- when something is away -----------------------------------------------------------------------


def test_a_sidecar_that_is_killed_loses_no_local_task(node: Muster) -> None:
    had = runs(node, "own")
    with node.client() as client:
        running = client.submit("own.slow", {"seconds": 2})
        wait_for("it runs", lambda: running.status().state == "running")
        before = sidecar_of(node).pid
        os.kill(before, signal.SIGKILL)
        mixed = [(f"{('own', 'shared')[n % 2]}.where", {"x": n}) for n in range(40)]
        handles = client.submit_many(mixed)
        found = [each.result(timeout=60) for each in handles]
        assert found == [f"{('own', 'shared')[n % 2]} {n}" for n in range(40)]
        assert running.result(timeout=60) == "done"
    assert runs(node, "own") == had + 1
    assert sidecar_of(node).pid != before


def test_local_pools_go_on_while_postgresql_is_away(tmp_path: Path) -> None:
    with servers() as server:
        node = make_node(prepared(server, "local"), tmp_path).start()
        try:
            with node.client() as client:
                assert client.submit("shared.where", {"x": 1}).result(timeout=60) == "shared 1"
                server.stop()
                patient = later(lambda: client.submit("shared.where", {"x": 2}, wait=True))
                assert client.submit("own.where", {"x": 3}).result(timeout=60) == "own 3"
                with pytest.raises(QueueFull, match="database"):
                    client.submit("shared.where", {"x": 4}).result(timeout=60)
                # A sidecar that begins now serves local pools at once, too.
                os.kill(sidecar_of(node).pid, signal.SIGKILL)
                assert client.submit("own.where", {"x": 5}).result(timeout=60) == "own 5"
                with node.client() as other:
                    assert other.submit("own.where", {"x": 6}).ack(timeout=60) is None
                server.start()
                assert patient.result(timeout=60).result(timeout=60) == "shared 2"
        finally:
            node.stop()
    assert [each for each in node.processes() if each.is_running()] == []


def test_without_a_sidecar_the_supervisor_serves_its_own_pools(
    database: Cluster, tmp_path: Path
) -> None:
    database.reset()
    node = make_node(database, tmp_path)
    url = node.folder / "url"
    right = url.read_text()
    url.write_text(right.replace(database.name, "postgres"))  # not ours: refused for good
    node.start()
    try:
        wait_for("the sidecar has given up", lambda: "cluster.local_only" in node.log())
        with node.client() as client:
            assert client.submit("own.where", {"x": 1}).result(timeout=60) == "own 1"
            with pytest.raises(QueueFull, match="cluster cannot be reached"):
                client.submit("shared.where", {"x": 2}).result(timeout=60)
            patient = later(lambda: client.submit("shared.where", {"x": 3}, wait=True))
            running = client.submit("own.slow", {"seconds": 3})
            wait_for("it runs", lambda: running.status().state == "running")
            foreign = client.task("nobody-knows-yet")
            with pytest.raises(TimeoutError):
                foreign.result(timeout=0.5)  # the cluster may have it: nobody says that it is gone
            url.write_text(right)
            assert node.ctl("reload").returncode == 0
            wait_for("a sidecar serves again", lambda: "cluster.serves" in node.log())
            assert patient.result(timeout=60).result(timeout=60) == "shared 3"
            assert running.result(timeout=60) == "done"
            with pytest.raises(TaskMissing):
                foreign.result(timeout=60)
        assert runs(node, "own") == 1
    finally:
        node.stop()


def test_local_pools_are_reached_without_a_psycopg_that_works(
    database: Cluster, tmp_path: Path
) -> None:
    database.reset()
    broken = tmp_path / "broken" / "psycopg"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise ImportError("no pq wrapper available")')
    node = make_node(database, tmp_path)
    node.popen_options = {"env": {**os.environ, "PYTHONPATH": str(broken.parent)}}
    node.start()
    try:
        with node.client(connect_timeout=60) as client:
            assert client.submit("own.where", {"x": 1}).result(timeout=60) == "own 1"
            wait_for("the sidecar has given up", lambda: "cluster.fatal" in node.log())
            with pytest.raises(QueueFull, match="psycopg does not work: no pq wrapper"):
                client.submit("shared.where", {"x": 2}).result(timeout=60)
    finally:
        node.stop()


def test_a_pool_that_becomes_shared_runs_its_old_tasks_to_their_end(
    database: Cluster, tmp_path: Path
) -> None:
    database.reset()
    node = make_node(database, tmp_path, supervisor__drain_timeout="0s").start()
    try:
        with node.client() as client:
            for _ in range(2):
                client.submit("own.slow", {"seconds": 1.5})
            old = [client.submit("own.where", {"x": n}) for n in range(10)]
            client.flush()
            node.stop()
            make_node(database, tmp_path, "shared", "own")
            node.start()
            new = client.submit("own.where", {"x": 99})
            assert [each.result(timeout=90) for each in old] == [f"own {n}" for n in range(10)]
            assert new.result(timeout=60) == "own 99"
        assert in_postgresql(database) == 1
    finally:
        node.stop()
