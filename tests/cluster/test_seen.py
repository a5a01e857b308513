"""A cluster is seen: metrics, status and log of real daemons, and the alerts of an outage."""

import http.client
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from postgres import Cluster, Server, servers
from prometheus_client.parser import text_string_to_metric_families as parse
from test_node import make_node, prepared

from musterd import TaskFailed
from musterd.supervisor.api import rpc
from musterd.supervisor.api.cluster import ClusterStatus
from support.daemon import Muster
from support.waiting import wait_for

# Prints what it is told as a line of a file.
COURIER = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read().strip() + '\\n')"
ALL_RUN = [("running", 4)]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def own() -> Iterator[tuple[Server, Cluster]]:
    """A server that a test may stop."""
    with servers() as server:
        yield server, prepared(server)


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    return prepared(server, "seen")


def make(database: Cluster, folder: Path, name: str, **more: Any) -> Muster:
    made = make_node(database, folder, name, **more)
    # What people wait ten seconds for, a test need not.
    made.tune("musterd.supervisor.cluster.rounds", LOOK_NS=300_000_000, LOOK_AGE_NS=200_000_000)
    return made


def cluster_of(muster: Muster) -> ClusterStatus:
    found = muster.status().cluster
    assert found is not None
    return found


def scraped(muster: Muster) -> Samples:
    text = fetched(muster, "/metrics")
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for family in parse(text)
        for each in family.samples
    }


def asked(muster: Muster, **query: str) -> Any:
    """Return the tasks that the dashboard would show."""
    return fetched(muster, f"/api/tasks?{urlencode(query)}")


def fetched(muster: Muster, path: str) -> Any:
    web = muster.status().web
    assert web is not None
    connection = http.client.HTTPConnection(web.address.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return json.loads(text) if path.startswith("/api") else text
    finally:
        connection.close()


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"musterd_cluster_{name}", tuple(sorted(labels.items()))]


def events_of(muster: Muster, kind: str) -> list[dict[str, Any]]:
    recent = muster.ask(rpc.Events(follow=False, limit=200))["recent"]
    return [each for each in recent if each["event"].startswith(kind)]


def test_metrics_status_and_log_tell_of_tasks_and_of_the_cluster(
    database: Cluster, tmp_path: Path
) -> None:
    database.reset()
    node = make(database, tmp_path, "shed", http__listen="127.0.0.1:0").start()
    try:
        with node.client() as client:
            handles = [client.submit("jobs.double", {"x": n}) for n in range(20)]
            assert [handle.result(timeout=60) for handle in handles] == [2 * n for n in range(20)]
            failing = client.submit("jobs.fail")
            with pytest.raises(TaskFailed):
                failing.result(timeout=60)
            delayed = client.submit("jobs.double", {"x": 1}, delay=3600)
            client.flush()
            wait_for("it is a member", lambda: cluster_of(node).state == "member")
            wait_for(
                "the cluster is seen",
                lambda: [(q.state, q.tasks) for q in cluster_of(node).queue] == [("waiting", 1)],
            )
            told = cluster_of(node)
            assert (told.node, [each.name for each in told.nodes]) == ("shed", ["shed"])
            assert 0 < told.lease_seconds <= 5
            wait_for(
                "the figures are told", lambda: value(scraped(node), "results_told_total") >= 21
            )
            samples = scraped(node)
            assert value(samples, "state", state="member") == 1
            assert value(samples, "claims_total") > 0
            assert value(samples, "claim_seconds_count") == value(samples, "claims_total")
            assert value(samples, "claimed_attempts_total") == 21
            assert value(samples, "ends_total") == 21
            assert value(samples, "fenced_results_total") == 0
            assert value(samples, "tasks_submitted_total") == 22
            assert value(samples, "nodes", state="alive") == 1
            labels = {"pool": "jobs", "priority": "normal", "state": "waiting"}
            assert value(samples, "queue_tasks", **labels) == 1
            assert value(samples, "live_bytes") > 0
            delayed.cancel()
        shown = node.ctl("status").stdout
        [line] = [line for line in shown.splitlines() if line.startswith("cluster: ")]
        assert line.startswith("cluster: node shed: member, lease ")
        assert "1 node alive" in line
    finally:
        node.stop()
    log = node.log()
    assert f"event=task.succeeded task={handles[0].id}" in log
    assert f"event=task.failed pool=jobs task={failing.id}" in log
    assert "event=cluster.joined" in log
    assert "event=cluster.warning" in log  # there is no synchronous standby
    assert "musterd-cluster" not in log  # nothing that it printed


def test_a_dead_task_of_the_cluster_is_an_event(database: Cluster, tmp_path: Path) -> None:
    database.reset()
    node = make(database, tmp_path, "shed").start()
    try:
        with node.client() as client:
            failing = client.submit("jobs.fail", target="shop.example")
            with pytest.raises(TaskFailed):
                failing.result(timeout=60)
        [dead] = wait_for("it is told", lambda: events_of(node, "task.dead"))
        assert (dead["task"], dead["target"]) == (failing.id, "shop.example")
        assert "no price" in dead["reason"]
    finally:
        node.stop()


