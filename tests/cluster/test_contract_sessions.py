"""The contract of engines: sessions. One claim at a time over all nodes; what is kept is fenced."""

from rig import SICK, Rig, pool

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    Grant,
    Held,
)
from musterd.supervisor.cluster.handling import (
    StateAsk,
    StateView,
)
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy

KEY = "session:acme"


def used(rig: Rig, *tenures: int) -> list[Grant]:
    """Claim as much as there is, on each of these nodes."""
    return [grant for tenure in tenures for grant in rig.claim(tenure, 10)]


def test_one_task_of_a_session_is_claimed_at_a_time_and_others_go_on(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    first, second, third = rig.submit(*rig.tasks(3, session="acme"))
    rig.submit(rig.task(session="shop"), rig.task())
    grants = used(rig, a, b)
    assert sorted(each.spec.session for each in grants) == ["", "acme", "shop"]
    (grant,) = [each for each in grants if each.spec.session == "acme"]
    assert grant.id == first
    rig.finish(a, grant)
    (grant,) = used(rig, b)
    assert (grant.id, grant.spec.session) == (second, "acme")
    assert used(rig, a) == []
    rig.finish(b, grant)
    assert [each.id for each in used(rig, a, b)] == [third]


def test_pools_and_sites_share_a_session(rig: Rig) -> None:
    a = rig.join("a", pool("p"), pool("q"))
    rig.apply(ClusterPolicy(targets={"shop.example": TargetPolicy(max_concurrent=5)}))
    ids = rig.submit(
        rig.task(session="acme"),
        rig.task(pool="q", session="acme", priority=0),
        rig.task(session="acme", target="shop.example"),
        rig.task(target="shop.example"),
    )
    order = []
    for _ in range(3):
        grants = [*rig.claim(a, 10), *rig.claim(a, 10, "q")]
        assert sum(each.spec.session == "acme" for each in grants) == 1
        order += [each.id for each in grants]
        rig.finish(a, *grants)
    assert sorted(order) == sorted(ids)


def test_a_retry_leaves_the_session_to_others(rig: Rig) -> None:
    a = rig.join()
    first, second = rig.submit(*rig.tasks(2, session="acme"))
    (grant,) = used(rig, a)
    rig.finish(a, grant, kind="failed", retry_ns=10 * SECOND_NS)
    (grant,) = used(rig, a)
    assert grant.id == second
    rig.pass_time(11)
    rig.engine.tick()
    assert used(rig, a) == []
    rig.finish(a, grant)
    (grant,) = used(rig, a)
    assert (grant.id, grant.attempt) == (first, 2)


def test_the_session_of_a_node_that_is_lost_goes_to_another(rig: Rig) -> None:
    a, b = rig.join("a", lease=30), rig.join("b", lease=300)
    first, _ = rig.submit(*rig.tasks(2, session="acme"))
    (grant,) = used(rig, a)
    assert used(rig, b) == []
    rig.pass_time(31)
    rig.engine.reap()
    (again,) = used(rig, b)
    assert (again.id, again.spec.session) == (first, "acme")
    # What the lost node would keep now does not count.
    late = StateAsk(grant.id, grant.claim, KEY, True, b"late")
    mine = StateAsk(again.id, again.claim, KEY, True, b"mine")
    assert rig.engine.states(b, [mine]) == [StateView()]
    c = rig.join("c")
    assert rig.engine.states(c, [late]) == [StateView(held=False)]
    assert rig.engine.state_load(KEY) == b"mine"


def test_a_crash_of_the_server_forgets_no_user_of_a_session(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    rig.submit(*rig.tasks(2, session="acme"))
    (grant,) = used(rig, a)
    rig.restart([grant.id])
    rig.engine.rejoin(b, [])
    rig.engine.rejoin(a, [Held(grant.id, grant.claim)])
    assert used(rig, a, b) == []
    rig.finish(a, grant)
    assert len(used(rig, a, b)) == 1


def test_a_policy_changes_nothing_about_who_uses_a_session(rig: Rig) -> None:
    a = rig.join()
    rig.submit(*rig.tasks(2, session="acme"))
    (grant,) = used(rig, a)
    rig.apply(ClusterPolicy(classes={"gold": GatePolicy("gold", max_concurrent=3)}))
    assert used(rig, a) == []
    rig.finish(a, grant)
    assert len(used(rig, a)) == 1


def test_a_task_with_a_session_keeps_its_resilience_class(rig: Rig) -> None:
    a = rig.join()
    rig.apply(
        ClusterPolicy(
            classes={"gold": GatePolicy("gold"), "tin": GatePolicy("tin")},
            targets={"shop.example": TargetPolicy(policy="tin")},
        )
    )
    rig.submit(rig.task(session="acme", policy="gold", target="shop.example"))
    rig.submit(rig.task(session="shop", target="shop.example"), rig.task(session="none"))
    classes = {each.spec.session: each.policy for each in used(rig, a)}
    assert classes == {"acme": "gold", "shop": "tin", "none": ""}


def test_last_good_results_of_two_sessions_are_two(rig: Rig) -> None:
    a = rig.join()
    for session, value in (("acme", b"\x01"), ("shop", b"\x02")):
        rig.submit(rig.task(session=session))
        rig.finish(a, *used(rig, a), keeps=True, value=value)
    failing = rig.submit(
        *[rig.task(session=name, fallback_on="failure") for name in ("acme", "shop", "new")]
    )
    rig.finish(a, *used(rig, a), kind="failed", failure=SICK)
    found = [rig.ended(id_) for id_ in failing]
    assert [(each.state, each.value) for each in found] == [
        ("succeeded", b"\x01"),
        ("succeeded", b"\x02"),
        ("failed", b""),
    ]


def test_a_task_that_is_run_again_has_its_session(rig: Rig) -> None:
    a = rig.join()
    (id_,) = rig.submit(rig.task(session="acme"))
    rig.finish(a, *used(rig, a), kind="failed", failure=SICK)
    assert rig.engine.retry([id_]) == []
    rig.submit(rig.task(session="acme"))
    (grant,) = used(rig, a)
    assert (grant.id, grant.spec.session) == (id_, "acme")


def test_joined_tasks_of_a_session_end_with_the_first(rig: Rig) -> None:
    a = rig.join()
    ids = rig.submit(*rig.tasks(3, session="acme", key="k"))
    rig.finish(a, *used(rig, a))
    assert {rig.ended(id_).state for id_ in ids} == {"succeeded"}
