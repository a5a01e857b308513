"""Coalescing: of all live tasks with one key a single one runs, the others get its result.

The first task of a key leads; later tasks join it. A joined task is stored and acknowledged like
any other, waits (state JOINED), and ends when and as the leader ends. A leader that is cancelled or
expires has no result, so the next task takes its place; a joined task that is cancelled or expires
ends alone. The leader is queued at the level of the most urgent task that waits for it. After a
restart the tasks are replayed in the order of their submits, so the same task leads.

Results of leaders are remembered (`Lru`), by name and key:

    recent   how the last leader ended, and the last good result: answers for `cache` and
             `debounce`, each within the time that the submit allows
    good     the last result of tasks that want a fallback: kept over restarts as a fact

A result that began before its key was invalidated goes to the joined tasks and is not remembered.
"""

from msgspec import Struct

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.keys import derived_key
from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    FAILED,
    INVALID_TASK,
    QUEUE_FULL,
    SUCCEEDED,
    Outcome,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.lru import Lru
from musterd.supervisor.core.model.policy import CachePolicy
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Route, Task, TaskState
from musterd.supervisor.core.tasks.leases import Leases

JOINED_MAX = 1000  # per key: all of them end, are written and are delivered in one go
JOINED_FULL_RETRY_NS = 100 * MILLISECOND_NS
GOOD = "good"  # Fact.kind of last good results
GOOD_TTL_NS = 7 * 24 * 3600 * SECOND_NS  # a site that was shut for longer has changed


class Group(Struct):
    """The live tasks of one key."""

    leader: Task
    since_ns: int  # when its first task was submitted; 0: before a restart
    joined: dict[str, Task] = {}  # by id, in the order of their submits
    forget: bool = False  # the key was invalidated after the leader had begun


class Recent(Struct, frozen=True, gc=False):
    """How the last leader of a key ended."""

    last: Outcome
    since_ns: int  # when the key's first task was submitted
    good: Outcome | None
    good_ns: int


