"""Another policy while the fleet runs: what is new is taken over, nothing is lost.

    a pool that is new        its tasks that the store may hold are read back, page by page; then it
                              takes new ones and starts
    a pool that is gone       takes nothing any more and drains; what it has not begun stays in the
                              store (*stranded*) and is forgotten here
    another size              scales
    another build             rolls (core/workers/rolling.py)
    anything else             holds from here on

A pool that comes back before it is gone stays. The shell has checked the policy as a whole.
"""

from msgspec import Struct

from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    FindStranded,
    LookUp,
    Report,
    StopForkServer,
    TellMissing,
)
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.policy import PoolPolicy
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.core.tasks.coalescing import Coalescing
from musterd.supervisor.core.tasks.gatekeeper import Gatekeeper
from musterd.supervisor.core.tasks.intake import Intake, Late
from musterd.supervisor.core.tasks.pauses import FACT as HALT
from musterd.supervisor.core.tasks.retries import Retries
from musterd.supervisor.core.tasks.schedules import Schedules
from musterd.supervisor.core.workers.autoscale import Autoscale
from musterd.supervisor.core.workers.lifecycle import WorkerLifecycle
from musterd.supervisor.core.workers.pressure import Governor
from musterd.supervisor.core.workers.sidecar import Sidecars

STRANDED_WATCHED_MAX = 100_000  # stranded tasks of which it is remembered who waits for them


class Parts(Struct, frozen=True):
    """Those that take something over."""

    ledger: Ledger
    intake: Intake
    coalescing: Coalescing
    keeper: Gatekeeper
    disk_queue: DiskQueue
    lifecycle: WorkerLifecycle
    schedules: Schedules
    autoscale: Autoscale
    governor: Governor
    retries: Retries
    sidecars: Sidecars


class Reload:
    def __init__(self, state: State, parts: Parts) -> None:
        self._state = state
        self._ledger = parts.ledger
        self._parts = parts
        self.stranded: dict[str, int] = {}  # pools that are gone, and what they left in the store
        self._requests = 0
        self._asked: dict[str, FindStranded] = {}  # the last question that was put about a pool
        self._late: dict[str, Late] = {}  # of pools that arrive: what may end at once
        self.removing: dict[str, int] = {}  # pools, and the ticket to wait for; 0: not known yet

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
        parts.sidecars.follow()
        parts.schedules.follow(policy.schedules)
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
                found.follow(each)  # asked for again as soon as it is gone
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

    # -- pools that come ----------------------------------------------------------------------

    def _find(self, name: str, after_seq: int = 0) -> None:
        """Ask for its tasks when all that was noted of it is on disk. An answer that does not come,
        because the store cannot be read, is asked for again by the next reload."""
        self._requests += 1
        self._asked[name] = question = FindStranded(name, self._requests, after_seq)
        self._ledger.tell(question)

    def _hurry(self, pool: Pool, policy: PoolPolicy) -> None:
        """It is on its way already."""
        pool.follow(policy)
        self._find(pool.name, self._asked[pool.name].after_seq)

    def stranded_found(self, event: events.StrandedFound) -> None:
        """A page of the tasks of a pool; after the last one it is open."""
        state, parts, name = self._state, self._parts, event.pool
        asked = self._asked.get(name)
        if asked is None or asked.request != event.request or not state.intake_open:
            return  # another question was put since, or it is not wanted any more
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
        self._report("pool.added", pool, count=self.stranded.pop(name))
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
            elif pool in state.pools:  # it came back and the task ended, all in a moment
                state.out.append(LookUp(event.peer, [id_]))
            elif len(state.stranded) < STRANDED_WATCHED_MAX:
                state.stranded.setdefault(id_, {})[event.peer] = None

    # -- pools that go ------------------------------------------------------------------------

    def _remove(self, pool: Pool) -> None:
        for _, task in self._late.pop(pool.name, ()):  # never admitted, so nothing holds them
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
            elif slot in pool.everyone:  # else it went with the one before it
                lifecycle.stop(slot, within_ns=self._state.policy.drain_timeout_ns)

    def advance(self) -> None:
        """After every event: forget the pools that are drained and on disk."""
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
        self._report("pool.removed", pool, level="warning" if count else "info", count=count)
        if any(each.name == pool.name for each in self._state.policy.pools):
            self._find(pool.name)  # it was wanted again, before all of it was there

    def _remember(self, id_: str, peers: dict[bytes, None]) -> None:
        """Who is told if the task's pool comes back."""
        if peers and len(self._state.stranded) < STRANDED_WATCHED_MAX:
            self._state.stranded[id_] = peers

    def _strand(self, task: Task) -> dict[bytes, None]:
        """It stays in the store. Who waits for it."""
        if task.spec.key:
            self._parts.coalescing.leave(task)  # which may queue another one of the key
        assert task.state not in (TaskState.LEASED, TaskState.ENDING), task.state
        task.state = TaskState.ENDING  # for its timers: there is nothing to be done any more
        self._parts.retries.strand(task)
        task.lane = task.gate = None
        del self._state.tasks[task.spec.id]
        return dict.fromkeys(peer for peer in (task.peer, *(task.watchers or ())) if peer)

    def _report(self, event: str, pool: Pool, *, level: str = "info", count: int) -> None:
        self._state.out.append(Report(event, level, pool=pool.name, count=count))


def _unsettled(task: Task) -> bool:
    """Whether the disk has still to hear of it, or of its end."""
    return task.early or task.state in (TaskState.NEW, TaskState.ENDING)
