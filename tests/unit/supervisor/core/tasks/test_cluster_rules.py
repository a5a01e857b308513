"""What a cluster shares: which values hold for attempts, and what is said of local ones."""

from random import Random
from typing import Any

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, BreakerPolicy, RetryPolicy
from musterd.ipc.wire.messages import Fetching, TaskSpec
from musterd.ipc.wire.node_messages import Attempt
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import GatePolicy, SchedulePolicy, TargetPolicy
from musterd.supervisor.core.model.shared import ClusterPolicy, card_of
from musterd.supervisor.core.model.timing import Every
from support.core import Muster, of

LEASE_NS = 30 * SECOND_NS
KITES = SchedulePolicy("kites", "p.x", Every(SECOND_NS))


class Node(Muster):
    """A fleet whose pool is clustered, and that has joined."""

    def __init__(self, **own: Any) -> None:
        super().__init__(1, clustered=True)
        self.policy = structs.replace(self.policy, **{"retry": RetryPolicy(), **own})
        self.fleet = Fleet(self.policy, Random(1))
        self.start()
        self.tell(events.ClusterConnected())

    def beat(self, policy: int = 0) -> list[Any]:
        return self.tell(events.MembershipTold(1, self.now_ns + LEASE_NS, policy=policy))

    def share(self, version: int, policy: ClusterPolicy | None) -> list[Any]:
        return self.tell(events.PolicyShared(version, policy))

    def leased(self, **spec: Any) -> actions.AssignLeases:
        granted = Attempt(TaskSpec("t", "p.x", b"", **spec), 7, 1, policy=spec.get("policy", ""))
        [assigned] = of(actions.AssignLeases, self.tell(events.AttemptsGranted(1, "p", [granted])))
        return assigned


def said(answer: list[Any]) -> list[tuple[str, str]]:
    return [(each.event, each.reason) for each in of(actions.Report, answer)]


def wants(answer: list[Any]) -> list[int]:
    return [each.count for each in of(actions.WantAttempts, answer)]


# -- what holds ---------------------------------------------------------------------------------


def test_nothing_is_wanted_before_the_policy_is_known() -> None:
    node = Node()
    assert wants(node.beat(policy=3)) == []
    assert wants(node.share(3, ClusterPolicy())) == [1]
    assert wants(node.beat(policy=4)) == [0]
    assert wants(node.share(4, None)) == [1]  # it cannot be read, and work goes on


def test_attempts_are_told_how_the_target_of_the_cluster_is_fetched() -> None:
    node = Node()
    node.beat(policy=1)
    shop = TargetPolicy(proxies=("secret:PROXY",))
    node.share(1, ClusterPolicy(targets={"shop": shop}))
    [lease] = node.leased(target="shop").leases
    assert lease.fetching == Fetching(("secret:PROXY",))


def test_the_values_of_the_cluster_hold_for_its_attempts() -> None:
    site = TargetPolicy(timeout_ns=9 * SECOND_NS, max_retries=0)
    node = Node(targets={"shop": site}, retry=RetryPolicy(0))
    node.beat(policy=1)
    shared = TargetPolicy(timeout_ns=5 * SECOND_NS)
    backoff = BackoffPolicy(base_ns=7 * SECOND_NS, jitter=0.0)
    node.share(1, ClusterPolicy(RetryPolicy(2, backoff), targets={"shop": shared}))
    [lease] = node.leased(target="shop").leases
    assert lease.timeout_ns == 5 * SECOND_NS
    answer = node.fail(1, 1)
    [end] = [end for told in of(actions.TellCluster, answer) for end in told.ends]
    assert end.retry_ns == 7 * SECOND_NS


def test_classes_of_the_cluster_hold() -> None:
    node = Node(classes={"gold": GatePolicy("gold", timeout_ns=9 * SECOND_NS)})
    node.beat(policy=1)
    node.share(1, ClusterPolicy(classes={"gold": GatePolicy("gold", timeout_ns=3 * SECOND_NS)}))
    [lease] = node.leased(policy="gold").leases
    assert lease.timeout_ns == 3 * SECOND_NS


def test_where_nothing_is_applied_local_values_hold() -> None:
    node = Node(targets={"shop": TargetPolicy(timeout_ns=9 * SECOND_NS)})
    node.beat()
    node.share(0, ClusterPolicy(targets={"shop": TargetPolicy(timeout_ns=SECOND_NS)}))
    [lease] = node.leased(target="shop").leases
    assert lease.timeout_ns == 9 * SECOND_NS


