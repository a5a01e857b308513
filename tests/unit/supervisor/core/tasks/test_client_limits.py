"""Which clients are read and which give way, by what they make the supervisor hold."""

from random import Random

import pytest

from musterd.supervisor.core.tasks import client_limits
from musterd.supervisor.core.tasks.client_limits import (
    ALL_BYTES_MAX,
    HALF_MESSAGE_LOOKS,
    MIB,
    OUTBOX_BYTES_MAX,
    PENDING_BYTES_MAX,
    SHARE_BYTES_MAX,
    SHARE_BYTES_MIN,
    SLOW_LOOKS,
    STALLED_LOOKS,
    Holding,
    fits,
    may_speak,
    share,
    who_gives_way,
)

CALM, FULL = 0, ALL_BYTES_MAX + 1


def test_one_with_too_much_under_way_is_not_read_whatever_others_do() -> None:
    assert may_speak(Holding(1, 10 * MIB, 0, PENDING_BYTES_MAX), CALM, 1)
    assert not may_speak(Holding(1, 0, 0, PENDING_BYTES_MAX + 1), CALM, 1)
    assert not may_speak(Holding(1, 0, OUTBOX_BYTES_MAX + 1, 0), CALM, 1)


@pytest.mark.parametrize("what", ["half_read", "unsent", "pending"])
def test_while_all_hold_too_much_those_are_read_that_hold_their_share(what: str) -> None:
    held = {"half_read": 0, "unsent": 0, "pending": 0}
    assert may_speak(Holding(1, **{**held, what: share(100)}), FULL, 100)
    assert not may_speak(Holding(1, **{**held, what: share(100) + 1}), FULL, 100)
    assert may_speak(Holding(1, **{**held, what: share(100) + 1}), ALL_BYTES_MAX, 100)


def test_shares_are_small_where_there_are_thousands() -> None:
    assert share(1) == share(100) == SHARE_BYTES_MAX
    assert share(100_000) == SHARE_BYTES_MIN
    assert SHARE_BYTES_MIN <= share(1000) < SHARE_BYTES_MAX
    assert 4096 * share(4096) <= ALL_BYTES_MAX


def test_a_small_answer_is_always_fetched_and_a_large_one_where_there_is_room() -> None:
    assert fits(SHARE_BYTES_MAX, FULL)
    assert not fits(12 * MIB, FULL)
    assert fits(12 * MIB, ALL_BYTES_MAX - 12 * MIB)


def test_nobody_gives_way_while_there_is_room_but_with_half_a_message_for_a_minute() -> None:
    stalled = Holding(1, 5 * MIB, 5 * MIB, 0, HALF_MESSAGE_LOOKS - 1)
    assert who_gives_way([stalled], 10 * MIB) == []
    late = Holding(2, 1, 0, 0, HALF_MESSAGE_LOOKS)
    unread = Holding(3, 0, MIB, 0, HALF_MESSAGE_LOOKS)
    assert who_gives_way([stalled, late, unread], 11 * MIB) == [late]


def test_those_that_have_not_moved_for_longest_give_way_until_half_is_free() -> None:
    holdings = [Holding(number, 2 * MIB, 0, 0, number % 10) for number in range(60)]
    chosen = who_gives_way(holdings, 120 * MIB)
    assert all(each.looks >= STALLED_LOOKS for each in chosen)
    assert [each.looks for each in chosen] == sorted([each.looks for each in chosen], reverse=True)
    left = 120 * MIB - sum(each.of_the_peer for each in chosen)
    assert ALL_BYTES_MAX // 2 - 2 * MIB < left <= ALL_BYTES_MAX // 2


def test_who_moves_stays_and_so_does_who_waits_for_us() -> None:
    moving = [Holding(number, 2 * MIB, 0, 0, 0) for number in range(60)]
    assert who_gives_way(moving, 120 * MIB) == []
    waiting = [Holding(number, 0, 0, 2 * MIB, 30) for number in range(60)]
    assert who_gives_way(waiting, 120 * MIB) == [], "the store is slow: that is not their fault"


def test_answers_that_nobody_reads_give_way_to_one_who_would() -> None:
    unread = [Holding(number, 0, 12 * MIB, 0, STALLED_LOOKS) for number in range(7)]
    assert who_gives_way(unread, 84 * MIB) == []
    assert len(who_gives_way(unread, 84 * MIB, awaited_bytes=13 * MIB)) == 3


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_held_those_who_give_way_have_stalled_and_are_no_more_than_needed(
    seed: int,
) -> None:
    rng = Random(seed)
    holdings = [
        Holding(
            number, rng.randrange(4 * MIB), rng.randrange(4 * MIB), rng.randrange(MIB),
            rng.choice((0, 1, 2, 5, HALF_MESSAGE_LOOKS)),
        )
        for number in range(rng.randrange(1, 100))
    ]  # fmt: skip
    held = sum(each.of_the_peer + each.pending for each in holdings)
    chosen = who_gives_way(holdings, held)
    assert len({each.number for each in chosen}) == len(chosen)
    assert all(each.looks >= STALLED_LOOKS and each.of_the_peer for each in chosen)
    others = [each for each in chosen if each.looks < HALF_MESSAGE_LOOKS]
    if others:
        assert held > ALL_BYTES_MAX
        without_last = sum(each.of_the_peer for each in chosen) - others[-1].of_the_peer
        assert held - without_last > client_limits.ALL_BYTES_MAX // 2


def test_a_slow_one_with_more_than_its_share_gives_way_and_a_busy_one_does_not() -> None:
    slow = [Holding(number, 0, 9 * MIB, 0, 0, SLOW_LOOKS) for number in range(11)]
    assert len(who_gives_way(slow, 99 * MIB, awaited_bytes=9 * MIB)) == 6
    assert who_gives_way(slow, 80 * MIB, awaited_bytes=9 * MIB) == [], "there is room for both"
    early = [Holding(number, 0, 9 * MIB, 0, 0, SLOW_LOOKS - 1) for number in range(11)]
    assert who_gives_way(early, 99 * MIB, awaited_bytes=9 * MIB) == []
    small = [Holding(number, 0, SHARE_BYTES_MAX, 0, 0, 99) for number in range(400)]
    assert who_gives_way(small, 100 * MIB, awaited_bytes=9 * MIB) == []
