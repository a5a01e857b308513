"""Marks of tasks in the output of workers."""

import pytest

from musterd.ipc.wire.spoken import Spoken, mark, unmarked

ID = "019a8b2c3d49f86d081e4000002a"


@pytest.mark.parametrize(("task", "level"), [(ID, ""), (ID, "ERROR"), ("", "DEBUG"), ("x", "INFO")])
def test_a_mark_is_read_as_it_was_written(task: str, level: str) -> None:
    assert unmarked(mark(task, level).encode() + b"a price") == Spoken(b"a price", task, level)


@pytest.mark.parametrize("line", [b"", b"a price", b"a \x1e b", b"\x1eX id\x1f", b"\x1e \xff\x1f"])
def test_other_lines_stay_as_they_are(line: bytes) -> None:
    assert unmarked(line) == Spoken(line)


@pytest.mark.parametrize("task", ["", "two words", "line\nbreak", "é", "x" * 65, "\x1f"])
def test_an_id_that_a_mark_cannot_hold_is_left_out(task: str) -> None:
    assert mark(task) == ""
    assert unmarked(mark(task, "ERROR").encode() + b"x") == Spoken(b"x", "", "ERROR")


def test_a_level_of_its_own_is_no_level() -> None:
    assert mark("", "NOTICE") == mark("", "Iffy") == ""


def test_marks_in_the_middle_of_a_line_are_taken_out() -> None:
    assert unmarked(b"one " + mark(ID).encode() + b"two") == Spoken(b"one two", ID)
