"""Temporary directories that nobody uses any more."""

import errno
import os
import threading
from pathlib import Path

import pytest

from musterd.ipc.errors import SpawnError
from musterd.supervisor.processes import tempdirs
from musterd.supervisor.processes.tempdirs import Janitor
from support.waiting import wait_for

SECONDS = 30.0


class Pauses:
    """Replace the janitor's pauses: each is counted and lasts until it is allowed to end."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def wait(self, _seconds: float) -> None:
        self.count += 1
        self.begun.set()
        assert self.may_end.wait(SECONDS)

    def set(self) -> None:
        self.may_end.set()


def test_many_that_come_together_are_removed_after_one_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The janitor once paused for each directory, and fell behind while many workers died."""
    count = 200
    janitor, pauses = Janitor(), Pauses()
    monkeypatch.setattr(janitor, "_closing", pauses)
    for number in range(count):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "left").touch()
        janitor.remove(path)
        assert pauses.begun.wait(SECONDS), "the first of them"
    assert len(list(tmp_path.iterdir())) == count, "nothing is removed before the pause is over"
    pauses.may_end.set()
    wait_for("all are removed", lambda: not list(tmp_path.iterdir()))
    assert pauses.count == 1
    janitor.close()


def test_what_was_given_before_the_end_is_removed(tmp_path: Path) -> None:
    janitor = Janitor()
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        janitor.remove(tmp_path / str(number))
    janitor.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_renamed_is_removed_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overlayfs refuses to rename a directory of a lower layer; tests of a daemon show it."""

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "parser-0-1").mkdir()
    (tmp_path / "parser-0-1" / "left").touch()
    monkeypatch.setattr(Path, "rename", refuse)
    janitor = Janitor()
    assert janitor.empty(tmp_path) == 1
    janitor.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "tmp").touch()
    janitor = Janitor()
    with pytest.raises(SpawnError, match=r"tmp cannot be used .* remove what is there"):
        janitor.empty(tmp_path / "tmp")
    janitor.close()


def test_what_comes_while_far_too_many_wait_is_left_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempdirs, "WAITING_MAX", 2)
    monkeypatch.setattr(tempdirs, "PAUSE_SECONDS", SECONDS)
    janitor = Janitor()
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        janitor.remove(tmp_path / name)
    assert not janitor.removes(tmp_path / "c")
    janitor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    following = Janitor()
    assert following.empty(tmp_path) == 1
    following.close()
    assert list(tmp_path.iterdir()) == []
