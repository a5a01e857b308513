"""Gates: what holds the tasks of one site back, and lets them go on again.

A gate stands before every lane that has a target, a resilience class or a session. The gate is
closed while the site's breaker is open, its rate is used up, or no place is free in the site's
bulkhead, in that of the class or in the session. A lane that comes to the head of its ring before a
closed gate leaves the ring for the gate's waiting lanes and returns when something has changed:
nothing polls it meanwhile.

    closed because of      who comes back
    breaker, rate          all lanes of the gate, by a timer or when the breaker changes
    bulkhead               one lane per pool for each place that becomes free, highest level first;
                           if that lane turns out empty, the next one
    session                the same, but pools take turns, and each AGING_TURN-th place goes to the
                           task that waits for longest: with one place, order is all there is.
                           While a login task is awaited, it alone; while too many logins have
                           failed, nobody: such tasks end (core/tasks/logins.py)

A lease enters the gate and must leave it exactly once, whatever becomes of the attempt (`leave`).
The verdict says what the attempt tells about the site: only WELL and UNWELL count for the breaker,
and the retries of one task count once.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from musterd.ipc.resilience.breaker import Breaker, BreakerState
from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.ipc.wire.messages import LOW, NOT_GIVEN, Failure
from musterd.supervisor.core.model.limits import (
    AGING_TURN,
    Bulkhead,
    RetryBudget,
    TokenBucket,
)
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy

if TYPE_CHECKING:
    from random import Random

    from musterd.supervisor.core.model.lanes import Lane
    from musterd.supervisor.core.model.queue import PoolQueue
    from musterd.supervisor.core.model.task import Task


NO_SITE = TargetPolicy()


class Verdict(Enum):
    """What an attempt says about its site."""

    WELL = 1
    UNWELL = 2
    NOTHING = 3  # the worker died, the task was cancelled, its arguments were wrong, ...


class WaitingLanes:
    """Lanes that wait for one thing, by pool and level."""

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        self._lanes: dict[PoolQueue, list[dict[Lane, None]]] = {}

    def add(self, lane: Lane) -> None:
        queue = lane.level.queue
        levels = self._lanes.get(queue)
        if levels is None:
            levels = self._lanes[queue] = [{} for _ in queue.levels]
        levels[lane.level.number][lane] = None
        lane.waits_among = self

    def remove(self, lane: Lane) -> None:
        """Remove a lane that is forgotten, or goes back to its ring."""
        queue = lane.level.queue
        levels = self._lanes[queue]
        del levels[lane.level.number][lane]
        lane.waits_among = None
        if not any(levels):
            del self._lanes[queue]

    def wake_next(self, queue: PoolQueue) -> None:
        """Let the most urgent lane of this pool go on that waits for longest."""
        for lanes in self._lanes.get(queue, ()):
            for lane in lanes:
                self.wake(lane)
                return

    def wake(self, lane: Lane) -> None:
        self.remove(lane)
        lane.woken_from = self
        lane.level.list_again(lane)

    def wake_one_each(self) -> None:
        """Wake one lane of each pool for a free place: the first pool with a worker gets it."""
        for queue in list(self._lanes):
            self.wake_next(queue)

    def most_urgent(self) -> list[Lane]:
        """Return the lane of each pool that wake_next() would wake."""
        return [next(lane for lanes in levels for lane in lanes) for levels in self._lanes.values()]

    def longest(self) -> Lane:
        """Return the lane whose first task waits for longest, of all pools and levels."""
        lanes = [next(iter(lanes)) for each in self._lanes.values() for lanes in each if lanes]
        return min(lanes, key=lambda lane: lane.since_ns)

    def wake_all(self, *, logins_only: bool = False) -> None:
        for levels in list(self._lanes.values()):
            for lanes in levels:
                for lane in [each for each in lanes if each.logs_in or not logins_only]:
                    self.remove(lane)
                    lane.level.list_again(lane)

    @property
    def tasks(self) -> int:
        """Return how many tasks wait in these lanes."""
        return sum(
            lane.alive for levels in self._lanes.values() for lanes in levels for lane in lanes
        )

    def __len__(self) -> int:
        return sum(len(lanes) for levels in self._lanes.values() for lanes in levels)


class Places:
    """A bulkhead and the lanes that wait for a place in it."""

    __slots__ = ("bulkhead", "waiting")

    def __init__(self, bulkhead: Bulkhead) -> None:
        self.bulkhead = bulkhead
        self.waiting = WaitingLanes()

    def leave(self) -> None:
        self.bulkhead.leave()
        self.waiting.wake_one_each()


class SessionPlaces(Places):
    """The tasks that may use one session at once, and the lanes that wait for their turn.

    A place that becomes free is offered twice. First to other pools than the last one, or in some
    turns to the task that waits for longest; after the dispatch, where nobody took the place (no
    worker was free), to all.

    The breaker counts logins that fail: only `core/tasks/logins.py` tells it of any.
    """

    __slots__ = (
        *("_chosen", "_last", "_offered", "_turn", "breaker", "lanes", "login", "logins", "name"),
        *("problem", "round", "wanting"),
    )

    def __init__(
        self,
        name: str,
        bulkhead: Bulkhead,
        breaker: BreakerPolicy,
        offered: dict[SessionPlaces, None],
    ) -> None:
        super().__init__(bulkhead)
        self.name = name
        self.breaker = Breaker(breaker)
        self.round = 0  # half-open rounds so far: a probe counts in its own round only
        self.problem = ""  # why the last login failed
        self.lanes: dict[Lane, None] = {}  # in all pools, waiting or not
        self.login = ""  # the login task that all other tasks of the session wait for
        self.logins = 0  # login tasks that have succeeded so far
        self.wanting: dict[str, None] = {}  # tasks that go on after that login
        self._offered = offered  # places to be offered once more when the event is over
        self._chosen: list[Lane] = []  # the lanes to which the place is offered first
        self._last: PoolQueue | None = None
        self._turn = 0

    def admits(self, lane: Lane, now_ns: int) -> bool:
        if not self.bulkhead.free or (self.login and not lane.logs_in):
            return False
        if self._chosen and lane not in self._chosen:
            return False
        before = self.breaker.state
        admitted = self.breaker.admits(now_ns)
        self.round += self.breaker.state != before
        return admitted

    def is_held(self, now_ns: int) -> bool:
        """Whether too many logins have failed for another one to be tried yet."""
        return self.breaker.state == BreakerState.OPEN and now_ns < self.breaker.open_until_ns

    def enter(self, task: Task) -> None:
        self.bulkhead.enter()
        self._last = task.route.pool.queue
        task.login_probe = self.round if self.breaker.begin() else 0
        task.login_seen = self.logins

    def forget_probe(self, task: Task) -> None:
        if task.login_probe and task.login_probe == self.round:
            self.breaker.forget(probe=True)
        task.login_probe = 0

    def tell(self, task: Task, now_ns: int, rng: Random, *, ok: bool) -> None:
        """Count a login that worked, or did not."""
        probe = task.login_probe != 0 and task.login_probe == self.round
        task.login_probe = 0
        self.breaker.record(now_ns, rng, ok=ok, probe=probe)
        if probe:
            self.waiting.wake_all()

    def end_login(self) -> None:
        """Let other tasks in again: the login task has ended."""
        self.login = ""
        self.waiting.wake_all()

    def leave_by(self, task: Task) -> None:
        self.forget_probe(task)
        self.leave()

    def leave(self) -> None:
        self.bulkhead.leave()
        waiting = self.waiting
        if not waiting or not self.bulkhead.free:
            return
        if self.login:
            waiting.wake_all(logins_only=True)
            return
        self._turn = (self._turn + 1) % AGING_TURN
        lanes = waiting.most_urgent() if self._turn else [waiting.longest()]
        others = [lane for lane in lanes if lane.level.queue is not self._last]
        for lane in others or lanes:
            waiting.wake(lane)
        self._chosen += others if self._turn else lanes
        self._offered[self] = None

    def offer_again(self) -> None:
        self._chosen = []
        if not self.bulkhead.free:
            return
        if self.login:  # it came after the first offer
            self.waiting.wake_all(logins_only=True)
        else:
            self.waiting.wake_one_each()


class Debtors:
    """Retries that wait until they can be paid for, the most urgent first."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: list[dict[str, Task]] = [{} for _ in range(LOW + 1)]

    def __bool__(self) -> bool:
        return any(self._levels)

    def add(self, task: Task) -> None:
        self._levels[task.priority][task.spec.id] = task

    def remove(self, task: Task) -> None:
        for level in self._levels:  # the priority may have changed meanwhile
            level.pop(task.spec.id, None)

    def first(self) -> Task:
        return next(task for level in self._levels for task in level.values())


