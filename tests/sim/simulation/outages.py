"""Sites that go down and come back, over simulated weeks, and what their circuit breakers do.

The real core checks a few sites every few minutes. Each site has outages, from minutes to half a
day. Workers sometimes die during a check, and the daemon is killed and started again, sometimes
much later. The disk answers at once: other simulations have a slow disk.

The following must hold, whatever the seed:

- While a breaker is open, no task of its site begins, and a restart does not shorten that time.
- Each opening without a close in between lasts longer, up to the cap; half-open, no more tasks run
  at once than may probe; the states follow each other in order.
- So a site that is down is asked now and then, not at every check.
- A probe that never reports (its worker died) does not keep the breaker half-open: soon after a
  site is up, its breaker is closed, and all waiting tasks have ended.
- Checks of sites that are up do not notice.
- Each accepted check ends exactly once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from musterd.ipc.resilience.policy import BackoffPolicy, BreakerPolicy, RetryPolicy
from musterd.ipc.wire.messages import Completion, Failure, Lease, TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy, RestartPolicy
from simulation.profile import MS, SEC

MINUTE, HOUR, DAY = 60 * SEC, 3600 * SEC, 24 * 3600 * SEC
TRACE_LENGTH = 40
RUN_NS = (50 * MS, 8 * SEC)
WELL_NS = 2 * MINUTE  # by then a check of a site that is up has ended, deaths and all
PEER = b"watcher"


@dataclass
class Row:
    """A task as stored on disk."""

    seq: int
    spec: TaskSpec
    ready_ns: int = 0
    attempt: int = 0
    crashes: int = 0
    begun: bool = False


@dataclass
class Site:
    """The truth about one site, and what the core reported about its breaker."""

    name: str
    outages: list[tuple[int, int]]  # from, to
    state: str = "closed"
    open_until_ns: int = 0  # as reported
    openings: int = 0  # since the last close
    inside: int = 0  # leases that have not ended
    began_before: int = 0  # of those, how many had begun when the breaker opened
    attempts_down: int = 0
    checks_down: int = 0
    submitted: dict[str, int] = field(default_factory=dict)  # times of submits that have not ended

    def down(self, now_ns: int) -> bool:
        return any(start <= now_ns < end for start, end in self.outages)

    def well_since(self, now_ns: int) -> int:
        """Return how long the site has been up; 0 while it is down."""
        if self.down(now_ns):
            return 0
        return min([now_ns - end for _, end in self.outages if end <= now_ns], default=now_ns)


class Outages:
    """One scenario: `Outages(seed).run()`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.trace: deque[tuple[int, str, Any]] = deque(maxlen=TRACE_LENGTH)
        self.begin_ns = self.now_ns = rng.randrange(DAY, 10**15)
        self.wall_offset_ns = rng.randrange(10**18)
        self.end_ns = self.now_ns + rng.randint(1, 3) * 7 * DAY
        self.breaker = BreakerPolicy(
            failures=rng.randint(1, 4),
            open_ns=rng.choice((MINUTE, 5 * MINUTE)),
            open_factor=rng.choice((1.0, 2.0, 3.0)),
            open_max_ns=rng.choice((15 * MINUTE, HOUR)),
            open_jitter=rng.choice((0.0, 0.1)),
            successes=rng.randint(1, 3),
            probes=rng.randint(1, 2),
        )
        self.policy = FleetPolicy(
            pools=(
                PoolPolicy(
                    "p",
                    4,
                    heartbeat_timeout_ns=0,
                    health_timeout_ns=0,
                    restart=RestartPolicy(backoff=BackoffPolicy(base_ns=SEC), limit=1000),
                ),
            ),
            retry=RetryPolicy(rng.randint(0, 2), BackoffPolicy(base_ns=SEC, max_ns=10 * SEC)),
            breaker=self.breaker,
        )
        self.every_ns = rng.choice((5, 10, 30)) * MINUTE
        self.sites = {name: self._site(name) for name in ("a", "b", "c")}
        self.sites["always-well"] = Site("always-well", [])
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.life = 0
        self.up = False
        self.steps = self.checks = self.openings = self.deaths = 0
        self.rows: dict[int, Row] = {}
        self.ended: dict[str, str] = {}
        self.facts: dict[tuple[str, str], bytes] = {}
        self.running: dict[int, tuple[int, Lease, Site]] = {}  # by lease: worker and lease
        self.last_seq = 0
        self.fleet: Fleet

    def _site(self, name: str) -> Site:
        outages, at_ns = [], self.now_ns
        while True:
            at_ns += int(self.rng.expovariate(1 / (1.5 * DAY)))
            length_ns = int(self.rng.choice((10 * MINUTE, 2 * HOUR, 12 * HOUR)) * self.rng.random())
            if at_ns + length_ns > self.end_ns:
                return Site(name, outages)
            outages.append((at_ns, at_ns + length_ns))
            at_ns += length_ns

    # -- time -----------------------------------------------------------------------------------

    def after(
        self, delay_ns: int, call: Callable[..., None], *args: Any, ever: bool = False
    ) -> None:
        """Schedule a call in this life of the daemon, or in any life with `ever`."""
        self._order += 1
        life = 0 if ever else self.life
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, life, call, args))

    def run(self) -> None:
        self._begin_life()
        for number, site in enumerate(self.sites.values()):
            self.after(number * 7 * SEC, self._check, site, ever=True)
        for _ in range(self.rng.randint(0, 12)):
            self.after(self.rng.randrange(self.end_ns - self.now_ns), self._crash, ever=True)
        # By then every breaker has probed, and all waiting tasks have passed.
        limit_ns = self.end_ns + 2 * HOUR
        while self._heap or self.up:
            deadline_ns = self.fleet.next_deadline() if self.up else None
            next_ns = self._heap[0][0] if self._heap else None
            due_ns = min(each for each in (deadline_ns, next_ns, limit_ns) if each is not None)
            if due_ns >= limit_ns:
                break
            self.now_ns = max(self.now_ns, due_ns)
            if deadline_ns is not None and deadline_ns <= self.now_ns:
                self.tell(events.Ticked())
            else:
                _, _, life, call, args = heapq.heappop(self._heap)
                if life in (0, self.life):
                    call(*args)
            self._look()
        self._finish()

    # -- what happens ---------------------------------------------------------------------------

    def _check(self, site: Site) -> None:
        """Submit the next check of the site."""
        if self.now_ns < self.end_ns:
            self.after(self.every_ns, self._check, site, ever=True)
        if not self.up:
            return
        self.checks += 1
        site.checks_down += site.down(self.now_ns)
        id_ = f"{site.name}-{self.checks}"
        on_open = self.rng.choice(("wait", "wait", "fail", "fallback"))
        fallback = b"\x07" if on_open == "fallback" else None
        site.submitted[id_] = self.now_ns
        spec = TaskSpec(id_, "p.x", b"", target=site.name, on_open=on_open, fallback=fallback)
        wall_ns = self.now_ns + self.wall_offset_ns
        self.tell(events.TasksSubmitted(PEER, self.checks, [spec], wall_ns))

    def _crash(self) -> None:
        if not self.up:
            return
        self.up = False
        self.life += 1
        for site in self.sites.values():
            site.inside = site.began_before = 0
        self.running.clear()
        down_ns = self.rng.choice((SEC, MINUTE, 3 * HOUR))
        self.after(int(down_ns * self.rng.random()), self._begin_life, ever=True)

    def _begin_life(self) -> None:
        self.life += 1
        self.up = True
        self.fleet = Fleet(self.policy, Random(self.rng.random()), self.last_seq)
        wall_ns = self.now_ns + self.wall_offset_ns
        for kind in self.fleet.fact_kinds:
            facts = [(key, value) for (of, key), value in self.facts.items() if of == kind]
            self.tell(events.FactsRecovered(kind, facts, wall_ns))
        recovered = [
            events.Recovered(
                *(row.seq, row.spec, 0, row.ready_ns, 0, row.attempt, row.crashes, 0, row.begun)
            )
            for row in self.rows.values()
        ]
        for site in self.sites.values():  # the core reports again what it remembers
            site.submitted = dict.fromkeys(site.submitted, self.now_ns)
            if site.state == "half_open":
                site.state = "open"  # its probes are gone, and the next one may begin
        self.tell(events.TasksRecovered(recovered))
        self.tell(events.Started())
        self.tell(events.ClockRead(wall_ns))

    def tell(self, event: Any) -> None:
        if not self.up:
            return
        self.steps += 1
        self.trace.append((self.now_ns, "->", event))
        actions = self.fleet.handle(self.now_ns, event)
        for action in actions:
            self.trace.append((self.now_ns, "  ", action))
        for action in actions:  # reported last, and true from the beginning
            if isinstance(action, act.Report) and action.event.startswith("breaker."):
                self._told(self.sites[action.target], action)
        for action in actions:
            match action:
                case act.Persist():
                    self._write(action)
                case act.AssignLeases():
                    for lease in action.leases:
                        self._begins(action.worker, lease)
                case act.StartForkServer():
                    ready = events.ForkServerReady("p", (TaskDeclaration("x"),))
                    self.after(10 * MS, self.tell, ready)
                case act.SpawnWorker():
                    forked = events.WorkerForked(action.worker, 1000 + action.worker)
                    self.after(20 * MS, self.tell, forked)
                    self.after(40 * MS, self.tell, events.WorkerReady(action.worker))
        if self.steps % 64 == 0:
            self.fleet.validate()

    def _write(self, page: act.Persist) -> None:
        for new in page.news():
            self.rows[new.seq] = Row(new.seq, new.spec)
            self.last_seq = max(self.last_seq, new.seq)
        for change in page.changed:
            row = self.rows[change.seq]
            row.ready_ns = self.now_ns + change.wait_ns if change.wait_ns else 0
            row.attempt, row.crashes, row.begun = change.attempt, change.crashes, change.begun
        for final in page.finished:
            id_ = final.spec.id
            assert id_ not in self.ended, f"{id_} ended twice"
            del self.rows[final.seq]
            self.ended[id_] = final.outcome.state
            del self.sites[final.spec.target].submitted[id_]
        for fact in page.facts:
            self.facts.pop((fact.kind, fact.key), None)
            if fact.value is not None:
                self.facts[fact.kind, fact.key] = fact.value
        self.after(0, self.tell, events.Persisted(page.ticket))

    # -- what runs ------------------------------------------------------------------------------

    def _begins(self, worker: int, lease: Lease) -> None:
        site = self.sites[self.fleet.tasks[lease.id].spec.target]
        assert site.state != "open", f"{lease.id} begins at an open breaker"
        site.inside += 1
        if site.state == "half_open":
            probes = site.inside - site.began_before
            assert probes <= self.breaker.probes, f"{probes} probes of {site.name} at once"
        site.attempts_down += site.down(self.now_ns)
        self.running[lease.lease] = (worker, lease, site)
        run_ns = self.rng.randint(*RUN_NS)
        if self.rng.random() < 0.02:
            self.after(run_ns, self._dies, worker, lease.lease)
        else:
            self.after(run_ns, self._ends, lease.lease, run_ns)

    def _leaves(self, lease: int) -> tuple[int, Site] | None:
        worker, _, site = self.running.pop(lease, (0, None, None))
        if site is None:
            return None
        site.inside -= 1
        site.began_before = min(site.began_before, site.inside)
        return worker, site

    def _ends(self, lease: int, run_ns: int) -> None:
        left = self._leaves(lease)
        if left is None:
            return
        worker, site = left
        failure = None
        if site.down(self.now_ns):
            failure = Failure("error", "ConnectionError", "down", unwell=True)
        value = b"" if failure else b"value"
        done = Completion(lease, run_ns, value, failure)
        self.tell(events.LeasesCompleted(worker, [done]))

    def _dies(self, worker: int, lease: int) -> None:
        if self._leaves(lease) is not None:
            self.deaths += 1
            self.tell(events.WorkerExited(worker, -9, lease))

    # -- reports on breakers ---------------------------------------------------------------------

    def _told(self, site: Site, report: act.Report) -> None:
        state = report.event.partition(".")[2]
        follows = {"closed": ("open",), "open": ("half_open",), "half_open": ("open", "closed")}
        assert state in follows[site.state], f"{site.name} is {state} after {site.state}"
        assert self.now_ns >= site.open_until_ns, f"{site.name} is {state} before its time"
        site.state = state
        if state == "closed":
            site.openings = 0
        if state != "open":
            site.open_until_ns = 0
            return
        self.openings += 1
        site.openings += 1
        site.began_before = site.inside
        site.open_until_ns = self.now_ns + round(report.seconds * SEC)
        if self.rng.random() < 0.1:  # the moment with most to remember
            self.after(self.rng.randrange(round(report.seconds * SEC)), self._crash)
        policy = self.breaker
        grown_ns = policy.open_ns * policy.open_factor ** (site.openings - 1)
        spread = policy.open_jitter if site.openings > 1 else 0.0
        capped_ns = min(grown_ns, policy.open_max_ns)
        length_ns = report.seconds * SEC
        assert capped_ns * (1 - spread) - SEC <= length_ns <= capped_ns * (1 + spread) + SEC, (
            f"opening {site.openings} of {site.name} lasts {report.seconds} s"
        )

    def _look(self) -> None:
        """Check that no task waits for longer than there is a reason for."""
        if not self.up:
            return
        for site in self.sites.values():
            if not site.submitted:
                continue
            oldest_ns = next(iter(site.submitted.values()))
            # Probes come one after the other, and one may die; each needs a check to become one.
            recovery_ns = 2 * self.breaker.open_max_ns + WELL_NS
            well_ns = site.well_since(self.now_ns) if site.outages else self.now_ns
            patience_ns = WELL_NS if not site.outages else recovery_ns
            if well_ns > patience_ns:
                waited_ns = self.now_ns - oldest_ns
                assert waited_ns <= patience_ns, f"{site.name} is well, and a check waits"

    def _finish(self) -> None:
        self.fleet.validate()
        left = {name: site.submitted for name, site in self.sites.items() if site.submitted}
        assert not left, f"not ended: {left}"
        assert not self.rows, f"still on disk: {self.rows}"
        well = self.sites["always-well"]
        assert well.state == "closed"
        assert well.attempts_down == 0
        for site in self.sites.values():
            assert self.now_ns >= site.open_until_ns, f"{site.name} is left alone"


def story_of(world: Outages) -> str:
    return "\n".join(
        f"{(when - world.now_ns) / SEC:12.3f} s {mark} {what}" for when, mark, what in world.trace
    )
