"""Schedules of run time in the core: put, deleted, restored, hidden by files; thousands at once."""

from random import Random
from typing import Any

import msgspec
import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    SHUTTING_DOWN,
    Arguments,
    Rejection,
    TaskDeclaration,
)
from musterd.ipc.wire.schedule_messages import (
    IN_USE,
    INVALID_SCHEDULE,
    READ_ONLY,
    STORE_FAILS,
    TOO_MANY,
    UNKNOWN_SCHEDULE,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events, schedule_events
from musterd.supervisor.core.model.policy import SCHEDULES_MAX, SchedulePolicy
from musterd.supervisor.core.model.schedule_events import AddedSchedule
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.core.tasks import added_schedules
from musterd.supervisor.core.tasks.added_schedules import ADDED
from musterd.supervisor.core.tasks.schedule import FACT, Schedule
from musterd.supervisor.core.tasks.schedules import LOOKS_MAX, LOOKS_PER_RUN
from support.core import Muster, of

MINUTE_NS = 60 * SECOND_NS
NOON_NS = 1_750_000_000 * SECOND_NS
FILE = "musterd.toml"


def policy(name: str, every_ns: int = MINUTE_NS, **others: Any) -> SchedulePolicy:
    return SchedulePolicy(name, "p.x", Every(every_ns), **others)


def added(name: str, **others: Any) -> AddedSchedule:
    return AddedSchedule(name, b"section", policy(name, **others))


class Daemon:
    """A fleet with a disk of facts; `files` are the schedules of its configuration."""

    def __init__(self, *files: SchedulePolicy) -> None:
        self.files = files
        self.facts: dict[tuple[str, str], bytes] = {}
        self.begin([])

    def begin(self, found: list[AddedSchedule], *files: SchedulePolicy) -> list[Any]:
        self.world = Muster(1, queue_size=20_000)
        self.files = files or self.files
        self.policy = msgspec.structs.replace(self.world.policy, schedules=self.files)
        self.world.fleet = Fleet(self.policy, Random(1))
        self.wall_ns = NOON_NS
        answer = self.tell(schedule_events.AddedRecovered(found))
        records = [(key, value) for (kind, key), value in self.facts.items() if kind == FACT]
        self.tell(events.FactsRecovered(FACT, records))
        self.tell(events.TasksRecovered([]))
        self.world.start()
        return answer + self.tell(events.ClockRead(self.wall_ns))

    def tell(self, event: Any) -> list[Any]:
        return self._note(self.world.tell(event))

    def _note(self, answer: list[Any]) -> list[Any]:
        for page in of(actions.Persist, answer):
            for fact in page.facts:
                self.facts.pop((fact.kind, fact.key), None)
                if fact.value is not None:
                    self.facts[fact.kind, fact.key] = fact.value
        return answer

    def put(self, *schedules: AddedSchedule, **others: Any) -> dict[str, str]:
        """Put schedules; return why some were refused."""
        put = schedule_events.SchedulePutRequested(list(schedules), [], b"1", 7, **others)
        return refused(self.tell(put))

    def delete(self, *names: str) -> dict[str, str]:
        return refused(self.tell(schedule_events.ScheduleDeleteRequested(list(names), b"1", 7)))

    @property
    def names(self) -> list[str]:
        return list(self.world.fleet.schedules)

    def made_in(self, nanoseconds: int) -> list[list[str]]:
        """Let time pass; return the ids of the runs, event by event."""
        answer = self._note(self.world.wait(nanoseconds))
        self.wall_ns += nanoseconds
        answer += self.tell(events.ClockRead(self.wall_ns))
        answer += self._note(self.world.wait(SECOND_NS // 1000))
        pages = [[new.spec.id for new in page.added] for page in of(actions.Persist, answer)]
        return [ids for ids in pages if ids]


def refused(answer: list[Any]) -> dict[str, str]:
    [acknowledged] = of(actions.Acknowledge, answer)
    assert acknowledged.request == 7
    return {each.id: each.code for each in acknowledged.rejected}


def test_a_task_that_its_pool_does_not_have_is_refused_once_the_code_is_loaded() -> None:
    daemon = Daemon()
    wrong = AddedSchedule("a", b"section", SchedulePolicy("a", "p.y", Every(MINUTE_NS)))
    assert daemon.put(wrong) == {}
    daemon.world.fleet.pools["p"].declare((TaskDeclaration("x"),))
    put = schedule_events.SchedulePutRequested([wrong, added("b")], [], b"1", 7)
    [acknowledged] = of(actions.Acknowledge, daemon.tell(put))
    why = "schedule 'a': key 'task': pool 'p' has no task 'y': it has x"
    assert acknowledged.rejected == [Rejection("a", INVALID_SCHEDULE, why)]
    assert daemon.names == ["a", "b"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"url": "u"}, ""),
        ({"url": "u", "select": {}}, ""),
        ({"url": "u", "selct": {}}, "p.x takes no argument 'selct': it takes select, url"),
        ({"select": {}}, "p.x needs the argument 'url': give it a value"),
    ],
)
def test_arguments_that_a_task_does_not_take_are_refused(args: Any, problem: str) -> None:
    """Else every run would fail, and somebody would hear of it after some of them."""
    daemon = Daemon()
    given = added("a", args=msgspec.msgpack.encode(args))
    takes = Arguments(("url", "select"), ("url",))
    daemon.world.fleet.pools["p"].declare((TaskDeclaration("x", arguments=takes),))
    put = schedule_events.SchedulePutRequested([given], [], b"1", 7)
    [acknowledged] = of(actions.Acknowledge, daemon.tell(put))
    why = [f"schedule 'a': key 'args': {problem}"] if problem else []
    assert [each.message for each in acknowledged.rejected] == why
    takes = Arguments(("url", "select"), open=True)
    daemon.world.fleet.pools["p"].declare((TaskDeclaration("x", arguments=takes),))
    assert daemon.put(given) == {}, "it takes any"


