"""Schedules: create one task for each instant, or report why not.

One fact is kept for each schedule (`ScheduleRecord`). All instants up to its `last_ns` are settled:
run, or skipped and counted. `last_ns` moves in the transaction that adds the task, so
a crash leaves either both or none. The task's id is made of schedule and instant.

ClockRead tells the wall clock once a second, so a clock that was set and a machine that slept are
noticed. A jump forwards is downtime: `catch_up` decides about the instants in it. After a jump
backwards, cron waits until the clock is beyond `last_ns` again, and an interval begins anew.
Between two readings the monotonic clock counts on. A timer is set only for instants within the next
two readings, so no timer outlives a change of the clock for long.

Counted and reported instead of run: instants that `catch_up` leaves out, instants during the last
run (`overlap = false`; with `catch_up = "all"` they wait for their turn), instants at which
the queue is full. No task is created during a shutdown, while the store cannot write and while the
pool is drained: that is downtime.

Schedules of pools whose tasks come from a cluster are none of these: see cluster/scheduler.py.
"""

from hashlib import sha256

import msgspec
from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import SUCCEEDED, UNKNOWN_TASK, Change, Rejection
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Acknowledge, Report, TellChanges
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.policy import FleetPolicy, SchedulePolicy
from musterd.supervisor.core.model.pool import ForkServerState
from musterd.supervisor.core.model.runs import (
    RUN_PREFIX,
    due_runs,
    is_set_back,
    plan_name,
    run_spec,
    set_back_why,
    still_running,
)
from musterd.supervisor.core.model.shared import is_shared
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task
from musterd.supervisor.core.tasks.intake import Intake
from musterd.supervisor.core.tasks.pauses import DRAINED

FACT = "schedule"  # Fact.kind
# Timers are set for instants within this time: two readings of the clock.
HORIZON_NS = 2 * SECOND_NS
# Live runs retried by hand that one schedule remembers; new runs do not wait for further ones.
RETRIED_MAX = 100
# Between two log lines about skipped runs of one schedule, and about its new beginnings.
REPORT_GAP_NS = 60 * SECOND_NS


class ScheduleRecord(Struct, array_like=True):
    """The state of a schedule that survives restarts."""

    plan: str  # task and timing: another plan begins anew
    last_ns: int = 0  # all instants up to this one are settled; 0: not begun
    turn: int = 0  # how often `last_ns` was set back: part of the ids, so that none repeats
    paused: bool = False
    task: str = ""  # id of the newest run
    ran_ns: int = 0  # the instant of the newest run
    state: str = ""  # how the newest run ended; "" while it is alive
    digest: str = ""  # of the last good result
    untold: str = ""  # id of a run whose result changed, until the report is surely out
    runs: int = 0
    skipped: int = 0
    retried: list[str] = []  # ids of runs retried by hand, until they end
    changed: str = ""  # id of the last run whose result changed, to `digest`


_decode = msgspec.msgpack.Decoder(ScheduleRecord).decode
_encode = msgspec.msgpack.Encoder().encode


class Schedule:
    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self.record = ScheduleRecord(plan_name(policy))
        self.next_ns: int | None = None  # the instant after `last_ns`
        self.armed_ns = 0  # the instant a timer is set for
        self.unreported = 0  # skipped runs that were not reported yet
        self.why = ""
        self.reported_ns = 0  # when skipped runs were reported last
        self.reset_ns = 0  # when its new beginning was reported last

    @property
    def active(self) -> bool:
        return self.policy.enabled and not self.record.paused

    @property
    def alive(self) -> str:
        """Return the id of a live run: the newest, or one that was retried by hand."""
        record = self.record
        if record.task and not record.state:
            return record.task
        return record.retried[0] if record.retried else ""

    def settle(self, instant_ns: int) -> None:
        """Settle all instants up to this one."""
        self.record.last_ns = instant_ns
        self.next_ns = self.policy.timing.next_after(instant_ns)


