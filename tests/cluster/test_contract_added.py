"""The contract of engines: schedules that are added at run time."""

from itertools import pairwise
from random import Random

from msgspec import structs
from rig import Rig
from test_contract_schedules import due
from test_contract_watching import KITES, judge_all, run

from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import (
    IN_USE,
    INVALID_SCHEDULE,
    READ_ONLY,
    SECTION_BYTES_MAX,
    UNKNOWN_SCHEDULE,
)
from musterd.supervisor.cluster.added import added
from musterd.supervisor.cluster.adding import AddedSchedule
from musterd.supervisor.cluster.engine import ClusterPolicy, Run, ScheduleView
from musterd.supervisor.cluster.scheduler import settlement
from musterd.supervisor.config.schema import SCHEDULE_NAME_LENGTH_MAX
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.shared import card_of
from musterd.supervisor.core.model.timing import Every

SECOND_NS = 10**9


def every(name: str, seconds: int, *, notify: bool = False) -> SchedulePolicy:
    return SchedulePolicy(name, "p.extract", Every(seconds * SECOND_NS), notify=notify)


def made(*policies: SchedulePolicy, paused: str = "") -> list[AddedSchedule]:
    sections = [(policy, b"section of " + policy.name.encode()) for policy in policies]
    return added(sections, Random(1), frozenset([paused]))


def codes(found: list[Rejection]) -> list[tuple[str, str]]:
    return [(each.id, each.code) for each in found]


def only(rig: Rig) -> ScheduleView:
    [view] = rig.engine.schedules()
    return view


def test_an_added_schedule_is_shown_with_its_keys_and_is_due_as_any_other(rig: Rig) -> None:
    assert rig.engine.policy().scheduled == 0
    assert rig.engine.put(made(every("kites", 60))) == []
    view = only(rig)
    assert (view.added, view.section, view.paused) == (True, b"section of kites", False)
    assert rig.engine.policy().scheduled == 1
    found = due(rig)
    policy = every("kites", 60)
    assert found.plan == card_of(policy).plan
    settled = settlement(found, policy, "", Random(1))
    assert settled is not None
    assert not settled.anew  # it has begun when it was put
    assert 0 < (settled.next_ns or 0) - found.last_ns <= 60 * SECOND_NS


def test_those_that_come_together_are_spread_over_their_interval(rig: Rig) -> None:
    rig.engine.put(made(*[every(name, 60) for name in "abc"]))
    begun = [view.due.last_ns for view in rig.engine.schedules()]
    gaps = [first - second for first, second in pairwise(begun)]
    assert all(abs(gap - 20 * SECOND_NS) < SECOND_NS for gap in gaps), gaps


def test_another_plan_is_looked_at_anew_and_the_same_one_is_not(rig: Rig) -> None:
    rig.engine.put(made(every("kites", 60)))
    turn = only(rig).due.turn
    rig.engine.put(made(every("kites", 60)))
    assert only(rig).due.turn == turn
    rig.engine.put(made(every("kites", 30)))
    assert only(rig).due.turn == turn + 1
    stale = structs.replace(due(rig), turn=turn)
    assert rig.engine.settle(stale, [], last_ns=1, next_ns=None, memory=b"") is None


def test_a_name_that_is_in_use_is_kept_unless_it_may_be_replaced(rig: Rig) -> None:
    rig.engine.put(made(every("kites", 60)))
    refused = rig.engine.put(made(every("kites", 30), every("other", 5)), replace=False)
    assert codes(refused) == [("kites", IN_USE)]
    assert [view.due.name for view in rig.engine.schedules()] == ["kites", "other"]
    assert rig.engine.schedules("kites")[0].due.plan == card_of(every("kites", 60)).plan


def test_schedules_of_the_policy_are_changed_only_there(rig: Rig) -> None:
    rig.apply(ClusterPolicy(schedules=(card_of(every("kites", 60)),)))
    refused = rig.engine.put(made(every("kites", 30)))
    assert codes(refused) == [("kites", READ_ONLY)]
    assert "cluster apply" in refused[0].message
    assert codes(rig.engine.delete(["kites", "none"])) == [
        ("kites", READ_ONLY),
        ("none", UNKNOWN_SCHEDULE),
    ]
    assert not only(rig).added


