"""Retries of a site are a share of its traffic, whatever becomes of the attempts."""

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.ipc.wire.messages import HIGH, LOW, Outcome, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.ledger import UNPAID
from musterd.supervisor.core.model.policy import TargetPolicy
from musterd.supervisor.core.tasks.gatekeeper import BUDGET
from musterd.supervisor.views.fleet import live_view
from support.core import Muster

NO_BREAKER = BreakerPolicy(enabled=False)
LONGEST_SECONDS = 60  # the longest pause in the shared driver


class Site:
    """A fleet with one site that has `reserve` retries saved, earns `share` of a retry with each
    task, and one retry `every` so many seconds."""

    def __init__(
        self,
        muster: type[Muster],
        *,
        share: float | None,
        reserve: float,
        retries: int,
        size: int = 30,
        every: float = 0.0,
    ) -> None:
        self.m = m = muster(size, max_retries=retries)
        policy = TargetPolicy(
            retry_share=share,
            retry_reserve=reserve,
            retry_every_ns=round(every * SECOND_NS),
            breaker=NO_BREAKER,
        )
        m.policy = structs.replace(m.policy, target=policy)
        m.fleet = Fleet(m.policy, Random(1))
        self.leases: dict[str, tuple[int, int]] = {}  # worker and lease of each running task
        self.began: list[tuple[str, int]] = []  # all attempts, in order
        self.firsts: set[tuple[int, str]] = set()  # life of the daemon, task
        self.lives = 1
        self.ended: dict[str, Outcome] = {}
        self.facts: dict[tuple[str, str], bytes] = {}
        self.note(m.start())

    def note(self, answer: list[Any]) -> list[tuple[str, int]]:
        """Note the actions; return the attempts that began."""
        before = len(self.began)
        for each in answer:
            match each:
                case actions.AssignLeases():
                    for lease in each.leases:
                        self.leases[lease.id] = (each.worker, lease.lease)
                        self.began.append((lease.id, lease.attempt))
                        if lease.attempt == 1:
                            self.firsts.add((self.lives, lease.id))
                case actions.Deliver():
                    self.ended.update({outcome.id: outcome for outcome in each.outcomes})
                case actions.Persist():
                    for fact in each.facts:
                        self.facts.pop((fact.kind, fact.key), None)
                        if fact.value is not None:
                            self.facts[fact.kind, fact.key] = fact.value
                    for final in each.finished:
                        self.ended[final.spec.id] = final.outcome
        return self.began[before:]

    def submit(self, *names: str, **fields: Any) -> list[tuple[str, int]]:
        fields.setdefault("target", "site")
        return self.note(self.m.submit(*[TaskSpec(name, "p.x", b"", **fields) for name in names]))

    def fail(self, *names: str) -> None:
        for name in names:
            worker, lease = self.leases.pop(name)
            self.note(self.m.fail(worker, lease, message=f"{name} is bad"))

    def succeed(self, *names: str) -> list[tuple[str, int]]:
        began = []
        for name in names:
            began += self.note(self.m.complete(*self.leases.pop(name)))
        return began

    def wait(self, seconds: float) -> list[tuple[str, int]]:
        return self.note(self.m.wait(int(seconds * SECOND_NS)))

    def why(self, name: str) -> str:
        return live_view(self.m.fleet.tasks[name], self.m.now_ns).waits_for

    def restart(self) -> None:
        m = self.m
        left = []
        for task in m.fleet.tasks.values():
            lost = bool(task.lease) and not task.begun_recorded  # its beginning is not on disk
            old = events.Recovered(
                *(task.seq, task.spec, 0, 0 if task.lease else task.queued_ns, 0),
                *(task.attempt - lost, task.crashes, 0, task.begun_recorded),
            )
            left.append(old)
        self.lives += 1
        m.fleet = Fleet(m.policy, Random(2), last_seq=10_000)
        self.leases.clear()
        for kind in m.fleet.fact_kinds:
            facts = [(key, value) for (of, key), value in self.facts.items() if of == kind]
            self.note(m.tell(events.FactsRecovered(kind, facts)))
        self.note(m.tell(events.TasksRecovered(left)))
        self.note(m.start())


