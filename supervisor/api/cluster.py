"""What a node of a cluster says about the cluster, and the one line that people read of it.

Part of the answers to `status` and `metrics` where this machine is a node; without [cluster] there
is none of it. Figures of the whole cluster are some seconds old (`seen_seconds`).
"""

from msgspec import Struct

# States of this node, the worst last.
MEMBER, DRAINING, JOINING, AWAY, FENCED, DOWN = (
    "member",
    "draining",
    "joining",
    "away",
    "lease over",
    "down",
)

OLD_SECONDS = 30.0  # what was seen longer ago is told with its age
REASON_CHARS_MAX = 200


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node of the cluster, as the database knows it."""

    name: str
    state: str  # "alive", "draining", "silent" (its lease is over), "gone" (it left or was lost)
    claims: int = 0  # tasks that it has
    beat_seconds: float = 0.0  # since it was heard of
    software: str = ""
    pools: list[str] = []


class ClusterQueue(Struct, frozen=True, kw_only=True):
    """Live tasks of one pool at one priority in one state, of all nodes."""

    pool: str
    priority: str
    state: str  # "queued", "running", "waiting"
    tasks: int


class ClusterStatus(Struct, frozen=True, kw_only=True):
    node: str
    state: str
    lease_seconds: float = 0.0  # that are left
    away_seconds: float = 0.0  # since the database has stopped to answer
    unreachable: bool = False  # for long enough that submits are refused
    refusing: bool = False  # submits, because the sidecar is not there
    reason: str = ""  # why the database does not answer, or the sidecar is down
    draining: bool = False
    policy: int = 0  # version of the applied policy
    attempts: int = 0  # tasks of the cluster that are here
    unconfirmed: int = 0  # ended here, and the database does not know it yet
    restarts: int = 0  # of the sidecar
    seen_seconds: float | None = None  # age of what follows
    nodes: list[ClusterNode] = []
    queue: list[ClusterQueue] = []
    oldest_snapshot_seconds: float = 0.0
    dead_tuples: int = 0
    live_bytes: int = 0
    stalled: bool = False  # dead rows pile up behind an old snapshot


class ClusterFigures(Struct, frozen=True, kw_only=True):
    """Counters of the sidecars of this daemon, for /metrics; durations as in api/metrics.py."""

    status: ClusterStatus
    claims: int
    attempts: int
    claim_buckets: list[int]
    claim_ns: int
    ends: int
    fenced: int
    reaped: int
    failed_calls: int
    submitted: int
    refused: int
    told: int


def headline(cluster: ClusterStatus) -> str:
    """Return the one line about the cluster: what this node is in it, and what that means."""
    parts = [f"node {cluster.node}: {_meaning(cluster)}"]
    alive = sum(each.state in ("alive", "draining") for each in cluster.nodes)
    silent = [each.name for each in cluster.nodes if each.state == "silent"]
    if cluster.nodes:
        age = cluster.seen_seconds or 0.0
        ago = f" {age:.0f} s ago" if age > OLD_SECONDS else ""
        parts.append(f"{alive} node{'s' if alive != 1 else ''} alive{ago}")
    if silent:
        shown = ", ".join(silent[:3]) + (" ..." if len(silent) > 3 else "")
        parts.append(f"silent: {shown}")
    if cluster.seen_seconds is not None:
        queued = sum(each.tasks for each in cluster.queue if each.state == "queued")
        parts.append(f"{queued} queued")
    if cluster.stalled:
        parts.append("vacuum is stalled by an old transaction")
    why = f" ({cluster.reason[:REASON_CHARS_MAX]})" if cluster.reason else ""
    return ", ".join(parts) + why


def _meaning(cluster: ClusterStatus) -> str:
    away = f"the database has not answered for {cluster.away_seconds:.0f} s"
    left = f"lease {cluster.lease_seconds:.0f} s"
    kept = f"{cluster.attempts} tasks run on"
    if cluster.unconfirmed:
        kept += f", {cluster.unconfirmed} results are kept"
    match cluster.state:
        case "member":
            return f"member, {left}"
        case "draining":
            return f"member, drained: it gets no more tasks, {kept}"
        case "joining":
            return "joining: clients wait"
        case "away":
            refused = ", submits are refused" if cluster.unreachable else ""
            return f"{away}: {left}, {kept}{refused}"
        case "lease over":
            return (
                f"{away}, its lease is over: nothing begins here, {kept} and may run elsewhere "
                f"too, submits are refused"
            )
    refused = "submits are refused" if cluster.refusing else "clients wait"
    return f"the cluster sidecar is down: {refused}, {kept}"
