"""The contract of what people look at and steer: lists, figures, nodes that are lost."""

import pytest
from rig import UNWELL, Rig, end

from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.supervisor.cluster.engine import (
    FINISHED,
    RECENT_NS_MAX,
    SITES_SEEN_MAX,
    UNSUCCESSFUL,
    ClusterPolicy,
    Held,
    NodeView,
    Recent,
    TaskFilter,
)
from musterd.supervisor.core.model.policy import TargetPolicy


def node(rig: Rig, name: str = "a") -> NodeView:
    [found] = [each for each in rig.engine.nodes() if each.name == name]
    return found


# -- nodes ----------------------------------------------------------------------------------------


def test_an_ended_task_tells_which_node_ran_it_last(rig: Rig) -> None:
    a, b = rig.join("a", lease=10), rig.join("b", lease=1000)
    plain, keyed, failed, joined = rig.submit(
        rig.task(), rig.task(key="k"), rig.task(), rig.task(key="k")
    )
    for grant in rig.claim(a, 3):
        rig.finish(a, grant, kind="failed" if grant.id == failed else "succeeded")
    assert [rig.view(id_).worker for id_ in (plain, keyed, failed, joined)] == ["a", "a", "a", ""]
    [lost, waiting, queued] = rig.submit(
        rig.task(), rig.task(), rig.task(expires_ns=SECOND_NS, delay_ns=SECOND_NS // 2)
    )
    grants = rig.claim(a, 2)
    retry = next(grant for grant in grants if grant.id == waiting)
    rig.finish(a, retry, kind="failed", retry_ns=3600 * SECOND_NS)
    rig.engine.begun(a, [Held(each.id, each.claim) for each in grants])
    rig.pass_time(11)
    rig.engine.beat(b)
    rig.engine.tick()
    rig.engine.reap()
    assert [each.worker for each in rig.view(lost).attempts] == ["a"], "which node was lost"
    rig.engine.cancel([lost, waiting])
    assert [rig.view(id_).worker for id_ in (lost, waiting, queued)] == ["a", "a", ""]
    assert {each.worker for each in rig.engine.find(TaskFilter(state="failed"))} == {"a"}


def test_a_node_that_was_reaped_is_lost_until_it_comes_back(rig: Rig) -> None:
    rig.join("a", lease=30)
    rig.pass_time(31)
    assert not node(rig).alive
    assert not node(rig).lost  # silent, so far
    rig.join("b")
    assert [each.name for each in rig.engine.reap()] == ["a"]
    assert node(rig).lost
    rig.join("a")
    assert not node(rig).lost


def test_a_node_that_has_left_is_not_lost(rig: Rig) -> None:
    rig.engine.leave(rig.join())
    rig.pass_time(60)
    rig.engine.reap()
    assert not node(rig).lost


def test_a_live_node_is_forgotten_only_by_force(rig: Rig) -> None:
    a = rig.join()
    [id_] = rig.submit(rig.task())
    rig.claim_one(a)
    assert not rig.engine.forget("a", force=False)
    assert node(rig).alive
    assert rig.engine.forget("a", force=True)
    assert rig.engine.nodes() == []
    assert rig.view(id_).state == "queued"


def test_what_is_dead_of_a_name_is_forgotten_and_the_live_one_stays(rig: Rig) -> None:
    rig.join("a", identity="old", lease=30)
    rig.pass_time(31)
    rig.engine.reap()
    rig.join("a", identity="new")
    assert rig.engine.forget("a", force=False)
    assert [each.identity for each in rig.engine.nodes()] == ["new"]
    assert not rig.engine.forget("a", force=False)


# -- tasks ----------------------------------------------------------------------------------------


def test_the_newest_tasks_come_first_and_live_ones_before_the_others(rig: Rig) -> None:
    a = rig.join()
    ids = rig.submit(*rig.tasks(5))
    for _ in range(2):
        rig.finish(a, rig.claim_one(a))
        rig.pass_time(1)
    expected = [ids[4], ids[3], ids[2], ids[1], ids[0]]
    assert [each.id for each in rig.engine.find(TaskFilter())] == expected
    assert [each.id for each in rig.engine.find(TaskFilter(limit=4))] == expected[:4]


@pytest.mark.parametrize("hours", [0.001, 0.5, 5, 50])
def test_ended_tasks_are_found_however_old_they_are(rig: Rig, hours: float) -> None:
    a = rig.join(lease=3600 * 100)
    old = rig.submit(*rig.tasks(3))
    for grant in rig.claim(a, 3):
        rig.finish(a, grant, kind="failed")
        rig.pass_time(0.01)
    rig.pass_time(3600 * hours)
    new = rig.submit(rig.task())
    rig.finish(a, rig.claim_one(a), kind="failed")
    for state in ("failed", FINISHED, UNSUCCESSFUL, ""):
        found = [each.id for each in rig.engine.find(TaskFilter(state=state))]
        assert found == [*new, *reversed(old)], state
        found = [each.id for each in rig.engine.find(TaskFilter(state=state, limit=2))]
        assert found == [*new, old[-1]], state


def test_groups_of_states_are_found(rig: Rig) -> None:
    a = rig.join()
    bad, good, gone, _queued = rig.submit(*rig.tasks(4))
    first, second = rig.claim(a, 2)
    rig.finish(a, first, kind="failed")
    rig.finish(a, second)
    rig.engine.cancel([gone])

    def found(state: str) -> set[str]:
        return {each.id for each in rig.engine.find(TaskFilter(state=state))}

    assert found(FINISHED) == {bad, good, gone}
    assert found(UNSUCCESSFUL) == {bad, gone}


def test_what_is_looked_for_is_text_and_nothing_else(rig: Rig) -> None:
    rig.join()
    rig.submit(rig.task(target="o'neill"))
    assert len(rig.engine.find(TaskFilter(target="o'neill"))) == 1
    assert rig.engine.find(TaskFilter(target="' OR true --")) == []
    assert rig.engine.find(TaskFilter(error="%s'\\")) == []


def test_named_and_old_tasks_are_purged(rig: Rig) -> None:
    a = rig.join(lease=3600)
    ids = rig.submit(*rig.tasks(4))
    for grant in rig.claim(a, 2):
        rig.finish(a, grant, kind="failed")
    rig.pass_time(600)
    for grant in rig.claim(a, 2):
        rig.finish(a, grant, kind="failed")
    assert rig.engine.purge(TaskFilter(state="failed", ids=("nobody",))) == 0
    assert rig.engine.purge(TaskFilter(state="failed", ids=(ids[0],))) == 1
    assert rig.engine.purge(TaskFilter(state="failed", older_ns=300 * SECOND_NS)) == 1
    assert {each.id for each in rig.engine.find(TaskFilter())} == {ids[2], ids[3]}
    assert rig.engine.purge(TaskFilter(state="failed")) == 2


# -- figures --------------------------------------------------------------------------------------


def test_recent_ends_are_counted_for_each_pool(rig: Rig) -> None:
    a = rig.join(lease=3600)
    rig.submit(*rig.tasks(5))
    grants = rig.claim(a, 5)
    rig.finish(a, *grants[:2], kind="failed")
    rig.pass_time(60)
    rig.finish(a, *grants[2:4])
    rig.finish(a, grants[4], kind="failed")
    assert rig.engine.recent(5 * SECOND_NS) == [Recent("p", 2, 1, 3)]
    assert rig.engine.recent(3600 * SECOND_NS) == [Recent("p", 2, 1, 3)]  # bounded
    rig.pass_time(RECENT_NS_MAX / SECOND_NS + 1)
    assert rig.engine.recent(RECENT_NS_MAX) == [Recent("p", 0, 0, 3)]


def test_a_site_tells_who_waits_and_how_often_it_opened(rig: Rig) -> None:
    rig.apply(ClusterPolicy(breaker=BreakerPolicy(failures=1, open_ns=SECOND_NS)))
    a = rig.join()
    rig.submit(*rig.tasks(3, target="s"))
    rig.engine.finish(a, [end(rig.claim_one(a), "failed", failure=UNWELL)])
    [site] = rig.engine.sites()
    assert (site.target, site.breaker, site.waiting) == ("s", "open", 2)
    assert site.reopenings == 1


def test_only_so_many_sites_are_seen_and_those_in_trouble_first(rig: Rig) -> None:
    rig.apply(ClusterPolicy(target=TargetPolicy(max_concurrent=5)))
    rig.join()
    for number in range(SITES_SEEN_MAX):
        rig.engine.breaker(f"s{number:05d}", "close")
    rig.engine.breaker("worst", "open")
    sites = rig.engine.sites()
    assert len(sites) == SITES_SEEN_MAX
    assert (sites[-1].target, sites[-1].breaker) == ("worst", "forced-open")
    assert (sites[0].target, sites[0].breaker) == ("s00000", "closed")
