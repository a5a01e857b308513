"""Tasks submitted in bulk end up as they would one by one."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import HIGH, LOW, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.tasks import bulk
from support.core import Muster, of

COUNT = 2 * bulk.RUN_MIN


def specs(count: int = COUNT, **fields: Any) -> list[TaskSpec]:
    return [TaskSpec(f"t{number:02}", "p.x", b"args", **fields) for number in range(count)]


@pytest.fixture(params=["together", "one by one"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "one by one":
        monkeypatch.setattr(bulk, "RUN_MIN", 10**6)
    return request.param == "together"


def rejected(answer: list[Any]) -> list[tuple[str, str]]:
    acks = of(actions.Acknowledge, answer)
    return [(each.id, each.code) for ack in acks for each in ack.rejected]


def story(m: Any, answer: list[Any]) -> list[Any]:
    """Complete all leases until none is left; return every action on the way."""
    told = list(answer)
    for _ in range(COUNT + 1):
        leases = [lease.lease for each in of(actions.AssignLeases, answer) for lease in each.leases]
        if not leases:
            return told
        answer = m.complete(1, *leases)
        told += answer
    raise AssertionError("it never ends")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"priority": HIGH},
        {"timeout_ns": SECOND_NS, "max_retries": 2},
        {"fallback": b"\xc0", "on_open": "fallback"},
        {"target": "site"},
        {"key": "k"},
        {"delay_ns": SECOND_NS},
        {"expires_ns": SECOND_NS},
    ],
)
def test_the_same_is_told_as_one_by_one(
    muster: type[Muster], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    stories = []
    for run_min in (1, 10**6):
        monkeypatch.setattr(bulk, "RUN_MIN", run_min)
        m = muster()
        m.start()
        m.learn_tiny()
        stories.append(story(m, m.submit(*specs(**fields)) + m.wait(2 * SECOND_NS)))
        assert m.fleet.pools["p"].live == 0
        assert m.fleet.pools["p"].counters.submitted == COUNT + 1
    assert stories[0] == stories[1]


def test_only_those_that_differ_in_nothing_are_taken_in_one_go(muster: type[Muster]) -> None:
    def event(*tasks: TaskSpec) -> events.TasksSubmitted:
        return events.TasksSubmitted(b"peer", 1, list(tasks), 0)

    assert bulk.alike(event(*specs()))
    assert not bulk.alike(event(*specs(bulk.RUN_MIN - 1)))
    for fields in ({"priority": LOW}, {"key": "k"}, {"target": "s"}, {"policy": "c"}):
        other = TaskSpec("other", "p.x", b"", **fields)
        assert not bulk.alike(event(*specs(), other)), fields
    assert not bulk.alike(event(*specs(), TaskSpec("other", "p.y", b"")))


def test_an_id_that_is_known_or_comes_twice(muster: type[Muster], together: bool) -> None:
    m = muster()
    m.start()
    m.tell(events.PauseRequested((("p", -1),)))
    m.submit(*specs(1))
    assert rejected(m.submit(*specs())) == []  # the same id and body: the same task
    other = TaskSpec("t03", "p.x", b"another body")
    assert rejected(m.submit(*specs(), other)) == [("t03", "InvalidTask")]
    assert len(m.fleet.tasks) == COUNT


def test_a_queue_that_has_no_room_for_all(muster: type[Muster], together: bool) -> None:
    m = muster(queue_size=COUNT)
    m.start()
    m.tell(events.PauseRequested((("p", -1),)))
    refused = rejected(m.submit(*specs(COUNT + 3)))
    assert {code for _, code in refused} == {"QueueFull"}
    assert len(m.fleet.tasks) + len(refused) == COUNT + 3
    assert len(m.fleet.tasks) > COUNT // 2


def test_an_unknown_name_and_a_pool_that_is_drained(muster: type[Muster], together: bool) -> None:
    m = muster()
    m.start()
    unknown = [TaskSpec(f"u{number}", "nowhere.x", b"") for number in range(COUNT)]
    assert {code for _, code in rejected(m.submit(*unknown))} == {"UnknownTask"}
    m.tell(events.DrainRequested((("p", -1),)))
    assert {code for _, code in rejected(m.submit(*specs()))} == {"QueueFull"}
    assert not m.fleet.tasks


def test_those_that_do_not_fit_into_memory_wait_for_the_disk(
    muster: type[Muster], together: bool
) -> None:
    m = muster(resident_tasks=COUNT // 2)
    m.start()
    m.tell(events.PauseRequested((("p", -1),)))
    m.disk_works = False
    m.submit(*specs())
    assert not any(place.written for place in m.fleet.on_disk.values())
    m.commit()
    assert m.fleet.on_disk
    assert all(place.written for place in m.fleet.on_disk.values())
    assert len(m.fleet.tasks) + len(m.fleet.on_disk) == COUNT
