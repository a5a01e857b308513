"""Weeks of schedules: the real core, with a clock that is set, a disk that loses uncommitted data,
restarts at any moment, full queues, long runs, and people who pause and run schedules by hand.

An account of our own, kept from what is committed, checks that:

- every instant that a schedule passes is either a task on disk, once, or counted as skipped;
- every skip that is counted is reported, and no other;
- the policy says which instants run and which are skipped;
- no two runs are alive at once where that is not allowed;
- an instant in time has an attempt, unless one is under way: a run that waits for a retry ends for
  the one that is due, or is attempted in its place if somebody waits for it, and does not end;
- a clock that is set back repeats no cron run;
- results are watched as simulation/watched.py says;
- when nothing is in the way, nothing due is left waiting.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import CANCELLED, Completion, Failure, TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events, schedule_events
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy, SchedulePolicy
from musterd.supervisor.core.model.runs import CATCH_UP_MAX, ON_TIME_NS
from musterd.supervisor.core.model.task import TaskState
from musterd.supervisor.core.model.timing import Cron, Every, Timing
from musterd.supervisor.core.model.watching import HISTORY
from musterd.supervisor.core.tasks.schedule import FACT, ScheduleRecord
from simulation.door import ask
from simulation.watched import WatchAccount, policy_of, result_of

SEC = SECOND_NS
MS = SEC // 1000
MINUTE = 60 * SEC
HOUR = 60 * MINUTE
DAY = 24 * HOUR
TRACE_LENGTH = 60
KILLED_AT_CHANGE = 0.02  # the chance of a kill right before or after people are told
KILLED_AT_COMMIT = 0.002  # the chance of a kill right before or after a commit, which is short
# Weeks in which summer time begins or ends in one of the zones, and a leap day.
WEEKS = (
    datetime(2025, 3, 24, tzinfo=UTC),
    datetime(2025, 10, 20, tzinfo=UTC),
    datetime(2025, 3, 3, tzinfo=UTC),
    datetime(2025, 10, 27, tzinfo=UTC),
    datetime(2028, 2, 24, tzinfo=UTC),
)
BERLIN, NEW_YORK = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")


def _repeating(match: Callable[[datetime], bool]) -> Callable[[datetime, datetime], bool]:
    return lambda local, _before: match(local)


def _at_fixed_time(hour: int, minute: int, match: Callable[[datetime], bool]) -> Any:
    """Run once on each matching day, in the next hour where its own hour is left out."""

    def due(local: datetime, before: datetime) -> bool:
        at = local.replace(hour=hour, minute=minute, tzinfo=None)
        naive, last = local.replace(tzinfo=None), before.replace(tzinfo=None)
        return match(local) and not local.fold and (naive == at or last < at < naive)

    return due


# Expressions and their meaning by hand: whether a run is due in a minute, given the one before.
CRONS: tuple[tuple[str, ZoneInfo, Callable[[datetime, datetime], bool]], ...] = (
    ("*/20 * * * *", BERLIN, _repeating(lambda t: t.minute % 20 == 0)),
    ("15 * * * *", NEW_YORK, _repeating(lambda t: t.minute == 15)),
    ("30 2 * * *", BERLIN, _at_fixed_time(2, 30, lambda t: True)),
    ("30 1 * * *", NEW_YORK, _at_fixed_time(1, 30, lambda t: True)),
    ("0 12 * * 1-5", BERLIN, _at_fixed_time(12, 0, lambda t: t.isoweekday() <= 5)),
    ("5 0 1 * *", NEW_YORK, _at_fixed_time(0, 5, lambda t: t.day == 1)),
    ("45 23 29 2 *", BERLIN, _at_fixed_time(23, 45, lambda t: (t.month, t.day) == (2, 29))),
)


class Account:
    """What is known of one schedule from outside: its policy, and what was committed."""

    def __init__(self, policy: SchedulePolicy, by_hand: list[int] | None) -> None:
        self.policy = policy
        self._due = by_hand  # of a cron schedule
        self.last_ns = 0
        self.skipped = 0
        self.turn = 0
        self.paused = False
        self.instants: dict[tuple[int, int], None] = {}  # committed: (turn, instant)
        self.crons: dict[int, None] = {}
        self.watched = WatchAccount(policy)
        self.replaced = 0  # runs that ended because the next one was due
        self.hastened = 0  # runs that were attempted instead
        self.reported = 0  # in this life
        self.skipped_before = 0  # before this life

    def between(self, after_ns: int, until_ns: int) -> list[int]:
        timing = self.policy.timing
        if isinstance(timing, Every):
            return list(range(after_ns + timing.every_ns, until_ns + 1, timing.every_ns))
        assert self._due is not None
        return self._due[bisect_right(self._due, after_ns) : bisect_right(self._due, until_ns)]


@cache
def minutes_by_hand(start: datetime, days: int, number: int) -> list[int]:
    """Return when one of CRONS is due, found by looking at every minute."""
    _, zone, due = CRONS[number]
    found = []
    before = start.astimezone(zone)
    for minute in range(1, days * 24 * 60):
        moment = start + timedelta(minutes=minute)
        local = moment.astimezone(zone)
        if due(local, before):
            found.append(int(moment.timestamp()) * SEC)
        before = local
    return found


class Row(msgspec.Struct):
    seq: int
    spec: TaskSpec
    begun: bool = False
    crashes: int = 0


class Timetable:
    """One scenario: `Timetable(seed).run()`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.trace: deque[tuple[int, str, Any]] = deque(maxlen=TRACE_LENGTH)
        self.weeks = rng.randint(1, 3)
        start = rng.choice(WEEKS)
        self.now_ns = rng.randrange(1, 10**15)
        self.offset_ns = int(start.timestamp()) * SEC + rng.randrange(HOUR) - self.now_ns
        self.end_ns = self.now_ns + self.weeks * 7 * DAY
        self.told_before: dict[str, str] = {}  # the newest changes when a client last asked
        self.accounts = {
            account.policy.name: account
            for account in (self._account(number, start) for number in range(rng.randint(1, 3)))
        }
        self.policy = FleetPolicy(
            pools=(
                PoolPolicy(
                    "p",
                    2,
                    queue_size=20,
                    task_timeout_ns=30 * DAY,
                    heartbeat_timeout_ns=0,
                    health_timeout_ns=0,
                ),
            ),
            schedules=tuple(account.policy for account in self.accounts.values()),
            drain_timeout_ns=5 * SEC,
        )
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.life = 0
        self.up = False
        self.steps = 0
        self.calm = False
        self.fleet: Fleet
        self.rows: dict[int, Row] = {}
        self.finished: dict[str, None] = {}
        self.facts: dict[str, bytes] = {}
        self.last_seq = 0
        self.waiting: list[tuple[int, act.Persist]] = []  # on its way to the disk
        self.forgotten: set[str] = set()  # runs of this life whose pictures are gone
        self.requests = 0

    def _account(self, number: int, start: datetime) -> Account:
        rng = self.rng
        timing: Timing
        by_hand = None
        if rng.random() < 0.4:
            every_ns = rng.choice((10 * MINUTE, 47 * MINUTE, 6 * HOUR))
            timing = Every(every_ns + rng.randrange(1000) * MS)
        else:
            which = rng.randrange(len(CRONS))
            timing = Cron(*CRONS[which][:2])
            days = self.weeks * 7 + 12  # the clock may be ahead
            by_hand = minutes_by_hand(start - timedelta(days=3), days, which)
        policy = SchedulePolicy(
            f"s{number}",
            "p.x",
            timing,
            priority=rng.randint(1, 3),
            jitter_ns=rng.choice((0, 0, 30 * SEC)),
            overlap=rng.random() < 0.4,
            catch_up=rng.choice(("one", "none", "all")),
            notify=rng.random() < 0.7,
            watching=policy_of(rng),
        )
        return Account(policy, by_hand)

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
        self._plan()
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

    def _plan(self) -> None:
        span_ns, rng = self.end_ns - self.now_ns, self.rng
        plan = (
            (rng.randint(0, 12), self._set_clock),
            (rng.randint(0, 6), self._flood),
            (rng.randint(0, 40), self._by_hand),
            (rng.randint(0, 4), self._pause),
            (rng.randint(0, 4), self._fail_disk),
            (rng.randint(0, 40), self._follow),
            (rng.randint(1, 15), self._crash),
            (rng.randint(0, 3), self._shut_down),
        )
        for count, call in plan:
            for _ in range(count):
                self.after(self.delay(0, span_ns), call)
        self.after(span_ns, self._calm_down)

    # -- lives --------------------------------------------------------------------------------

    def _begin_life(self) -> None:
        self.life += 1
        self.up = True
        self.fleet = Fleet(self.policy, Random(self.rng.random()), self.last_seq)
        self.waiting, self.forgotten = [], set()
        for account in self.accounts.values():
            account.reported, account.skipped_before = 0, account.skipped
        self.tell(events.FactsRecovered(FACT, list(self.facts.items())))
        self.tell(
            events.TasksRecovered(
                [
                    events.Recovered(r.seq, r.spec, self.wall_ns, 0, 0, 0, r.crashes, 0, r.begun)
                    for r in self.rows.values()
                ]
            )
        )
        self.tell(events.Started())
        self._read_clock()

    def _end_life(self) -> None:
        for slot in self.fleet.pools["p"].slots:
            slot.leases.clear()
        self.up = False
        self.life += 1
        if not self.calm:
            down_ns = self.rng.choice((SEC, MINUTE, HOUR, 30 * HOUR))
            self.after(self.delay(MS, down_ns), self._begin_life)

    def _crash(self) -> None:
        if self.up and not self.calm:
            self.trace.append((self.now_ns, "!!", "killed"))
            self._end_life()

    def _shut_down(self) -> None:
        self.tell(events.ShutdownRequested("asked"))

    def _read_clock(self) -> None:
        """Read the clock once a second; skip readings with nothing near."""
        self.tell(events.ClockRead(self.wall_ns))
        for schedule in self.fleet.schedules.values():
            self._check_waits(schedule)
        nearest = min(
            (
                schedule.next_ns - self.wall_ns
                for schedule in self.fleet.schedules.values()
                if schedule.next_ns is not None and schedule.next_ns > self.wall_ns
            ),
            default=DAY,
        )
        self.in_life(max(SEC, min(nearest - 2 * SEC, 20 * MINUTE)), self._read_clock)

    def _set_clock(self) -> None:
        """Set the clock, as people, a time server or a sleeping machine do."""
        if self.calm:
            return
        step_ns = self.rng.choice((SEC, MINUTE, HOUR, 10 * HOUR))
        step_ns = self.delay(-step_ns, step_ns)
        ahead_ns = self.offset_ns + step_ns + self.now_ns
        newest = max((account.last_ns for account in self.accounts.values()), default=0)
        if newest - ahead_ns > 20 * HOUR:
            return  # so wrong that schedules begin anew: tested elsewhere
        self.trace.append((self.now_ns, "!!", f"the clock is set by {step_ns / SEC} s"))
        self.offset_ns += step_ns
        if self.up:
            self.in_life(self.delay(0, SEC), self._read_once)

    def _read_once(self) -> None:
        self.tell(events.ClockRead(self.wall_ns))

    def _calm_down(self) -> None:
        """Stop the faults: everything due gets settled, then the scenario ends."""
        self.calm = True
        if not self.up or self.fleet.phase:
            self.life += 1
            self._begin_life()
        for name, schedule in self.fleet.schedules.items():
            if schedule.record.paused:
                self.tell(schedule_events.SchedulePauseRequested(name, False, b""))
        self.after(3 * DAY, self._finish)

    def _finish(self) -> None:
        for name, account in self.accounts.items():
            watched = account.watched
            assert watched.told.keys() == watched.changes.keys(), (
                f"{name}: told {list(watched.told)}, changed {list(watched.changes)}"
            )
            untold = self.fleet.schedules[name].record.watched.untold
            assert len(untold) <= 1, f"told, and not noted since: {untold}"
        self._heap.clear()

    # -- faults and operators -----------------------------------------------------------------

    def _flood(self) -> None:
        """Fill the queue for a while."""
        if self.up and not self.calm:
            self.requests += 1
            specs = [
                TaskSpec(f"f{self.requests}-{n}", "p.slow", b"", priority=0) for n in range(22)
            ]
            self.tell(events.TasksSubmitted(b"", 0, specs, self.wall_ns))

    def _by_hand(self) -> None:
        name = self.rng.choice(list(self.accounts))
        self.tell(schedule_events.ScheduleRunRequested(name, b""))

    def _pause(self) -> None:
        name = self.rng.choice(list(self.accounts))
        self.tell(schedule_events.SchedulePauseRequested(name, True, b""))
        self.in_life(self.delay(SEC, DAY), self._resume, name)

    def _resume(self, name: str) -> None:
        self.tell(schedule_events.SchedulePauseRequested(name, False, b""))

    def _follow(self) -> None:
        """Ask for the newest changes as a client; remember what was told before."""
        told = {name: list(each.watched.told)[-1:] for name, each in self.accounts.items()}
        self.told_before = {name: ids[0] for name, ids in told.items() if ids}
        self.tell(events.ChangesFollowed(b"follower"))

    def _fail_disk(self) -> None:
        if self.up and not self.calm:
            self.tell(events.StoreFailing("the disk is full"))
            self.in_life(self.delay(SEC, 3 * HOUR), self.tell, events.StoreRecovered())

    # -- the core -----------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        if not self.up:
            return
        self.steps += 1
        self.trace.append((self.now_ns, "->", event))
        settled = {name: each.record.last_ns for name, each in self.fleet.schedules.items()}
        actions = ask(self.fleet, self.now_ns, event)
        for name, last_ns in settled.items():
            self._check_attempted(self.fleet.schedules[name], last_ns)
        life = self.life
        for action in actions:
            self.trace.append((self.now_ns, "  ", action))
            if life == self.life:
                self._do(action)
        if self.up:
            self._check_reports()

    def _do(self, action: Any) -> None:
        match action:
            case act.Persist():
                self.waiting.append((self.wall_ns, action))
                if len(self.waiting) == 1:
                    self.in_life(self.delay(MS, 50 * MS), self._commit)
            case act.StartForkServer():
                declared = (TaskDeclaration("x"), TaskDeclaration("slow"))
                self.in_life(10 * MS, self.tell, events.ForkServerReady("p", declared))
            case act.SpawnWorker(worker=worker):
                self.in_life(10 * MS, self.tell, events.WorkerForked(worker, worker))
                self.in_life(20 * MS, self.tell, events.WorkerReady(worker))
            case act.AssignLeases():
                self._work(action)
            case act.RecallLeases(worker=worker):
                self.in_life(MS, self.tell, events.LeasesReturned(worker, []))
            case act.StopWorker(worker=worker) | act.TerminateWorker(worker=worker):
                slot = self.fleet._state.workers.get(worker)
                if slot is not None and (not slot.leases or type(action) is act.TerminateWorker):
                    lease = next(iter(slot.leases), 0)
                    self.in_life(MS, self.tell, events.WorkerExited(worker, -15, lease))
            case act.RunCleanup():
                self.in_life(MS, self.tell, events.CleanupFinished())
            case act.Report() | act.ForgetPicture():
                self._hear(action)
            case act.TellChanges():
                self._check_newest(action)
            case act.Exit():
                self._end_life()

    def _work(self, action: act.AssignLeases) -> None:
        rng = self.rng
        for lease in action.leases:
            if lease.method == "slow":
                run_ns = 10 * MINUTE
            else:
                run_ns = self.delay(MS, rng.choice((SEC, MINUTE, 40 * MINUTE)))
            failure, delay_ns = None, -1
            if rng.random() < 0.15:
                failure = Failure(rng.choice(("permanent", "error", "error")))
                delay_ns = self.delay(SEC, rng.choice((MINUTE, HOUR)))
            value, view = (b"", None) if failure else result_of(lease, rng)
            done = Completion(lease.lease, run_ns, value, failure, delay_ns, view=view)
            self.in_life(run_ns, self.tell, events.LeasesCompleted(action.worker, [done]))

    def _commit(self) -> None:
        group, self.waiting = self.waiting, []
        killed = self.rng.random() < KILLED_AT_COMMIT
        if killed and self.rng.random() < 0.5:
            self._crash()
        if not self.up:
            return
        for wall_ns, page in group:
            self._apply(wall_ns, page)
        if killed:
            self._crash()
        self.in_life(self.delay(0, 5 * MS), self.tell, events.Persisted(group[-1][1].ticket))

    # -- what is on disk ----------------------------------------------------------------------

    def _apply(self, wall_ns: int, page: act.Persist) -> None:
        added: dict[str, list[TaskSpec]] = {}
        for new in page.added:
            id_ = new.spec.id
            assert id_ not in self.finished, f"{id_} is made again after its end"
            assert all(row.spec.id != id_ for row in self.rows.values()), f"{id_} is made twice"
            self.rows[new.seq] = Row(new.seq, new.spec)
            self.last_seq = max(self.last_seq, new.seq)
            if id_.startswith("@"):
                added.setdefault(id_[1:].partition(".")[0], []).append(new.spec)
        for change in page.changed:
            row = self.rows[change.seq]
            row.begun, row.crashes = change.begun, change.crashes
        for final in page.finished:
            del self.rows[final.seq]
            self.finished[final.spec.id] = None
            account = self.accounts.get(final.spec.id[1:].partition(".")[0])
            if account is not None:
                account.watched.ended(final)
                if final.outcome.state == CANCELLED:
                    self._check_replaced(account, final, page)
        facts = {}
        for fact in page.facts:
            if fact.kind == HISTORY:
                self.accounts[fact.key.partition(".")[0]].watched.remember(fact)
                continue
            assert fact.value is not None
            self.facts[fact.key] = fact.value
            facts[fact.key] = msgspec.msgpack.decode(fact.value, type=ScheduleRecord)
        assert added.keys() <= facts.keys(), "a run without what is remembered of it"
        for name, record in facts.items():
            self._audit(self.accounts[name], record, added.get(name, []), wall_ns)

    def _audit(
        self, account: Account, record: ScheduleRecord, specs: list[TaskSpec], wall_ns: int
    ) -> None:
        """Check that each instant between two states of a schedule on disk has its reason."""
        policy = account.policy
        by_hand = [spec for spec in specs if spec.id.endswith("m")]
        runs = [_instant(spec) for spec in specs if not spec.id.endswith("m")]
        assert len(by_hand) <= 1
        skipped = record.skipped - account.skipped
        begins = not account.last_ns or record.turn != account.turn
        resumes = account.paused and not record.paused
        if begins or resumes:
            assert not runs, f"{policy.name} runs {runs} where it begins"
            assert not skipped
            assert not begins or isinstance(policy.timing, Every) or not account.last_ns
        else:
            assert record.last_ns >= account.last_ns, f"{policy.name} goes back"
            due = account.between(account.last_ns, record.last_ns)
            assert set(runs) <= set(due), f"{policy.name} runs {runs}, due were {due}"
            left = len(due) - len(runs)
            many = len(account.between(account.last_ns, wall_ns)) > CATCH_UP_MAX
            assert skipped == left or (many and 0 < skipped <= left), (
                f"{policy.name}: of {len(due)} due {len(runs)} ran and {skipped} were skipped"
            )
            if due:
                self._check_policy(account, due, runs, wall_ns)
        for instant in runs:
            assert instant <= wall_ns, f"{policy.name} runs before its time"
            assert (record.turn, instant) not in account.instants, f"{instant} ran twice"
            if isinstance(policy.timing, Cron):
                assert instant not in account.crons, "a cron run repeated"
                account.crons[instant] = None
            account.instants[record.turn, instant] = None
        live = {row.spec.id for row in self.rows.values()}
        if record.task:
            assert (record.task in live) == (not record.state), f"{record.task}: {record.state}"
        if not policy.overlap:
            prefix = f"@{policy.name}."
            alive = [id_ for id_ in live if id_.startswith(prefix)]
            assert len(alive) <= 1, f"alive at once: {alive}"
        account.watched.check(record.watched)
        account.last_ns, account.skipped = record.last_ns, record.skipped
        account.turn, account.paused = record.turn, record.paused

    def _check_policy(
        self, account: Account, due: list[int], runs: list[int], wall_ns: int
    ) -> None:
        policy = account.policy
        if policy.catch_up == "all":
            assert len(runs) <= CATCH_UP_MAX
            newest = due[-CATCH_UP_MAX:]
            assert set(runs) <= set(newest), "an old one is run, a newer one is not"
            return
        assert len(runs) <= 1, f"{policy.name} catches up with {runs}"
        assert runs in ([], due[-1:]), f"{policy.name} runs {runs} of {due}"
        if runs and policy.catch_up == "none":
            assert wall_ns - runs[0] <= ON_TIME_NS, "a late run with catch_up = none"

    def _check_replaced(self, account: Account, final: act.FinalRecord, page: act.Persist) -> None:
        """Check that a run has ended for another one, and was none that somebody waits for."""
        id_, name = final.spec.id, account.policy.name
        assert final.outcome.attempts > 0, f"{id_} ends before its first attempt"
        assert not id_.endswith("m"), f"{id_} is cancelled, and somebody waits for it"
        others = [new.spec.id for new in page.added if new.spec.id.startswith(f"@{name}.")]
        assert others, f"{id_} is cancelled for nothing"
        account.replaced += 1

    def _check_attempted(self, schedule: Any, last_ns: int) -> None:
        """Check that no live run rests where an instant in time has just been settled."""
        policy, record = schedule.policy, schedule.record
        if policy.overlap or policy.catch_up == "all" or not last_ns:
            return
        due = self.accounts[policy.name].between(last_ns, record.last_ns)
        if not due or due[-1] <= self.wall_ns - ON_TIME_NS or record.paused:
            return
        tasks = [self.fleet.tasks.get(id_) for id_ in schedule.all_alive]
        resting = [each for each in tasks if each and each.state == TaskState.WAITING]
        rests = bool(resting) and all(each.attempt for each in resting)
        assert not rests or len(resting) < len(tasks), f"{policy.name} rests at {due[-1]}"

    # -- reports ------------------------------------------------------------------------------

    def _hear(self, report: act.Report | act.ForgetPicture) -> None:
        if isinstance(report, act.ForgetPicture):
            self.forgotten.add(report.task)
            return
        account = self.accounts.get(report.schedule)
        if account is None:
            return
        if report.event == "schedule.skipped":
            assert report.count > 0
            account.reported += report.count
            account.hastened += "is tried again in its place" in report.reason
        elif report.event == "task.changed":
            assert report.task not in self.forgotten, f"the picture of {report.task} is gone"
            slow_ns = self.rng.choice((20 * MS, 20 * MS, 5 * SEC))
            self.in_life(self.delay(0, slow_ns), self._publish, report)
            self.in_life(SEC, self._read_once)
        account.watched.hear(report)

    def _publish(self, report: act.Report) -> None:
        """Tell people of a change, as the shell does once it has read what history has of it."""
        killed = self.rng.random() < KILLED_AT_CHANGE
        if killed and self.rng.random() < 0.5:
            self._crash()
        if not self.up:
            return
        self.accounts[report.schedule].watched.published(report)
        if killed:
            self._crash()
        self.tell(events.ChangeTold(report.schedule, report.task, report.number))

    def _check_newest(self, action: act.TellChanges) -> None:
        """Check that the newest change is on disk and not older than what was told before."""
        newest = {change.schedule: change.task for change in action.changes}
        assert newest.keys() >= self.told_before.keys(), f"{self.told_before}: now {newest}"
        for name, id_ in newest.items():
            changes = list(self.accounts[name].watched.changes)
            assert id_ in changes, f"{id_} is called changed, and is not"
            assert changes.index(id_) >= changes.index(self.told_before.get(name, changes[0]))

    def _check_reports(self) -> None:
        for name, schedule in self.fleet.schedules.items():
            account = self.accounts[name]
            counted = schedule.record.skipped - account.skipped_before
            assert counted == account.reported + schedule.unreported, (
                f"{name}: {counted} skipped, {account.reported} reported, "
                f"{schedule.unreported} to be reported"
            )

    def _check_waits(self, schedule: Any) -> None:
        """Check that no run that could start is left after a reading of the clock."""
        state = self.fleet._state
        if not schedule.active or not state.intake_open or state.store_problem:
            return
        due = schedule.next_ns is not None and schedule.next_ns <= self.wall_ns
        in_turn = schedule.policy.catch_up == "all" and not schedule.policy.overlap
        assert not due or (in_turn and schedule.alive), f"{schedule.policy.name} is due and waits"


def _instant(spec: TaskSpec) -> int:
    return int(spec.id.rpartition(".")[2].partition("-")[0], 16)


def story_of(world: Timetable) -> str:
    return "\n".join(
        f"{(when_ns - world.now_ns) / 1e9:14.3f} s {mark} {what}"
        for when_ns, mark, what in world.trace
    )
