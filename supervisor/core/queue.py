"""The queue of one pool: four levels, each a ring of lanes, one lane per target.

A dispatch takes the head of the first lane in the ring of the highest level that has one, and
moves that lane to the end of its ring: strict between priorities, first come first served within
a site, round-robin between sites. Nothing is ever searched: every step is O(1).

So that LOW never starves, every AGING_TURN-th dispatch may go to a lower level instead, if the
task whose turn it is there has waited longer than `aging`. The levels take turns at that. A look
changes nothing: a lane that was looked at and found too young keeps its place in the ring, or it
would lose its turn in normal dispatch. Aging never changes a task's level.

A task that is cancelled or expires while queued is only marked (its state is no longer QUEUED)
and skipped when it comes up; a level with mostly such entries is swept.
"""

from collections import deque

from musterd.ipc.messages import CRITICAL, HIGH, LOW
from musterd.ipc.policy import MILLISECOND_NS
from musterd.supervisor.core.task import Task, TaskState

AGING_TURN = 16  # at most one dispatch of this many goes to an aged task of a lower level
HIGH_RESERVE_PERCENT = 5  # the last places of the queue are kept for HIGH and CRITICAL ...
CRITICAL_RESERVE_PERCENT = 2  # ... and the very last for CRITICAL
SWEEP_MIN = 64  # a level is swept when it has this many dead entries and they are the majority

TINY_NS = 1 * MILLISECOND_NS  # tasks that run longer than this are leased one at a time
UNKNOWN_COST_NS = 1 << 62


class Lane:
    """The queued tasks of one target at one level."""

    __slots__ = ("key", "tasks")

    def __init__(self, key: str) -> None:
        self.key = key
        self.tasks: deque[Task] = deque()


class Level:
    """The lanes of one priority that have something to offer, by target and in turn."""

    __slots__ = ("dead", "lanes", "ring", "size")

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.ring: deque[Lane] = deque()
        self.size = 0
        self.dead = 0  # entries that were discarded and not yet dropped

    def lane(self, key: str) -> Lane:
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
            self.ring.append(lane)
        return lane

    def sweep(self) -> None:
        """Drop the dead entries, and the lanes that had nothing else."""
        ring: deque[Lane] = deque()
        for lane in self.ring:
            lane.tasks = deque(task for task in lane.tasks if task.state == TaskState.QUEUED)
            if lane.tasks:
                ring.append(lane)
            else:
                del self.lanes[lane.key]
        self.ring = ring
        self.dead = 0

    def head(self) -> Task | None:
        """The next task of this level; dead entries and empty lanes before it are dropped."""
        ring = self.ring
        while ring:
            lane = ring[0]
            tasks = lane.tasks
            while tasks:
                task = tasks[0]
                if task.state == TaskState.QUEUED:
                    return task
                tasks.popleft()
                self.dead -= 1
            ring.popleft()
            del self.lanes[lane.key]
        return None

    def pop(self) -> None:
        """Take what head() returned and give the next lane its turn."""
        ring = self.ring
        lane = ring[0]
        lane.tasks.popleft()
        self.size -= 1
        if not lane.tasks:
            ring.popleft()
            del self.lanes[lane.key]
        elif len(ring) > 1:
            ring.rotate(-1)


class PoolQueue:
    def __init__(self, size_max: int, aging_ns: int) -> None:
        self.levels = [Level() for _ in range(LOW + 1)]
        self.size = 0
        self.aging_ns = aging_ns
        high = size_max - size_max * CRITICAL_RESERVE_PERCENT // 100
        rest = size_max - size_max * HIGH_RESERVE_PERCENT // 100
        self._limits = [
            size_max if level == CRITICAL else high if level == HIGH else rest
            for level in range(LOW + 1)
        ]
        self._turn = 0
        self._aged_level = LOW

    def room(self, level: int, held: int) -> bool:
        """Whether one more task of this level may come in while `held` are there already."""
        return held < self._limits[level]

    def push(self, task: Task, now_ns: int) -> None:
        task.state = TaskState.QUEUED
        task.queued_ns = now_ns
        self._lane_for(task).tasks.append(task)

    def push_front(self, task: Task) -> None:
        """For what comes back undone: it keeps its place before those that came after it."""
        task.state = TaskState.QUEUED
        self._lane_for(task).tasks.appendleft(task)

    def _lane_for(self, task: Task) -> Lane:
        level = self.levels[task.spec.priority]
        level.size += 1
        self.size += 1
        return level.lane(task.spec.target)

    def discard(self, task: Task) -> None:
        """Leave out a queued task; the caller gives it its next state."""
        assert task.state == TaskState.QUEUED, task.state
        level = self.levels[task.spec.priority]
        level.size -= 1
        self.size -= 1
        level.dead += 1
        task.state = TaskState.ENDING
        if level.dead >= SWEEP_MIN and level.dead > level.size:
            level.sweep()

    def take(self, now_ns: int, count_max: int, budget_ns: int, idle: bool) -> list[Task]:
        """The next tasks for one worker.

        An idle worker gets at least one, whatever it costs; beyond that only tiny tasks, while
        their measured run times fit into the budget.
        """
        taken: list[Task] = []
        while len(taken) < count_max and self.size:
            level, task = self._next(now_ns)
            cost_ns = task.route.cost_ns
            if (taken or not idle) and (cost_ns > TINY_NS or cost_ns > budget_ns):
                break
            budget_ns -= cost_ns
            level.pop()
            self.size -= 1
            self._turn += 1
            if self._turn == AGING_TURN:
                self._turn = 0
                self._aged_level = self._aged_level - 1 if self._aged_level > HIGH else LOW
            taken.append(task)
            if cost_ns > TINY_NS:
                break
        return taken

    def _next(self, now_ns: int) -> tuple[Level, Task]:
        for number, level in enumerate(self.levels):
            if level.size:
                if self._turn == AGING_TURN - 1:
                    aged = self._aged(now_ns, number)
                    if aged is not None:
                        return aged
                task = level.head()
                assert task is not None, "a level with a size has a head"
                return level, task
        raise AssertionError("a queue with a size has a task")

    def _aged(self, now_ns: int, top: int) -> tuple[Level, Task] | None:
        """What waits too long below level `top`: the levels take turns at being asked first."""
        number = self._aged_level
        for _ in range(LOW):
            level = self.levels[number]
            task = level.head() if number > top and level.size else None
            if task is not None and now_ns - task.queued_ns >= self.aging_ns:
                return level, task
            number = number - 1 if number > HIGH else LOW
        return None

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        for level in self.levels:
            queued = entries = 0
            for key, lane in level.lanes.items():
                assert lane.key == key, key
                queued += sum(task.state == TaskState.QUEUED for task in lane.tasks)
                entries += len(lane.tasks)
            assert queued == level.size, (queued, level.size)
            assert entries - queued == level.dead, (entries, queued, level.dead)
            assert len(level.ring) == len(level.lanes)
            assert {id(lane) for lane in level.ring} == {id(x) for x in level.lanes.values()}
        assert self.size == sum(level.size for level in self.levels)
