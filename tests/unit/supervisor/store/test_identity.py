"""Files of the store that are removed, moved, replaced or cut while it is in use."""

import itertools
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire.messages import SUCCEEDED, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import FinalRecord, NewRecord, Persist
from musterd.supervisor.store import file as store_file
from musterd.supervisor.store import sqlite
from musterd.supervisor.store.file import CorruptStore, LostStore
from musterd.supervisor.store.identity import ENDINGS, Index, Loss, Seen, judge, read_index
from musterd.supervisor.store.interface import FindTasks, StoreError, Withdraw
from musterd.supervisor.store.sqlite import SqliteStore
from musterd.supervisor.system.threads import ThreadWatch
from support.waiting import wait_for

DEADLINE_SECONDS = 30.0


def spec(number: int, size: int = 100) -> TaskSpec:
    return TaskSpec(f"id-{number}", "noop.run", b"x" * size)


def write(store: SqliteStore, number: int, size: int = 100) -> None:
    """Write a new task and wait for its commit."""
    store.write(Persist(number, [NewRecord(number, spec(number, size), 1, "noop")], [], []))
    wait_for(f"{number} is written: {store.problem()}", lambda: store.completed() == number)


def wait_until_it_looked(store: SqliteStore, patch: pytest.MonkeyPatch) -> None:
    """Wait for a whole look at the files: the first of three may have begun before."""
    look, looks = store._files_are_ours, []

    def counted() -> bool:
        looks.append(look())
        return looks[-1]

    patch.setattr(store, "_files_are_ours", counted)
    wait_for("it looks at its files", lambda: len(looks) > 2)


def found(store: SqliteStore, *numbers: int) -> list[str]:
    token = object()
    store.ask(FindTasks([f"id-{number}" for number in numbers]), token)
    answers: list[Any] = []
    wait_for("it is answered", lambda: answers.extend(store.found()) or answers)
    return [task.spec.id for task in answers[0][1]]


