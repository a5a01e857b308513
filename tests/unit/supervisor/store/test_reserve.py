"""Disk space for the tasks under way when the disk gets full."""

import os
from pathlib import Path

import pytest

from musterd.supervisor.store.reserve import RESERVE_BYTES, Reserve


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def file_of(path: Path) -> Path:
    return path.with_name("store.db.reserve")


def test_it_takes_room_and_gives_it_up_once(path: Path) -> None:
    reserve = Reserve(path)
    assert not file_of(path).exists()
    assert reserve.keep()
    assert reserve.keep()
    status = file_of(path).stat()
    assert status.st_blocks * 512 >= RESERVE_BYTES
    assert status.st_mode & 0o777 == 0o600
    assert reserve.give_up()
    assert not file_of(path).exists()
    assert not reserve.give_up()
    assert reserve.keep()


def test_that_of_a_daemon_that_was_killed_is_taken_over(path: Path) -> None:
    assert Reserve(path).keep()
    second = Reserve(path)
    assert second.keep()
    assert second.give_up()


def test_where_there_is_no_room_nothing_is_left_of_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _start: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    reserve = Reserve(path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not reserve.keep()
    assert not file_of(path).exists()
    assert not reserve.give_up()
    monkeypatch.undo()
    assert reserve.keep()


def test_somebody_who_removes_the_file_is_no_trouble(path: Path) -> None:
    reserve = Reserve(path)
    reserve.keep()
    file_of(path).unlink()
    assert not reserve.give_up()
    assert reserve.keep()
