"""Entries of history are read in parts, as many as an answer may have."""

import pytest

from musterd.supervisor.control.commands import history
from musterd.supervisor.control.commands.history import Reading

Item = tuple[str, int]


def reading(count: int, size: int) -> Reading[Item]:
    items = [("s", number) for number in range(count)]
    return Reading(items, lambda each: [each], lambda _: size)


def parts(made: Reading[Item]) -> list[int]:
    found = []
    while part := made.next_part()[0]:
        found.append(len(part))
    return found


def test_a_part_is_bounded_by_bytes_and_items() -> None:
    assert parts(reading(5, history.PART_BYTES_MAX // 2)) == [2, 2, 1]
    assert parts(reading(3, history.PART_BYTES_MAX + 1)) == [1, 1, 1]
    assert parts(reading(120, 1)) == [50, 50, 20]


def test_what_an_answer_has_no_room_for_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "READ_BYTES_MAX", 25)
    made = reading(5, 10)
    assert parts(made) == [2]
    assert made.left == [("s", 2), ("s", 3), ("s", 4)]
