"""New tasks whose place is on the shelf: they are put there at once, while they are being written.

Their lane is long, so they are not wanted soon, and when they are they will be read: no task is
made of them now. What is not on disk yet cannot be read, so a page ends before the first of them
(queue.py), and whoever asks for one, to cancel it or to submit it again, is heard after the commit.
When the disk fails they are made tasks, which wait for it as others do (core/tasks/outage.py).
"""

from collections.abc import Iterable

from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.ledger import UnwrittenRun
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
        """Keep it for later if one of these is not on disk yet."""
        places = self._disk_queue.places
        waits = any((place := places.get(id_)) is not None and not place.written for id_ in ids)
        if waits:
            self._held.append(event)
        return waits

    @property
    def cancels(self) -> bool:
        """Whether something is to be cancelled."""
        return any(isinstance(event, events.CancelRequested) for event in self._held)

    def give_up(self, peer: bytes) -> list[events.TasksSubmitted]:
        """The repeated submits of a connection that is over: they are not kept any more."""
        held, self._held = self._held, []
        given_up: list[events.TasksSubmitted] = []
        for event in held:
            if isinstance(event, events.TasksSubmitted) and event.peer == peer:
                given_up.append(event)
            else:
                self._held.append(event)
        return given_up

    def let_go(self) -> list[Held]:
        """What was kept: to be looked at again."""
        held, self._held = self._held, []
        return held

    def written(self, runs: list[UnwrittenRun]) -> None:
        """They are on disk, and only there."""
        for run in runs:
            run.place.written = True
            lane = run.place.lane
            lane.level.queue.bytes -= run.size
            self._disk_queue.check(lane)

    def take_back(self, runs: list[UnwrittenRun]) -> list[Task]:
        """The same as tasks that wait for the disk."""
        tasks: list[Task] = []
        queues: dict[Pool, PoolQueue] = {}
        for run in runs:
            pool, place = run.route.pool, run.place
            for record in run.new.records():
                spec = record.spec
                watchers = self._disk_queue.forget(spec.id)
                task = Task(
                    record.seq,
                    spec,
                    run.route,
                    record.submitted_wall_ns,
                    place.peer,
                    watchers=watchers,
                )
                self._state.tasks[spec.id] = task
                tasks.append(task)
            pool.unstored += len(run.new.specs)
            self._disk_queue.leave(place.lane, len(run.new.specs))
            queues[pool] = pool.queue
        for queue in queues.values():
            queue.sweep()  # they will come back, and stand there only once
        return tasks