class Site:
    """One target: its breaker, bulkhead, rate and retry budget, for all pools."""

    def __init__(
        self, target: str, policy: TargetPolicy, breaker: BreakerPolicy, now_ns: int
    ) -> None:
        self.target = target
        self.policy = policy
        self.breaker = Breaker(breaker)
        self.places = resized(None, target, policy.max_concurrent, 0)
        self.bucket = TokenBucket(policy.rate, policy.burst, now_ns) if policy.rate else None
        self.rate = policy.rate
        self.budget: RetryBudget | None = None  # None: no limit on retries
        if policy.retry_share is not None:
            self.budget = RetryBudget(policy, now_ns)
        self.budget_noted = False  # as a fact in the store
        self.debtors = Debtors()  # retries that the budget cannot pay for yet
        self.earns_at_ns = 0  # the timer for the next retry that time earns, 0 for none
        self.waiting = WaitingLanes()  # lanes that wait for the breaker or the rate
        self.lanes: dict[Lane, None] = {}  # in all pools, waiting or not
        self.round = 0  # half-open rounds so far: a probe counts in its own round only
        self.inside = 0  # leases that have entered and not left
        self.seen = self.breaker.state  # the state that was last reported
        self.settled = False  # whether the site has the breaker that it will keep ...
        self.settled_by = ""  # ... and the class whose breaker that is
        self.wake_at_ns = 0  # the timer that is set, 0 for none

    def follow(self, policy: TargetPolicy, breaker: BreakerPolicy, now_ns: int) -> None:
        """Take over a changed policy; the lanes that wait here look again."""
        self.policy = policy
        by_hand, switched = self.held, self.breaker.policy.enabled != breaker.enabled
        self.breaker.follow(breaker)
        if switched and not by_hand:
            self.breaker.reset()
        self.places = resized(self.places, self.target, policy.max_concurrent, self.inside)
        if self.rate != policy.rate or (self.bucket and self.bucket.burst != policy.burst):
            self.bucket = TokenBucket(policy.rate, policy.burst, now_ns) if policy.rate else None
        self.rate = policy.rate
        if policy.retry_share is None:
            self.budget = None
        elif self.budget is None:
            self.budget = RetryBudget(policy, now_ns)
        else:
            self.budget.follow(policy, now_ns)
        self.waiting.wake_all()

    def admits(self, now_ns: int) -> bool:
        before = self.breaker.state
        admitted = self.breaker.admits(now_ns)
        if self.breaker.state != before:
            self.round += 1
        return admitted

    def opens_at_ns(self, now_ns: int) -> int:
        """Return when time alone will open the gate; 0 if time does not keep it closed."""
        if self.breaker.state == BreakerState.OPEN:
            return max(now_ns, self.breaker.open_until_ns)
        if self.bucket is not None:
            ready_ns = self.bucket.ready_ns(now_ns)
            return ready_ns if ready_ns > now_ns else 0
        return 0

    def shut(self, now_ns: int) -> bool:
        """Whether the breaker admits nothing for a while: on_open then applies."""
        breaker = self.breaker
        if breaker.state == BreakerState.OPEN:
            return now_ns < breaker.open_until_ns  # then the next task is a probe
        return breaker.state == BreakerState.FORCED_OPEN

    @property
    def earned(self) -> bool:
        """Whether the budget allows something now that it did not allow before."""
        budget = self.budget
        if budget is None or not (self.debtors or self.budget_noted):
            return False
        return budget.affords if self.debtors else budget.full

    @property
    def idle(self) -> bool:
        return not self.lanes and not self.inside and not self.debtors

    @property
    def held(self) -> bool:
        """Whether an operator holds the breaker in its state."""
        state = self.breaker.state
        return state == BreakerState.FORCED_OPEN or (
            state == BreakerState.DISABLED and self.breaker.policy.enabled
        )

    def forgettable(self, now_ns: int) -> bool:
        """Whether the site could be forgotten and made anew without loss."""
        full = self.bucket is None or self.bucket.full(now_ns)
        return self.idle and self.breaker.as_new and full and not self.budget_noted


