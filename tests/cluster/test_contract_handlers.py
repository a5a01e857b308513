"""The contract of engines: what running handlers share. States, locks, progress."""

import pytest
from rig import Rig

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.cluster.engine import (
    Fenced,
    Grant,
)
from musterd.supervisor.cluster.handling import (
    LockAsk,
    LockView,
    ProgressMark,
    StateAsk,
    StateView,
)

WAITER = 5
FREE = LockView(False)

# -- states -------------------------------------------------------------------------------------


def load(grant: Grant, key: str) -> StateAsk:
    return StateAsk(grant.id, grant.claim, key)


def save(grant: Grant, key: str, value: bytes | None, ttl_ns: int = 0) -> StateAsk:
    return StateAsk(grant.id, grant.claim, key, True, value, ttl_ns)


def running(rig: Rig, tenure: int) -> Grant:
    rig.submit(rig.task())
    return rig.claim_one(tenure)


def test_state_is_kept_until_its_time_is_over(rig: Rig) -> None:
    assert rig.engine.state_load("x") is None
    rig.engine.state_save("x", b"one")
    rig.engine.state_save("y", b"two", ttl_ns=10 * SECOND_NS)
    rig.engine.state_save("x", b"three")
    assert (rig.engine.state_load("x"), rig.engine.state_load("y")) == (b"three", b"two")
    rig.pass_time(11)
    assert rig.engine.state_load("y") is None
    rig.engine.state_save("x", None)
    assert rig.engine.state_load("x") is None


def test_a_success_clears_the_state_it_names(rig: Rig) -> None:
    a = rig.join()
    rig.submit(*rig.tasks(2))
    first, second = rig.claim(a, 2)
    rig.engine.state_save("x", b"one")
    rig.finish(a, first, kind="failed", clears="x")
    assert rig.engine.state_load("x") == b"one"
    rig.finish(a, second, clears="x")
    assert rig.engine.state_load("x") is None


def test_states_of_one_call_are_as_if_one_after_the_other(rig: Rig) -> None:
    a = rig.join()
    grant = running(rig, a)
    asks = [
        load(grant, "x"),
        save(grant, "x", b"one"),
        save(grant, "a", b"two", 10 * SECOND_NS),
        load(grant, "x"),
        save(grant, "x", None),
        load(grant, "x"),
    ]
    values = [None, None, None, b"one", None, None]
    assert rig.engine.states(a, asks) == [StateView(True, value) for value in values]
    assert rig.engine.states(a, [load(grant, "a")]) == [StateView(True, b"two")]
    rig.pass_time(11)
    assert rig.engine.states(a, [load(grant, "a")]) == [StateView(True, None)]


