"""Reload: take over a changed policy while the fleet runs, and lose nothing.

    a new pool         its tasks in the store are read back, page by page; then the pool takes new
                       tasks and starts
    a removed pool     takes no more tasks and drains; tasks that have not begun stay in the store
                       (*stranded*) and are forgotten here
    another size       the pool scales
    another build      workers are replaced one by one (core/workers/rolling.py)
    anything else      holds from now on

A removed pool that comes back before it has drained stays. The shell has checked the policy.
"""

from msgspec import Struct

from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    FindStranded,
    LookUp,
    StopForkServer,
    TellMissing,
)
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.policy import PoolPolicy
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.core.tasks.added_schedules import AddedSchedules
from musterd.supervisor.core.tasks.claims import Claims
from musterd.supervisor.core.tasks.coalescing import Coalescing
from musterd.supervisor.core.tasks.gatekeeper import Gatekeeper
from musterd.supervisor.core.tasks.intake import Intake, Late
from musterd.supervisor.core.tasks.logins import Logins
from musterd.supervisor.core.tasks.pauses import FACT as HALT
from musterd.supervisor.core.tasks.reception import Reception
from musterd.supervisor.core.tasks.retries import Retries
from musterd.supervisor.core.workers.autoscale import Autoscale
from musterd.supervisor.core.workers.lifecycle import WorkerLifecycle
from musterd.supervisor.core.workers.pressure import Governor
from musterd.supervisor.core.workers.sidecar import Sidecar

STRANDED_WATCHED_MAX = 100_000  # stranded tasks whose watchers are remembered


class Parts(Struct, frozen=True):
    """The parts of the core that a changed policy concerns."""

    ledger: Ledger
    intake: Intake
    coalescing: Coalescing
    keeper: Gatekeeper
    disk_queue: DiskQueue
    lifecycle: WorkerLifecycle
    added: AddedSchedules
    autoscale: Autoscale
    governor: Governor
    retries: Retries
    sidecars: dict[str, Sidecar]
    claims: Claims
    logins: Logins
    reception: Reception


