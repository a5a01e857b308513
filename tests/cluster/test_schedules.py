"""Real daemons and the schedules of their cluster: each due time once, whatever is killed."""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from postgres import Cluster, Server
from test_node import make_node, prepared
from test_policy import apply

from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import RpcError
from musterd.supervisor.ctl import cluster_schedules, main
from support.daemon import Muster
from support.waiting import wait_for

WORKER = """
import time
from pathlib import Path
from musterd import Retry, task

@task
def read(ctx, path: str) -> str:
    return Path(path).read_text()

@task(max_retries=5)
def flaky(ctx, times: int) -> int:
    if ctx.attempt <= times:
        raise Retry(after=600)
    return ctx.attempt

@task(timeout=60)
def slow(ctx) -> None:
    time.sleep(30)
"""


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    return prepared(server, "schedules")


@pytest.fixture(scope="module")
def nodes(database: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Muster]]:
    database.reset()
    folder = tmp_path_factory.mktemp("nodes")
    musters = [make_node(database, folder, name, WORKER) for name in ("shed", "barn")]
    try:
        for muster in musters:
            muster.start()
        engine = database.engine()
        wait_for("both have joined", lambda: sum(each.alive for each in engine.nodes()) == 2)
        yield musters
    finally:
        for muster in musters:
            muster.stop()
        database.close()


def schedule(name: str, path: Path, **keys: object) -> str:
    given = {"task": '"jobs.read"', "every": '"1s"', "args": f'{{path = "{path}"}}', **keys}
    lines = [f"{key} = {value}" for key, value in given.items()]
    return f"[schedule.{name}]\n" + "\n".join(lines) + "\n"


def instants(database: Cluster, name: str) -> list[int]:
    """Return the instants for which a schedule ran, each as often as there is a task."""
    rows = database.sql("SELECT id FROM musterd.live UNION ALL SELECT id FROM musterd.done")
    ids = [str(id_) for (id_,) in rows]
    return sorted(int(id_.rpartition(".")[2], 16) for id_ in ids if id_.startswith(f"@{name}."))


def check(database: Cluster, name: str, every_ns: int) -> None:
    """Check that each due time has one run, and none is missing."""
    made = instants(database, name)
    assert len(set(made)) == len(made), "a due time was run twice"
    assert made == list(range(made[0], made[-1] + 1, every_ns)), "a due time was not run"


