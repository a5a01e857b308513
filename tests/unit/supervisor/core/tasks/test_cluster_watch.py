"""What a node tells about its cluster: outages, lost nodes, a stalled vacuum, and its own part."""

from typing import Any

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import ERROR, PERMANENT, TaskSpec
from musterd.ipc.wire.node_messages import (
    Attempt,
    Figures,
    LoginsTold,
    NodeSeen,
    Notice,
    QueueCount,
    Seen,
    SessionLogins,
)
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import ScalingPolicy
from musterd.supervisor.core.model.queue import UNKNOWN_COST_NS
from musterd.supervisor.core.tasks.cluster_watch import (
    STALLED_NS,
    STALLED_TUPLES,
    UNREACHABLE_NS,
)
from musterd.supervisor.core.workers.demand import BACKLOG_NS
from support.core import Muster, leases_of, of

LEASE_NS = 30 * SECOND_NS


class Node(Muster):
    """A fleet whose pool is clustered."""

    def __init__(self, size: int = 1, **more: Any) -> None:
        super().__init__(size, clustered=True, **more)

    def join(self, tenure: int = 1) -> list[Any]:
        answer = self.start()
        answer += self.tell(events.ClusterConnected())
        return answer + self.beat(tenure)

    def beat(self, tenure: int = 1, **more: Any) -> list[Any]:
        return self.tell(events.MembershipTold(tenure, self.now_ns + LEASE_NS, **more))

    def grant(self, *attempts: Attempt, request: int = 1) -> list[Any]:
        return self.tell(events.AttemptsGranted(request, "p", list(attempts)))


def attempt(id_: str = "t", claim: int = 7, **spec: Any) -> Attempt:
    return Attempt(TaskSpec(id_, "p.x", b"", **spec), claim, 1)


def node(name: str, tenure: int = 1, *, alive: bool = True, **more: Any) -> NodeSeen:
    fields = {"draining": False, "claims": 0, "beat_age_ns": 0, "software": "", "pools": ("p",)}
    return NodeSeen(name, tenure, alive, **{**fields, **more})


def saw(m: Node, *nodes: NodeSeen, counts: Any = (), old_ns: int = 0, dead: int = 0) -> list[Any]:
    return m.tell(events.ClusterTold(Seen(m.now_ns, old_ns, dead, 0, tuple(counts), nodes)))


def notice(m: Node, event: str, **more: Any) -> list[Any]:
    return m.tell(events.ClusterTold(Notice(f"cluster.{event}", **more)))


def told(answer: list[Any]) -> list[str]:
    reports = of(actions.Report, answer)
    return [each.event for each in reports if each.event.startswith("cluster.")]


def away(m: Node) -> list[Any]:
    answer = notice(m, "away", level="warning", reason="connection refused")
    return answer + m.beat(away=True)


# -- outages ------------------------------------------------------------------------------------


def test_a_call_that_fails_once_is_mentioned_and_no_alert() -> None:
    m = Node()
    assert told(m.join()) == ["cluster.joined"]
    assert told(away(m)) == ["cluster.away"]
    assert told(away(m)) == []
    assert told(m.wait(UNREACHABLE_NS - 1)) == []
    assert told(m.beat()) == ["cluster.back"]
    assert told(m.wait(UNREACHABLE_NS)) == []


def test_an_outage_is_one_incident_with_an_end() -> None:
    m = Node()
    m.join()
    away(m)
    [report] = of(actions.Report, m.wait(UNREACHABLE_NS))
    assert (report.event, report.level) == ("cluster.unreachable", "error")
    assert report.reason == "connection refused"
    assert told(notice(m, "unreachable", level="error")) == []  # submits are refused now
    assert told(m.beat()) == []
    m.wait(SECOND_NS)
    [report] = of(actions.Report, notice(m, "reachable"))
    assert report.event == "cluster.reachable"
    assert report.seconds == (UNREACHABLE_NS + SECOND_NS) / SECOND_NS


def test_an_outage_is_over_when_a_new_sidecar_is_a_member() -> None:
    m = Node()
    m.join()
    assert told(notice(m, "unreachable")) == ["cluster.unreachable"]
    m.tell(events.ClusterDisconnected())
    assert told(m.tell(events.ClusterConnected())) == []
    assert told(m.beat()) == ["cluster.reachable"]


def test_a_drained_node_says_so() -> None:
    m = Node()
    m.join()
    assert told(m.beat(draining=True)) == ["cluster.draining"]
    assert told(m.beat(draining=True)) == []
    assert told(m.beat()) == ["cluster.resumed"]


# -- the whole cluster --------------------------------------------------------------------------


def test_the_node_that_gave_another_up_tells_when_it_is_back() -> None:
    m = Node()
    m.join()
    assert told(notice(m, "node_lost", level="warning", node="barn")) == ["cluster.node_lost"]
    assert told(saw(m, node("barn", 0, alive=False), node("attic", alive=False))) == []
    [report] = of(actions.Report, saw(m, node("barn", 7), node("attic")))
    assert (report.event, report.node) == ("cluster.node_back", "barn")
    assert told(saw(m, node("barn", 7))) == []