@pytest.fixture
def site(muster: type[Muster]) -> Any:
    def make(
        share: float | None = 0.5, reserve: float = 2.0, retries: int = 1, **more: Any
    ) -> Site:
        return Site(muster, share=share, reserve=reserve, retries=retries, **more)

    return make


def names(count: int, prefix: str = "t") -> list[str]:
    return [f"{prefix}{number:02}" for number in range(count)]


def test_retries_beyond_the_share_wait_until_first_attempts_have_earned_them(site: Any) -> None:
    s = site()
    s.submit(*names(5))
    s.fail(*names(5))
    assert s.wait(2) == [("t00", 2), ("t01", 2)], "what was saved"
    assert s.why("t02") == "the retry budget of site"
    assert s.submit("a") == [("a", 1)]
    assert s.submit("b") == [("b", 1), ("t02", 2)], "two first attempts earn one"
    assert s.submit("c", "d", "e", "f") == [
        *[("c", 1), ("d", 1), ("e", 1), ("f", 1)],
        *[("t03", 2), ("t04", 2)],
    ]


def test_a_retry_that_was_earned_still_waits_for_its_pause(site: Any) -> None:
    s = site(reserve=0.0)
    s.submit("t")
    s.fail("t")
    s.submit("a")
    assert s.why("t") == "next attempt in 1.0 s"
    assert s.wait(1) == [("t", 2)]


def test_the_most_urgent_is_paid_for_first(site: Any) -> None:
    s = site(share=1.0, reserve=0.0)
    s.submit("low", priority=LOW)
    s.submit("high", priority=HIGH)
    s.m.fleet.sites["site"].budget.restore(0)
    s.fail("low", "high")
    assert s.submit("a") == [("a", 1)]
    assert s.wait(1) == [("high", 2)]


def test_without_traffic_it_fails_with_its_last_error_in_the_time_of_its_retries(
    site: Any,
) -> None:
    s = site(reserve=0.0, retries=3)
    s.submit("t")
    s.fail("t")
    s.wait(3 * LONGEST_SECONDS)
    assert "t" not in s.ended
    s.wait(1)
    outcome = s.ended["t"]
    assert (outcome.state, outcome.attempts) == ("failed", 1)
    assert outcome.failure.message == (
        "t is bad (not tried again: the retry budget of site is used up)"
    )
    assert s.facts == {}
    assert s.m.fleet.pools["p"].waiting == 0


def test_time_earns_retries_for_a_site_that_is_rarely_asked(site: Any) -> None:
    s = site(share=0.1, reserve=0.0, retries=3, every=10)
    s.submit(*names(3))
    s.fail(*names(3))
    began = [(second, each) for second in range(1, 31) for each in s.wait(1)]
    assert [each for _, each in began] == [("t00", 2), ("t01", 2), ("t02", 2)]
    assert [second for second, _ in began] == [7, 17, 27], "three first attempts earned 0.3 of it"
    s.fail("t00")
    s.restart()
    assert s.why("t00") == "the retry budget of site"
    assert s.wait(10) == [("t00", 3)], "the clock begins anew with the daemon"


def test_time_saves_up_no_more_than_the_reserve(site: Any) -> None:
    s = site(share=0.1, reserve=2.0, retries=1, every=10)
    s.wait(3600)
    s.submit(*names(5))
    s.fail(*names(5))
    assert len(s.wait(2)) == 2


def test_a_share_of_nothing_earns_nothing_with_time(site: Any) -> None:
    s = site(share=0.0, reserve=0.0, retries=1, every=10)
    s.submit("t")
    s.fail("t")
    assert s.wait(LONGEST_SECONDS - 1) == []


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_what_waits_for_the_budget_can_be_cancelled_and_expires(site: Any, how: str) -> None:
    s = site(reserve=0.0)
    s.submit("t", expires_ns=30 * SECOND_NS)
    s.fail("t")
    if how == "cancelled":
        s.note(s.m.tell(events.CancelRequested(["t"])))
    else:
        s.wait(30)
    assert s.ended["t"].state == how
    assert s.facts == {}
    assert s.submit("a", "b") == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("how", ["its worker died", "it was recalled", "it was interrupted"])
