"""Snapshots of the fleet for pages: a whole one first, then changes; and points for plots.

A snapshot has sections. `pools` and `workers`, which are many, are compared row by row, the others
as a whole. Times are wall-clock seconds, not ages: an idle worker is not a change.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from musterd.ipc.wire.messages import PRIORITY_NAMES
from musterd.supervisor.api.cluster import ClusterStatus
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import (
    BreakerStatus,
    FleetStatus,
    PoolStatus,
    ScheduleStatus,
    TaskStatus,
    WorkerStatus,
)

BREAKERS_SHOWN_MAX = 200
MESSAGE_CHARS_MAX = 300  # of an error, in a list
# Two readings of one age differ by their delay; closer than this, they are one instant.
SAME_INSTANT_SECONDS = 1.5
HISTORY_SECONDS = 600.0
POINTS_MAX = 700  # one a second, and a few more
# Fields of a point, in the order that the page expects.
FIELDS = ("at", "succeeded", "failed", *PRIORITY_NAMES, "waiting", "busy", "running", "memory")

_encode = msgspec.json.Encoder().encode


class Row(Struct, frozen=True, omit_defaults=True):
    """One worker on the page."""

    state: str
    pid: int = 0
    memory: int = 0
    task: str = ""
    method: str = ""
    up_at: float = 0.0
    task_at: float = 0.0
    restarts: int = 0
    done: int = 0
    reason: str = ""
    halt: str = ""
    leaving: bool = False  # its slot has another worker


class Instants:
    """Start times that stay the same from one snapshot to the next."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float] = {}
        self._next: dict[tuple[str, str], float] = {}

    def of(self, kind: str, name: str, at: float) -> float:
        known = self._known.get((kind, name))
        if known is None or abs(known - at) > SAME_INSTANT_SECONDS:
            known = round(at, 1)
        self._next[(kind, name)] = known
        return known

    def turn(self) -> None:
        """Forget the instants that were not asked for since the last turn."""
        self._known, self._next = self._next, {}


def worker_rows(fleet: FleetStatus, at: float, instants: Instants) -> dict[str, Row]:
    rows = {}
    for pool in fleet.pools:
        for worker in pool.workers:
            rows[worker.name] = _row(worker, at, instants)
        for worker in pool.leaving:
            name = f"{worker.name} (leaving)"
            rows[name] = msgspec.structs.replace(_row(worker, at, instants), leaving=True)
    return rows


def _row(worker: WorkerStatus, at: float, instants: Instants) -> Row:
    up, runs = worker.uptime_seconds, worker.task_seconds
    key = f"{worker.name} {worker.pid}"
    return Row(
        state=worker.state,
        pid=worker.pid,
        memory=worker.memory_bytes,
        task=worker.task_id,
        method=worker.method,
        up_at=instants.of("up", key, at - up) if up else 0.0,
        task_at=instants.of("task", f"{key} {worker.task_id}", at - runs) if runs else 0.0,
        restarts=worker.restarts,
        done=worker.tasks_done,
        reason=worker.reason[:MESSAGE_CHARS_MAX],
        halt=worker.halt,
    )


# Fields that the page shows elsewhere, or that only /metrics shows.
_NOT_OF_POOL = ("name", "workers", "leaving", "metrics", "metrics_dropped", "lost", "failures")
_POOL_FIELDS = [name for name in PoolStatus.__struct_fields__ if name not in _NOT_OF_POOL]


def pool_rows(fleet: FleetStatus) -> dict[str, dict[str, Any]]:
    return {pool.name: {name: getattr(pool, name) for name in _POOL_FIELDS} for pool in fleet.pools}


def breaker_rows(
    breakers: list[BreakerStatus], at: float, instants: Instants
) -> list[dict[str, Any]]:
    """Return rows of breakers: those that are not closed first, then the busiest."""

    def order(each: BreakerStatus) -> tuple[bool, int, str]:
        return (each.state == "closed", -(each.failures + each.running + each.waiting), each.target)

    return [
        {
            "target": each.target,
            "state": each.state,
            "failures": each.failures,
            "reopenings": each.reopenings,
            "running": each.running,
            "waiting": each.waiting,
            "open_until": instants.of("open", each.target, at + each.open_seconds)
            if each.open_seconds
            else 0.0,
        }
        for each in sorted(breakers, key=order)[:BREAKERS_SHOWN_MAX]
    ]


def cluster_section(
    cluster: ClusterStatus | None, at: float, instants: Instants
) -> dict[str, Any] | None:
    """Return the cluster as this node sees it; None where there is none."""
    if cluster is None:
        return None

    def instant(kind: str, seconds: float) -> float:
        return instants.of(kind, cluster.node, at + seconds)

    queue: dict[str, dict[str, int]] = {}
    for each in cluster.queue:
        row = queue.setdefault(each.pool, {})
        column = each.priority if each.state == "queued" else each.state
        row[column] = row.get(column, 0) + each.tasks
    return {
        "node": cluster.node,
        "state": cluster.state,
        "lease_until": instant("lease", cluster.lease_seconds) if cluster.lease_seconds else 0.0,
        "away_at": instant("away", -cluster.away_seconds) if cluster.away_seconds else 0.0,
        "seen_at": instant("seen", -seen) if (seen := cluster.seen_seconds) is not None else 0.0,
        "policy": cluster.policy,
        "attempts": cluster.attempts,
        "unconfirmed": cluster.unconfirmed,
        "oldest_snapshot": round(cluster.oldest_snapshot_seconds),
        "dead_rows": cluster.dead_tuples,
        "bytes": cluster.live_bytes,
        "stalled": cluster.stalled,
        "nodes": [
            {
                "name": each.name,
                "state": each.state,
                "claims": each.claims,
                "heard_at": instants.of(
                    "heard", each.name, at - (cluster.seen_seconds or 0.0) - each.beat_seconds
                ),
                "software": each.software,
                "pools": each.pools,
            }
            for each in cluster.nodes
        ],
        "queue": queue,
    }