def test_a_lost_node_that_is_forgotten_is_no_incident_any_more() -> None:
    m = Node()
    m.join()
    notice(m, "node_lost", node="barn")
    assert told(saw(m)) == ["cluster.node_back"]


def test_dead_rows_that_pile_up_behind_an_old_snapshot_are_one_incident() -> None:
    m = Node()
    m.join()
    dead, old = STALLED_TUPLES, {"old_ns": STALLED_NS}
    assert told(saw(m, node("shed"), dead=dead, **old)) == []
    assert told(saw(m, node("shed"), dead=dead + 1)) == []  # the snapshot is gone
    assert told(saw(m, node("shed"), dead=dead + 1, **old)) == []  # they do not get more
    assert told(saw(m, node("shed"), dead=dead + 2, **old)) == ["cluster.vacuum_stalled"]
    assert told(saw(m, node("shed"), dead=dead + 3, **old)) == []
    assert m.fleet.cluster.stalled
    assert told(saw(m, node("shed"), dead=dead + 3)) == ["cluster.vacuum_resumed"]


def test_few_dead_rows_are_no_incident() -> None:
    m = Node()
    m.join()
    for dead in (1, STALLED_TUPLES - 1):
        assert told(saw(m, node("shed"), dead=dead, old_ns=STALLED_NS)) == []


def test_only_the_node_that_joined_first_tells_of_the_database() -> None:
    m = Node()
    m.join(tenure=5)
    others = node("shed", 5), node("barn", 4), node("attic", 2, alive=False)
    for dead in (STALLED_TUPLES, 2 * STALLED_TUPLES):
        assert told(saw(m, *others, dead=dead, old_ns=STALLED_NS)) == []
    alone = node("shed", 5), node("barn", 4, alive=False)
    answer = saw(m, *alone, dead=3 * STALLED_TUPLES, old_ns=STALLED_NS)
    assert told(answer) == ["cluster.vacuum_stalled"]


# -- figures ------------------------------------------------------------------------------------


def test_figures_of_all_sidecars_are_added_up() -> None:
    m = Node()
    m.join()
    m.tell(events.ClusterTold(Figures(claims=2, claim_buckets=[0, 2], claim_ns=9, policy=3)))
    m.tell(events.ClusterDisconnected())
    m.tell(events.ClusterConnected())
    assert m.fleet.cluster.figures.claims == 2
    m.tell(events.ClusterTold(Figures(claims=1, claim_buckets=[0, 0, 1], claim_ns=1, policy=4)))
    figures = m.fleet.cluster.figures
    assert (figures.claims, figures.claim_ns, figures.policy) == (3, 10, 4)
    assert figures.claim_buckets == [0, 2, 1]


def test_results_of_lost_attempts_are_counted_as_fenced() -> None:
    m = Node(2)
    m.join()
    answer = m.grant(attempt("a"), attempt("b"))
    assert len(leases_of(answer)) == 2
    m.beat(tenure=2)  # this node was given up, and is a member again
    m.complete(1, *m.slots[0].leases)
    assert m.fleet.cluster.figures.fenced == 1


# -- tasks --------------------------------------------------------------------------------------


def test_a_task_that_fails_for_good_is_told_with_its_id() -> None:
    m = Node()
    m.join()
    [lease] = leases_of(m.grant(attempt("t-1", target="shop.example")))
    answer = m.fail(1, lease.lease, PERMANENT, type="Permanent", message="no price")
    [report] = of(actions.Report, answer)
    assert (report.event, report.task, report.target) == ("task.dead", "t-1", "shop.example")
    assert report.reason == "Permanent: no price"


def test_a_failure_that_falls_back_is_told_as_such() -> None:
    m = Node(max_retries=0)
    m.join()
    granted = m.grant(attempt("t-1", fallback=b"\x00", fallback_on="failure"))
    [lease] = leases_of(granted)
    answer = m.fail(1, lease.lease, ERROR, type="ValueError", message="no price")
    assert [each.event for each in of(actions.Report, answer)] == ["task.fallback"]


# -- demand -------------------------------------------------------------------------------------


def scaled(low: int, high: int) -> Node:
    return Node(max(1, low), scaling=ScalingPolicy(low, high, SECOND_NS, 10 * SECOND_NS))


def queue(ready: int, *, waited: int = 2, level: int = 1) -> QueueCount:
    return QueueCount("p", level, "queued", ready + 5, ready, waited * SECOND_NS)


