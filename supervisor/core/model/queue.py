"""The queue of one pool: four levels, each a ring of lanes, one lane per target.

A dispatch takes the head of the first lane in the ring of the highest level that has one, and
moves that lane to the end of its ring: strict between priorities, first come first served within
a site, round-robin between sites. Nothing is ever searched: every step is O(1).

So that LOW never starves, every AGING_TURN-th dispatch may go to a lower level instead, if the next
task of that level has waited longer than `aging`. The lower levels take turns. Looking changes
nothing: a lane whose task is too young keeps its place in the ring, or it would lose its turn in
normal dispatch. Aging never changes a task's level.

A lane whose gate (gates.py) is closed leaves its ring when it comes to the head, waits there,
and returns to the end of the ring when the gate may have opened.

Beyond a number of tasks in memory the tail of a lane is only on disk (core/disk_queue/queue.py). A
lane with nothing in memory leaves the ring, too, until its next tasks have been read.

A task that is cancelled or expires while queued is only marked (its state is no longer QUEUED) and
skipped when it comes up; a level with mostly marked entries is swept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from musterd.ipc.resilience.policy import MILLISECOND_NS
from musterd.ipc.wire.messages import CRITICAL, HIGH, LOW, TaskSpec
from musterd.supervisor.core.model.lanes import Lane, Level
from musterd.supervisor.core.model.limits import AGING_TURN
from musterd.supervisor.core.model.task import Task, TaskState

if TYPE_CHECKING:
    from musterd.supervisor.core.model.gates import Gate, Site, WaitingLanes

HIGH_RESERVE_PERCENT = 5  # the last places of the queue are kept for HIGH and CRITICAL ...
CRITICAL_RESERVE_PERCENT = 2  # ... and the very last for CRITICAL
BULK_PERCENT = 75  # of the places, for retries in bulk; the others are kept for programs
SWEEP_MIN = 64  # a level is swept when it has this many dead entries and they are the majority

TINY_NS = 1 * MILLISECOND_NS  # longer tasks are leased one at a time
UNKNOWN_COST_NS = 1 << 62
# A message to a worker and its answer take longer than a tiny task. So an idle worker gets at least
# this much work, if there is so much; a busy one gets more only where no other is idle.
WORTH_NS = MILLISECOND_NS // 2
WINDOW_BYTES_MAX = 1024 * 1024  # of arguments in one message to a worker
LANE_HEAD = 4  # tasks of each lane that stay in memory in any case: no wait for the disk
# The lane of attempts of the cluster: in the order of their grants, whatever their sites. No target
# has this name, so no tail of it is on disk.
CLAIMED_LANE = "\0claimed"
TASK_BYTES = 1024  # of a task in memory besides its arguments: measured 0.9 to 1.1 KB


class GateSource(Protocol):
    """Knows the gate of a task, and hears what happens there: core/tasks/gatekeeper.py."""

    def gate_for(self, spec: TaskSpec) -> Gate | None: ...
    def lane_key(self, task: Task) -> str: ...
    def pushed(self, gate: Gate) -> None: ...
    def parked(self, lane: Lane) -> None: ...
    def touch(self, site: Site | None) -> None: ...


class DiskTail(Protocol):
    """Keeps the tails of lanes on disk alone: core/disk_queue/queue.py."""

    waiting: WaitingLanes

    def put(self, lane: Lane, task: Task) -> None: ...
    def put_many(self, lane: Lane, tasks: list[Task], now_ns: int) -> None: ...
    def let_in(self, lane: Lane) -> bool: ...
    def check(self, lane: Lane) -> None: ...
    def clear(self, lane: Lane) -> None: ...
    def sweep(self, lane: Lane) -> int: ...
    def dead_in(self, level: Level) -> int: ...


class PoolQueue:
    def __init__(
        self,
        size_max: int,
        aging_ns: int,
        resident_tasks: int = 0,
        resident_bytes: int = 0,
        *,
        keeper: GateSource | None = None,
        disk_queue: DiskTail | None = None,
    ) -> None:
        self.levels = [Level(self, number) for number in range(LOW + 1)]
        self.size = 0  # tasks in the rings
        self.waiting = 0  # tasks at gates
        self.wakes = 0  # lanes that waited and came back
        self.keeper = keeper
        self.disk_queue = disk_queue
        self.on_disk = 0  # tasks that are only on disk, in the rings and at gates
        self.bytes = 0  # of the pool's tasks in memory, queued or not
        self._turn = 0
        self._aged_level = LOW
        self.follow(size_max, aging_ns, resident_tasks, resident_bytes)

    def follow(
        self, size_max: int, aging_ns: int, resident_tasks: int, resident_bytes: int
    ) -> None:
        """Set new limits; tasks stay where they are."""
        self._resident_tasks = resident_tasks
        self._resident_bytes = resident_bytes
        self.aging_ns = aging_ns
        high = size_max - size_max * CRITICAL_RESERVE_PERCENT // 100
        rest = size_max - size_max * HIGH_RESERVE_PERCENT // 100
        self._limits = [
            size_max if level == CRITICAL else high if level == HIGH else rest
            for level in range(LOW + 1)
        ]

    def takes(self, level: int, held: int) -> bool:
        """Whether the queue takes one more task of this level while it holds `held`."""
        return held < self._limits[level]

    def takes_in_bulk(self, held: int) -> bool:
        """Whether the queue takes one more of many tasks that a person retries, and has room for
        those that programs submit."""
        return held < max(1, self._limits[CRITICAL] * BULK_PERCENT // 100)

    def enters_memory(self, spec: TaskSpec) -> None:
        self.bytes += len(spec.args) + TASK_BYTES

    def leaves_memory(self, spec: TaskSpec) -> None:
        self.bytes -= len(spec.args) + TASK_BYTES

    def went_to_disk(self, count: int, size: int) -> None:
        """Count tasks, with `size` bytes of arguments, that are now only on disk."""
        self.on_disk += count
        self.bytes -= size + count * TASK_BYTES

    def came_from_disk(self, count: int, size: int) -> None:
        """Count tasks, with `size` bytes of arguments, that are in memory again."""
        self.on_disk -= count
        self.bytes += size + count * TASK_BYTES

    def push(self, task: Task, now_ns: int) -> None:
        task.state = TaskState.QUEUED
        task.queued_ns = now_ns
        lane = self._enter(task, self._key_of(task))
        if lane.behind or self._crowded(lane):
            assert self.disk_queue is not None
            self.disk_queue.put(lane, task)
        else:
            lane.tasks.append(task)

    def push_many(self, tasks: list[Task], now_ns: int) -> None:
        """Push new tasks of one priority, without site, class, session and key."""
        level = self.levels[tasks[0].priority]
        lane = level.lanes.get("") or level.open_lane("", None)
        level.count(lane, len(tasks))
        for place, task in enumerate(tasks):
            if lane.behind or self._crowded(lane):
                assert self.disk_queue is not None
                self.disk_queue.put_many(lane, tasks[place:], now_ns)
                return
            task.state = TaskState.QUEUED
            task.queued_ns = now_ns
            task.lane = lane
            lane.tasks.append(task)

    def push_claimed(self, task: Task, now_ns: int) -> None:
        """Push an attempt of the cluster, which is never on disk."""
        task.state = TaskState.QUEUED
        task.queued_ns = now_ns
        self._enter(task, CLAIMED_LANE).tasks.append(task)

    def push_early(self, task: Task, now_ns: int) -> bool:
        """Push a task that is not on disk yet; False if its place is in the disk tail."""
        key = self._key_of(task)
        lane = self.levels[task.priority].lanes.get(key)
        if lane is not None and (lane.behind or self._crowded(lane)):
            return False
        task.state = TaskState.QUEUED
        task.queued_ns = now_ns
        self._enter(task, key).tasks.append(task)
        return True

    def fit_early(self, priority: int, count: int) -> tuple[Lane, int]:
        """Return the lane for new tasks without a site, and how many of `count` fit in memory."""
        level = self.levels[priority]
        lane = level.lanes.get("") or level.open_lane("", None)
        if lane.behind:
            return lane, 0
        if self.disk_queue is None:
            return lane, count
        places = self._resident_tasks - (self.size + self.waiting - self.on_disk)
        if self.bytes > self._resident_bytes:
            places = 0
        return lane, min(count, max(0, places, LANE_HEAD - len(lane.tasks)))

    def _crowded(self, lane: Lane) -> bool:
        """Whether the next task of this lane belongs on disk."""
        return (
            self.disk_queue is not None
            and (
                self.size + self.waiting - self.on_disk > self._resident_tasks
                or self.bytes > self._resident_bytes
            )
            and len(lane.tasks) >= LANE_HEAD
        )

    def push_front(self, task: Task) -> None:
        """Put back a task that was not done, before the tasks that came after it."""
        task.state = TaskState.QUEUED
        lane = self._enter(task, CLAIMED_LANE if task.claim is not None else self._key_of(task))
        lane.tasks.appendleft(task)
        if self.disk_queue is not None:
            self.disk_queue.let_in(lane)

    def _key_of(self, task: Task) -> str:
        """Return the key of a task's lane, and set its gate."""
        spec = task.spec
        keeper = self.keeper
        if keeper is None or not (spec.target or spec.policy or spec.session):
            return spec.target
        # Set each time: while the task waited for its retry, its site may have been forgotten.
        task.gate = keeper.gate_for(spec)
        return keeper.lane_key(task)

    def _enter(self, task: Task, key: str) -> Lane:
        level = self.levels[task.priority]
        lane = level.lanes.get(key) or level.open_lane(key, task.gate)
        task.lane = lane
        level.count(lane, 1)
        if task.gate is not None and self.keeper is not None:
            self.keeper.pushed(task.gate)
        return lane

    def dissolve(self) -> None:
        """Drop all lanes of a removed pool, whose tasks are forgotten already."""
        for level in self.levels:
            level.dissolve()
        self.size = self.waiting = 0

    def hasten(self, task: Task, level: int) -> None:
        """Raise a task to a level: something more urgent waits for it."""
        queued = task.state == TaskState.QUEUED
        if queued:
            self.discard(task)
        task.urged = level
        if queued:
            self.push(task, task.queued_ns)

    def parked(self, lane: Lane) -> None:
        if self.keeper is not None:
            self.keeper.parked(lane)

    def discard(self, task: Task) -> None:
        """Take a task out of the queue; the caller sets its next state."""
        assert task.state == TaskState.QUEUED, task.state
        lane = task.lane
        assert lane is not None
        task.lane = None
        level = lane.level
        level.count(lane, -1)
        level.dead += 1
        task.state = TaskState.ENDING
        if task.behind:
            task.behind = False
            lane.behind -= 1
            lane.kept -= 1
        if not lane.alive:
            level.emptied(lane)
        elif lane.behind:
            assert self.disk_queue is not None
            self.disk_queue.check(lane)
        if level.dead >= SWEEP_MIN and level.dead > level.size + level.waiting:
            level.sweep()

    def take_out(self, task: Task) -> None:
        """Take a task out of the queue that may come back: no dead entry of it may stay."""
        assert task.lane is not None and not task.behind, task.spec.id
        level = task.lane.level
        task.lane.tasks.remove(task)
        self.discard(task)
        level.dead -= 1

    def sweep(self) -> None:
        """Drop the entries of all discarded tasks."""
        for level in self.levels:
            if level.dead:
                level.sweep()

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
        """Take the next tasks for one worker.

        An idle worker gets at least one, whatever it costs; beyond that only tiny tasks, while
        their measured run times fit into the budget: its share of them, or as many as it does in
        WORTH_NS, up to `count_max`. `alone`: nothing else runs in the worker, now or next.
        """
        taken: list[Task] = []
        bytes_left = WINDOW_BYTES_MAX
        worth_ns = budget_ns - WORTH_NS  # what WORTH_NS of work leaves of the budget
        count_max = max(count_max, share)
        more = True
        while more and len(taken) < count_max and self.size:
            level = self._next(now_ns)
            if level is None:
                break
            lane = level.ring[0]
            tasks, gate, before = lane.tasks, lane.gate, len(taken)
            # Where no other lane waits, all turns are this lane's.
            sole = gate is None and level.size == self.size and len(level.ring) == 1
            until = count_max if sole else before + 1
            while tasks and len(taken) < until:
                task = tasks[0]
                if task.lane is not lane:
                    tasks.popleft()
                    level.dead -= 1
                    continue
                cost_ns = task.route.cost_ns
                bytes_left -= len(task.spec.args)
                if (
                    ((taken or not idle) and (cost_ns > TINY_NS or cost_ns > budget_ns))
                    or (len(taken) >= share and budget_ns - cost_ns < worth_ns)
                    or (task.alone and not alone)
                    or (taken and bytes_left < 0)
                ):
                    more = False
                    break
                budget_ns -= cost_ns
                tasks.popleft()
                task.lane = None
                taken.append(task)
                if gate is not None:
                    level.enter(gate, task, now_ns)
                if cost_ns > TINY_NS:
                    more = False
                    break
            if len(taken) > before:
                level.took(len(taken) - before)
                self._pass_turns(len(taken) - before)
        return taken

    def _pass_turns(self, count: int) -> None:
        rounds, self._turn = divmod(self._turn + count, AGING_TURN)
        for _ in range(rounds % LOW):  # this many levels take turns
            self._aged_level = self._aged_level - 1 if self._aged_level > HIGH else LOW

    def _next(self, now_ns: int) -> Level | None:
        """Return the level whose turn it is; the task at the head of its ring can go on."""
        for number, level in enumerate(self.levels):
            if not level.size:
                continue
            if self._turn == AGING_TURN - 1:
                aged = self._aged(now_ns, number)
                if aged is not None:
                    return aged
            wakes = self.wakes
            task = level.head(now_ns)
            if self.wakes != wakes:
                return self._next(now_ns)  # a parked lane let another lane go on
            if task is not None:
                return level
        return None  # all other tasks wait at gates

    def _aged(self, now_ns: int, top: int) -> Level | None:
        """Return a level below `top` whose next task waits too long; the levels take turns."""
        number = self._aged_level
        for _ in range(LOW):
            level = self.levels[number]
            task = level.head(now_ns) if number > top and level.size else None
            if task is not None and now_ns - task.queued_ns >= self.aging_ns:
                return level
            number = number - 1 if number > HIGH else LOW
        return None

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        for level in self.levels:
            counts = {True: 0, False: 0}
            dead = 0
            for key, lane in level.lanes.items():
                assert lane.key == key, key
                alive = sum(task.lane is lane for task in lane.tasks) + lane.behind
                assert alive == lane.alive, (key, alive, lane.alive)
                counts[lane.waits_among is None] += alive
                dead += len(lane.tasks) + lane.behind - alive
                assert lane.waits_among is None or lane not in level.ring, key
            assert counts == {True: level.size, False: level.waiting}, (counts, level.size)
            if self.disk_queue is not None:
                dead += self.disk_queue.dead_in(level)
            assert dead == level.dead, (dead, level.dead)
            listed = {id(lane) for lane in level.lanes.values() if lane.waits_among is None}
            assert listed == {id(lane) for lane in level.ring}
            assert len(level.ring) == len(listed)
        assert self.size == sum(level.size for level in self.levels)
        assert self.waiting == sum(level.waiting for level in self.levels)