def test_a_put_and_a_delete_are_one_transaction_each() -> None:
    daemon = Daemon()
    assert daemon.put(added("a"), added("b")) == {}
    kinds = [(ADDED, "a"), (ADDED, "b"), (FACT, "a"), (FACT, "b")]
    assert sorted(daemon.facts) == kinds
    daemon.world.disk_works = False
    answer = daemon.tell(schedule_events.ScheduleDeleteRequested(["a"], b"1", 7))
    [page] = of(actions.Persist, answer)
    assert [(fact.kind, fact.value) for fact in page.facts] == [(ADDED, None), (FACT, None)]
    assert not of(actions.Acknowledge, answer), "it is not on disk"
    assert refused(daemon.world.commit()) == {}
    assert daemon.names == ["b"]


def test_those_that_come_together_are_spread_over_their_interval() -> None:
    daemon = Daemon()
    daemon.put(*(added(f"s{number}") for number in range(4)))
    times = [schedule.next_ns for schedule in daemon.world.fleet.schedules.values()]
    assert times == [NOON_NS + MINUTE_NS * quarter // 4 for quarter in (4, 3, 2, 1)]
    daemon.put(added("alone"))
    assert daemon.world.fleet.schedules["alone"].next_ns == NOON_NS + MINUTE_NS


def test_one_that_is_put_again_goes_on_unless_its_plan_changes() -> None:
    daemon = Daemon()
    daemon.put(added("a"))
    daemon.made_in(MINUTE_NS)
    schedule = daemon.world.fleet.schedules["a"]
    before_ns = schedule.next_ns
    daemon.put(added("a", priority=1))
    assert (schedule.next_ns, schedule.record.runs) == (before_ns, 1)
    daemon.put(added("a", every_ns=7 * MINUTE_NS))
    assert schedule.record.runs == 0


def test_those_of_files_are_read_only_and_the_file_is_named() -> None:
    daemon = Daemon(policy("ours", origin=FILE))
    wrong = Rejection("ours", INVALID_SCHEDULE, "it has no task")
    for event in (
        schedule_events.SchedulePutRequested([added("ours")], [], b"1", 7),
        schedule_events.SchedulePutRequested([], [wrong], b"1", 7),
        schedule_events.ScheduleDeleteRequested(["ours"], b"1", 7),
    ):
        [acknowledged] = of(actions.Acknowledge, daemon.tell(event))
        [rejection] = acknowledged.rejected
        assert (rejection.id, rejection.code) == ("ours", READ_ONLY)
        assert FILE in rejection.message
    assert daemon.delete("nobody") == {"nobody": UNKNOWN_SCHEDULE}


def test_there_is_a_limit_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SCHEDULES_MAX == 10_000
    monkeypatch.setattr(added_schedules, "SCHEDULES_MAX", 3)
    daemon = Daemon(policy("ours"))
    assert daemon.put(added("a"), added("b"), added("c")) == {"c": TOO_MANY}
    assert daemon.put(added("b")) == {}, "it is there already"
    monkeypatch.setattr(added_schedules, "SECTIONS_BYTES_MAX", 2 * len(b"section"))
    monkeypatch.setattr(added_schedules, "SCHEDULES_MAX", 10)
    assert daemon.put(added("d")) == {"d": TOO_MANY}
    daemon.delete("a")
    assert daemon.put(added("d")) == {}


def test_one_that_is_put_as_paused_makes_no_run_until_it_is_resumed() -> None:
    daemon = Daemon()
    daemon.put(added("a"), added("b"), paused=frozenset("a"))
    made = [id_ for page in daemon.made_in(3 * MINUTE_NS) for id_ in page]
    assert {id_.partition(".")[0] for id_ in made} == {"@b"}
    daemon.put(added("b"), paused=frozenset("b"))
    daemon.begin([added("a"), added("b")])
    assert daemon.made_in(3 * MINUTE_NS) == [], "over a restart too"
    daemon.put(added("a", priority=1))
    assert daemon.made_in(3 * MINUTE_NS) == [], "it is paused still"
    daemon.tell(schedule_events.SchedulePauseRequested("a", False, b"1", 8))
    assert daemon.made_in(3 * MINUTE_NS)


def test_names_in_use_are_refused_where_nothing_is_to_be_replaced() -> None:
    daemon = Daemon(policy("ours"))
    daemon.put(added("a"))
    refused_names = daemon.put(added("a"), added("b"), added("ours"), replace=False)
    assert refused_names == {"a": IN_USE, "ours": READ_ONLY}
    assert sorted(daemon.names) == ["a", "b", "ours"]


def test_a_dry_run_tells_what_would_be_refused_and_stores_nothing() -> None:
    daemon = Daemon(policy("ours"))
    daemon.put(added("a"))
    before = dict(daemon.facts)
    assert daemon.put(added("b"), added("ours"), dry_run=True) == {"ours": READ_ONLY}
    assert daemon.put(added("a"), replace=False, dry_run=True) == {"a": IN_USE}
    assert daemon.facts == before
    assert sorted(daemon.names) == ["a", "ours"]


def test_nothing_is_put_that_cannot_be_stored_or_while_the_daemon_ends() -> None:
    daemon = Daemon()
    daemon.tell(events.StoreFailing("the disk is full"))
    assert daemon.put(added("a")) == {"a": STORE_FAILS}
    daemon.tell(events.StoreRecovered())
    daemon.tell(events.ShutdownRequested("asked"))
    assert daemon.put(added("a")) == {"a": SHUTTING_DOWN}


def test_one_that_cannot_be_used_is_kept_and_goes_on_later() -> None:
    daemon = Daemon()
    daemon.put(added("a"))
    daemon.made_in(MINUTE_NS)
    [reported] = of(
        actions.Report, daemon.begin([AddedSchedule("a", b"section", None, "its pool is gone")])
    )
    assert (reported.event, reported.schedule, reported.count) == ("schedule.unusable", "a", 1)
    assert daemon.names == []
    assert daemon.made_in(10 * MINUTE_NS) == []
    answer = daemon.tell(events.PolicyChanged(daemon.policy, [added("a")]))
    assert not of(actions.Report, answer)
    assert daemon.world.fleet.schedules["a"].record.runs == 1
    again = AddedSchedule("a", b"section", None, "its pool is gone again")
    daemon.tell(events.PolicyChanged(daemon.policy, [again]))
    assert daemon.names == []
    assert daemon.delete("a") == {}
    assert daemon.facts == {}


def test_a_file_wins_and_its_removal_brings_the_added_one_back() -> None:
    daemon = Daemon()
    daemon.put(added("a", args=b"added"))
    files = msgspec.structs.replace(
        daemon.policy, schedules=(policy("a", args=b"file", origin=FILE),)
    )
    [reported] = of(
        actions.Report, daemon.tell(events.PolicyChanged(files, [added("a", args=b"added")]))
    )
    assert reported.event == "schedule.unusable"
    assert FILE in reported.reason
    assert daemon.world.fleet.schedules["a"].policy.args == b"file"
    daemon.tell(events.PolicyChanged(daemon.policy, [added("a", args=b"added")]))
    assert daemon.world.fleet.schedules["a"].policy.args == b"added"
    daemon.tell(events.PolicyChanged(files, [added("a", args=b"added")]))
    assert daemon.delete("a") == {}, "the hidden one is forgotten, the file's stays"
    assert daemon.world.fleet.schedules["a"].policy.args == b"file"


def test_a_run_that_is_asked_for_again_is_made_once() -> None:
    daemon = Daemon()
    daemon.put(added("a", overlap=True))
    daemon.wall_ns += SECOND_NS
    daemon.tell(events.ClockRead(daemon.wall_ns))

    def ask(moment_ns: int, *, again: bool = False) -> tuple[int, dict[str, str]]:
        run = schedule_events.ScheduleRunRequested("a", b"1", 7, f"@a.{moment_ns:x}m", again)
        answer = daemon.tell(run)
        return sum(len(page.added) for page in of(actions.Persist, answer)), refused(answer)

    first_ns = NOON_NS + SECOND_NS // 2
    assert ask(first_ns) == (1, {})
    assert ask(first_ns, again=True) == (0, {})
    assert ask(first_ns + 1, again=True) == (1, {}), "the first message was lost"
    daemon.world.complete(1, *daemon.world.slots[0].leases)
    daemon.world.complete(1, *daemon.world.slots[0].leases)
    assert ask(first_ns, again=True) == (0, {f"@a.{first_ns:x}m": "PerhapsMade"})


def test_however_many_are_due_at_once_an_event_makes_a_few_runs() -> None:
    files = [policy(f"s{number}") for number in range(500)]
    daemon = Daemon(*files)
    made = daemon.made_in(MINUTE_NS)
    assert max(map(len, made)) <= LOOKS_MAX // LOOKS_PER_RUN
    assert sorted(id_.partition(".")[0] for ids in made for id_ in ids) == sorted(
        f"@{each.name}" for each in files
    )


def test_schedules_that_are_not_due_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(*(policy(f"s{number}", 3600 * SECOND_NS) for number in range(100)))
    schedules = daemon.world.fleet._schedules
    looked: list[str] = []
    look = schedules._look

    def noted(schedule: Schedule) -> None:
        looked.append(schedule.policy.name)
        look(schedule)

    monkeypatch.setattr(schedules, "_look", noted)
    for second in range(1, 60):
        daemon.tell(events.ClockRead(NOON_NS + second * SECOND_NS))
    assert looked == []
    daemon.tell(events.ClockRead(NOON_NS))  # set back
    assert len(looked) == 100
