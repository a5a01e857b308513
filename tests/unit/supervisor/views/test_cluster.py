"""The cluster as one of its nodes shows it."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskSpec
from musterd.ipc.wire.node_messages import (
    Attempt,
    Figures,
    NodeSeen,
    Notice,
    QueueCount,
    Seen,
)
from musterd.supervisor.api.cluster import ClusterStatus
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.events import CLUSTER
from musterd.supervisor.views.cluster import cluster_figures, cluster_status
from support.core import Muster


class Node(Muster):
    """A node whose sidecar is up."""

    def __init__(self) -> None:
        super().__init__(1, clustered=True)
        self.policy = structs.replace(self.policy, cluster="build", node="shed")
        self.fleet = Fleet(self.policy, Random(1))
        self.start()
        self.tell(events.SidecarReady(1, 77, "", CLUSTER))
        self.tell(events.ClusterConnected())

    def beat(self, tenure: int = 1, **more: Any) -> None:
        self.tell(events.MembershipTold(tenure, self.now_ns + 30 * SECOND_NS, **more))

    @property
    def status(self) -> ClusterStatus:
        status = cluster_status(self.fleet, self.now_ns)
        assert status is not None
        return status


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_machine_that_is_no_node_says_nothing(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    assert cluster_status(m.fleet, m.now_ns) is None
    assert cluster_figures(m.fleet, m.now_ns) is None


def test_the_states_of_a_node_on_its_way(node: Node) -> None:
    assert (node.status.node, node.status.state) == ("shed", "joining")
    node.beat()
    assert (node.status.state, node.status.lease_seconds) == ("member", 30)
    node.beat(draining=True)
    assert (node.status.state, node.status.draining) == ("draining", True)
    node.beat()
    until_ns = node.now_ns + 30 * SECOND_NS
    node.tell(events.ClusterTold(Notice("cluster.away", "warning", "connection refused")))
    node.tell(events.MembershipTold(1, until_ns, away=True))
    assert (node.status.state, node.status.unreachable) == ("away", False)
    node.wait(6 * SECOND_NS)
    status = node.status
    assert (status.state, status.unreachable, status.away_seconds) == ("away", True, 6)
    assert status.reason == "connection refused"
    node.wait(20 * SECOND_NS)
    node.tell(events.SidecarBeat(1, CLUSTER))
    node.wait(5 * SECOND_NS)
    assert (node.status.state, node.status.lease_seconds) == ("lease over", 0)
    node.beat()
    status = node.status
    assert (status.state, status.unreachable, status.away_seconds) == ("member", False, 0)
    node.tell(events.SidecarExited(1, "it was killed", False, CLUSTER))
    assert (node.status.state, node.status.reason) == ("down", "it was killed")
    assert not node.status.refusing


def test_a_node_whose_sidecar_has_given_up_refuses_submits(node: Node) -> None:
    node.tell(events.SidecarExited(1, "too new", True, CLUSTER))
    assert (node.status.state, node.status.refusing) == ("down", True)


def test_a_node_that_never_joined_is_away_and_has_no_lease(node: Node) -> None:
    node.tell(events.MembershipTold(0, 0, away=True))
    assert (node.status.state, node.status.lease_seconds) == ("away", 0)


def test_what_runs_here_and_what_nobody_has_confirmed_is_told(node: Node) -> None:
    node.beat()
    spec = TaskSpec("t", "p.x", b"")
    node.tell(events.AttemptsGranted(1, "p", [Attempt(spec, 7, 1)]))
    assert (node.status.attempts, node.status.unconfirmed) == (1, 0)
    node.complete(1, *node.slots[0].leases)
    assert (node.status.attempts, node.status.unconfirmed) == (0, 1)


def test_the_whole_cluster_is_told_with_its_age(node: Node) -> None:
    node.beat()
    assert node.status.seen_seconds is None
    nodes = [
        NodeSeen("shed", 1, True, False, 2, SECOND_NS, "1.0", ("p",)),
        NodeSeen("barn", 2, True, True, 0, 0, "1.0", ("p",)),
        NodeSeen("attic", 3, False, False, 0, 90 * SECOND_NS, "1.0", ()),
        NodeSeen("cellar", 0, False, False, 0, 90 * SECOND_NS, "1.0", ()),
    ]
    counts = (QueueCount("p", 1, "queued", 9, 9), QueueCount("p", 3, "waiting", 2))
    seen = Seen(node.now_ns, 7 * SECOND_NS, 5, 4096, counts, tuple(nodes))
    node.tell(events.ClusterTold(seen))
    node.wait(3 * SECOND_NS)
    status = node.status
    assert (status.seen_seconds, status.oldest_snapshot_seconds) == (3, 7)
    assert [(each.name, each.state) for each in status.nodes] == [
        ("shed", "alive"),
        ("barn", "draining"),
        ("attic", "silent"),
        ("cellar", "gone"),
    ]
    assert [(each.pool, each.priority, each.state, each.tasks) for each in status.queue] == [
        ("p", "high", "queued", 9),
        ("p", "low", "waiting", 2),
    ]


def test_figures_are_those_of_all_sidecars(node: Node) -> None:
    node.tell(events.ClusterTold(Figures(claims=2, told=5)))
    figures = cluster_figures(node.fleet, node.now_ns)
    assert figures is not None
    assert (figures.claims, figures.told, figures.status.node) == (2, 5, "shed")
