"""The thread that lists, reads and trims artefacts beside the loop."""

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire import artefacts
from musterd.ipc.wire.artefacts import Artefact, Keep
from musterd.supervisor.store.artefacts import CALLS_MAX, ArtefactFiles

SECONDS = 60.0


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    return Keep(str(tmp_path / "artefacts"), 10, 2**20, 10**12)


@pytest.fixture
def files(keep: Keep) -> Iterator[ArtefactFiles]:
    made = ArtefactFiles(keep)
    yield made
    made.close()


def add(keep: Keep, task: str, data: bytes, wall_ns: int | None = None) -> None:
    staged = Path(keep.folder).parent / "staged"
    staged.mkdir()
    (staged / "a").write_bytes(data)
    artefacts.publish(keep, task, 1, staged, wall_ns or time.time_ns())


def answer(files: ArtefactFiles, ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """Return the answer to a call, which comes by settle() alone."""
    answers: list[Any] = []
    ask(answers.append)
    while not answers:
        assert select.select([files], [], [], SECONDS)[0], "no answer"
        files.settle()
    return answers[0]


def test_artefacts_are_listed_and_read_in_parts(files, keep):
    answer(files, lambda then: files.find("t", then))  # the folder is there now
    add(keep, "t", b"0123456789")
    (found,) = answer(files, lambda then: files.find("t", then))
    assert isinstance(found, Artefact)
    read = lambda offset: answer(  # noqa: E731 - once for each offset
        files, lambda then: files.read("t", found.name, offset, 4, then)
    )
    assert [read(0), read(4), read(8), read(10)] == [b"0123", b"4567", b"89", b""]
    assert answer(files, lambda then: files.read("t", "attempt-1.b", 0, 4, then)) is None
    assert answer(files, lambda then: files.read("u", found.name, 0, 4, then)) is None


def test_what_an_earlier_life_left_is_trimmed_at_the_start(keep):
    Path(keep.folder).mkdir()
    # Of another daemon, whose limits were wider.
    wide = Keep(keep.folder, 1000, 2**30, 10**18)
    now_ns = time.time_ns()
    for number in range(20):
        add(wide, f"t{number}", b"x", now_ns + number)
    add(wide, "old", b"x", now_ns - keep.age_ns - 10**9)
    files = ArtefactFiles(keep)
    try:
        answer(files, lambda then: files.find("t", then))  # after the trim
        assert len(artefacts.entries(keep.folder)) == keep.count
        assert artefacts.artefacts_of(keep.folder, "old") == []
    finally:
        files.close()


def test_purged_tasks_lose_them(files, keep):
    answer(files, lambda then: files.find("t", then))
    add(keep, "t", b"x")
    add(keep, "u", b"x")
    files.forget(["t"], 0)
    assert answer(files, lambda then: files.find("t", then)) == []
    assert len(answer(files, lambda then: files.find("u", then))) == 1
    files.forget(None, time.time_ns() + 10**9)
    assert answer(files, lambda then: files.find("u", then)) == []


def test_a_folder_that_cannot_be_used_is_no_artefacts(tmp_path, caplog):
    (tmp_path / "artefacts").write_text("a file")
    files = ArtefactFiles(Keep(str(tmp_path / "artefacts"), 10, 2**20, 10**12))
    try:
        assert answer(files, lambda then: files.find("t", then)) == []
    finally:
        files.close()
    assert "cannot be kept" in caplog.text


def test_calls_that_wait_are_bounded(files, monkeypatch):
    assert not files.full
    monkeypatch.setattr(files, "_calls", type(files._calls)())  # nobody serves these
    for _ in range(CALLS_MAX):
        files.find("t", lambda _: None)
    assert files.full