def grown(m: Node, seconds: int) -> list[Any]:
    """Let time pass and bring up the workers that are started on the way."""
    answer: list[Any] = []
    for _ in range(2 * seconds):
        news = m.wait(SECOND_NS // 2)
        answer += news
        for spawn in of(actions.SpawnWorker, news):
            answer += m.bring_up(spawn.worker)
        m.beat()
    return answer


def fill(m: Node, *, claim: int) -> None:
    """Have each worker that is free run an attempt."""
    free = [slot for slot in m.slots if not slot.leases and slot.ready_ns]
    m.grant(*[attempt(f"t{claim}-{n}", claim) for n, _ in enumerate(free)], request=0)


def test_a_clustered_pool_grows_by_its_part_of_the_clusters_queue() -> None:
    m = scaled(1, 8)
    m.join()
    fill(m, claim=1)
    saw(m, node("shed"), node("barn"), node("attic", alive=False), counts=[queue(5)])
    backlog = m.fleet.pools["p"].backlog
    assert backlog is not None
    assert (backlog.ready, backlog.waited_ns) == (3, 2 * SECOND_NS)
    assert backlog.cost_ns == UNKNOWN_COST_NS
    answer = grown(m, 2)
    reasons = [r.reason for r in of(actions.Report, answer) if r.event == "pool.scaled"]
    assert reasons == ["from 1 to 2: queue waits 2.0 s"]


def test_a_pool_with_a_free_worker_does_not_grow_for_what_others_wait_for() -> None:
    m = scaled(1, 8)
    m.join()
    saw(m, node("shed"), counts=[queue(500)])
    grown(m, 5)
    assert m.fleet.pools["p"].size == 1


def test_nodes_that_drain_or_lack_the_pool_take_no_part() -> None:
    m = scaled(1, 8)
    m.join()
    others = node("barn", draining=True), node("attic", pools=("q",))
    saw(m, node("shed"), *others, counts=[queue(6), queue(2, level=0, waited=9)])
    backlog = m.fleet.pools["p"].backlog
    assert backlog is not None
    assert (backlog.ready, backlog.level, backlog.waited_ns) == (8, 0, 9 * SECOND_NS)


def test_an_old_backlog_is_no_reason_to_grow() -> None:
    m = scaled(1, 8)
    m.join()
    saw(m, node("shed"), counts=[queue(500)])
    m.now_ns += BACKLOG_NS
    m.beat()
    fill(m, claim=1)
    grown(m, 5)
    assert m.fleet.pools["p"].size == 1


def test_a_pool_without_workers_starts_one_when_something_is_ready() -> None:
    m = Node(0, scaling=ScalingPolicy(0, 4, SECOND_NS, 10 * SECOND_NS))
    m.join()
    answer = saw(m, node("shed"), counts=[queue(1, waited=0)])
    assert of(actions.SpawnWorker, answer)
    assert m.fleet.pools["p"].size == 1


def test_an_idle_clustered_pool_shrinks_again() -> None:
    m = scaled(1, 4)
    m.join()
    fill(m, claim=1)
    saw(m, node("shed"), counts=[queue(100)])
    for claim in range(2, 8):
        grown(m, 2)
        fill(m, claim=claim)
    assert m.fleet.pools["p"].size == 4
    saw(m, node("shed"))
    for slot in m.slots:
        m.complete(slot.worker, *slot.leases)
    answer = grown(m, 30)
    assert of(actions.StopWorker, answer)
    assert m.fleet.pools["p"].size < 4


# -- sessions whose logins fail -------------------------------------------------------------------


def logins(m: Node, *failed: SessionLogins) -> list[str]:
    """Tell what the cluster counts; return what people are told."""
    answer = of(actions.Report, m.tell(events.ClusterTold(LoginsTold(list(failed)))))
    for each in answer:
        assert each.event != "session.held" or each.level == "error"
    return [f"{each.event} {each.session}" for each in answer]


def failed(m: Node, failures: int, left: int = 0, *, mine: bool = True) -> SessionLogins:
    until_ns = m.now_ns + left * SECOND_NS if left else 0
    return SessionLogins("acme", failures, until_ns, "wrong password", mine)


def test_the_node_where_a_login_failed_tells_that_its_session_is_held() -> None:
    m = Node()
    m.join()
    assert logins(m, failed(m, 1)) == []
    m_report = of(actions.Report, m.tell(events.ClusterTold(LoginsTold([failed(m, 2, 60)]))))
    assert [each.event for each in m_report] == ["session.held"]
    assert m_report[0].reason == (
        "session 'acme' is held for 60 s more: 2 logins in a row failed (wrong password); mend the "
        "login, then: musterctl --cluster sessions reset acme"
    )
    assert m.fleet.cluster.holds("acme")
    assert logins(m, failed(m, 2, 30)) == []  # a sidecar that takes over tells it again
    m.wait(61 * SECOND_NS)
    assert not m.fleet.cluster.holds("acme")
    assert logins(m, failed(m, 2)) == []  # the next attempt may try
    assert logins(m, failed(m, 3, 120)) == ["session.held acme"]
    # It was reset, and the next login has failed before anybody looked.
    assert logins(m, failed(m, 1, mine=False)) == ["session.resumed acme"]
    assert logins(m, failed(m, 2, 60)) == ["session.held acme"]
    assert logins(m) == ["session.resumed acme"]
    assert m.fleet.cluster.logins == {}
    assert logins(m) == []


def test_of_a_session_that_is_held_elsewhere_nobody_is_told_here() -> None:
    m = Node()
    m.join()
    assert logins(m, failed(m, 2, 60, mine=False)) == []
    assert not m.fleet.cluster.holds("acme")
    assert m.fleet.cluster.logins["acme"].failures == 2
    assert logins(m) == []
