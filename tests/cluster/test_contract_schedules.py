"""The contract of engines: schedules and their runs."""

from rig import Rig, pool

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import UNKNOWN_TASK
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    DueSchedule,
    Run,
    ScheduleCard,
    ScheduleView,
    Settled,
)
from musterd.supervisor.core.model.policy import TargetPolicy


def scheduled(rig: Rig, *names: str, plan: bytes = b"plan", notify: bool = False) -> None:
    cards = tuple([ScheduleCard(name, plan, notify) for name in names or ("kites",)])
    rig.apply(ClusterPolicy(schedules=cards))


def due(rig: Rig) -> DueSchedule:
    [found] = rig.engine.due()
    return found


def view(rig: Rig) -> ScheduleView:
    [found] = rig.engine.schedules()
    return found


def settle(
    rig: Rig, due: DueSchedule, *ids: str, every: float = 60, method: str = "extract", **how: object
) -> Settled | None:
    """Settle with these runs, and be due again after a time."""
    runs = [Run(due.now_ns, rig.task(method, id=id_)) for id_ in ids]
    next_ns = due.now_ns + round(every * SECOND_NS)
    moved = {"last_ns": due.now_ns, "next_ns": next_ns, "memory": b"m", **how}
    return rig.engine.settle(due, runs, **moved)  # type: ignore[arg-type]


def run(rig: Rig, tenure: int, id_: str, value: bytes) -> None:
    """Run a schedule once, and let time pass until it is due again."""
    assert settle(rig, due(rig), id_, every=1) is not None
    rig.finish(tenure, rig.claim_one(tenure), value=value)
    rig.pass_time(2)


