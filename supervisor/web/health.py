"""Health, readiness and status of the fleet: the answers of /healthz, /readyz and /status."""

from typing import Any

from msgspec import Raw, Struct

from musterd.supervisor.api.status import FleetStatus, PoolStatus

UP_STATES = ("starting", "running", "degraded")


class Healthy(Struct, frozen=True):
    status: str  # "ok"
    version: str
    pid: int
    seconds: float  # until the supervisor answered; 0 if its last answer was still fresh


class Unhealthy(Struct, frozen=True):
    status: str  # "unhealthy"
    reason: str


class PoolReadiness(Struct, frozen=True):
    name: str
    ready: bool
    running: int
    minimum: int
    reason: str = ""


class Readiness(Struct, frozen=True):
    status: str  # "ready", "not ready"
    reasons: list[str]
    pools: list[PoolReadiness]


class StatusPage(Struct, frozen=True):
    """Answers of the daemon on control.sock, as `musterctl --json` shows them."""

    at: float
    daemon: dict[str, Any]
    queue: dict[str, int]  # queued tasks by priority, and delayed ones
    pools: list[PoolStatus]  # with their workers
    breakers: Raw
    schedules: Raw
    memory: Raw
    versions: dict[str, str]


def minimum(pool: PoolStatus) -> int:
    """Return how many workers a pool needs to be ready: `min` where it scales, else its size."""
    return min(pool.min, pool.size) if pool.scaling == "auto" else pool.size


def readiness(fleet: FleetStatus) -> Readiness:
    reasons = []
    if fleet.state not in UP_STATES:
        reasons.append(f"the daemon is {fleet.state}")
    if fleet.problem:
        reasons.append(fleet.problem)
    pools = [_pool(pool) for pool in fleet.pools]
    reasons += [pool.reason for pool in pools if not pool.ready]
    return Readiness("not ready" if reasons else "ready", reasons, pools)


def _pool(pool: PoolStatus) -> PoolReadiness:
    least = minimum(pool)
    reason = ""
    if pool.halt == "drained":
        reason = f"{pool.name} is drained: musterctl resume {pool.name}"
    elif pool.running < least or pool.state == "FATAL":
        why = f": {pool.reason}" if pool.reason else ""
        reason = f"{pool.name} is {pool.state}, {pool.running} of {least} workers are up{why}"
    return PoolReadiness(pool.name, not reason, pool.running, least, reason)


def queue(fleet: FleetStatus) -> dict[str, int]:
    waiting: dict[str, int] = {}
    for pool in fleet.pools:
        for name, count in pool.queued.items():
            waiting[name] = waiting.get(name, 0) + count
    waiting["waiting"] = sum(pool.waiting for pool in fleet.pools)
    return waiting