class Schedules:
    def __init__(self, state: State, ledger: Ledger, intake: Intake) -> None:
        self._state = state
        self._ledger = ledger
        self._intake = intake
        self.by_name = {each.name: Schedule(each) for each in _own(state.policy)}

    # -- what it is told ----------------------------------------------------------------------

    def recovered(self, facts: list[tuple[str, bytes]]) -> None:
        """Restore schedules from the store; called before its tasks are recovered."""
        for name, value in facts:
            schedule = self.by_name.get(name)
            if schedule is None:
                self._ledger.remember(FACT, name, None)  # no longer in the configuration
                continue
            try:
                record = _decode(value)
            except msgspec.MsgspecError as error:
                why = f"what was stored of it cannot be read ({error}): it begins anew"
                self._report(schedule, "schedule.reset", "error", reason=why)
                continue
            self._restore(schedule, record)

    def _restore(self, schedule: Schedule, record: ScheduleRecord) -> None:
        if record.plan != schedule.record.plan:
            record = ScheduleRecord(
                schedule.record.plan, turn=record.turn + 1, paused=record.paused
            )
        if not schedule.policy.enabled:
            record.last_ns = 0  # instants while it was disabled are not caught up with
        schedule.record = record
        if record.last_ns:
            schedule.settle(record.last_ns)
        if record.untold:
            self._ledger.tell(self._changed(schedule))
        self._write(schedule)

    def follow(self) -> None:
        """Apply other schedules; one with an unchanged plan goes on where it is."""
        wanted = {policy.name: policy for policy in _own(self._state.policy)}
        for name in [name for name in self.by_name if name not in wanted]:
            self._tell_skipped(self.by_name.pop(name), at_once=True)
            self._ledger.remember(FACT, name, None)
        for name, policy in wanted.items():
            schedule = self.by_name.get(name)
            if schedule is None:
                self.by_name[name] = Schedule(policy)
            elif schedule.policy != policy:
                self._replan(schedule, policy)

    def _replan(self, schedule: Schedule, policy: SchedulePolicy) -> None:
        record, plan = schedule.record, plan_name(policy)
        if record.plan != plan:  # begins anew, but a live run still counts
            run = (record.task, record.ran_ns, record.state)
            record = ScheduleRecord(plan, 0, record.turn + 1, record.paused, *run)
        if not policy.enabled:
            record.last_ns = 0  # instants while it was disabled are not caught up with
        schedule.policy, schedule.record = policy, record
        schedule.next_ns, schedule.armed_ns = None, 0
        if record.last_ns:
            schedule.settle(record.last_ns)
        self._write(schedule)

    def clock_read(self, _: events.ClockRead) -> None:
        for schedule in self.by_name.values():
            if schedule.record.untold and self._ledger.settled:
                schedule.record.untold = ""  # the transaction of the report is on disk
                self._write(schedule)
            self._tell_skipped(schedule)
            self._look(schedule)

    def closing(self, _: events.ShutdownRequested) -> None:
        """Report skipped runs before a shutdown."""
        for schedule in self.by_name.values():
            self._tell_skipped(schedule, at_once=True)

    def pause(self, event: events.SchedulePauseRequested) -> None:
        schedule = self.by_name.get(event.name)
        rejected = [] if schedule is not None else [self._unknown(event.name)]
        if schedule is not None and schedule.record.paused != event.paused:
            schedule.record.paused = event.paused
            if not event.paused:  # instants of the pause are not caught up with
                schedule.settle(max(schedule.record.last_ns, self._wall_ns()))
            self._write(schedule)
            self._report(schedule, "schedule.paused" if event.paused else "schedule.resumed")
        self._ledger.tell(Acknowledge(event.peer, 0, rejected))

    def followed(self, event: events.ChangesFollowed) -> None:
        changes = [
            Change(name, schedule.record.changed, schedule.record.digest)
            for name, schedule in self.by_name.items()
            if schedule.record.changed
        ]
        self._ledger.tell(TellChanges(event.peer, changes))

    def run_now(self, event: events.ScheduleRunRequested) -> None:
        schedule = self.by_name.get(event.name)
        if schedule is None:
            rejection: Rejection | None = self._unknown(event.name)
        elif schedule.alive and not schedule.policy.overlap:
            rejection = still_running(event.name, schedule.alive)
        else:
            rejection = self._run(schedule, self._wall_ns(), by_hand=True)
        if schedule is not None and rejection is None:
            self._write(schedule)
            self._ledger.tell(Acknowledge(event.peer, 0, []))
        elif rejection is not None:  # a refusal need not wait for the disk, which may be full
            self._state.out.append(Acknowledge(event.peer, 0, [rejection]))

    def _unknown(self, name: str) -> Rejection:
        return Rejection("", UNKNOWN_TASK, f"there is no schedule '{name}'")

    # -- the clock ----------------------------------------------------------------------------

    def _wall_ns(self) -> int:
        assert self._state.wall_offset_ns is not None, "the clock has not been read"
        return self._state.wall_ns()

    def _begin(self, schedule: Schedule) -> None:
        """Begin now, without the instants before."""
        if schedule.record.last_ns > self._wall_ns():
            schedule.record.turn += 1
        schedule.settle(self._wall_ns())

    def _look(self, schedule: Schedule) -> None:
        """Run what is due, or set a timer."""
        if not schedule.active or not self._state.intake_open or self._state.store_problem:
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
        if schedule.next_ns is not None:
            self._arm(schedule, schedule.next_ns, wall_ns)

    def _stepped_back(self, schedule: Schedule, ahead_ns: int) -> bool:
        """Return whether `last_ns` lies too far ahead of the clock to wait for it."""
        if not is_set_back(schedule.policy, ahead_ns):
            return False
        why = set_back_why(ahead_ns)
        now_ns = self._state.now_ns
        if not schedule.reset_ns or now_ns - schedule.reset_ns >= REPORT_GAP_NS:
            schedule.reset_ns = now_ns
            self._report(schedule, "schedule.reset", "warning", reason=why)
        return True

    def _arm(self, schedule: Schedule, next_ns: int, wall_ns: int) -> None:
        if wall_ns < next_ns <= wall_ns + HORIZON_NS and schedule.armed_ns != next_ns:
            schedule.armed_ns = next_ns
            due_ns = self._state.now_ns + next_ns - wall_ns
            self._state.timers.at(due_ns, self._fire, schedule)

    def _fire(self, schedule: Schedule) -> None:
        schedule.armed_ns = 0
        self._look_again(schedule)

    def _look_again(self, schedule: Schedule) -> None:
        if self.by_name.get(schedule.policy.name) is schedule:  # else it was removed
            self._look(schedule)

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
            if schedule.alive and not policy.overlap:
                if policy.catch_up == "all":
                    return  # the next run follows when this one has ended
                self._skip(schedule, 1, f"run {schedule.alive} has not ended")
                schedule.settle(instant_ns)
                continue
            schedule.settle(instant_ns)
            rejection = self._run(schedule, instant_ns)
            if rejection is not None:
                self._skip(schedule, 1, f"{rejection.code}: {rejection.message}")
        if not due.instants:
            schedule.settle(due.newest_ns)

    def _run(
        self, schedule: Schedule, instant_ns: int, *, by_hand: bool = False
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
        # Noted first: a task with a key may end at once, with another task's result.
        record.task, record.ran_ns, record.state = spec.id, instant_ns, ""
        rejection = self._intake.run(spec, self._wall_ns())
        if rejection is not None:
            record.task, record.ran_ns, record.state = before
            return rejection
        record.runs += 1
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
        if good and policy.notify:
            before, record.digest = record.digest, sha256(outcome.value).hexdigest()
            if before and before != record.digest:
                record.untold = record.changed = id_
                self._ledger.tell(self._changed(schedule))
        if newest or good:
            self._write(schedule)

    def _changed(self, schedule: Schedule) -> Report:
        policy, record = schedule.policy, schedule.record
        return Report(
            "task.changed",
            pool=policy.task.partition(".")[0],
            task=record.untold,
            schedule=policy.name,
            digest=record.digest,
        )

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
            self._report(schedule, "schedule.skipped", "warning", reason=schedule.why, count=count)

    def _report(
        self,
        schedule: Schedule,
        event: str,
        level: str = "info",
        *,
        reason: str = "",
        count: int = 0,
    ) -> None:
        self._state.out.append(
            Report(
                event,
                level,
                pool=schedule.policy.task.partition(".")[0],
                reason=reason,
                schedule=schedule.policy.name,
                count=count,
            )
        )

    def _write(self, schedule: Schedule) -> None:
        self._ledger.remember(FACT, schedule.policy.name, _encode(schedule.record))


def _own(policy: FleetPolicy) -> list[SchedulePolicy]:
    """Return the schedules that run here: those of the cluster's pools run where it decides."""
    return [each for each in policy.schedules if not is_shared(policy, each)]
