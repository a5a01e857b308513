"""Whether the fleet is well, as `musterctl top` and the dashboard say."""

import pytest

from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import BreakerStatus, FleetStatus, WorkerStatus
from musterd.supervisor.api.verdict import Reason, unreachable, verdict
from support.statuses import fleet, pool


def test_a_fleet_that_has_all_its_workers_is_well() -> None:
    found = verdict(fleet(pool("RUNNING", "BUSY")), None, [])
    assert (found.level, found.text, found.reasons) == ("ok", "Running normally", [])


def test_the_worst_comes_first_and_decides() -> None:
    closed = BreakerStatus(target="a.example", state="closed")
    breakers = [closed, BreakerStatus(target="b.example", state="open")]
    memory = MemoryStatus(enabled=True, level="critical", stage="one", share=0.91, source="system")
    halted = pool("RUNNING", halt="drained")
    found = verdict(fleet(halted), memory, breakers)
    assert found.level == "bad"
    assert [each.level for each in found.reasons] == ["bad", "warning", "warning"]
    assert "91%" in found.reasons[0].text
    assert "jobs is drained" in found.reasons[1].text
    assert found.reasons[2].text == "1 breaker is open: b.example"


@pytest.mark.parametrize(
    ("status", "level", "words"),
    [
        (fleet(pool("RUNNING", "BACKOFF")), "warning", "1 of 2 workers wait"),
        (fleet(pool("RUNNING", "FATAL", state="FATAL")), "bad", "1 of 2 workers gave up"),
        (fleet(pool(state="FATAL", size=2, reason="no module x")), "bad", "cannot run: no module"),
        (fleet(pool("FATAL", "FATAL", state="FATAL", reason="no x")), "bad", "cannot run: no x"),
        (fleet(pool("RUNNING", "STARTING")), "warning", "1 of 2 workers are up (starting)"),
        (fleet(pool("RUNNING"), problem="the disk is full"), "bad", "the disk is full"),
    ],
)
def test_what_is_wrong_is_said(status: FleetStatus, level: str, words: str) -> None:
    found = verdict(status, None, [])
    assert found.level == level
    assert words in found.reasons[0].text


def test_a_fleet_that_starts_or_ends_is_not_called_well() -> None:
    assert verdict(fleet(pool("RUNNING"), state="draining"), None, []).level == "warning"
    assert unreachable("it is stopped").level == "unknown"


def test_a_worker_that_is_paused_alone_is_named_and_a_reason_is_its_own() -> None:
    held = WorkerStatus(name="jobs/0", state="RUNNING", halt="paused")
    lost = WorkerStatus(name="jobs/1", state="BACKOFF", reason="signal 9")
    found = verdict(fleet(pool(size=2, running=1, workers=[held, lost])), None, [])
    assert found.problems == [
        Reason("warning", "jobs: 1 of 2 workers waiting to restart: signal 9"),
        Reason("warning", "paused: jobs/0"),
    ]


def test_the_state_of_the_daemon_itself_is_a_problem_too() -> None:
    found = verdict(fleet(pool("RUNNING"), state="stopping", problem="the disk is full"), None, [])
    assert [each.text for each in found.problems] == [
        "the disk is full",
        "Shutting down: stopping workers",
    ]
