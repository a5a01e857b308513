"""The contract of engines: results of schedules, as they are judged, kept and told."""

from hashlib import sha256
from zoneinfo import ZoneInfo

import pytest
from msgspec import msgpack, structs
from rig import Rig
from test_contract_schedules import due, settle

from musterd.ipc.watching.rules import Rules, encode_rules
from musterd.ipc.watching.view import look
from musterd.ipc.wire.messages import VIEW_BYTES_MAX
from musterd.supervisor.cluster.engine import ClusterPolicy, Run
from musterd.supervisor.cluster.judging import judged
from musterd.supervisor.cluster.watching import (
    CHANGED,
    RECOVERED,
    SILENT_NS,
    STALE,
    WATCHED_MAX,
    Judged,
)
from musterd.supervisor.core.model.policy import SchedulePolicy, WatchPolicy
from musterd.supervisor.core.model.shared import card_of, schedule_of
from musterd.supervisor.core.model.timing import Every

RULES = encode_rules(Rules(("price",)))
KITES = SchedulePolicy("kites", "p.extract", Every(10**9), notify=True)
BY_PRICE = structs.replace(KITES, watching=WatchPolicy(RULES, "price", confirm=2, keep=3, stale=2))
SILENT_SECONDS = SILENT_NS / 1e9


def watch(rig: Rig, policy: SchedulePolicy = KITES) -> None:
    rig.apply(ClusterPolicy(schedules=(card_of(policy),)))


def run(rig: Rig, tenure: int, id_: str, value: object, **how: object) -> None:
    """Run a schedule once, and let time pass until it is due again; None: it fails."""
    now = due(rig)
    rules = schedule_of(now.plan, ZoneInfo).watching.rules
    spec = rig.task(id=id_, watch=rules)
    moved = {"last_ns": now.now_ns, "next_ns": now.now_ns + 10**9, "memory": b"m"}
    assert rig.engine.settle(now, [Run(now.now_ns, spec)], **moved)  # type: ignore[arg-type]
    grant = rig.claim_one(tenure)
    assert grant.spec.watch == rules
    if value is None:
        rig.finish(tenure, grant, kind="failed", **how)
    else:
        data = msgpack.encode(value)
        view = look(data, rules) if rules else None
        rig.finish(tenure, grant, value=data, view=view, **how)
    rig.pass_time(2)


def judge_all(rig: Rig) -> list[Judged]:
    """Judge as a node does, until nothing is left."""
    done = []
    while found := rig.engine.watched():
        verdicts = [judged(each, schedule_of(each.plan, ZoneInfo)) for each in found]
        assert rig.engine.judged(verdicts) == [each.name for each in found]
        done += verdicts
    return done


def values(rig: Rig) -> list[object]:
    entries = rig.engine.history("kites")
    assert entries is not None
    return [msgpack.decode(each.value) for each in entries]


