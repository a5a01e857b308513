"""Schedules: create one task for each instant, or report why not.

One fact is kept for each schedule (`ScheduleRecord`). All instants up to its `last_ns` are settled:
run, or skipped and counted. `last_ns` moves in the transaction that adds the task, so
a crash leaves either both or none. The task's id is made of schedule and instant.

ClockRead tells the wall clock once a second, so a clock that was set and a machine that slept are
noticed. A jump forwards is downtime: `catch_up` decides about the instants in it. After a jump
backwards, cron waits until the clock is beyond `last_ns` again, and an interval begins anew.
Between two readings the monotonic clock counts on. A timer is set only for instants within the next
two readings, so no timer outlives a change of the clock for long.

A schedule is looked at when it is due (due_times.py), not once a second. However many are due at
once, one event deals with a bounded number of them; the others follow in the next turns.

Counted and reported instead of run: instants that `catch_up` leaves out, instants during the last
run (`overlap = false`; with `catch_up = "all"` they wait for their turn), instants at which
the queue is full. A last run that was attempted and waits for a retry gives way to the next one, so
that the pauses of a failing site never silence its schedule. One that a person waits for stays, and
is attempted at once instead of the next one. No task is created during a shutdown,
while the store cannot write and while the pool is drained: that is downtime.

Schedules of pools whose tasks come from a cluster are none of these: see cluster/scheduler.py.
Those that are added at run time come by added_schedules.py.
"""

from collections.abc import Iterable

import msgspec
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    CANCEL,
    CANCELLED,
    FAILED,
    SUCCEEDED,
    Failure,
    Rejection,
)
from musterd.ipc.wire.schedule_messages import UNKNOWN_SCHEDULE
from musterd.supervisor.core.model import events, schedule_events
from musterd.supervisor.core.model.actions import Acknowledge
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.policy import FleetPolicy, SchedulePolicy
from musterd.supervisor.core.model.pool import ForkServerState
from musterd.supervisor.core.model.runs import (
    RUN_PREFIX,
    Way,
    asked_ns,
    due_runs,
    hastened_why,
    is_by_hand,
    is_set_back,
    perhaps_made,
    plan_name,
    replaced_why,
    run_spec,
    set_back_why,
    still_running,
    way_of,
)
from musterd.supervisor.core.model.shared import is_shared
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.core.model.watching import (
    HISTORY,
    begin_anew,
    history_key,
)
from musterd.supervisor.core.tasks.due_times import DueTimes
from musterd.supervisor.core.tasks.intake import Intake
from musterd.supervisor.core.tasks.leases import Leases
from musterd.supervisor.core.tasks.pauses import DRAINED
from musterd.supervisor.core.tasks.schedule import (
    FACT,
    Schedule,
    ScheduleRecord,
    adopt,
    change_report,
    decode_record,
    encode_record,
    readable,
)
from musterd.supervisor.core.tasks.schedule_results import ScheduleResults

# Timers are set for instants within this time: two readings of the clock.
HORIZON_NS = 2 * SECOND_NS
# What one event may spend on schedules that are due: a look costs 1, a run LOOKS_PER_RUN. So an
# event takes about 10 ms, or a few times that on a slow machine.
LOOKS_MAX = 1000
LOOKS_PER_RUN = 10
FIRST_TURN_MAX = 8999  # of four digits, which the id of a run has room for; it grows later
# Live runs retried by hand that one schedule remembers; new runs do not wait for further ones.
RETRIED_MAX = 100
# Between two log lines about skipped runs of one schedule, and about its new beginnings.
REPORT_GAP_NS = 60 * SECOND_NS


