"""`musterctl task ID` shows the policy that the core applies, and where each value is from."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy
from musterd.supervisor.views.policy import applied_policy
from support.core import Muster

DECLARED = TaskDeclaration("d", timeout_ns=15 * SECOND_NS, max_retries=1)


@pytest.fixture
def fleet(muster: type[Muster]) -> Any:
    m = muster()
    m.policy = structs.replace(
        m.policy,
        classes={
            "quick": GatePolicy("quick", timeout_ns=20 * SECOND_NS, max_retries=9, on_open="fail"),
            "plain": GatePolicy("plain"),
        },
        targets={
            "classed": TargetPolicy(policy="quick"),
            "both": TargetPolicy(policy="quick", timeout_ns=10 * SECOND_NS),
            "stern": TargetPolicy(policy="quick", max_retries=4, on_open="fallback"),
        },
    )
    m.fleet = Fleet(m.policy, Random(1))
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", (DECLARED, TaskDeclaration("x"))))
    return m


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "timeout 120 s (pool), 3 retries (default)"),
        (
            {"target": "unknown"},
            "timeout 120 s (pool), 3 retries (default), breaker open: wait (default)",
        ),
        (
            {"target": "classed"},
            "class quick (target), timeout 20 s (class), 9 retries (class), "
            "breaker open: fail (class)",
        ),
        (
            {"target": "both", "on_open": "fallback"},
            "class quick (target), timeout 10 s (target), 9 retries (class), "
            "breaker open: fallback (submit)",
        ),
        (
            {"target": "both", "timeout_ns": 5 * SECOND_NS, "max_retries": 0, "policy": "plain"},
            "class plain (submit), timeout 5 s (submit), 0 retries (submit), "
            "breaker open: wait (default)",
        ),
        (
            {"target": "stern"},
            "class quick (target), timeout 20 s (class), 4 retries (target), "
            "breaker open: fallback (target)",
        ),
        (
            {"name": "p.d", "target": "both"},
            "class quick (target), timeout 15 s (@task), 1 retry (@task), "
            "breaker open: fail (class)",
        ),
        ({"policy": "quick"}, "class quick (submit), timeout 20 s (class), 9 retries (class)"),
    ],
)
def test_each_value_is_named_with_its_origin_and_as_the_core_has_it(
    fleet: Any, fields: dict[str, Any], text: str
) -> None:
    spec = TaskSpec("t", **{"name": "p.x", "args": b"", **fields})
    assert applied_policy(fleet.fleet, spec) == text
    fleet.submit(spec)
    task = fleet.fleet.tasks["t"]
    assert f"timeout {task.timeout_ns / SECOND_NS:g} s" in text
    assert f" {task.max_retries} retr" in text
    if task.gate is not None and spec.target:
        assert f"breaker open: {task.on_open}" in text


def test_a_task_of_a_pool_that_is_gone_has_none(fleet: Any) -> None:
    assert applied_policy(fleet.fleet, TaskSpec("t", "gone.x", b"")) == ""
