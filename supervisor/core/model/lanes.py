"""Lanes: the queued tasks of one site at one level, and the ring in which they take turns.

What each step is for stands in queue.py; here is how it is done, without ever searching.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from musterd.supervisor.core.model.task import Task

if TYPE_CHECKING:
    from musterd.supervisor.core.model.gates import Gate, WaitingRoom
    from musterd.supervisor.core.model.queue import PoolQueue


class Lane:
    """The queued tasks of one target at one level."""

    __slots__ = (
        "alive",
        "behind",
        "disk_queue",
        "gate",
        "kept",
        "key",
        "level",
        "reading",
        "room",
        "tasks",
        "woken_from",
    )

    def __init__(self, key: str, level: Level, gate: Gate | None) -> None:
        self.key = key
        self.level = level
        self.gate = gate
        self.tasks: deque[Task] = deque()
        self.alive = 0  # tasks in it that are not dead
        self.disk_queue: deque[str] | None = None  # ids of what comes after `tasks`
        self.behind = 0  # tasks that are there, or on their way from there, and not dead
        self.kept = 0  # those of them that are in memory, and have only their place there
        self.reading = False  # whether some are on their way
        self.room: WaitingRoom | None = None  # where it waits, None: it is in the ring
        self.woken_from: WaitingRoom | None = None  # it was let in for a place it may not need


class Place(Struct, gc=False, eq=False):
    """Where a task is that is only on disk, and who submitted it and waits; b"" for nobody.

    One object for all of a lane that come from the same client, or from the same submit of it.
    """

    lane: Lane
    peer: bytes
    written: bool = True  # else it is on its way there (core/disk_queue/unwritten.py)


class Level:
    """The lanes of one priority: in the ring those whose turn comes, the others at their gates."""

    __slots__ = ("dead", "lanes", "number", "queue", "ring", "size", "waiting")

    def __init__(self, queue: PoolQueue, number: int) -> None:
        self.queue = queue
        self.number = number
        self.lanes: dict[str, Lane] = {}
        self.ring: deque[Lane] = deque()
        self.size = 0  # tasks in the ring
        self.waiting = 0  # tasks at gates
        self.dead = 0  # entries that were discarded and not yet dropped

    def open_lane(self, key: str, gate: Gate | None) -> Lane:
        lane = self.lanes[key] = Lane(key, self, gate)
        self.ring.append(lane)
        if gate is not None and gate.site is not None:
            gate.site.lanes[lane] = None
        return lane

    def count(self, lane: Lane, change: int) -> None:
        """Tasks came into a lane or left it."""
        lane.alive += change
        if lane.room is None:
            self.size += change
            self.queue.size += change
        else:
            self.waiting += change
            self.queue.waiting += change

    def park(self, lane: Lane, room: WaitingRoom) -> None:
        """From the head of the ring to a waiting room."""
        assert self.ring[0] is lane
        self.ring.popleft()
        alive = lane.alive
        self.count(lane, -alive)
        room.add(lane)
        self.count(lane, alive)
        if lane.woken_from is room:
            lane.woken_from = None  # somebody else was faster
        self.pass_on(lane)

    def list_again(self, lane: Lane) -> None:
        """From a waiting room, which has let it go, to the end of the ring."""
        self.waiting -= lane.alive
        self.queue.waiting -= lane.alive
        self.size += lane.alive
        self.queue.size += lane.alive
        self.queue.wakes += 1
        self.ring.append(lane)

    def forget(self, lane: Lane) -> None:
        """It is empty, and out of the ring."""
        del self.lanes[lane.key]
        if lane.gate is not None and lane.gate.site is not None:
            del lane.gate.site.lanes[lane]
        self.pass_on(lane)

    def emptied(self, lane: Lane) -> None:
        """Its last task was discarded: it must not keep a place from anybody."""
        if lane.room is None:
            self.pass_on(lane)  # the entries are dropped when it comes to the head
            return
        lane.room.remove(lane)
        self.dead -= len(lane.tasks)
        lane.tasks.clear()
        self.clear_disk(lane)
        self.forget(lane)

    def clear_disk(self, lane: Lane) -> None:
        if lane.disk_queue and self.queue.disk_queue is not None:
            self.queue.disk_queue.clear(lane)

    def pass_on(self, lane: Lane) -> None:
        """It does not need the place it was woken for, or cannot use it: another may."""
        room, lane.woken_from = lane.woken_from, None
        if room is not None:
            room.wake_next(self.queue)

    def sweep(self) -> None:
        """Drop the dead entries, and the lanes that had nothing else."""
        disk_queue = self.queue.disk_queue
        for lane in list(self.lanes.values()):
            left = deque([task for task in lane.tasks if task.lane is lane])
            self.dead -= len(lane.tasks) - len(left)
            lane.tasks = left
            if disk_queue is not None:
                self.dead -= disk_queue.sweep(lane)
            if not lane.alive:
                if lane.room is not None:
                    lane.room.remove(lane)
                else:
                    self.ring.remove(lane)
                self.forget(lane)

    def dissolve(self) -> None:
        """The pool goes: nothing is left of the lanes."""
        for lane in self.lanes.values():
            if lane.room is not None:
                lane.room.remove(lane)
            if lane.gate is not None and lane.gate.site is not None:
                del lane.gate.site.lanes[lane]
        self.lanes.clear()
        self.ring.clear()
        self.size = self.waiting = self.dead = 0

    def head(self, now_ns: int) -> Task | None:
        """The next task of this level; what cannot go on before it is put aside."""
        ring = self.ring
        while ring:
            lane = ring[0]
            tasks = lane.tasks
            while tasks and tasks[0].lane is not lane:
                tasks.popleft()
                self.dead -= 1
            if not tasks:
                self._out_of_memory(lane)
                continue
            if lane.gate is not None:
                room = lane.gate.room_for(now_ns)
                if room is not None:
                    self.park(lane, room)
                    self.queue.parked(lane)
                    continue
            return tasks[0]
        return None

    def _out_of_memory(self, lane: Lane) -> None:
        """The lane at the head has nothing left, or only what has to be read first."""
        disk_queue = self.queue.disk_queue
        if lane.alive and disk_queue is not None:
            self.park(lane, disk_queue.room)
            return
        self.clear_disk(lane)
        self.ring.popleft()
        self.forget(lane)

    def enter(self, gate: Gate, task: Task, now_ns: int) -> None:
        """A task of the lane at the head goes through its gate."""
        self.ring[0].woken_from = None
        gate.enter(task, now_ns)
        site = gate.site
        if site is not None and (task.probe or site.earned) and self.queue.keeper is not None:
            self.queue.keeper.touch(site)  # its breaker, or its budget, has changed just now

    def took(self, count: int) -> None:
        """So many were taken from the lane at the head: the next one has its turn."""
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
