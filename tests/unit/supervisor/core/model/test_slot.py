"""A slot's states and its restart policy."""

from random import Random

import msgspec
import pytest

from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, RetryPolicy
from musterd.supervisor.core.model.policy import PoolPolicy, RestartPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import TRANSITIONS, Slot, SlotState, restart_pause_ns

POLICY = RestartPolicy(
    backoff=BackoffPolicy(base_ns=SECOND_NS, factor=2.0, max_ns=60 * SECOND_NS, jitter=0.0),
    reset_ns=60 * SECOND_NS,
    limit=5,
    pause_after=100,
    window_ns=100 * SECOND_NS,
)


@pytest.fixture
def slot() -> Slot:
    return Slot(Pool(PoolPolicy("p", 0), RetryPolicy()), 3)


def crash(slot: Slot, second: float, *, counts: bool = True) -> float | None:
    pause = slot.after_crash(POLICY, int(second * SECOND_NS), Random(0), counts=counts)
    return None if pause is None else pause / SECOND_NS


def test_only_listed_transitions_are_made(slot: Slot) -> None:
    for state in SlotState:
        for following in SlotState:
            slot.state = state
            if following in TRANSITIONS[state]:
                slot.become(following)
                assert slot.state == following
            else:
                with pytest.raises(AssertionError, match="p/3"):
                    slot.become(following)
                assert slot.state == state


def test_every_state_can_be_left_and_reached() -> None:
    assert set(TRANSITIONS) == set(SlotState)
    assert set().union(*TRANSITIONS.values()) == set(SlotState)
    assert all(TRANSITIONS.values())


def test_a_running_slot_with_a_lease_is_shown_as_busy(slot: Slot) -> None:
    slot.become(SlotState.STARTING)
    slot.become(SlotState.RUNNING)
    assert slot.shown_state == "RUNNING"
    slot.leases[1] = None  # type: ignore[assignment]
    assert slot.shown_state == "BUSY"


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer(slot: Slot) -> None:
    assert [crash(slot, second) for second in range(5)] == [0, 1, 2, 4, 8]


def test_after_enough_failures_in_a_row_the_pause_is_a_long_one(slot: Slot) -> None:
    policy = msgspec.structs.replace(POLICY, pause_after=3, pause_ns=30 * SECOND_NS, limit=100)
    pauses = [slot.after_crash(policy, n, Random(0), counts=True) for n in range(7)]
    assert [(pause or 0) / SECOND_NS for pause in pauses] == [0, 1, 30, 30, 30, 30, 32]


def test_the_long_pause_has_the_jitter_of_the_others(slot: Slot) -> None:
    backoff = msgspec.structs.replace(POLICY.backoff, jitter=0.5)
    policy = msgspec.structs.replace(POLICY, backoff=backoff, pause_after=2, pause_ns=SECOND_NS)
    pauses = [restart_pause_ns(policy, 2, Random(seed)) / SECOND_NS for seed in range(200)]
    assert 0.5 <= min(pauses) < 0.7
    assert 1.3 < max(pauses) <= 1.5


def test_more_crashes_than_the_limit_within_the_window_are_the_end(slot: Slot) -> None:
    for second in range(5):
        assert crash(slot, second) is not None
    assert crash(slot, 5) is None


def test_crashes_that_left_the_window_are_forgotten(slot: Slot) -> None:
    for second in (0, 30, 60, 90):
        assert crash(slot, second) is not None
    for second in (120, 150, 180, 210, 240):
        assert crash(slot, second) is not None


def test_stable_uptime_forgives_earlier_crashes(slot: Slot) -> None:
    for second in range(5):
        crash(slot, second)
    slot.ready_ns = 10 * SECOND_NS
    assert crash(slot, 70) == 0
    slot.ready_ns = 71 * SECOND_NS
    assert crash(slot, 72) == 1


def test_short_uptime_forgives_nothing(slot: Slot) -> None:
    for second in range(5):
        crash(slot, second)
    slot.ready_ns = 10 * SECOND_NS
    assert crash(slot, 69.9) is None


def test_a_crash_that_does_not_count_costs_nothing(slot: Slot) -> None:
    for second in range(50):
        assert crash(slot, second, counts=False) == 0
    assert crash(slot, 51) == 0
    assert slot.failures == 1


def test_forgetting_a_worker_clears_what_belongs_to_it(slot: Slot) -> None:
    slot.worker, slot.pid, slot.ready_ns, slot.killed_lease, slot.deadline_ns = 1, 2, 3, 4, 5
    slot.terminated = slot.recalling = True
    slot.killed_for, slot.idle_looks = "hung", 3
    slot.forget_worker()
    fresh = Slot(slot.pool, slot.index)
    for name in ("worker", "pid", "ready_ns", "terminated", "killed_for", "killed_lease"):
        assert getattr(slot, name) == getattr(fresh, name)
    assert (slot.recalling, slot.deadline_ns, slot.idle_looks) == (False, 0, 0)
    assert not slot.alive


def test_a_worker_with_leases_is_not_forgotten(slot: Slot) -> None:
    slot.leases[1] = None  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        slot.forget_worker()
