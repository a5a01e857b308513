"""The last minutes in figures, for the plots: a page that is loaded anew shows them at once."""

from collections import deque

from musterd.ipc.wire.messages import PRIORITY_NAMES
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import FleetStatus

HISTORY_SECONDS = 600.0
POINTS_MAX = 700  # one a second, and a little
# What a point is made of; the page knows them by this order.
FIELDS = ("at", "succeeded", "failed", *PRIORITY_NAMES, "waiting", "busy", "running", "memory")


class History:
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
        """Tasks a second since the point before; 0 over a restart or a removed pool."""
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
