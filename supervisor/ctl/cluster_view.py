"""What the engine tells, as the structs and lines that people know from one machine."""

from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from musterd.ipc.wire.messages import PRIORITY_NAMES, QUEUED, RUNNING, WAITING
from musterd.supervisor.api import status as api
from musterd.supervisor.api.status import (
    BreakerStatus,
    FleetStatus,
    NodeStatus,
    PoolStatus,
    TaskStatus,
)
from musterd.supervisor.cluster.engine import Count, NodeView, Recent, SiteView, Statistics
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.show import PLAIN
from musterd.supervisor.ctl.table import Column, Paper, table, told, untold
from musterd.supervisor.text.units import SECOND_NS

SNAPSHOT_NS_MAX = 300 * SECOND_NS  # an older one keeps PostgreSQL from cleaning up
DEAD_TUPLES_MAX = 500_000  # rows of tasks that are gone; many more slow down every claim
NAMES_SHOWN_MAX = 5

ALIVE, DRAINING, SILENT, LOST, LEFT = "alive", "draining", "silent", "lost", "left"
_NODES = (
    Column("NODE", name=True),
    Column("STATE"),
    Column("RUNNING"),
    Column("SEEN"),
    Column("VERSION", rank=1, below=untold),
    Column("POOLS", rank=9),
)
_WORST_FIRST = (LOST, SILENT, DRAINING, ALIVE, LEFT)


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


def node_table(nodes: Sequence[NodeStatus], on: Paper = PLAIN) -> str:
    """Format nodes, those with problems first."""
    rows = [
        [
            node.name,
            node.state,
            f"{node.running}/{node.places}",
            f"{show.duration(node.seen_seconds)} ago",
            node.version,
            ", ".join(f"{name} {places}" for name, places in node.pools.items()),
        ]
        for node in sorted(nodes, key=lambda each: _WORST_FIRST.index(each.state))
    ]
    return table(_NODES, rows, on, colour_of=show.states(1))


def drained(node: NodeStatus, *, undo: bool) -> str:
    """Say what a drain, or its end, means for a node."""
    if node.state not in (ALIVE, DRAINING):
        then = "it claims tasks" if undo else "it claims nothing"
        return f"{node.name}: {node.state}, not alive: {then} when it joins again"
    if undo:
        return f"{node.name}: {node.state}; it claims tasks again"
    if not node.running:
        return f"{node.name}: draining; nothing runs there: it can be stopped"
    tasks = "1 task still runs" if node.running == 1 else f"{node.running} tasks still run"
    return f"{node.name}: draining; {tasks} there: see musterctl cluster nodes"


# -- the whole --------------------------------------------------------------------------------

_TROUBLES = {
    SILENT: "silent, its tasks go back when its lease is over",
    LOST: "lost, restart it or musterctl cluster forget NODE",
}
_POOLS = (
    Column("POOL", name=True),
    Column("STATE"),
    Column("WORKERS"),
    Column("BUSY", rank=2, below=told("{} busy")),
    Column("QUEUED"),
    Column("WAITING", rank=1, below=told("{} waiting")),
    Column("FAILED"),
    Column("NOTE", rank=9),
)


def fleet_status(
    views: Sequence[NodeView],
    counts: Sequence[Count],
    recent: Sequence[Recent],
    statistics: Statistics,
    *,
    version: str,
    place: str,
    answer_seconds: float,
) -> FleetStatus:
    """Return a cluster as if it were one machine: places are workers, claimed tasks are busy."""
    nodes = [node_status(view) for view in views]
    dead = {each.pool: each.dead for each in recent}
    names = (
        {name for node in nodes for name in node.pools} | {each.pool for each in counts} | {*dead}
    )
    tasks: dict[str, dict[str, None]] = {}
    for card in (pool for view in views for pool in view.pools):
        known = (f"{card.name}.{task.method}" for task in card.tasks)
        tasks.setdefault(card.name, {}).update(dict.fromkeys(known))
    pools = [
        structs.replace(
            _pool(name, nodes, [each for each in counts if each.pool == name], dead.get(name, 0)),
            tasks=sorted(tasks.get(name, ())),
        )
        for name in sorted(names)
    ]
    wrong = _problems(nodes, pools, statistics)
    return FleetStatus(
        version=version,
        pid=0,
        uptime_seconds=0.0,
        state="degraded" if wrong else "running",
        pools=pools,
        problem="\n".join(wrong),
        nodes=nodes,
        database=place,
        answer_seconds=answer_seconds,
        at_target=not wrong,
    )