def test_a_killed_node_leaves_no_due_time_out_and_runs_none_twice(
    nodes: list[Muster], database: Cluster, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    page.write_text("1")
    often = schedule("often", page, every='"200ms"', overlap="true", catch_up='"all"')
    assert apply(database, tmp_path, often) == 0
    wait_for("it runs", lambda: len(instants(database, "often")) >= 5)
    nodes[0].kill()
    so_far = len(instants(database, "often"))
    wait_for("the other runs it", lambda: len(instants(database, "often")) >= so_far + 5)
    check(database, "often", 200_000_000)
    nodes[0].start()  # for the next test


@pytest.mark.long
def test_due_times_are_run_once_while_nodes_are_killed_all_the_time(
    nodes: list[Muster], database: Cluster, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    page.write_text("1")
    crowded = schedule("crowded", page, every='"100ms"', overlap="true", catch_up='"all"')
    assert apply(database, tmp_path, crowded) == 0
    rng = Random(17)
    for _ in range(8):
        so_far = len(instants(database, "crowded"))
        wait_for("it runs", lambda: len(instants(database, "crowded")) > so_far)  # noqa: B023  # called here
        time.sleep(rng.random())  # around a due time, or in the middle of a transaction
        victim = rng.choice(nodes)
        victim.kill()
        victim.start()
    wait_for("it goes on", lambda: len(instants(database, "crowded")) >= 50)
    check(database, "crowded", 100_000_000)
    engine = database.engine()
    [view] = engine.schedules()
    engine.pause("crowded", paused=True)
    assert view.skipped == 0


def test_a_change_reaches_followers_on_each_node_and_one_node_alerts(
    nodes: list[Muster], database: Cluster, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    page.write_text("old")
    watch = schedule("kites", page, every='"500ms"', notify='"task.changed"')
    clients = [node.client() for node in nodes]
    readers = [client.changes("kites") for client in clients]
    assert apply(database, tmp_path, watch) == 0
    wait_for("it runs", lambda: len(instants(database, "kites")) >= 2)
    wait_for("it has a result", lambda: database.sql("SELECT FROM musterd.history"))
    page.write_text("new")
    for reader in readers:
        change = next(reader)
        assert change.schedule == "kites"
        assert change.task.result(timeout=60) == "new"
    wait_for("both report it", lambda: all(changed(node) for node in nodes))
    for node in nodes:
        assert len(changed(node)) == 1
    alerting = [event for node in nodes for event in changed(node) if not event.get("elsewhere")]
    assert len(alerting) == 1
    assert alerting[0]["schedule"] == "kites"
    assert alerting[0]["pool"] == "jobs"
    for reader, client in zip(readers, clients, strict=True):
        reader.close()
        client.close()


def changed(node: Muster) -> list[dict[str, Any]]:
    recent: list[dict[str, Any]] = node.ask(rpc.Events())["recent"]
    return [event for event in recent if event["event"] == "task.changed"]


def test_schedules_are_listed_run_by_hand_and_paused(
    nodes: list[Muster], database: Cluster, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    page.write_text("1")
    rare = schedule("rare", page, every='"1h"')
    slow = '[schedule.slow]\ntask = "jobs.slow"\ncron = "@yearly"\ntimezone = "UTC"\n'
    assert apply(database, tmp_path, rare + slow) == 0
    engine = database.engine()
    wait_for("nodes have looked", lambda: all(each.next_ns for each in engine.schedules()))
    first, second = cluster_schedules.listed(engine, rpc.ListSchedules()).schedules
    assert (first.name, first.state, first.task, first.when) == (
        "rare",
        "active",
        "jobs.read",
        "every 1h",
    )
    assert (second.when, second.runs, second.last_task) == ("@yearly (UTC)", 0, "")
    ran = cluster_schedules.run(engine, "rare")
    assert (ran.runs, ran.next_at) == (1, first.next_at)
    with nodes[1].client() as client:
        assert client.task(ran.last_task).result(timeout=60) == "1"
    cluster_schedules.run(engine, "slow")
    with pytest.raises(RpcError, match="has not ended"):
        cluster_schedules.run(engine, "slow")
    engine.cancel([engine.schedules()[1].task])
    assert cluster_schedules.pause(engine, "rare", paused=True).state == "paused"
    assert cluster_schedules.pause(engine, "rare", paused=False).state == "active"
    with pytest.raises(RpcError, match="no such schedule: 'other': there are rare, slow"):
        cluster_schedules.run(engine, "other")


def test_a_run_that_waits_for_a_retry_is_in_the_way_of_none_and_who_asked_gets_the_result(
    nodes: list[Muster], database: Cluster, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    failing = schedule("flaky", page, task='"jobs.flaky"', args="{times = 2}")
    assert apply(database, tmp_path, failing) == 0
    wait_for("others are made", lambda: len(instants(database, "flaky")) >= 3)
    ended = "SELECT count(*) FROM musterd.done WHERE id LIKE '@flaky.%%' AND error LIKE %s"
    gone = database.sql(ended, "cancel: not tried again%")
    assert int(str(gone[0][0])) >= 2, "the last runs have ended for them"
    engine = database.engine()
    engine.pause("flaky", paused=True)
    engine.cancel([engine.schedules("flaky")[0].due.alive])
    with nodes[0].client() as client:
        run = client.schedules.run("flaky")
        engine.pause("flaky", paused=False)
        assert run.result(timeout=60) == 3  # the attempts at the next due times
        shown = client.schedules.get("flaky")
    assert shown.skipped >= 2
    why = f"run {run.id}, which somebody waits for, is tried again in its place"
    assert shown.skipped_why == why
    assert cluster_schedules.pause(engine, "flaky", paused=True).skipped_why == why


def test_musterctl_shows_and_steers_schedules_of_the_cluster(
    nodes: list[Muster],
    database: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page"
    page.write_text("1")
    assert apply(database, tmp_path, schedule("hourly", page, every='"1h"')) == 0

    def ask(*words: str) -> str:
        capsys.readouterr()
        place = ("--url-file", str(tmp_path / "admin"))
        assert main(["--cluster", *place, "schedule", *words]) == 0
        return capsys.readouterr().out

    listed = ask().splitlines()
    assert len(listed) == 2
    assert "hourly" in listed[1]
    run = ask("run", "hourly").strip()
    assert run.startswith("@hourly.")
    with nodes[0].client() as client:
        assert client.task(run).result(timeout=60) == "1"
    assert ask("pause", "hourly") == "hourly: paused\n"
    assert ask("resume", "hourly") == "hourly: active\n"


def test_a_local_schedule_of_a_shared_pool_does_not_run_and_that_is_said(
    server: Server, tmp_path: Path
) -> None:
    database = prepared(server, "local_schedules")
    own = {"schedule__kites": {"task": "jobs.read", "every": "100ms", "args": {"path": "/"}}}
    node = make_node(database, tmp_path, "shed", WORKER, **own).start()
    try:
        wait_for("it is said", lambda: "no policy is applied" in node.log())
        assert "schedule.kites: each machine has its own" in node.log()
        with node.client() as client:
            client.submit("jobs.read", {"path": __file__}).result(timeout=60)
        assert "no schedules are configured" in node.ctl("schedule").stdout
        ids = database.sql("SELECT id FROM musterd.live UNION ALL SELECT id FROM musterd.done")
        assert len(ids) == 1
    finally:
        node.stop()
