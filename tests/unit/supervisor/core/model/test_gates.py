"""Breakers, bulkheads, rates and classes, in the whole core."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.breaker import BreakerState
from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, BreakerPolicy
from musterd.ipc.wire.messages import (
    CRITICAL,
    HIGH,
    LOW,
    NORMAL,
    Outcome,
    TaskDeclaration,
    TaskSpec,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import GatePolicy, PoolPolicy, TargetPolicy
from musterd.supervisor.core.tasks import gatekeeper
from musterd.supervisor.core.tasks.leases import CANCEL_GRACE_NS, HARD_GRACE_NS
from musterd.supervisor.views.fleet import live_view
from support.core import Muster

QUICK = BreakerPolicy(failures=3, open_ns=10 * SECOND_NS, open_jitter=0.0)
FRAGILE = structs.replace(QUICK, failures=1)
WALL_NS = 10**18


class Driver:
    """The shared driver with its own policies, and names of tasks instead of lease numbers."""

    def __init__(self, muster: type[Muster], size: int = 1, **policy: Any) -> None:
        pools = policy.pop("pools", ("p",))
        retries = policy.pop("max_retries", 0)
        self.m = muster(size, max_retries=retries)
        own = {
            "pools": tuple(PoolPolicy(name, size) for name in pools),
            "breaker": QUICK,
            **policy,
        }
        self.m.policy = structs.replace(self.m.policy, **own)
        self.m.fleet = Fleet(self.m.policy, Random(1))
        self.m.start()
        for pool in pools[1:]:
            answer = self.m.tell(events.ForkServerReady(pool, (TaskDeclaration("x"),)))
            for spawn in self.of(actions.SpawnWorker, answer):
                self.m.bring_up(spawn.worker)
        self.reports: list[tuple[str, str]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.facts: dict[str, bytes] = {}  # what the store holds of breakers
        self.rejected: dict[str, str] = {}
        self.leases: dict[str, tuple[int, int]] = {}  # worker and lease of each running task

    @staticmethod
    def of(kind: type, answer: list[Any]) -> list[Any]:
        return [each for each in answer if isinstance(each, kind)]

    def note(self, answer: list[Any]) -> list[str]:
        """Note the actions; return the names of the tasks that began, in order."""
        began = []
        for each in answer:
            match each:
                case actions.AssignLeases():
                    for lease in each.leases:
                        self.leases[lease.id] = (each.worker, lease.lease)
                        began.append(lease.id)
                case actions.Report() if each.target and each.event.startswith("breaker"):
                    self.reports.append((each.event, each.target))
                case actions.Deliver():
                    self.outcomes.update({outcome.id: outcome for outcome in each.outcomes})
                case actions.Acknowledge():
                    self.rejected.update(
                        {no.id: f"{no.code}: {no.message}" for no in each.rejected}
                    )
                case actions.Persist():
                    for fact in each.facts:
                        if fact.kind != gatekeeper.KIND:
                            continue
                        if fact.value is None:
                            self.facts.pop(fact.key, None)
                        else:
                            self.facts[fact.key] = fact.value
        return began

    def submit(self, *names: str, pool: str = "p", **fields: Any) -> list[str]:
        fields.setdefault("target", "site")
        return self.note(
            self.m.submit(*[TaskSpec(name, f"{pool}.x", b"", **fields) for name in names])
        )

    def succeed(self, name: str, seconds: float = 1.0) -> list[str]:
        worker, lease = self.leases.pop(name)
        return self.note(self.m.complete(worker, lease, run_ns=int(seconds * SECOND_NS)))

    def fail(self, name: str, kind: str = "error", **failure: Any) -> list[str]:
        failure.setdefault("unwell", kind in ("error", "timeout"))
        worker, lease = self.leases.pop(name)
        return self.note(self.m.fail(worker, lease, kind, **failure))

    def wait(self, seconds: float) -> list[str]:
        return self.note(self.m.wait(int(seconds * SECOND_NS)))

    def command(self, command: str, target: str = "site") -> list[str]:
        return self.note(self.m.tell(events.BreakerCommanded(target, command)))

    def shut(self, target: str = "site") -> None:
        """Fail as many tasks as open the breaker."""
        for number in range(self.m.policy.breaker.failures):
            name = f"{target}-fails{number}"
            assert self.submit(name, target=target) == [name]
            self.fail(name)
        assert self.state(target) == "open"

    def state(self, target: str = "site") -> str:
        return str(self.m.fleet.sites[target].breaker.state)

    def why(self, name: str) -> str:
        return live_view(self.m.fleet.tasks[name], self.m.now_ns).waits_for

    def restart(self, seconds_down: float = 0.0, *, wall: bool = True) -> None:
        """Kill the daemon and start it again with what its store holds."""
        m = self.m
        left = [
            events.Recovered(task.seq, task.spec, 0, 0, 0, task.attempt, 0, 0, begun=False)
            for task in m.fleet.tasks.values()
        ]
        m.now_ns += int(seconds_down * SECOND_NS)
        m.fleet = Fleet(m.policy, Random(2), last_seq=10_000)
        wall_ns = WALL_NS + m.now_ns if wall else 0
        facts = list(self.facts.items())
        self.note(m.tell(events.FactsRecovered(gatekeeper.KIND, facts, wall_ns)))
        self.note(m.tell(events.TasksRecovered(left)))
        self.note(m.start())


@pytest.fixture
def drive(muster: type[Muster]) -> Any:
    """Return drive(size=2, classes=...), which makes a fleet that is up."""
    return lambda size=1, **policy: Driver(muster, size, **policy)


# -- the breaker of a site --------------------------------------------------------------------


def test_three_failures_shut_a_site_and_its_tasks_wait_while_others_run(drive: Any) -> None:
    d = drive()
    d.shut()
    assert d.submit("a", "b") == []
    assert d.submit("other", target="elsewhere") == ["other"]
    assert d.why("a") == "breaker of site is open for 10 s more"
    d.succeed("other")
    assert d.wait(9.9) == []
    assert d.wait(0.1) == ["a"], "the probe"
    assert d.m.fleet.tasks["b"].attempt == 0, "waiting burns no attempt"
    assert d.reports == [("breaker.open", "site"), ("breaker.half_open", "site")]


def test_probes_that_succeed_let_all_go_on(drive: Any) -> None:
    d = drive(size=3)
    d.shut()
    d.submit("a", "b", "c", "d")
    assert d.wait(10) == ["a"]
    assert d.why("b") == "breaker of site is half-open, 1 probe(s) run"
    assert d.succeed("a") == ["b"]
    assert d.state() == "half-open"
    assert d.succeed("b") == ["c", "d"]
    assert d.reports[-1] == ("breaker.closed", "site")


def test_a_single_probe_that_fails_opens_it_again_for_longer_and_says_so(drive: Any) -> None:
    d = drive()
    d.shut()
    d.submit("a")
    d.wait(10)
    d.fail("a")
    assert [event for event, _ in d.reports] == [
        "breaker.open",
        "breaker.half_open",
        "breaker.open",
    ]
    d.submit("b")
    assert d.wait(19.9) == []
    assert d.wait(0.2) == ["b"]


def test_the_retries_of_one_task_count_once(drive: Any) -> None:
    d = drive(max_retries=9)
    d.submit("bad")
    for _ in range(9):
        d.fail("bad")
        d.wait(60)
    assert d.state() == "closed"
    assert d.m.fleet.sites["site"].breaker.failures == 1


def test_a_retry_that_is_a_probe_counts_all_the_same(drive: Any) -> None:
    d = drive(max_retries=9, breaker=FRAGILE)
    d.submit("a")
    d.fail("a")
    assert d.wait(10) == ["a"]
    d.fail("a")
    assert d.state() == "open"
    assert d.m.fleet.sites["site"].breaker.reopenings == 2


@pytest.mark.parametrize("kind", ["permanent", "invalid", "error"])
def test_failures_that_say_nothing_about_the_site_never_count(drive: Any, kind: str) -> None:
    d = drive(breaker=FRAGILE)
    d.submit("a")
    d.fail("a", kind, unwell=False)
    assert d.state() == "closed"


def test_the_death_of_a_worker_never_counts(drive: Any) -> None:
    d = drive(breaker=FRAGILE)
    d.submit("a")
    worker, lease = d.leases["a"]
    d.note(d.m.exit(worker, lease, code=-9))
    assert d.state() == "closed"
    assert d.m.fleet.sites["site"].inside == 0


def test_a_worker_that_has_to_be_killed_never_counts(drive: Any) -> None:
    d = drive(breaker=FRAGILE)
    d.submit("a", timeout_ns=SECOND_NS)
    worker, lease = d.leases["a"]
    began_ns = d.m.now_ns
    d.m.wait(SECOND_NS + HARD_GRACE_NS)
    d.m.tell(events.BoardRead(worker, lease, began_ns))
    d.note(d.m.exit(worker, lease, code=-9))
    assert d.outcomes["a"].failure.kind == "timeout"
    assert d.state() == "closed"


def test_a_cancelled_task_never_counts_however_it_ends(drive: Any) -> None:
    d = drive(size=2, breaker=FRAGILE)
    d.submit("listens", "is-deaf")
    d.m.tell(events.CancelRequested(["listens", "is-deaf"]))
    d.fail("listens", "cancel")
    worker, lease = d.leases["is-deaf"]
    d.m.wait(CANCEL_GRACE_NS)
    d.note(d.m.exit(worker, lease, code=-9))
    assert {d.outcomes[name].state for name in ("listens", "is-deaf")} == {"cancelled"}
    assert d.state() == "closed"


@pytest.mark.parametrize("how", ["died", "cancelled", "returned"])
def test_a_probe_that_never_reports_gives_its_place_back(drive: Any, how: str) -> None:
    d = drive(size=2)
    d.shut()
    d.submit("a", "b")
    assert d.wait(10) == ["a"]
    worker, lease = d.leases.pop("a")
    if how == "died":
        began = d.note(d.m.exit(worker, 0, code=-9))
    elif how == "returned":
        began = d.note(d.m.tell(events.LeasesReturned(worker, [lease])))
    else:
        d.note(d.m.tell(events.CancelRequested(["a"])))
        began = d.note(d.m.fail(worker, lease, "cancel"))
    assert len(began) == 1, "the next probe"
    assert d.m.fleet.sites["site"].breaker.probes == 1
    assert d.state() == "half-open"


def test_a_late_result_of_before_the_opening_changes_nothing(drive: Any) -> None:
    d = drive(size=3, breaker=FRAGILE)
    d.submit("a", "late-bad", "late-good")
    d.fail("a")
    until_ns = d.m.fleet.sites["site"].breaker.open_until_ns
    d.wait(5)
    d.fail("late-bad", retry_after_ns=1000 * SECOND_NS)
    d.succeed("late-good")
    assert d.state() == "open"
    assert d.m.fleet.sites["site"].breaker.open_until_ns == until_ns


def test_retry_after_holds_the_site_for_as_long(drive: Any) -> None:
    d = drive(breaker=FRAGILE)
    d.submit("a")
    d.fail("a", status=503, retry_after_ns=100 * SECOND_NS)
    d.submit("b")
    assert d.wait(99.9) == []
    assert d.wait(0.1) == ["b"]


def test_slow_calls_shut_a_site_that_answers(drive: Any) -> None:
    slow = structs.replace(
        QUICK, window=10, window_calls_min=2, slow_ns=SECOND_NS, slow_rate=0.5, failures=0
    )
    d = drive(breaker=slow)
    for number, seconds in enumerate((0.5, 1.5)):
        d.submit(f"t{number}")
        d.succeed(f"t{number}", seconds)
    assert d.state() == "open"


def test_a_disabled_breaker_lets_all_pass(drive: Any) -> None:
    d = drive(breaker=BreakerPolicy(enabled=False, failures=1))
    for number in range(10):
        assert d.submit(f"t{number}") == [f"t{number}"]
        d.fail(f"t{number}")
    assert d.state() == "disabled"


# -- options of tasks whose site is shut --------------------------------------------------------


def test_a_task_that_does_not_want_to_wait_fails_at_once(drive: Any) -> None:
    d = drive()
    d.shut()
    assert d.submit("a", on_open="fail") == []
    failure = d.outcomes["a"].failure
    assert (failure.kind, failure.message) == (
        "open",
        "the breaker of site is open for 10 s more",
    )
    assert d.outcomes["a"].attempts == 0


def test_those_that_wait_already_are_ended_when_the_site_is_shut(drive: Any) -> None:
    d = drive(breaker=FRAGILE)
    d.submit("a")
    d.submit("hasty", on_open="fail")
    d.submit("patient")
    d.fail("a")
    assert d.outcomes["hasty"].state == "failed"
    assert "patient" not in d.outcomes


def test_a_retry_that_finds_its_site_shut_follows_its_policy(drive: Any) -> None:
    d = drive(size=2, max_retries=3, breaker=FRAGILE)
    d.submit("a", "b", on_open="fail")
    d.fail("a")
    assert "a" not in d.outcomes, "it waits for its retry"
    d.wait(1)
    assert (d.outcomes["a"].failure.kind, d.outcomes["a"].attempts) == ("open", 1)


def test_a_busy_pool_does_not_keep_hasty_tasks_from_probing(drive: Any) -> None:
    """A task must not fail because the end of an open time went unnoticed."""
    d = drive()
    d.shut()
    assert d.submit("busy", target="elsewhere") == ["busy"]
    d.wait(11)
    d.submit("a", on_open="fail")
    assert "a" not in d.outcomes
    assert d.succeed("busy") == ["a"]
    assert d.state() == "half-open"


def test_the_fallback_is_the_last_good_result_and_marked_stale(drive: Any) -> None:
    d = drive()
    d.submit("good", on_open="fallback", key="k")
    d.succeed("good")
    d.shut()
    d.submit("a", on_open="fallback", key="k", fallback=b"\x07")
    assert (d.outcomes["a"].state, d.outcomes["a"].value) == ("succeeded", b"value")
    assert d.outcomes["a"].stale


def test_the_fallback_is_else_the_given_default(drive: Any) -> None:
    d = drive()
    d.shut()
    d.submit("a", on_open="fallback", key="k", fallback=b"\x07")
    assert (d.outcomes["a"].state, d.outcomes["a"].value) == ("succeeded", b"\x07")
    assert (d.outcomes["a"].stale, d.outcomes["a"].source) == (False, "fallback")


def test_a_default_is_never_remembered_as_a_result(drive: Any) -> None:
    d = drive(breaker=FRAGILE, max_retries=1)
    d.submit("a", on_open="fallback", key="k", fallback=b"\x07")
    d.fail("a")
    d.wait(1)  # the second attempt of `a` finds the site shut
    assert d.outcomes["a"].value == b"\x07"
    d.wait(30)
    assert d.submit("b", key="k", cache_ns=60 * SECOND_NS) == ["b"]
    d.succeed("b")
    assert d.outcomes["b"].value == b"value"


def test_without_anything_to_fall_back_to_it_fails_and_says_so(drive: Any) -> None:
    d = drive()
    d.shut()
    d.submit("a", on_open="fallback")
    assert d.outcomes["a"].failure.message == (
        "the breaker of site is open for 10 s more, "
        "and there is no last good result and no fallback"
    )


def test_a_class_that_falls_back_keeps_the_good_results_of_its_tasks(drive: Any) -> None:
    """The class alone asks for the fallback, its tasks need not."""
    d = drive(classes={"soft": GatePolicy("soft", on_open="fallback")})
    d.submit("good", policy="soft")
    d.succeed("good")
    d.shut()
    d.submit("a", policy="soft")
    assert (d.outcomes["a"].value, d.outcomes["a"].stale) == (b"value", True)


def test_a_task_s_own_word_counts_more_than_that_of_its_class(drive: Any) -> None:
    d = drive(classes={"hasty": GatePolicy("hasty", on_open="fail")})
    d.shut()
    d.submit("patient", policy="hasty", on_open="wait")
    d.submit("hasty", policy="hasty")
    assert list(d.outcomes) == ["site-fails0", "site-fails1", "site-fails2", "hasty"]


def test_many_tasks_may_wait_at_a_shut_site_without_each_looking_at_all(drive: Any) -> None:
    """Each new task once cost a copy of the whole lane."""
    d = drive()
    d.shut()
    d.submit(*[f"t{number}" for number in range(500)])
    lane = d.m.fleet.tasks["t0"].lane

    class Watched(type(lane.tasks)):  # type: ignore[misc]
        looked = 0

        def __iter__(self) -> Any:
            for each in super().__iter__():
                Watched.looked += 1
                yield each

    lane.tasks = Watched(lane.tasks)
    d.m.fleet.handle(d.m.now_ns, events.TasksSubmitted(b"c", 9, [], 0))
    Watched.looked = 0
    spec = TaskSpec("one-more", "p.x", b"", target="site")
    answer = d.m.fleet.handle(d.m.now_ns, events.TasksSubmitted(b"c", 10, [spec], 0))
    d.m.fleet.handle(d.m.now_ns, events.Persisted(d.of(actions.Persist, answer)[0].ticket))
    assert Watched.looked < 10


# -- bulkheads --------------------------------------------------------------------------------


def test_a_target_has_no_more_running_than_its_places(drive: Any) -> None:
    d = drive(size=4, targets={"site": TargetPolicy(max_concurrent=2)})
    assert d.submit("a", "b", "c", "d") == ["a", "b"]
    assert d.why("c") == "bulkhead site 2/2"
    assert d.submit("other", target="elsewhere") == ["other"]
    assert d.succeed("a") == ["c"]
    assert d.fail("b") == ["d"]


def test_a_site_is_limited_as_the_first_pattern_says_that_it_fits(drive: Any) -> None:
    patterns = (
        ("*.shop.example", TargetPolicy(policy="calm")),
        ("*.example", TargetPolicy(max_concurrent=2)),
    )
    own = {"own.shop.example": TargetPolicy()}
    driver = drive(
        size=9,
        patterns=patterns,
        targets=own,
        target=TargetPolicy(max_concurrent=3),
        classes={"calm": GatePolicy("calm", max_concurrent=1)},
        class_breakers={"calm": FRAGILE},
    )
    for site, places in (("a.shop.example", 1), ("a.example", 2), ("elsewhere", 3)):
        began = driver.submit(*[f"{number}-{site}" for number in range(4)], target=site)
        assert len(began) == places, site
    assert driver.submit("a", "b", "c", target="own.shop.example") == ["a", "b", "c"]
    driver.fail("0-a.shop.example")
    assert ("breaker.open", "a.shop.example") in driver.reports, "that of its class"


def test_a_reload_changes_the_patterns_of_sites_that_are_known(drive: Any) -> None:
    driver = drive(size=4)
    assert driver.submit("a", "b", target="a.example") == ["a", "b"]
    narrow = (("*.example", TargetPolicy(max_concurrent=1)),)
    policy = structs.replace(driver.m.policy, patterns=narrow)
    driver.note(driver.m.tell(events.PolicyChanged(policy)))
    assert driver.submit("c", target="a.example") == []
    assert driver.succeed("a") == []
    assert driver.succeed("b") == ["c"]


def test_a_class_is_limited_over_all_its_targets_and_pools(drive: Any) -> None:
    d = drive(size=3, pools=("p", "q"), classes={"few": GatePolicy("few", max_concurrent=2)})
    assert d.submit("a", target="one", policy="few") == ["a"]
    assert d.submit("b", pool="q", target="two", policy="few") == ["b"]
    assert d.submit("c", target="three", policy="few") == []
    assert d.submit("d", pool="q", target="", policy="few") == []
    assert d.why("c") == d.why("d") == "bulkhead class few 2/2"
    assert d.submit("free", target="three") == ["free"]
    assert d.succeed("a") == ["c"]
    assert d.succeed("b") == ["d"]


def test_the_most_urgent_gets_the_place_that_becomes_free(drive: Any) -> None:
    d = drive(size=2, targets={"site": TargetPolicy(max_concurrent=1)})
    d.submit("first")
    for name, priority in (("low", LOW), ("normal", NORMAL), ("high", HIGH), ("crit", CRITICAL)):
        assert d.submit(name, priority=priority) == []
    order = []
    running = "first"
    for _ in range(4):
        (running,) = d.succeed(running)
        order.append(running)
    assert order == ["crit", "high", "normal", "low"]


def test_a_place_nobody_needs_any_more_goes_to_the_next(drive: Any) -> None:
    d = drive(size=2, targets={"site": TargetPolicy(max_concurrent=1)})
    d.submit("a")
    d.submit("urgent", priority=CRITICAL)
    d.submit("later")
    d.note(d.m.tell(events.CancelRequested(["urgent"])))
    assert d.succeed("a") == ["later"]


def test_a_place_offered_to_a_task_that_is_cancelled_then_goes_to_the_next(drive: Any) -> None:
    few = {"few": GatePolicy("few", max_concurrent=1)}
    d = drive(pools=("p", "q"), classes=few)
    d.submit("a", pool="q", policy="few")
    d.submit("b", target="one", policy="few", priority=HIGH)
    d.submit("c", target="two", policy="few")
    assert d.submit("busy", target="") == ["busy"]
    assert d.succeed("a") == [], "b may go on, but has no worker"
    d.note(d.m.tell(events.CancelRequested(["b"])))
    assert d.succeed("busy") == ["c"]


def test_a_place_whose_site_is_shut_meanwhile_goes_to_another_site_of_the_class(drive: Any) -> None:
    d = drive(size=3, classes={"few": GatePolicy("few", max_concurrent=1)}, breaker=FRAGILE)
    d.submit("a", target="one", policy="few")
    d.submit("b", target="two", policy="few", priority=HIGH)
    d.submit("c", target="three", policy="few")
    d.submit("breaks", target="two")
    d.fail("breaks")
    assert d.succeed("a") == ["c"]
    assert d.why("b").startswith("breaker of two is open")


def test_the_places_of_dead_workers_are_free_again(drive: Any) -> None:
    d = drive(size=2, targets={"site": TargetPolicy(max_concurrent=1)})
    d.submit("a", "b")
    worker, lease = d.leases["a"]
    assert d.note(d.m.exit(worker, lease, code=-11)) == ["a"], "it comes first again"
    assert d.succeed("a") == ["b"]


# -- rates ------------------------------------------------------------------------------------


def test_a_rate_spreads_beginnings_and_says_so(drive: Any) -> None:
    d = drive(size=8, targets={"site": TargetPolicy(rate=2.0, burst=2)})
    assert d.submit("a", "b", "c", "d", "e") == ["a", "b"]
    assert d.why("c") == "rate 2/s of site"
    assert d.wait(0.4) == []
    assert d.wait(0.1) == ["c"]
    assert d.wait(1.0) == ["d", "e"]


def test_a_rate_holds_for_tiny_tasks_in_windows_too(drive: Any) -> None:
    d = drive(targets={"site": TargetPolicy(rate=10.0, burst=3)})
    d.m.learn_tiny(3)
    assert d.submit(*[f"t{number}" for number in range(20)]) == ["t0", "t1", "t2"]


def test_a_site_that_waits_for_its_rate_holds_up_no_other(drive: Any) -> None:
    d = drive(size=2, targets={"site": TargetPolicy(rate=0.1)})
    d.submit("a", "b", priority=CRITICAL)
    d.succeed("a")
    assert d.submit("low", target="elsewhere", priority=LOW) == ["low"]


# -- classes ----------------------------------------------------------------------------------


def test_a_class_that_is_not_configured_is_refused_with_those_that_are(drive: Any) -> None:
    d = drive(classes={"critical": GatePolicy("critical"), "normal": GatePolicy("normal")})
    d.submit("a", policy="urgent")
    assert d.rejected["a"] == (
        "InvalidTask: 'p.x' was not accepted: there is no class 'urgent' in [classes] "
        "(known: critical, normal)"
    )
    assert not d.m.fleet.tasks


def test_a_class_that_is_gone_after_a_restart_means_none(drive: Any) -> None:
    d = drive(classes={"few": GatePolicy("few", max_concurrent=1)})
    d.submit("a", "b", policy="few", target="")
    d.m.policy = structs.replace(d.m.policy, classes={})
    d.restart()
    assert "a" in d.leases


def test_which_timeout_holds(drive: Any) -> None:
    """The first of these wins: the submit, the declaration, the target, the class, the pool."""
    d = drive(
        size=9,
        pools=("p",),
        classes={"quick": GatePolicy("quick", timeout_ns=20 * SECOND_NS)},
        targets={
            "both": TargetPolicy(policy="quick", timeout_ns=10 * SECOND_NS),
            "classed": TargetPolicy(policy="quick"),
        },
    )
    d.submit("own", target="both", timeout_ns=5 * SECOND_NS)
    d.submit("target", target="both")
    d.submit("class", target="classed")
    d.submit("class-by-submit", policy="quick")
    d.submit("pool")
    seconds = {name: task.timeout_ns // SECOND_NS for name, task in d.m.fleet.tasks.items()}
    assert seconds == {
        "own": 5,
        "target": 10,
        "class": 20,
        "class-by-submit": 20,
        "pool": 120,
    }


def test_which_retries_hold(drive: Any) -> None:
    fixed = BackoffPolicy(base_ns=7 * SECOND_NS, strategy="fixed", jitter=0.0)
    d = drive(max_retries=1, classes={"tough": GatePolicy("tough", max_retries=2, backoff=fixed)})
    d.submit("a", policy="tough", target="")
    for _ in range(2):
        d.fail("a")
        assert d.wait(6.9) == []
        assert d.wait(0.1) == ["a"]
    d.fail("a")
    assert d.outcomes["a"].attempts == 3
    d.submit("b", policy="tough", target="", max_retries=0)
    d.fail("b")
    assert d.outcomes["b"].attempts == 1


def test_a_target_s_retries_count_more_than_those_of_a_class(drive: Any) -> None:
    pauses = {
        seconds: BackoffPolicy(base_ns=seconds * SECOND_NS, strategy="fixed", jitter=0.0)
        for seconds in (7, 3)
    }
    d = drive(
        classes={"tough": GatePolicy("tough", max_retries=2, backoff=pauses[7])},
        targets={"site": TargetPolicy(policy="tough", max_retries=1, backoff=pauses[3])},
    )
    d.submit("a")
    d.fail("a")
    assert d.wait(2.9) == []
    assert d.wait(0.1) == ["a"]
    d.fail("a")
    assert d.outcomes["a"].attempts == 2


def test_a_target_s_word_on_a_shut_site_counts_more_than_that_of_a_class(drive: Any) -> None:
    d = drive(
        classes={"hasty": GatePolicy("hasty", on_open="fail")},
        targets={
            "site": TargetPolicy(policy="hasty", on_open="wait"),
            "other": TargetPolicy(on_open="fail"),
        },
    )
    for target in ("site", "other", "unnamed"):
        d.command("open", target)
    d.submit("patient")
    d.submit("hasty", target="other")
    d.submit("of-class", target="unnamed", policy="hasty")
    assert "patient" not in d.outcomes
    assert d.outcomes["hasty"].failure.kind == d.outcomes["of-class"].failure.kind == "open"


@pytest.mark.parametrize("first", ["", "gentle"])
def test_a_site_takes_on_the_breaker_of_the_first_class_that_is_named(
    drive: Any, first: str
) -> None:
    gentle = structs.replace(QUICK, failures=1)
    d = drive(classes={"gentle": GatePolicy("gentle")}, class_breakers={"gentle": gentle})
    d.submit("a", policy=first)
    d.fail("a")
    assert d.state() == ("open" if first else "closed")
    d.command("close")
    d.submit("b", policy="gentle")
    d.fail("b")
    assert d.state() == "open"


def test_a_target_s_own_breaker_counts_more_than_that_of_a_class(drive: Any) -> None:
    d = drive(
        classes={"gentle": GatePolicy("gentle")},
        class_breakers={"gentle": structs.replace(QUICK, failures=1)},
        targets={"site": TargetPolicy(policy="gentle", breaker=structs.replace(QUICK, failures=2))},
    )
    d.submit("a")
    d.fail("a")
    assert d.state() == "closed"
    d.submit("b", policy="gentle")
    d.fail("b")
    assert d.state() == "open"


# -- commands of people -----------------------------------------------------------------------


def test_a_site_can_be_held_open_and_closed_again(drive: Any) -> None:
    d = drive()
    d.command("open")
    assert d.submit("a") == []
    assert d.why("a") == "breaker of site is held open"
    d.submit("hasty", on_open="fail")
    assert d.outcomes["hasty"].failure.message == "the breaker of site is held open"
    assert d.wait(86400) == []
    assert d.command("close") == ["a"]
    assert d.reports == [("breaker.forced_open", "site"), ("breaker.closed", "site")]


def test_reset_forgets_how_often_it_opened(drive: Any) -> None:
    d = drive()
    d.shut()
    assert d.submit("a") == []
    assert d.command("reset") == ["a"]
    breaker = d.m.fleet.sites["site"].breaker
    assert (breaker.state, breaker.reopenings, breaker.failures) == ("closed", 0, 0)


def test_disabled_by_hand_it_stays_so_over_a_restart(drive: Any) -> None:
    d = drive()
    d.shut()
    d.command("disable")
    d.restart()
    assert d.state() == "disabled"
    d.command("reset")
    assert d.facts == {}
    d.restart()
    assert "site" not in d.m.fleet.sites


def test_commands_while_a_probe_runs_leave_no_probe_behind(drive: Any) -> None:
    d = drive(size=2)
    d.shut()
    d.submit("a", "b")
    d.wait(10)
    assert d.command("close") == ["b"]
    d.command("open")
    d.succeed("a")
    assert d.state() == "forced-open"
    d.command("close")
    d.fail("b")
    assert d.m.fleet.sites["site"].breaker.probes == 0
    assert d.m.fleet.sites["site"].breaker.failures == 1


# -- over a restart ---------------------------------------------------------------------------


def test_an_open_breaker_is_open_after_a_restart_for_what_is_left(drive: Any) -> None:
    d = drive()
    d.m.tell(events.ClockRead(WALL_NS + d.m.now_ns))
    d.shut()
    d.submit("a")
    d.wait(4)
    opened_by = d.m.fleet.sites["site"].breaker.failures
    assert opened_by == d.m.policy.breaker.failures
    d.restart(seconds_down=3)
    assert d.state() == "open"
    assert d.m.fleet.sites["site"].breaker.failures == opened_by, "it still says why"
    assert d.wait(2.9) == []
    assert d.wait(0.2) == ["a"]
    d.fail("a")
    assert d.m.fleet.sites["site"].breaker.reopenings == 2, "it knows how often"


def test_an_open_time_that_is_over_after_a_restart_is_no_reason_to_fail(drive: Any) -> None:
    d = drive()
    d.m.tell(events.ClockRead(WALL_NS + d.m.now_ns))
    d.shut()
    d.submit("hasty", on_open="fail", delay_ns=30 * SECOND_NS)
    d.restart(seconds_down=60)
    assert "hasty" in d.leases
    assert d.state() == "half-open"


def test_a_clock_that_was_set_back_does_not_extend_the_open_time(drive: Any) -> None:
    d = drive()
    d.m.tell(events.ClockRead(WALL_NS + d.m.now_ns + 3600 * SECOND_NS))
    d.shut()
    d.submit("a")
    d.restart()
    assert d.wait(10) == ["a"]


def test_without_a_clock_it_stays_open_as_long_as_when_it_was_saved(drive: Any) -> None:
    d = drive()
    d.shut()
    d.submit("a")
    d.restart(seconds_down=60, wall=False)
    assert d.wait(9.9) == []
    assert d.wait(0.2) == ["a"]


def test_a_half_open_breaker_probes_anew_after_a_restart(drive: Any) -> None:
    d = drive()
    d.shut()
    d.submit("a", "b")
    d.wait(10)
    assert d.state() == "half-open"
    d.restart()
    assert [name for name in ("a", "b") if name in d.leases] == ["a"]
    assert d.state() == "half-open"


def test_a_closed_breaker_leaves_no_fact(drive: Any) -> None:
    d = drive()
    d.shut()
    assert list(d.facts) == ["site"]
    d.submit("a", "b")
    d.wait(10)
    d.succeed("a")
    d.succeed("b")
    assert d.facts == {}


def test_a_breaker_that_is_switched_off_meanwhile_is_off(drive: Any) -> None:
    d = drive()
    d.shut()
    d.submit("a")
    d.m.policy = structs.replace(d.m.policy, breaker=BreakerPolicy(enabled=False))
    d.restart()
    assert "a" in d.leases


# -- the registry -----------------------------------------------------------------------------


@pytest.fixture
def few_sites(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(gatekeeper, "SITES_MAX", 10)
    return 10


@pytest.mark.parametrize("enabled", [True, False])
def test_sites_nothing_is_known_about_are_forgotten(
    drive: Any, few_sites: int, enabled: bool
) -> None:
    d = drive(breaker=BreakerPolicy(enabled=enabled))
    for number in range(100):
        d.submit(f"t{number}", target=f"site{number}")
        d.succeed(f"t{number}")
        assert len(d.m.fleet.sites) <= few_sites


def test_sites_that_failed_are_kept_as_long_as_there_is_room(drive: Any, few_sites: int) -> None:
    d = drive(breaker=FRAGILE)
    d.command("open", "held")
    for number in range(100):
        d.submit(f"t{number}", target=f"site{number}")
        d.fail(f"t{number}")
        assert len(d.m.fleet.sites) <= few_sites
    assert d.state("held") == "forced-open"
    assert d.state("site99") == "open"
    assert set(d.facts) == set(d.m.fleet.sites), "the store forgets them as well"


def test_sites_in_use_are_never_forgotten(drive: Any, few_sites: int) -> None:
    d = drive(size=1)
    d.submit(*[f"t{number}" for number in range(5)], target="busy")
    for number in range(100):
        d.submit(f"u{number}", target=f"site{number}")
    assert len(d.m.fleet.sites) == 101
    d.m.fleet.validate()


def test_a_retry_finds_its_site_though_that_was_forgotten(drive: Any, few_sites: int) -> None:
    """A retry once made a second site of that name, with places of its own."""
    one = {"site": TargetPolicy(max_concurrent=1, breaker=BreakerPolicy(enabled=False))}
    d = drive(size=3, max_retries=3, targets=one)
    d.submit("a")
    d.fail("a")
    for number in range(20):
        d.command("open", f"site{number}")
    assert "site" not in d.m.fleet.sites
    assert d.submit("b") == ["b"]
    assert d.wait(1) == []
    assert d.why("a") == "bulkhead site 1/1"


def test_a_rate_is_not_forgotten_while_it_matters(drive: Any, few_sites: int) -> None:
    d = drive(size=3, targets={"site": TargetPolicy(rate=0.1)})
    d.submit("a")
    d.succeed("a")
    for number in range(9):
        d.submit(f"t{number}", target=f"site{number}")
        d.succeed(f"t{number}")
    d.submit("more", target="more")
    assert d.submit("b") == []


def test_the_states_are_named_as_on_disk() -> None:
    assert [str(state) for state in BreakerState] == [
        "closed",
        "open",
        "half-open",
        "forced-open",
        "disabled",
    ]
