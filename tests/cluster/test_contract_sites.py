"""The contract of engines: sites, classes, breakers, retry budgets, policy."""

from random import Random
from typing import Any

import pytest
from rig import SICK, UNWELL, Rig, pool, want

from musterd.ipc.resilience.breaker import Breaker
from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.ipc.wire.messages import CRITICAL, FAILED, SUCCEEDED, Failure
from musterd.supervisor.cluster.engine import (
    DEAD,
    ClusterPolicy,
    PolicyChanged,
    SiteView,
    TaskFilter,
)
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy

STEADY = BreakerPolicy(failures=3, open_ns=60 * SECOND_NS, open_jitter=0.0, successes=2)


def policy(site: str = "s", **limits: object) -> ClusterPolicy:
    return ClusterPolicy(
        breaker=STEADY,
        targets={site: TargetPolicy(**limits)},  # type: ignore[arg-type]
    )


def fail(rig: Rig, tenure: int, number: int = 1, failure: Failure = UNWELL) -> None:
    for _ in range(number):
        rig.submit(rig.task(target="s"))
        rig.finish(tenure, rig.claim_one(tenure), kind="failed", failure=failure)


def site(rig: Rig, target: str = "s") -> SiteView:
    [found] = [each for each in rig.engine.sites() if each.target == target]
    return found


# -- places -------------------------------------------------------------------------------------


def test_a_site_has_so_many_places_over_all_nodes(rig: Rig) -> None:
    rig.apply(policy(max_concurrent=3))
    a, b = rig.join("a"), rig.join("b")
    rig.submit(*rig.tasks(10, target="s"), *rig.tasks(2, target="free"))
    first = rig.claim(a, 3)
    second = rig.claim(b, 8)
    sites = [each.spec.target for each in [*first, *second]]
    assert (sites.count("s"), sites.count("free")) == (3, 2)
    assert rig.claim(a, 5) == []
    held = next(each for each in first if each.spec.target == "s")
    rig.finish(a, held)
    assert [each.spec.target for each in rig.claim(b, 5)] == ["s"]


def test_places_are_one_over_all_pools_and_levels(rig: Rig) -> None:
    rig.apply(policy(max_concurrent=2))
    a = rig.join("a", pool("p"), pool("q"))
    rig.submit(*rig.tasks(3, target="s"), *rig.tasks(3, target="s", priority=CRITICAL))
    rig.submit(*rig.tasks(3, target="s", pool="q"))
    grants = rig.engine.claim(a, [want(5, "p"), want(5, "q")])
    assert len(grants) == 2
    rig.finish(a, *grants)
    again = rig.engine.claim(a, [want(1, "q"), want(5, "p")])
    assert [each.spec.name.partition(".")[0] for each in again] == ["q", "p"]


@pytest.mark.parametrize("kind", ["succeeded", "failed", "untouched", "interrupted", "crashed"])
def test_every_end_gives_the_place_back(rig: Rig, kind: str) -> None:
    rig.apply(policy(max_concurrent=1))
    a = rig.join()
    rig.submit(*rig.tasks(2, target="s"))
    grant = rig.claim_one(a)
    assert rig.claim(a) == []
    rig.finish(a, grant, kind=kind)
    assert len(rig.claim(a, 5)) == 1


def test_a_lost_node_gives_its_places_back(rig: Rig) -> None:
    rig.apply(policy(max_concurrent=1))
    a, b = rig.join("a", lease=10), rig.join("b", lease=100)
    rig.submit(*rig.tasks(2, target="s"))
    rig.claim_one(a)
    assert rig.claim(b) == []
    rig.pass_time(11)
    rig.engine.reap()
    assert len(rig.claim(b, 5)) == 1


def test_limits_for_all_sites_hold_for_each(rig: Rig) -> None:
    rig.apply(ClusterPolicy(target=TargetPolicy(max_concurrent=1)))
    a = rig.join()
    rig.submit(*rig.tasks(3, target="x"), *rig.tasks(3, target="y"), *rig.tasks(3))
    targets = sorted(each.spec.target for each in rig.claim(a, 9))
    assert targets == ["", "", "", "x", "y"]