def _pool(name: str, nodes: Sequence[NodeStatus], counts: Sequence[Count], dead: int) -> PoolStatus:
    having = [node for node in nodes if name in node.pools]
    alive = [node for node in having if node.state in (ALIVE, DRAINING)]
    expected = [node for node in having if node.state != LEFT]
    tasks: Counter[str] = Counter()
    queued: Counter[str] = Counter()
    for each in counts:
        tasks[each.state] += each.tasks
        if each.state == QUEUED:
            queued[PRIORITY_NAMES[each.level]] += each.tasks
    state, reason = api.RUNNING, ""
    if not alive:
        waits = sum(tasks.values())
        state = api.STOPPED
        tasks_ = "1 task waits" if waits == 1 else f"{waits} tasks wait"
        reason = f"stranded: {tasks_}, and no live node has it" if waits else "no live node"
    elif all(node.state == DRAINING for node in alive):
        state, reason = api.DRAINING, "all nodes that have it are drained"
    return PoolStatus(
        name=name,
        state=state,
        size=sum(node.pools[name] for node in expected),
        running=sum(node.pools[name] for node in alive),
        busy=tasks[RUNNING],
        queued=dict(queued),
        waiting=tasks[WAITING],
        failed=dead,
        reason=reason or f"on {_some([node.name for node in alive])}",
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _problems(
    nodes: Sequence[NodeStatus], pools: Sequence[PoolStatus], statistics: Statistics
) -> list[str]:
    found = []
    if not any(node.state in (ALIVE, DRAINING) for node in nodes):
        found.append("no node is alive: nothing runs")
    for state, what in _TROUBLES.items():
        names = [node.name for node in nodes if node.state == state]
        if names:
            found.append(f"{_some(names)}: {what}")
    found += [
        f"pool {pool.name} is {pool.reason}" for pool in pools if pool.reason.startswith("stranded")
    ]
    if statistics.oldest_snapshot_ns > SNAPSHOT_NS_MAX:
        age = show.duration(statistics.oldest_snapshot_ns / SECOND_NS)
        found.append(
            f"a transaction has been open in PostgreSQL for {age}, and keeps it from cleaning up: "
            "see pg_stat_activity"
        )
    if statistics.dead_tuples > DEAD_TUPLES_MAX:
        found.append(
            f"PostgreSQL has {statistics.dead_tuples} rows of ended tasks to clean up: is its "
            "autovacuum on?"
        )
    return found


def fleet_text(fleet: FleetStatus, on: Paper = PLAIN) -> str:
    """Format the answer of `musterctl --cluster status`."""
    where = f"cluster at {fleet.database}, answers in {fleet.answer_seconds * 1000:.0f} ms"
    parts = ["\n".join(show.prose(line, on) for line in (summary(fleet), where))]
    if fleet.problem:
        lines = [f"PROBLEM: {line}" for line in fleet.problem.split("\n")]
        parts.append("\n".join(show.prose(line, on, show.RED) for line in lines))
    if fleet.pools:
        pools = sorted(fleet.pools, key=lambda each: each.state == api.RUNNING)
        rows = [pool_row(pool) for pool in pools]
        parts.append(table(_POOLS, rows, on, colour_of=show.states(1)))
    if fleet.nodes:
        parts.append(node_table(fleet.nodes, on))
    return "\n\n".join(parts)


def summary(fleet: FleetStatus) -> str:
    """Say in one line how the cluster does."""
    pools = fleet.pools
    states = Counter(node.state for node in fleet.nodes)
    others = [f"{states[each]} {each}" for each in (DRAINING, SILENT, LOST, LEFT) if states[each]]
    alive = "1 node alive" if states[ALIVE] == 1 else f"{states[ALIVE]} nodes alive"
    nodes = ", ".join([alive, *others])
    figures = [
        (sum(sum(pool.queued.values()) for pool in pools), "queued"),
        (sum(pool.busy for pool in pools), "running"),
        (sum(pool.waiting for pool in pools), "waiting"),
        (sum(pool.failed for pool in pools), "failed"),
    ]
    tasks = ", ".join(f"{number} {state}" for number, state in figures)
    return f"{fleet.state}: {nodes}; {tasks}"


def pool_row(pool: PoolStatus) -> list[str]:
    note = [pool.reason] if pool.reason else []
    ahead = [f"{pool.queued[name]} {name}" for name in PRIORITY_NAMES[:2] if pool.queued.get(name)]
    if ahead:
        note.append("queued: " + ", ".join(ahead))
    figures = [pool.busy, sum(pool.queued.values()), pool.waiting, pool.failed]
    return [
        pool.name,
        pool.state,
        f"{pool.running}/{pool.size}",
        *(str(figure) for figure in figures),
        "; ".join(note),
    ]


# -- sites and tasks --------------------------------------------------------------------------


def breaker_status(site: SiteView) -> BreakerStatus:
    """Return a site as people see it."""
    return BreakerStatus(
        target=site.target,
        state=site.breaker,
        open_seconds=None if site.breaker == "forced-open" else site.open_for_ns / SECOND_NS,
        failures=site.failures,
        reopenings=site.reopenings,
        running=site.inside,
        waiting=site.waiting,
    )


def waits_for(task: TaskStatus, nodes: Sequence[NodeView], sites: Sequence[SiteView]) -> str:
    """Say what a queued task waits for, other than a free place; "" if nothing else is known."""
    pool, _, method = task.name.partition(".")
    having = [
        (node, [each.method for each in card.tasks])
        for node in nodes
        if node.alive
        for card in node.pools
        if card.name == pool
    ]
    if not having:
        return f"a node: no live node has the pool {pool}"
    knowing = [node for node, methods in having if method in methods]
    if not knowing:
        return f"a node: no live node's code has {task.name}"
    if all(node.draining for node in knowing):
        return f"a node: {_some([node.name for node in knowing])} are drained"
    for site in sites:
        if site.target == task.target and site.breaker in ("open", "forced-open"):
            left = f" for {show.duration(site.open_for_ns / SECOND_NS)}" if site.open_for_ns else ""
            return f"the breaker of {site.target}, which is {site.breaker}{left}"
    return ""
