"""Gatekeeper: makes the gates of sites and classes; reports, stores and commands breakers.

Breakers open and close in ipc/resilience/breaker.py; here their changes are noticed.

A site has the breaker of its target, else of its class, else the default one. A task has the class
that its submit names, else its target's class, else none. A task without a class and without a
target has no gate, unless it uses a session.

A session that is not in the configuration any more (a stored task names it) still has one place.

A task whose site is shut (its breaker is open) waits. If its policy says so, the task ends at once:
failed, or with a fallback, which is the last good result of its key or else the value of its
submit. The ledger decides about the fallback of a task that has failed for good.
"""

from msgspec import Struct, msgpack

from musterd.ipc.resilience.breaker import Breaker, BreakerState
from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import FAILED, SHUT, SHUT_TYPE, SUCCEEDED, Failure, TaskSpec
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.gates import Gate, Places, SessionPlaces, Site, resized
from musterd.supervisor.core.model.hooks import Hooks
from musterd.supervisor.core.model.lanes import LOGIN_LANE, Lane
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.limits import Bulkhead
from musterd.supervisor.core.model.policy import GatePolicy, SessionPolicy
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState

SITES_MAX = 10_000  # targets remembered; sites equal to new ones are forgotten first
KIND = "breaker"  # Fact.kind of breakers
BUDGET = "retry-budget"  # Fact.kind of the retries that a site has left

NO_SESSION = SessionPolicy()
WAIT, FALLBACK = "wait", "fallback"


class SavedBreaker(Struct, array_like=True, frozen=True):
    """A breaker as the store keeps it. Downtime counts as open time, as far as the wall clock can
    tell; the breaker stays open for at most `open_left_ns`, however the clock was set."""

    state: str
    open_left_ns: int  # when it was saved
    reopenings: int
    open_until_wall_ns: int = 0  # 0: the clock was unknown
    failures: int = 0  # that opened the breaker

    @classmethod
    def of(cls, breaker: Breaker, state: State) -> "SavedBreaker":
        left_ns = breaker.open_until_ns - state.now_ns if breaker.state == BreakerState.OPEN else 0
        return cls(
            str(breaker.state),
            left_ns,
            breaker.reopenings,
            state.wall_ns(left_ns),
            breaker.failures,
        )


def restore(breaker: Breaker, saved: SavedBreaker, now_ns: int, wall_ns: int) -> None:
    """Set a breaker as it was saved; `wall_ns` is what the clock shows, 0 if that is unknown."""
    if breaker.state == BreakerState.DISABLED:
        return  # disabled by the configuration meanwhile
    breaker.state = BreakerState(saved.state)
    if breaker.state == BreakerState.HALF_OPEN:  # its probes ended with the daemon
        breaker.state = BreakerState.OPEN
    left_ns = saved.open_left_ns
    if saved.open_until_wall_ns and wall_ns:
        left_ns = max(0, min(left_ns, saved.open_until_wall_ns - wall_ns))
    breaker.reopenings = saved.reopenings
    breaker.failures = saved.failures
    breaker.open_until_ns = now_ns + left_ns


