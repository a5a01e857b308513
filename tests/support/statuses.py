"""Statuses of a fleet, as control.sock gives them."""

from typing import Any

from musterd.supervisor.api.status import FleetStatus, PoolStatus, WorkerStatus


def pool(*states: str, size: int = 0, **fields: Any) -> PoolStatus:
    workers = [
        WorkerStatus(name=f"jobs/{index}", state=state, pid=10 + index)
        for index, state in enumerate(states)
    ]
    up = sum(state in ("RUNNING", "BUSY") for state in states)
    given = {"name": "jobs", "state": "RUNNING", "size": size or len(states), "running": up}
    return PoolStatus(**{**given, "workers": workers, **fields})


def fleet(*pools: PoolStatus, **fields: Any) -> FleetStatus:
    given = {"version": "1", "pid": 7, "uptime_seconds": 5.0, "state": "running"}
    return FleetStatus(**{**given, "pools": list(pools), **fields})
