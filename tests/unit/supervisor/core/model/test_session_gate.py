"""Sessions in the whole core: one task of each at a time, and nobody else waits."""

from typing import Any

import pytest
from msgspec import structs
from unit.supervisor.core.model.test_gates import Driver

from musterd.ipc.wire.messages import HIGH, LOW
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.limits import AGING_TURN
from musterd.supervisor.core.model.policy import PoolPolicy, SessionPolicy
from musterd.supervisor.core.tasks.waits import LOOK_NS
from musterd.supervisor.views.fleet import live_view
from support.core import Muster

NAMES = ("acme", "wide")
SESSIONS = {"acme": SessionPolicy(), "wide": SessionPolicy(2)}


@pytest.fixture
def driver(muster: type[Muster]) -> Driver:
    return make(muster)


def make(muster: type[Muster], size: int = 3, pools: tuple[str, ...] = ("p",)) -> Driver:
    made = Driver(muster, size, pools=pools)
    policy = structs.replace(
        made.m.policy,
        pools=tuple(PoolPolicy(name, size, sessions=NAMES) for name in pools),
        sessions=SESSIONS,
    )
    made.note(made.m.tell(events.PolicyChanged(policy)))
    return made


def test_one_task_of_a_session_runs_at_a_time_and_other_tasks_go_on(driver: Driver) -> None:
    assert driver.submit("a", "b", session="acme") == ["a"]
    assert driver.submit("c", target="elsewhere", session="acme") == []
    assert driver.submit("other") == ["other"]  # of the same site, without the session
    assert driver.succeed("a") == ["b"]
    assert driver.succeed("b") == ["c"]


def test_a_session_may_have_several_places(driver: Driver) -> None:
    assert driver.submit("a", "b", "c", session="wide") == ["a", "b"]
    assert driver.succeed("a") == ["c"]


def test_a_task_without_a_site_waits_for_its_session_too(driver: Driver) -> None:
    assert driver.submit("a", "b", target="", session="acme") == ["a"]
    assert driver.fail("a") == ["b"]


def test_the_death_of_a_worker_frees_the_session(driver: Driver) -> None:
    driver.submit("a", "b", session="acme")
    worker, lease = driver.leases["a"]
    again = driver.note(driver.m.tell(events.WorkerExited(worker, -9, lease)))
    assert again == ["a"]  # before those that came later
    assert driver.succeed("a") == ["b"]


def test_people_read_what_a_task_waits_for(driver: Driver) -> None:
    driver.submit("a", "b", session="acme")
    waiting = live_view(driver.m.fleet.tasks["b"], driver.m.now_ns)
    assert waiting.waits_for == "bulkhead session acme 1/1"


@pytest.mark.parametrize("size", [1, 2])  # with two, a worker is free whenever the session is
@pytest.mark.parametrize(("first", "second"), [("p", "q"), ("q", "p")])
def test_pools_take_turns(muster: type[Muster], first: str, second: str, size: int) -> None:
    driver = make(muster, size, ("p", "q"))
    driver.submit("a1", "a2", "a3", pool=first, session="acme")
    driver.submit("b1", "b2", pool=second, session="acme")
    order = ["a1"]
    while (began := driver.succeed(order[-1])) != []:
        order += began
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_a_place_that_the_next_pool_cannot_use_goes_to_another(muster: type[Muster]) -> None:
    driver = make(muster, 1, ("p", "q"))
    driver.submit("p1", "p2", session="acme")
    assert driver.submit("busy", pool="q") == ["busy"]
    driver.submit("q1", pool="q", session="acme")
    assert driver.succeed("p1") == ["p2"]
    driver.succeed("busy")
    assert driver.succeed("p2") == ["q1"]


def test_urgent_tasks_of_a_session_do_not_starve_the_others(driver: Driver) -> None:
    driver.submit("first", session="acme", priority=HIGH)
    driver.submit("low", session="acme", priority=LOW)
    driver.wait(1)
    driver.submit(*(f"h{n}" for n in range(2 * AGING_TURN)), session="acme", priority=HIGH)
    order = ["first"]
    while order[-1] != "low":
        order += driver.succeed(order[-1])
    assert len(order) == AGING_TURN + 1  # the most urgent go first all the same


def test_a_reload_changes_the_places(driver: Driver) -> None:
    assert driver.submit("a", "b", session="acme") == ["a"]
    policy = structs.replace(driver.m.policy, sessions={"acme": SessionPolicy(2)})
    pools = tuple(structs.replace(pool, sessions=NAMES) for pool in policy.pools)
    changed = events.PolicyChanged(structs.replace(policy, pools=pools))
    assert driver.note(driver.m.tell(changed)) == ["b"]


@pytest.mark.parametrize(
    ("pool", "session", "why"),
    [
        (PoolPolicy("p", 1, sessions=NAMES), "other", "there is no session 'other' in [sessions]"),
        (PoolPolicy("p", 1, sessions=("wide",)), "acme", "session 'acme' is not for pool 'p'"),
    ],
)
def test_a_task_with_a_session_that_is_not_for_it_is_refused(
    driver: Driver, pool: PoolPolicy, session: str, why: str
) -> None:
    policy = structs.replace(driver.m.policy, pools=(pool,), sessions=SESSIONS)
    driver.m.tell(events.PolicyChanged(policy))
    assert driver.submit("a", session=session) == []
    assert why in driver.rejected["a"]


def test_only_the_task_that_uses_a_session_reads_and_writes_it(driver: Driver) -> None:
    driver.submit("user", session="acme")
    driver.submit("other", session="wide")
    for name, allowed in (("user", True), ("other", False)):
        worker, lease = driver.leases[name]
        wanted = driver.m.tell(events.StateWanted(worker, 1, "session:acme", lease))
        given = driver.m.tell(events.StateGiven(worker, 2, "session:acme", b"x", 0, lease))
        refused = [each for each in driver.of(actions.AnswerState, [*wanted, *given]) if each.error]
        assert bool(driver.of(actions.FindState, wanted)) is allowed
        assert len(refused) == (0 if allowed else 2)


def test_a_handler_that_waits_for_a_task_of_its_own_session_is_told(driver: Driver) -> None:
    driver.submit("parent", session="acme")
    driver.submit("child", session="acme")
    worker, lease = driver.leases["parent"]
    driver.m.tell(events.WaitBegun(worker, lease, 7, ["child"]))
    told: list[Any] = []
    for _ in range(3):
        told += driver.of(actions.AnswerWait, driver.m.wait(LOOK_NS))
    assert [each.request for each in told] == [7]
    assert "session acme is used by a task that waits so" in told[0].reason