def test_an_outage_is_one_alert_with_an_end_and_the_status_says_what_it_means(
    own: tuple[Server, Cluster], tmp_path: Path
) -> None:
    server, database = own
    told = tmp_path / "told"
    command = [sys.executable, "-c", COURIER, str(told)]
    alert = {"on": ["cluster.*"], "group": "100ms", "command": command}
    node = make(database, tmp_path, "shed", alerts__ops=alert).start()

    def kinds(part: str) -> list[str]:
        messages = [json.loads(line) for line in told.read_text().splitlines()]
        return [line["kind"] for message in messages for line in message[part]]

    try:
        wait_for("alerts are sent", lambda: node.ask(rpc.ListAlerts())["pid"])
        wait_for("it is a member", lambda: cluster_of(node).state == "member")
        server.stop()
        wait_for("it is noticed", lambda: cluster_of(node).unreachable)
        wait_for("it is told", lambda: told.exists() and "cluster.unreachable" in kinds("began"))
        shown = node.ctl("status").stdout
        assert "the database has not answered for" in shown
        assert "submits are refused" in shown
        server.start()
        wait_for("its end is told", lambda: "cluster.unreachable" in kinds("ended"))
        wait_for("it is a member again", lambda: cluster_of(node).state == "member")
        assert kinds("began").count("cluster.unreachable") == 1
        assert [each["level"] for each in events_of(node, "cluster.unreachable")] == ["error"]
        [over] = events_of(node, "cluster.reachable")
        assert over["seconds"] > 5
    finally:
        node.stop()
    assert "hunter2" not in node.log() + told.read_text()


def test_tasks_of_all_nodes_are_found_from_each_of_them(database: Cluster, tmp_path: Path) -> None:
    database.reset()
    web = {"http__listen": "127.0.0.1:0"}
    nodes = [make(database, tmp_path, name, **web).start() for name in ("shed", "barn")]
    shed = nodes[0]
    try:
        with shed.client() as client:
            handles = [client.submit("jobs.slow", {"seconds": 600}) for _ in range(4)]
            client.flush()

            def running(**query: str) -> dict[str, str]:
                return {
                    row["id"]: row["node"] for row in asked(shed, state="running", **query)["rows"]
                }

            wait_for(
                "all run", lambda: [(q.state, q.tasks) for q in cluster_of(shed).queue] == ALL_RUN
            )
            everywhere = running(node="*")
            assert everywhere.keys() == {handle.id for handle in handles}
            assert sorted(everywhere.values()) == ["barn", "barn", "shed", "shed"]
            there = running(node="barn")
            assert there == {id_: node for id_, node in everywhere.items() if node == "barn"}
            assert running(node="barn", pool="other") == {}
            one = shed.ask(rpc.GetClusterTask(id=next(iter(there))))
            assert (one["node"], one["args"]) == ("barn", {"seconds": 600})
            with pytest.raises(rpc.RpcError, match="no such task"):
                shed.ask(rpc.GetClusterTask(id="nothing"))
            for handle in handles:
                handle.cancel()
    finally:
        for node in nodes:
            node.stop()


@pytest.mark.long
def test_the_dashboard_shows_all_nodes_and_the_tasks_of_one(
    database: Cluster, tmp_path: Path
) -> None:
    from playwright.sync_api import expect, sync_playwright

    database.reset()
    web = {"http__listen": "127.0.0.1:0"}
    nodes = [make(database, tmp_path, name, **web).start() for name in ("shed", "barn")]
    status = nodes[0].status()
    assert status.web is not None
    problems: list[str] = []
    try:
        with nodes[0].client() as client, sync_playwright() as playwright:
            handles = [client.submit("jobs.slow", {"seconds": 600}) for _ in range(4)]
            client.flush()
            browser = playwright.chromium.launch(
                executable_path=os.environ.get("MUSTERD_CHROMIUM", "/usr/bin/chromium")
            )
            expect.set_options(timeout=60_000)
            page = browser.new_page()
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(status.web.address)
            expect(page.locator("#nodes tbody tr")).to_have_count(2)
            expect(page.locator("#cluster-here")).to_contain_text("member shed")
            expect(page.locator("#cluster-queue tbody tr td").last).to_have_text("4")
            page.select_option("#task-state", "running")
            expect(page.locator("#tasks tbody tr")).to_have_count(4)
            page.select_option("#task-state", "succeeded")
            expect(page.locator("#tasks tbody tr")).to_have_count(0)
            page.select_option("#task-node", "barn")  # and those that run: only these have a node
            expect(page.locator("#tasks tbody tr")).to_have_count(2)
            expect(page.locator("#tasks tbody tr").first).to_contain_text("on barn")
            page.locator("#tasks tbody tr").first.click()
            expect(page.locator("#detail-body")).to_contain_text("barn")
            browser.close()
            for handle in handles:
                handle.cancel()
    finally:
        for node in nodes:
            node.stop()
    assert problems == []


@pytest.mark.long
def test_of_a_lost_node_only_the_node_that_gave_it_up_tells(
    database: Cluster, tmp_path: Path
) -> None:
    database.reset()
    names = ("shed", "barn", "attic")
    nodes = {name: make(database, tmp_path, name).start() for name in names}
    shed, barn, attic = nodes.values()
    try:
        wait_for("all are seen", lambda: len(cluster_of(shed).nodes) == 3)
        assert attic.process is not None
        attic.kill()

        def lost() -> list[dict[str, Any]]:
            return events_of(shed, "cluster.node_lost") + events_of(barn, "cluster.node_lost")

        wait_for("it is lost", lost)
        for other in (shed, barn):
            wait_for("it is seen", lambda other=other: states(other)["attic"] == "gone")
        assert [each["node"] for each in lost()] == ["attic"]
        attic.start()

        def back() -> list[dict[str, Any]]:
            return events_of(shed, "cluster.node_back") + events_of(barn, "cluster.node_back")

        assert [each["node"] for each in wait_for("it is back", back)] == ["attic"]
    finally:
        for node in nodes.values():
            node.stop()


def states(muster: Muster) -> dict[str, str]:
    return {each.name: each.state for each in cluster_of(muster).nodes}