def stored(path: Path) -> list[int]:
    """Return the tasks that a start finds."""
    with closing(SqliteStore(path, "full")) as store:
        return [task.seq for task in chain.from_iterable(store.recover(0, 1))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "store.db"


@pytest.fixture
def watch() -> Iterator[ThreadWatch]:
    watch = ThreadWatch()
    watch.open()
    yield watch
    watch.close()


@pytest.fixture
def store(path: Path, watch: ThreadWatch) -> Iterator[SqliteStore]:
    store = SqliteStore(path, "full")
    for number in range(1, 6):
        write(store, number)
    yield store
    with suppress(StoreError):
        store.close()


def crash(store: SqliteStore, path: Path, copy: Path) -> list[int]:
    """Return the tasks that a start would find if the daemon died now."""
    shutil.copytree(path.parent, copy)
    return stored(copy / path.name)


SUBSETS = [
    endings
    for count in range(1, len(ENDINGS) + 1)
    for endings in itertools.combinations(ENDINGS, count)
]


@pytest.mark.parametrize(
    "endings", SUBSETS, ids=lambda endings: "+".join(e or "db" for e in endings)
)
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_what_is_removed_or_moved_is_written_anew(
    store: SqliteStore, path: Path, tmp_path: Path, endings: tuple[str, ...], how: str
) -> None:
    for ending in endings:
        file = path.with_name(path.name + ending)
        if how == "removed":
            file.unlink()
        else:
            file.rename(tmp_path / file.name)
    write(store, 6)  # the next commit notices
    assert crash(store, path, tmp_path / "copy") == [1, 2, 3, 4, 5, 6]
    write(store, 7)
    outcome = Outcome("id-1", SUCCEEDED)
    store.write(Persist(8, [], [], [FinalRecord(1, spec(1), 1, outcome, 0)]))
    wait_for("an end is written", lambda: store.completed() == 8)
    assert found(store, 1, 2, 7) == ["id-1", "id-2", "id-7"]
    store.close()
    assert stored(path) == [2, 3, 4, 5, 6, 7]


@pytest.mark.usefixtures("quick")
def test_it_is_noticed_while_nothing_is_written(
    store: SqliteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    wait_for("it is written anew", path.exists)
    wait_for("it is said", lambda: "written anew" in caplog.text)
    assert store.problem() is None


def test_it_may_happen_again_and_again(store: SqliteStore, path: Path) -> None:
    for number in range(6, 16):
        for ending in ENDINGS:
            path.with_name(path.name + ending).unlink(missing_ok=True)
        write(store, number)
        assert found(store, number) == [f"id-{number}"]
    store.close()
    assert stored(path) == list(range(1, 16))


def test_a_daemon_that_is_killed_before_the_copy_is_in_its_place_loses_nothing(
    store: SqliteStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[list[int]] = []
    put_in_place, rename = store_file._put_in_place, Path.rename

    def killed_at_each_rename(at: Path) -> None:
        def renaming(self: Path, target: Path) -> Path:
            copy = tmp_path / f"copy-{len(copies)}"
            shutil.copytree(at.parent, copy)
            copies.append([])
            monkeypatch.setattr(store_file, "_put_in_place", put_in_place)
            monkeypatch.setattr(Path, "rename", rename)
            copies[-1] = stored(copy / at.name)
            monkeypatch.setattr(Path, "rename", renaming)
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", renaming)
        put_in_place(at)
        monkeypatch.setattr(Path, "rename", rename)

    monkeypatch.setattr(store_file, "_put_in_place", killed_at_each_rename)
    path.with_name("store.db-shm").unlink()
    write(store, 6)
    assert len(copies) == 3, "the old file, its log, and the new one"
    assert copies == [[1, 2, 3, 4, 5]] * 3


@pytest.mark.usefixtures("quick")
def test_a_directory_that_is_moved_away_is_waited_for(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = path.parent.with_name("away")
    path.parent.rename(away)
    store.write(Persist(6, [NewRecord(6, spec(6), 1, "noop")], [], []))
    wait_for("it is told", lambda: "moved" in (store.write_problem() or ""))
    token = object()
    store.ask(Withdraw([6]), token)
    wait_for("it is in no file, and is refused", lambda: (token, [6]) in store.found())
    store.write(Persist(7, [NewRecord(7, spec(7), 1, "noop")], [], []))
    path.parent.mkdir()  # a file system was mounted there, perhaps
    wait_until_it_looked(store, monkeypatch)
    assert list(path.parent.iterdir()) == [], "nothing is written to a place that is not ours"
    assert store.completed() is None
    path.parent.rmdir()
    away.rename(path.parent)
    wait_for("it goes on", lambda: store.completed() == 7)
    wait_for("and says so", lambda: store.problem() is None)
    store.close()
    assert stored(path) == [1, 2, 3, 4, 5, 7]


def test_where_there_is_no_room_for_a_copy_it_is_tried_again(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sqlite, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(sqlite, "rewrite", full)
    path.unlink()
    store.write(Persist(6, [NewRecord(6, spec(6), 1, "noop")], [], []))
    wait_for("it is told", lambda: "No space left" in (store.write_problem() or ""))
    assert store.completed() is None
    monkeypatch.undo()
    wait_for("it goes on", lambda: store.completed() == 6)


@pytest.mark.parametrize("made_again", [False, True])
def test_a_directory_that_was_removed_is_made_again(
    store: SqliteStore, path: Path, tmp_path: Path, made_again: bool
) -> None:
    shutil.rmtree(path.parent)
    if made_again:
        path.parent.mkdir(0o700)
    write(store, 6)
    assert crash(store, path, tmp_path / "copy") == [1, 2, 3, 4, 5, 6]
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert found(store, 1, 6) == ["id-1", "id-6"]
    write(store, 7)
    assert path.with_name("store.db.reserve").exists()
    store.close()
    assert stored(path) == [1, 2, 3, 4, 5, 6, 7]


def test_a_store_in_a_directory_that_took_the_place_of_ours_is_left_alone(
    store: SqliteStore, path: Path, watch: ThreadWatch, tmp_path: Path
) -> None:
    (tmp_path / "backup").mkdir()
    with closing(SqliteStore(tmp_path / "backup" / "store.db", "full")) as other:
        write(other, 1)
    shutil.rmtree(path.parent)
    (tmp_path / "backup").rename(path.parent)
    assert "replaced by another file" in ended(store, watch)
    (saved,) = path.parent.glob("store.db.saved-*Z")
    assert stored(saved) == [1, 2, 3, 4, 5]
    assert stored(path) == [1]


def test_a_copy_that_cannot_be_used_at_once_is_used_later(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy took the last page of the disk, and none is left for its log."""
    copies, rewrite = [], sqlite.rewrite

    def rewriting(*args: Any) -> int:
        copies.append(1)
        return rewrite(*args)

    def full(*_: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sqlite, "RETRY_SECONDS", 0.01)
    with monkeypatch.context() as changed:
        changed.setattr(sqlite, "connect_writer", full)
        changed.setattr(sqlite, "rewrite", rewriting)
        path.unlink()
        store.write(Persist(6, [NewRecord(6, spec(6), 1, "noop")], [], []))
        wait_for("it is told", lambda: "disk is full" in (store.write_problem() or ""))
        wait_for("the copy is there", path.exists)
        time.sleep(0.1)
    wait_for(f"it goes on: {store.problem()}", lambda: store.completed() == 6)
    assert len(copies) == 1
    assert found(store, 1, 6) == ["id-1", "id-6"]
    store.close()
    assert stored(path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("quick")
def test_an_older_copy_does_not_take_the_place_of_a_store_that_came_back(
    store: SqliteStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as changed:
        changed.setattr(store_file, "set_aside", failing)
        path.rename(tmp_path / "moved")
        wait_for("it is told", lambda: "Input/output error" in (store.write_problem() or ""))
        assert path.with_name("store.db.new").exists()
        (tmp_path / "moved").rename(path)
        wait_for("it is back", lambda: store.problem() is None)
    write(store, 6)
    store.close()
    assert stored(path) == [1, 2, 3, 4, 5, 6]


def test_a_part_of_a_copy_does_not_lie_around(
    store: SqliteStore, path: Path, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN")  # a copy cannot be made in a transaction
        with pytest.raises(sqlite3.OperationalError):
            store_file.save(connection, tmp_path / "part")
    assert not (tmp_path / "part").exists()


def ended(store: SqliteStore, watch: ThreadWatch) -> str:
    """Wait until the store gives up; return why."""
    wait_for("the writer has ended", watch.problem)
    with pytest.raises(LostStore) as caught:
        watch.check()
    assert "the daemon ends" in (store.write_problem() or "")
    with suppress(StoreError):
        store.close()
    return str(caught.value)


@pytest.mark.usefixtures("quick")
def test_another_file_in_its_place_is_left_alone_and_ours_is_saved(
    store: SqliteStore, path: Path, watch: ThreadWatch, tmp_path: Path
) -> None:
    with closing(SqliteStore(tmp_path / "other.db", "full")) as other:
        write(other, 1)
        write(other, 2)
    content = (tmp_path / "other.db").read_bytes()
    (tmp_path / "other.db").rename(path)
    reason = ended(store, watch)
    assert "replaced by another file" in reason
    (saved,) = path.parent.glob("store.db.saved-*Z")
    assert saved.name in reason
    assert stored(saved) == [1, 2, 3, 4, 5]
    assert path.read_bytes() == content
    assert stored(path) == [1, 2], "our log is not taken for that of the other file"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("size", [0, 4096, 10_000])
def test_a_file_that_was_cut_ends_the_store_and_is_found_at_the_next_start(
    store: SqliteStore,
    path: Path,
    watch: ThreadWatch,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    with closing(sqlite3.connect(path)) as other:  # as a checkpoint does now and then
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    wait_for("all is in the file", lambda: path.stat().st_size > 10_000)
    wait_until_it_looked(store, monkeypatch)
    os.truncate(path, size)
    reason = ended(store, watch)
    assert f"cut to {size} bytes" in reason
    with pytest.raises(CorruptStore, match="set aside"):
        SqliteStore(path, "full").close()


@pytest.mark.usefixtures("quick")
def test_a_log_that_was_cut_ends_the_store(
    store: SqliteStore, path: Path, watch: ThreadWatch
) -> None:
    os.truncate(path.with_name("store.db-wal"), 5000)
    assert "store.db-wal was cut to 5000 bytes" in ended(store, watch)


def test_a_log_that_was_cut_is_noticed_before_the_next_commit_makes_it_long_again(
    store: SqliteStore, path: Path, watch: ThreadWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LOOK_SECONDS", DEADLINE_SECONDS)
    write(store, 6)  # the store has looked at its files
    os.truncate(path.with_name("store.db-wal"), 0)
    store.write(Persist(7, [NewRecord(7, spec(7), 1, "noop")], [], []))
    assert "store.db-wal was cut to 0 bytes" in ended(store, watch)
    assert store.completed() is None


# -- harmless changes ---------------------------------------------------------------------------


def test_what_others_may_do_to_a_store_in_use_is_no_loss(
    store: SqliteStore, path: Path, watch: ThreadWatch, caplog: pytest.LogCaptureFixture
) -> None:
    number = 5
    for command in (
        "PRAGMA wal_checkpoint(TRUNCATE)",
        f"VACUUM INTO '{path.parent / 'copy.db'}'",
        "PRAGMA wal_checkpoint(RESTART)",
        "VACUUM",
        "PRAGMA wal_checkpoint(TRUNCATE)",
    ):
        for _ in range(3):
            number += 1
            write(store, number, size=50_000)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(command).fetchall()
        number += 1
        write(store, number)
    assert watch.problem() == ""
    assert "not where they were" not in caplog.text


def test_a_log_that_sqlite_itself_makes_shorter_is_no_loss(
    path: Path, watch: ThreadWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "LOG_BYTES_KEPT", 100_000)
    monkeypatch.setattr(store_file, "CHECKPOINT_PAGES", 50)
    log, sizes = path.with_name("store.db-wal"), []
    with closing(SqliteStore(path, "normal")) as store:
        for number in range(1, 60):
            write(store, number, size=900_000 if number % 7 == 0 else 1000)
            sizes.append(log.stat().st_size)
        assert store.problem() is None
    assert any(after < before for before, after in itertools.pairwise(sizes)), "it did"
    assert watch.problem() == ""


# -- the judgement --------------------------------------------------------------------------------

KNOWN = {ending: Seen((1, place), 100_000) for place, ending in enumerate(ENDINGS)}


def seen(**changes: Seen | None) -> dict[str, Seen | None]:
    names = {"file": "", "log": "-wal", "index": "-shm"}
    return {**KNOWN, **{names[name]: change for name, change in changes.items()}}


@pytest.mark.parametrize(
    ("now", "index", "kind"),
    [
        (seen(), None, None),
        (seen(), Index(100_000, 100_000), None),
        (seen(), Index(100_001, 0), Loss.TRUNCATED),
        (seen(file=Seen((1, 0), 90_000)), Index(0, 90_000), None),
        (seen(file=Seen((1, 0), 90_000)), Index(0, 95_000), Loss.TRUNCATED),
        (seen(file=Seen((1, 0), 90_000)), None, None),
        (seen(file=Seen((1, 0), 200_000)), Index(0, 300_000), None),
        (seen(file=None), None, Loss.MISSING),
        (seen(file=Seen((2, 0), 100_000)), None, Loss.REPLACED),
        (seen(log=None), None, Loss.MISSING),
        (seen(log=Seen((1, 7), 100_000)), None, Loss.MISSING),
        (seen(index=Seen((1, 7), 100_000)), None, Loss.MISSING),
    ],
)
def test_what_became_of_the_files(
    now: dict[str, Seen | None], index: Index | None, kind: Loss | None
) -> None:
    lost = judge(KNOWN, now, index)
    assert (lost.kind if lost is not None else None) == kind


def test_the_index_says_how_long_the_files_are(store: SqliteStore, path: Path) -> None:
    data = path.with_name("store.db-shm").read_bytes()
    index = read_index(data)
    assert index is not None
    assert 0 < index.log_bytes <= path.with_name("store.db-wal").stat().st_size
    assert index.file_bytes % 4096 == 0
    assert read_index(data[:48] + bytes(48)) is None, "it is being changed"
    assert read_index(b"") is None
