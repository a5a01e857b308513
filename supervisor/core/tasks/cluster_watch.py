"""Cluster watch: what this node knows about the cluster, and what people are told of it.

    membership   of this node: since when, until when, whether the database answers
    logins       that fail, over all nodes: whose tasks fail, too, for a while
    figures      what the cluster sidecars of this daemon have done, all of them together
    seen         the whole cluster, as the engine told it last: nodes, queues, the database itself

From that follow one report when something begins and one when it is over, the alerts among them:

    cluster.unreachable      the database has not answered for UNREACHABLE_NS
    cluster.node_lost        this node has given up another one: only the node that did so tells
    session.held             logins of a session fail: the node where the last one failed tells
    cluster.vacuum_stalled   an old snapshot keeps the database from removing dead rows, of which
                             there are more and more: the node that joined first tells

and what a clustered pool has to do (`Pool.backlog`): its part of what is ready for all nodes.
"""

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.node_messages import (
    NODES_MAX,
    Figures,
    LoginsTold,
    NodeSeen,
    Notice,
    Seen,
    SessionLogins,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.held import held_why
from musterd.supervisor.core.model.scaler import Backlog
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.claims import Claims

UNREACHABLE_NS = 5 * SECOND_NS  # as the gateway, which refuses submits from then on
# A snapshot that is this old, while more rows than these are dead and they get more: some program
# has left a transaction open. A claim gets slower with each dead row that it has to pass.
STALLED_NS = 300 * SECOND_NS
STALLED_TUPLES = 100_000


class ClusterWatch:
    def __init__(self, state: State, claims: Claims) -> None:
        self._state = state
        self._claims = claims
        self.tenure = 0
        self.until_ns = 0  # the end of the lease
        self.draining = False
        self.away_since_ns: int | None = None
        self.unreachable_since_ns: int | None = None
        self.reason = ""  # why the database does not answer
        self.seen: Seen | None = None
        self._mentioned = False  # that a call failed
        self._refusing = False
        self._before = Figures()  # of the sidecars before
        self._latest = Figures()
        self._lost: dict[str, None] = {}  # nodes that this one has given up
        self.stalled = False
        self.logins: dict[str, SessionLogins] = {}  # of sessions whose logins have failed
        self._held: dict[str, None] = {}  # those of which this node has told people

    @property
    def figures(self) -> Figures:
        """Return what all sidecars of this daemon have done."""
        total = _sum(self._before, self._latest)
        return structs.replace(total, fenced=total.fenced + self._claims.fenced)

    @property
    def unconfirmed(self) -> int:
        """Return how many attempts have ended here without the engine knowing it."""
        return self._claims.unconfirmed

    # -- the sidecar --------------------------------------------------------------------------

    def connected(self, _event: events.ClusterConnected) -> None:
        self._before = _sum(self._before, self._latest)
        self._latest = Figures(policy=self._latest.policy)
        self._refusing = False

    def told(self, event: events.ClusterTold) -> None:
        match event.message:
            case Figures():
                self._latest = event.message
            case Notice():
                self._noticed(event.message)
            case Seen():
                self._saw(event.message)
            case LoginsTold():
                self._hold(event.message.logins)

    def membership(self, event: events.MembershipTold) -> None:
        now_ns = self._state.now_ns
        if event.tenure and event.tenure != self.tenure:
            lease = max(0, event.until_ns - now_ns) / SECOND_NS
            why = f"its lease of {lease:.0f} s is prolonged by each heartbeat"
            self._state.report("cluster.joined", reason=why)
        self.tenure, self.until_ns = event.tenure, event.until_ns
        if event.draining != self.draining:
            self.draining = event.draining
            self._state.report("cluster.draining" if event.draining else "cluster.resumed")
        if not event.away:
            self.away_since_ns = None
            self._settle()
        elif self.away_since_ns is None:
            self.away_since_ns = now_ns
            self._state.timers.at(now_ns + UNREACHABLE_NS, self._still_away, now_ns)

    def _still_away(self, since_ns: int) -> None:
        if self.away_since_ns == since_ns:
            self._unreachable(since_ns)

    def _noticed(self, notice: Notice) -> None:
        """Report what the sidecar has to tell; what it tells twice, once."""
        match notice.event:
            case "cluster.away":
                self.reason = notice.reason
                if self._mentioned:
                    return
                self._mentioned = True
            case "cluster.unreachable":
                self._refusing = True
                self.reason = notice.reason or self.reason
                self._unreachable(self._state.now_ns)
                return
            case "cluster.reachable":
                self._refusing = False
                self._settle()
                return
            case "cluster.node_lost" if len(self._lost) < NODES_MAX:
                self._lost[notice.node] = None
        self._state.report(
            notice.event, notice.level, reason=notice.reason, node=notice.node, count=notice.count
        )

    def _unreachable(self, since_ns: int) -> None:
        if self.unreachable_since_ns is None:
            self.unreachable_since_ns = since_ns
            self._state.report("cluster.unreachable", "error", reason=self.reason)

    def _settle(self) -> None:
        """Report the end of an outage, if it is over."""
        if self.away_since_ns is not None or self._refusing:
            return
        if self.unreachable_since_ns is not None:
            seconds = (self._state.now_ns - self.unreachable_since_ns) / SECOND_NS
            self._state.report("cluster.reachable", seconds=seconds)
        elif self._mentioned:
            self._state.report("cluster.back")
        self.unreachable_since_ns, self._mentioned, self.reason = None, False, ""

    # -- sessions -----------------------------------------------------------------------------

    def holds(self, name: str) -> bool:
        """Whether a session is held, and this node has told people of it."""
        known = self.logins.get(name)
        return name in self._held and known is not None and self._state.now_ns < known.until_ns

    def _hold(self, logins: list[SessionLogins]) -> None:
        before, self.logins = self.logins, {each.session: each for each in logins}
        for name in list(self._held):
            known = self.logins.get(name)
            if known is None or known.failures < before[name].failures:
                del self._held[name]
                self._tell(name, "resumed", "info", "a login has worked, or somebody has reset it")
        now_ns = self._state.now_ns
        for each in logins:
            former = before.get(each.session)
            more = former is None or former.failures < each.failures
            if each.mine and more and now_ns < each.until_ns:
                self._held[each.session] = None
                left_ns = each.until_ns - now_ns
                told = (each.session, left_ns, each.failures, each.problem)
                self._tell(each.session, "held", "error", held_why(*told, cluster=True))

    def _tell(self, session: str, what: str, level: str, reason: str) -> None:
        self._state.out.append(Report(f"session.{what}", level, session=session, reason=reason))

    # -- the whole cluster --------------------------------------------------------------------

    def _saw(self, seen: Seen) -> None:
        before, self.seen = self.seen, seen
        self._look_for_nodes(seen)
        self._look_at_vacuum(seen, before)
        self._share(seen)

    def _look_for_nodes(self, seen: Seen) -> None:
        known = {node.name: node for node in seen.nodes}
        for name in list(self._lost):
            node = known.get(name)
            if node is not None and not node.alive:
                continue
            del self._lost[name]
            why = "it is a member again" if node is not None else "it was forgotten"
            self._state.report("cluster.node_back", reason=f"node '{name}': {why}", node=name)

    def _look_at_vacuum(self, seen: Seen, before: Seen | None) -> None:
        old = seen.oldest_snapshot_ns >= STALLED_NS
        if self.stalled:
            if not old:
                self.stalled = False
                self._state.report("cluster.vacuum_resumed")
            return
        grows = before is not None and seen.dead_tuples > before.dead_tuples
        eldest = min((node.tenure for node in seen.nodes if node.alive), default=0)
        if old and grows and seen.dead_tuples >= STALLED_TUPLES and self.tenure == eldest:
            self.stalled = True
            minutes = seen.oldest_snapshot_ns / (60 * SECOND_NS)
            why = f"a snapshot has been held for {minutes:.0f} min: {seen.dead_tuples} dead rows"
            self._state.report("cluster.vacuum_stalled", "error", reason=why)

    def _share(self, seen: Seen) -> None:
        """Note for each clustered pool what is ready for it, as its part of all nodes."""
        for name, pool in self._state.pools.items():
            if not pool.policy.clustered:
                pool.backlog = None
                continue
            queues = [each for each in seen.counts if each.pool == name and each.ready]
            nodes = sum(_works(node, name) for node in seen.nodes)
            ready = sum(each.ready for each in queues)
            pool.backlog = Backlog(
                seen.at_ns,
                -(-ready // max(1, nodes)),
                max((each.waited_ns for each in queues), default=0),
                min((each.level for each in queues), default=0),
                self._claims.cost_ns(name),
            )


def _works(node: NodeSeen, pool: str) -> bool:
    return node.alive and not node.draining and pool in node.pools


def _sum(one: Figures, other: Figures) -> Figures:
    """Add two figures; what is no count is that of the second."""
    counts = {
        name: getattr(one, name) + getattr(other, name)
        for name in Figures.__struct_fields__
        if name not in ("claim_buckets", "refusing", "policy")
    }
    return structs.replace(other, **counts, claim_buckets=_added(one, other))


def _added(one: Figures, other: Figures) -> list[int]:
    shorter, longer = sorted((one.claim_buckets, other.claim_buckets), key=len)
    rest = longer[len(shorter) :]
    return [a + b for a, b in zip(shorter, longer, strict=False)] + rest
