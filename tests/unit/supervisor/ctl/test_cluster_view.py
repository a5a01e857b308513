"""A cluster as people see it: one line, pools over all nodes, nodes."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from musterd.ipc.wire.messages import TaskDeclaration
from musterd.supervisor.api.status import FleetStatus, TaskStatus
from musterd.supervisor.cluster.engine import (
    Count,
    NodeView,
    PoolCard,
    Recent,
    SiteView,
    Statistics,
)
from musterd.supervisor.ctl import cluster_view
from musterd.supervisor.ctl.cluster_commands import MigrationResult, migrated
from musterd.supervisor.ctl.table import Paper
from support import document_answers

SECOND_NS = 1_000_000_000
DOCUMENT = Path(__file__).parents[4] / "docs" / "musterctl.md"
PARSER = PoolCard("parser", 5, (TaskDeclaration("extract"),))
BROWSER = PoolCard("browser", 3, (TaskDeclaration("render"),))
ATTIC = NodeView("1", "attic", 1, True, False, 4, SECOND_NS, "0.1.0", (PARSER, BROWSER))
SHED = NodeView("2", "shed", 2, True, False, 1, 2 * SECOND_NS, "0.1.0", (PARSER,))
SILENT = structs.replace(SHED, name="yard", identity="3", alive=False, beat_age_ns=40 * SECOND_NS)
LOST = structs.replace(SILENT, tenure=0, lost=True, claims=0)
LEFT = structs.replace(LOST, lost=False)
COUNTS = (
    Count("parser", 0, "queued", 2),
    Count("parser", 2, "queued", 1200),
    Count("parser", 2, "running", 4),
    Count("parser", 2, "waiting", 7),
    Count("browser", 2, "running", 1),
)
RECENT = (Recent("parser", 50, 1, 3), Recent("browser", 0, 0, 0))


def fleet(
    *nodes: NodeView, counts: tuple[Count, ...] = COUNTS, snapshot_ns: int = 0, dead: int = 0
) -> FleetStatus:
    statistics = Statistics(snapshot_ns, dead, 0, counts)
    return cluster_view.fleet_status(
        nodes, counts, RECENT, statistics, version="0.1.0", place="db:5432/x", answer_seconds=0.002
    )


def test_one_line_says_how_the_cluster_does() -> None:
    line = cluster_view.summary(fleet(ATTIC, SHED))
    assert line == "running: 2 nodes alive; 1202 queued, 5 running, 7 waiting, 3 failed"
    line = cluster_view.summary(fleet(ATTIC, SILENT, LOST, LEFT))
    assert line.startswith("degraded: 1 node alive, 1 silent, 1 lost, 1 left; 1202 queued")


def test_pools_are_counted_over_all_nodes() -> None:
    status = fleet(ATTIC, SHED)
    browser, parser = status.pools
    assert (browser.running, browser.size, browser.busy) == (3, 3, 1)
    assert (parser.running, parser.size, parser.busy) == (10, 10, 4)
    assert parser.queued == {"critical": 2, "normal": 1200}
    assert (parser.waiting, parser.failed, parser.reason) == (7, 3, "on attic, shed")
    assert status.at_target


def test_places_of_a_node_that_is_missed_are_missing() -> None:
    for missed in (SILENT, LOST):
        parser = fleet(ATTIC, missed).pools[1]
        assert (parser.running, parser.size) == (5, 10)
    parser = fleet(ATTIC, LEFT).pools[1]
    assert (parser.running, parser.size) == (5, 5)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ((), "no node is alive"),
        ((ATTIC, SILENT), "yard: silent"),
        ((ATTIC, LOST), "yard: lost, restart it or musterctl cluster forget"),
        ((SHED,), "pool browser is stranded: 1 task waits, and no live node has it"),
    ],
)
def test_what_is_wrong_is_said(nodes: tuple[NodeView, ...], words: str) -> None:
    status = fleet(*nodes)
    assert words in status.problem
    assert not status.at_target
    assert status.state == "degraded"


def test_trouble_of_postgresql_is_said() -> None:
    assert fleet(ATTIC).problem == ""
    assert "open in PostgreSQL for 10m 00s" in fleet(ATTIC, snapshot_ns=600 * SECOND_NS).problem
    assert "autovacuum" in fleet(ATTIC, dead=10_000_000).problem


def test_a_node_that_left_is_no_problem() -> None:
    assert fleet(ATTIC, LEFT).problem == ""


def test_a_drained_node_is_alive_and_its_pool_says_so() -> None:
    status = fleet(structs.replace(ATTIC, draining=True))
    assert status.problem == ""
    assert status.nodes[0].state == "draining"
    assert {pool.state for pool in status.pools} == {"DRAINING"}


def test_the_status_fits_a_narrow_terminal() -> None:
    painted = cluster_view.fleet_text(fleet(ATTIC, SHED, LOST), Paper(80, colour=True))
    text = re.sub(r"\x1b\[\d+m", "", painted)
    assert max(map(len, text.splitlines())) <= 80, text
    assert "PROBLEM: yard: lost" in text
    assert text.splitlines()[1] == "cluster at db:5432/x, answers in 2 ms"


def test_texts_of_others_do_not_reach_the_terminal_as_they_are() -> None:
    evil = structs.replace(ATTIC, name="a\x1b[2Jb")
    text = cluster_view.fleet_text(fleet(evil))
    assert "\x1b" not in text


def test_many_names_are_cut() -> None:
    nodes = [structs.replace(SHED, identity=str(n), name=f"n{n}") for n in range(8)]
    assert fleet(*nodes).pools[1].reason == "on n0, n1, n2, n3, n4 and 3 more"


def queued(name: str = "parser.extract", target: str = "") -> TaskStatus:
    return TaskStatus(id="1", name=name, state="queued", target=target)


def test_a_task_says_what_it_waits_for() -> None:
    def waits(task: TaskStatus, *nodes: NodeView, sites: tuple[SiteView, ...] = ()) -> str:
        return cluster_view.waits_for(task, nodes, sites)

    assert waits(queued(), ATTIC) == ""
    assert waits(queued(), LOST) == "a node: no live node has the pool parser"
    assert waits(queued("parser.new"), ATTIC) == "a node: no live node's code has parser.new"
    assert "drained" in waits(queued(), structs.replace(ATTIC, draining=True))
    shut = (SiteView("s", "open", 42 * SECOND_NS),)
    assert waits(queued(target="s"), ATTIC, sites=shut) == (
        "the breaker of s, which is open for 42s"
    )
    assert waits(queued(target="other"), ATTIC, sites=shut) == ""


def test_a_drained_node_says_what_still_runs() -> None:
    def told(node: NodeView, *, undo: bool = False, **changes: int) -> str:
        node = structs.replace(node, draining=not undo, **changes)
        return cluster_view.drained(cluster_view.node_status(node), undo=undo)

    assert "nothing runs there: it can be stopped" in told(ATTIC, claims=0)
    assert "1 task still runs there" in told(ATTIC, claims=1)
    assert "7 tasks still run there" in told(ATTIC, claims=7)
    assert told(ATTIC, undo=True) == "attic: alive; it claims tasks again"
    assert told(SILENT) == "yard: silent, not alive: it claims nothing when it joins again"
    assert told(LOST, undo=True) == "yard: lost, not alive: it claims tasks when it joins again"


def test_a_migration_says_what_it_did_and_what_to_type() -> None:
    first = migrated(
        MigrationResult(
            schema="musterd",
            before=0,
            version=1,
            roles=["musterd_submit", "musterd_node", "musterd_admin"],
            grants=['GRANT "musterd_node" TO "daemon";'],
        ),
        "db:5432/x",
    )
    assert "cluster 'musterd' at db:5432/x: created, version 1" in first
    assert "roles made: musterd_submit, musterd_node, musterd_admin" in first
    assert '    GRANT "musterd_node" TO "daemon";' in first
    again = migrated(MigrationResult(schema="musterd", before=1, version=1), "db")
    assert again == "cluster 'musterd' at db: version 1, nothing to do"
    later = migrated(MigrationResult(schema="musterd", before=1, version=2), "db")
    assert "version 1 became 2" in later


def test_the_document_shows_what_is_printed() -> None:
    printed = DOCUMENT.read_text().partition("$ musterctl cluster nodes\n")[2].partition("```")[0]
    assert cluster_view.node_table(document_answers.NODES) + "\n" == printed
