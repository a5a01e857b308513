"""The order of actions: work first, then reports, then answers to clients, last the end."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events, schedule_events
from musterd.supervisor.core.model.actions import (
    ANSWER,
    END,
    WORK,
    Deliver,
    Exit,
    Persist,
    Report,
    RunCleanup,
    StopWorker,
    rank_of,
)
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy, SchedulePolicy
from musterd.supervisor.core.model.timing import Every
from support.core import action_kinds

POLICY = FleetPolicy(
    pools=(PoolPolicy("p", 1), PoolPolicy("q", 0)),
    web="a",
    schedules=(SchedulePolicy("s", "p.x", Every(60 * SECOND_NS)),),
)


def kinds(answer: list[Any]) -> list[str]:
    return [each.event if isinstance(each, Report) else type(each).__name__ for each in answer]


def test_actions_are_work_but_for_answers_and_the_end() -> None:
    ranks = {each.__name__: each.rank for each in action_kinds() - {Report}}
    answers = (
        "Acknowledge",
        "CloseDebugger",
        "Deliver",
        "DropRequest",
        "NewsTold",
        "ShowDebugger",
        "TellChanges",
        "TellMissing",
        "TellProgress",
    )
    expected = dict.fromkeys(answers, ANSWER) | dict.fromkeys(("Exit", "RunCleanup"), END)
    assert {name: rank for name, rank in ranks.items() if rank != WORK} == expected


@pytest.mark.parametrize(
    "decided",
    [
        [Report("a"), Persist(1, [], [], [])],
        [Deliver(b"c", []), Report("a"), StopWorker(1)],
        [Exit(), Deliver(b"c", []), Report("a")],
        [Report("a"), RunCleanup()],
        [Report("b"), Report("a", task="t"), StopWorker(1), Report("c"), StopWorker(2)],
    ],
)
def test_whoever_decides_an_action_its_rank_gives_its_place(decided: list[Any]) -> None:
    fleet = Fleet(POLICY, Random(1))
    fleet._handlers[type(None)] = lambda _: fleet._state.out.extend(decided)
    answer = fleet.handle(1, None)
    assert answer == sorted(decided, key=rank_of)
    assert [rank_of(each) for each in answer] == sorted(rank_of(each) for each in answer)


def test_a_task_is_reported_among_the_work_in_the_order_of_its_life() -> None:
    fleet = Fleet(POLICY, Random(1))
    decided = [StopWorker(1), Report("task.crashed", task="t"), Persist(1, [], [], [])]
    fleet._handlers[type(None)] = lambda _: fleet._state.out.extend(decided)
    assert fleet.handle(1, None) == decided


# -- the routes by which reports come ---------------------------------------------------------


def started() -> Fleet:
    fleet = Fleet(POLICY, Random(1))
    fleet.handle(1, events.ClockRead(10**18))
    fleet.handle(1, events.Started())
    return fleet


def of_a_removed_pool(fleet: Fleet) -> list[Any]:
    fleet.handle(1, events.DrainRequested((("q", -1),)))
    fleet.handle(1, events.Persisted(fleet._ledger.last_ticket))
    return fleet.handle(1, events.PolicyChanged(structs.replace(POLICY, pools=POLICY.pools[:1])))


def of_a_target(fleet: Fleet) -> list[Any]:
    return fleet.handle(1, events.BreakerCommanded("example.org", "open"))


def of_a_schedule(fleet: Fleet) -> list[Any]:
    return fleet.handle(1, schedule_events.SchedulePauseRequested("s", True, b"control:1"))


def of_a_worker(fleet: Fleet) -> list[Any]:
    fleet.handle(1, events.ForkServerReady("p", ()))
    return fleet.handle(1, events.WorkerExited(1, 1, 0))


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (of_a_removed_pool, ["StopForkServer", "Persist", "pool.removed"]),
        (of_a_target, ["Persist", "breaker.forced_open"]),
        (of_a_schedule, ["Persist", "schedule.paused"]),
        (of_a_worker, ["SpawnWorker", "worker.crashed"]),
    ],
)
def test_a_report_comes_after_the_work(
    route: Callable[[Fleet], list[Any]], expected: list[str]
) -> None:
    assert kinds(route(started())) == expected
