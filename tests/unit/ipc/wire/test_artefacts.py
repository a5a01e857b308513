"""Entries of artefacts: whole or absent, bounded by count, bytes and age, found by task."""

import os
from pathlib import Path

import pytest

from musterd.ipc.wire import artefacts
from musterd.ipc.wire.artefacts import BLOCK_BYTES, Keep

NOW = 1_000_000_000_000
HOUR_NS = 3600 * 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "artefacts"
    made.mkdir()
    return made


def keep(folder: Path, count: int = 100, size: int = 2**30, age_ns: int = HOUR_NS) -> Keep:
    return Keep(str(folder), count, size, age_ns)


def add(given: Keep, task: str, attempt: int = 1, now_ns: int = NOW, **files: bytes) -> None:
    staged = Path(given.folder).parent / "staged"
    staged.mkdir()
    for name, data in (files or {"a": b"x"}).items():
        (staged / name).write_bytes(data)
    artefacts.publish(given, task, attempt, staged, now_ns)


def names(folder: Path, task: str) -> list[str]:
    return [each.name for each in artefacts.artefacts_of(str(folder), task)]


def test_files_of_a_task_are_found_by_its_id_whatever_its_characters(folder):
    task = "../../a/b\x00\udc80 €"
    add(keep(folder), task, 2, page=b"<p>")
    add(keep(folder), "another", page=b"<b>")
    (found,) = artefacts.artefacts_of(str(folder), task)
    assert (found.name, found.attempt, found.bytes) == ("attempt-2.page", 2, 3)
    assert artefacts.read(found, 1, 100) == b"p>"
    assert names(folder, "a third") == []


def test_the_oldest_go_beyond_the_count(folder):
    for number in range(10):
        add(keep(folder, count=3), f"t{number}", now_ns=NOW + number)
        assert len(list(folder.iterdir())) <= 3
    assert [n for n in range(10) if names(folder, f"t{n}")] == [7, 8, 9]


def test_the_oldest_go_beyond_the_bytes_that_they_take_on_a_disk(folder):
    for number in range(10):
        # One byte takes a block.
        add(keep(folder, size=4 * BLOCK_BYTES), f"t{number}", now_ns=NOW + number, a=b"x", b=b"y")
    assert [n for n in range(10) if names(folder, f"t{n}")] == [8, 9]


def test_entries_of_a_clock_that_was_ahead_go_first(folder):
    given = keep(folder, count=3)
    for number in range(3):
        add(given, f"ahead{number}", now_ns=NOW + 365 * 24 * HOUR_NS + number)
    for number in range(2):
        add(given, f"t{number}", now_ns=NOW + number)
    assert (names(folder, "t0"), names(folder, "t1")) == (["attempt-1.a"], ["attempt-1.a"])
    assert len(list(folder.iterdir())) == 3


def test_one_that_is_larger_than_all_may_be_goes_alone(folder):
    given = keep(folder, size=4 * BLOCK_BYTES)
    add(given, "small", now_ns=NOW)
    add(given, "large", now_ns=NOW + 1, a=b"x" * 5 * BLOCK_BYTES)
    assert (names(folder, "small"), names(folder, "large")) == (["attempt-1.a"], [])


def test_what_is_too_old_goes_when_the_supervisor_trims(folder):
    given = keep(folder, age_ns=HOUR_NS)
    add(given, "old", now_ns=NOW)
    add(given, "young", now_ns=NOW + 1)
    assert artefacts.trim(given, NOW + HOUR_NS + 1) == 1
    assert (names(folder, "old"), names(folder, "young")) == ([], ["attempt-1.a"])


def test_attempts_of_a_task_that_was_run_again_have_names_of_their_own(folder):
    add(keep(folder), "t", 1, NOW, a=b"1")
    add(keep(folder), "t", 1, NOW + 1, a=b"2")
    add(keep(folder), "t", 2, NOW + 2, a=b"3")
    first, second, third = artefacts.artefacts_of(str(folder), "t")
    assert first.name != second.name
    assert third.name == "attempt-2.a"
    assert [artefacts.read(each, 0, 9) for each in (first, second, third)] == [b"1", b"2", b"3"]


def test_purged_tasks_and_old_entries_are_removed(folder):
    for number in range(4):
        add(keep(folder), f"t{number}", now_ns=NOW + number)
    artefacts.remove(str(folder), ["t3", "unknown"])
    artefacts.remove_before(str(folder), NOW + 2)
    assert [n for n in range(4) if names(folder, f"t{n}")] == [2]


def test_links_are_neither_listed_nor_read_nor_followed_when_they_go(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"k")
    add(keep(folder), "t", page=b"p")
    (entry,) = artefacts.entries(str(folder))
    os.symlink(secret / "key", Path(entry.path, "link"))
    (found,) = artefacts.artefacts_of(str(folder), "t")
    assert found.name == "attempt-1.page"
    Path(found.path).unlink()
    os.symlink(secret / "key", found.path)
    with pytest.raises(OSError, match="symbolic link"):
        artefacts.read(found, 0, 10)
    os.symlink(secret, folder / f"{'0' * 32}.1.1.1.00000000")
    artefacts.remove_before(str(folder), NOW + 1)
    assert list(folder.iterdir()) == []
    assert (secret / "key").read_bytes() == b"k"


def test_what_is_not_ours_stays(folder):
    (folder / "README").write_text("mine")
    artefacts.trim(keep(folder, count=1), NOW)
    assert (folder / "README").exists()


def test_no_folder_is_no_artefacts(tmp_path):
    assert artefacts.entries(str(tmp_path / "missing")) == []


def picture(size: int = 100) -> bytes:
    return b"x" * (size - len(artefacts.PNG_END)) + artefacts.PNG_END


def test_the_newest_picture_of_a_task_goes_with_its_alert(folder):
    add(keep(folder), "t", 1, NOW, **{"screenshot.png": picture()})
    assert artefacts.attached_of(str(folder), "t") is None, "that is why attempt 1 failed"
    add(keep(folder), "t", 2, NOW + 1, **{artefacts.ATTACHED: picture(50)})
    add(keep(folder), "t", 3, NOW + 2, **{artefacts.ATTACHED: picture(60)})
    path, data = artefacts.attached_of(str(folder), "t")
    assert data == picture(60) == Path(path).read_bytes()
    artefacts.remove_attached(str(folder), "t")
    assert artefacts.attached_of(str(folder), "t") is None
    assert names(folder, "t") == ["attempt-1.screenshot.png"]


@pytest.mark.parametrize("data", [b"", picture()[:-1], picture(artefacts.ATTACHED_BYTES_MAX + 1)])
def test_a_picture_that_is_cut_short_or_too_large_is_not_sent(folder, data):
    add(keep(folder), "t", **{artefacts.ATTACHED: data})
    assert artefacts.attached_of(str(folder), "t") is None
