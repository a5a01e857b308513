"""What the engine tells, as the structs and lines that people know from one machine."""

from collections.abc import Sequence

from musterd.supervisor.api.status import NodeStatus
from musterd.supervisor.cluster.engine import NodeView
from musterd.supervisor.ctl import show
from musterd.supervisor.text.printable import printable

ALIVE, DRAINING, SILENT, LOST, LEFT = "alive", "draining", "silent", "lost", "left"
_NODE_HEADS = ["NODE", "STATE", "RUNNING", "SEEN", "VERSION", "POOLS"]


def node_status(node: NodeView) -> NodeStatus:
    """Return a node as people see it."""
    pools = {pool.name: pool.places for pool in node.pools}
    return NodeStatus(
        name=node.name,
        state=_state(node),
        running=node.claims,
        places=sum(pools.values()),
        seen_seconds=max(0.0, node.beat_age_ns / 1e9),
        version=node.software,
        pools=pools,
        identity=node.identity,
    )


def _state(node: NodeView) -> str:
    if node.alive:
        return DRAINING if node.draining else ALIVE
    if node.tenure:
        return SILENT
    return LOST if node.lost else LEFT


def node_table(nodes: Sequence[NodeStatus], *, colour: bool) -> str:
    """Format nodes, one line each."""
    rows = [
        [
            node.name,
            node.state,
            f"{node.running}/{node.places}",
            f"{show.duration(node.seen_seconds)} ago",
            node.version,
            ", ".join(f"{name} {places}" for name, places in node.pools.items()),
        ]
        for node in nodes
    ]
    return show.table(_NODE_HEADS, rows, 1, colour=colour)


def still_running(node: str, running: int) -> str:
    """Say what a node that is drained still has to do."""
    if not running:
        return printable(f"{node}: draining; nothing runs there: it can be stopped")
    tasks = "1 task still runs" if running == 1 else f"{running} tasks still run"
    return printable(f"{node}: draining; {tasks} there: see musterctl cluster nodes")