class Coalescing:
    def __init__(self, state: State, ledger: Ledger, leases: Leases) -> None:
        self._state = state
        self._ledger = ledger
        self._leases = leases
        cache = state.policy.cache
        self._groups: dict[str, Group] = {}
        self.leaving: dict[str, None] = {}  # new tasks that the store is asked to leave out
        self._recent: Lru[Recent] = Lru(cache.entries, cache.bytes)
        self._good: Lru[bytes] = Lru(cache.entries, cache.bytes, self._forget_fact)

    def follow(self, cache: CachePolicy) -> None:
        """Apply another policy."""
        self._recent.follow(cache.entries, cache.bytes)
        self._good.follow(cache.entries, cache.bytes)

    @property
    def results(self) -> int:
        """Return how many results are remembered."""
        return len(dict.fromkeys(self._recent.names() + self._good.names()))

    # -- a submit -----------------------------------------------------------------------------

    def answer_to(self, spec: TaskSpec, route: Route) -> Outcome | Rejection | None:
        """Return the immediate answer to a submit; None if the task has to run, or to join."""
        group = self._groups.get(spec.key)
        if group is not None and group.leader.spec.name != spec.name:
            leader = group.leader.spec
            return Rejection(
                spec.id,
                INVALID_TASK,
                f"key '{spec.key}' is in use by task '{leader.id}' ({leader.name}) and cannot be "
                f"shared with a '{spec.name}': give each kind of task keys of its own",
            )
        remembered = self._remembered(spec, route, alive=group is not None)
        if remembered is None and group is not None and len(group.joined) >= JOINED_MAX:
            return Rejection(
                spec.id,
                QUEUE_FULL,
                f"'{spec.name}' was not accepted: {JOINED_MAX} tasks wait already for the result "
                f"of key '{spec.key}': submit again later or with wait=True",
                JOINED_FULL_RETRY_NS,
            )
        return remembered

    def _remembered(self, spec: TaskSpec, route: Route, *, alive: bool) -> Outcome | None:
        cache = self._state.policy.cache
        if not cache.enabled or not (spec.cache_ns or spec.debounce_ns):
            return None
        recent = self._recent.get(_name_of(spec))
        if recent is None:
            return None
        now_ns, policy = self._state.now_ns, route.pool.policy
        cache_ns = _age_ns(spec.cache_ns, route.cache_ns, policy.cache_ns)
        if recent.good is not None and now_ns - recent.good_ns < cache_ns:
            return recent.good
        debounce_ns = _age_ns(spec.debounce_ns, route.debounce_ns, policy.debounce_ns)
        if not alive and cache.debounce and recent.since_ns:
            return recent.last if now_ns - recent.since_ns < debounce_ns else None
        return None

    def enter(self, task: Task, since_ns: int) -> None:
        """Let a new task lead its key, or join the leader."""
        spec = task.spec
        group = self._groups.get(spec.key)
        if group is None:
            self._groups[spec.key] = Group(task, since_ns)
            return
        leader = group.leader
        if leader.spec.name != spec.name:
            return  # only after a restart, when no task can be refused: it runs alone
        group.joined[spec.id] = task
        task.follows = leader.spec.id
        if task.priority < leader.priority:
            leader.route.pool.queue.hasten(leader, task.priority)

    def followers(self, task: Task) -> list[Task]:
        """Return the tasks that joined this one."""
        group = self._groups.get(task.spec.key) if task.spec.key else None
        return list(group.joined.values()) if group is not None and group.leader is task else []

    def leave(self, task: Task) -> None:
        """Take out a new task that will never be on disk."""
        group = self._groups.get(task.spec.key) if task.spec.key else None
        if group is not None and group.leader is task:
            self._replace_leader(group)
        elif group is not None:
            group.joined.pop(task.spec.id, None)

    # -- an end -------------------------------------------------------------------------------

    def ended(self, task: Task, outcome: Outcome) -> None:
        """Remember how a task with a key or a fallback ended, and end the tasks that joined it.

        `outcome` is the task's own end: joined tasks decide about a fallback for themselves.
        """
        if outcome.cached:
            return
        group = self._groups.get(task.spec.key) if task.spec.key else None
        if group is not None and group.leader is not task:
            group.joined.pop(task.spec.id, None)
            return
        if outcome.state not in (SUCCEEDED, FAILED):
            if group is not None:
                self._replace_leader(group)
            return
        if group is None or not group.forget:
            self._remember(task, outcome, group)
        if group is not None:
            joined = group.joined
            # A task that may never be on disk cannot end: such tasks wait for a new leader.
            group.joined = {id_: each for id_, each in joined.items() if id_ in self.leaving}
            self._replace_leader(group)
            for id_, each in joined.items():
                if id_ not in self.leaving:
                    self._stop_waiting(each)
                    self._ledger.finish_as(each, outcome)

    def _stop_waiting(self, task: Task) -> None:
        if task.state == TaskState.JOINED:  # else it is on its way to the disk
            task.route.pool.waiting -= 1

    def _replace_leader(self, group: Group) -> None:
        """Let the next task lead, after the leader ended without a result for it."""
        if not group.joined:
            del self._groups[group.leader.spec.key]
            return
        leader = group.leader = group.joined.pop(next(iter(group.joined)))
        leader.follows = ""
        group.forget = False
        for each in group.joined.values():
            each.follows = leader.spec.id
            leader.urged = min(leader.urged, each.priority)
        if leader.state == TaskState.JOINED:
            self._stop_waiting(leader)
            self._leases.enqueue(leader, leader.queued_ns)

    # -- what is remembered -------------------------------------------------------------------

    def _remember(self, task: Task, outcome: Outcome, group: Group | None) -> None:
        if outcome.source or not task.leased_ns:
            return  # a fallback, or a failure before any run
        spec, succeeded = task.spec, outcome.state == SUCCEEDED
        wanted = succeeded and task.wants_fallback
        if group is None and not wanted:
            return
        name = _name_of(spec)
        if group is not None and self._state.policy.cache.enabled:
            recent = Recent(outcome, group.since_ns, outcome, self._state.now_ns)
            if not succeeded:
                former = self._recent.get(name)
                good, good_ns = (former.good, former.good_ns) if former else (None, 0)
                recent = Recent(outcome, group.since_ns, good, good_ns)
            self._recent.put(name, recent, _size(recent))
        if wanted:
            if self._good.put(name, outcome.value, len(outcome.value)):
                self._ledger.remember(GOOD, name, outcome.value, ttl_ns=GOOD_TTL_NS)
            else:
                self._forget_fact(name)

    def _forget_fact(self, name: str) -> None:
        self._ledger.remember(GOOD, name, None)

    def good(self, spec: TaskSpec) -> bytes | None:
        """Return the last good result of such a task, however old; None if there is none."""
        name = _name_of(spec)
        value = self._good.get(name)
        if value is not None or not spec.key:
            return value
        recent = self._recent.get(name)
        return recent.good.value if recent is not None and recent.good is not None else None

    def recovered(self, facts: list[tuple[str, bytes]]) -> None:
        """Take the last good results that the store held."""
        for name, value in facts:
            if not self._good.put(name, value, len(value)):
                self._forget_fact(name)

    def invalidate(self, event: events.InvalidateRequested) -> None:
        """Forget the results of a key, or of all keys with that prefix."""
        for lru in (self._recent, self._good):
            for name in lru.names():
                if _matches(name.partition(" ")[2], event):
                    lru.drop(name)
        keys = list(self._groups) if event.prefix else [event.key]
        for key in keys:
            group = self._groups.get(key)
            if group is not None and group.leader.leased_ns and _matches(key, event):
                group.forget = True

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        grouped: dict[str, None] = {}
        for key, group in self._groups.items():
            leader = group.leader
            assert leader.outcome is None and not leader.follows, leader.spec.id
            assert len(group.joined) <= JOINED_MAX, key
            for task in (leader, *group.joined.values()):
                assert self._state.tasks[task.spec.id] is task, task.spec.id
                assert (task.spec.key, task.spec.name) == (key, leader.spec.name), task.spec.id
                assert leader.priority <= task.priority, (key, leader.priority, task.priority)
                grouped[task.spec.id] = None
            for task in group.joined.values():
                assert task.follows == leader.spec.id, task.spec.id
                assert task.state in (TaskState.NEW, TaskState.JOINED), task.spec.id
        for task in self._state.tasks.values():
            assert task.state != TaskState.JOINED or task.spec.id in grouped, task.spec.id


def _age_ns(asked_ns: int, declared_ns: int, of_pool_ns: int) -> int:
    """Return how old a result may be: as the submit says, else the task, else the pool."""
    if asked_ns != AS_CONFIGURED:
        return asked_ns
    return declared_ns if declared_ns > 0 else of_pool_ns


def _name_of(spec: TaskSpec) -> str:
    """Return the name under which results are remembered. A task's name has no space."""
    key = spec.key or derived_key(spec.name, spec.args + spec.session.encode())
    return f"{spec.name} {key}"


def _matches(key: str, event: events.InvalidateRequested) -> bool:
    return key.startswith(event.key) if event.prefix else key == event.key


def _size(recent: Recent) -> int:
    size = 0
    for outcome in (recent.last, recent.good):
        if outcome is not None:
            size += len(outcome.value)
            failure = outcome.failure
            if failure is not None:
                size += len(failure.message) + len(failure.traceback)
        if recent.last is recent.good:
            break
    return size