def test_a_first_attempt_that_begins_anew_earns_nothing_more(site: Any, how: str) -> None:
    s = site(share=0.5, reserve=0.0, size=3)
    s.submit("t")
    worker, lease = s.leases["t"]
    if how == "its worker died":
        s.note(s.m.exit(worker, lease))
    elif how == "it was recalled":
        s.note(s.m.tell(events.LeasesReturned(worker, [lease])))
    else:
        s.note(s.m.fail(worker, lease, "cancel"))
    assert s.began == [("t", 1), ("t", 1)]
    assert s.m.fleet.sites["site"].budget.units == 500_000


def test_a_retry_whose_worker_died_is_not_paid_for_twice(site: Any) -> None:
    s = site(reserve=1.0)
    s.submit("t")
    s.fail("t")
    assert s.wait(1) == [("t", 2)]
    s.note(s.m.exit(*s.leases["t"]))
    assert s.began[-1] == ("t", 2)
    assert s.m.fleet.sites["site"].budget.units == 0


def test_the_budget_survives_a_restart(site: Any) -> None:
    s = site(retries=9)
    s.submit(*names(4))
    s.fail(*names(4))
    assert sorted(key for key in s.facts) == [(BUDGET, "site"), (UNPAID, "t02"), (UNPAID, "t03")]
    s.restart()
    assert s.wait(2) == [("t00", 2), ("t01", 2)], "those have paid"
    assert s.why("t02") == "the retry budget of site"
    assert s.submit("a", "b") == [("a", 1), ("b", 1), ("t02", 2)]
    s.succeed("a", "b", "t00", "t01", "t02")
    s.restart()
    s.wait(600)
    outcome = s.ended["t03"]
    assert outcome.failure.message.startswith("its errors are with its failed attempts (not tried")


def test_a_budget_that_is_full_again_is_not_kept(site: Any) -> None:
    s = site(reserve=1.0)
    s.submit("t")
    s.fail("t")
    assert list(s.facts) == [(BUDGET, "site")]
    s.submit("a")
    assert list(s.facts) == [(BUDGET, "site")]
    s.submit("b")
    assert s.facts == {}


def test_tasks_without_a_target_and_sites_without_a_share_have_no_budget(site: Any) -> None:
    for s in (site(reserve=0.0), site(share=None)):
        target = "" if s.m.policy.target.retry_share is not None else "site"
        s.submit(*names(20), target=target)
        s.fail(*names(20))
        assert len(s.wait(2)) == 20
        assert s.facts == {}


# The fixture is a class, which all examples may share.
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.sampled_from(("submit", "fail", "succeed", "die", "wait", "restart")), max_size=60
    ),
    share=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
    reserve=st.sampled_from((0.0, 1.0, 3.0)),
    choose=st.randoms(use_true_random=False),
)
def test_over_time_retries_are_never_more_than_the_share(
    muster: type[Muster], steps: list[str], share: float, reserve: float, choose: Any
) -> None:
    s = Site(muster, share=share, reserve=reserve, retries=3, size=3)
    submitted = 0
    for step in steps:
        running = sorted(s.leases)
        if step == "submit":
            submitted += 1
            s.submit(f"t{submitted}")
        elif step == "wait":
            s.wait(choose.choice((0.5, 3, 100)))
        elif step == "restart":
            s.restart()
        elif running:
            name = choose.choice(running)
            if step == "fail":
                s.fail(name)
            elif step == "succeed":
                s.succeed(name)
            else:
                s.note(s.m.exit(*s.leases.pop(name)))
        retries = {each for each in s.began if each[1] > 1}
        assert len(retries) <= reserve + share * len(s.firsts) + 1e-6, s.began
