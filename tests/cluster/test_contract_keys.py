"""The contract of engines: keys, remembered results, what people see."""

import psycopg
import pytest
from postgres import Cluster
from rig import SICK, Rig, end, pool

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    CANCELLED,
    CRITICAL,
    EXPIRED,
    FAILED,
    HIGH,
    INVALID_TASK,
    LOW,
    NORMAL,
    QUEUE_FULL,
    SUCCEEDED,
)
from musterd.supervisor.cluster.engine import (
    JOINED_MAX,
    ClusterPolicy,
    Count,
    TaskFilter,
)
from musterd.supervisor.cluster.migrate import locks
from musterd.supervisor.core.model.policy import CachePolicy, TargetPolicy

HOUR = 3600 * SECOND_NS

# -- keys ---------------------------------------------------------------------------------------


def test_of_tasks_with_one_key_one_runs_and_all_get_its_result(rig: Rig) -> None:
    a = rig.join()
    verdicts = rig.engine.submit(rig.tasks(3, key="k"), waiter=4)
    assert [each.state for each in verdicts] == ["accepted", "joined", "joined"]
    [later] = rig.submit(rig.task(key="k"), waiter=4)
    [grant] = rig.claim(a, 5)
    told = rig.finish(a, grant, value=b"\x09")
    ids = [*(each.id for each in verdicts), later]
    assert sorted(each.id for each in told) == ids
    outcomes = [rig.ended(id_) for id_ in ids]
    assert {(each.state, each.value) for each in outcomes} == {(SUCCEEDED, b"\x09")}
    assert [each.cached for each in outcomes] == [False, True, True, True]
    assert sorted(rig.engine.ended(4).ids) == ids


def test_a_failure_is_shared_too(rig: Rig) -> None:
    a = rig.join()
    ids = rig.submit(*rig.tasks(2, key="k"))
    rig.finish(a, rig.claim_one(a), kind="failed")
    assert [rig.ended(id_).state for id_ in ids] == [FAILED, FAILED]
    assert rig.ended(ids[1]).failure == SICK


def test_after_the_end_a_key_is_free(rig: Rig) -> None:
    a = rig.join()
    for _ in range(2):
        rig.submit(rig.task(key="k"))
        rig.finish(a, rig.claim_one(a))


def test_a_key_of_another_kind_of_task_is_refused(rig: Rig) -> None:
    rig.join()
    rig.submit(rig.task(key="k"))
    [verdict] = rig.engine.submit([rig.task("fetch", key="k")])
    assert verdict.rejection is not None
    assert verdict.rejection.code == INVALID_TASK


