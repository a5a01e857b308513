"""Deadlock detection: finds handlers that wait for tasks that can never run.

A handler may submit a task and wait for its result. If every worker of a pool runs a handler that
waits for a task which only this pool can run, no handler goes on: each waits for its timeout. Pools
that wait for each other deadlock likewise. A worker tells when its handler begins to wait and for
which tasks (the wait ends when one of them has ended), and when the wait is over. From the waits
and the leases follows which waits are hopeless:

    take all waits to be hopeless; as long as one of them has hope, take it out

A wait has hope if one of its tasks can end although no hopeless handler goes on: the task has
ended, it runs and does not wait, it may expire or fall back, or it is queued where a worker is
free, will be, or may be added. Doubtful cases (a pool that is paused, rolled, recycled or short of
memory) count as hope: there is no false alarm. When two looks in a row find the same hopeless set,
the handler in it that began to wait last gets an error. Its worker goes on, and as a rule the
others follow.
"""

from collections.abc import Callable

from msgspec import Struct

from musterd.ipc.resilience.policy import MILLISECOND_NS
from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import AnswerWait
from musterd.supervisor.core.model.lanes import Lane
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState

LOOK_NS = 200 * MILLISECOND_NS  # two looks and the messages take well under a second
# Bounds of one look, which is to take milliseconds: tasks looked at, and rounds over all waits (two
# are enough where each handler waits for the next). A look that reaches a bound finds hope.
LOOKED_MAX = 20_000
ROUNDS_MAX = 16
TOLD_MAX = 5  # waiting tasks that an error names


class Wait(Struct, frozen=True):
    """A lease that waits for the end of one of these tasks."""

    worker: int
    lease: int
    request: int
    ids: list[str]
    order: int  # grows with each wait