def test_the_next_attempt_on_another_node_finds_the_state(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    first = running(rig, a)
    rig.engine.states(a, [save(first, "x", b"half")])
    rig.finish(a, first, kind="interrupted")
    second = rig.claim_one(b)
    assert rig.engine.states(b, [load(second, "x")]) == [StateView(True, b"half")]


def test_an_attempt_that_its_node_has_lost_saves_nothing(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    first = running(rig, a)
    rig.finish(a, first, kind="interrupted")
    second = rig.claim_one(b)
    assert second.id == first.id
    rig.engine.states(b, [save(second, "x", b"of the second")])
    late = [save(first, "x", b"too late"), save(first, "x", None)]
    assert rig.engine.states(a, late) == [StateView(held=False)] * 2
    assert rig.engine.states(b, [save(first, "x", b"of another claim")]) == [StateView(held=False)]
    assert rig.engine.state_load("x") == b"of the second"


def test_a_node_whose_tenure_is_over_has_no_states_and_no_locks(rig: Rig) -> None:
    a = rig.join()
    grant = running(rig, a)
    rig.engine.leave(a)
    with pytest.raises(Fenced):
        rig.engine.states(a, [load(grant, "x")])
    with pytest.raises(Fenced):
        rig.engine.locks(a, [LockAsk("l", 1, "want")])


def test_a_claim_that_a_crash_forgot_saves_again_when_it_is_registered(rig: Rig) -> None:
    a = rig.join()
    grant = running(rig, a)
    rig.restart([grant.id])
    ask = [save(grant, "x", b"one")]
    assert rig.engine.states(a, ask) == [StateView(held=False)]
    assert rig.engine.rejoin(a, [grant]) == []  # type: ignore[list-item]
    assert rig.engine.states(a, ask) == [StateView()]
    assert rig.engine.state_load("x") == b"one"


# -- locks --------------------------------------------------------------------------------------


def lock(rig: Rig, tenure: int, kind: str, name: str = "l") -> LockView:
    """Ask as the only holder of a node: its token is its tenure."""
    [view] = rig.engine.locks(tenure, [LockAsk(name, tenure, kind, f"n{tenure}")])  # type: ignore[arg-type]
    return view


def test_a_lock_has_one_holder_and_the_others_wait_in_order(rig: Rig) -> None:
    a, b, c = rig.join("a"), rig.join("b"), rig.join("c")
    assert lock(rig, a, "want") == LockView(True, f"n{a}")
    assert lock(rig, b, "want") == LockView(False, f"n{a}")
    assert lock(rig, c, "want") == LockView(False, f"n{a}")
    assert lock(rig, a, "want").taken  # asked again: an answer was lost
    assert lock(rig, b, "leave") == LockView(False, f"n{a}")
    assert lock(rig, b, "want") == LockView(False, f"n{a}")
    assert lock(rig, a, "leave") == LockView(False, f"n{c}")
    assert lock(rig, a, "leave") == LockView(False, f"n{c}")
    assert not lock(rig, b, "want").taken
    assert lock(rig, c, "want").taken
    lock(rig, c, "leave")
    assert lock(rig, b, "want").taken
    assert lock(rig, b, "leave") == FREE


def test_a_lock_passes_to_those_who_wait_and_stays_if_nobody_does(rig: Rig) -> None:
    a, b, c = rig.join("a"), rig.join("b"), rig.join("c")
    lock(rig, a, "want")
    assert lock(rig, a, "pass").taken
    lock(rig, b, "want")
    assert lock(rig, a, "pass") == LockView(False, f"n{b}")
    lock(rig, c, "want")
    assert not lock(rig, a, "pass").taken  # asked again: it keeps its place
    lock(rig, b, "leave")
    assert lock(rig, a, "want").taken
    assert lock(rig, a, "pass") == LockView(False, f"n{c}")
    assert lock(rig, b, "pass") == LockView(False, f"n{c}")  # as one who wants it
    lock(rig, c, "leave")
    assert lock(rig, a, "want").taken


def test_several_locks_of_one_call(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    lock(rig, b, "want", "second")
    asks = [
        LockAsk("first", 1, "want", "me"),
        LockAsk("second", 1, "want", "me"),
        LockAsk("first", 1, "leave"),
    ]
    assert rig.engine.locks(a, asks) == [LockView(True, "me"), LockView(False, f"n{b}"), FREE]
    assert rig.engine.locks(a, []) == []


@pytest.mark.parametrize("how", ["reaped", "left", "joined again", "forgotten"])
def test_a_lock_ends_with_the_tenure_of_its_node_and_not_before(rig: Rig, how: str) -> None:
    a = rig.join("a", lease=10)
    lock(rig, a, "want")
    rig.pass_time(8)
    b = rig.join("b", lease=1000)
    assert not lock(rig, b, "want").taken
    if how == "reaped":
        rig.engine.beat(a)
        rig.pass_time(8)
        rig.engine.reap()
        assert not lock(rig, b, "want").taken
        rig.pass_time(8)
        assert not lock(rig, b, "want").taken  # until somebody has reaped it
        assert [each.tenure for each in rig.engine.reap()] == [a]
    elif how == "left":
        rig.engine.leave(a)
    elif how == "joined again":
        rig.join("a")
    else:
        rig.engine.forget("a")
    assert lock(rig, b, "want").taken


def test_a_node_that_is_gone_does_not_wait_for_a_lock(rig: Rig) -> None:
    a, b, c = rig.join("a"), rig.join("b"), rig.join("c")
    for tenure in (a, b, c):
        lock(rig, tenure, "want")
    rig.engine.leave(b)
    lock(rig, a, "leave")
    assert lock(rig, c, "want").taken


def test_a_restart_of_the_server_forgets_no_lock(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    lock(rig, a, "want")
    rig.restart([])
    assert not lock(rig, b, "want").taken
    assert lock(rig, a, "want").taken


# -- progress -------------------------------------------------------------------------------------


def test_progress_is_seen_and_at_most_once_a_second(rig: Rig) -> None:
    a, b = rig.join("a"), rig.join("b")
    first, joined = rig.submit(*rig.tasks(2, key="k"))
    rig.claim_one(a)
    assert rig.engine.progress(b, [ProgressMark(first, 0.1, "not mine")]) == []
    assert rig.view(first).progress == 0.0
    assert rig.engine.progress(a, [ProgressMark(first, 0.25, "a quarter")]) == []
    assert rig.engine.progress(a, [ProgressMark(first, 0.5, "half")]) == [first]  # too early
    assert (rig.view(first).progress, rig.view(first).progress_text) == (0.25, "a quarter")
    assert rig.view(joined).progress == 0.25
    rig.pass_time(1.5)
    rig.engine.progress(a, [ProgressMark(first, 0.75, "")])
    assert rig.view(first).progress == 0.75


def test_who_waits_is_told_of_fresh_progress_also_of_what_was_joined(rig: Rig) -> None:
    a = rig.join()
    [first] = rig.submit(rig.task(key="k"), waiter=WAITER)
    [joined] = rig.submit(rig.task(key="k"), waiter=WAITER + 1)
    [other] = rig.submit(rig.task(), waiter=WAITER)
    rig.claim(a, 2)
    assert rig.engine.marks(WAITER, 10 * SECOND_NS) == []
    rig.engine.progress(a, [ProgressMark(first, 0.25, "a quarter")])
    rig.pass_time(5)
    rig.engine.progress(a, [ProgressMark(other, 0.5, "half")])
    assert sorted(rig.engine.marks(WAITER, 10 * SECOND_NS), key=lambda each: each.fraction) == [
        ProgressMark(first, 0.25, "a quarter"),
        ProgressMark(other, 0.5, "half"),
    ]
    assert rig.engine.marks(WAITER, 3 * SECOND_NS) == [ProgressMark(other, 0.5, "half")]
    assert rig.engine.marks(WAITER + 1, 10 * SECOND_NS) == [ProgressMark(joined, 0.25, "a quarter")]
    assert rig.engine.marks(0, 10 * SECOND_NS) == []


def test_who_looks_at_tasks_that_are_alive_is_told_how_far_they_are(rig: Rig) -> None:
    a = rig.join()
    first, silent = rig.submit(*rig.tasks(2))
    [led] = rig.submit(rig.task(key="k"))
    grants = rig.claim(a, 3)
    rig.engine.progress(a, [ProgressMark(first, 0.25, ""), ProgressMark(led, 0.5, "half")])
    [joined] = rig.submit(rig.task(key="k"))
    found = rig.engine.fetch([first, silent, led, joined, "absent"], -1)
    assert found.marks == (
        ProgressMark(first, 0.25, ""),
        ProgressMark(led, 0.5, "half"),
        ProgressMark(joined, 0.5, "half"),
    )
    rig.finish(a, *grants)
    assert rig.engine.fetch([first, joined], 1000).marks == ()
