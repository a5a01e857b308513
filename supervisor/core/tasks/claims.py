"""Claims: attempts of tasks that the cluster's engine grants to this node.

The engine (supervisor/cluster/engine.py) decides what nodes share: order, sites, keys, retries. The
cluster sidecar speaks to it. Here is decided how much this node wants, what a grant becomes, and
what is told of its end.

    want    a clustered pool wants one attempt for each free worker, or WANT_NS of work for each if
            its tasks are tiny. One want per pool is open; a newer one replaces it.
    grant   an attempt becomes a task that is nowhere on disk, with no site, no key and no retries.
    end     is kept until the sidecar has confirmed it. What the end means is the engine's decision;
            this node says what happened and, after a failure, when to try again.

An attempt that nobody here has begun after HOLD_NS goes back: another node may be free.

The lease of the node is a time by the machine's own clock. When it is over, the engine may have
given the attempts to others: nothing begins any more, and what has not begun goes back. What runs
goes on, because its result counts if the node turns out to be a member still; `fence_stops`
interrupts it instead. A node that gets another tenure has lost all its attempts for sure: they are
interrupted, and nobody is told of their ends.

Tasks of the cluster are in `State.tasks` under a key that no id can be: after a loss the engine may
grant a task again to the node that still runs it.
"""

from msgspec import Struct, structs

from musterd.ipc.resilience.backoff import pause_ns
from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import (
    CANCEL,
    CANCELLED,
    CRASH,
    FAILED,
    NOT_GIVEN,
    Completion,
    Failure,
    TaskDeclaration,
    View,
)
from musterd.ipc.wire.node_messages import (
    Attempt,
    AttemptEnd,
    AttemptProgress,
    EndKind,
    Held,
    PoolCard,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    GreetCluster,
    ShowPools,
    TellCluster,
    WantAttempts,
)
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.queue import CLAIMED_LANE, TINY_NS, UNKNOWN_COST_NS
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Mark, Route, Task, TaskState
from musterd.supervisor.core.tasks.cluster_rules import ClusterRules
from musterd.supervisor.core.tasks.leases import WINDOW_MAX, Leases

WANT_NS = 20 * MILLISECOND_NS  # of tiny tasks for each worker: an answer takes as long
HOLD_NS = 200 * MILLISECOND_NS  # an attempt waits here for a worker; ten times what is wanted
COST_SMOOTHING = 8  # a run moves the estimate of the pool's tasks by this part of the difference
CLAIMED_BYTES_MAX = 32 * 1024 * 1024  # in memory; beyond it a pool wants one attempt per worker
# Ends that nobody has confirmed, because the engine is away. Beyond these nothing is wanted; what
# runs by then is a task for each worker.
UNCONFIRMED_MAX = 10_000
UNCONFIRMED_BYTES_MAX = 64 * 1024 * 1024
END_BYTES = 512  # of an end in memory besides its value and error

RESULTS = ("succeeded", "failed")  # kinds of ends that a worker has worked for
NEVER_NS = 2**63

_NOTHING = ShowPools(())


class Feed(Struct):
    """What one pool gets from the cluster."""

    want: WantAttempts | None = None  # the open one
    cost_ns: int = UNKNOWN_COST_NS  # of a run, smoothed over all its tasks
    looking: bool = False  # a look at what waits for too long is due
    declared: dict[str, TaskDeclaration] | None = None  # whose names the open want has


