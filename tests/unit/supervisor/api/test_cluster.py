"""The one line about the cluster: what this node is in it, and what that means."""

from typing import Any

import pytest

from musterd.supervisor.api.cluster import ClusterNode, ClusterQueue, ClusterStatus, headline
from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.api.verdict import BAD, OK, WARNING, verdict


def status(state: str = "member", **fields: Any) -> ClusterStatus:
    return ClusterStatus(**{"node": "shed", "state": state, "lease_seconds": 21.4, **fields})


def seen(*states: str, seen_at: float = 3.0, **fields: Any) -> ClusterStatus:
    nodes = [ClusterNode(name=f"n{n}", state=state) for n, state in enumerate(states)]
    queue = [
        ClusterQueue(pool="p", priority="high", state="queued", tasks=4),
        ClusterQueue(pool="p", priority="low", state="queued", tasks=3),
        ClusterQueue(pool="p", priority="low", state="running", tasks=9),
    ]
    return status(seen_seconds=seen_at, nodes=nodes, queue=queue, **fields)


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        (status(), "node shed: member, lease 21 s"),
        (
            seen("alive", "draining", "silent", "gone"),
            "node shed: member, lease 21 s, 2 nodes alive, silent: n2, 7 queued",
        ),
        (
            seen("alive", seen_at=95.2),
            "node shed: member, lease 21 s, 1 node alive 95 s ago, 7 queued",
        ),
        (status("joining"), "node shed: joining: clients wait"),
        (
            status("away", away_seconds=3.2, attempts=2, reason="connection refused"),
            "node shed: the database has not answered for 3 s: lease 21 s, 2 tasks run on "
            "(connection refused)",
        ),
        (
            status("away", away_seconds=9, unreachable=True, unconfirmed=5),
            "node shed: the database has not answered for 9 s: lease 21 s, 0 tasks run on, "
            "5 results are kept, submits are refused",
        ),
        (
            status("lease over", away_seconds=90, attempts=1),
            "node shed: the database has not answered for 90 s, its lease is over: nothing begins "
            "here, 1 tasks run on and may run elsewhere too, submits are refused",
        ),
        (
            status("down", reason="it was killed"),
            "node shed: the cluster sidecar is down: clients wait, 0 tasks run on (it was killed)",
        ),
        (
            status("down", refusing=True, reason="too new"),
            "node shed: the cluster sidecar is down: submits are refused, 0 tasks run on (too new)",
        ),
    ],
)
def test_the_line_says_what_this_node_is_and_what_that_means(
    cluster: ClusterStatus, line: str
) -> None:
    assert headline(cluster) == line


@pytest.mark.parametrize(
    ("cluster", "level"),
    [
        (status(), OK),
        (status("away"), WARNING),
        (status("draining", draining=True), WARNING),
        (status("away", unreachable=True), BAD),
        (status("lease over"), BAD),
        (status("down"), BAD),
        (seen("alive", "gone"), OK),
        (seen("alive", "silent"), WARNING),
        (seen("alive", stalled=True, dead_tuples=9), BAD),
    ],
)
def test_what_is_wrong_with_the_cluster_is_wrong_with_the_node(
    cluster: ClusterStatus, level: str
) -> None:
    fleet = FleetStatus(
        version="1", pid=1, uptime_seconds=1, state="running", pools=[], cluster=cluster
    )
    assert verdict(fleet, None, []).level == level