def test_a_key_has_room_for_so_many(rig: Rig) -> None:
    rig.join()
    rig.submit(rig.task(key="k"))
    for _ in range(JOINED_MAX // 100):
        rig.submit(*rig.tasks(100, key="k"))
    [verdict] = rig.engine.submit([rig.task(key="k")])
    assert verdict.rejection is not None
    assert verdict.rejection.code == QUEUE_FULL


def test_a_cancelled_leader_is_followed_by_the_next(rig: Rig) -> None:
    a = rig.join()
    first, second, third = rig.submit(*rig.tasks(3, key="k"))
    rig.engine.cancel([first])
    assert rig.ended(first).state == CANCELLED
    grant = rig.claim_one(a)
    assert grant.id == second
    rig.finish(a, grant)
    assert rig.ended(third).state == SUCCEEDED


def test_a_cancelled_follower_ends_alone(rig: Rig) -> None:
    a = rig.join()
    first, second = rig.submit(*rig.tasks(2, key="k"))
    rig.engine.cancel([second])
    assert rig.ended(second).state == CANCELLED
    grant = rig.claim_one(a)
    assert grant.id == first
    assert [each.id for each in rig.finish(a, grant)] == [first]


def test_an_expired_leader_is_followed_by_the_next(rig: Rig) -> None:
    a = rig.join()
    first, second = rig.submit(rig.task(key="k", expires_ns=SECOND_NS), rig.task(key="k"))
    rig.pass_time(2)
    rig.engine.tick()
    assert rig.ended(first).state == EXPIRED
    assert rig.claim_one(a).id == second


def test_a_leader_is_as_urgent_as_who_waits_for_it(rig: Rig) -> None:
    a = rig.join()
    rig.submit(*rig.tasks(5, priority=NORMAL))
    [leader] = rig.submit(rig.task(key="k", priority=LOW))
    rig.submit(rig.task(key="k", priority=CRITICAL))
    assert rig.claim_one(a).id == leader


def test_a_retry_of_a_leader_keeps_its_followers(rig: Rig) -> None:
    a = rig.join()
    ids = rig.submit(*rig.tasks(2, key="k"))
    rig.finish(a, rig.claim_one(a), kind="failed", retry_ns=0)
    rig.engine.tick()
    rig.finish(a, rig.claim_one(a))
    assert [rig.ended(id_).state for id_ in ids] == [SUCCEEDED, SUCCEEDED]


# -- remembered results ---------------------------------------------------------------------------


def remember(rig: Rig, tenure: int, value: bytes = b"\x05", **how: object) -> None:
    rig.submit(rig.task(key="k"))
    rig.finish(tenure, rig.claim_one(tenure), **{"value": value, **how})


def test_a_young_result_answers_a_submit(rig: Rig) -> None:
    a = rig.join()
    remember(rig, a)
    rig.pass_time(5)
    [verdict] = rig.engine.submit([rig.task(key="k", cache_ns=10 * SECOND_NS)], waiter=6)
    assert verdict.state == "answered"
    assert verdict.outcome is not None
    assert (verdict.outcome.id, verdict.outcome.value) == (verdict.id, b"\x05")
    assert verdict.outcome.cached
    assert rig.ended(verdict.id).value == b"\x05"
    assert rig.engine.ended(6).ids == (verdict.id,)
    rig.pass_time(6)
    rig.submit(rig.task(key="k", cache_ns=10 * SECOND_NS))


def test_a_result_is_only_for_those_who_ask_and_have_its_key_and_name(rig: Rig) -> None:
    a = rig.join()
    remember(rig, a)
    rig.submit(
        rig.task(key="other", cache_ns=10 * SECOND_NS),
        rig.task("fetch", key="k", cache_ns=10 * SECOND_NS),
    )
    rig.drained(a)
    rig.submit(rig.task(key="k"))


@pytest.mark.parametrize(
    ("first", "second", "states"),
    [
        ({"key": "new"}, {"key": "other"}, ["accepted", "known"]),
        ({"key": "old", "cache_ns": HOUR}, {"key": "new"}, ["answered", "known"]),
        ({"key": "old", "cache_ns": HOUR}, {}, ["answered", "known"]),
        ({"key": "new"}, {"args": b"\x90"}, ["accepted", "rejected"]),
        ({"key": "old", "name": "p.fetch"}, {"key": "old"}, ["accepted", "rejected"]),
        ({"priority": 9}, {}, ["rejected", "accepted"]),
    ],
)
def test_one_submit_may_have_an_id_twice_with_different_keys(
    rig: Rig, first: dict[str, object], second: dict[str, object], states: list[str]
) -> None:
    a = rig.join()
    rig.submit(rig.task(key="old"))
    rig.drained(a)
    tasks = [rig.task(id="twice", **each) for each in (first, second)]
    verdicts = rig.engine.submit(tasks)
    assert [each.state for each in verdicts] == states
    assert (verdicts[1].outcome is not None) == (states[0] == "answered")
    rig.drained(a)
    assert rig.ended("twice").state == SUCCEEDED
    assert [view.id for view in rig.engine.find(TaskFilter())].count("twice") == 1
    later = [rig.task(key=key) for key in ("new", "other", "old")]
    rig.submit(*later)
    assert set(rig.drained(a)) == {each.id for each in later}


def test_of_an_id_that_is_refused_twice_both_are_told(rig: Rig) -> None:
    rig.join("a", pool(queue_size=0))
    verdicts = rig.engine.submit([rig.task(id="twice"), rig.task(id="twice")])
    assert [each.rejection.code for each in verdicts if each.rejection] == [QUEUE_FULL] * 2


def test_a_failure_is_no_cached_result(rig: Rig) -> None:
    a = rig.join()
    remember(rig, a, b"\x05")
    remember(rig, a, b"", kind="failed")
    [verdict] = rig.engine.submit([rig.task(key="k", cache_ns=100 * SECOND_NS)])
    assert verdict.outcome is not None
    assert verdict.outcome.value == b"\x05"


def test_debounce_answers_with_the_last_end_of_a_recent_submit(rig: Rig) -> None:
    a = rig.join()
    remember(rig, a, b"", kind="failed")
    [verdict] = rig.engine.submit([rig.task(key="k", debounce_ns=10 * SECOND_NS)])
    assert verdict.outcome is not None
    assert (verdict.outcome.state, verdict.outcome.failure) == (FAILED, SICK)
    rig.pass_time(11)
    rig.submit(rig.task(key="k", debounce_ns=10 * SECOND_NS))


def test_a_cache_may_be_switched_off(rig: Rig) -> None:
    rig.apply(ClusterPolicy(cache=CachePolicy(enabled=False)))
    a = rig.join()
    remember(rig, a)
    rig.submit(rig.task(key="k", cache_ns=100 * SECOND_NS))


def test_a_key_is_invalidated(rig: Rig) -> None:
    a = rig.join()
    remember(rig, a)
    rig.engine.invalidate("k")
    rig.submit(rig.task(key="k", cache_ns=100 * SECOND_NS))
    grant = rig.claim_one(a)
    rig.engine.invalidate("", prefix=True)  # while it runs: what it returns is not remembered
    rig.finish(a, grant)
    rig.submit(rig.task(key="k", cache_ns=100 * SECOND_NS))


def test_a_retry_by_hand_takes_no_remembered_result(rig: Rig) -> None:
    a = rig.join()
    spec = rig.task(key="k", cache_ns=100 * SECOND_NS, debounce_ns=100 * SECOND_NS)
    rig.submit(spec)
    rig.finish(a, rig.claim_one(a), kind="failed")
    assert rig.engine.retry([spec.id]) == []
    assert rig.claim_one(a).id == spec.id


def test_memory_has_so_many_keys(rig: Rig) -> None:
    rig.apply(ClusterPolicy(cache=CachePolicy(entries=3)))
    a = rig.join()
    for number in range(5):
        rig.submit(rig.task(key=f"k{number}"))
        rig.finish(a, rig.claim_one(a))
        rig.pass_time(1)
    rig.engine.tick()
    asked = [rig.task(key=f"k{number}", cache_ns=100 * SECOND_NS) for number in range(5)]
    states = [each.state for each in rig.engine.submit(asked)]
    assert states == ["accepted"] * 2 + ["answered"] * 3


# -- what people see ------------------------------------------------------------------------------


def test_memory_has_so_many_last_good_results(rig: Rig) -> None:
    rig.apply(ClusterPolicy(cache=CachePolicy(entries=2)))
    a = rig.join()
    args = [bytes([number]) for number in range(3)]
    for each in args:
        rig.submit(rig.task(args=each, fallback_on="failure"))
        rig.finish(a, rig.claim_one(a), keeps=True)
        rig.pass_time(1)
    rig.engine.tick()
    states = []
    for each in args:
        [id_] = rig.submit(rig.task(args=each, fallback_on="failure"))
        rig.finish(a, rig.claim_one(a), kind="failed")
        states.append(rig.ended(id_).state)
    assert states == [FAILED, SUCCEEDED, SUCCEEDED]


def test_tasks_are_counted_by_pool_level_and_state(rig: Rig) -> None:
    a = rig.join()
    rig.submit(*rig.tasks(3), *rig.tasks(2, priority=HIGH), rig.task(delay_ns=SECOND_NS))
    rig.claim(a, 1)
    assert rig.engine.counts() == [
        Count("p", HIGH, "queued", 1),
        Count("p", HIGH, "running", 1),
        Count("p", NORMAL, "queued", 3),
        Count("p", NORMAL, "waiting", 1),
    ]
    seen = rig.engine.statistics()
    assert seen is not None
    assert seen.counts == tuple(rig.engine.counts())


def test_a_look_at_the_cluster_tells_nodes_and_what_would_begin(rig: Rig) -> None:
    rig.apply(ClusterPolicy(targets={"one": TargetPolicy(max_concurrent=1)}))
    a = rig.join("a", lease=5)
    rig.join("b", pool(), pool("q"), lease=60)
    rig.submit(*rig.tasks(3, target="one"))
    assert len(rig.claim(a, 5)) == 1  # the site is full, and somebody has found out
    rig.submit(*rig.tasks(3), rig.task(delay_ns=SECOND_NS * 60))
    rig.pass_time(6)
    seen = rig.engine.statistics()
    assert seen is not None
    assert seen.age_ns == 0
    [backlog] = seen.backlogs
    assert (backlog.pool, backlog.level, backlog.ready) == ("p", NORMAL, 3)
    assert 6 <= backlog.waited_ns / SECOND_NS < 600
    nodes = [(each.name, each.alive, each.claims, each.pools) for each in seen.nodes]
    assert nodes == [("a", False, 1, ("p",)), ("b", True, 0, ("p", "q"))]
    rig.engine.drain("b", draining=True)
    assert rig.engine.reap()
    seen = rig.engine.statistics()
    assert seen is not None
    assert [(each.tenure != 0, each.draining) for each in seen.nodes] == [
        (False, False),
        (True, True),
    ]


def test_one_look_does_for_all_nodes_for_a_while(cluster: Cluster) -> None:
    rig = cluster.rig()
    rig.join()
    assert rig.engine.statistics(60 * SECOND_NS) is not None
    rig.submit(rig.task())
    kept = cluster.engine().statistics(60 * SECOND_NS)
    assert kept is not None
    assert not kept.counts
    rig.pass_time(61)
    with psycopg.connect(cluster.url) as other:  # it is looking
        lock = locks(cluster.schema) + 4
        other.execute("SELECT pg_advisory_xact_lock(%s, 0)", (lock,))
        kept = rig.engine.statistics(60 * SECOND_NS)
        assert kept is not None
        assert not kept.counts
        assert kept.age_ns >= 61 * SECOND_NS
    fresh = rig.engine.statistics(60 * SECOND_NS)
    assert fresh is not None
    assert fresh.counts
    assert fresh.age_ns == 0


def test_tasks_are_found_by_what_they_are(rig: Rig) -> None:
    a = rig.join()
    failed, good, queued, keyed = rig.submit(
        rig.task(target="s"), rig.task(), rig.task(), rig.task(key="k", delay_ns=SECOND_NS)
    )
    first, second = rig.claim(a, 2)
    ends = {each.id: each for each in (first, second)}
    rig.engine.finish(a, [end(ends[failed], "failed"), end(ends[good])])

    def found(**which: object) -> set[str]:
        return {each.id for each in rig.engine.find(TaskFilter(**which))}  # type: ignore[arg-type]

    assert found() == {failed, good, queued, keyed}
    assert found(state="failed") == {failed}
    assert found(state="queued") == {queued}
    assert found(state="waiting") == {keyed}
    assert found(target="s") == {failed}
    assert found(key="k") == {keyed}
    assert found(error="no price") == {failed}
    assert found(pool="q") == set()
    assert len(rig.engine.find(TaskFilter(limit=2))) == 2
    assert all(each.args == b"" for each in rig.engine.find(TaskFilter()))


def test_a_view_tells_what_the_task_is(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task(priority=HIGH, target="s", args=b"\x81\xa1x\x01"))
    view = rig.view(id_)
    assert (view.name, view.state, view.priority) == ("p.extract", "queued", "high")
    assert (view.target, view.args, view.attempt) == ("s", b"\x81\xa1x\x01", 0)
    assert view.submitted_at > 0
    rig.finish(a, rig.claim_one(a), value=b"\x03", run_ns=2 * SECOND_NS)
    view = rig.view(id_)
    assert (view.state, view.value, view.run_seconds) == ("succeeded", b"\x03", 2.0)
    assert view.finished_at >= view.submitted_at


def test_ended_tasks_are_purged(rig: Rig) -> None:
    a = rig.join()
    bad, good, alive = rig.submit(*rig.tasks(3))
    first, second = rig.claim(a, 2)
    rig.finish(a, first, kind="failed")
    rig.finish(a, second)
    assert rig.engine.purge(TaskFilter(state="failed")) == 1
    assert rig.engine.view(bad) is None
    assert rig.ended(good).state == SUCCEEDED
    assert rig.engine.purge(TaskFilter()) == 1
    assert rig.view(alive).state == "queued"


def test_runs_of_a_schedule_are_found(rig: Rig) -> None:
    rig.join()
    rig.submit(rig.task(id="@kites.1"), rig.task(id="@other.1"))
    found = rig.engine.find(TaskFilter(schedule="kites"))
    assert [each.id for each in found] == ["@kites.1"]
