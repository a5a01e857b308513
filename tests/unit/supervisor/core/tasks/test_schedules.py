"""Schedules in the core: each instant once, over restarts, set clocks, full queues and pauses."""

from datetime import UTC, datetime
from hashlib import sha256
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    CRITICAL,
    HIGH,
    LOW,
    NORMAL,
    VIEW_BYTES_MAX,
    Change,
    Completion,
    Failure,
    TaskDeclaration,
    TaskSpec,
    View,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events, schedule_events
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.policy import SchedulePolicy, WatchPolicy
from musterd.supervisor.core.model.runs import CATCH_UP_MAX, ON_TIME_NS, WRONG_CLOCK_NS
from musterd.supervisor.core.model.timing import Cron, Every
from musterd.supervisor.core.tasks.outage import PATIENCE_NS
from musterd.supervisor.core.tasks.schedule import CUT_OFF, FACT
from musterd.supervisor.core.tasks.schedules import REPORT_GAP_NS
from support.core import Muster, of

MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS
NOON_NS = int(datetime(2025, 6, 1, 12, tzinfo=UTC).timestamp()) * SECOND_NS
EVERY_MINUTE = Every(MINUTE_NS)
DAILY = Cron("30 12 * * *", ZoneInfo("UTC"))


class Clockwork:
    """A fleet with one schedule `s`, on a disk and under a wall clock that the test moves."""

    declared: tuple[TaskDeclaration, ...] = (TaskDeclaration("x", target="url"),)

    def __init__(
        self, muster: type[Muster], timing: Any = EVERY_MINUTE, *, size: int = 1, **policy: Any
    ):
        self._muster = muster
        self.timing = timing
        self.size = size
        self.policy = policy
        self.wall_ns = NOON_NS
        self.pool: dict[str, Any] = {}
        self.facts: dict[str, bytes] = {}
        self.history: dict[str, bytes] = {}
        self.tells = True  # the shell gets round to telling changes
        self.told: list[Any] = []
        self.live: dict[str, events.Recovered] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a life of the daemon with what is on disk."""
        self.world = self._muster(self.size, **self.pool)
        schedule = SchedulePolicy("s", "p.x", self.timing, **self.policy)
        policy = msgspec.structs.replace(self.world.policy, schedules=(schedule,))
        last_seq = max((row.seq for row in self.live.values()), default=0)
        self.world.fleet = Fleet(policy, Random(1), last_seq + 1000)
        self.tell(events.FactsRecovered(FACT, list(self.facts.items())))
        self.tell(events.TasksRecovered(list(self.live.values())))
        for spawn in of(actions.SpawnWorker, self._start()):
            self._note(self.world.bring_up(spawn.worker))
        self.read_clock()

    def _start(self) -> list[Any]:
        self.tell(events.Started())
        return self.tell(events.ForkServerReady("p", self.declared))

    def restart(self, after_ns: int = 0, **policy: Any) -> None:
        self.policy.update(policy)
        self.wall_ns += after_ns
        self.begin()

    def tell(self, event: Any) -> list[Any]:
        return self._note(self.world.tell(event))

    def _note(self, answer: list[Any]) -> list[Any]:
        for page in of(actions.Persist, answer):
            for new in page.added:
                self.live[new.spec.id] = events.Recovered(
                    new.seq, new.spec, new.submitted_wall_ns, 0, 0, 0, 0, 0, False
                )
            for final in page.finished:
                self.live.pop(final.spec.id, None)
            for fact in page.facts:
                facts = self.facts if fact.kind == FACT else self.history
                if fact.value is None:
                    facts.pop(fact.key, None)
                else:
                    facts[fact.key] = fact.value
        self.told += answer
        for report in reports(answer, "task.changed") if self.tells else ():
            self.tell(events.ChangeTold(report.schedule, report.task, report.number))
        return answer

    def read_clock(self) -> list[Any]:
        return self.tell(events.ClockRead(self.wall_ns))

    def wait(self, nanoseconds: int) -> list[Any]:
        """Let both clocks go on; read the wall clock once a second."""
        answer = []
        while nanoseconds > 0:
            step_ns = min(SECOND_NS, nanoseconds)
            nanoseconds -= step_ns
            answer += self._note(self.world.wait(step_ns))
            self.wall_ns += step_ns
            answer += self.read_clock()
        return answer

    def set_clock(self, wall_ns: int) -> list[Any]:
        self.wall_ns = wall_ns
        return self.read_clock()

    def finish(
        self,
        value: bytes = b"value",
        *,
        fail: bool = False,
        kind: str = "",
        view: View | None = None,
        **fields: Any,
    ) -> list[Any]:
        """End every lease that a worker holds."""
        answer = []
        for slot in self.world.slots:
            for lease in list(slot.leases):
                if fail:
                    answer += self._note(self.world.fail(slot.worker, lease, "permanent"))
                elif kind:
                    failed = Completion(lease, 1, failure=Failure(kind, message="no"), **fields)
                    answer += self.tell(events.LeasesCompleted(slot.worker, [failed]))
                else:
                    done = [Completion(lease, MILLISECOND_NS, value, view=view)]
                    answer += self.tell(events.LeasesCompleted(slot.worker, done))
        return answer

    def retry(self, spec: TaskSpec, seq: int) -> list[Any]:
        """Have a failed run retried by a person."""
        requested = events.RetryRequested(b"person", 1, [spec.id], self.wall_ns)
        (find,) = self.tell(requested)
        ended = [events.EndedTask(seq, spec, "failed")]
        return self.tell(events.EndedFound(find.requested, find.ids, ended, find.rejected))

    @property
    def schedule(self) -> Any:
        return self.world.fleet.schedules["s"]

    @property
    def record(self) -> Any:
        return self.schedule.record


@pytest.fixture
def clockwork(muster: type[Muster]) -> Any:
    return lambda *args, **policy: Clockwork(muster, *args, **policy)


def made(answer: list[Any]) -> list[TaskSpec]:
    return [new.spec for page in of(actions.Persist, answer) for new in page.added]


def instants(answer: list[Any]) -> list[int]:
    """Return the instants of the runs that were made, in seconds after noon."""
    found = [int(spec.id.rpartition(".")[2].partition("-")[0], 16) for spec in made(answer)]
    return [(instant - NOON_NS) // SECOND_NS for instant in found]


def reports(answer: list[Any], event: str) -> list[actions.Report]:
    return [each for each in of(actions.Report, answer) if each.event == event]


def skipped(answer: list[Any]) -> int:
    return sum(report.count for report in reports(answer, "schedule.skipped"))


# -- making tasks -----------------------------------------------------------------------------


def test_a_run_is_made_like_a_submit_and_leased_when_it_is_on_disk(clockwork: Any) -> None:
    clock = clockwork(args=b"\x81\xa1a\x01", priority=1, target="site", timeout_ns=7, max_retries=2)
    assert made(clock.wait(59 * SECOND_NS)) == []
    clock.world.disk_works = False
    answer = clock.wait(SECOND_NS)
    [spec] = made(answer)
    assert spec == TaskSpec(f"@s.{NOON_NS + MINUTE_NS:x}", "p.x", b"\x81\xa1a\x01", 1, "site", 7, 2)
    [page] = of(actions.Persist, answer)
    assert [fact.key for fact in page.facts] == ["s"], "in the same transaction"
    assert not of(actions.AssignLeases, answer)
    assert of(actions.AssignLeases, clock.world.commit())


def test_a_run_asks_for_an_earlier_result_as_its_schedule_says(clockwork: Any) -> None:
    clock = clockwork(key="k", cache_ns=5, debounce_ns=AS_CONFIGURED)
    [spec] = made(clock.wait(MINUTE_NS))
    assert (spec.key, spec.cache_ns, spec.debounce_ns) == ("k", 5, AS_CONFIGURED)


def test_runs_come_at_their_instant_not_at_the_next_reading_of_the_clock(clockwork: Any) -> None:
    clock = clockwork(Every(1500 * MILLISECOND_NS))
    clock.wait(SECOND_NS)
    assert not made(clock._note(clock.world.wait(499 * MILLISECOND_NS)))
    assert made(clock._note(clock.world.wait(MILLISECOND_NS)))


def test_cron_runs_at_its_instants(clockwork: Any) -> None:
    clock = clockwork(DAILY)
    assert instants(clock.wait(HOUR_NS)) == [1800]
    clock.finish()
    assert clock.schedule.next_ns == NOON_NS + 24 * HOUR_NS + 30 * MINUTE_NS


def test_a_first_start_is_remembered_so_that_short_lives_add_up(clockwork: Any) -> None:
    clock = clockwork(Every(HOUR_NS))
    for _ in range(5):
        clock.wait(10 * MINUTE_NS)
        clock.restart(after_ns=MINUTE_NS)
    assert instants(clock.wait(5 * MINUTE_NS)) == [3600]


def test_jitter_delays_each_run_by_a_random_part_of_it(clockwork: Any) -> None:
    clock = clockwork(jitter_ns=10 * SECOND_NS, overlap=True)
    delays = [spec.delay_ns for spec in made(clock.wait(30 * MINUTE_NS))]
    assert len(delays) == 30
    assert all(0 <= delay <= 10 * SECOND_NS for delay in delays)
    assert max(delays) - min(delays) > 5 * SECOND_NS


def test_the_site_is_read_from_the_argument_that_the_task_declares(muster: type[Muster]) -> None:
    clock = Clockwork(muster, sites={"url": "site.example", "text": "no"})
    assert [spec.target for spec in made(clock.wait(MINUTE_NS))] == ["site.example"]


def test_a_run_waits_until_the_task_can_declare_its_site(muster: type[Muster]) -> None:
    clock = Clockwork(muster, sites={"url": "site.example"})
    clock.wall_ns += MINUTE_NS
    fresh = Clockwork.__new__(Clockwork)
    fresh.__dict__.update(clock.__dict__)
    fresh.world = muster(1)
    schedule = SchedulePolicy("s", "p.x", EVERY_MINUTE, sites={"url": "site.example"})
    policy = msgspec.structs.replace(fresh.world.policy, schedules=(schedule,))
    fresh.world.fleet = Fleet(policy, Random(1), 5000)
    fresh.tell(events.FactsRecovered(FACT, list(clock.facts.items())))
    fresh.tell(events.Started())
    assert not made(fresh.read_clock())
    fresh.tell(events.ForkServerReady("p", (TaskDeclaration("x", target="url"),)))
    assert [spec.target for spec in made(fresh.read_clock())] == ["site.example"]


def test_a_task_that_does_not_exist_is_skipped_with_the_reason(muster: type[Muster]) -> None:
    clock = Clockwork(muster)
    clock.declared = (TaskDeclaration("other"),)
    clock.restart()
    answer = clock.wait(MINUTE_NS)
    assert not made(answer)
    [report] = reports(answer, "schedule.skipped")
    assert "UnknownTask" in report.reason
    assert clock.record.skipped == 1


# -- overlap ----------------------------------------------------------------------------------


def test_no_run_begins_while_the_last_one_is_alive(clockwork: Any) -> None:
    clock = clockwork()
    assert instants(clock.wait(3 * MINUTE_NS)) == [60]
    clock.finish()
    assert instants(clock.wait(MINUTE_NS)) == [240]
    assert clock.record.skipped == 2


def test_a_run_that_waits_for_a_retry_gives_way_to_one_that_is_due(clockwork: Any) -> None:
    clock = clockwork(max_retries=3)
    (first,) = made(clock.wait(MINUTE_NS))
    clock.finish(kind="error", retry_delay_ns=10 * MINUTE_NS)
    told = clock.wait(MINUTE_NS)
    assert instants(told) == [120]
    assert clock.record.skipped == 0
    (end,) = [final for page in of(actions.Persist, told) for final in page.finished]
    assert (end.spec.id, end.outcome.state, end.outcome.attempts) == (first.id, "cancelled", 1)
    assert end.outcome.error == "cancel: not tried again: the next run of schedule 's' is due"


def test_a_schedule_whose_retry_budget_is_used_up_runs_on_time(clockwork: Any) -> None:
    clock = clockwork(Every(2 * SECOND_NS), max_retries=3, target="site")
    clock.wait(2 * SECOND_NS)
    for number in range(2, 10):
        clock.world.fleet.sites["site"].budget.restore(0)
        clock.finish(kind="error", retry_delay_ns=SECOND_NS)
        (task,) = clock.world.fleet.tasks.values()
        assert task.debt is not None, "its retry cannot be paid for"
        assert instants(clock.wait(2 * SECOND_NS)) == [number * 2]
        assert clock.world.slots[0].leases, "the first attempt has begun"
    assert clock.record.skipped == 0


def test_a_run_that_waits_for_its_first_attempt_does_not_give_way(clockwork: Any) -> None:
    clock = clockwork(size=0)
    assert instants(clock.wait(3 * MINUTE_NS)) == [60]
    assert clock.record.skipped == 2


def test_where_every_run_counts_none_gives_way(clockwork: Any) -> None:
    clock = clockwork(max_retries=3, catch_up="all")
    clock.wait(MINUTE_NS)
    clock.finish(kind="error", retry_delay_ns=2 * MINUTE_NS)
    assert instants(clock.wait(MINUTE_NS)) == []


def by_hand(clock: Clockwork) -> TaskSpec:
    """Run the schedule by hand; return the run."""
    [spec] = made(clock.tell(schedule_events.ScheduleRunRequested("s", b"me")))
    return spec


def test_a_run_by_hand_that_waits_for_a_retry_is_attempted_when_the_next_is_due(
    clockwork: Any,
) -> None:
    clock = clockwork(max_retries=3)
    run = by_hand(clock)
    clock.finish(kind="error", retry_delay_ns=10 * MINUTE_NS)
    told = clock.wait(MINUTE_NS)
    assert made(told) == []
    [leased] = of(actions.AssignLeases, told)
    assert [lease.attempt for lease in leased.leases] == [2]
    [report] = reports(told, "schedule.skipped")
    assert report.reason == f"run {run.id}, which somebody waits for, is tried again in its place"
    assert clock.record.skipped == 1
    [end] = [final for page in of(actions.Persist, clock.finish()) for final in page.finished]
    assert (end.spec.id, end.outcome.state, end.outcome.attempts) == (run.id, "succeeded", 2)
    assert instants(clock.wait(MINUTE_NS)) == [120]


def test_a_hastened_attempt_is_not_a_retry_that_its_site_pays_for(clockwork: Any) -> None:
    clock = clockwork(Every(2 * SECOND_NS), max_retries=3, target="site")
    by_hand(clock)
    budget = clock.world.fleet.sites["site"].budget
    budget.restore(0)
    clock.finish(kind="error", retry_delay_ns=SECOND_NS)
    (task,) = clock.world.fleet.tasks.values()
    assert task.debt is not None, "its retry cannot be paid for"
    [leased] = of(actions.AssignLeases, clock.wait(2 * SECOND_NS))
    assert [lease.attempt for lease in leased.leases] == [2]
    assert task.debt is None
    budget.restore(0)
    clock.finish(kind="error", retry_delay_ns=SECOND_NS)
    assert task.debt is not None, "the next retry cannot be paid for either"


def test_a_run_by_hand_that_fails_for_good_silences_nothing(clockwork: Any) -> None:
    clock = clockwork(max_retries=1)
    run = by_hand(clock)
    clock.finish(kind="error", retry_delay_ns=10 * MINUTE_NS)
    clock.wait(MINUTE_NS)
    [end] = [
        final for page in of(actions.Persist, clock.finish(kind="error")) for final in page.finished
    ]
    assert (end.spec.id, end.outcome.state) == (run.id, "failed")
    assert instants(clock.wait(MINUTE_NS)) == [120]


def test_a_run_that_a_person_retried_is_attempted_when_the_next_is_due(clockwork: Any) -> None:
    clock = clockwork(max_retries=3)
    (run,) = made(clock.wait(MINUTE_NS))
    clock.finish(fail=True)
    clock.retry(run, seq=1)
    clock.finish(kind="error", retry_delay_ns=10 * MINUTE_NS)
    told = clock.wait(MINUTE_NS)
    assert instants(told) == []
    assert of(actions.AssignLeases, told)


def test_a_run_beside_one_that_a_person_retried_is_left_out_while_one_runs(clockwork: Any) -> None:
    clock = clockwork(max_retries=3, size=2)
    (first,) = made(clock.wait(MINUTE_NS))
    clock.finish(fail=True)
    clock.wait(MINUTE_NS)
    clock.finish(kind="error", retry_delay_ns=10 * MINUTE_NS)  # the second waits
    clock.retry(first, seq=1)  # the first runs
    told = clock.wait(MINUTE_NS)
    assert made(told) == []
    assert not of(actions.AssignLeases, told)
    clock.finish(kind="error", retry_delay_ns=10 * MINUTE_NS)  # now both wait
    [leased] = of(actions.AssignLeases, clock.wait(MINUTE_NS))
    assert [clock.world.fleet.tasks[first.id].lease] == [lease.lease for lease in leased.leases]


def test_a_run_may_begin_beside_the_last_one_where_that_is_allowed(clockwork: Any) -> None:
    clock = clockwork(overlap=True)
    assert instants(clock.wait(3 * MINUTE_NS)) == [60, 120, 180]


def test_a_run_that_is_alive_after_a_restart_still_counts(clockwork: Any) -> None:
    clock = clockwork()
    clock.wait(MINUTE_NS)
    clock.restart()
    assert instants(clock.wait(MINUTE_NS)) == []
    assert skipped(clock.told) == 1
    clock.finish()
    assert instants(clock.wait(MINUTE_NS)) == [180]


@pytest.mark.parametrize("which", [0, 1], ids=["an older run", "the newest run"])
def test_a_run_that_was_retried_by_hand_is_alive_like_any_other(clockwork: Any, which: int) -> None:
    clock = clockwork()
    runs = []
    for _ in range(2):
        runs += made(clock.wait(MINUTE_NS))
        clock.finish(fail=True)
    retried = runs[which]
    clock.retry(retried, seq=which)
    assert instants(clock.wait(MINUTE_NS)) == []
    (told,) = reports(clock.told, "schedule.skipped")
    assert told.reason == f"run {retried.id} has not ended"
    (refused,) = of(
        actions.Acknowledge, clock.tell(schedule_events.ScheduleRunRequested("s", b"p"))
    )
    assert [(each.id, each.code) for each in refused.rejected] == [(retried.id, "StillRunning")]
    clock.restart()
    assert instants(clock.wait(MINUTE_NS)) == []
    clock.finish()
    assert instants(clock.wait(MINUTE_NS)) == [300]
    assert clock.record.retried == []


def test_a_retry_by_hand_that_cannot_be_stored_does_not_silence_a_schedule(clockwork: Any) -> None:
    clock = clockwork()
    (run,) = made(clock.wait(MINUTE_NS))
    clock.finish(fail=True)
    clock.world.disk_works = False
    (new,) = [new for page in of(actions.Persist, clock.retry(run, 1)) for new in page.added]
    clock.tell(events.StoreFailing("full"))
    assert of(actions.Withdraw, clock.world.wait(PATIENCE_NS)) == [actions.Withdraw([new.seq])]
    clock.tell(events.TasksWithdrawn([new.seq]))
    clock.tell(events.StoreRecovered())
    clock.world.disk_works = True
    clock.world.commit()
    assert not clock.schedule.alive
    assert len(made(clock.wait(MINUTE_NS))) == 1


def test_skipped_runs_do_not_flood_the_log_and_none_is_left_out(clockwork: Any) -> None:
    clock = clockwork(Every(SECOND_NS))
    answer = clock.wait(5 * REPORT_GAP_NS + SECOND_NS)
    lines = reports(answer, "schedule.skipped")
    assert len(lines) == 5
    assert skipped(answer) + clock.schedule.unreported == clock.record.skipped == 300
    rest = reports(clock.tell(events.ShutdownRequested("end")), "schedule.skipped")
    assert skipped(answer) + sum(each.count for each in rest) == 300


# -- catching up ------------------------------------------------------------------------------


def test_after_a_downtime_one_run_stands_for_all(clockwork: Any) -> None:
    clock = clockwork()
    clock.told.clear()
    clock.restart(after_ns=10 * MINUTE_NS + SECOND_NS)
    assert instants(clock.told) == [600]
    assert skipped(clock.told) == 9


def test_without_catching_up_everything_missed_is_skipped(clockwork: Any) -> None:
    clock = clockwork(catch_up="none")
    clock.told.clear()
    clock.restart(after_ns=10 * MINUTE_NS + ON_TIME_NS + 1)
    assert instants(clock.told) == []
    assert skipped(clock.told) == 10
    assert instants(clock.wait(MINUTE_NS)) == [660]


def test_without_catching_up_a_quick_restart_is_still_on_time(clockwork: Any) -> None:
    clock = clockwork(catch_up="none")
    clock.told.clear()
    clock.restart(after_ns=MINUTE_NS + ON_TIME_NS)
    assert instants(clock.told) == [60]


def test_all_that_was_missed_is_run_one_after_the_other(clockwork: Any) -> None:
    clock = clockwork(catch_up="all")
    clock.told.clear()
    clock.restart(after_ns=3 * MINUTE_NS + SECOND_NS)
    assert instants(clock.told) == [60]
    for expected in (120, 180):
        clock.told.clear()
        clock.finish()
        clock._note(clock.world.wait(1))
        assert instants(clock.told) == [expected]
    clock.finish()
    assert instants(clock.wait(MINUTE_NS)) == [240]
    assert clock.record.skipped == 0


def test_all_that_was_missed_is_run_at_once_where_runs_may_overlap(clockwork: Any) -> None:
    clock = clockwork(catch_up="all", overlap=True)
    clock.told.clear()
    clock.restart(after_ns=3 * MINUTE_NS)
    assert instants(clock.told) == [60, 120, 180]


def test_even_all_has_a_limit_and_what_is_beyond_is_reported(clockwork: Any) -> None:
    clock = clockwork(catch_up="all", overlap=True)
    clock.told.clear()
    clock.restart(after_ns=(CATCH_UP_MAX + 7) * MINUTE_NS)
    assert len(made(clock.told)) == CATCH_UP_MAX
    assert instants(clock.told)[-1] == (CATCH_UP_MAX + 7) * 60
    assert skipped(clock.told) == 7


def test_with_all_what_comes_due_beside_a_run_waits_for_its_turn(clockwork: Any) -> None:
    clock = clockwork(catch_up="all")
    assert instants(clock.wait(3 * MINUTE_NS)) == [60]
    clock.told.clear()
    clock.finish()
    clock._note(clock.world.wait(1))
    assert instants(clock.told) == [120]
    assert clock.record.skipped == 0


# -- crashes ----------------------------------------------------------------------------------


def test_a_run_that_was_not_committed_is_made_again_with_the_same_id(clockwork: Any) -> None:
    clock = clockwork()
    clock.world.disk_works = False
    before = dict(clock.facts)
    [lost] = made(clock.wait(MINUTE_NS))
    clock.facts, clock.live = before, {}
    clock.told.clear()
    clock.restart()
    assert [spec.id for spec in made(clock.told)] == [lost.id]


def test_a_run_that_was_committed_is_never_made_again(clockwork: Any) -> None:
    clock = clockwork()
    clock.wait(MINUTE_NS)
    clock.told.clear()
    for _ in range(3):
        clock.restart(after_ns=SECOND_NS)
        clock.finish()
    assert made(clock.told) == []


# -- the clock --------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_repeats_no_cron_run(clockwork: Any) -> None:
    clock = clockwork(DAILY)
    assert instants(clock.wait(40 * MINUTE_NS)) == [1800]
    clock.finish()
    clock.set_clock(NOON_NS)
    assert instants(clock.wait(2 * HOUR_NS)) == []
    clock.restart(after_ns=-4 * HOUR_NS)
    assert instants(clock.wait(4 * HOUR_NS)) == []
    clock.set_clock(NOON_NS + 24 * HOUR_NS)
    assert instants(clock.wait(HOUR_NS)) == [86400 + 1800]


def test_a_clock_that_is_set_back_does_not_silence_an_interval(clockwork: Any) -> None:
    clock = clockwork()
    first = made(clock.wait(MINUTE_NS))
    clock.finish()
    clock.set_clock(NOON_NS - HOUR_NS)
    answer = clock.wait(MINUTE_NS)
    assert len(made(answer)) == 1
    clock.finish()
    clock.set_clock(NOON_NS - HOUR_NS)
    again = made(clock.wait(MINUTE_NS))
    ids = [spec.id for spec in [*first, *made(answer), *again]]
    assert len(set(ids)) == 3, "the same instant on the clock, and yet another task"
    assert len(reports(clock.told, "schedule.reset")) == 2


def test_a_clock_that_is_set_to_and_fro_is_told_once_a_minute(clockwork: Any) -> None:
    clock = clockwork()
    for _ in range(30):
        clock.set_clock(clock.wall_ns + HOUR_NS)
        clock.wait(SECOND_NS)
        clock.set_clock(clock.wall_ns - HOUR_NS)
        clock.wait(SECOND_NS)
    assert len(reports(clock.told, "schedule.reset")) == 1


def test_a_clock_that_was_wrong_by_years_does_not_silence_cron(clockwork: Any) -> None:
    clock = clockwork(DAILY)
    clock.set_clock(NOON_NS + 10 * 365 * 24 * HOUR_NS)
    clock.finish()
    clock.set_clock(NOON_NS)
    assert WRONG_CLOCK_NS == 24 * HOUR_NS
    assert instants(clock.wait(HOUR_NS)) == [1800]


def test_a_clock_that_is_set_forward_is_a_downtime(clockwork: Any) -> None:
    clock = clockwork()
    answer = clock.set_clock(NOON_NS + 5 * MINUTE_NS + SECOND_NS)
    assert instants(answer) == [300]
    assert skipped(answer) == 4


def test_a_clock_that_is_steered_back_a_little_changes_nothing(clockwork: Any) -> None:
    clock = clockwork()
    clock.wait(MINUTE_NS)
    clock.finish()
    clock.set_clock(clock.wall_ns - 300 * MILLISECOND_NS)
    assert instants(clock.wait(MINUTE_NS + SECOND_NS)) == [120]
    assert not reports(clock.told, "schedule.reset")


def test_timers_do_not_pile_up(clockwork: Any) -> None:
    clock = clockwork(DAILY)
    before = len(clock.world.fleet._state.timers)
    for _ in range(500):
        clock.wait(SECOND_NS)
        clock.set_clock(clock.wall_ns + 700_000)
    assert len(clock.world.fleet._state.timers) <= before + 1


# -- full, stopping ---------------------------------------------------------------------------


def test_a_full_queue_skips_a_run_and_says_so(muster: type[Muster]) -> None:
    clock = Clockwork(muster, size=0)
    clock.pool = {"queue_size": 5}
    clock.restart()
    for number in range(5):
        clock._note(clock.world.submit(TaskSpec(f"t{number}", "p.x", b"", priority=0)))
    answer = clock.wait(MINUTE_NS)
    assert made(answer) == []
    [report] = reports(answer, "schedule.skipped")
    assert report.reason.startswith("QueueFull: ")
    assert not clock.schedule.alive
    assert clock.record.skipped == 1


def test_nothing_is_made_during_a_shutdown_and_the_next_start_catches_up(clockwork: Any) -> None:
    clock = clockwork()
    clock.wait(30 * SECOND_NS)
    clock.tell(events.ShutdownRequested("end"))
    assert made(clock.wait(45 * SECOND_NS)) == []
    clock.told.clear()
    clock.restart()
    assert instants(clock.told) == [60]


# -- commands of people -----------------------------------------------------------------------


def test_a_paused_schedule_makes_nothing_and_does_not_catch_up(clockwork: Any) -> None:
    clock = clockwork()
    answer = clock.tell(schedule_events.SchedulePauseRequested("s", True, b"me"))
    assert of(actions.Acknowledge, answer) == [actions.Acknowledge(b"me", 0, [])]
    assert reports(answer, "schedule.paused")
    clock.wait(2 * MINUTE_NS)
    clock.restart(after_ns=HOUR_NS)
    clock.wait(2 * MINUTE_NS)
    assert made(clock.told) == []
    resumed_ns = clock.wall_ns
    clock.tell(schedule_events.SchedulePauseRequested("s", False, b"me"))
    assert made(clock.wait(59 * SECOND_NS)) == []
    [spec] = made(clock.wait(SECOND_NS))
    assert spec.id == f"@s.{resumed_ns + MINUTE_NS:x}"
    assert clock.record.skipped == 0


def test_a_pause_over_a_clock_that_is_set_back_repeats_no_cron_run(clockwork: Any) -> None:
    clock = clockwork(DAILY)
    assert instants(clock.wait(40 * MINUTE_NS)) == [1800]
    clock.finish()
    clock.tell(schedule_events.SchedulePauseRequested("s", True, b"me"))
    clock.set_clock(NOON_NS)
    clock.tell(schedule_events.SchedulePauseRequested("s", False, b"me"))
    assert instants(clock.wait(HOUR_NS)) == []


def test_while_the_store_cannot_write_nothing_is_made_and_then_it_catches_up(
    clockwork: Any,
) -> None:
    clock = clockwork()
    clock.tell(events.StoreFailing("the disk is full"))
    assert of(actions.Persist, clock.wait(5 * MINUTE_NS)) == [], "nothing piles up"
    answer = clock.tell(schedule_events.ScheduleRunRequested("s", b"me"))
    [acknowledged] = of(actions.Acknowledge, answer)
    assert [each.code for each in acknowledged.rejected] == ["QueueFull"]
    clock.tell(events.StoreRecovered())
    answer = clock.read_clock()
    assert instants(answer) == [300]
    assert skipped(answer) == 4


def test_a_pause_is_acknowledged_when_it_is_on_disk(clockwork: Any) -> None:
    clock = clockwork()
    clock.world.disk_works = False
    assert not of(
        actions.Acknowledge, clock.tell(schedule_events.SchedulePauseRequested("s", True, b"me"))
    )
    assert of(actions.Acknowledge, clock.world.commit())


def test_a_run_by_hand_is_made_at_once_and_changes_no_instant(clockwork: Any) -> None:
    clock = clockwork()
    clock.tell(schedule_events.SchedulePauseRequested("s", True, b"me"))
    answer = clock.tell(schedule_events.ScheduleRunRequested("s", b"me"))
    assert [spec.id for spec in made(answer)] == [f"@s.{NOON_NS:x}m"]
    assert of(actions.Acknowledge, answer) == [actions.Acknowledge(b"me", 0, [])]
    clock.finish()
    clock.tell(schedule_events.SchedulePauseRequested("s", False, b"me"))
    assert instants(clock.wait(MINUTE_NS)) == [60]


@pytest.mark.parametrize(("own", "by_hand"), [(LOW, HIGH), (NORMAL, HIGH), (CRITICAL, CRITICAL)])
def test_a_run_by_hand_goes_before_those_of_the_clock(
    clockwork: Any, own: int, by_hand: int
) -> None:
    clock = clockwork(priority=own)
    assert [spec.priority for spec in made(clock.wait(MINUTE_NS))] == [own]
    clock.finish()
    answer = clock.tell(schedule_events.ScheduleRunRequested("s", b"me"))
    assert [spec.priority for spec in made(answer)] == [by_hand]


def test_a_run_by_hand_respects_one_that_is_alive(clockwork: Any) -> None:
    clock = clockwork()
    clock.wait(MINUTE_NS)
    answer = clock.tell(schedule_events.ScheduleRunRequested("s", b"me"))
    [acknowledged] = of(actions.Acknowledge, answer)
    assert [each.code for each in acknowledged.rejected] == ["StillRunning"]
    assert made(answer) == []


def test_an_unknown_schedule_is_refused(clockwork: Any) -> None:
    clock = clockwork()
    for event in (
        schedule_events.ScheduleRunRequested("t", b"me"),
        schedule_events.SchedulePauseRequested("t", True, b"me"),
    ):
        [acknowledged] = of(actions.Acknowledge, clock.tell(event))
        assert [each.code for each in acknowledged.rejected] == ["UnknownSchedule"]


# -- changes of the configuration -------------------------------------------------------------


def test_a_schedule_that_was_off_does_not_catch_up(clockwork: Any) -> None:
    clock = clockwork()
    clock.wait(30 * SECOND_NS)
    clock.restart(after_ns=HOUR_NS, enabled=False)
    clock.wait(HOUR_NS)
    clock.restart(after_ns=HOUR_NS, enabled=True)
    assert made(clock.told) == []
    assert len(made(clock.wait(MINUTE_NS))) == 1
    assert clock.record.skipped == 0


def test_another_time_table_begins_anew(clockwork: Any) -> None:
    clock = clockwork(DAILY)
    clock.wait(40 * MINUTE_NS)
    clock.timing = Cron("*/1 * * * *", ZoneInfo("UTC"))
    clock.told.clear()
    clock.restart(after_ns=10 * HOUR_NS)
    assert made(clock.told) == []
    assert clock.record.skipped == 0


def test_a_schedule_that_is_gone_is_forgotten(clockwork: Any) -> None:
    clock = clockwork()
    clock.facts["gone"] = clock.facts["s"]
    clock.restart()
    assert list(clock.facts) == ["s"]


def test_a_fact_that_cannot_be_read_is_reported_and_begun_anew(clockwork: Any) -> None:
    clock = clockwork()
    clock.facts["s"] = b"\xc1"
    clock.told.clear()
    clock.restart(after_ns=HOUR_NS)
    assert len(reports(clock.told, "schedule.reset")) == 1
    assert len(made(clock.wait(MINUTE_NS))) == 1


# -- results ----------------------------------------------------------------------------------


def changes(clock: Clockwork) -> list[tuple[str, str, str]]:
    found = reports(clock.told, "task.changed")
    return [(report.schedule, report.task, report.digest) for report in found]


def test_a_result_that_differs_from_the_last_good_one_is_an_event(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    for value in (b"one", b"one", b"two"):
        clock.wait(MINUTE_NS)
        clock.finish(value)
    clock.wait(MINUTE_NS)
    clock.finish(fail=True)
    clock.wait(MINUTE_NS)
    clock.finish(b"two")
    third = f"@s.{NOON_NS + 3 * MINUTE_NS:x}"
    assert changes(clock) == [("s", third, sha256(b"two").hexdigest())]


def test_who_follows_is_told_the_newest_change_also_after_a_restart(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    ask = events.ChangesFollowed(b"me")
    assert of(actions.TellChanges, clock.tell(ask)) == [actions.TellChanges(b"me", [])]
    for value in (b"one", b"two", b"three", b"three"):
        clock.wait(MINUTE_NS)
        clock.finish(value)
    at_ns = NOON_NS + 3 * MINUTE_NS
    newest = Change("s", f"@s.{at_ns:x}", sha256(b"three").hexdigest(), at_ns, 3, 2)
    assert of(actions.TellChanges, clock.tell(ask)) == [actions.TellChanges(b"me", [newest])]
    clock.restart()
    assert of(actions.TellChanges, clock.tell(ask)) == [actions.TellChanges(b"me", [newest])]


def test_the_last_result_survives_a_restart(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    clock.wait(MINUTE_NS)
    clock.finish(b"one")
    clock.restart()
    clock.wait(MINUTE_NS)
    clock.finish(b"two")
    assert [digest for _, _, digest in changes(clock)] == [sha256(b"two").hexdigest()]


def test_a_change_is_told_after_its_commit_and_again_if_that_was_not_sure(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    clock.wait(MINUTE_NS)
    clock.finish(b"one")
    clock.wait(MINUTE_NS)
    clock.world.disk_works = False
    clock.finish(b"two")
    assert changes(clock) == [], "not before it is on disk"
    clock.restart()  # the page was written, but the core did not hear of it
    assert len(changes(clock)) == 1
    clock.wait(SECOND_NS)
    clock.restart()
    assert len(changes(clock)) == 1, "told once is enough when that is known"


def test_without_notify_nothing_is_told(clockwork: Any) -> None:
    clock = clockwork()
    for value in (b"one", b"two"):
        clock.wait(MINUTE_NS)
        clock.finish(value)
    assert changes(clock) == []


def test_how_the_last_run_ended_is_remembered(clockwork: Any) -> None:
    clock = clockwork()
    clock.wait(MINUTE_NS)
    clock.finish(fail=True)
    clock.restart()
    assert (clock.record.state, clock.record.runs) == ("failed", 1)


# -- watching ---------------------------------------------------------------------------------

RULES = WatchPolicy(b"rules", "r", below=40)


def entry(clock: Clockwork, number: int) -> HistoryEntry:
    return msgspec.msgpack.decode(clock.history[f"s.{number}"], type=HistoryEntry)


def look(clock: Clockwork, *values: bytes, **view: Any) -> None:
    """Run the schedule once for each value."""
    for value in values:
        clock.wait(MINUTE_NS)
        clock.finish(value, **view)


def test_different_results_are_kept_with_the_result_itself(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    look(clock, b"one", b"one", b"two")
    at_ns = NOON_NS + 3 * MINUTE_NS
    digest = sha256(b"two").hexdigest()
    assert list(clock.history) == ["s.1", "s.2"]
    assert entry(clock, 2) == HistoryEntry(
        2, at_ns, f"@s.{at_ns:x}", digest, b"two", changed=True, before=1
    )
    [page] = [
        page
        for page in of(actions.Persist, clock.told)
        if any(fact.key == "s.2" for fact in page.facts)
    ]
    assert [final.spec.id for final in page.finished] == [f"@s.{at_ns:x}"], "one transaction"


def test_a_view_is_judged_by_its_numbers_and_kept_as_the_worker_says(clockwork: Any) -> None:
    clock = clockwork(notify=True, watching=RULES)
    look(clock, b"50 x", view=View("d1", {"price": 50.0}, b"50"))
    assert made(clock.told)[-1].watch == b"rules"
    look(clock, b"41 y", view=View("d2", {"price": 41.0}, b"41"))
    look(clock, b"39 z", view=View("d3", {"price": 39.0}, b"39", cut=True))
    assert [digest for _, _, digest in changes(clock)] == ["d3"]
    assert [entry(clock, number).value for number in (1, 2, 3)] == [b"50", b"41", b"39"]
    assert (entry(clock, 3).cut, entry(clock, 3).before) == (True, 1)


def test_a_result_without_a_view_is_not_judged_where_there_are_rules(clockwork: Any) -> None:
    clock = clockwork(notify=True, watching=RULES)
    look(clock, b"one", b"two")
    assert clock.history == {}
    assert changes(clock) == []


def test_a_result_by_the_rules_before_a_reload_is_not_judged(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    look(clock, b"one")
    clock.wait(MINUTE_NS)
    clock.restart(watching=RULES)  # a run by the old rules is alive
    clock.finish(b"two", view=View("d2"))
    assert changes(clock) == []
    look(clock, b"x", view=View("d3", {"": 50.0}))
    assert changes(clock) == [], "the first result by other rules is the baseline"
    look(clock, b"x", view=View("d4", {"": 30.0}))
    assert [digest for _, _, digest in changes(clock)] == ["d4"]


def test_a_result_that_is_too_long_is_kept_without_its_text(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    look(clock, b"x" * (VIEW_BYTES_MAX + 1))
    assert (entry(clock, 1).value, entry(clock, 1).cut) == (CUT_OFF, True)


def test_old_entries_are_forgotten(clockwork: Any) -> None:
    clock = clockwork(notify=True, watching=WatchPolicy(keep=3))
    look(clock, *(b"%d" % number for number in range(8)))
    assert list(clock.history) == ["s.6", "s.7", "s.8"]
    clock.restart()
    look(clock, b"new")
    assert list(clock.history) == ["s.7", "s.8", "s.9"]


@pytest.mark.parametrize("how", ["start", "reload"])
def test_a_schedule_that_is_gone_takes_its_history_along(clockwork: Any, how: str) -> None:
    clock = clockwork(notify=True)
    look(clock, b"one", b"two")
    if how == "start":
        fleet = Fleet(clock.world.policy, Random(1), 5000)
        clock.world.fleet = fleet
        clock.tell(events.FactsRecovered(FACT, list(clock.facts.items())))
    else:
        policy = msgspec.structs.replace(clock.world.fleet.policy, schedules=())
        clock.tell(events.PolicyChanged(policy))
    clock.tell(events.Started())
    assert clock.history == {}


def test_another_time_table_keeps_the_history_and_begins_with_a_baseline(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    look(clock, b"one", b"two")
    clock.wait(SECOND_NS)
    clock.timing = Every(2 * MINUTE_NS)
    clock.restart()
    clock.wait(2 * MINUTE_NS)
    clock.finish(b"three")
    assert list(clock.history) == ["s.1", "s.2", "s.3"]
    assert len(changes(clock)) == 1


def test_a_change_is_told_again_and_marked_until_it_is_surely_told(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    clock.tells = False
    look(clock, b"one", b"two", b"three")
    clock.told.clear()
    clock.restart()
    again = reports(clock.told, "task.changed")
    assert [(each.number, each.number_before, each.again) for each in again] == [
        (2, 1, True),
        (3, 2, True),
    ]
    clock.tells = True
    clock.restart()
    clock.wait(SECOND_NS)
    clock.told.clear()
    clock.restart()
    assert reports(clock.told, "task.changed") == []


def test_what_the_version_before_has_written_is_read(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    look(clock, b"one")
    record = msgspec.to_builtins(clock.record)
    digest = sha256(b"one").hexdigest()
    old = [*record[:7], digest, "@s.1", *record[9:12], "@s.1"]  # 13 fields
    clock.facts["s"] = msgspec.msgpack.encode(old)
    clock.history.clear()
    clock.restart()
    [report] = reports(clock.told, "task.changed")
    assert (report.task, report.digest, report.again) == ("@s.1", digest, True)
    look(clock, b"one")
    assert len(changes(clock)) == 1, "the baseline is that of the version before"
    look(clock, b"two")
    assert len(changes(clock)) == 2
    assert entry(clock, 2).before == 1


def test_failures_in_a_row_are_reported_once_and_the_recovery_too(clockwork: Any) -> None:
    clock = clockwork(notify=True, watching=WatchPolicy(stale=2))
    look(clock, b"one", fail=True)
    clock.restart()
    look(clock, *b"abc", fail=True)
    [stale] = reports(clock.told, "watch.stale")
    assert (stale.schedule, stale.level, stale.count) == ("s", "warning", 2)
    assert stale.reason.startswith("2 runs in a row failed; the last: ")
    assert reports(clock.told, "watch.recovered") == []
    clock.restart()
    look(clock, b"one", b"one")
    assert len(reports(clock.told, "watch.recovered")) == 1
    look(clock, b"x", fail=True)
    assert len(reports(clock.told, "watch.stale")) == 1


@pytest.mark.parametrize("policy", [{"notify": True, "watching": WatchPolicy(stale=0)}, {}])
def test_nobody_is_told_of_failures_who_did_not_ask(clockwork: Any, policy: Any) -> None:
    clock = clockwork(**policy)
    look(clock, *b"abcdef", fail=True)
    assert reports(clock.told, "watch.stale") == []


# -- pictures ---------------------------------------------------------------------------------


def test_only_the_picture_of_a_change_is_kept(clockwork: Any) -> None:
    clock = clockwork(notify=True, watching=WatchPolicy(b"\x90", picture=True))
    for value in (b"one", b"one", b"two", b"two"):
        clock.wait(MINUTE_NS)
        clock.finish(value)
    runs = [f"@s.{NOON_NS + number * MINUTE_NS:x}" for number in (1, 2, 3, 4)]
    forgotten = [each.task for each in of(actions.ForgetPicture, clock.told)]
    assert forgotten == [runs[0], runs[1], runs[3]]
    assert [task for _, task, _ in changes(clock)] == [runs[2]]


def test_nothing_is_forgotten_where_no_picture_is_asked_for(clockwork: Any) -> None:
    clock = clockwork(notify=True)
    clock.wait(MINUTE_NS)
    clock.finish(b"one")
    assert of(actions.ForgetPicture, clock.told) == []


def test_what_was_told_is_noted_with_the_next_write_also_on_a_busy_disk(
    clockwork: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a schedule that changes all the time would keep, and write, a hundred changes."""
    monkeypatch.setattr(Ledger, "settled", False)
    clock = clockwork(notify=True, overlap=True)
    for number in range(10):
        clock.wait(MINUTE_NS)
        clock.finish(str(number).encode())
    assert len(changes(clock)) == 9
    assert len(clock.record.watched.untold) <= 1
