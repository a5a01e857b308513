"""The cluster as this node sees it: the core's watch in, structs of api/cluster.py out."""

import msgspec

from musterd.ipc.wire.messages import PRIORITY_NAMES
from musterd.ipc.wire.node_messages import NodeSeen
from musterd.supervisor.api.cluster import (
    AWAY,
    DOWN,
    DRAINING,
    FENCED,
    JOINING,
    MEMBER,
    ClusterFigures,
    ClusterNode,
    ClusterQueue,
    ClusterStatus,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.events import CLUSTER

NODES_SHOWN_MAX = 200
QUEUES_SHOWN_MAX = 1000


def cluster_status(fleet: Fleet, now_ns: int) -> ClusterStatus | None:
    """Return None where this machine is no node of a cluster."""
    sidecar, watch = fleet.sidecars[CLUSTER], fleet.cluster
    if not sidecar.build and not sidecar.alive:
        return None
    seen = watch.seen
    away_ns = now_ns - watch.away_since_ns if watch.away_since_ns is not None else 0
    down = sidecar.state in ("backoff", "fatal", "down")
    status = ClusterStatus(
        node=fleet.policy.node,
        state=_state(fleet, now_ns, down=down),
        lease_seconds=max(0, watch.until_ns - now_ns) / 1e9 if watch.tenure else 0.0,
        away_seconds=away_ns / 1e9,
        unreachable=watch.unreachable_since_ns is not None,
        refusing=fleet.refuses_shared,
        reason=sidecar.reason if down else watch.reason,
        draining=watch.draining,
        policy=watch.figures.policy,
        attempts=fleet.attempts,
        unconfirmed=watch.unconfirmed,
        restarts=sidecar.restarts,
        stalled=watch.stalled,
    )
    if seen is None:
        return status
    queue = [
        ClusterQueue(
            pool=each.pool,
            priority=PRIORITY_NAMES[min(each.level, len(PRIORITY_NAMES) - 1)],
            state=each.state,
            tasks=each.tasks,
        )
        for each in seen.counts[:QUEUES_SHOWN_MAX]
    ]
    return msgspec.structs.replace(
        status,
        seen_seconds=max(0, now_ns - seen.at_ns) / 1e9,
        nodes=[_node(each) for each in seen.nodes[:NODES_SHOWN_MAX]],
        queue=queue,
        oldest_snapshot_seconds=seen.oldest_snapshot_ns / 1e9,
        dead_tuples=seen.dead_tuples,
        live_bytes=seen.live_bytes,
    )


def cluster_figures(fleet: Fleet, now_ns: int) -> ClusterFigures | None:
    status = cluster_status(fleet, now_ns)
    if status is None:
        return None
    figures = fleet.cluster.figures
    return ClusterFigures(
        status=status,
        claims=figures.claims,
        attempts=figures.attempts,
        claim_buckets=figures.claim_buckets,
        claim_ns=figures.claim_ns,
        ends=figures.ends,
        fenced=figures.fenced,
        reaped=figures.reaped,
        failed_calls=figures.failed_calls,
        submitted=figures.submitted,
        refused=figures.refused,
        told=figures.told,
    )


def _state(fleet: Fleet, now_ns: int, *, down: bool) -> str:
    watch = fleet.cluster
    if down:
        return DOWN
    if watch.away_since_ns is not None or watch.unreachable_since_ns is not None:
        leased = watch.tenure and now_ns < watch.until_ns
        return AWAY if leased or not watch.tenure else FENCED
    if not watch.tenure or now_ns >= watch.until_ns:
        return JOINING
    return DRAINING if watch.draining else MEMBER


def _node(node: NodeSeen) -> ClusterNode:
    state = "gone" if not node.tenure else "silent"
    if node.alive:
        state = "draining" if node.draining else "alive"
    return ClusterNode(
        name=node.name,
        state=state,
        claims=node.claims,
        beat_seconds=node.beat_age_ns / 1e9,
        software=node.software,
        pools=list(node.pools),
    )