def test_a_changed_result_is_noted_with_both_entries_of_history(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    for number, value in enumerate((1, 1, 2), 1):
        run(rig, a, f"@kites.{number}", value)
    judge_all(rig)
    changed = rig.engine.changes()
    [note] = changed.notes
    assert (note.schedule, note.task, note.event) == ("kites", "@kites.3", CHANGED)
    assert note.digest == sha256(b"\x02").hexdigest()
    assert (note.before, note.entry) == (1, 2)
    assert values(rig) == [1, 2]
    [before, after] = rig.engine.history("kites", (note.before, note.entry)) or ()
    assert (before.changed, after.changed, after.before) == (False, True, 1)
    assert after.at_ns == note.at_ns
    assert rig.engine.changes(changed.after).notes == ()
    [kept] = rig.engine.changed()
    assert (kept.schedule, kept.before, kept.after) == ("kites", before, after)
    assert rig.engine.changed("others") == []
    assert rig.engine.history("others") is None


def test_history_gives_the_newest_oldest_first(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    for number in range(1, 5):
        run(rig, a, f"@kites.{number}", number)
    judge_all(rig)
    entries = rig.engine.history("kites", limit=2)
    assert [each.number for each in entries or ()] == [3, 4]
    assert [each.after.number for each in rig.engine.changed(limit=2)] == [4, 3]


def test_rules_are_those_of_one_machine(rig: Rig) -> None:
    """What is watched, how often it must be seen, how much is kept: judged by the same code."""
    watch(rig, BY_PRICE)
    a = rig.join()
    prices = (5, 5, 6, 5, 7, 7, 8, 8)
    for number, price in enumerate(prices, 1):
        run(rig, a, f"@kites.{number}", {"price": price, "seen": number})
    judge_all(rig)
    assert [each.after.task for each in rig.engine.changed()] == ["@kites.8", "@kites.6"]
    assert values(rig) == [{"price": 5}, {"price": 7}, {"price": 8}][-3:]


def test_each_run_is_judged_once_whoever_else_has_looked(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    for number in range(1, 3):
        run(rig, a, f"@kites.{number}", number)
    first, again = rig.engine.watched(), rig.engine.watched()
    assert first == again
    verdicts = [judged(each, KITES) for each in first]
    assert rig.engine.judged(verdicts) == ["kites"]
    assert rig.engine.judged([judged(each, KITES) for each in again]) == []
    assert rig.engine.judged(verdicts) == []  # its answer was lost
    assert rig.engine.watched() == []
    assert len(rig.engine.changes().notes) == 1
    # One that has ended since is judged by what is known by then.
    run(rig, a, "@kites.3", 3)
    [late] = rig.engine.watched()
    stale = structs.replace(late, turn=late.turn - 1)
    assert rig.engine.judged([judged(stale, KITES)]) == []
    assert rig.engine.judged([judged(late, KITES)]) == ["kites"]
    assert [each.task for each in rig.engine.changes().notes] == ["@kites.3"]


def test_a_verdict_about_a_schedule_that_is_there_anew_does_not_count(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    run(rig, a, "@kites.1", 1)
    verdicts = [judged(each, KITES) for each in rig.engine.watched()]
    rig.apply(ClusterPolicy())
    assert rig.engine.judged(verdicts) == []
    watch(rig)
    assert rig.engine.judged(verdicts) == []
    assert rig.engine.history("kites") == []


def test_what_a_node_cannot_read_is_left_to_others(rig: Rig) -> None:
    others = structs.replace(KITES, name="others")
    rig.apply(ClusterPolicy(schedules=(card_of(KITES), card_of(others))))
    a = rig.join()
    for name in ("kites", "others"):
        rig.submit(rig.task(id=f"@{name}.1"))
        rig.finish(a, rig.claim_one(a))
    assert [each.name for each in rig.engine.watched()] == ["kites", "others"]
    assert [each.name for each in rig.engine.watched(["kites"])] == ["others"]


def test_runs_to_be_judged_come_in_portions_in_their_order(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    rig.submit(*[rig.task(id=f"@kites.{number:04d}") for number in range(WATCHED_MAX + 5)])
    while grants := rig.claim(a, 100):
        rig.finish(a, *grants)
    [found] = rig.engine.watched()
    assert len(found.runs) == WATCHED_MAX
    numbers = [each.number for each in found.runs]
    assert numbers == sorted(numbers)
    assert len(judge_all(rig)) == 2


def test_a_long_result_is_judged_without_its_value(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    run(rig, a, "@kites.1", "x" * (VIEW_BYTES_MAX + 1))
    [found] = rig.engine.watched()
    assert found.runs[0].value is None
    judge_all(rig)
    [entry] = rig.engine.history("kites") or ()
    assert entry.cut


def test_each_change_is_told_once_after_the_first_call_told_the_newest(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    nothing = rig.engine.changes()
    assert nothing.notes == ()
    for number in range(1, 4):
        run(rig, a, f"@kites.{number}", number)
        judge_all(rig)
    changed = rig.engine.changes(nothing.after)
    assert [each.task for each in changed.notes] == ["@kites.2", "@kites.3"]
    assert [each.task for each in rig.engine.changes().notes] == ["@kites.3"]
    run(rig, a, "@kites.4", 9)
    judge_all(rig)
    assert [each.task for each in rig.engine.changes(changed.after).notes] == ["@kites.4"]


def test_failures_in_a_row_are_told_once_and_their_end_once(rig: Rig) -> None:
    watch(rig, BY_PRICE)
    a = rig.join()
    before = rig.engine.changes().after
    for number, value in enumerate((None, None, None, {"price": 1}, None), 1):
        run(rig, a, f"@kites.{number}", value)
        judge_all(rig)
    stale, recovered = rig.engine.changes(before).notes
    assert (stale.event, stale.task, stale.count) == (STALE, "@kites.2", 2)
    assert "no price" in stale.reason
    assert (recovered.event, recovered.task) == (RECOVERED, "@kites.4")
    assert rig.engine.changes().notes == ()  # they are no changes


def test_a_failure_and_another_schedule_change_nothing(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    run(rig, a, "@kites.1", 1)
    run(rig, a, "@kites.2", None)
    rig.submit(rig.task(id="@others.1"))
    rig.finish(a, rig.claim_one(a), value=b"\x07")
    judge_all(rig)
    assert rig.engine.changes().notes == ()
    assert values(rig) == [1]


def test_a_cancelled_run_that_never_began_is_no_failure(rig: Rig) -> None:
    watch(rig)
    rig.join()
    rig.submit(rig.task(id="@kites.1"))
    rig.engine.cancel(["@kites.1"])
    assert rig.engine.watched() == []


def test_a_schedule_that_begins_anew_has_another_baseline_and_its_history(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    run(rig, a, "@kites.1", 1)
    assert settle(rig, due(rig), every=1, anew=True) is not None
    rig.pass_time(2)
    run(rig, a, "@kites.2", 2)
    judge_all(rig)
    assert rig.engine.changes().notes == ()
    assert values(rig) == [1, 2]
    run(rig, a, "@kites.3", 3)
    judge_all(rig)
    assert [each.task for each in rig.engine.changes().notes] == ["@kites.3"]


@pytest.mark.parametrize("judged_before", [True, False])
def test_a_schedule_applied_again_has_no_last_result(rig: Rig, judged_before: bool) -> None:
    watch(rig)
    a = rig.join()
    run(rig, a, "@kites.1", 1)
    if judged_before:
        judge_all(rig)
    rig.apply(ClusterPolicy())
    watch(rig)
    assert rig.engine.history("kites") == []
    run(rig, a, "@kites.2", 2)
    judge_all(rig)
    assert rig.engine.changes().notes == ()


def test_one_node_announces_a_change(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    for number in range(1, 3):
        run(rig, a, f"@kites.{number}", number)
    judge_all(rig)
    [note] = rig.engine.changes().notes
    assert not note.announced
    assert rig.engine.announce(note.number, 7) == 1
    assert rig.engine.announce(note.number, 8) == 0
    assert rig.engine.announce(note.number, 7) == 1  # its answer was lost
    [note] = rig.engine.changes().notes
    assert note.announced


def test_a_change_that_was_taken_and_not_told_is_taken_over_with_a_mark(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    for number in range(1, 4):
        run(rig, a, f"@kites.{number}", number)
    judge_all(rig)
    after_first = rig.engine.changes("").notes
    [newest] = after_first
    older = newest.number - 1
    rig.pass_time(SILENT_SECONDS / 2)
    assert rig.engine.announce(newest.number, 7) == 1
    rig.pass_time(SILENT_SECONDS / 2 + 1)
    assert [each.number for each in rig.engine.untold()] == [older]
    assert rig.engine.announce(newest.number, 8) == 0
    rig.pass_time(SILENT_SECONDS / 2 + 1)
    assert [each.number for each in rig.engine.untold()] == [older, newest.number]
    assert rig.engine.announce(older, 8) == 1  # nobody had it
    assert rig.engine.announce(newest.number, 8) == 2
    assert rig.engine.announce(newest.number, 8) == 2  # its answer was lost
    assert rig.engine.announce(newest.number, 7) == 0
    rig.engine.told([newest.number, older])
    rig.pass_time(SILENT_SECONDS + 1)
    assert rig.engine.untold() == []
    assert rig.engine.announce(newest.number, 9) == 0
    assert rig.engine.announce(newest.number, 8) == 0  # whoever has told it does not do so again


def test_what_is_not_told_yet_stays_in_history(rig: Rig) -> None:
    watch(rig, structs.replace(KITES, watching=WatchPolicy(keep=2)))
    a = rig.join()
    for number in range(1, 6):
        run(rig, a, f"@kites.{number}", number)
    judge_all(rig)
    assert values(rig) == [1, 2, 3, 4, 5]
    rig.engine.told([each.number for each in [*rig.engine.changes().notes]])
    rig.pass_time(SILENT_SECONDS + 1)
    rig.engine.told([each.number for each in rig.engine.untold()])
    run(rig, a, "@kites.6", 6)
    judge_all(rig)
    assert values(rig) == [5, 6]


def test_a_run_that_joins_another_task_has_its_result(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    run(rig, a, "@kites.1", 1)
    rig.submit(rig.task(key="k"))
    leader = rig.claim_one(a)
    now = due(rig)
    joined = Run(now.now_ns, rig.task(id="@kites.2", key="k"))
    settled = rig.engine.settle(now, [joined], last_ns=now.now_ns, next_ns=None, memory=b"")
    assert settled is not None
    assert [each.state for each in settled.verdicts] == ["joined"]
    rig.finish(a, leader, value=b"\x05")
    judge_all(rig)
    assert [each.task for each in rig.engine.changes().notes] == ["@kites.2"]


def test_a_run_that_is_answered_from_the_cache_has_its_result(rig: Rig) -> None:
    watch(rig)
    a = rig.join()
    run(rig, a, "@kites.1", 1)
    rig.submit(rig.task(key="k"))
    rig.finish(a, rig.claim_one(a), value=b"\x05")
    now = due(rig)
    run_ = Run(now.now_ns, rig.task(id="@kites.2", key="k", cache_ns=60 * 10**9))
    settled = rig.engine.settle(now, [run_], last_ns=now.now_ns, next_ns=None, memory=b"")
    assert settled is not None
    assert [each.state for each in settled.verdicts] == ["answered"]
    judge_all(rig)
    assert [each.task for each in rig.engine.changes().notes] == ["@kites.2"]
