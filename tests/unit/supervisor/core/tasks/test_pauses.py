"""Pause, drain and resume: people stop the dispatch and let it go on."""

from typing import Any

import pytest

from musterd.ipc.wire.messages import QUEUE_FULL, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.tasks.pauses import DRAINED, FACT, PAUSED
from support.core import Muster, of

POOL = (("p", -1),)
FIRST_SLOT = (("p", 0),)


def leased(answer: list[Any]) -> list[str]:
    return [lease.id for each in of(actions.AssignLeases, answer) for lease in each.leases]


def spec(id_: str, **options: Any) -> TaskSpec:
    return TaskSpec(id_, "p.x", b"", **options)


def refused(answer: list[Any]) -> list[Any]:
    return [each for told in of(actions.Acknowledge, answer) for each in told.rejected]


def facts(answer: list[Any]) -> list[tuple[str, bytes | None]]:
    pages = of(actions.Persist, answer)
    return [(fact.key, fact.value) for page in pages for fact in page.facts if fact.kind == FACT]


def test_a_paused_pool_accepts_tasks_and_runs_none_until_it_is_resumed(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.tell(events.PauseRequested(POOL))
    answer = m.submit(spec("a"), spec("b"))
    assert not refused(answer)
    assert leased(answer) == []
    assert leased(m.tell(events.ResumeRequested(POOL))) == ["a"]


def test_what_runs_ends_and_nothing_follows_it(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    answer = m.submit(spec("a"), spec("b"))
    (lease,) = (each.leases[0].lease for each in of(actions.AssignLeases, answer))
    m.tell(events.PauseRequested(POOL))
    assert leased(m.complete(1, lease)) == []
    assert m.fleet.pools["p"].counters.succeeded == 1


def test_a_drained_pool_refuses_tasks_and_says_who_can_change_that(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("runs"), spec("waits"))
    m.tell(events.DrainRequested(POOL))
    (refusal,) = refused(m.submit(spec("late")))
    assert refusal.code == QUEUE_FULL  # so that submit(wait=True) waits for the end of the drain
    assert refusal.retry_after_ns > 0
    assert "musterctl resume p" in refusal.message
    assert m.fleet.pools["p"].held == 1, "what was accepted before is kept"
    m.tell(events.ResumeRequested(POOL))
    assert not refused(m.submit(spec("late")))


def test_it_holds_for_the_next_worker(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.PauseRequested(POOL))
    m.submit(spec("a"))
    (spawn,) = of(actions.SpawnWorker, m.exit(1))
    assert leased(m.bring_up(spawn.worker)) == []
    assert leased(m.tell(events.ResumeRequested(POOL))) == ["a"]


@pytest.mark.parametrize("request_of", [events.PauseRequested, events.DrainRequested])
def test_a_slot_that_is_held_back_leaves_the_work_to_the_others(
    muster: type[Muster], request_of: Any
) -> None:
    m = muster(size=2)
    m.start()
    m.tell(request_of(FIRST_SLOT))
    answer = m.submit(spec("a"), spec("b"))
    assert [each.worker for each in of(actions.AssignLeases, answer)] == [2]
    assert not refused(answer)
    answer = m.tell(events.ResumeRequested(FIRST_SLOT))
    assert [each.worker for each in of(actions.AssignLeases, answer)] == [1]


def test_to_resume_a_pool_is_to_resume_its_slots(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.tell(events.PauseRequested((("p", 0), ("p", 1))))
    m.tell(events.PauseRequested(POOL))
    m.submit(spec("a"), spec("b"))
    assert sorted(leased(m.tell(events.ResumeRequested(POOL)))) == ["a", "b"]


def test_to_pause_what_is_drained_does_not_open_it(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.DrainRequested(POOL))
    assert m.tell(events.PauseRequested(POOL)) == []
    assert refused(m.submit(spec("a")))


def test_it_is_said_once_and_on_disk_for_a_pool(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    answer = m.tell(events.PauseRequested(POOL))
    assert [each.event for each in of(actions.Report, answer)] == ["pool.paused"]
    assert facts(answer) == [("p", PAUSED.encode())]
    assert m.tell(events.PauseRequested(POOL)) == []
    assert facts(m.tell(events.DrainRequested(POOL))) == [("p", DRAINED.encode())]
    assert facts(m.tell(events.ResumeRequested(POOL))) == [("p", None)]
    assert facts(m.tell(events.PauseRequested(FIRST_SLOT))) == []


def test_a_new_daemon_finds_it_in_force_and_says_so(muster: type[Muster]) -> None:
    m = muster()
    stored = [("p", b"drained"), ("gone", b"paused")]
    answer = m.tell(events.FactsRecovered(FACT, stored))
    assert [(each.event, each.level) for each in of(actions.Report, answer)] == [
        ("pool.drained", "warning")
    ]
    assert facts(answer) == [("gone", None)]
    m.start()
    assert refused(m.submit(spec("a")))


def test_a_schedule_makes_no_run_while_its_pool_is_drained(muster: type[Muster]) -> None:
    from random import Random

    from musterd.ipc.resilience.policy import SECOND_NS
    from musterd.supervisor.core.fleet import Fleet
    from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy, SchedulePolicy
    from musterd.supervisor.core.model.timing import Every

    m = muster()
    timing = Every(10 * SECOND_NS)
    schedule = SchedulePolicy("often", "p.x", timing)
    m.fleet = Fleet(FleetPolicy(pools=(PoolPolicy("p", 1),), schedules=(schedule,)), Random(1))
    m.start()
    wall_ns = 1_700_000_000 * SECOND_NS
    m.tell(events.ClockRead(wall_ns))
    m.tell(events.DrainRequested(POOL))
    m.now_ns += 25 * SECOND_NS
    m.tell(events.ClockRead(wall_ns + 25 * SECOND_NS))
    memory = m.fleet.schedules["often"].memory
    assert (memory.runs, memory.skipped) == (0, 0)
    m.tell(events.ResumeRequested(POOL))
    m.now_ns += SECOND_NS
    m.tell(events.ClockRead(wall_ns + 26 * SECOND_NS))
    assert memory.runs == 1, "as after a downtime: catch_up = one"
