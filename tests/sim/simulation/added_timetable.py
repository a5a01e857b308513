"""Days of schedules that are added, changed, deleted, run and paused while the daemon runs.

The real core, with a disk that loses what is not committed, deaths of the supervisor at any moment,
a clock that is set, reloads after which a file has some of the names or a pool is gone, and clients
whose requests overlap. An account of our own, kept from answers and from what is committed, checks:

- what an acknowledged put or delete has said is on disk from then on, until a later one;
- a run is made only of a schedule that is there, on disk or in a file, and usable;
- each due time makes one task, and no id comes twice;
- a run that was asked for by its id, and asked for again, is made once;
- a schedule that is there, usable and not paused is never left waiting when it is due;
- what the core shows is what its disk and the configuration say.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    INVALID_TASK,
    Completion,
    Rejection,
    TaskDeclaration,
    TaskSpec,
)
from musterd.ipc.wire.schedule_messages import (
    INVALID_SCHEDULE,
    STILL_RUNNING,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events, schedule_events
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy, SchedulePolicy
from musterd.supervisor.core.model.schedule_events import AddedSchedule
from musterd.supervisor.core.model.timing import Cron, Every, Timing
from musterd.supervisor.core.tasks.added_schedules import ADDED
from musterd.supervisor.core.tasks.schedule import FACT, ScheduleRecord
from simulation.door import ask
from simulation.timetable import BERLIN, DAY, HOUR, MINUTE, MS, SEC, Row, story_of

START_NS = 1_750_000_000 * SECOND_NS
NAMES = tuple(f"site-{number}" for number in range(6))
TRACE_LENGTH = 60
DAYS = 1
ORIGIN = "musterd.toml"

__all__ = ["AddedTimetable", "story_of"]


class Section(msgspec.Struct):
    """What a client puts; `number` makes each different."""

    number: int
    every_ns: int = 0
    pool: str = "p"
    overlap: bool = False
    catch_up: str = "one"
    enabled: bool = True


def policy_of(name: str, section: Section, origin: str = "") -> SchedulePolicy:
    timing: Timing = Every(section.every_ns)
    if not section.every_ns:
        timing = Cron("*/10 * * * *", BERLIN)
    return SchedulePolicy(
        name,
        "p.x",
        timing,
        args=b"%d" % section.number,
        overlap=section.overlap,
        catch_up=section.catch_up,
        enabled=section.enabled,
        origin=origin,
    )


class AddedTimetable:
    """One scenario: `AddedTimetable(seed).run()`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.how = Random(seed)  # how schedules are put
        self.trace: deque[tuple[int, str, Any]] = deque(maxlen=TRACE_LENGTH)
        self.now_ns = self.rng.randrange(1, 10**15)
        self.offset_ns = START_NS + self.rng.randrange(HOUR) - self.now_ns
        self.end_ns = self.now_ns + DAYS * DAY
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.life = 0
        self.up = self.calm = False
        self.steps = self.requests = self.numbers = self.runs = self.survived = 0
        self.files: dict[str, Section] = {}  # schedules of the configuration file
        self.in_files: set[str] = set()  # names that this daemon has had in its file
        self.pools = {"p", "q"}  # schedules of others are unusable
        self.fleet: Fleet
        self.rows: dict[int, Row] = {}
        self.ids: set[str] = set()  # of all tasks that were ever committed
        self.facts: dict[tuple[str, str], bytes] = {}
        self.last_seq = 0
        self.waiting: list[act.Persist] = []
        # By name: what the requests since the last acknowledged one would leave, oldest first.
        # The first is acknowledged, or was there when the supervisor died.
        self.said: dict[str, list[tuple[int, bytes | None]]] = {n: [(0, None)] for n in NAMES}
        self.asked_runs: dict[int, tuple[str, str]] = {}  # by request: schedule and id

    # -- time ---------------------------------------------------------------------------------

    @property
    def wall_ns(self) -> int:
        return self.now_ns + self.offset_ns

    def delay(self, low_ns: int, high_ns: int) -> int:
        return low_ns + int(self.rng.random() * (high_ns - low_ns))

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._push(delay_ns, 0, call, args)

    def in_life(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._push(delay_ns, self.life, call, args)

    def _push(
        self, delay_ns: int, life: int, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, life, call, args))

    def run(self) -> None:
        span_ns, rng = self.end_ns - self.now_ns, self.rng
        for count, call in (
            (rng.randint(20, 80), self._command),
            (rng.randint(1, 12), self._crash),
            (rng.randint(0, 8), self._reload),
            (rng.randint(0, 6), self._set_clock),
            (rng.randint(0, 3), self._fail_disk),
            (rng.randint(0, 2), self._shut_down),
        ):
            for _ in range(count):
                self.after(self.delay(0, span_ns), call)
        self.after(span_ns, self._calm_down)
        self._begin_life()
        while self._heap:
            deadline_ns = self.fleet.next_deadline() if self.up else None
            if deadline_ns is not None and deadline_ns <= self._heap[0][0]:
                self.now_ns = max(self.now_ns, deadline_ns)
                self.tell(events.Ticked())
                continue
            when_ns, _, life, call, args = heapq.heappop(self._heap)
            self.now_ns = max(self.now_ns, when_ns)
            if life in (0, self.life):
                call(*args)

    # -- lives --------------------------------------------------------------------------------

    def _policy(self) -> FleetPolicy:
        pool = PoolPolicy(
            "p", 2, task_timeout_ns=30 * DAY, heartbeat_timeout_ns=0, health_timeout_ns=0
        )
        files = tuple(policy_of(name, each, ORIGIN) for name, each in self.files.items())
        return FleetPolicy(pools=(pool,), schedules=files, drain_timeout_ns=5 * SEC)

    def _judged(self, name: str, section: bytes) -> AddedSchedule:
        """Judge a section by the configuration in force, as the shell does."""
        read = msgspec.msgpack.decode(section, type=Section)
        if read.pool not in self.pools:
            return AddedSchedule(name, section, None, f"there is no pool {read.pool}")
        return AddedSchedule(name, section, policy_of(name, read), "")

    def _stored(self, kind: str) -> list[tuple[str, bytes]]:
        return [(key, value) for (of, key), value in self.facts.items() if of == kind]

    def _begin_life(self) -> None:
        self.life += 1
        self.up = True
        self.fleet = Fleet(self._policy(), Random(self.rng.random()), self.last_seq)
        self.waiting, self.asked_runs = [], {}
        self.in_files = set(self.files)
        for name, states in self.said.items():  # what is on disk is what became of the requests
            value = self.facts.get((ADDED, name))
            assert value in [state for _, state in states], f"{name}: {value!r} of {states}"
            self.said[name] = [(0, value)]
            self.survived += value is not None
        self.tell(
            schedule_events.AddedRecovered([self._judged(*each) for each in self._stored(ADDED)])
        )
        self.tell(events.FactsRecovered(FACT, self._stored(FACT)))
        recovered = [
            events.Recovered(r.seq, r.spec, self.wall_ns, 0, 0, 0, r.crashes, 0, r.begun)
            for r in self.rows.values()
        ]
        self.tell(events.TasksRecovered(recovered))
        self.tell(events.Started())
        self._read_clock()

    def _end_life(self) -> None:
        self.up = False
        self.life += 1
        if not self.calm:
            self.after(self.delay(MS, self.rng.choice((SEC, MINUTE, HOUR))), self._begin_life)

    def _crash(self) -> None:
        if self.up and not self.calm:
            self.trace.append((self.now_ns, "!!", "killed"))
            self._end_life()

    def _shut_down(self) -> None:
        if not self.calm:
            self.tell(events.ShutdownRequested("asked"))

    def _read_clock(self) -> None:
        self.tell(events.ClockRead(self.wall_ns))
        if self.up:
            self._check_waits()
            ahead = [
                each.next_ns - self.wall_ns
                for each in self.fleet.schedules.values()
                if each.next_ns is not None and each.next_ns > self.wall_ns
            ]
            nearest_ns = min(ahead, default=HOUR)  # readings with nothing near are left out
            self.in_life(max(SEC, min(nearest_ns - 2 * SEC, 20 * MINUTE)), self._read_clock)

    def _set_clock(self) -> None:
        if not self.calm:
            step_ns = self.rng.choice((SEC, MINUTE, HOUR, 10 * HOUR))
            self.offset_ns += self.delay(-step_ns, step_ns)
            self.trace.append((self.now_ns, "!!", "the clock is set"))
            self.tell(events.ClockRead(self.wall_ns))

    def _fail_disk(self) -> None:
        if self.up and not self.calm:
            self.tell(events.StoreFailing("the disk is full"))
            self.in_life(self.delay(SEC, HOUR), self.tell, events.StoreRecovered())

    def _calm_down(self) -> None:
        """Stop the faults; everything is answered and due, then the scenario ends."""
        self.calm = True
        if not self.up or self.fleet.phase:
            self.life += 1
            self._begin_life()
        self.tell(events.StoreRecovered())
        self.after(HOUR, self._heap.clear)

    # -- people and programs ------------------------------------------------------------------

    def _reload(self) -> None:
        """Change the configuration; the daemon reads it, or the next one does."""
        rng = self.rng
        self.files = {name: self._new_section() for name in (*NAMES, "own") if rng.random() < 0.25}
        self.pools = {pool for pool in ("p", "q") if rng.random() < 0.8}
        if self.up:
            self.in_files |= self.files.keys()
            added = [self._judged(*each) for each in self.fleet.added.sections.items()]
            self.tell(events.PolicyChanged(self._policy(), added))

    def _new_section(self) -> Section:
        rng = self.rng
        self.numbers += 1
        return Section(
            self.numbers,
            rng.choice((0, 7 * MINUTE, HOUR)),
            rng.choice(("p", "p", "q")),
            overlap=rng.random() < 0.5,
            catch_up=rng.choice(("one", "none", "all")),
            enabled=rng.random() < 0.9,
        )

    def _command(self) -> None:
        """Ask for something, and sometimes for more before it is answered."""
        if not self.up:
            return
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 4))):
            command = rng.choice((self._put, self._put, self._delete, self._run, self._pause))
            self.in_life(self.delay(0, 100 * MS), command)

    def _put(self) -> None:
        self.requests += 1
        names = self.rng.sample(NAMES, self.rng.randint(1, 3))
        puts = [(name, msgspec.msgpack.encode(self._new_section())) for name in names]
        read = [self._judged(*each) for each in puts]
        rejected = [
            Rejection(each.name, INVALID_SCHEDULE, each.problem) for each in read if each.problem
        ]
        paused = frozenset(name for name in names if self.how.random() < 0.1)
        replace, dry_run = self.how.random() < 0.9, self.how.random() < 0.05
        for each in read:
            if not each.problem and not dry_run:
                self.said[each.name].append((self.requests, each.section))
        usable = [each for each in read if not each.problem]
        self.tell(
            schedule_events.SchedulePutRequested(
                usable, rejected, b"1", self.requests, paused, replace, dry_run
            )
        )

    def _delete(self) -> None:
        self.requests += 1
        names = self.rng.sample(NAMES, self.rng.randint(1, 3))
        for name in names:
            self.said[name].append((self.requests, None))
        self.tell(schedule_events.ScheduleDeleteRequested(names, b"1", self.requests))

    def _run(self) -> None:
        self.requests += 1
        name = self.rng.choice(NAMES)
        id_ = f"@{name}.{self.wall_ns:x}m" if self.rng.random() < 0.8 else ""
        self._ask_for_run(name, self.requests, id_, False)
        if id_ and self.rng.random() < 0.5:  # a client may ask again, also of the next daemon
            soon_ns = self.rng.choice((0, MINUTE, 20 * MINUTE))
            self.after(self.delay(0, soon_ns), self._ask_for_run, name, self.requests, id_, True)

    def _ask_for_run(self, name: str, request: int, id_: str, again: bool) -> None:
        if self.up:
            self.asked_runs[request] = (name, id_)
            self.tell(schedule_events.ScheduleRunRequested(name, b"1", request, id_, again))

    def _pause(self) -> None:
        self.requests += 1
        name, paused = self.rng.choice(NAMES), self.rng.random() < 0.5
        self.tell(schedule_events.SchedulePauseRequested(name, paused, b"1", self.requests))

    # -- the core -----------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        if not self.up:
            return
        self.steps += 1
        self.trace.append((self.now_ns, "->", event))
        actions = ask(self.fleet, self.now_ns, event)
        life = self.life
        for action in actions:
            self.trace.append((self.now_ns, "  ", action))
            if life == self.life:
                self._do(action)
        if self.up and not self.fleet.phase:
            self.fleet.validate()
            self._check_shown()

    def _do(self, action: Any) -> None:
        match action:
            case act.Persist():
                self.waiting.append(action)
                if len(self.waiting) == 1:
                    self.in_life(self.delay(MS, 50 * MS), self._commit)
            case act.Acknowledge():
                self._acknowledged(action)
            case act.StartForkServer():
                declared = (TaskDeclaration("x"),)
                self.in_life(10 * MS, self.tell, events.ForkServerReady("p", declared))
            case act.SpawnWorker(worker=worker):
                self.in_life(10 * MS, self.tell, events.WorkerForked(worker, worker))
                self.in_life(20 * MS, self.tell, events.WorkerReady(worker))
            case act.AssignLeases(worker=worker, leases=leases):
                for lease in leases:
                    run_ns = self.delay(MS, self.rng.choice((SEC, MINUTE, 20 * MINUTE)))
                    done = Completion(lease.lease, run_ns, b"v")
                    self.in_life(run_ns, self.tell, events.LeasesCompleted(worker, [done]))
            case act.RecallLeases(worker=worker):
                self.in_life(MS, self.tell, events.LeasesReturned(worker, []))
            case act.StopWorker(worker=worker) | act.TerminateWorker(worker=worker):
                slot = self.fleet._state.workers.get(worker)
                if slot is not None and (not slot.leases or type(action) is act.TerminateWorker):
                    lease = next(iter(slot.leases), 0)
                    self.in_life(MS, self.tell, events.WorkerExited(worker, -15, lease))
            case act.RunCleanup():
                self.in_life(MS, self.tell, events.CleanupFinished())
            case act.Exit():
                self._end_life()

    def _commit(self) -> None:
        group, self.waiting = self.waiting, []
        killed = self.rng.random() < 0.01 and not self.calm
        if killed and self.rng.random() < 0.5:
            self._crash()
            return
        for page in group:
            self._apply(page)
        if killed:
            self._crash()
        self.in_life(self.delay(0, 5 * MS), self.tell, events.Persisted(group[-1].ticket))

    # -- what is on disk, and what was answered -------------------------------------------------

    def _apply(self, page: act.Persist) -> None:
        before = {name for kind, name in self.facts if kind == ADDED}
        for fact in page.facts:
            former = self.facts.pop((fact.kind, fact.key), None)
            if fact.value is not None:
                self.facts[fact.kind, fact.key] = fact.value
                if former is not None and fact.kind == FACT:
                    then, now = (
                        msgspec.msgpack.decode(each, type=ScheduleRecord)
                        for each in (former, fact.value)
                    )
                    same = then.plan == now.plan
                    assert not same or now.runs >= then.runs, f"{fact.key} has forgotten runs"
        for new in page.added:
            self._made(new, before)
        for change in page.changed:
            row = self.rows[change.seq]
            row.begun, row.crashes = change.begun, change.crashes
        for final in page.finished:
            del self.rows[final.seq]

    def _made(self, new: act.NewRecord, before: set[str]) -> None:
        """Check that a run is of a schedule that is there, and that it is new."""
        spec: TaskSpec = new.spec
        assert spec.id not in self.ids, f"{spec.id} is made twice"
        self.ids.add(spec.id)
        self.rows[new.seq] = Row(new.seq, spec)
        self.last_seq = max(self.last_seq, new.seq)
        self.runs += 1
        name = spec.id[1:].partition(".")[0]
        there = before | {key for kind, key in self.facts if kind == ADDED} | self.in_files
        assert name in there, f"{spec.id} of nobody"
        assert (FACT, name) in self.facts, f"{spec.id} without what is remembered of it"

    def _acknowledged(self, answer: act.Acknowledge) -> None:
        refused = {each.id for each in answer.rejected}
        for name, states in self.said.items():
            requests = [request for request, _ in states]
            if not answer.request or answer.request not in requests:
                continue
            place = requests.index(answer.request)
            if name in refused:
                del states[place]  # nothing was done
                continue
            del states[:place]
            value = self.facts.get((ADDED, name))
            assert value in [state for _, state in states], f"{name} is not on disk as it was said"
        schedule, id_ = self.asked_runs.pop(answer.request, ("", ""))
        if id_ and not answer.rejected:
            assert id_ in self.ids, f"the run {id_} of {schedule} is not on disk"
            return
        for each in answer.rejected if id_ else ():
            known = self.fleet.schedules.get(schedule)
            newest = known is not None and known.record.asked == id_
            itself = newest or (each.code == STILL_RUNNING and each.id == id_)
            assert not itself, f"{id_} is asked for again: {each}"
            assert each.code != INVALID_TASK, f"{id_} is asked for again: {each}"

    def _check_shown(self) -> None:
        """Check that those run that the sections and the configuration allow, and no others."""
        fleet = self.fleet
        usable = {
            name
            for name, section in fleet.added.sections.items()
            if name not in self.files and not self._judged(name, section).problem
        }
        if fleet.policy == self._policy():  # else the next daemon has it
            assert fleet.schedules.keys() == usable | self.files.keys()
        for name, schedule in fleet.schedules.items():
            if name in fleet.added.sections and name not in fleet.added.unusable:
                section = fleet.added.sections[name]
                assert schedule.policy == self._judged(name, section).policy, name

    def _check_waits(self) -> None:
        state = self.fleet._state
        if not state.intake_open or state.store_problem:
            return
        for name, schedule in self.fleet.schedules.items():
            due = schedule.next_ns is not None and schedule.next_ns <= self.wall_ns
            in_turn = schedule.policy.catch_up == "all" and not schedule.policy.overlap
            waits = in_turn and schedule.alive
            if self.fleet._schedules._wake_ns == state.now_ns + 1:  # the next turn goes on with it
                waits = waits or schedule.look_ns is not None
            assert not (schedule.active and due) or waits, f"{name} is due and waits"
