"""Handlers that wait for other tasks. No handler hears that its wait is in vain while it could go
on, and none waits in vain for long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.messages import ERROR, TIMEOUT, Lease
from musterd.supervisor.core.model.actions import AnswerWait
from musterd.supervisor.core.model.events import (
    ResumeRequested,
    ScaleRequested,
    StopRequested,
    WaitBegun,
    WaitEnded,
    WorkerExited,
)
from musterd.supervisor.core.model.slot import SlotState
from simulation.profile import MS, SEC

if TYPE_CHECKING:
    from simulation.workers import Worker
    from simulation.world import World

LOOK_NS = 20 * MS  # how often a handler checks whether its task has ended
LATE_NS = 300 * MS  # the core may know nothing more recent
VAIN_NS = 1 * SEC + LATE_NS  # a wait in vain is reported by then


class Nested:
    """One worker's side: the run that waits, if any."""

    def __init__(self, world: World, worker: Worker) -> None:
        self._world = world
        self._worker = worker
        self._request = 0
        self._answered = False
        self.waits_for = ""  # id
        self.since_ns = 0
        self.ended_ns = -SEC  # when the last wait ended

    def begins(self, lease: Lease, run: int) -> bool:
        """Tell whether this run waits for another task; then it ends with that task."""
        world = self._world
        if not world.profile.waits or world.is_calm or world.rng.random() >= world.profile.waits:
            return False
        others = [id_ for id_ in world.fleet.tasks if id_ != lease.id]
        if not others:
            return False
        self.waits_for = world.rng.choice(others)
        self.since_ns = world.now_ns
        self._request += 1
        self._answered = False
        self._worker.send(
            WaitBegun(self._worker.number, lease.lease, self._request, [self.waits_for])
        )
        world.in_life(LOOK_NS, self._look, lease, run)
        return True

    def answered(self, request: int) -> None:
        if request == self._request:
            self._answered = True

    def stop(self) -> None:
        """End the wait, whatever ended the run."""
        if self.waits_for:
            self.waits_for = ""
            self.ended_ns = self._world.now_ns

    def _look(self, lease: Lease, run: int) -> None:
        world, worker = self._world, self._worker
        if not worker.alive or worker.run != run or worker.running is not lease or worker.frozen_ns:
            return
        run_ns = world.now_ns - self.since_ns
        over = self.waits_for not in world.fleet.tasks and self.waits_for not in world.fleet.on_disk
        if not over and not self._answered and run_ns < lease.timeout_ns:
            world.in_life(LOOK_NS, self._look, lease, run)
            return
        ending = "success" if over else ERROR if self._answered else TIMEOUT
        self.stop()
        worker.send(WaitEnded(worker.number, lease.lease, self._request))
        worker._ended(run, run_ns, ending)


class WaitWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.told = 0
        self._changed_ns = 0  # the last change of hope by anything but a wait

    def handled(self, event: Any, actions: list[Any]) -> None:
        if isinstance(event, WorkerExited | StopRequested | ScaleRequested | ResumeRequested):
            self._changed_ns = self._world.now_ns
        for action in actions:
            if type(action) is AnswerWait:
                self.told += 1
                self._changed_ns = self._world.now_ns
                worker = self._world.workers[action.worker]
                hope = self._hope(worker)
                assert not hope, f"{worker.name} is told that its wait is in vain, but {hope}"

    def validate(self) -> None:
        """Check that no worker waits in vain for long."""
        world = self._world
        if not world.profile.waits or not world.fleet._state.intake_open:
            return
        for worker in world.workers.values():
            if not worker.alive or not worker.nested.waits_for or worker.frozen_ns:
                continue
            since_ns = max(worker.nested.since_ns, self._changed_ns)
            if world.now_ns - since_ns > VAIN_NS and not self._hope(worker, VAIN_NS):
                raise AssertionError(f"{worker.name} waits in vain for {worker.nested.waits_for}")

    def _hope(self, first: Worker, settled_ns: int = 0) -> str:
        """Say why this wait may end after all: a worker it depends on can go on. "" for none.

        Follows the waits from one worker to the next, unlike the core. With `settled_ns`, a change
        within that time is hope, too.
        """
        world, seen, todo = self._world, {first.number}, [first]
        while todo:
            worker = todo.pop()
            if not worker.alive or not worker.nested.waits_for:
                recent = not worker.alive or worker.nested.ended_ns >= world.now_ns - LATE_NS
                if recent and not settled_ns:
                    continue  # the core has not heard of it
                return f"{worker.name} does not wait"
            if settled_ns and world.now_ns - worker.nested.since_ns < settled_ns:
                return "it has only begun"
            found = self._needed(worker.nested.waits_for)
            if isinstance(found, str):
                return found
            for each in found:
                if each.number not in seen:
                    seen.add(each.number)
                    todo.append(each)
        return ""

    def _needed(self, id_: str) -> list[Worker] | str:
        """Return the workers that have to go on before this task can end, or why none has to."""
        world = self._world
        task = world.fleet.tasks.get(id_)
        if task is None:
            return f"{id_} has ended"
        if task.expires_at_ns or task.cancelled:
            return f"{id_} ends without a worker"
        workers = world.workers.values()
        running = [each for each in workers if each.alive and self._runs(each, id_)]
        if running:
            return running
        pool = task.route.pool
        for slot in pool.slots:
            if slot.state not in (SlotState.RUNNING, SlotState.FATAL, SlotState.STOPPED):
                return f"{slot.name} is {slot.state}"
            if slot.state == SlotState.RUNNING and (slot.killed_for or not slot.leases):
                return f"{slot.name} is free, or will be"
        needed = [world.workers[slot.worker] for slot in pool.slots if slot.worker]
        return needed or f"{pool.name} has no workers"

    @staticmethod
    def _runs(worker: Worker, id_: str) -> bool:
        return worker.running is not None and worker.running.id == id_