def test_a_limit_that_comes_later_counts_what_runs_already(rig: Rig) -> None:
    a = rig.join()
    rig.submit(*rig.tasks(5, target="s"))
    running = rig.claim(a, 2)
    rig.apply(policy(max_concurrent=2))
    assert rig.claim(a, 5) == []
    rig.finish(a, running[0])
    assert len(rig.claim(a, 5)) == 1
    rig.apply(ClusterPolicy())
    assert len(rig.claim(a, 5)) == 2


def test_a_class_has_so_many_places_over_all_sites(rig: Rig) -> None:
    rig.apply(
        ClusterPolicy(
            classes={"gold": GatePolicy("gold", max_concurrent=2)},
            targets={"y": TargetPolicy(policy="gold")},
        )
    )
    a, b = rig.join("a"), rig.join("b")
    rig.submit(*rig.tasks(2, target="x", policy="gold"), *rig.tasks(2, policy="gold"))
    rig.submit(*rig.tasks(2, target="y"))
    grants = rig.claim(a, 5)
    assert {each.policy for each in grants} == {"gold"}
    assert len(grants) == 2
    assert rig.claim(b, 5) == []
    rig.finish(a, grants[0])
    assert len(rig.claim(b, 5)) == 1
    rig.finish(a, grants[1])
    assert len(rig.claim(b, 5)) == 1


# -- rates --------------------------------------------------------------------------------------


def test_a_rate_holds_over_all_nodes(rig: Rig) -> None:
    rig.apply(policy(rate=0.1, burst=3))
    a, b = rig.join("a", lease=600), rig.join("b", lease=600)
    rig.submit(*rig.tasks(20, target="s"))
    assert len(rig.claim(a, 2) + rig.claim(b, 5)) == 3
    assert rig.claim(a, 5) == []
    rig.pass_time(10.5)
    assert len(rig.claim(b, 5)) == 1
    rig.pass_time(1000)
    assert len(rig.claim(a, 5)) == 3


def test_a_site_at_its_rate_holds_up_nobody_else(rig: Rig) -> None:
    rig.apply(policy(rate=0.01, burst=1))
    a = rig.join()
    rig.submit(*rig.tasks(20, target="s"), *rig.tasks(5, target="other"))
    assert len(rig.claim(a, 20)) == 6


# -- breakers -----------------------------------------------------------------------------------


