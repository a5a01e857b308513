"""How many slots run: the size that was asked for, and the limit that memory sets."""

from typing import Any

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import CRITICAL, HIGH, LOW, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.workers.sizing import HELD_BACK
from support.core import Muster, of

ALL = (("p", -1),)


def stopped(answer: list[Any]) -> list[int]:
    return [each.worker for each in of(actions.StopWorker, answer)]


def spawned(answer: list[Any]) -> list[int]:
    return [each.index for each in of(actions.SpawnWorker, answer)]


def states(m: Any) -> list[str]:
    return [slot.state.value for slot in m.slots]


def limit(m: Any, number: int | None) -> list[Any]:
    """Let memory allow so many workers; keep the size."""
    pool = m.fleet.pools["p"]
    pool.limit = number
    return m.tell(events.ScaleRequested("p", pool.size))


def up(m: Any, answer: list[Any]) -> None:
    for each in of(actions.SpawnWorker, answer):
        m.bring_up(each.worker)


def test_the_target_is_the_smaller_of_size_and_limit(muster: type[Muster]) -> None:
    pool = muster(size=4).fleet.pools["p"]
    assert pool.target == 4
    pool.limit = 2
    assert (pool.size, pool.target) == (4, 2)
    pool.limit = 9
    assert pool.target == 4


def test_slots_beyond_the_limit_are_held_and_come_back(muster: type[Muster]) -> None:
    m = muster(size=3)
    m.start()
    assert stopped(limit(m, 1)) == [3, 2], "idle ones: the highest first"
    m.exit(2, code=0)
    m.exit(3, code=0)
    assert states(m) == ["RUNNING", "STOPPED", "STOPPED"]
    assert [slot.reason for slot in m.slots] == ["", HELD_BACK, HELD_BACK]
    assert spawned(limit(m, 2)) == [1]
    assert m.slots[1].reason == ""
    assert spawned(limit(m, None)) == [2]


def test_who_does_nothing_gives_way_before_who_works(muster: type[Muster]) -> None:
    m = muster(size=3)
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    busy = next(slot.worker for slot in m.slots if slot.leases)
    assert set(stopped(limit(m, 1))) == {1, 2, 3} - {busy}


def test_the_least_urgent_and_then_the_youngest_work_gives_way(muster: type[Muster]) -> None:
    m = muster(size=4)
    m.start()
    order = []
    for name, priority in (("a", LOW), ("b", CRITICAL), ("c", LOW), ("d", HIGH)):
        answer = m.submit(TaskSpec(name, "p.x", b"", priority=priority))
        order.append(of(actions.AssignLeases, answer)[0].worker)
        m.wait(SECOND_NS)
    a, b, c, d = order
    assert stopped(limit(m, 3)) == [c], "as unimportant as the first one, and younger"
    assert stopped(limit(m, 2)) == [a]
    assert stopped(limit(m, 1)) == [d]
    assert next(slot for slot in m.slots if slot.worker == b).state == "RUNNING"


def test_a_held_slot_that_still_works_is_started_again_after_its_end(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    assert stopped(limit(m, 0)) == [1]
    assert limit(m, None)[1:] == []
    m.complete(1, 1)
    assert spawned(m.exit(1, code=0)) == [0]


def test_a_crash_of_a_held_slot_starts_nothing(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    assert stopped(limit(m, 1)) == [2]
    assert spawned(m.exit(2)) == []
    assert states(m) == ["RUNNING", "STOPPED"]


def test_a_start_beyond_the_limit_waits_for_memory(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.tell(events.StopRequested((("p", 1),)))
    m.exit(2, code=0)
    assert stopped(limit(m, 1)) == [], "what a person stopped is no burden"
    assert spawned(m.tell(events.StartRequested((("p", 1),)))) == []
    assert m.slots[1].reason == HELD_BACK
    assert spawned(limit(m, 2)) == [1]


def test_who_is_stopped_by_a_person_makes_room_for_one_that_is_held(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    limit(m, 1)
    m.exit(2, code=0)
    answer = m.tell(events.StopRequested((("p", 0),)))
    assert spawned(answer) == [1]
    up(m, answer)
    m.exit(1, code=0)
    assert spawned(limit(m, None)) == [], "it was stopped on purpose"
    assert states(m) == ["STOPPED", "RUNNING"]


def test_a_slot_that_gave_up_makes_room_for_one_that_is_held(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    limit(m, 1)
    m.exit(2, code=0)
    answer: list[Any] = []
    worker = 1
    for _ in range(4):
        answer = m.exit(worker) + m.wait(5 * SECOND_NS)
        worker = 2 + _ + 1
    assert m.slots[0].state == "FATAL"
    assert spawned(answer) == [1]
    up(m, answer)
    assert spawned(m.tell(events.ResetRequested(ALL))) == []
    assert m.slots[0].reason == HELD_BACK, "its place is taken now"


def test_a_restart_keeps_the_limit(muster: type[Muster]) -> None:
    m = muster(size=3)
    m.start()
    limit(m, 1)
    assert stopped(m.tell(events.RestartRequested(ALL))) == [1]
    for worker in (2, 3):
        assert spawned(m.exit(worker, code=0)) == []
    assert spawned(m.exit(1, code=0)) == [0]


def test_a_new_size_below_the_limit_removes_and_above_it_holds(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    limit(m, 2)
    assert spawned(m.tell(events.ScaleRequested("p", 4))) == []
    assert states(m) == ["RUNNING", "RUNNING", "STOPPED", "STOPPED"]
    assert stopped(m.tell(events.ScaleRequested("p", 1))) == [2]
    m.exit(2, code=0)
    assert states(m) == ["RUNNING"]


def test_a_restart_of_what_a_person_stops_keeps_the_limit(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    limit(m, 1)
    m.exit(2, code=0)
    m.submit(TaskSpec("t", "p.x", b""))
    assert spawned(m.tell(events.StopRequested((("p", 0),)))) == [1], "the other one comes back"
    m.tell(events.RestartRequested((("p", 0),)))
    assert m.slots[0].held


def test_a_start_of_a_slot_that_restarts_anyway_changes_nothing(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    limit(m, 1)
    m.tell(events.RestartRequested(ALL))
    m.tell(events.StartRequested(ALL))
    assert spawned(m.exit(1, code=0)) == [0]
