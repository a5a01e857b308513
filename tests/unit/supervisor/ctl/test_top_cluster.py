"""The screen of `musterctl --cluster top` for one moment of a cluster."""

import io

import pytest
from rich.console import Console

from musterd.supervisor.api.events import Event
from musterd.supervisor.api.status import BreakerStatus, FleetStatus, NodeStatus, PoolStatus
from musterd.supervisor.api.verdict import BAD, Reason, Verdict
from musterd.supervisor.ctl.top_feed import Snapshot
from musterd.supervisor.ctl.top_screen import screen
from musterd.supervisor.ctl.top_view import View, press


def node(number: int, state: str = "alive") -> NodeStatus:
    return NodeStatus(
        name=f"node{number}",
        state=state,
        running=3,
        places=8,
        seen_seconds=0.4,
        version="0.1.0",
        pools={"browser": 3, "parser": 5},
    )


def snapshot(nodes: list[NodeStatus], pools: int = 2, problem: str = "") -> Snapshot:
    fleet = FleetStatus(
        version="0.1.0",
        pid=0,
        uptime_seconds=0,
        state="degraded" if problem else "running",
        pools=[
            PoolStatus(
                name=f"pool{number}",
                state="RUNNING",
                size=8,
                running=8,
                busy=3,
                queued={"high": 1, "normal": 99},
                failed=2,
                reason="on node0",
            )
            for number in range(pools)
        ],
        problem=problem,
        nodes=nodes,
        database="db.example:5432/app",
    )
    reasons = [Reason(BAD, line) for line in problem.split("\n") if line]
    return Snapshot(
        at=1_700_000_000.0,
        fleet=fleet,
        health=Verdict(BAD, "Action needed", reasons) if reasons else Verdict(),
        breakers=[BreakerStatus(target="site.example", state="open", open_seconds=42)],
        events=[Event(at=1_700_000_000.0 - 5, event="cluster.node_lost", node="node1")],
        done_rates={"pool0": 12.5},
    )


def lines(now: Snapshot, width: int = 80, height: int = 24, silent: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or None, no_color=True)
    with console.capture() as captured:
        console.print(screen(now, View(), (width, height), silent))
    return captured.get().splitlines()


@pytest.mark.parametrize("nodes", [0, 1, 5, 200])
@pytest.mark.parametrize("pools", [1, 40])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60), (60, 18)])
def test_it_fits_the_terminal(nodes: int, pools: int, width: int, height: int) -> None:
    if pools > 1 and height < 24:
        pools = 5
    shown = lines(snapshot([node(n) for n in range(nodes)], pools), width, height)
    assert len(shown) == height
    assert max(len(line) for line in shown) <= width
    assert shown[-1].startswith(" q  quit")


def test_nodes_and_pools_have_their_lines() -> None:
    shown = lines(snapshot([node(0), node(1, "draining")]))
    assert shown[0].startswith(" ALL OK   cluster running  PostgreSQL db.example:5432/app")
    assert "pid" not in shown[0]
    (row,) = [line for line in shown if line.startswith("pool0")]
    assert row.split()[:7] == ["pool0", "RUNNING", "8/8", "3", "100", "12.5", "2"]
    (row,) = [line for line in shown if line.startswith("node1")]
    assert row.split() == [
        "node1",
        "draining",
        "3/8",
        "0s",
        "0.1.0",
        "browser",
        "3,",
        "parser",
        "5",
    ]
    assert any("site.example is open for 42s" in line for line in shown)
    assert any("cluster.node_lost node1" in line for line in shown)


def test_what_is_wrong_comes_first() -> None:
    shown = lines(snapshot([node(0), node(1, "lost")], problem="node1: lost\npool9 is stranded"))
    assert shown[0].startswith(" 2 PROBLEMS ")
    assert [line.strip() for line in shown[1:3]] == ["node1: lost", "pool9 is stranded"]
    assert [line.split()[0] for line in shown if line.startswith("node")] == ["node1", "node0"]


def test_nodes_out_of_view_are_counted() -> None:
    assert any(
        "more nodes: musterctl cluster nodes" in line
        for line in lines(snapshot([node(n) for n in range(50)]))
    )


def test_a_database_that_does_not_answer_is_said() -> None:
    shown = lines(snapshot([node(0)]), silent="PostgreSQL at db does not answer")
    assert "PostgreSQL at db does not answer" in shown[1]


def test_keys_of_workers_do_nothing() -> None:
    now = snapshot([node(0)])
    for key in ("j", "k", "r", "s"):
        _view, wanted = press(View(), key, now)
        assert wanted is None
