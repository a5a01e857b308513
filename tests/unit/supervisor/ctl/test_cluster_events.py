"""Events of a cluster: what differs between two looks at an engine."""

from random import Random
from typing import Any

from musterd.ipc.wire.messages import ERROR, Failure, TaskDeclaration, TaskSpec
from musterd.supervisor.api import rpc
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    End,
    EngineAway,
    NodeCard,
    NodeView,
    PoolCard,
    Want,
)
from musterd.supervisor.cluster.model_engine import ModelEngine
from musterd.supervisor.ctl.cluster_events import ENDS_MAX, Watch, fits

SECOND_NS = 1_000_000_000
POOL = PoolCard("p", 10, (TaskDeclaration("extract"),))


class Cluster:
    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self.engine = ModelEngine(lambda: self.now_ns, Random(1), wall_ns=1_700_000_000 * SECOND_NS)
        self.watch = Watch(lambda: 5.0)
        self.away = False

    def join(self, name: str) -> int:
        return self.engine.join(NodeCard(name, name, 30 * SECOND_NS, "0.1", (POOL,))).tenure

    def fail(self, tenure: int, *ids: str) -> None:
        self.engine.submit([TaskSpec(id_, "p.extract", b"\x80", target="s") for id_ in ids])
        grants = self.engine.claim(tenure, [Want("p", len(ids), ("p.extract",))])
        failure = Failure(ERROR, "ValueError", "no price")
        ends = [End(each.id, each.claim, "failed", failure=failure) for each in grants]
        self.engine.finish(tenure, ends)

    def look(self) -> list[tuple[str, str]]:
        return [_short(event) for event in self.watch.look(self.engine)]


def _short(event: dict[str, Any]) -> tuple[str, str]:
    who = event.get("node") or event.get("task") or event.get("target") or ""
    return str(event["event"]), str(who)


def test_nodes_join_are_drained_fall_silent_are_lost_and_come_back() -> None:
    cluster = Cluster()
    cluster.join("a")
    assert cluster.watch.begin(cluster.engine) == []
    assert cluster.look() == []
    b = cluster.join("b")
    assert cluster.look() == [("cluster.node_joined", "b")]
    cluster.engine.drain("b", draining=True)
    assert cluster.look() == [("cluster.node_draining", "b")]
    cluster.engine.drain("b", draining=False)
    assert cluster.look() == [("cluster.node_resumed", "b")]
    cluster.now_ns += 31 * SECOND_NS
    cluster.engine.beat(b)
    assert cluster.look() == [("cluster.node_silent", "a")]
    cluster.engine.reap()
    assert cluster.look() == [("cluster.node_lost", "a")]
    cluster.join("a")
    assert cluster.look() == [("cluster.node_joined", "a")]
    cluster.engine.leave(b)
    assert cluster.look() == [("cluster.node_left", "b")]
    cluster.engine.forget("b")
    assert cluster.look() == [("cluster.node_forgotten", "b")]


def test_tasks_that_end_without_success_are_told_once() -> None:
    cluster = Cluster()
    a = cluster.join("a")
    cluster.fail(a, "old")
    [event] = cluster.watch.begin(cluster.engine)
    assert event["event"] == "task.failed"
    assert event["reason"] == "ValueError: no price"
    assert (event["task"], event["pool"], event["method"]) == ("old", "p", "extract")
    assert (event["level"], event["target"]) == ("error", "s")
    assert cluster.look() == []
    cluster.fail(a, "one", "two")
    cluster.engine.submit([TaskSpec("gone", "p.extract", b"\x80")])
    cluster.engine.cancel(["gone"])
    assert cluster.look() == [
        ("task.failed", "one"),
        ("task.failed", "two"),
        ("task.cancelled", "gone"),
    ]
    assert cluster.look() == []


def test_a_task_that_fails_again_is_told_again() -> None:
    cluster = Cluster()
    a = cluster.join("a")
    cluster.fail(a, "one")
    cluster.watch.begin(cluster.engine)
    cluster.now_ns += SECOND_NS
    cluster.engine.retry(["one"])
    grants = cluster.engine.claim(a, [Want("p", 1, ("p.extract",))])
    failure = Failure(ERROR, "ValueError", "no price")
    cluster.engine.finish(a, [End("one", grants[0].claim, "failed", failure=failure)])
    assert cluster.look() == [("task.failed", "one")]


def test_more_ends_than_a_look_sees_are_said_to_be_left_out() -> None:
    cluster = Cluster()
    a = cluster.join("a")
    cluster.fail(a, "first")
    cluster.watch.begin(cluster.engine)
    cluster.fail(a, *[f"t{n:04d}" for n in range(ENDS_MAX + 5)])
    told = cluster.look()
    assert told[0] == ("log.left_out", "")
    assert len(told) == ENDS_MAX + 1


def test_breakers_and_applied_policies_are_told() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.watch.begin(cluster.engine)
    cluster.engine.breaker("s", "open")
    assert cluster.look() == [("breaker.forced_open", "s")]
    cluster.engine.breaker("s", "close")
    assert cluster.look() == [("breaker.closed", "s")]
    cluster.engine.apply(ClusterPolicy(), cluster.engine.policy().version)
    assert cluster.look() == [("cluster.applied", "")]


def test_a_database_that_is_away_is_told_once_and_when_it_is_back() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.watch.begin(cluster.engine)

    class Away(ModelEngine):
        def nodes(self) -> list[NodeView]:
            raise EngineAway("PostgreSQL at db does not answer")

    away = Away(lambda: 0, Random(1))
    told = [cluster.watch.look(away) for _ in range(3)]
    assert [[_short(each)[0] for each in events] for events in told] == [
        ["cluster.unreachable"],
        [],
        [],
    ]
    assert "db does not answer" in told[0][0]["reason"]
    cluster.join("b")
    assert cluster.look() == [("cluster.reachable", ""), ("cluster.node_joined", "b")]


def test_events_are_chosen_by_level_kind_and_name() -> None:
    event = {"event": "cluster.node_lost", "level": "error", "node": "attic"}
    assert fits(event, rpc.Events())
    assert fits(event, rpc.Events(level="error", kinds=["cluster.*"], names=["att*"]))
    assert not fits(event, rpc.Events(kinds=["task.*"]))
    assert not fits(event, rpc.Events(names=["shed"]))
    assert not fits({"event": "task.cancelled", "level": "info"}, rpc.Events(level="warning"))
