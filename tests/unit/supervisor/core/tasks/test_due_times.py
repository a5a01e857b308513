"""Due times: soonest first, whatever was listed before; stale entries go."""

from musterd.supervisor.core.tasks.due_times import STALE_MAX, DueTimes


class Thing:
    look_ns: int | None = None


def test_the_soonest_comes_first_and_only_when_it_is_due() -> None:
    due: DueTimes[Thing] = DueTimes()
    a, b, c = Thing(), Thing(), Thing()
    due.list(a, 30)
    due.list(b, 10)
    due.list(c, 10)
    assert due.next_ns() == 10
    assert due.take(9) is None
    assert [due.take(10), due.take(10), due.take(10)] == [b, c, None]
    assert due.take(40) is a
    assert due.next_ns() is None


def test_what_was_noted_last_counts() -> None:
    due: DueTimes[Thing] = DueTimes()
    a, b = Thing(), Thing()
    due.list(a, 10)
    due.list(a, 50)
    due.list(b, 40)
    due.list(b, 20)
    assert due.next_ns() == 20
    assert due.take(20) is b
    assert due.take(49) is None
    due.leave(a)
    assert due.next_ns() is None
    assert due.take(100) is None


def test_what_is_listed_again_and_again_takes_no_more_memory() -> None:
    due: DueTimes[Thing] = DueTimes()
    a = Thing()
    for number in range(10 * STALE_MAX):
        due.list(a, number)
    assert len(due._heap) <= STALE_MAX + 10
    assert due.next_ns() == 10 * STALE_MAX - 1
