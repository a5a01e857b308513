"""Lanes: the queued tasks of one site at one level, and the ring in which lanes take turns.

queue.py says what each step is for. No step searches.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct, field

from musterd.supervisor.core.model.task import Task

if TYPE_CHECKING:
    from musterd.supervisor.core.model.gates import Gate, WaitingLanes
    from musterd.supervisor.core.model.queue import PoolQueue

LOGIN_LANE = "\0login"  # at the end of the key of a lane whose tasks log in


class Lane(Struct, eq=False):
    """The queued tasks of one target at one level."""

    key: str
    level: Level
    gate: Gate | None
    tasks: deque[Task] = field(default_factory=deque)
    alive: int = 0  # tasks that are not dead, on disk included
    disk_ids: deque[str] | None = None  # ids of the tasks after `tasks` (core/disk_queue)
    behind: int = 0  # live tasks in `disk_ids` or on their way from there
    kept: int = 0  # those of `behind` that are in memory: only their place is on disk
    reading: bool = False  # whether some are on their way from disk
    waits_among: WaitingLanes | None = None  # None: the lane is in the ring
    woken_from: WaitingLanes | None = None  # for a place in a bulkhead that it may not need
    logs_in: bool = False  # its tasks log in to their session

    @property
    def since_ns(self) -> int:
        """Return when the first task was queued; 0 where that is not in memory."""
        return next((task.queued_ns for task in self.tasks if task.lane is self), 0)


class Place(Struct, gc=False, eq=False):
    """The lane of tasks that are only on disk, and the client that waits for them; b"" for none.

    One object serves all tasks of a lane that come from one client, or from one submit.
    """

    lane: Lane
    peer: bytes
    written: bool = True  # false: still being written (core/disk_queue/unwritten.py)


class Level:
    """The lanes of one priority: in the ring, or waiting at their gates."""

    __slots__ = ("dead", "lanes", "number", "queue", "ring", "size", "waiting")

    def __init__(self, queue: PoolQueue, number: int) -> None:
        self.queue = queue
        self.number = number
        self.lanes: dict[str, Lane] = {}
        self.ring: deque[Lane] = deque()
        self.size = 0  # tasks in the ring
        self.waiting = 0  # tasks at gates
        self.dead = 0  # entries of tasks that were discarded, and not dropped yet

    def open_lane(self, key: str, gate: Gate | None) -> Lane:
        lane = self.lanes[key] = Lane(key, self, gate, logs_in=key.endswith(LOGIN_LANE))
        self.ring.append(lane)
        if gate is not None:
            gate.enlist(lane)
        return lane

    def count(self, lane: Lane, change: int) -> None:
        """Count tasks that came into a lane or left it."""
        lane.alive += change
        if lane.waits_among is None:
            self.size += change
            self.queue.size += change
        else:
            self.waiting += change
            self.queue.waiting += change

    def park(self, lane: Lane, waiting: WaitingLanes) -> None:
        """Move a lane from the head of the ring to the lanes that wait for one thing."""
        assert self.ring[0] is lane
        self.ring.popleft()
        alive = lane.alive
        self.count(lane, -alive)
        waiting.add(lane)
        self.count(lane, alive)
        if lane.woken_from is waiting:
            lane.woken_from = None  # another lane took the place
        self.pass_on(lane)

    def list_again(self, lane: Lane) -> None:
        """Put a lane that waits no more at the end of the ring."""
        self.waiting -= lane.alive
        self.queue.waiting -= lane.alive
        self.size += lane.alive
        self.queue.size += lane.alive
        self.queue.wakes += 1
        self.ring.append(lane)

    def forget(self, lane: Lane) -> None:
        """Forget an empty lane that is out of the ring."""
        del self.lanes[lane.key]
        if lane.gate is not None:
            lane.gate.dismiss(lane)
        self.pass_on(lane)

    def emptied(self, lane: Lane) -> None:
        """Take care of a lane whose last task was discarded: it must not hold a place."""
        if lane.waits_among is None:
            self.pass_on(lane)  # its entries are dropped when it comes to the head
            return
        lane.waits_among.remove(lane)
        self.dead -= len(lane.tasks)
        lane.tasks.clear()
        self.clear_disk(lane)
        self.forget(lane)

    def clear_disk(self, lane: Lane) -> None:
        if lane.disk_ids and self.queue.disk_queue is not None:
            self.queue.disk_queue.clear(lane)

    def pass_on(self, lane: Lane) -> None:
        """Wake another lane for the place that this one does not need, or cannot use."""
        waiting, lane.woken_from = lane.woken_from, None
        if waiting is not None:
            waiting.wake_next(self.queue)

    def sweep(self) -> None:
        """Drop dead entries, and lanes that had nothing else."""
        disk_queue = self.queue.disk_queue
        for lane in list(self.lanes.values()):
            left = deque([task for task in lane.tasks if task.lane is lane])
            self.dead -= len(lane.tasks) - len(left)
            lane.tasks = left
            if disk_queue is not None:
                self.dead -= disk_queue.sweep(lane)
            if not lane.alive:
                if lane.waits_among is not None:
                    lane.waits_among.remove(lane)
                else:
                    self.ring.remove(lane)
                self.forget(lane)

    def dissolve(self) -> None:
        """Drop all lanes of a removed pool."""
        for lane in self.lanes.values():
            if lane.waits_among is not None:
                lane.waits_among.remove(lane)
            if lane.gate is not None:
                lane.gate.dismiss(lane)
        self.lanes.clear()
        self.ring.clear()
        self.size = self.waiting = self.dead = 0

    def head(self, now_ns: int) -> Task | None:
        """Return the next task of this level; park the lanes before it that cannot go on."""
        ring = self.ring
        while ring:
            lane = ring[0]
            tasks = lane.tasks
            while tasks and tasks[0].lane is not lane:
                tasks.popleft()
                self.dead -= 1
            if not tasks:
                self._ran_dry(lane)
                continue
            if lane.gate is not None:
                waiting = lane.gate.waiting_at(now_ns, lane)
                if waiting is not None:
                    self.park(lane, waiting)
                    self.queue.parked(lane)
                    continue
            return tasks[0]
        return None

    def _ran_dry(self, lane: Lane) -> None:
        """Drop the lane at the head if it is empty, or park it until its tasks are read."""
        disk_queue = self.queue.disk_queue
        if lane.alive and disk_queue is not None:
            self.park(lane, disk_queue.waiting)
            return
        self.clear_disk(lane)
        self.ring.popleft()
        self.forget(lane)

    def enter(self, gate: Gate, task: Task, now_ns: int) -> None:
        """Let a task of the lane at the head through its gate."""
        self.ring[0].woken_from = None
        gate.enter(task, now_ns)
        site = gate.site
        if site is not None and (task.probe or site.earned) and self.queue.keeper is not None:
            self.queue.keeper.touch(site)  # its breaker, or its budget, has changed just now

    def took(self, count: int) -> None:
        """Count tasks taken from the lane at the head; the next lane has its turn."""
        ring = self.ring
        lane = ring[0]
        self.count(lane, -count)
        if lane.behind:
            assert self.queue.disk_queue is not None
            self.queue.disk_queue.check(lane)
        elif not lane.tasks:
            self.clear_disk(lane)
            ring.popleft()
            self.forget(lane)
            return
        if len(ring) > 1:
            ring.rotate(-1)
