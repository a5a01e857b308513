"""Fallbacks of tasks that have failed for good, where they ask for one."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.client.taskspec import make_spec
from musterd.ipc.wire.messages import Outcome, TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy
from support.core import Muster

DEFAULT = b"\x07"


class Driver:
    """A fleet of one worker, driven by the names of its tasks."""

    def __init__(self, muster: type[Muster], *, max_retries: int = 0, **policy: Any) -> None:
        self.m = muster(1, max_retries=max_retries)
        self.m.policy = structs.replace(self.m.policy, **policy)
        self.m.fleet = Fleet(self.m.policy, Random(1))
        self.m.start()
        self.outcomes: dict[str, Outcome] = {}
        self.reports: list[str] = []
        self.leases: dict[str, int] = {}
        self.facts: dict[str, bytes] = {}

    def note(self, answer: list[Any]) -> None:
        for each in answer:
            match each:
                case actions.AssignLeases():
                    self.leases.update({lease.id: lease.lease for lease in each.leases})
                case actions.Report():
                    self.reports.append(f"{each.event} {each.reason}")
                case actions.Deliver():
                    for outcome in each.outcomes:
                        assert outcome.id not in self.outcomes, "exactly one final state"
                        self.outcomes[outcome.id] = outcome

    def submit(self, name: str, **fields: Any) -> None:
        self.note(self.m.submit(TaskSpec(name, "p.x", b"", **fields)))

    def succeed(self, name: str) -> Outcome:
        self.note(self.m.complete(1, self.leases.pop(name)))
        return self.outcomes[name]

    def fail(self, name: str, kind: str = "error") -> Outcome | None:
        lease = self.leases.pop(name)
        self.note(self.m.fail(1, lease, kind, type="Broken", message="no luck"))
        return self.outcomes.get(name)


@pytest.fixture
def drive(muster: type[Muster]) -> Any:
    return lambda **policy: Driver(muster, **policy)


def test_a_task_that_failed_for_good_ends_with_its_last_good_result_and_keeps_its_error(
    drive: Any,
) -> None:
    d = drive()
    d.submit("good", fallback_on="failure")
    d.succeed("good")
    d.submit("bad", fallback_on="failure", fallback=DEFAULT)
    outcome = d.fail("bad")
    assert (outcome.state, outcome.value, outcome.source) == ("succeeded", b"value", "stale")
    assert (outcome.failure.type, outcome.error) == ("Broken", "Broken: no luck")
    assert d.reports[-1] == (
        "task.fallback the task failed and ends with its last good result: Broken: no luck"
    )
    counters = d.m.fleet.pools["p"].counters
    assert (counters.succeeded, counters.failed, counters.fallbacks) == (2, 0, 1)


def test_it_ends_else_with_the_default_and_else_fails(drive: Any) -> None:
    d = drive()
    d.submit("a", fallback_on="failure", fallback=DEFAULT)
    outcome = d.fail("a", "permanent")
    assert (outcome.state, outcome.value, outcome.source) == ("succeeded", DEFAULT, "fallback")
    d.submit("b", fallback_on="failure")
    assert d.fail("b").state == "failed"


def test_retries_come_first(drive: Any) -> None:
    d = drive(max_retries=1)
    d.submit("a", fallback_on="failure", fallback=DEFAULT)
    assert d.fail("a") is None
    d.note(d.m.wait(60 * 10**9))
    assert d.fail("a").source == "fallback"
    assert d.outcomes["a"].attempts == 2


def test_without_asking_a_failed_task_has_failed(drive: Any) -> None:
    d = drive()
    d.submit("good", fallback=DEFAULT)
    d.succeed("good")
    d.submit("a", fallback=DEFAULT)
    d.submit("b", fallback=DEFAULT, fallback_on="open")
    assert d.fail("a").state == "failed"
    assert d.fail("b").state == "failed"


def test_arguments_that_do_not_fit_are_not_hidden(drive: Any) -> None:
    d = drive()
    d.submit("a", fallback_on="failure", fallback=DEFAULT)
    assert d.fail("a", "invalid").state == "failed"


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_what_was_not_wanted_any_more_does_not_fall_back(drive: Any, how: str) -> None:
    d = drive()
    d.submit("first")
    expires_ns = 10**9 if how == "expired" else 0
    d.submit("a", fallback_on="failure", fallback=DEFAULT, expires_ns=expires_ns)
    if how == "expired":
        d.note(d.m.wait(2 * 10**9))
    else:
        d.note(d.m.tell(events.CancelRequested(["a"])))
    assert (d.outcomes["a"].state, d.outcomes["a"].value) == (how, b"")


def test_a_task_that_kills_its_workers_falls_back_and_is_told_of(drive: Any) -> None:
    d = drive()
    d.submit("a", fallback_on="failure", fallback=DEFAULT)
    worker = 1
    while "a" not in d.outcomes:
        answer = d.m.exit(worker, d.leases.pop("a"))
        while not (spawned := [each for each in answer if isinstance(each, actions.SpawnWorker)]):
            answer += d.m.wait(10**9)
        worker = spawned[-1].worker
        d.note(answer + d.m.bring_up(worker))
    assert d.outcomes["a"].source == "fallback"
    assert d.outcomes["a"].failure.type == "PoisonTask"
    assert any(report.startswith("task.quarantined") for report in d.reports)


# -- who asks for it, and which setting wins --------------------------------------------------


def test_the_submit_wins_over_the_task_the_target_and_the_class(drive: Any) -> None:
    classes = {"soft": GatePolicy("soft", fallback_on="failure")}
    targets = {
        "soft": TargetPolicy(policy="soft"),
        "hard": TargetPolicy(policy="soft", fallback_on="open"),
        "own": TargetPolicy(fallback_on="failure"),
    }
    d = drive(classes=classes, targets=targets)

    def ends(name: str, **fields: Any) -> str:
        d.submit(name, fallback=DEFAULT, **fields)
        state: str = d.fail(name).state
        return state

    assert ends("by-class", policy="soft") == "succeeded"
    assert ends("by-class-of-target", target="soft") == "succeeded"
    assert ends("target-over-class", target="hard") == "failed"
    assert ends("by-target", target="own") == "succeeded"
    assert ends("submit-over-target", target="own", fallback_on="open") == "failed"
    d.m.fleet.pools["p"].declare((TaskDeclaration("x", fallback_on="open"),))
    assert ends("task-over-target", target="own") == "failed"
    assert ends("submit-over-task", fallback_on="failure") == "succeeded"
    d.m.fleet.pools["p"].declare((TaskDeclaration("x", fallback_on="failure"),))
    assert ends("by-task") == "succeeded"


def test_a_task_that_declares_it_is_remembered_without_any_other_word(drive: Any) -> None:
    d = drive()
    d.m.fleet.pools["p"].declare((TaskDeclaration("x", fallback_on="failure"),))
    d.submit("good")
    d.succeed("good")
    d.submit("bad")
    assert d.fail("bad").source == "stale"


def test_a_word_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="fallback_on must be one of 'open', 'failure', not 'ever'"
    ):
        make_spec("p.x", fallback_on="ever")


# -- tasks that share a key -------------------------------------------------------------------


def test_those_that_joined_fall_back_for_themselves(drive: Any) -> None:
    d = drive()
    d.submit("leads", key="k", fallback_on="failure", fallback=DEFAULT)
    d.submit("plain", key="k")
    d.submit("own", key="k", fallback_on="failure", fallback=b"\x08")
    d.fail("leads")
    found = {name: (each.state, each.value, each.cached) for name, each in d.outcomes.items()}
    assert found == {
        "leads": ("succeeded", DEFAULT, False),
        "plain": ("failed", b"", True),
        "own": ("succeeded", b"\x08", True),
    }


def test_a_stand_in_is_no_result_to_be_remembered(drive: Any) -> None:
    d = drive()
    d.submit("bad", key="k", fallback_on="failure", fallback=DEFAULT)
    d.fail("bad")
    d.submit("cached", key="k", cache_ns=10**12)
    assert "cached" in d.leases, "it has to run"
    d.fail("cached")
    d.submit("debounced", key="k", debounce_ns=10**12, fallback_on="failure", fallback=b"\x09")
    outcome = d.outcomes["debounced"]
    assert (outcome.state, outcome.value, outcome.cached) == ("succeeded", b"\x09", True)