class Reload:
    def __init__(self, state: State, parts: Parts) -> None:
        self._state = state
        self._ledger = parts.ledger
        self._parts = parts
        self.stranded: dict[str, int] = {}  # by removed pool: how many tasks it left in the store
        self._requests = 0
        self._asked: dict[str, FindStranded] = {}  # the last question about each pool
        self._late: dict[str, Late] = {}  # of pools being added: tasks that may end at once
        self.removing: dict[str, int] = {}  # pools, and the ticket they wait for; 0: not known yet

    def policy_changed(self, event: events.PolicyChanged) -> None:
        state, parts = self._state, self._parts
        if not state.intake_open:
            why = "reload: the daemon is shutting down"
            state.report("command.ignored", "warning", reason=why)
            return
        state.policy = policy = event.policy
        for pool in state.pools.values():
            pool.retry = policy.retry
        parts.coalescing.follow(policy.cache)
        parts.governor.follow()
        for sidecar in parts.sidecars.values():
            sidecar.follow()
        parts.claims.follow()
        parts.reception.follow()
        parts.added.follow(event.added)
        wanted = {each.name: each for each in policy.pools}
        self._asked = {name: asked for name, asked in self._asked.items() if name in wanted}
        for pool in list(state.pools.values()):
            if pool.name not in wanted:
                self._remove(pool)
        for name, each in wanted.items():
            found = state.pools.get(name)
            if found is None:
                self._find(name)
            elif found.arriving and found.removed:
                found.follow(each)  # added again as soon as it is gone
            elif found.arriving:
                self._hurry(found, each)
            else:
                self._adapt(found, each)
        parts.keeper.follow()

    # -- pools that stay ----------------------------------------------------------------------

    def _adapt(self, pool: Pool, policy: PoolPolicy) -> None:
        lifecycle, before = self._parts.lifecycle, pool.policy
        pool.follow(policy)
        returns = self.removing.pop(pool.name, None) is not None
        if returns:
            pool.removed = False
            lifecycle.fork_servers.start(pool)
            lifecycle.resize(pool, policy.size)
            self._parts.autoscale.begin(pool)
        self._parts.autoscale.follow(pool, before)
        lifecycle.replacement.begin(pool)

    # -- pools that are added -----------------------------------------------------------------

    def _find(self, name: str, after_seq: int = 0) -> None:
        """Ask for the tasks of a pool once all changes of it are on disk.

        If no answer comes, because the store cannot be read, the next reload asks again.
        """
        self._requests += 1
        self._asked[name] = question = FindStranded(name, self._requests, after_seq)
        self._ledger.tell(question)

    def _hurry(self, pool: Pool, policy: PoolPolicy) -> None:
        """Follow a policy that changed while the pool is being added."""
        pool.follow(policy)
        self._find(pool.name, self._asked[pool.name].after_seq)

    def stranded_found(self, event: events.StrandedFound) -> None:
        """Take back a page of tasks of a pool; after the last page the pool opens."""
        state, parts, name = self._state, self._parts, event.pool
        asked = self._asked.get(name)
        if asked is None or asked.request != event.request or not state.intake_open:
            return  # a newer question is open, or the pool is not wanted any more
        pool = state.pools.get(name)
        if pool is None:
            policy = next(each for each in state.policy.pools if each.name == name)
            pool = state.pools[name] = Pool(
                policy, state.policy.retry, parts.keeper, parts.disk_queue
            )
            pool.arrive()
            parts.autoscale.leave(pool)
            self.stranded[name] = 0
            self._late[name] = []
        self.stranded[name] += len(event.tasks)
        parts.intake.take_back(event.tasks, self._late[name])
        if event.after_seq:
            self._find(name, event.after_seq)
            return
        del self._asked[name]
        pool.settle_in()
        parts.governor.welcome(pool)
        state.report("pool.added", pool=pool, count=self.stranded.pop(name))
        parts.intake.take_back_late(self._late.pop(name))
        parts.lifecycle.open(pool)
        parts.autoscale.begin(pool)

    def looked_up(self, event: events.LookedUp) -> None:
        """Watch those that are alive or stranded; tell which of them nobody has.

        A task may have come to life since the store has looked. A stranded one is told when its
        pool has come back and the task has ended.
        """
        state = self._state
        alive = self._parts.intake.alive
        late = [id_ for id_ in event.absent if alive(id_)]
        missing = [id_ for id_ in event.absent if not alive(id_)]
        if late:
            self._parts.intake.watched(events.TasksWatched(event.peer, late))
        if missing:
            state.out.append(TellMissing(event.peer, missing))
        for id_, pool in event.unfinished:
            if alive(id_):
                self._parts.intake.watched(events.TasksWatched(event.peer, [id_]))
            elif pool in state.pools:  # the pool came back and the task has ended meanwhile
                state.out.append(LookUp(event.peer, [id_]))
            elif len(state.stranded) < STRANDED_WATCHED_MAX:
                state.stranded.setdefault(id_, {})[event.peer] = None

    # -- pools that are removed ---------------------------------------------------------------

    def _remove(self, pool: Pool) -> None:
        for _, task in self._late.pop(pool.name, ()):  # never admitted: nothing else holds them
            pool.leave(task.spec)
            self._remember(task.spec.id, self._strand(task))
        if pool.removed:
            return
        lifecycle = self._parts.lifecycle
        lifecycle.replacement.cancel(pool)
        self._parts.autoscale.leave(pool)
        pool.removed = True
        self.removing[pool.name] = 0
        pool.fork_server = ForkServerState.DOWN
        self._state.out.append(StopForkServer(pool.name, pool.build))
        for slot in pool.everyone:
            slot.removed = True
            slot.held = slot.restart_after_stop = False
            if slot.state == SlotState.STOPPED:
                pool.dismiss(slot)
            elif slot in pool.everyone:  # else it was dismissed with another slot
                lifecycle.stop(slot, within_ns=self._state.policy.drain_timeout_ns)

    def advance(self) -> None:
        """After every event: forget removed pools that have drained and are on disk."""
        if not self.removing or not self._state.intake_open:
            return
        for name, ticket in list(self.removing.items()):
            pool = self._state.pools[name]
            if (
                pool.everyone
                or self._parts.disk_queue.cancels
                or self._parts.intake.unwritten.cancels
            ):
                continue
            if not ticket or ticket <= self._ledger.persisted_ticket:
                tasks = [each for each in self._state.tasks.values() if each.route.pool is pool]
                if self._ledger.is_unwritten(pool) or any(_unsettled(each) for each in tasks):
                    self.removing[name] = self._ledger.last_ticket
                else:
                    self._forget(pool, tasks)

    def _forget(self, pool: Pool, tasks: list[Task]) -> None:
        del self.removing[pool.name]
        stranded = {task.spec.id: self._strand(task) for task in tasks}
        stranded |= self._parts.disk_queue.drop(pool.queue)
        for id_, peers in stranded.items():
            self._remember(id_, peers)
        pool.queue.dissolve()
        if pool.halt:
            self._ledger.remember(HALT, pool.name, None)
        del self._state.pools[pool.name]
        self.stranded[pool.name] = count = len(stranded)
        level = "warning" if count else "info"
        self._state.report("pool.removed", level, pool=pool, count=count)
        if any(each.name == pool.name for each in self._state.policy.pools):
            self._find(pool.name)  # the pool is wanted again

    def _remember(self, id_: str, peers: dict[bytes, None]) -> None:
        """Remember the watchers of a stranded task, in case its pool comes back."""
        if peers and len(self._state.stranded) < STRANDED_WATCHED_MAX:
            self._state.stranded[id_] = peers

    def _strand(self, task: Task) -> dict[bytes, None]:
        """Detach a task, which stays in the store; return its watchers."""
        if task.spec.key:
            self._parts.coalescing.leave(task)  # which may queue another task of the key
        assert task.state not in (TaskState.LEASED, TaskState.ENDING), task.state
        task.state = TaskState.ENDING  # so its timers do nothing
        self._parts.retries.strand(task)
        if task.spec.session:
            self._parts.logins.ended(task, None)
        task.lane = task.gate = None
        del self._state.tasks[task.spec.id]
        return dict.fromkeys(peer for peer in (task.peer, *(task.watchers or ())) if peer)


def _unsettled(task: Task) -> bool:
    """Whether a task, or its end, is not on disk yet."""
    return task.early or task.state in (TaskState.NEW, TaskState.ENDING)