class Waits:
    def __init__(self, state: State, disk_queue: DiskQueue, bound: Callable[[Pool], int]) -> None:
        self._state = state
        self._disk_queue = disk_queue
        self._bound = bound  # returns how many workers a pool may have
        self._waits: dict[int, Wait] = {}  # by lease
        self._order = 0
        self._suspected: tuple[int, ...] = ()  # hopeless at the last look, by their order
        self._looking = False

    # -- who waits ----------------------------------------------------------------------------

    def begun(self, event: events.WaitBegun) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None or event.lease not in slot.leases or not event.ids:
            return
        self._order += 1
        self._waits[event.lease] = Wait(
            event.worker, event.lease, event.request, event.ids, self._order
        )
        self._look_later()

    def ended(self, event: events.WaitEnded) -> None:
        wait = self._waits.get(event.lease)
        if wait is not None and (wait.worker, wait.request) == (event.worker, event.request):
            del self._waits[event.lease]

    def leases_over(self, event: events.LeasesCompleted | events.LeasesReturned) -> None:
        if self._waits:
            self._forget(event.worker, event.leases)

    def worker_exited(self, event: events.WorkerExited) -> None:
        self._forget(event.worker, list(self._waits))

    def _forget(self, worker: int, leases: list[int]) -> None:
        for lease in leases:
            wait = self._waits.get(lease)
            if wait is not None and wait.worker == worker:
                del self._waits[lease]

    # -- looking ------------------------------------------------------------------------------

    def _look_later(self) -> None:
        if not self._looking:
            self._looking = True
            self._state.timers.at(self._state.now_ns + LOOK_NS, self._look)

    def _look(self) -> None:
        self._looking = False
        if not self._waits or not self._state.intake_open:
            self._suspected = ()
            return
        hopeless = self._hopeless()
        orders = tuple(sorted(wait.order for wait in hopeless.values()))
        if hopeless and orders == self._suspected:
            last = max(hopeless.values(), key=lambda wait: wait.order)
            del self._waits[last.lease]
            self._tell(last, hopeless)
            orders = ()
        self._suspected = orders
        self._look_later()

    def _hopeless(self) -> dict[int, Wait]:
        stuck = dict(self._waits)
        looked_at = 0
        for number in range(ROUNDS_MAX):
            full = {pool.name: self._is_full(pool, stuck) for pool in self._state.pools.values()}
            waits = list(stuck.items())
            if number % 2 == 0:
                waits.reverse()  # the newest first: as a rule the others wait for it
            for lease, wait in waits:
                for id_ in wait.ids:
                    looked_at += 1
                    if self._can_end(id_, stuck, full):
                        del stuck[lease]
                        break
                if looked_at > LOOKED_MAX:
                    return {}
            if len(stuck) == len(waits):
                return stuck
        return {}

    def _can_end(self, id_: str, stuck: dict[int, Wait], full: dict[str, bool]) -> bool:
        """Return whether this task can end although no stuck handler goes on."""
        task = self._state.tasks.get(id_)
        if task is not None and task.state == TaskState.JOINED:
            task = self._state.tasks.get(task.follows)
        if task is None:
            place = self._disk_queue.places.get(id_)
            pool = self._pool_of(place.lane) if place is not None else None
            return pool is None or not full[pool.name]  # ended, or on its way to us
        if task.state == TaskState.ENDING or task.expires_at_ns or task.cancelled or task.alone:
            return True
        if task.wants_fallback or task.on_open == "fail":
            return True  # its site may be shut
        slot = task.slot
        if slot is not None and (slot.width > 1 or next(iter(slot.leases)) == task.lease):
            return task.lease not in stuck
        # queued, or behind another task in a worker
        return not full[task.route.pool.name] and not self._is_taken(task, stuck)

    def _is_taken(self, task: Task, stuck: dict[int, Wait]) -> bool:
        """Return whether stuck handlers have all places of the session that a task wants."""
        places = task.gate.session if task.gate is not None and task.slot is None else None
        if places is None or places.bulkhead.free:
            return False
        users = [self._task_of(wait).spec.session for wait in stuck.values()]
        return users.count(task.spec.session) >= places.bulkhead.used

    def _pool_of(self, lane: Lane) -> Pool | None:
        for pool in self._state.pools.values():
            if lane.level in pool.queue.levels:
                return pool
        return None

    def _is_full(self, pool: Pool, stuck: dict[int, Wait]) -> bool:
        """Return whether all workers of a pool are stuck and no other will be added."""
        if (
            not pool.is_open
            or pool.halt
            or pool.rollout is not None
            or pool.beside
            or self._grows(pool)
        ):
            return False
        slots = [slot for slot in pool.slots if slot.state not in _OUT_OF_USE or slot.held]
        return bool(slots) and all(_is_stuck(slot, stuck) for slot in slots)

    def _grows(self, pool: Pool) -> bool:
        if pool.limit is not None and pool.limit < pool.size:
            return True  # memory comes and goes
        if pool.size > len(pool.slots):
            return True
        scaler = pool.scaler
        if scaler is None or scaler.manual:
            return False
        return pool.size < min(scaler.policy.max, self._bound(pool))

    # -- telling ------------------------------------------------------------------------------

    def _tell(self, wait: Wait, hopeless: dict[int, Wait]) -> None:
        slot = self._state.workers[wait.worker]
        task = self._task_of(wait)
        others = [each for each in hopeless.values() if each is not wait]
        told = [f"{task.spec.id} ({task.spec.name})"]
        told += [self._called(each) for each in others[: TOLD_MAX - 1]]
        if len(others) >= TOLD_MAX:
            told.append(f"{len(others) - TOLD_MAX + 1} more")
        pools = sorted({self._state.workers[each.worker].pool.name for each in hopeless.values()})
        sessions = sorted({self._task_of(each).spec.session for each in hopeless.values()} - {""})
        who = f"every worker of {', '.join(pools)} runs a task that waits so"
        if any(self._is_taken(each, hopeless) for each in self._wanted(wait)):
            who = f"session {', '.join(sessions)} is used by a task that waits so"
        wanted = ", ".join(self._named(id_) for id_ in wait.ids[:TOLD_MAX])
        reason = (
            f"task {told[0]} waits for {wanted}, which can never run: {who} "
            f"({', '.join(told)}); submit such tasks to another pool, give this one more workers "
            "or `concurrency`, or return and go on in a later task"
        )
        self._state.report("task.deadlock", "warning", slot=slot, task=task, reason=reason)
        self._state.out.append(AnswerWait(wait.worker, wait.request, wait.ids, reason))

    def _task_of(self, wait: Wait) -> Task:
        return self._state.workers[wait.worker].leases[wait.lease]

    def _wanted(self, wait: Wait) -> list[Task]:
        return [task for id_ in wait.ids if (task := self._state.tasks.get(id_)) is not None]

    def _called(self, wait: Wait) -> str:
        task = self._task_of(wait)
        return f"{task.spec.id} ({task.spec.name})"

    def _named(self, id_: str) -> str:
        task: Task | None = self._state.tasks.get(id_)
        return id_ if task is None else f"{id_} ({task.spec.name})"

    def validate(self) -> None:
        """Check that every wait belongs to a lease under way, and is looked at."""
        for lease, wait in self._waits.items():
            slot = self._state.workers.get(wait.worker)
            assert slot is not None and lease in slot.leases, (lease, wait)
        assert self._looking or not self._waits or not self._state.intake_open


_OUT_OF_USE = (SlotState.STOPPED, SlotState.FATAL)


def _is_stuck(slot: Slot, stuck: dict[int, Wait]) -> bool:
    """Return whether a slot can take no task as long as no stuck handler goes on."""
    if slot.state != SlotState.RUNNING or slot.killed_for or slot.worn or not slot.leases:
        return False
    if slot.width == 1:
        return next(iter(slot.leases)) in stuck
    if any(lease not in stuck for lease in slot.leases):
        return False
    return len(slot.leases) >= slot.width or any(task.alone for task in slot.leases.values())