class Gate:
    """The way into one site for one resilience class and one session; the site's policy goes before
    the class."""

    def __init__(
        self,
        site: Site | None,
        policy: GatePolicy,
        shared: Places | None,
        session: SessionPlaces | None = None,
    ) -> None:
        self.site = site  # None: tasks of a class or a session without a target
        self.session = session
        self.follow(policy, shared)

    def follow(self, policy: GatePolicy, shared: Places | None) -> None:
        """Take over the policies, which may have changed, of the class and of the site."""
        self.policy = policy
        self.shared = shared  # places of the class, which other targets share
        own = self.site.policy if self.site is not None else NO_SITE
        self.timeout_ns = own.timeout_ns or policy.timeout_ns  # 0: neither sets one
        self.max_retries = own.max_retries if own.max_retries != NOT_GIVEN else policy.max_retries
        self.backoff = own.backoff or policy.backoff
        self.on_open = own.on_open or policy.on_open  # what a task does while the site is shut
        self.fallback_on = own.fallback_on or policy.fallback_on  # when a task falls back
        # Exceptions that the breaker counts; None: the usual ones, or there is no breaker.
        of_class = policy.counts if self.site is not None else None
        self.counts = own.counts if own.counts is not None else of_class
        self.fetching = own.fetching

    def enlist(self, lane: Lane) -> None:
        """Note a lane that stands before this gate."""
        for each in (self.site, self.session):
            if each is not None:
                each.lanes[lane] = None

    def dismiss(self, lane: Lane) -> None:
        for each in (self.site, self.session):
            if each is not None:
                del each.lanes[lane]

    def waiting_at(self, now_ns: int, lane: Lane) -> WaitingLanes | None:
        """Return the lanes among which this lane has to wait now; None if it may go on."""
        site = self.site
        if site is not None:
            if not site.admits(now_ns):
                return site.waiting
            if site.places is not None and not site.places.bulkhead.free:
                return site.places.waiting
        if self.shared is not None and not self.shared.bulkhead.free:
            return self.shared.waiting
        if self.session is not None and not self.session.admits(lane, now_ns):
            return self.session.waiting
        if site is not None and site.bucket is not None and (site.bucket.ready_ns(now_ns) > now_ns):
            return site.waiting
        return None

    def enter(self, task: Task, now_ns: int) -> None:
        """Let a lease in."""
        if self.shared is not None:
            self.shared.bulkhead.enter()
        if self.session is not None:
            self.session.enter(task)
        site = self.site
        if site is None:
            return
        site.inside += 1
        if site.places is not None:
            site.places.bulkhead.enter()
        if site.bucket is not None:
            site.bucket.take(now_ns)
        if not task.earned:  # once, however often the first attempt begins anew
            task.earned = True
            if site.budget is not None:
                site.budget.earn()
        task.probe = site.round if site.breaker.begin() else 0

    def leave(
        self,
        task: Task,
        verdict: Verdict,
        now_ns: int,
        rng: Random,
        *,
        run_ns: int = 0,
        retry_after_ns: int = 0,
    ) -> None:
        """Let a lease out; a lane that waited for its place goes on."""
        site = self.site
        if site is not None:
            site.inside -= 1
            slow_ns = site.breaker.policy.slow_ns
            slow = bool(slow_ns) and run_ns > slow_ns
            before = site.breaker.state
            probe = task.probe != 0 and task.probe == site.round
            task.probe = 0
            if verdict == Verdict.NOTHING or (
                verdict == Verdict.UNWELL and task.counted and not probe
            ):
                site.breaker.forget(probe=probe)
            else:
                well = verdict == Verdict.WELL
                task.counted = task.counted or not well
                site.breaker.record(
                    now_ns, rng, ok=well, probe=probe, slow=slow, retry_after_ns=retry_after_ns
                )
            if probe or site.breaker.state != before:
                site.waiting.wake_all()
            if site.places is not None:
                site.places.leave()
        if self.shared is not None:
            self.shared.leave()
        if self.session is not None:
            self.session.leave_by(task)

    def why(self, now_ns: int) -> str:
        """Say why a task waits here, for people; "" if it does not."""
        site, session = self.site, self.session
        if site is not None and (why := _why_shut(site, now_ns)):
            return why
        if session is not None and session.login:
            return f"session {session.name}: its login task {session.login} comes first"
        for places in (site.places if site is not None else None, self.shared, session):
            if places is not None and not places.bulkhead.free:
                bulkhead = places.bulkhead
                return f"bulkhead {bulkhead.name} {bulkhead.used}/{bulkhead.limit}"
        if site is not None and site.bucket is not None and site.bucket.ready_ns(now_ns) > now_ns:
            return f"rate {site.rate:g}/s of {site.target}"
        return ""


def _why_shut(site: Site, now_ns: int) -> str:
    breaker = site.breaker
    if breaker.state == BreakerState.FORCED_OPEN:
        return f"breaker of {site.target} is held open"
    if breaker.state == BreakerState.OPEN:
        left = max(0, breaker.open_until_ns - now_ns) / SECOND_NS
        return f"breaker of {site.target} is open for {left:.0f} s more"
    if not breaker.admits(now_ns):
        return f"breaker of {site.target} is half-open, {breaker.probes} probe(s) run"
    return ""


def resized(places: Places | None, name: str, limit: int, inside: int) -> Places | None:
    """Return `limit` places, of which `inside` are taken; lanes that wait look again."""
    if places is not None:
        places.waiting.wake_all()
    if not limit:
        return None
    if places is None:
        places = Places(Bulkhead(name, limit))
        places.bulkhead.used = inside
    places.bulkhead.limit = limit
    return places


def verdict_of(failure: Failure | None) -> Verdict:
    """Return what an attempt that ended in a worker says about its site."""
    if failure is None:
        return Verdict.WELL
    return Verdict.UNWELL if failure.unwell else Verdict.NOTHING