def test_of_two_nodes_that_see_a_due_schedule_one_runs_it(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    first, again = due(rig), due(rig)
    assert (first.name, first.plan, first.last_ns, first.memory, first.alive) == (
        "kites",
        b"plan",
        0,
        b"",
        "",
    )
    settled = settle(rig, first, "@kites.1")
    assert settled is not None
    assert [each.state for each in settled.verdicts] == ["accepted"]
    assert settle(rig, again, "@kites.2") is None
    assert rig.engine.due() == []
    assert [each.id for each in rig.claim(a, 5)] == ["@kites.1"]
    rig.pass_time(61)
    now = due(rig)
    assert (now.last_ns, now.memory, now.alive) == (first.now_ns, b"m", "@kites.1")


def test_a_schedule_that_is_never_due_again_is_silent(rig: Rig) -> None:
    scheduled(rig)
    assert settle(rig, due(rig), next_ns=None) is not None
    rig.pass_time(10_000)
    assert rig.engine.due() == []
    assert view(rig).next_ns is None


def test_another_plan_is_looked_at_anew_and_a_removed_schedule_is_gone(rig: Rig) -> None:
    scheduled(rig)
    rig.join()
    before = due(rig)
    scheduled(rig, plan=b"other")
    assert settle(rig, before, "@kites.1") is None
    assert [each.plan for each in rig.engine.due()] == [b"other"]
    assert settle(rig, due(rig), "@kites.2") is not None
    scheduled(rig, plan=b"other")  # applied again as it is: it goes on
    assert rig.engine.due() == []
    assert view(rig).runs == 1
    rig.apply(ClusterPolicy())
    assert rig.engine.due() == []
    assert rig.engine.schedules() == []


def test_a_run_that_is_refused_is_skipped_and_said(rig: Rig) -> None:
    scheduled(rig)
    rig.join()
    assert settle(rig, due(rig), "@kites.1", every=1) is not None
    rig.pass_time(2)
    settled = settle(rig, due(rig), "@kites.2", method="nothing", skipped=3)
    assert settled is not None
    [verdict] = settled.verdicts
    assert verdict.rejection is not None
    assert verdict.rejection.code == UNKNOWN_TASK
    seen = view(rig)
    assert (seen.runs, seen.skipped, seen.task) == (1, 4, "@kites.1")
    assert rig.outcome("@kites.2") is None


def test_a_full_queue_refuses_runs_as_it_does_others(rig: Rig) -> None:
    scheduled(rig)
    rig.join("a", pool(queue_size=1))
    rig.submit(rig.task(priority=0))
    rig.engine.tick()
    settled = settle(rig, due(rig), "@kites.1")
    assert settled is not None
    assert [each.state for each in settled.verdicts] == ["rejected"]
    assert (view(rig).runs, view(rig).skipped) == (0, 1)


def test_people_see_a_schedule_with_its_newest_run(rig: Rig) -> None:
    scheduled(rig, notify=True)
    a = rig.join()
    seen = view(rig)
    assert (seen.due.name, seen.next_ns, seen.paused, seen.notify) == ("kites", 0, False, True)
    assert (seen.runs, seen.skipped, seen.task, seen.ran_ns, seen.state) == (0, 0, "", 0, "")
    now = due(rig)
    assert settle(rig, now, "@kites.1", "@kites.2") is not None
    seen = view(rig)
    assert (seen.next_ns, seen.ran_ns) == (now.now_ns + 60 * SECOND_NS, now.now_ns)
    assert (seen.runs, seen.task, seen.state, seen.due.alive) == (
        2,
        "@kites.2",
        "queued",
        "@kites.2",
    )
    rig.finish(a, *rig.claim(a, 2))
    assert (view(rig).state, view(rig).due.alive) == ("succeeded", "")


def test_a_run_that_was_retried_by_hand_is_alive_again(rig: Rig) -> None:
    scheduled(rig, "kites", "kites-too")
    a = rig.join()
    first, other = rig.engine.due()
    assert settle(rig, first, "@kites.1", every=0) is not None
    assert settle(rig, other, "@kites-too.1", every=0) is not None
    rig.finish(a, *rig.claim(a, 2), kind="failed")
    assert [each.alive for each in rig.engine.due()] == ["", ""]
    assert rig.engine.retry(["@kites.1"]) == []
    assert [each.alive for each in rig.engine.due()] == ["@kites.1", ""]


def test_a_paused_schedule_is_not_due_and_does_not_catch_up(rig: Rig) -> None:
    scheduled(rig)
    rig.join()
    assert settle(rig, due(rig), every=10) is not None
    rig.pass_time(20)
    before = due(rig)
    assert rig.engine.pause("kites", paused=True)
    assert settle(rig, before, "@kites.1") is None  # somebody else decided meanwhile
    assert rig.engine.due() == []
    assert view(rig).paused
    rig.pass_time(1000)
    assert rig.engine.pause("kites", paused=True)
    assert rig.engine.pause("kites", paused=False)
    now = due(rig)
    assert not view(rig).paused
    assert now.last_ns >= before.now_ns + 1000 * SECOND_NS  # all before that is settled
    assert now.last_ns <= now.now_ns
    assert not rig.engine.pause("others", paused=True)


def test_a_schedule_paused_before_it_began_begins_when_it_is_resumed(rig: Rig) -> None:
    scheduled(rig)
    rig.engine.pause("kites", paused=True)
    rig.engine.pause("kites", paused=False)
    assert due(rig).last_ns == 0


# -- runs that wait for a retry -----------------------------------------------------------------

NEVER_NS = 3600 * SECOND_NS


def failing(rig: Rig, tenure: int, *ids: str, retry_ns: int = NEVER_NS, **task: object) -> None:
    """Make runs that fail once and wait for a retry; the schedule is due again."""
    now = due(rig)
    runs = [Run(now.now_ns, rig.task(id=id_, **task)) for id_ in ids]
    moved = {"last_ns": now.now_ns, "next_ns": now.now_ns, "memory": b""}
    assert rig.engine.settle(now, runs, **moved) is not None  # type: ignore[arg-type]
    how = {"kind": "failed", "retry_ns": retry_ns, "patience_ns": NEVER_NS}
    rig.finish(tenure, *rig.claim(tenure, 10), **how)


def cancelled(rig: Rig, id_: str) -> bool:
    found = rig.outcome(id_)
    assert found is None or found.state == "cancelled", found
    return found is not None


def test_who_looks_at_what_is_due_sees_whether_its_runs_wait_for_a_retry(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    assert not due(rig).retrying
    assert settle(rig, due(rig), "@kites.1", every=0) is not None
    assert not due(rig).retrying  # it waits for its first attempt
    grant = rig.claim_one(a)
    assert not due(rig).retrying
    rig.finish(a, grant, kind="failed", retry_ns=NEVER_NS)
    now = due(rig)
    assert (now.alive, now.retrying, now.asked) == ("@kites.1", True, "")
    assert settle(rig, now, "@kites.2m", every=0) is not None
    now = due(rig)
    assert (now.alive, now.retrying, now.asked) == ("@kites.2m", False, "@kites.2m")
    rig.finish(a, rig.claim_one(a), kind="failed", retry_ns=NEVER_NS)
    now = due(rig)
    assert (now.alive, now.retrying, now.asked) == ("@kites.2m", True, "@kites.2m")
    shown = view(rig).due
    assert (shown.alive, shown.retrying, shown.asked) == ("@kites.2m", True, "@kites.2m")


def test_a_run_that_was_given_back_is_no_retry(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    assert settle(rig, due(rig), "@kites.1", every=0) is not None
    rig.finish(a, rig.claim_one(a), kind="crashed")
    assert not due(rig).retrying


def test_a_run_that_waits_for_a_retry_ends_for_the_next_one(rig: Rig) -> None:
    scheduled(rig, notify=True)
    a = rig.join()
    failing(rig, a, "@kites.1")
    settled = settle(rig, due(rig), "@kites.2", way="replaces")
    assert settled is not None
    assert [each.state for each in settled.verdicts] == ["accepted"]
    end = rig.ended("@kites.1")
    assert (end.state, end.attempts) == ("cancelled", 1)
    assert end.error == "cancel: not tried again: the next run of schedule 'kites' is due"
    seen = view(rig)
    assert (seen.task, seen.runs, seen.skipped) == ("@kites.2", 2, 0)
    [watched] = rig.engine.watched()
    assert [(run.kind, run.task) for run in watched.runs] == [("failed", "@kites.1")]
    assert [each.id for each in rig.claim(a, 5)] == ["@kites.2"]


def test_a_run_that_is_tried_again_by_now_ends_for_nothing(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    failing(rig, a, "@kites.1", retry_ns=SECOND_NS)
    before = due(rig)
    assert before.retrying
    rig.pass_time(2)
    rig.engine.tick()
    assert not due(rig).retrying
    assert settle(rig, before, "@kites.2", way="replaces") is None
    assert not cancelled(rig, "@kites.1")
    grants = rig.claim(a, 5)
    assert [(each.id, each.attempt) for each in grants] == [("@kites.1", 2)]
    assert settle(rig, before, "@kites.2", way="replaces") is None
    rig.finish(a, *grants)
    assert settle(rig, before, "@kites.2", way="replaces") is not None  # nothing is in the way
    assert view(rig).runs == 2


def test_a_run_ends_for_no_run_that_is_refused(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    failing(rig, a, "@kites.1", key="k")
    now = due(rig)
    runs = [Run(now.now_ns, rig.task("nothing", id="@kites.2", key="other"))]
    moved = {"last_ns": now.now_ns, "next_ns": now.now_ns, "memory": b""}
    assert rig.engine.settle(now, runs, way="replaces", **moved) is not None  # type: ignore[arg-type]
    assert not cancelled(rig, "@kites.1")
    assert (view(rig).skipped, due(rig).alive) == (1, "@kites.1")
    rig.submit(rig.task(key="other"))  # which nobody leads
    assert [each.spec.key for each in rig.claim(a, 5)] == ["other"]


def test_a_run_with_a_key_ends_for_the_next_one_whatever_its_key(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    failing(rig, a, "@kites.1", key="k")
    joined = rig.task(key="k", priority=0)
    rig.submit(joined)
    for number, key in ((2, "k"), (3, "j"), (4, "l")):
        now = due(rig)
        run = Run(now.now_ns, rig.task(id=f"@kites.{number}", key=key))
        moved = {"last_ns": now.now_ns, "next_ns": now.now_ns, "memory": b""}
        assert rig.engine.settle(now, [run], way="replaces", **moved) is not None  # type: ignore[arg-type]
        rig.engine.tick()
        assert cancelled(rig, f"@kites.{number - 1}")
        grants = rig.claim(a, 5)
        # The task that had joined the first run leads now, and the second has joined it.
        assert [each.id for each in grants] == [joined.id if number == 2 else run.spec.id]
        rig.finish(a, *grants, kind="failed", retry_ns=NEVER_NS)
        if number == 2:
            rig.engine.cancel([joined.id])
            rig.engine.tick()
            rig.finish(a, *rig.claim(a, 5), kind="failed", retry_ns=NEVER_NS)
    rig.engine.cancel(["@kites.4"])
    assert due(rig).alive == ""


def test_a_run_that_a_person_asked_for_is_hastened_and_never_ends_for_another(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    failing(rig, a, "@kites.1", "@kites.2m")
    assert settle(rig, due(rig), "@kites.3", way="replaces") is None
    assert rig.claim(a, 5) == []
    settled = settle(rig, due(rig), way="hastens", skipped=1)
    assert settled == Settled()
    grants = rig.claim(a, 5)
    assert [(each.id, each.attempt) for each in grants] == [("@kites.2m", 2)]
    assert (view(rig).skipped, view(rig).runs) == (1, 2)
    assert not cancelled(rig, "@kites.1")
    rig.pass_time(61)
    assert settle(rig, due(rig), way="hastens") is None  # it runs by now
    rig.finish(a, *grants)
    assert settle(rig, due(rig), way="hastens") is None  # it has ended by now
    assert view(rig).skipped == 1


def test_a_run_that_a_person_retried_is_hastened(rig: Rig) -> None:
    scheduled(rig)
    a = rig.join()
    failing(rig, a, "@kites.1", retry_ns=-1)
    assert rig.engine.retry(["@kites.1"]) == []
    rig.finish(a, *rig.claim(a, 5), kind="failed", retry_ns=NEVER_NS)
    now = due(rig)
    assert (now.retrying, now.asked) == (True, "@kites.1")
    assert settle(rig, now, way="hastens") is not None
    assert [(each.id, each.attempt) for each in rig.claim(a, 5)] == [("@kites.1", 2)]


def test_a_hastened_run_does_not_wait_for_the_retry_budget_of_its_site(rig: Rig) -> None:
    target = TargetPolicy(retry_share=0.0, retry_reserve=0.0)
    cards = (ScheduleCard("kites", b"plan"),)
    rig.apply(ClusterPolicy(targets={"s": target}, schedules=cards))
    a = rig.join()
    failing(rig, a, "@kites.2m", retry_ns=0, target="s")
    rig.pass_time(1)
    rig.engine.tick()
    assert rig.claim(a, 5) == []
    assert settle(rig, due(rig), way="hastens") is not None
    assert [(each.id, each.attempt) for each in rig.claim(a, 5)] == [("@kites.2m", 2)]


def test_a_hastened_run_whose_node_died_before_it_told_anybody_is_found_by_a_tick(
    rig: Rig,
) -> None:
    scheduled(rig)
    a = rig.join()
    failing(rig, a, "@kites.2m")
    assert settle(rig, due(rig), way="hastens") is not None
    rig.engine.tick()
    assert [(each.id, each.attempt) for each in rig.claim(a, 5)] == [("@kites.2m", 2)]
