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


# -- changes ------------------------------------------------------------------------------------