def schedule_rows(schedules: list[ScheduleStatus]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(each) for each in schedules]


def memory_section(memory: MemoryStatus) -> dict[str, Any]:
    machine = memory.machine
    return {
        "enabled": memory.enabled,
        "level": memory.level,
        "stage": memory.stage,
        "share": round(memory.share, 3),
        "source": memory.source,
        "warning": memory.warning,
        "critical": memory.critical,
        "sources": memory.sources,
        "stalled": round(memory.stalled_some, 3),
        "held": sum(pool.held for pool in memory.pools),
        "cpu": round(machine.cpu_share, 3),
        "cpus": machine.cpus,
        "load": round(machine.load, 2),
        "swap_used": machine.swap_used_bytes,
        "swap_total": machine.swap_total_bytes,
        "disk_used": machine.disk_used_bytes,
        "disk_total": machine.disk_total_bytes,
        "supervisor_memory": machine.supervisor_rss_bytes,
        "supervisor_cpu": round(machine.supervisor_cpu_share, 4),
    }


def task_row(task: TaskStatus) -> dict[str, Any]:
    """Return a task as a row of a list: no arguments, result or traceback."""
    row: dict[str, Any] = {
        "id": task.id,
        "name": task.name,
        "state": task.state,
        "priority": task.priority,
        "target": task.target,
        "attempt": task.attempt,
        "submitted_at": round(task.submitted_at or 0.0, 3),
        "finished_at": round(task.finished_at or 0.0, 3),
        "run_seconds": round(task.run_seconds, 4),
    }
    if task.failure is not None:
        row["error"] = f"{task.failure.type or task.failure.kind}: {task.failure.message}"[
            :MESSAGE_CHARS_MAX
        ]
    if task.waits_for:
        row["waits_for"] = task.waits_for
    if task.node:
        row["node"] = task.node
    return {name: value for name, value in row.items() if value not in ("", 0, 0.0)}


# -- changes ----------------------------------------------------------------------------------

ROW_SECTIONS = ("pools", "workers")


class Snapshots:
    """The newest snapshot, and its changes."""

    def __init__(self) -> None:
        self.number = 0
        self._sections: dict[str, bytes] = {}
        self._rows: dict[str, dict[str, bytes]] = {name: {} for name in ROW_SECTIONS}
        self._change = b""

    def put(self, sections: Mapping[str, object], point: list[float] | None) -> None:
        """Update sections; those not given stay unchanged."""
        change: dict[str, object] = {}
        for name, section in sections.items():
            if name in ROW_SECTIONS:
                assert isinstance(section, Mapping)
                news = self._compare(name, section)
                if news:
                    change[name] = news
                continue
            encoded = _encode(section)
            if self._sections.get(name) != encoded:
                self._sections[name] = encoded
                change[name] = Raw(encoded)
        self.number += 1
        if point is not None:
            change["point"] = point
        self._change = _encode({"number": self.number, **change})

    def _compare(self, name: str, section: Mapping[str, object]) -> dict[str, object]:
        before = self._rows[name]
        after = {key: _encode(row) for key, row in section.items()}
        news: dict[str, object] = {
            key: Raw(row) for key, row in after.items() if before.get(key) != row
        }
        news.update((key, None) for key in before if key not in after)
        self._rows[name] = after
        return news

    def change(self) -> bytes:
        """Return the changes since the last snapshot; null is a removed row."""
        return self._change

    def whole(self, points: list[list[float]]) -> bytes:
        rows = {
            name: {key: Raw(row) for key, row in rows.items()} for name, rows in self._rows.items()
        }
        sections = {name: Raw(section) for name, section in self._sections.items()}
        return _encode({"number": self.number, **sections, **rows, "points": points})


# -- the last minutes -------------------------------------------------------------------------


class History:
    """Points of the last minutes: a page that is reloaded shows its plots at once."""

    def __init__(self) -> None:
        self._points: deque[list[float]] = deque(maxlen=POINTS_MAX)
        self._before: tuple[int, float, int, int] | None = None

    def add(self, at: float, fleet: FleetStatus, memory: MemoryStatus | None) -> list[float]:
        succeeded = sum(pool.succeeded for pool in fleet.pools)
        failed = sum(pool.failed + pool.expired for pool in fleet.pools)
        rates = self._rates(fleet.pid, at, succeeded, failed)
        queued = [sum(p.queued.get(name, 0) for p in fleet.pools) for name in PRIORITY_NAMES]
        point = [
            round(at, 1),
            *rates,
            *queued,
            sum(pool.waiting for pool in fleet.pools),
            sum(pool.busy for pool in fleet.pools),
            sum(pool.running for pool in fleet.pools),
            round(memory.share, 3) if memory is not None else -1,
        ]
        self._points.append(point)
        while self._points[0][0] < at - HISTORY_SECONDS:
            self._points.popleft()
        return point

    def _rates(self, pid: int, at: float, succeeded: int, failed: int) -> list[float]:
        """Return tasks a second since the last point; 0 across a restart or a removed pool."""
        before, self._before = self._before, (pid, at, succeeded, failed)
        if before is None or before[0] != pid or at <= before[1]:
            return [0.0, 0.0]
        gone = at - before[1]
        return [
            round(max(0, succeeded - before[2]) / gone, 1),
            round(max(0, failed - before[3]) / gone, 1),
        ]

    def points(self) -> list[list[float]]:
        return list(self._points)