def test_a_breaker_opens_after_failures_that_mean_the_site(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    fail(rig, a, 5, SICK)
    assert rig.engine.sites() == []
    fail(rig, a, 2)
    assert site(rig).failures == 2
    rig.submit(rig.task(target="s"))
    rig.finish(a, rig.claim_one(a))  # a success begins the count anew
    fail(rig, a, 3)
    assert site(rig).breaker == "open"
    assert 50 * SECOND_NS < site(rig).open_for_ns <= 60 * SECOND_NS
    rig.submit(rig.task(target="s"))
    assert rig.claim(a) == []


def test_a_breaker_closes_after_successful_probes(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    fail(rig, a, 3)
    rig.submit(*rig.tasks(5, target="s"))
    rig.pass_time(61)
    first = rig.claim(a, 5)
    assert [each.probe for each in first] == [True]
    assert site(rig).breaker == "half-open"
    assert rig.claim(a, 5) == []
    rig.finish(a, first[0])
    second = rig.claim_one(a)
    assert second.probe
    rig.finish(a, second)
    assert rig.engine.sites() == []
    grants = rig.claim(a, 5)
    assert [each.probe for each in grants] == [False] * 3


def test_a_failed_probe_opens_for_longer(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=6000)
    fail(rig, a, 3)
    rig.pass_time(61)
    fail(rig, a)
    assert site(rig).breaker == "open"
    assert 110 * SECOND_NS < site(rig).open_for_ns <= 120 * SECOND_NS


@pytest.mark.parametrize("kind", ["untouched", "interrupted", "crashed"])
def test_a_probe_that_says_nothing_makes_room_for_the_next(rig: Rig, kind: str) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    fail(rig, a, 3)
    rig.submit(*rig.tasks(2, target="s"))
    rig.pass_time(61)
    rig.finish(a, rig.claim_one(a), kind=kind)
    assert rig.claim_one(a).probe


def test_a_probe_of_a_lost_node_makes_room_for_the_next(rig: Rig) -> None:
    rig.apply(policy())
    a, b = rig.join("a", lease=600), rig.join("b", lease=6000)
    fail(rig, a, 3)
    rig.submit(*rig.tasks(2, target="s"))
    rig.pass_time(61)
    rig.claim_one(a)
    assert rig.claim(b) == []
    rig.pass_time(601)
    rig.engine.reap()
    assert rig.claim_one(b).probe


def test_a_late_failure_does_not_extend_an_open_breaker(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    rig.submit(*rig.tasks(4, target="s"))
    grants = rig.claim(a, 4)
    rig.finish(a, *grants[:3], kind="failed", failure=UNWELL)
    rig.pass_time(30)
    rig.finish(a, grants[3], kind="failed", failure=UNWELL)
    assert site(rig).open_for_ns <= 31 * SECOND_NS


def test_the_retries_of_one_task_count_once(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    rig.submit(rig.task(target="s"))
    for _ in range(5):
        rig.finish(a, rig.claim_one(a), kind="failed", failure=UNWELL, retry_ns=0)
        rig.engine.tick()
    assert site(rig).breaker == "closed"
    assert site(rig).failures == 1


def test_a_site_that_says_when_to_come_back_is_left_alone_until_then(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    fail(rig, a, 2)
    fail(rig, a, 1, Failure("error", unwell=True, retry_after_ns=500 * SECOND_NS))
    assert site(rig).open_for_ns > 400 * SECOND_NS


def test_a_window_opens_by_its_rate_of_failures_and_of_slow_calls(rig: Rig) -> None:
    by_rate = BreakerPolicy(
        failures=0,
        window=10,
        window_calls_min=4,
        failure_rate=0.5,
        slow_ns=SECOND_NS,
        slow_rate=0.75,
        open_jitter=0.0,
    )
    rig.apply(
        ClusterPolicy(
            targets={"s": TargetPolicy(breaker=by_rate), "t": TargetPolicy(breaker=by_rate)}
        )
    )
    a = rig.join(lease=600)
    for target, ends in (("s", "wfwf"), ("t", "wlll")):
        for letter in ends:
            assert rig.engine.submit([rig.task(target=target)])
            grant = rig.claim_one(a)
            if letter == "f":
                rig.finish(a, grant, kind="failed", failure=UNWELL)
            else:
                rig.finish(a, grant, run_ns=2 * SECOND_NS if letter == "l" else 1)
    assert [each.breaker for each in rig.engine.sites()] == ["open", "open"]


def test_breakers_obey_people(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    rig.submit(*rig.tasks(4, target="s"))
    rig.engine.breaker("s", "open")
    assert site(rig).breaker == "forced-open"
    assert rig.claim(a) == []
    rig.pass_time(100)
    assert rig.claim(a) == []
    rig.engine.breaker("s", "close")
    assert rig.engine.sites() == []
    rig.finish(a, rig.claim_one(a))
    rig.engine.breaker("s", "disable")
    fail(rig, a, 5)
    assert site(rig).breaker == "disabled"
    rig.engine.breaker("s", "reset")
    assert rig.engine.sites() == []


@pytest.mark.parametrize("seed", range(12))
def test_a_breaker_is_the_breaker_of_one_machine(rig: Rig, seed: int) -> None:
    """The same verdicts, one after the other, lead to the same states."""
    rng = Random(seed)
    rules = BreakerPolicy(
        failures=rng.choice((0, 2, 3)),
        open_ns=10 * SECOND_NS,
        open_jitter=0.0,
        successes=rng.choice((1, 2)),
        probes=rng.choice((1, 2)),
        window=rng.choice((0, 4)),
        window_calls_min=3,
        failure_rate=0.6,
    )
    rig.apply(ClusterPolicy(targets={"s": TargetPolicy(breaker=rules)}))
    a = rig.join(lease=100_000)
    breaker, now_ns = Breaker(rules), 0
    for _ in range(40):
        [id_] = rig.submit(rig.task(target="s"))
        admitted = breaker.admits(now_ns)
        grants = rig.claim(a)
        assert len(grants) == admitted
        if not grants:
            rig.engine.cancel([id_])
            rig.pass_time(5)
            now_ns += 5 * SECOND_NS
            continue
        ok, probe = rng.random() < 0.5, breaker.begin()
        assert grants[0].probe == probe
        breaker.record(now_ns, rng, ok=ok, probe=probe)
        rig.finish(
            a, grants[0], kind="succeeded" if ok else "failed", failure=None if ok else UNWELL
        )
        shown = {each.target: each for each in rig.engine.sites()}.get("s")
        assert (shown.breaker if shown else "closed") == breaker.state
        assert (shown.failures if shown else 0) == breaker.failures


# -- what a task does at a shut site --------------------------------------------------------------


def test_tasks_that_do_not_wait_for_a_shut_site_end_at_once(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    [queued] = rig.submit(rig.task(target="s", on_open="fail", delay_ns=1))
    fail(rig, a, 3)
    rig.pass_time(1)
    rig.engine.tick()
    waits, fails, falls, none = rig.submit(
        rig.task(target="s"),
        rig.task(target="s", on_open="fail"),
        rig.task(target="s", on_open="fallback", fallback=b"\x07"),
        rig.task(target="s", on_open="fallback"),
    )
    assert rig.outcome(waits) is None
    for id_ in (queued, fails, none):
        outcome = rig.ended(id_)
        assert outcome.state == FAILED
        assert outcome.failure == Failure("open", "BreakerOpen", "the breaker of s is open")
    outcome = rig.ended(falls)
    assert (outcome.state, outcome.value, outcome.fallback) == (SUCCEEDED, b"\x07", True)


def test_queued_tasks_end_when_their_site_is_shut(rig: Rig) -> None:
    rig.apply(ClusterPolicy(breaker=STEADY, targets={"s": TargetPolicy(on_open="fail")}))
    a = rig.join(lease=600)
    ids = rig.submit(*rig.tasks(5, target="s"))
    for _ in range(3):
        rig.finish(a, rig.claim_one(a), kind="failed", failure=UNWELL)
    assert [rig.ended(id_).state for id_ in ids] == [FAILED] * 5


def test_a_task_that_a_shut_site_refused_is_no_dead_letter(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    [dead] = rig.submit(rig.task(target="s", max_retries=0))
    rig.finish(a, rig.claim_one(a), kind="failed", failure=UNWELL)
    rig.engine.breaker("s", "open")
    refused, falls = rig.submit(
        rig.task(target="s", on_open="fail"),
        rig.task(target="s", on_open="fallback", fallback=b"\x07"),
    )

    def found(**which: Any) -> set[str]:
        return {each.id for each in rig.engine.find(TaskFilter(**which))}

    assert found(state="failed") == {dead, refused}
    assert found(state=DEAD) == {dead}
    assert found(error="BreakerOpen: the breaker of s is open") == {refused}
    assert found(error="open") == {refused}, f"{falls} has no error"
    [recent] = rig.engine.recent(SECOND_NS)
    assert (recent.failed, recent.dead) == (2, 1)
    assert rig.engine.purge(TaskFilter(state="failed")) == 2


def test_the_last_good_result_is_the_first_fallback(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    options = {"target": "s", "on_open": "fallback", "fallback": b"\x07"}
    rig.submit(rig.task(**options))
    rig.finish(a, rig.claim_one(a), value=b"\x63", keeps=True)
    rig.engine.breaker("s", "open")
    same, other = rig.submit(rig.task(**options), rig.task(**options, args=b"\x81\xa1x\x01"))
    assert (rig.ended(same).value, rig.ended(same).stale) == (b"\x63", True)
    assert (rig.ended(other).value, rig.ended(other).fallback) == (b"\x07", True)


def test_a_task_that_failed_for_good_falls_back(rig: Rig) -> None:
    a = rig.join()
    ids = rig.submit(
        rig.task(fallback=b"\x07", fallback_on="failure"),
        rig.task(fallback=b"\x07"),
        rig.task(fallback=b"\x07", fallback_on="failure"),
    )
    first, second, third = rig.claim(a, 3)
    rig.finish(a, first, second, kind="failed")
    invalid = Failure("invalid", "ValueError", "no such argument")
    rig.finish(a, third, kind="failed", failure=invalid)
    outcome = rig.ended(ids[0])
    assert (outcome.state, outcome.value, outcome.failure) == (SUCCEEDED, b"\x07", SICK)
    assert [rig.ended(id_).state for id_ in ids[1:]] == [FAILED, FAILED]


# -- retry budgets --------------------------------------------------------------------------------


def test_retries_beyond_the_budget_wait_until_it_has_earned_them(rig: Rig) -> None:
    limits = {"retry_share": 0.5, "retry_reserve": 1.0, "retry_every_ns": 1000 * SECOND_NS}
    rig.apply(policy(**limits))
    a = rig.join(lease=6000)
    first, second = rig.submit(*rig.tasks(2, target="s"))
    for grant in rig.claim(a, 2):
        rig.finish(a, grant, kind="failed", retry_ns=0, patience_ns=600 * SECOND_NS)
    rig.engine.tick()
    assert [each.id for each in rig.claim(a, 5)] == [first]
    for _ in range(2):  # each first attempt earns half a retry
        rig.submit(rig.task(target="s"))
        rig.finish(a, rig.claim_one(a))
    rig.engine.tick()
    assert [each.id for each in rig.claim(a, 5)] == [second]


def test_time_earns_a_retry(rig: Rig) -> None:
    limits = {"retry_share": 0.1, "retry_reserve": 1.0, "retry_every_ns": 100 * SECOND_NS}
    rig.apply(policy(**limits))
    a = rig.join(lease=6000)
    rig.submit(*rig.tasks(2, target="s"))
    for grant in rig.claim(a, 2):
        rig.finish(a, grant, kind="failed", retry_ns=0, patience_ns=600 * SECOND_NS)
    rig.engine.tick()
    assert len(rig.claim(a, 5)) == 1
    rig.pass_time(90)
    rig.engine.tick()
    assert rig.claim(a, 5) == []
    rig.pass_time(15)
    rig.engine.tick()
    assert len(rig.claim(a, 5)) == 1


def test_a_retry_that_is_never_paid_for_is_given_up(rig: Rig) -> None:
    rig.apply(policy(retry_share=0.0, retry_reserve=0.0))
    a = rig.join(lease=6000)
    [id_] = rig.submit(rig.task(target="s"))
    how = {"retry_ns": 0, "patience_ns": 100 * SECOND_NS}
    rig.finish(a, rig.claim_one(a), kind="failed", **how)
    rig.engine.tick()
    assert rig.view(id_).state == "waiting"
    rig.pass_time(101)
    assert rig.engine.tick().given_up == 1
    failure = rig.ended(id_).failure
    assert failure is not None
    assert "no price" in failure.message
    assert "retry budget of s" in failure.message


def test_a_site_without_a_budget_retries_for_ever(rig: Rig) -> None:
    rig.apply(policy(retry_share=None, retry_reserve=0.0))
    a = rig.join()
    rig.submit(rig.task(target="s"))
    for _ in range(20):
        rig.finish(a, rig.claim_one(a), kind="failed", retry_ns=0)
        rig.engine.tick()


# -- policy -------------------------------------------------------------------------------------


def test_a_policy_is_versioned(rig: Rig) -> None:
    before = rig.engine.policy()
    assert before.version == 0
    wanted = policy(rate=2.5, burst=3)
    assert rig.engine.apply(wanted, 0) == 1
    assert (rig.engine.policy().version, rig.engine.policy().policy) == (1, wanted)
    with pytest.raises(PolicyChanged, match="1"):
        rig.engine.apply(ClusterPolicy(), 0)
    a = rig.join()
    assert rig.engine.beat(a).policy == 1


def test_an_open_breaker_survives_a_policy(rig: Rig) -> None:
    rig.apply(policy())
    a = rig.join(lease=600)
    fail(rig, a, 3)
    rig.apply(policy(max_concurrent=5))
    assert site(rig).breaker == "open"
