"""The scheduler of a node: the applied policy, due schedules and changed results."""

from datetime import timedelta, timezone
from random import Random
from zoneinfo import ZoneInfo

import msgspec
import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import BATCH_BYTES_MAX, QUEUE_FULL, Rejection, TaskDeclaration
from musterd.ipc.wire.node_messages import Content, NewsTold, PoolCard, ScheduleNews, SharedPolicy
from musterd.supervisor.cluster import engine
from musterd.supervisor.cluster.results import CONFIRM_NS
from musterd.supervisor.cluster.scheduler import (
    REPORT_GAP_NS,
    Memory,
    Scheduler,
    run_by_hand,
    settlement,
)
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EngineAnswered,
    EngineFailed,
    Leave,
    Standing,
    Tell,
)
from musterd.supervisor.cluster.watching import (
    CHANGED,
    STALE,
    Changed,
    ChangeNote,
    Judged,
    SeenRun,
    WatchedSchedule,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.runs import CATCH_UP_MAX, ON_TIME_NS
from musterd.supervisor.core.model.shared import ClusterPolicy, card_of
from musterd.supervisor.core.model.timing import Cron, Every

NOW_NS = 1_750_000_000 * SECOND_NS
MINUTE_NS = 60 * SECOND_NS
KITES = SchedulePolicy("kites", "p.extract", Every(MINUTE_NS))
PLAN = "p.extract every 60000000000 ns"
CARD = PoolCard(
    "p", 5, (TaskDeclaration("extract", target="url"),), 100, SECOND_NS, 3, SECOND_NS, SECOND_NS
)


def due(
    policy: SchedulePolicy = KITES,
    *,
    last_ns: int = NOW_NS - MINUTE_NS,
    memory: Memory | None = None,
    alive: str = "",
    turn: int = 4,
    retrying: bool = False,
    asked: str = "",
) -> engine.DueSchedule:
    kept = msgspec.msgpack.encode(memory or Memory(PLAN))
    plan = card_of(policy).plan
    known = (policy.name, plan, turn, last_ns, NOW_NS, kept)
    return engine.DueSchedule(*known, alive, retrying, asked)


def changed(**changes: object) -> SchedulePolicy:
    return msgspec.structs.replace(KITES, **changes)


def ids(policy: SchedulePolicy, found: engine.DueSchedule) -> list[str]:
    settled = settlement(found, policy, "", Random(1))
    assert settled is not None
    return [run.spec.id for run in settled.runs]


# -- what to do about a due schedule ------------------------------------------------------------


def test_a_new_schedule_begins_now() -> None:
    found = settlement(due(last_ns=0, memory=Memory()), KITES, "", Random(1))
    assert found is not None
    assert (found.last_ns, found.next_ns, found.runs) == (NOW_NS, NOW_NS + MINUTE_NS, ())
    assert (found.memory, found.reset) == (Memory(PLAN, 0), "")


def test_a_due_instant_is_run_with_an_id_made_of_it() -> None:
    found = settlement(due(), changed(args=b"\x81", priority=1), "shop.example", Random(1))
    assert found is not None
    [run] = found.runs
    assert run.instant_ns == NOW_NS
    assert run.spec.id == f"@kites.{NOW_NS:x}"
    assert (run.spec.name, run.spec.args, run.spec.priority) == ("p.extract", b"\x81", 1)
    assert run.spec.target == "shop.example"
    assert (found.last_ns, found.next_ns) == (NOW_NS, NOW_NS + MINUTE_NS)


def test_jitter_delays_a_run() -> None:
    found = settlement(due(), changed(jitter_ns=SECOND_NS), "", Random(1))
    assert found is not None
    assert 0 < found.runs[0].spec.delay_ns <= SECOND_NS


def test_another_plan_begins_anew_with_ids_of_its_own() -> None:
    before = due(memory=Memory("p.other every 1 ns", 2))
    found = settlement(before, KITES, "", Random(1))
    assert found is not None
    assert (found.anew, found.memory, found.runs) == (True, Memory(PLAN, 3), ())
    again = due(memory=found.memory)
    assert ids(KITES, again) == [f"@kites.{NOW_NS:x}-3"]


def test_a_clock_that_was_set_back_begins_anew_and_says_so() -> None:
    found = settlement(due(last_ns=NOW_NS + 10 * SECOND_NS), KITES, "", Random(1))
    assert found is not None
    assert (found.last_ns, found.memory.turn, found.anew) == (NOW_NS, 1, False)
    assert "set back by at least 10 s" in found.reset
    waits = settlement(due(last_ns=NOW_NS + SECOND_NS), KITES, "", Random(1))
    assert waits is not None
    assert (waits.last_ns, waits.runs, waits.reset) == (NOW_NS + SECOND_NS, (), "")


def test_a_disabled_schedule_is_silent_and_forgets_where_it_was() -> None:
    found = settlement(due(), changed(enabled=False), "", Random(1))
    assert found is not None
    assert (found.last_ns, found.next_ns, found.runs) == (0, None, ())


def test_a_schedule_that_was_resumed_waits_for_its_next_instant() -> None:
    found = settlement(due(last_ns=NOW_NS - SECOND_NS), KITES, "", Random(1))
    assert found is not None
    assert (found.runs, found.next_ns) == ((), NOW_NS - SECOND_NS + MINUTE_NS)


@pytest.mark.parametrize(
    ("catch_up", "instants", "skipped"), [("one", 1, 4), ("none", 1, 4), ("all", 5, 0)]
)
def test_missed_instants_are_caught_up_with_as_the_schedule_says(
    catch_up: str, instants: int, skipped: int
) -> None:
    policy = changed(catch_up=catch_up, overlap=True)
    found = settlement(due(last_ns=NOW_NS - 5 * MINUTE_NS), policy, "", Random(1))
    assert found is not None
    assert (len(found.runs), found.skipped, found.last_ns) == (instants, skipped, NOW_NS)
    late = due(last_ns=NOW_NS - 5 * MINUTE_NS - ON_TIME_NS - 1)
    found = settlement(late, policy, "", Random(1))
    assert found is not None
    assert len(found.runs) == (0 if catch_up == "none" else instants)
    ages = due(last_ns=NOW_NS - 500 * MINUTE_NS)
    found = settlement(ages, policy, "", Random(1))
    assert found is not None
    assert len(found.runs) <= CATCH_UP_MAX
    assert len(found.runs) + found.skipped == 500


def test_a_run_beside_the_last_one_is_skipped_or_waits() -> None:
    alive = due(alive="@kites.1")
    found = settlement(alive, KITES, "", Random(1))
    assert found is not None
    assert (found.runs, found.skipped, found.last_ns) == ((), 1, NOW_NS)
    assert "@kites.1 has not ended" in found.why
    assert settlement(alive, changed(catch_up="all"), "", Random(1)) is None
    assert ids(changed(overlap=True), alive) == [f"@kites.{NOW_NS:x}"]


def test_a_last_run_that_waits_for_a_retry_ends_for_the_due_one() -> None:
    waits = due(alive="@kites.1", retrying=True)
    found = settlement(waits, KITES, "", Random(1))
    assert found is not None
    assert ([run.instant_ns for run in found.runs], found.skipped) == ([NOW_NS], 0)
    assert found.way == "replaces"
    assert settlement(waits, changed(catch_up="all"), "", Random(1)) is None
    beside = settlement(waits, changed(overlap=True), "", Random(1))
    assert beside is not None
    assert (len(beside.runs), beside.way) == (1, "begins")
    late = due(last_ns=NOW_NS - MINUTE_NS - ON_TIME_NS - 1, alive="@kites.1", retrying=True)
    found = settlement(late, changed(catch_up="none"), "", Random(1))
    assert found is not None
    assert (found.runs, found.skipped, found.way) == ((), 1, "left out")


def test_a_last_run_that_somebody_waits_for_is_attempted_in_place_of_the_due_one() -> None:
    waits = due(alive="@kites.2", retrying=True, asked="@kites.1m")
    found = settlement(waits, KITES, "", Random(1))
    assert found is not None
    assert (found.runs, found.skipped, found.last_ns) == ((), 1, NOW_NS)
    assert found.way == "hastens"
    assert found.why == "run @kites.1m, which somebody waits for, is tried again in its place"
    runs = settlement(due(alive="@kites.2", asked="@kites.1m"), KITES, "", Random(1))
    assert runs is not None
    assert (runs.runs, runs.skipped, runs.way) == ((), 1, "left out")


def test_one_after_the_other_where_each_instant_counts_and_none_overlaps() -> None:
    missed = due(last_ns=NOW_NS - 3 * MINUTE_NS)
    found = settlement(missed, changed(catch_up="all"), "", Random(1))
    assert found is not None
    assert [run.instant_ns for run in found.runs] == [NOW_NS - 2 * MINUTE_NS]
    assert (found.last_ns, found.next_ns) == (NOW_NS - 2 * MINUTE_NS, NOW_NS - MINUTE_NS)


def test_a_run_by_hand_has_an_id_of_its_own() -> None:
    run = run_by_hand(due(memory=Memory(PLAN, 2)), changed(jitter_ns=SECOND_NS), "s")
    assert (run.spec.id, run.spec.delay_ns) == (f"@kites.{NOW_NS:x}-2m", 0)


def test_memory_that_cannot_be_read_begins_anew() -> None:
    found = settlement(msgspec.structs.replace(due(), memory=b"\xc1"), KITES, "", Random(1))
    assert found is not None
    assert found.anew


# -- the scheduler ------------------------------------------------------------------------------


class Bench:
    """A scheduler with a clock; the calls under way are found by their method."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Random(1), ZoneInfo)
        self.now_ns = 100 * SECOND_NS
        self.calls: dict[str, Call] = {}
        self.reports: list[object] = []

    def feed(self, event: object) -> list[object]:
        told: list[object] = []
        for action in self.scheduler.handle(self.now_ns, event):
            if isinstance(action, Call):
                assert action.method not in self.calls, action
                self.calls[action.method] = action
            elif isinstance(action, Tell):
                told.append(action.message)
            else:
                self.reports.append(action)
        return told

    def answer(self, method: str, result: object = None) -> list[object]:
        return self.feed(EngineAnswered(self.calls.pop(method).ticket, result))

    def fail(self, method: str, *, refused: bool = False) -> list[object]:
        return self.feed(EngineFailed(self.calls.pop(method).ticket, "gone", refused=refused))

    def pass_ns(self, by_ns: int) -> list[object]:
        self.now_ns += by_ns
        return self.feed(events.Ticked())

    def follow(self, *schedules: SchedulePolicy, version: int = 1) -> list[object]:
        cards = tuple([card_of(each) for each in schedules])
        self.feed(Standing(version, (CARD,)))
        level = max([1 + each.notify for each in schedules], default=0)
        policy = ClusterPolicy(schedules=cards)
        return self.answer("policy", engine.PolicyView(version, policy, level))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_policy_is_fetched_and_told_when_another_version_is_named(bench: Bench) -> None:
    assert bench.feed(Standing(0, ())) == []
    policy = ClusterPolicy()
    told = bench.answer("policy", engine.PolicyView(0, policy))
    assert told == [SharedPolicy(0, msgspec.msgpack.encode(policy))]
    bench.feed(Standing(0, (CARD,)))
    assert bench.calls == {}
    bench.feed(Standing(3, (CARD,)))
    assert bench.fail("policy") == []
    assert bench.pass_ns(SECOND_NS) == []
    assert "policy" in bench.calls


def test_a_large_policy_is_told_in_parts(bench: Bench) -> None:
    large = changed(args=msgspec.msgpack.encode({"text": "x" * (2 * BATCH_BYTES_MAX)}))
    told = bench.follow(large)
    parts = [each for each in told if isinstance(each, SharedPolicy)]
    assert [each.more for each in parts] == [True, True, False]
    assert max(len(each.part) for each in parts) == BATCH_BYTES_MAX
    whole = msgspec.msgpack.decode(b"".join(each.part for each in parts), type=ClusterPolicy)
    assert whole.schedules == (card_of(large),)


def test_a_policy_that_cannot_be_read_is_said_and_not_asked_for_again(bench: Bench) -> None:
    bench.feed(Standing(2, (CARD,)))
    assert bench.fail("policy", refused=True) == [SharedPolicy(2)]
    assert len(bench.reports) == 1
    bench.pass_ns(10 * SECOND_NS)
    assert bench.calls == {}


def test_a_schedule_in_an_unknown_zone_is_said_and_left_to_others(bench: Bench) -> None:
    zone = timezone(timedelta(0), "Mars/Olympus")
    bench.follow(changed(timing=Cron("0 3 * * *", zone)), changed(name="other"))
    [report] = bench.reports
    assert "Mars/Olympus" in str(report)
    assert "due" in bench.calls


def test_without_schedules_nothing_is_asked(bench: Bench) -> None:
    bench.follow()
    bench.pass_ns(10 * SECOND_NS)
    assert bench.calls == {}
    assert bench.scheduler.next_deadline() is None


def test_schedules_that_were_added_are_looked_at_when_a_heartbeat_tells_of_them(
    bench: Bench,
) -> None:
    bench.follow()
    bench.feed(Standing(1, (CARD,), 1))
    assert bench.calls.keys() == {"due"}
    bench.feed(Standing(1, (CARD,), 2))
    assert bench.calls.keys() == {"due", "changes", "watched"}
    bench.answer("due", [])
    bench.feed(Standing(1, (CARD,), 0))
    bench.pass_ns(SECOND_NS)
    assert "due" not in bench.calls


def test_due_schedules_are_settled_one_after_the_other(bench: Bench) -> None:
    bench.follow(KITES, changed(name="other"))
    bench.answer("due", [due(), due(changed(name="other"))])
    call = bench.calls["settle"]
    assert call.arguments[0] == due()
    assert (call.options["last_ns"], call.options["way"]) == (NOW_NS, "begins")
    assert bench.answer("settle", engine.Settled()) == []
    assert isinstance(bench.calls["settle"].arguments[0], engine.DueSchedule)
    assert bench.calls["settle"].arguments[0].name == "other"
    assert bench.answer("settle", None) == []  # another node was first
    assert bench.calls == {}
    bench.pass_ns(SECOND_NS)
    assert "due" in bench.calls


def test_a_settlement_of_unknown_effect_is_not_repeated(bench: Bench) -> None:
    bench.follow(KITES)
    bench.answer("due", [due(), due(changed(name="other"))])
    bench.fail("settle")
    bench.pass_ns(2 * SECOND_NS)
    assert "settle" not in bench.calls
    bench.answer("due", [due(turn=5)])
    assert bench.calls["settle"].arguments[0] == due(turn=5)


def test_what_the_code_of_this_node_lacks_is_left_to_others(bench: Bench) -> None:
    bench.follow(KITES)
    bench.feed(Standing(1, ()))
    bench.answer("due", [due()])
    assert "settle" not in bench.calls


def test_the_site_is_read_from_the_argument_that_the_task_declares(bench: Bench) -> None:
    site = changed(sites={"url": "shop.example", "other": "wrong.example"})
    bench.follow(site)
    bench.answer("due", [due(site)])
    [run] = bench.calls["settle"].arguments[1]  # type: ignore[misc]
    assert run.spec.target == "shop.example"


def test_skipped_runs_are_told_once_in_a_while(bench: Bench) -> None:
    bench.follow(KITES)
    bench.answer("due", [due(alive="@kites.1")])
    assert bench.calls["settle"].options["skipped"] == 1
    [news] = bench.answer("settle", engine.Settled())
    why = "run @kites.1 has not ended"
    assert news == ScheduleNews("schedule.skipped", "kites", "p", "", why, 1)
    full = Rejection("@kites.2", QUEUE_FULL, "the queue is full")
    for _ in range(2):
        bench.pass_ns(SECOND_NS)
        bench.answer("due", [due()])
        verdict = engine.Verdict("@kites.2", "rejected", rejection=full)
        assert bench.answer("settle", engine.Settled((verdict,))) == []
    bench.pass_ns(REPORT_GAP_NS)
    told = bench.answer("due", [])
    why = "QueueFull: the queue is full"
    assert told == [ScheduleNews("schedule.skipped", "kites", "p", "", why, 2)]


def test_why_a_run_was_skipped_is_remembered_for_people(bench: Bench) -> None:
    bench.follow(KITES)

    def remembered() -> str:
        kept = bench.calls["settle"].options["memory"]
        assert isinstance(kept, bytes)
        return msgspec.msgpack.decode(kept, type=Memory).why

    bench.answer("due", [due(alive="@kites.1")])
    assert remembered() == "run @kites.1 has not ended"
    bench.answer("settle", engine.Settled())
    bench.pass_ns(SECOND_NS)
    bench.answer("due", [due(memory=Memory(PLAN, 0, "for long"))])
    assert remembered() == "for long", "nothing is skipped"
    full = Rejection("@kites.2", QUEUE_FULL, "the queue is full")
    verdict = engine.Verdict("@kites.2", "rejected", rejection=full)
    bench.answer("settle", engine.Settled((verdict,)))
    bench.pass_ns(SECOND_NS)
    bench.answer("due", [due()])
    assert remembered() == "QueueFull: the queue is full"
    bench.answer("settle", engine.Settled())
    bench.pass_ns(SECOND_NS)
    bench.answer("due", [due()])
    assert remembered() == ""


def test_a_new_beginning_is_told(bench: Bench) -> None:
    bench.follow(KITES)
    bench.answer("due", [due(last_ns=NOW_NS + MINUTE_NS)])
    [news] = bench.answer("settle", engine.Settled())
    assert isinstance(news, ScheduleNews)
    assert (news.event, news.schedule) == ("schedule.reset", "kites")


def note(number: int, *, announced: bool = False) -> ChangeNote:
    return ChangeNote(number, "kites", f"@kites.{number}", "d", announced, pool="p")


def news_of(number: int, *, elsewhere: bool) -> ScheduleNews:
    task = f"@kites.{number}"
    change = 0 if elsewhere else number
    return ScheduleNews("task.changed", "kites", "p", task, "", 0, "d", elsewhere, change=change)


def test_changes_are_told_and_one_node_announces_each(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    told = bench.answer("changes", Changed((note(1, announced=True),), "a"))
    assert told == []  # it is old
    bench.pass_ns(SECOND_NS)
    assert bench.calls["changes"].arguments == ("a",)
    notes = (note(2, announced=True), note(3), note(4))
    assert bench.answer("changes", Changed(notes, "b")) == [news_of(2, elsewhere=True)]
    assert bench.answer("announce", 1) == [news_of(3, elsewhere=False)]
    token = bench.calls["announce"].arguments
    bench.fail("announce")
    bench.pass_ns(SECOND_NS)
    assert bench.calls["announce"].arguments == token  # asked again: it may be ours already
    assert bench.answer("announce", 0) == [news_of(4, elsewhere=True)]


def test_a_change_that_nobody_announced_is_announced_by_the_next_node(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((note(1),), "a"))
    assert bench.answer("announce", 1) == [news_of(1, elsewhere=False)]


def with_content(number: int) -> ChangeNote:
    return msgspec.structs.replace(note(number), entry=number, before=number - 1, at_ns=5)


def entry(number: int, price: int) -> HistoryEntry:
    return HistoryEntry(number, 5, "t", "d", msgspec.msgpack.encode({"price": price}))


def test_a_change_is_told_with_both_results(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((), "a"))
    bench.pass_ns(SECOND_NS)
    bench.answer("changes", Changed((with_content(2),), "b"))
    assert bench.answer("announce", 1) == []
    assert bench.calls["history"].arguments == ("kites", (1, 2))
    bench.fail("history")
    bench.pass_ns(SECOND_NS)
    [news] = bench.answer("history", [entry(1, 49), entry(2, 39)])
    assert isinstance(news, ScheduleNews)
    assert (news.number, news.number_before, news.at_ns, news.change) == (2, 1, 5, 2)
    content = msgspec.json.decode(news.content, type=Content)
    assert content == Content("price 49 → 39", {"price": 49}, {"price": 39})


def test_a_change_whose_results_are_gone_is_told_without(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((with_content(2),), "a"))
    bench.answer("announce", 1)
    [news] = bench.answer("history", None)
    assert isinstance(news, ScheduleNews)
    assert msgspec.json.decode(news.content, type=Content) == Content()


def test_what_people_were_alerted_of_is_noted_a_while_after_the_report(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((note(1),), "a"))
    bench.answer("untold", [])
    bench.answer("announce", 1)
    bench.pass_ns(2 * SECOND_NS)
    assert "told" not in bench.calls
    bench.feed(NewsTold(1))
    bench.feed(NewsTold(7))  # of a sidecar before
    assert "told" not in bench.calls
    bench.pass_ns(CONFIRM_NS)
    assert bench.calls["told"].arguments == ((1,),)
    bench.fail("told")
    bench.pass_ns(SECOND_NS)
    assert bench.calls["told"].arguments == ((1,),)
    bench.answer("told", None)
    bench.pass_ns(3 * SECOND_NS)
    assert "told" not in bench.calls


def test_a_change_that_nobody_tells_is_taken_over_with_a_mark(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((note(1),), "a"))
    bench.answer("announce", 1)
    bench.answer("untold", [note(1), note(2, announced=True)])
    assert bench.calls["announce"].arguments[0] == 2  # the other is ours, and on its way
    [news] = bench.answer("announce", 2)
    assert isinstance(news, ScheduleNews)
    assert (news.task, news.again, news.elsewhere) == ("@kites.2", True, False)


def test_a_change_that_was_told_meanwhile_is_told_no_more(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((), "a"))
    bench.answer("untold", [note(1, announced=True)])
    assert bench.answer("announce", 0) == []
    bench.pass_ns(SECOND_NS)
    assert "announce" not in bench.calls


def test_a_change_of_which_two_looks_tell_is_announced_once(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((note(1),), "a"))
    bench.answer("untold", [note(1)])
    assert bench.answer("announce", 1) == [news_of(1, elsewhere=False)]
    assert "announce" not in bench.calls
    bench.pass_ns(SECOND_NS)
    bench.answer("changes", Changed((note(1),), "b"))
    assert "announce" not in bench.calls


def test_other_news_of_results_are_told_without_a_task(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((), "a"))
    bench.pass_ns(SECOND_NS)
    stale = msgspec.structs.replace(note(3), event=STALE, reason="3 runs failed", count=3)
    bench.answer("changes", Changed((stale,), "b"))
    [news] = bench.answer("announce", 1)
    assert news == ScheduleNews(STALE, "kites", "p", "", "3 runs failed", 3, "d", change=3)


def watched(*runs: SeenRun, turn: int = 0, plan: bytes = b"") -> WatchedSchedule:
    return WatchedSchedule(
        "kites", plan or card_of(changed(notify=True)).plan, turn, b"", (), tuple(runs)
    )


def test_ended_runs_are_judged_and_changes_looked_for_at_once(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("changes", Changed((), "a"))
    first = SeenRun(1, "good", "@kites.1", 5, "d1", b"\x01")
    second = SeenRun(2, "good", "@kites.2", 6, "d2", b"\x02")
    bench.answer("watched", [watched(first, second)])
    [[verdict]] = bench.calls["judged"].arguments
    assert isinstance(verdict, Judged)
    assert (verdict.name, verdict.turn, verdict.runs) == ("kites", 0, (1, 2))
    assert [(each.event, each.before, each.entry) for each in verdict.notes] == [(CHANGED, 1, 2)]
    assert "watched" not in bench.calls
    bench.answer("judged", ["kites"])
    assert "changes" in bench.calls
    assert "watched" in bench.calls


def test_a_judgement_of_unknown_effect_is_not_repeated(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    run = SeenRun(1, "good", "@kites.1", 5, "d1", b"\x01")
    bench.answer("watched", [watched(run)])
    bench.fail("judged")
    bench.pass_ns(2 * SECOND_NS)
    assert "judged" not in bench.calls
    bench.answer("watched", [])
    assert "judged" not in bench.calls


def test_results_of_a_schedule_that_cannot_be_read_are_left_to_others(bench: Bench) -> None:
    bench.follow(changed(notify=True))
    bench.answer("watched", [watched(SeenRun(1, "failed", "t", 5), plan=b"\xc1")])
    assert "judged" not in bench.calls
    bench.pass_ns(SECOND_NS)
    assert bench.calls["watched"].arguments == (("kites",),)


def test_without_notify_nobody_looks_for_changes(bench: Bench) -> None:
    bench.follow(KITES)
    assert "changes" not in bench.calls


def test_a_node_that_leaves_settles_nothing_more(bench: Bench) -> None:
    bench.follow(KITES)
    bench.feed(Leave())
    bench.answer("due", [due()])
    bench.pass_ns(10 * SECOND_NS)
    assert bench.calls == {}
    assert bench.scheduler.next_deadline() is None