def test_another_policy_leaves_added_schedules_and_takes_over_those_that_it_names(rig: Rig) -> None:
    rig.engine.put(made(every("kites", 60), every("mine", 60)))
    rig.apply(ClusterPolicy(schedules=(card_of(every("kites", 30)),)))
    shown = {view.due.name: (view.added, view.section) for view in rig.engine.schedules()}
    assert shown == {"kites": (False, b""), "mine": (True, b"section of mine")}
    rig.apply(ClusterPolicy())
    assert [view.due.name for view in rig.engine.schedules()] == ["mine"]


def test_a_schedule_may_be_put_paused_and_stays_so_when_it_is_put_again(rig: Rig) -> None:
    rig.engine.put(made(every("kites", 60), paused="kites"))
    assert rig.engine.due() == []
    rig.engine.put(made(every("kites", 30)))
    assert only(rig).paused
    rig.engine.pause("kites", paused=False)
    assert [each.name for each in rig.engine.due()] == ["kites"]


def test_a_name_may_be_as_long_as_in_a_file(rig: Rig) -> None:
    longest = "k" * SCHEDULE_NAME_LENGTH_MAX
    assert rig.engine.put(made(every(longest, 60))) == []


def test_a_section_has_a_limit(rig: Rig) -> None:
    large = AddedSchedule(card_of(every("kites", 60)), bytes(SECTION_BYTES_MAX + 1))
    assert codes(rig.engine.put([large])) == [("kites", INVALID_SCHEDULE)]
    assert rig.engine.schedules() == []


def test_schedules_are_listed_in_portions(rig: Rig) -> None:
    rig.engine.put(made(*[every(name, 60) for name in "abcd"]))
    assert [view.due.name for view in rig.engine.schedules(limit=2)] == ["a", "b"]
    assert [view.due.name for view in rig.engine.schedules(after="b", limit=2)] == ["c", "d"]
    assert [view.due.name for view in rig.engine.schedules("c")] == ["c"]
    assert rig.engine.schedules("none") == []


def test_a_deleted_schedule_is_forgotten_with_its_results(rig: Rig) -> None:
    rig.engine.put(made(KITES))
    tenure = rig.join()
    assert rig.engine.beat(tenure).scheduled == 2
    for number in range(1, 3):
        run(rig, tenure, f"@kites.{number}", number)
    judge_all(rig)
    assert only(rig).record != b""
    run(rig, tenure, "@kites.3", 3)
    assert rig.engine.delete(["kites"]) == []
    assert (rig.engine.schedules(), rig.engine.watched()) == ([], [])
    assert rig.engine.history("kites") is None
    assert rig.engine.beat(tenure).scheduled == 0
    rig.engine.put(made(KITES))
    assert rig.engine.history("kites") == []


def test_results_are_forgotten_where_nobody_wants_to_know_of_changes_any_more(rig: Rig) -> None:
    rig.engine.put(made(KITES))
    tenure = rig.join()
    run(rig, tenure, "@kites.1", 1)
    judge_all(rig)
    rig.engine.put(made(every("kites", 1)))
    assert (rig.engine.history("kites"), only(rig).record) == ([], b"")


def test_a_run_that_may_have_been_made_is_not_made_twice(rig: Rig) -> None:
    rig.engine.put(made(every("kites", 60)))
    tenure = rig.join()

    def ask() -> str:
        found = rig.engine.schedules("kites")[0]
        spec = rig.task(id="@kites.5m")
        moved = {"last_ns": found.due.last_ns, "next_ns": found.next_ns, "memory": b""}
        settled = rig.engine.settle(found.due, [Run(5, spec)], resend=True, **moved)  # type: ignore[arg-type]
        assert settled is not None
        return settled.verdicts[0].state

    assert [ask(), ask()] == ["accepted", "known"]
    rig.finish(tenure, rig.claim_one(tenure))
    assert ask() == "known"
    assert rig.claim(tenure) == []