# -- what is said -------------------------------------------------------------------------------


def test_what_differs_is_said_once_with_its_keys() -> None:
    own = {
        "targets": {"shop": TargetPolicy(rate=1.0), "same": TargetPolicy(rate=2.0)},
        "classes": {"gold": GatePolicy("gold", max_concurrent=3)},
        "breaker": BreakerPolicy(failures=7),
        "schedules": (KITES,),
    }
    node = Node(**own)
    applied = ClusterPolicy(
        targets={"same": TargetPolicy(rate=2.0), "more": TargetPolicy(rate=3.0)},
        schedules=(card_of(structs.replace(KITES, jitter_ns=5)),),
    )
    [(event, why)] = said(node.share(2, applied))
    assert event == "cluster.policy_differs"
    assert why.startswith("breaker, classes.gold, targets.shop, schedule.kites: policy 2 ")
    assert said(node.share(2, applied)) == []
    assert said(node.share(3, ClusterPolicy(schedules=(card_of(KITES),)))) != []


def test_what_is_the_same_or_only_applied_is_not_said() -> None:
    node = Node(targets={"same": TargetPolicy(rate=2.0)}, schedules=(KITES,))
    applied = ClusterPolicy(
        retry=RetryPolicy(9),
        targets={"same": TargetPolicy(rate=2.0), "more": TargetPolicy(rate=3.0)},
        schedules=(card_of(KITES),),
    )
    assert said(node.share(2, applied)) == []


def test_where_nothing_is_applied_it_says_what_is_not_shared_and_what_to_do() -> None:
    node = Node(targets={"shop": TargetPolicy(rate=1.0)}, schedules=(KITES,))
    [(event, why)] = said(node.share(0, ClusterPolicy()))
    assert event == "cluster.policy_missing"
    assert why.startswith("targets.shop, schedule.kites: ")
    assert "musterctl cluster apply FILE" in why
    assert said(Node().share(0, ClusterPolicy())) == []


def test_many_keys_are_counted() -> None:
    node = Node(targets={f"site{n}": TargetPolicy(rate=1.0) for n in range(30)})
    [(_, why)] = said(node.share(1, ClusterPolicy()))
    assert "targets.site9 and 20 more: " in why


def test_a_reload_compares_again() -> None:
    node = Node()
    assert said(node.share(1, ClusterPolicy())) == []
    policy = structs.replace(node.policy, targets={"shop": TargetPolicy(rate=1.0)})
    [(event, why)] = said(node.tell(events.PolicyChanged(policy)))
    assert event == "cluster.policy_differs"
    assert "targets.shop" in why


def test_a_policy_of_a_newer_musterd_is_said() -> None:
    [(event, why)] = said(Node().share(2, None))
    assert (event, why) == (
        "cluster.policy_unread",
        "policy 2 is of a newer musterd: upgrade this machine",
    )


def test_what_happened_to_a_schedule_of_the_cluster_is_reported() -> None:
    node = Node()
    changed = events.ScheduleNoted("task.changed", "kites", "p", "@kites.1", "", 0, "d", True)
    assert of(actions.Report, node.tell(changed)) == [
        actions.Report(
            "task.changed",
            pool="p",
            task="@kites.1",
            schedule="kites",
            digest="d",
            elsewhere=True,
        )
    ]
    [report] = of(
        actions.Report, node.tell(events.ScheduleNoted("schedule.skipped", "kites", count=3))
    )
    assert (report.level, report.count) == ("warning", 3)


def test_schedules_of_a_pool_of_the_cluster_do_not_run_here() -> None:
    node = Node(schedules=(KITES, structs.replace(KITES, name="own", task="q.x")))
    assert list(node.fleet.schedules) == ["own"]
    node.tell(events.PolicyChanged(structs.replace(node.policy, schedules=(KITES,))))
    assert list(node.fleet.schedules) == []
    [pool] = node.policy.pools
    alone = structs.replace(node.policy, pools=(structs.replace(pool, clustered=False),))
    node.tell(events.PolicyChanged(structs.replace(alone, schedules=(KITES,))))
    assert list(node.fleet.schedules) == ["kites"]
