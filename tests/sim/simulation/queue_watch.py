"""Check every dispatch of a queue: strict priority, bounded aging, fair lanes."""

from __future__ import annotations

from typing import Any

from musterd.ipc.wire.messages import LOW
from musterd.supervisor.core.model.lanes import Lane
from musterd.supervisor.core.model.queue import AGING_TURN, WORTH_NS, PoolQueue
from musterd.supervisor.core.model.task import Task


class QueueWatch:
    """Stands between the core and the `take` of one queue."""

    def __init__(self, queue: PoolQueue) -> None:
        self._queue = queue
        self._take = queue.take
        self._count = 0  # dispatches so far
        self._last_aged = -AGING_TURN
        # Per level, by lane: [the lane itself, its last dispatch, waiting since which dispatch]
        self._lanes: list[dict[str, list[Any]]] = [{} for _ in range(LOW + 1)]
        self._parked = queue.parked
        queue.take = self.take  # type: ignore[method-assign]
        queue.parked = self.parked  # type: ignore[method-assign]

    def parked(self, lane: Lane) -> None:
        """Forget a lane that leaves the ring: it comes back as the last."""
        self._lanes[lane.level.number].pop(lane.key, None)
        self._parked(lane)

    def take(
        self,
        now_ns: int,
        share: int,
        budget_ns: int,
        idle: bool,
        alone: bool = True,
        *,
        count_max: int = 0,
    ) -> list[Task]:
        waiting = [self._lanes_now(level) for level in range(LOW + 1)]
        levels = self._queue.levels
        lanes = [lane for level in levels for lane in level.lanes.values()]
        keys = {t.spec.id: lane.key for lane in lanes for t in lane.tasks if t.lane is lane}
        gated = self._queue.waiting > 0
        taken = self._take(now_ns, share, budget_ns, idle, alone, count_max=count_max)
        self._check_share(taken, share, max(share, count_max))
        # Tasks that left the ring for a waiting room meanwhile had no claim to a turn.
        sizes = [level.size for level in self._queue.levels]
        gated = gated or self._queue.waiting > 0  # if so, lanes come and go between two turns
        for task in taken:
            sizes[task.priority] += 1
        for task in taken:
            self._count += 1
            level = task.priority
            top = next(each for each, size in enumerate(sizes) if size)
            if level != top:
                self._check_aged(task, top, now_ns)
            if gated:
                self._lanes = [{} for _ in range(LOW + 1)]
            else:
                self._check_fair(level, keys[task.spec.id], waiting[level])
            sizes[level] -= 1
        return taken

    def _check_share(self, taken: list[Task], share: int, count_max: int) -> None:
        """Check that a worker exceeds its share only by tasks too small to wake another one for."""
        assert len(taken) <= count_max, (len(taken), count_max)
        worth_ns = sum(task.route.cost_ns for task in taken)
        assert len(taken) <= share or worth_ns <= WORTH_NS, (len(taken), share, worth_ns)

    def _check_aged(self, task: Task, top: int, now_ns: int) -> None:
        waited_ns = now_ns - task.queued_ns
        assert waited_ns >= self._queue.aging_ns, (
            f"{task.spec.id} of level {task.priority} went before level {top} "
            f"after only {waited_ns} ns"
        )
        turns = self._count - self._last_aged
        assert turns >= AGING_TURN, f"two aged tasks within {turns} dispatches"
        self._last_aged = self._count

    def _lanes_now(self, level: int) -> dict[str, int]:
        """Count the tasks that each lane offers; note new lanes."""
        known = self._lanes[level]
        lanes = self._queue.levels[level].lanes
        counts = {}
        for key, lane in lanes.items():
            alive = sum(task.lane is lane for task in lane.tasks) + lane.behind
            if alive and lane.room is None:
                counts[key] = alive
                entry = known.get(key)
                if entry is None or entry[0] is not lane:
                    known[key] = [lane, -1, self._count]
        for key in list(known):
            if key not in counts:
                del known[key]
        return counts

    def _check_fair(self, level: int, key: str, counts: dict[str, int]) -> None:
        """Check that no lane is served twice while another lane of the level waits."""
        lanes = self._lanes[level]
        mine = lanes[key]
        for other, entry in lanes.items():
            if other != key and counts.get(other) and entry[0].room is None:
                assert entry[2] >= mine[1], (
                    f"lane {key} of level {level} was served twice while {other} waited"
                )
        mine[1] = mine[2] = self._count
        counts[key] -= 1
        if not counts[key]:
            mine[1] = -1  # it leaves the ring, and comes back as the last