class Gatekeeper:
    def __init__(self, state: State, ledger: Ledger, hooks: Hooks) -> None:
        self._state = state
        self._ledger = ledger
        self._hooks = hooks
        self.sites: dict[str, Site] = {}
        self._gates: dict[tuple[str, str, str], Gate] = {}  # by target, class and session
        self._shared: dict[str, Places | None] = {}
        self.sessions: dict[str, SessionPlaces] = {}
        self._offered: dict[SessionPlaces, None] = {}  # free places, to be offered once more
        self.held: dict[SessionPlaces, None] = {}  # their tasks end when the event is over
        self._sweep_at = SITES_MAX  # number of sites at which some are forgotten
        self._touched: dict[Site, None] = {}  # sites to look at when the event is over
        self.transitions: dict[str, int] = {}  # changes of all breakers, by their new state
        self._no_class = GatePolicy()
        self._mixed = False  # whether a reload let tasks of one lane disagree about a shut site

    # -- making them --------------------------------------------------------------------------

    def gate_for(self, spec: TaskSpec) -> Gate | None:
        """Return the gate of this task; None if no limit holds for it."""
        target = spec.target
        # After a restart the class may be gone from the configuration.
        name = spec.policy if spec.policy in self._state.policy.classes else ""
        if not name and target:
            name = self._state.policy.target_of(target).policy
        session = spec.session
        if not target and not name and not session:
            return None
        gate = self._gates.get((target, name, session))
        if gate is None:
            policy = self._state.policy.classes.get(name, self._no_class)
            site = self.site(target, name) if target else None
            if name not in self._shared:
                limit = policy.max_concurrent
                self._shared[name] = resized(None, f"class {name}", limit, 0)
            places = self.session(session) if session else None
            gate = Gate(site, policy, self._shared[name], places)
            self._gates[target, name, session] = gate
        if gate.session is not None and not gate.session.login and self.logs_in(spec):
            gate.session.login = spec.id  # the others wait for it
        return gate

    def session(self, name: str) -> SessionPlaces:
        places = self.sessions.get(name)
        if places is None:
            policy = self.session_policy(name)
            bulkhead = Bulkhead(f"session {name}", policy.concurrent)
            places = SessionPlaces(name, bulkhead, policy.logins, self._offered)
            self.sessions[name] = places
        return places

    def session_policy(self, name: str) -> SessionPolicy:
        return self._state.policy.sessions.get(name, NO_SESSION)

    def logs_in(self, spec: TaskSpec) -> bool:
        """Whether this task is a login of its session."""
        return bool(spec.session) and spec.name == self.session_policy(spec.session).login_task

    def site(self, target: str, name: str = "") -> Site:
        """Return the site. Its breaker is that of its own configuration, else of the first class
        that a task for it names, else the default one."""
        policy = self._state.policy
        site = self.sites.get(target)
        if site is None:
            known = policy.target_of(target)
            site = Site(target, known, known.breaker or policy.breaker, self._state.now_ns)
            site.settled = known.breaker is not None
            if len(self.sites) >= self._sweep_at:
                self._forget_some()
            self.sites[target] = site
            name = known.policy or name
        if name and not site.settled:
            site.settled = True
            site.settled_by = name
            site.breaker.follow(policy.class_breakers.get(name, policy.breaker))
            site.seen = site.breaker.state if site.breaker.as_new else site.seen
        return site

    def follow(self) -> None:
        """Apply another policy. Queued tasks keep the class they were queued with."""
        policy, now_ns = self._state.policy, self._state.now_ns
        said = {key: gate.on_open for key, gate in self._gates.items()}
        for target, site in list(self.sites.items()):
            known = policy.target_of(target)
            name = known.policy or site.settled_by
            of_class = policy.class_breakers.get(name, policy.breaker)
            site.settled = known.breaker is not None or bool(name)
            site.follow(known, known.breaker or of_class, now_ns)
            if site.budget is None and site.budget_noted:
                site.budget_noted = False
                self._ledger.remember(BUDGET, target, None)
            if site.debtors:
                self._hooks.earned(site)
            self._touched[site] = None
        inside: dict[str, int] = {}
        for task in self._state.tasks.values():
            if task.state == TaskState.LEASED and task.gate is not None:
                inside[task.gate.policy.name] = inside.get(task.gate.policy.name, 0) + 1
        classes = {
            name: policy.classes.get(name, GatePolicy(name)) for name in self._shared if name
        }
        for name, each in classes.items():
            self._shared[name] = resized(
                self._shared[name], f"class {name}", each.max_concurrent, inside.get(name, 0)
            )
        for key, gate in self._gates.items():
            name = key[1]
            gate.follow(classes.get(name, gate.policy), self._shared[name])
            self._mixed = self._mixed or gate.on_open != said[key]
        for name, places in self.sessions.items():
            places.bulkhead.limit = self.session_policy(name).concurrent
            places.breaker.follow(self.session_policy(name).logins)
            places.waiting.wake_all()

    def _forget_some(self) -> None:
        """Forget sites: those with nothing to lose, then the oldest that no task waits for."""
        now_ns = self._state.now_ns
        sites = {name: site for name, site in self.sites.items() if not site.forgettable(now_ns)}
        spare = len(sites) - SITES_MAX // 2
        for target in [name for name, site in sites.items() if site.idle and not site.held]:
            if spare <= 0:
                break
            spare -= 1
            site = sites.pop(target)
            if not site.breaker.as_new:
                self._ledger.remember(KIND, target, None)
            if site.budget_noted:
                self._ledger.remember(BUDGET, target, None)
        self.sites = sites
        # Sites in use stay, and there may be one for each task: look again only when there are
        # twice as many.
        self._sweep_at = max(SITES_MAX, 2 * len(sites))
        self._gates = {
            key: gate
            for key, gate in self._gates.items()
            if gate.site is None or gate.site.target in sites
        }

    def lane_key(self, task: Task) -> str:
        """Return the key of the task's lane: site, class, what to do at a shut site, session."""
        gate = task.gate
        if gate is None:
            return ""
        key = f"{task.spec.target}\0{gate.policy.name}\0{task.on_open}"
        if gate.session is None:
            return key
        return f"{key}\0{task.spec.session}{LOGIN_LANE if self.logs_in(task.spec) else ''}"

    # -- lanes --------------------------------------------------------------------------------

    def parked(self, lane: Lane) -> None:
        """Set a timer for a lane that waits at its gate."""
        assert lane.gate is not None
        self._look_at_session(lane.gate)
        site = lane.gate.site
        if site is None:
            return
        self.touch(site)
        opens_at_ns = site.opens_at_ns(self._state.now_ns)
        if opens_at_ns and (not site.wake_at_ns or opens_at_ns < site.wake_at_ns):
            site.wake_at_ns = opens_at_ns
            self._state.timers.at(opens_at_ns, self._time_over, site, opens_at_ns)

    def _time_over(self, site: Site, when_ns: int) -> None:
        if site.wake_at_ns == when_ns:
            site.wake_at_ns = 0
            site.waiting.wake_all()

    def pushed(self, gate: Gate) -> None:
        """Look at a gate that a task came to: the task may not want to wait for a shut site."""
        self._look_at_session(gate)
        if gate.site is not None and gate.site.shut(self._state.now_ns):
            self._touched[gate.site] = None

    def _look_at_session(self, gate: Gate) -> None:
        if gate.session is not None and gate.session.is_held(self._state.now_ns):
            self.held[gate.session] = None

    def touch(self, site: Site | None) -> None:
        if site is not None:
            self._touched[site] = None

    # -- after each event ---------------------------------------------------------------------

    def settle(self) -> bool:
        """Report changed breakers, and end tasks that do not wait for a shut site. Offer places of
        sessions that nobody has taken.

        Return whether there was something to look at.
        """
        if not self._touched and not self._offered:
            return False
        for places in list(self._offered):
            places.offer_again()
        self._offered.clear()
        touched, self._touched = self._touched, {}
        for site in touched:
            if site.breaker.state != site.seen:
                self._changed(site)
            if site.earned:
                self._hooks.earned(site)
            if site.shut(self._state.now_ns):
                for lane in list(site.lanes):
                    self._end_impatient(lane)
        return True

    def _changed(self, site: Site) -> None:
        breaker, state = site.breaker, self._state
        site.seen = breaker.state
        self.transitions[breaker.state] = self.transitions.get(breaker.state, 0) + 1
        shut = site.shut(state.now_ns)
        left_ns = breaker.open_until_ns - state.now_ns if breaker.state == BreakerState.OPEN else 0
        state.report(
            f"breaker.{breaker.state.replace('-', '_')}",
            "warning" if shut else "info",
            target=site.target,
            seconds=left_ns / SECOND_NS,
        )
        value = None
        if not breaker.as_new:
            value = msgpack.encode(SavedBreaker.of(breaker, state))
        self._ledger.remember(KIND, site.target, value)

    def _end_impatient(self, lane: Lane) -> None:
        """End the tasks of a lane that do not wait for its site, which is shut."""
        first = next((task for task in lane.tasks if task.lane is lane), None)
        if first is None or first.gate is None:
            return
        if first.on_open == WAIT and not self._mixed:
            return  # and so does every task of this lane
        why = first.gate.why(self._state.now_ns)
        for task in list(lane.tasks):
            policy = task.on_open
            if task.lane is not lane or policy == WAIT:
                continue
            task.route.pool.queue.discard(task)
            message = f"the {why}"
            if policy == FALLBACK:
                good, brought = self._hooks.last_good(task.spec), task.spec.fallback
                value = good if good is not None else brought
                if value is not None:
                    stale = good is not None
                    self._ledger.finish(
                        task, SUCCEEDED, value=value, stale=stale, fallback=not stale
                    )
                    continue
                message += ", and there is no last good result and no fallback"
            self._ledger.finish(task, FAILED, failure=Failure(SHUT, SHUT_TYPE, message))

    # -- a restart, and a person's word -------------------------------------------------------

    def recovered(self, event: events.FactsRecovered) -> None:
        for target, value in event.facts:
            saved = msgpack.decode(value, type=SavedBreaker)
            site = self.site(target)
            restore(site.breaker, saved, self._state.now_ns, event.wall_ns)
            site.seen = site.breaker.state

    def command(self, event: events.BreakerCommanded) -> None:
        site = self.site(event.target)
        match event.command:
            case "open":
                site.breaker.force_open()
            case "disable":
                site.breaker.disable()
            case "close":
                site.breaker.close()
            case "reset":
                site.breaker.reset()
        site.waiting.wake_all()
        self.touch(site)

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        users = dict.fromkeys(self.sessions, 0)
        for task in self._state.tasks.values() if users else ():
            if task.state == TaskState.LEASED and task.gate is not None and task.gate.session:
                users[task.spec.session] += 1
        for name, places in self.sessions.items():
            assert places.bulkhead.used == users[name], (name, places.bulkhead.used, users[name])
        for site in self.sites.values():
            assert site.inside >= 0, site.target
            assert site.breaker.probes >= 0, site.target
            assert not site.earned, site.target
            if site.places is not None:
                assert site.places.bulkhead.used == site.inside, site.target