class Claims:
    def __init__(self, state: State, leases: Leases) -> None:
        self._state = state
        self._leases = leases
        self.rules = ClusterRules(state)
        self._claimed = state.claimed
        self._feeds: dict[str, Feed] = {}
        self._connected = False
        self._tenure = 0
        self._was_member = False
        self._until_ns = 0  # the end of the lease
        self._expiry_ns = NEVER_NS  # the soonest of the attempts that are here
        self._draining = False
        self._away = False
        self._requests = 0
        self._seen: dict[str, int] = {}  # by pool: attempts that came over this connection
        self._shown = _NOTHING
        self._unconfirmed: dict[str, AttemptEnd] = {}  # by key
        self._unconfirmed_bytes = 0
        self._ends: list[AttemptEnd] = []  # of this event
        self._begun: list[Held] = []
        self._marks: list[AttemptProgress] = []
        self.fenced = 0  # results that this node has dropped: they do not count any more
        self.awake = False  # whether there is anything to do for the cluster
        self.follow()

    @property
    def settled(self) -> bool:
        """Whether nothing waits for the cluster, or nobody is there who could be waited for."""
        return not self._unconfirmed or not self._connected

    @property
    def away(self) -> bool:
        """Whether the engine does not answer, as far as is known."""
        return self._away or not self._tenure

    @property
    def unconfirmed(self) -> int:
        """Return how many ends nobody has confirmed."""
        return len(self._unconfirmed)

    def cost_ns(self, pool: str) -> int:
        """Return the measured run time of a pool's tasks; UNKNOWN_COST_NS if none has ended."""
        feed = self._feeds.get(pool)
        return feed.cost_ns if feed is not None else UNKNOWN_COST_NS

    def follow(self) -> None:
        """Take over a changed policy."""
        clustered = [each.name for each in self._state.policy.pools if each.clustered]
        for name, feed in self._feeds.items():
            if name not in clustered and feed.want is not None:
                self._requests += 1
                nothing = WantAttempts(self._requests, name, 0, (), self._seen.get(name, 0))
                self._state.out.append(nothing)
        self._feeds = {name: self._feeds.get(name) or Feed() for name in clustered}
        shares = clustered or self._state.policy.cluster
        self.awake = bool(shares or self._claimed or self._unconfirmed)
        self.rules.compare()

    # -- around each event --------------------------------------------------------------------

    def before_dispatch(self) -> None:
        """Give back what must not begin. Timers may be late: the daemon may have been stopped."""
        if not self._claimed:
            return
        now_ns = self._state.now_ns
        if now_ns >= self._expiry_ns:
            self._expire()
        for pool in self._state.pools.values():
            if _queued(pool) and not self._may_begin(pool, now_ns):
                self._give_back(pool, now_ns)

    def _expire(self) -> None:
        expiries = [NEVER_NS]
        for task in list(self._claimed.values()):
            if task.state == TaskState.QUEUED and self._leases.expired(task):
                self._leases.withdraw(task, CANCELLED)
            elif task.expires_at_ns > self._state.now_ns:
                expiries.append(task.expires_at_ns)
        self._expiry_ns = min(expiries)

    def _may_begin(self, pool: Pool, now_ns: int) -> bool:
        return (
            now_ns < self._until_ns
            and self._state.intake_open
            and pool.is_open
            and not pool.halt
            and pool.name in self._feeds
        )

    def _give_back(self, pool: Pool, until_ns: int) -> None:
        """Give back the attempts that were queued by then."""
        for task in list(self._claimed.values()):
            queued = task.state == TaskState.QUEUED and task.route.pool is pool
            if queued and task.queued_ns <= until_ns:
                self._leases.withdraw(task, CANCELLED)

    def after_dispatch(self) -> None:
        """Tell the cluster what this event has brought, and want what there is room for."""
        if self._ends or self._begun or self._marks:
            if self._connected:
                self._state.out.append(TellCluster(self._ends, self._begun, self._marks))
            self._ends, self._begun, self._marks = [], [], []
        if self._connected:
            self._show_pools()
        for name, feed in self._feeds.items():
            pool = self._state.pools.get(name)
            if pool is not None:
                if self._connected:
                    self._want(pool, feed)
                if not feed.looking and _queued(pool):
                    feed.looking = True
                    self._state.timers.at(self._state.now_ns + HOLD_NS, self._look, name)

    def _look(self, name: str) -> None:
        """Give back what has waited for too long: it was wanted for workers that are busy."""
        feed, pool = self._feeds.get(name), self._state.pools.get(name)
        if feed is None or pool is None:
            return
        feed.looking = False
        held = len(self._claimed)
        self._give_back(pool, self._state.now_ns - HOLD_NS)
        if len(self._claimed) < held:
            feed.cost_ns = UNKNOWN_COST_NS  # they are not as tiny as they were

    # -- wanting ------------------------------------------------------------------------------

    def _want(self, pool: Pool, feed: Feed) -> None:
        room, whole = self._room(pool, feed)
        open_ = feed.want.count if feed.want is not None else 0
        renamed = feed.declared is not pool.declarations  # its code has other tasks, maybe
        if room == open_ and not (renamed and open_):
            return
        if room > open_ and not (renamed and open_):
            idle = any(not slot.leases for slot in pool.free_slots)
            step = max(1, whole // 4) if open_ or not idle else 1
            if room - open_ < step:
                return  # not worth a question
        self._requests += 1
        names = tuple(f"{pool.name}.{method}" for method in pool.declarations or ())
        feed.declared = pool.declarations
        seen = self._seen.get(pool.name, 0)
        want = WantAttempts(self._requests, pool.name, room, names, seen)
        feed.want = want if room else None
        self._state.out.append(want)

    def _room(self, pool: Pool, feed: Feed) -> tuple[int, int]:
        """Return how many more attempts the pool has room for, and for how many in all."""
        now_ns = self._state.now_ns
        full = (
            len(self._unconfirmed) >= UNCONFIRMED_MAX
            or self._unconfirmed_bytes >= UNCONFIRMED_BYTES_MAX
        )
        knows = self.rules.known and pool.declarations
        if full or self._draining or not knows or not self._may_begin(pool, now_ns):
            return 0, 0
        window = 1
        if feed.cost_ns <= TINY_NS and pool.queue.bytes < CLAIMED_BYTES_MAX:
            window = min(WINDOW_MAX, WANT_NS // feed.cost_ns)
        room = whole = 0
        for slot in pool.slots:
            if slot.state != SlotState.RUNNING or slot.halt or slot.killed_for or slot.spent:
                continue
            places = min(slot.width if pool.width > 1 else window, slot.tasks_left)
            whole += places
            room += max(0, places - len(slot.leases))
        return max(0, room - pool.queue.size), whole

    def _show_pools(self) -> None:
        cards = tuple(
            PoolCard(
                pool.name,
                pool.size * pool.width,
                tuple(pool.declarations.values()),
                pool.policy.queue_size,
                pool.policy.aging_ns,
                pool.policy.max_crashes,
                pool.policy.cache_ns,
                pool.policy.debounce_ns,
            )
            for pool in map(self._state.pools.get, self._feeds)
            if pool is not None and pool.is_open and pool.declarations is not None
        )
        local = tuple(
            pool.name
            for pool in self._state.pools.values()
            if pool.is_open and pool.name not in self._feeds
        )
        shown = ShowPools(cards, local)
        if shown != self._shown:
            self._shown = shown
            self._state.out.append(shown)

    # -- the sidecar and the engine -------------------------------------------------------------

    def connected(self, _event: events.ClusterConnected) -> None:
        self.disconnected(None)
        self._connected = True
        held = [_held(task) for task in self._claimed.values() if not _lost(task)]
        unconfirmed = len(self._unconfirmed)
        self._state.out.append(GreetCluster(self._tenure, held, unconfirmed, self._was_member))
        self._ends = list(self._unconfirmed.values())
        self._begun = [
            _held(task)
            for task in self._claimed.values()
            if task.begun_recorded and not _lost(task)
        ]

    def disconnected(self, _event: events.ClusterDisconnected | None) -> None:
        """Forget what was under way: what the sidecar was granted and did not tell goes back."""
        self._connected = False
        self._shown = _NOTHING
        self._seen = {}
        for feed in self._feeds.values():
            feed.want = None

    def membership(self, event: events.MembershipTold) -> None:
        if event.tenure != self._tenure:
            self._lose_all()
            self._tenure = event.tenure
            self._was_member = True
        self._away = event.away
        self._draining = event.draining
        self.rules.named(event.policy)
        if event.until_ns > self._until_ns:
            self._until_ns = event.until_ns
            self._state.timers.at(event.until_ns, self._lease_over, event.until_ns)
        self._until_ns = event.until_ns

    def _lose_all(self) -> None:
        lost = [task for task in self._claimed.values() if not _lost(task)]
        if lost or self._unconfirmed:
            count = len(lost) + len(self._unconfirmed)
            why = f"its lease was over: {count} attempts do not count, and run again elsewhere"
            self._state.report("cluster.fenced", "warning", reason=why, count=count)
        self.fenced += sum(end.kind in RESULTS for end in self._unconfirmed.values())
        self._unconfirmed.clear()
        self._unconfirmed_bytes = 0
        self._ends = []
        for task in lost:
            self._lose(task)

    def _lease_over(self, until_ns: int) -> None:
        """Stop what has not begun; before_dispatch() gives back what waits here."""
        if until_ns != self._until_ns or not self._claimed:
            return
        why = f"the lease is over: nothing begins; {len(self._claimed)} attempts are here"
        self._state.report("cluster.lease_over", "warning", reason=why)
        slots = {task.slot: None for task in self._claimed.values() if task.slot is not None}
        for slot in slots:
            if slot.width == 1:
                slot.pool.free_slots.pop(slot, None)
                self._leases.recall(slot)
        if self._state.policy.fence_stops:
            for task in list(self._claimed.values()):
                if task.slot is not None:
                    self._stop(task)

    def _stop(self, task: Task) -> None:
        if not task.cancelled:
            task.cancelled = True
            if task.slot is not None:
                self._leases.interrupt(task)
            else:
                self._leases.withdraw(task, CANCELLED)

    def _lose(self, task: Task) -> None:
        assert task.claim is not None
        task.claim.lost = True
        self._stop(task)

    def cancelled(self, event: events.AttemptsCancelled) -> None:
        for task in self._found(event.held):
            self._stop(task)

    def lost(self, event: events.AttemptsLost) -> None:
        for task in self._found(event.held):
            self._lose(task)
        self.confirmed(events.EndsConfirmed(event.held))

    def _found(self, held: list[Held]) -> list[Task]:
        found = [self._claimed.get(_key(each.id, each.claim)) for each in held]
        return [task for task in found if task is not None]

    def confirmed(self, event: events.EndsConfirmed) -> None:
        for each in event.held:
            end = self._unconfirmed.pop(_key(each.id, each.claim), None)
            if end is not None:
                self._unconfirmed_bytes -= end.size + END_BYTES

    # -- grants -------------------------------------------------------------------------------

    def granted(self, event: events.AttemptsGranted) -> None:
        feed = self._feeds.get(event.pool)
        self._seen[event.pool] = self._seen.get(event.pool, 0) + len(event.attempts)
        if feed is not None and feed.want is not None and feed.want.request == event.request:
            feed.want = None
        pool = self._state.pools.get(event.pool)
        for attempt in event.attempts:
            key = _key(attempt.spec.id, attempt.claim)
            if key in self._claimed or key in self._unconfirmed:
                continue  # told twice
            route = pool.route(attempt.spec.name) if pool is not None else None
            if route is None:  # the pool is gone, or its new code lacks the task
                self._note(key, AttemptEnd(attempt.spec.id, attempt.claim, "untouched"))
            else:
                self._begin(key, attempt, route)

    def _begin(self, key: str, attempt: Attempt, route: Route) -> None:
        spec, claim = self.rules.resolve(attempt, route)
        task = Task(
            0,
            spec,
            route,
            0,
            b"",
            attempt=attempt.attempt - 1,
            crashes=attempt.crashes,
            interruptions=attempt.interruptions,
            expires_at_ns=attempt.expires_at_ns,
            # What interrupted it may have been a crash beside others (endings.py).
            alone=attempt.interruptions > 0,
            claim=claim,
        )
        self._state.tasks[key] = self._claimed[key] = task
        self.awake = True
        route.pool.enter(spec)
        if task.expires_at_ns:
            self._expiry_ns = min(self._expiry_ns, task.expires_at_ns)
        self._leases.enqueue_claimed(task)

    # -- ends ---------------------------------------------------------------------------------

    def begun(self, task: Task) -> None:
        if not _lost(task):
            self._begun.append(_held(task))

    def progressed(self, task: Task, mark: Mark) -> None:
        if not _lost(task):
            self._marks.append(AttemptProgress(task.spec.id, mark.fraction, mark.text))

    def succeeded(self, task: Task, completion: Completion) -> None:
        pool = task.route.pool
        pool.counters.succeeded += 1
        feed, run_ns = self._feeds.get(pool.name), max(1, completion.run_ns)
        if feed is not None:
            cost_ns = feed.cost_ns
            unknown = cost_ns == UNKNOWN_COST_NS
            feed.cost_ns = run_ns if unknown else cost_ns + (run_ns - cost_ns) // COST_SMOOTHING
            feed.cost_ns = max(1, feed.cost_ns)
        self._end(
            task,
            "succeeded",
            value=completion.value,
            run_ns=completion.run_ns,
            clears=completion.clears,
            view=completion.view,
        )

    def failed(
        self, task: Task, failure: Failure, delay_ns: int, run_ns: int, *, may_help: bool
    ) -> None:
        """Tell of a failure, and when to try again: a negative `delay_ns` means as the policy."""
        counters = task.route.pool.counters
        if not may_help or task.attempt > task.max_retries:
            counters.failed += 1
            self._report_dead(task, failure)
            self._end(task, "failed", failure=failure, run_ns=run_ns)
            return
        backoff = task.backoff
        if delay_ns < 0:
            pause = pause_ns(backoff, task.attempt, self._state.rng)
            delay_ns = max(pause, failure.retry_after_ns)
        counters.retried += 1
        left = max(1, task.max_retries - task.attempt + 1)
        self._state.report(
            "task.retry",
            "info",
            pool=task.route.pool,
            task=task,
            seconds=delay_ns / SECOND_NS,
            reason=f"{failure.type or failure.kind}: {failure.message}",
            traceback=failure.traceback,
        )
        self._end(
            task,
            "failed",
            failure=failure,
            run_ns=run_ns,
            retry_ns=delay_ns,
            patience_ns=left * backoff.max_ns,
        )

    def _report_dead(self, task: Task, failure: Failure) -> None:
        """Report that no attempt follows; whether there is a fallback, the engine knows."""
        assert task.claim is not None
        if not task.claim.lost:
            falls_back = task.claim.falls_back
            what = ("task.fallback", "warning") if falls_back else ("task.dead", "error")
            why = f"{failure.type or failure.kind}: {failure.message}"
            pool, trace = task.route.pool, failure.traceback
            self._state.report(*what, pool=pool, task=task, reason=why, traceback=trace)

    def interrupted(self, task: Task, why: str) -> None:
        self._state.report("task.interrupted", pool=task.route.pool, task=task, reason=why)
        self._end(task, "interrupted")

    def crashed(self, task: Task, slot: Slot, how: str) -> None:
        most = task.route.pool.policy.max_crashes
        if task.crashes >= most:
            why = f"it crashed its worker {task.crashes} times"
            pool = task.route.pool
            self._state.report("task.quarantined", "error", pool=pool, task=task, reason=why)
        else:
            why = f"its worker {how}: loss {task.crashes} of {most}, then it is quarantined"
            self._state.report("task.crashed", "warning", slot=slot, task=task, reason=why)
        self._end(task, "crashed", failure=Failure(CRASH, message=f"its worker {how}"))

    def ended(self, task: Task, state: str, failure: Failure | None, run_ns: int) -> None:
        """Tell of an attempt that ended in another way: cancelled, expired or withdrawn.

        The engine knows whether its task was cancelled or has expired.
        """
        assert task.claim is not None
        if state == FAILED or (failure is not None and failure.kind != CANCEL):
            self._end(task, "failed", failure=failure, run_ns=run_ns)
        elif task.attempt == task.claim.attempt:
            self._end(task, "interrupted")
        else:
            self._end(task, "untouched")

    def _end(
        self,
        task: Task,
        kind: EndKind,
        *,
        value: bytes = b"",
        failure: Failure | None = None,
        run_ns: int = 0,
        retry_ns: int = NOT_GIVEN,
        patience_ns: int = 0,
        clears: str = "",
        view: View | None = None,
    ) -> None:
        claim, spec = task.claim, task.spec
        assert claim is not None and task.slot is None, spec.id
        key = _key(spec.id, claim.number)
        del self._claimed[key]
        del self._state.tasks[key]
        task.state = TaskState.ENDING  # so its timers do nothing
        task.route.pool.leave(spec)
        if claim.lost:
            self.fenced += kind in RESULTS
        else:
            keeps = claim.keeps and kind == "succeeded"
            end = AttemptEnd(spec.id, claim.number, kind, value, failure)
            end = structs.replace(
                end,
                run_ns=run_ns,
                retry_ns=retry_ns,
                patience_ns=patience_ns,
                clears=clears,
                keeps=keeps,
                view=view,
                login=claim.login,
            )
            self._note(key, end)

    def _note(self, key: str, end: AttemptEnd) -> None:
        self.awake = True  # though no pool may be clustered any more
        self._unconfirmed[key] = end
        self._unconfirmed_bytes += end.size + END_BYTES
        self._ends.append(end)

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        tasks = {key: task for key, task in self._state.tasks.items() if task.claim is not None}
        assert tasks == self._claimed, (list(tasks), list(self._claimed))
        assert not tasks.keys() & self._unconfirmed.keys()
        for key, task in tasks.items():
            assert task.claim is not None and task.gate is None and not task.peer, key
            assert key == _key(task.spec.id, task.claim.number), key
            assert task.state in (TaskState.QUEUED, TaskState.LEASED), (key, task.state)
        sizes = sum(end.size + END_BYTES for end in self._unconfirmed.values())
        assert self._unconfirmed_bytes == sizes, (self._unconfirmed_bytes, sizes)
        assert self.awake or not (tasks or self._unconfirmed)


def _queued(pool: Pool) -> bool:
    """Whether attempts of the cluster wait here."""
    for level in pool.queue.levels:
        lane = level.lanes.get(CLAIMED_LANE)
        if lane is not None and lane.alive:
            return True
    return False


def _key(id_: str, claim: int) -> str:
    """Return the key of an attempt: longer than any id, so it is no task's id."""
    return f"{claim:065x} {id_}"


def _held(task: Task) -> Held:
    assert task.claim is not None
    return Held(task.spec.id, task.claim.number)


def _lost(task: Task) -> bool:
    return task.claim is not None and task.claim.lost
