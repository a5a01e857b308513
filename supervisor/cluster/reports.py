"""What people see of a sidecar and of the cluster, as messages to the supervisor."""

from collections.abc import Collection, Iterable
from typing import Any

from msgspec import Struct, field, structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import node_messages as wire
from musterd.supervisor.cluster import engine
from musterd.supervisor.cluster.calls import Figures as GatewayFigures
from musterd.supervisor.core.model import actions
from musterd.supervisor.core.model.counters import Histogram

REFUSED_GAP_NS = 60 * SECOND_NS  # between two reports of one refusal
REFUSED_MAX = 100  # refusals that are remembered


class Figures(Struct):
    """What metrics show of the claimer."""

    claims: int = 0
    attempts: int = 0
    claim_times: Histogram = field(default_factory=Histogram)
    ends: int = 0
    fenced: int = 0  # results that did not count
    reaped: int = 0
    failed_calls: int = 0


def seen(found: engine.Statistics, at_ns: int) -> wire.Seen:
    """Return a look at the cluster for the supervisor, as much as a message may have."""
    backlogs = {(each.pool, each.level): each for each in found.backlogs}
    counts = []
    for each in found.counts[: wire.COUNTS_MAX]:
        backlog = backlogs.get((each.pool, each.level)) if each.state == "queued" else None
        ready, waited_ns = (backlog.ready, backlog.waited_ns) if backlog is not None else (0, 0)
        counts.append(
            wire.QueueCount(each.pool, each.level, each.state, each.tasks, ready, waited_ns)
        )
    # Those that are here come first.
    nodes = sorted(found.nodes, key=lambda each: not each.tenure)[: wire.NODES_MAX]
    return wire.Seen(
        at_ns,
        found.oldest_snapshot_ns,
        found.dead_tuples,
        found.live_bytes,
        tuple(counts),
        tuple([wire.NodeSeen(*structs.astuple(each)) for each in nodes]),
    )


def node_lost(reaped: engine.Reaped) -> actions.Report:
    reason = (
        f"node '{reaped.name}' was not heard of for its lease: {reaped.claims} claims went back; "
    )
    reason += "look at that machine, and at its way to the database"
    return actions.Report(
        "cluster.node_lost", "warning", reason=reason, node=reaped.name, count=reaped.claims
    )


def results(ends: Iterable[wire.AttemptEnd], but: Collection[str] = ()) -> int:
    """Return how many of these ends somebody has worked for, without those of these tasks."""
    return sum(end.kind in ("succeeded", "failed") and end.id not in but for end in ends)


class Repeats:
    """Refusals that were reported: what the engine refuses, it refuses at each attempt."""

    def __init__(self) -> None:
        self._reported_ns: dict[str, int] = {}  # by reason

    def is_news(self, now_ns: int, report: actions.Report) -> bool:
        """Whether to report this: a refusal not more often than once in REFUSED_GAP_NS."""
        if report.event != "cluster.refused":
            return True
        at_ns = self._reported_ns.get(report.reason)
        if at_ns is not None and now_ns - at_ns < REFUSED_GAP_NS:
            return False
        if len(self._reported_ns) >= REFUSED_MAX:
            self._reported_ns.clear()
        self._reported_ns[report.reason] = now_ns
        return True


def notice(report: actions.Report) -> wire.Notice:
    """Return what the daemon is to log."""
    level: Any = report.level
    reason = " ".join(report.reason.split())[: wire.NOTICE_CHARS_MAX]
    return wire.Notice(report.event, level, reason, report.node, report.count)


def figures(
    claimer: Figures, gateway: GatewayFigures, *, refusing: bool, policy: int
) -> wire.Figures:
    times = claimer.claim_times
    return wire.Figures(
        claimer.claims,
        claimer.attempts,
        times.total_ns,
        list(times.buckets),
        claimer.ends,
        claimer.fenced,
        claimer.reaped,
        claimer.failed_calls + gateway.failed_calls,
        gateway.submitted,
        gateway.refused,
        gateway.told,
        refusing,
        policy,
    )
