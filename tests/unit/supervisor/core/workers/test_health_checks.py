"""Health checks: a worker without a sign of life is killed, a healthy one is left alone."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import PoolPolicy
from musterd.supervisor.core.workers.health_checks import CHECK_NS, CHECK_NS_MIN
from support.core import Muster, of

HEARTBEAT = {"heartbeat_timeout_ns": 40 * SECOND_NS}
HEALTH = {"health_timeout_ns": 40 * SECOND_NS}


def boards(m: Any, *quiet_seconds: int, lease: int = 0, checking: int = 0) -> list[Any]:
    """Read all boards; each worker gave its last sign of life so many seconds ago."""
    return m.tell(
        events.BoardsRead(
            [
                events.BoardRead(
                    number, lease, m.now_ns - seconds * SECOND_NS, checking and m.now_ns - checking
                )
                for number, seconds in enumerate(quiet_seconds, 1)
            ]
        )
    )


def settle(m: Any, seconds: int = 100) -> None:
    """Let the workers be up and well for so many seconds."""
    for _ in range(seconds // 5):
        m.wait(5 * SECOND_NS)
        boards(m, 0)


def test_all_workers_are_looked_at_in_one_go_every_few_seconds(muster: type[Muster]) -> None:
    m = muster(size=3, **HEARTBEAT)
    m.start()
    assert m.wait(CHECK_NS - 1) == []
    assert m.wait(1) == [actions.ReadBoards([1, 2, 3])]
    assert m.wait(CHECK_NS) == [actions.ReadBoards([1, 2, 3])]


def test_a_short_timeout_makes_for_frequent_rounds_but_not_for_ever_more(
    muster: type[Muster],
) -> None:
    m = muster(heartbeat_timeout_ns=4 * SECOND_NS)
    m.start()
    assert len(of(actions.ReadBoards, m.wait(10 * SECOND_NS))) == 10
    m = muster(health_timeout_ns=1)
    m.start()
    assert len(of(actions.ReadBoards, m.wait(SECOND_NS))) == SECOND_NS // CHECK_NS_MIN


def test_nobody_is_looked_at_where_nothing_is_asked_for(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    assert m.wait(3600 * SECOND_NS) == []


def test_an_idle_worker_without_a_sign_of_life_is_killed_at_the_second_look(
    muster: type[Muster],
) -> None:
    m = muster(size=2, **HEARTBEAT)
    m.start()
    settle(m)
    assert boards(m, 41, 2) == []
    m.wait(5 * SECOND_NS)
    answer = boards(m, 46, 0)
    assert of(actions.KillWorker, answer) == [actions.KillWorker(1, dump=True)]
    (report,) = of(actions.Report, answer)
    assert (report.event, report.cause) == ("worker.hung", "hung")
    assert report.reason == "no sign of life while idle for 46.0 s"
    assert boards(m, 50, 0) == [], "once is enough"
    m.exit(1, code=-9)
    assert m.slots[0].lost == {"hung": 1}


def test_a_late_sign_of_life_is_one(muster: type[Muster]) -> None:
    m = muster(**HEARTBEAT)
    m.start()
    settle(m)
    boards(m, 41)
    boards(m, 1)
    assert boards(m, 41) == [], "the first look is forgotten"


def test_a_worker_that_was_just_ready_has_its_time(muster: type[Muster]) -> None:
    m = muster(**HEARTBEAT)
    m.start()
    m.wait(39 * SECOND_NS)
    assert boards(m, 10_000) == []
    assert boards(m, 10_000) == []


def test_a_busy_worker_is_judged_by_its_deadline_alone(muster: type[Muster]) -> None:
    m = muster(**HEARTBEAT)
    m.start()
    settle(m)
    m.submit(TaskSpec("t", "p.x", b""))
    for _ in range(5):
        assert of(actions.KillWorker, boards(m, 100, lease=1)) == []


def test_tasks_of_a_worker_that_stood_still_before_it_began_go_to_others(
    muster: type[Muster],
) -> None:
    m = muster(size=2, **HEARTBEAT)
    m.start()
    settle(m)
    m.submit(TaskSpec("t", "p.x", b""))
    boards(m, 41)
    assert of(actions.KillWorker, boards(m, 46)) == [actions.KillWorker(1, dump=True)]
    (given,) = of(actions.AssignLeases, m.exit(1, code=-9))
    assert given.worker == 2
    assert given.leases[0].attempt == 1, "it had not begun: not an attempt"


def test_a_worker_that_does_not_know_whether_it_is_well_is_not(muster: type[Muster]) -> None:
    m = muster(**HEALTH)
    m.start()
    settle(m)
    late = 41 * SECOND_NS
    assert boards(m, 1000, checking=late) == []
    answer = boards(m, 1000, checking=late)
    assert of(actions.KillWorker, answer) == [actions.KillWorker(1, dump=True)]
    (report,) = of(actions.Report, answer)
    assert report.cause == "unhealthy"
    assert report.reason == "healthy() has not answered for 41.0 s"
    m.exit(1, code=-9)
    assert m.slots[0].lost == {"unhealthy": 1}


def test_healthy_may_take_its_time_without_a_heartbeat(muster: type[Muster]) -> None:
    m = muster(health_timeout_ns=40 * SECOND_NS, heartbeat_timeout_ns=4 * SECOND_NS)
    m.start()
    settle(m)
    for _ in range(5):
        assert boards(m, 39, checking=39 * SECOND_NS) == []


@pytest.mark.parametrize("policy", [HEARTBEAT, HEALTH])
def test_what_is_switched_off_kills_nobody(muster: type[Muster], policy: dict[str, int]) -> None:
    m = muster(**policy)
    m.start()
    settle(m)
    checking = 500 * SECOND_NS if policy is HEARTBEAT else 0
    for _ in range(5):
        assert boards(m, 500, checking=checking) == []


def test_who_stops_is_not_looked_at(muster: type[Muster]) -> None:
    m = muster(**HEARTBEAT)
    m.start()
    settle(m)
    m.tell(events.StopRequested((("p", -1),)))
    for _ in range(5):
        assert boards(m, 500) == []
    m.exit(1, code=0)
    assert of(actions.ReadBoards, m.wait(60 * SECOND_NS)) == []


def test_news_of_a_worker_that_is_gone_disturbs_nobody(muster: type[Muster]) -> None:
    m = muster(**HEARTBEAT)
    m.start()
    settle(m)
    assert boards(m, 0, 500, 500) == []


def test_the_rounds_end_with_the_daemon(muster: type[Muster]) -> None:
    m = muster(**HEARTBEAT)
    m.start()
    m.tell(events.ShutdownRequested("asked"))
    assert of(actions.ReadBoards, m.wait(3 * SECOND_NS)) == []


def test_the_defaults_find_a_hung_worker_within_three_quarters_of_a_minute() -> None:
    policy = PoolPolicy("p", 1)
    assert policy.heartbeat_timeout_ns + 3 * CHECK_NS <= 45 * SECOND_NS
    assert policy.health_timeout_ns == 10 * SECOND_NS
    assert CHECK_NS_MIN >= 100 * MILLISECOND_NS, "no wake-ups for every worker and second"
