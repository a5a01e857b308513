"""New tasks bound for the disk queue: they join it while they are still being written.

Their lane is long, so no worker wants them soon, and they will be read when one does: no task
objects are made now. A task that is not on disk yet cannot be read, so a page ends before the first
of them (queue.py), and a client that cancels or resends one is heard after the commit. When the
disk fails they become tasks, which wait for the disk as others do (core/tasks/outage.py).
"""

from collections.abc import Iterable

from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.ledger import UnwrittenBulk
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.queue import PoolQueue
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task

Held = events.CancelRequested | events.TasksSubmitted


class UnwrittenTasks:
    def __init__(self, state: State, disk_queue: DiskQueue) -> None:
        self._state = state
        self._disk_queue = disk_queue
        self._held: list[Held] = []

    def hold(self, event: Held, ids: Iterable[str]) -> bool:
        """Keep an event for later if one of its tasks is still being written."""
        places = self._disk_queue.places
        waits = any((place := places.get(id_)) is not None and not place.written for id_ in ids)
        if waits:
            self._held.append(event)
        return waits

    @property
    def cancels(self) -> bool:
        """Whether a kept event cancels something."""
        return any(isinstance(event, events.CancelRequested) for event in self._held)

    def give_up(self, peer: bytes) -> list[events.TasksSubmitted]:
        """Stop keeping the repeated submits of a connection that is over; return them."""
        held, self._held = self._held, []
        given_up: list[events.TasksSubmitted] = []
        for event in held:
            if isinstance(event, events.TasksSubmitted) and event.peer == peer:
                given_up.append(event)
            else:
                self._held.append(event)
        return given_up

    def let_go(self) -> list[Held]:
        """Return the kept events: each is to be handled again."""
        held, self._held = self._held, []
        return held

    def written(self, written: list[UnwrittenBulk]) -> None:
        """Note that these tasks are on disk, and only there."""
        for bulk in written:
            bulk.place.written = True
            lane = bulk.place.lane
            lane.level.queue.bytes -= bulk.size
            self._disk_queue.check(lane)

    def take_back(self, unwritten: list[UnwrittenBulk]) -> list[Task]:
        """Turn them into tasks that wait for the disk."""
        tasks: list[Task] = []
        queues: dict[Pool, PoolQueue] = {}
        for bulk in unwritten:
            pool, place = bulk.route.pool, bulk.place
            for record in bulk.new.records():
                spec = record.spec
                watchers = self._disk_queue.forget(spec.id)
                task = Task(
                    record.seq,
                    spec,
                    bulk.route,
                    record.submitted_wall_ns,
                    place.peer,
                    watchers=watchers,
                )
                self._state.tasks[spec.id] = task
                tasks.append(task)
            pool.unstored += len(bulk.new.specs)
            self._disk_queue.leave(place.lane, len(bulk.new.specs))
            queues[pool] = pool.queue
        for queue in queues.values():
            queue.sweep()  # their ids come back later, and must stand there once
        return tasks