class Schedules:
    def __init__(self, state: State, ledger: Ledger, leases: Leases, intake: Intake) -> None:
        self._state = state
        self._ledger = ledger
        self._leases = leases
        self._intake = intake
        self._results = ScheduleResults(state, ledger)
        self.by_name = {each.name: Schedule(each) for each in _own(state.policy)}
        self._due: DueTimes[Schedule] = DueTimes()
        self._waiting: dict[str, Schedule] = {}  # due, and not to be run before the next reading
        self._restless: dict[str, Schedule] = {}  # with something left to report, or to settle
        self._wake_ns = 0  # when the next timer fires; 0: none is set
        self._read_ns = 0  # what the clock said last
        for schedule in self.by_name.values():
            self._due.list(schedule, 0)

    # -- what it is told ----------------------------------------------------------------------

    def recovered(self, facts: Iterable[tuple[str, bytes]]) -> None:
        """Restore schedules from the store; called before its tasks are recovered."""
        for name, value in facts:
            if name in self.by_name:
                self.restore(name, value)
            else:
                self.forget(name, value)  # no longer in the configuration

    def restore(self, name: str, value: bytes) -> None:
        """Go on where a schedule was, as the store has it."""
        schedule = self.by_name[name]
        try:
            record = decode_record(value)
        except msgspec.MsgspecError as error:
            why = f"what was stored of it cannot be read ({error}): it begins anew"
            self._results.report(schedule, "schedule.reset", "error", reason=why)
            return
        self._restore(schedule, record)

    def _restore(self, schedule: Schedule, record: ScheduleRecord) -> None:
        adopt(record)
        if record.plan != schedule.record.plan:
            record = ScheduleRecord(
                schedule.record.plan,
                turn=record.turn + 1,
                paused=record.paused,
                asked_ns=record.asked_ns,
                asked=record.asked,
                watched=record.watched,
            )
            begin_anew(record.watched)
        if not schedule.policy.enabled:
            record.last_ns = 0  # instants while it was disabled are not caught up with
        schedule.record = record
        if record.last_ns:
            schedule.settle(record.last_ns)
        for note in record.watched.untold:
            self._ledger.tell(change_report(schedule, note, again=True))
        self._due.list(schedule, 0)
        self._write(schedule)

    def follow(self, added: Iterable[SchedulePolicy] = ()) -> None:
        """Apply other schedules; one with an unchanged plan goes on where it is."""
        wanted = {policy.name: policy for policy in (*_own(self._state.policy), *added)}
        for name in [name for name in self.by_name if name not in wanted]:
            self.remove(name)
        for policy in wanted.values():
            self.apply(policy)

    def apply(self, policy: SchedulePolicy) -> bool:
        """Add a schedule, or change the one of this name; return whether it is new."""
        schedule = self.by_name.get(policy.name)
        if schedule is None:
            schedule = self.by_name[policy.name] = Schedule(policy)
            # One of this name may have had runs at the same instants: their ids must differ.
            schedule.record.turn = self._state.rng.randint(1, FIRST_TURN_MAX)
            self._due.list(schedule, 0)
            return True
        if schedule.policy != policy:
            self._replan(schedule, policy)
        return False

    def begin(self, name: str, ago_ns: int) -> None:
        """Begin a new schedule as if that had been so long ago; its first run comes earlier."""
        schedule = self.by_name[name]
        schedule.record.asked_ns = self._wall_ns()
        if schedule.active:
            schedule.settle(self._wall_ns() - ago_ns)
            self._due.list(schedule, schedule.next_ns or 0)
            self._wake()
        self._write(schedule)

    def remove(self, name: str) -> None:
        """Forget a schedule; its runs that are under way end as they would."""
        self.forget(name, self.release(name))

    def forget(self, name: str, value: bytes) -> None:
        """Forget what release() returned of a schedule, and its history."""
        record = readable(value)
        self._ledger.remember(FACT, name, None)
        for kept in record.watched.history if record is not None else ():
            self._ledger.remember(HISTORY, history_key(name, kept.number), None)

    def release(self, name: str) -> bytes:
        """Stop looking after a schedule; return what restore() needs."""
        schedule = self.by_name.pop(name)
        self._tell_skipped(schedule, at_once=True)
        self._restless.pop(name, None)
        self._waiting.pop(name, None)
        self._due.leave(schedule)
        return encode_record(schedule.record)

    def _replan(self, schedule: Schedule, policy: SchedulePolicy) -> None:
        record, plan = schedule.record, plan_name(policy)
        if record.plan != plan:  # begins anew, but a live run still counts
            run = (record.task, record.ran_ns, record.state)
            asked, watched = (record.asked_ns, record.asked), record.watched
            begin_anew(watched)
            record = ScheduleRecord(plan, 0, record.turn + 1, record.paused, *run, watched=watched)
            record.asked_ns, record.asked = asked
        if not policy.enabled:
            record.last_ns = 0  # instants while it was disabled are not caught up with
        schedule.policy, schedule.record = policy, record
        schedule.next_ns = None
        if record.last_ns:
            schedule.settle(record.last_ns)
        self._due.list(schedule, 0)
        self._write(schedule)

    def clock_read(self, _: events.ClockRead) -> None:
        for name, schedule in list(self._restless.items()):
            if schedule.told and self._ledger.settled:
                self._write(schedule)
            self._tell_skipped(schedule)
            if not schedule.told and not schedule.unreported:
                del self._restless[name]
        wall_ns = self._wall_ns()
        if wall_ns < self._read_ns:  # set back: what was not due for long may begin anew
            for schedule in self.by_name.values():
                self._due.list(schedule, 0)
        for schedule in self._waiting.values():
            self._due.list(schedule, 0)
        self._waiting.clear()
        self._read_ns = wall_ns
        self._look_at_due()

    def closing(self, _: events.ShutdownRequested) -> None:
        """Report skipped runs before a shutdown."""
        for schedule in self.by_name.values():
            self._tell_skipped(schedule, at_once=True)

    def pause(self, event: schedule_events.SchedulePauseRequested) -> None:
        schedule = self.by_name.get(event.name)
        rejected = [] if schedule is not None else [self._unknown(event.name)]
        if schedule is not None and schedule.record.paused != event.paused:
            schedule.record.paused = event.paused
            if not event.paused:  # instants of the pause are not caught up with
                schedule.settle(max(schedule.record.last_ns, self._wall_ns()))
                self._due.list(schedule, 0)
            self._write(schedule)
            self._results.report(
                schedule, "schedule.paused" if event.paused else "schedule.resumed"
            )
        self._ledger.tell(Acknowledge(event.peer, event.request, rejected))

    def hold(self, name: str) -> None:
        """Pause a schedule that is being put."""
        schedule = self.by_name[name]
        schedule.record.paused = True
        self._write(schedule)

    def followed(self, event: events.ChangesFollowed) -> None:
        self._results.tell_newest(event.peer, self.by_name.values())

    def change_told(self, event: events.ChangeTold) -> None:
        """Note that a change was told; that is written when the clock is read next."""
        schedule = self.by_name.get(event.schedule)
        if schedule is not None:
            told = (event.task, event.number)
            untold = schedule.record.watched.untold
            schedule.told += [note for note in untold if (note.task, note.number) == told]
            self._restless[event.schedule] = schedule

    def run_now(self, event: schedule_events.ScheduleRunRequested) -> None:
        schedule = self.by_name.get(event.name)
        rejection: Rejection | None = None
        if schedule is None:
            rejection = self._unknown(event.name)
        elif event.id and self._was_made(schedule, event.id):
            pass
        elif event.again and not self._is_new(schedule, event.id):
            rejection = perhaps_made(event.name, event.id)
        elif schedule.alive and not schedule.policy.overlap:
            rejection = still_running(event.name, schedule.alive)
        else:
            rejection = self._run(schedule, self._wall_ns(), by_hand=True, id_=event.id)
        if schedule is not None and rejection is None:
            self._write(schedule)
            self._ledger.tell(Acknowledge(event.peer, event.request, []))
        elif rejection is not None:  # a refusal need not wait for the disk, which may be full
            self._state.out.append(Acknowledge(event.peer, event.request, [rejection]))

    def _was_made(self, schedule: Schedule, id_: str) -> bool:
        """Whether a run that was asked for by this id is there already."""
        return id_ in (schedule.record.task, schedule.record.asked) or self._intake.alive(id_)

    def _is_new(self, schedule: Schedule, id_: str) -> bool:
        """Whether a run that is asked for again was surely not made before."""
        return schedule.record.asked_ns < asked_ns(id_) <= self._wall_ns()

    def _unknown(self, name: str) -> Rejection:
        return Rejection(name, UNKNOWN_SCHEDULE, f"there is no schedule '{name}'")

    # -- the clock ----------------------------------------------------------------------------

    def _wall_ns(self) -> int:
        assert self._state.wall_offset_ns is not None, "the clock has not been read"
        return self._state.wall_ns()

    def _begin(self, schedule: Schedule) -> None:
        """Begin now, without the instants before."""
        if schedule.record.last_ns > self._wall_ns():
            schedule.record.turn += 1
        schedule.record.asked_ns = schedule.record.asked_ns or self._wall_ns()
        schedule.settle(self._wall_ns())

    def _look_at_due(self) -> None:
        """Look at the schedules that are due, as many as one event may; set a timer for others."""
        wall_ns, looks, due = self._wall_ns(), LOOKS_MAX, self._due
        while looks > 0 and (schedule := due.take(wall_ns)) is not None:
            runs = schedule.record.runs
            self._look(schedule)
            looks -= 1 + LOOKS_PER_RUN * (schedule.record.runs - runs)
        self._wake()

    def _wake(self) -> None:
        """Set a timer for the next instant, if that is near."""
        next_ns, now_ns = self._due.next_ns(), self._state.now_ns
        if next_ns is None or (ahead_ns := next_ns - self._wall_ns()) > HORIZON_NS:
            return
        wake_ns = now_ns + max(1, ahead_ns)  # not in this turn, in which others must be heard
        if not now_ns < self._wake_ns <= wake_ns:
            self._wake_ns = wake_ns
            self._state.timers.at(wake_ns, self._look_at_due)

    def _look(self, schedule: Schedule) -> None:
        """Run what is due, and list the schedule for its next instant."""
        if schedule.active:
            self._run_due(schedule)
            next_ns = schedule.next_ns if schedule.record.last_ns else 0  # 0: it could not begin
            if next_ns is not None and next_ns > self._wall_ns():
                self._due.list(schedule, next_ns)
            elif next_ns is not None:
                self._waiting[schedule.policy.name] = schedule

    def _run_due(self, schedule: Schedule) -> None:
        if not self._state.intake_open or self._state.store_problem:
            return
        wall_ns, record = self._wall_ns(), schedule.record
        if not record.last_ns or self._stepped_back(schedule, record.last_ns - wall_ns):
            self._begin(schedule)
            self._write(schedule)
        if schedule.next_ns is None:
            return
        if schedule.next_ns <= wall_ns and not self._must_wait(schedule):
            self._catch_up(schedule, wall_ns)
            self._write(schedule)

    def _stepped_back(self, schedule: Schedule, ahead_ns: int) -> bool:
        """Return whether `last_ns` lies too far ahead of the clock to wait for it."""
        if not is_set_back(schedule.policy, ahead_ns):
            return False
        why = set_back_why(ahead_ns)
        now_ns = self._state.now_ns
        if not schedule.reset_ns or now_ns - schedule.reset_ns >= REPORT_GAP_NS:
            schedule.reset_ns = now_ns
            self._results.report(schedule, "schedule.reset", "warning", reason=why)
        return True

    def _look_again(self, schedule: Schedule) -> None:
        if self.by_name.get(schedule.policy.name) is schedule:  # else it was removed
            self._look(schedule)
            self._wake()

    # -- what is due --------------------------------------------------------------------------

    def _must_wait(self, schedule: Schedule) -> bool:
        policy = schedule.policy
        if schedule.alive and not policy.overlap and policy.catch_up == "all":
            return True  # looked at again when that run has ended
        name = policy.task.partition(".")[0]
        pool = self._state.pools.get(name)
        if pool is None:  # a reload may be adding it
            return any(each.name == name for each in self._state.policy.pools)
        if pool.halt == DRAINED:
            return True
        # The argument that names the site is known when the worker's code is loaded.
        return (
            pool.declarations is None
            and pool.fork_server == ForkServerState.STARTING
            and bool(policy.sites)
            and not policy.target
        )

    def _catch_up(self, schedule: Schedule, wall_ns: int) -> None:
        """Run or skip the instants that are due, as the policy says."""
        policy = schedule.policy
        due = due_runs(policy, schedule.record.last_ns, wall_ns)
        if due.left_out:
            self._skip(schedule, due.left_out, due.why)
        for instant_ns in due.instants:
            way = self._way(schedule)
            if way == "waits":
                return  # the next run follows when this one has ended
            schedule.settle(instant_ns)
            if way == "left out":
                self._skip(schedule, 1, self._why_alive(schedule))
            elif way == "hastens":
                self._hasten(schedule)
            else:
                if way == "replaces":
                    self._end_last(schedule)
                rejection = self._run(schedule, instant_ns)
                if rejection is not None:
                    self._skip(schedule, 1, f"{rejection.code}: {rejection.message}")
        if not due.instants:
            schedule.settle(due.newest_ns)

    def _way(self, schedule: Schedule) -> Way:
        alive = schedule.all_alive
        return way_of(
            schedule.policy,
            alive=bool(alive),
            retrying=all(_is_retrying(self._state.tasks.get(id_)) for id_ in alive),
            asked=any(self._is_asked(schedule, id_) for id_ in alive),
        )

    def _is_asked(self, schedule: Schedule, id_: str) -> bool:
        return is_by_hand(id_) or id_ in schedule.record.retried

    def _end_last(self, schedule: Schedule) -> None:
        """End the last run, which only waits for another attempt: the run that is due is one."""
        failure = Failure(CANCEL, message=replaced_why(schedule.policy.name))
        self._leases.withdraw(self._state.tasks[schedule.alive], CANCELLED, failure)

    def _hasten(self, schedule: Schedule) -> None:
        """Attempt the run that somebody waits for now, in place of the one that is due."""
        id_ = next(each for each in schedule.all_alive if self._is_asked(schedule, each))
        self._leases.hasten(self._state.tasks[id_])
        self._skip(schedule, 1, hastened_why(id_))

    def _why_alive(self, schedule: Schedule) -> str:
        """Say why the last run is in the way of the next."""
        task = self._state.tasks.get(schedule.alive)
        gate = task.gate if task is not None and task.state == TaskState.QUEUED else None
        why = gate.why(self._state.now_ns) if gate is not None else ""
        return f"run {schedule.alive} has not ended" + (f": {why}" if why else "")

    def _run(
        self, schedule: Schedule, instant_ns: int, *, by_hand: bool = False, id_: str = ""
    ) -> Rejection | None:
        """Create the task of this instant, or say why not."""
        policy, record = schedule.policy, schedule.record
        before = (record.task, record.ran_ns, record.state)
        spec = run_spec(
            policy,
            instant_ns,
            record.turn,
            site=self._site(policy),
            delay_ns=0 if by_hand else self._state.rng.randint(0, policy.jitter_ns),
            by_hand=by_hand,
        )
        if id_:
            spec = structs.replace(spec, id=id_)
        # Noted first: a task with a key may end at once, with another task's result.
        record.task, record.ran_ns, record.state = spec.id, instant_ns, ""
        rejection = self._intake.run(spec, self._wall_ns())
        if rejection is not None:
            record.task, record.ran_ns, record.state = before
            return rejection
        record.runs += 1
        if by_hand:
            record.asked_ns, record.asked = asked_ns(spec.id), spec.id
        return None

    def _site(self, policy: SchedulePolicy) -> str:
        pool, _, method = policy.task.partition(".")
        found = self._state.pools.get(pool)
        declared = found.declarations.get(method) if found and found.declarations else None
        return policy.sites.get(declared.target, "") if declared is not None else ""

    # -- what became of it --------------------------------------------------------------------

    def _of(self, id_: str) -> Schedule | None:
        """Return the schedule of this run, if it is still in the configuration."""
        return self.by_name.get(id_.removeprefix(RUN_PREFIX).rpartition(".")[0])

    def retried(self, id_: str, alive: bool) -> None:
        """Note that an ended run was retried by hand, or that the retry is over."""
        schedule = self._of(id_)
        if schedule is None:
            return
        retried = [each for each in schedule.record.retried if each != id_]
        if alive and len(retried) < RETRIED_MAX:
            retried.append(id_)
        schedule.record.retried = retried
        self._write(schedule)

    def ended(self, task: Task) -> None:
        """Note how a run ended, in the transaction that writes its result."""
        id_, outcome = task.spec.id, task.outcome
        assert outcome is not None
        schedule = self._of(id_)
        if schedule is None:
            return
        record, policy = schedule.record, schedule.policy
        if id_ in record.retried:
            self.retried(id_, False)
        newest = record.task == id_
        if newest:
            record.state = outcome.state
        if policy.catch_up == "all" and self._state.wall_offset_ns is not None:
            self._state.timers.at(self._state.now_ns, self._look_again, schedule)
        good = outcome.state == SUCCEEDED and not (outcome.stale or outcome.fallback)
        if policy.notify and good:
            self._results.look_at(schedule, task, outcome)
        elif policy.notify and (outcome.state in (FAILED, SUCCEEDED) or outcome.attempts):
            self._results.count_failure(schedule, outcome)
        if newest or policy.notify:
            self._write(schedule)

    def _skip(self, schedule: Schedule, count: int, why: str) -> None:
        schedule.record.skipped += count
        schedule.unreported += count
        schedule.why = why
        self._tell_skipped(schedule)

    def _tell_skipped(self, schedule: Schedule, *, at_once: bool = False) -> None:
        """Report all runs skipped since the last report, at most once in REPORT_GAP_NS."""
        now_ns, last_ns = self._state.now_ns, schedule.reported_ns
        if schedule.unreported and (at_once or not last_ns or now_ns - last_ns >= REPORT_GAP_NS):
            count, schedule.unreported, schedule.reported_ns = schedule.unreported, 0, now_ns
            self._results.report(
                schedule, "schedule.skipped", "warning", reason=schedule.why, count=count
            )

    def _write(self, schedule: Schedule) -> None:
        if schedule.told:  # by the way: on a busy disk nothing else would write it
            self._results.settle_told(schedule)
        if schedule.unreported:
            self._restless[schedule.policy.name] = schedule
        self._ledger.remember(FACT, schedule.policy.name, encode_record(schedule.record))

    def validate(self) -> None:
        """Check that every active schedule is listed, not later than it is due, or waits."""
        for name, schedule in self.by_name.items():
            assert schedule.policy.name == name
            if schedule.active and schedule.next_ns is not None and name not in self._waiting:
                assert schedule.look_ns is not None and schedule.look_ns <= schedule.next_ns, name
            if schedule.told or schedule.unreported:
                assert self._restless.get(name) is schedule, name


def _is_retrying(task: Task | None) -> bool:
    """Whether a task was attempted, and waits for another attempt."""
    return task is not None and task.state == TaskState.WAITING and task.attempt > 0


def _own(policy: FleetPolicy) -> list[SchedulePolicy]:
    """Return the schedules that run here: those of the cluster's pools run where it decides."""
    return [each for each in policy.schedules if not is_shared(policy, each)]
