"""The store's file: old versions, corruption, and when the file is checked."""

import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import pytest

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import FAILED, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import Fact, NewRecord, Persist
from musterd.supervisor.store import file as store_file
from musterd.supervisor.store import schema as store_schema
from musterd.supervisor.store.file import SET_ASIDE, CorruptStore
from musterd.supervisor.store.interface import StoreError
from musterd.supervisor.store.sqlite import SqliteStore

WALL = 1_700_000_000_000_000_000

# The tables as the first version made them, as a file of that time has them.
VERSION_1 = """
BEGIN;
CREATE TABLE live (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, pool TEXT NOT NULL,
    target TEXT NOT NULL, priority INTEGER NOT NULL, submitted_at INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, crashes INTEGER NOT NULL DEFAULT 0,
    interruptions INTEGER NOT NULL DEFAULT 0, begun INTEGER NOT NULL DEFAULT 0,
    wait_ns INTEGER NOT NULL DEFAULT -1, wait_from INTEGER NOT NULL DEFAULT 0,
    spec BLOB NOT NULL);
INSERT INTO sqlite_sequence (name, seq) VALUES ('live', 0);
CREATE TABLE finished (
    number INTEGER PRIMARY KEY, seq INTEGER NOT NULL, id TEXT NOT NULL, pool TEXT NOT NULL,
    state TEXT NOT NULL, crashes INTEGER NOT NULL, submitted_at INTEGER NOT NULL,
    finished_at INTEGER NOT NULL, spec BLOB NOT NULL, outcome BLOB NOT NULL);
CREATE INDEX finished_id ON finished (id);
CREATE INDEX finished_unwell ON finished (state, number) WHERE state <> 'succeeded';
PRAGMA application_id = 1836413812;
PRAGMA user_version = 1;
COMMIT;
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@contextmanager
def opened(path: Path, on_corrupt: str = "stop") -> Iterator[SqliteStore]:
    store = SqliteStore(path, "normal", on_corrupt)
    try:
        yield store
    finally:
        store.close()


def open_and_close(path: Path, on_corrupt: str = "stop") -> None:
    """Open a store that should be refused; leave no thread behind if it is not refused."""
    SqliteStore(path, "full", on_corrupt).close()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def fill(path: Path, tasks: int = 200) -> None:
    with opened(path) as store:
        added = [
            NewRecord(n, TaskSpec(f"id-{n}", "noop.run", b"x" * 500), WALL, "noop")
            for n in range(1, tasks + 1)
        ]
        store.write(Persist(1, added, [], []))


def leave_log(path: Path) -> None:
    """Leave a log behind as a killed daemon does: nothing is closed."""
    child = os.fork()
    if child == 0:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("UPDATE live SET attempt = 1 WHERE seq = 1")
        os._exit(0)
    os.waitpid(child, 0)


def schema(path: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(
            "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
        ).fetchall()


def old_file(path: Path) -> None:
    """Make a file as the first version left it, with a task in each table."""
    spec = encode(["id-1", "noop.run", b"\x80", 2, "", 0, -1, 0, 0])
    outcome = encode(["id-2", "failed", b"", ["error", "ValueError", "no", "", 0, 0], 2, 1000])
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(VERSION_1)
        connection.execute(
            "INSERT INTO live (seq, id, pool, target, priority, submitted_at, attempt, spec)"
            " VALUES (7, 'id-1', 'noop', '', 2, ?, 3, ?)",
            (WALL, spec),
        )
        done = encode(["id-2", "noop.run", b"\x80", 2, "", 0, -1, 0, 0])
        connection.execute(
            "INSERT INTO finished VALUES (1, 5, 'id-2', 'noop', 'failed', 1, ?, ?, ?, ?)",
            (WALL, WALL, done, outcome),
        )


# -- versions ---------------------------------------------------------------------------------


def test_a_file_of_the_first_version_is_migrated_with_all_its_tasks(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old_file(path)
    with opened(path) as store:
        (task,) = list(chain.from_iterable(store.recover(0, WALL)))
        assert (task.seq, task.spec, task.attempt) == (7, TaskSpec("id-1", "noop.run", b"\x80"), 3)
        assert store.last_seq() == 7
        assert store.facts("any") == []
        store.write(Persist(1, [], [], [], [Fact("any", "key", b"value")]))
    with opened(path) as store:
        assert store.facts("any") == [("key", b"value")]
    assert "migrated from version 1 to 3" in caplog.text
    with closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT seq, id, state, outcome FROM finished").fetchone()
        assert row[:3] == (5, "id-2", FAILED)
        assert store_schema.version_of(connection) == store_schema.SCHEMA_VERSION


def test_a_migrated_file_has_the_tables_of_a_new_one(path: Path) -> None:
    old_file(path)
    new = path.with_name("new.db")
    for each in (path, new):
        with opened(each):
            pass
    assert schema(path) == schema(new)


def test_before_a_migration_the_old_file_is_copied(path: Path) -> None:
    old_file(path)
    with opened(path):
        pass
    copy = path.with_name("store.db.v1.bak")
    assert names(path) == ["store.db", copy.name]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with closing(sqlite3.connect(copy)) as connection:
        assert store_schema.version_of(connection) == 1
        assert connection.execute("SELECT id FROM live").fetchall() == [("id-1",)]
    with opened(path):  # the next start makes no copy
        pass
    assert names(path) == ["store.db", copy.name]


def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_file(path)
    before = schema(path)
    with monkeypatch.context() as patch:
        steps = (store_schema.STEPS[0], store_schema.STEPS[1] + "CREATE TABLE live (x);")
        patch.setattr(store_schema, "STEPS", steps)
        with pytest.raises(StoreError, match="table live already exists"):
            open_and_close(path)
    assert schema(path) == before
    with opened(path) as store:
        assert [task.seq for task in chain.from_iterable(store.recover(0, WALL))] == [7]


def test_a_store_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    with opened(path):
        pass
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 99")
    content = path.read_bytes()
    with pytest.raises(StoreError, match="has version 99, and this musterd knows versions up to 3"):
        open_and_close(path, SET_ASIDE)
    assert path.read_bytes() == content


# -- corruption -------------------------------------------------------------------------------


def _no_database(path: Path) -> None:
    path.write_bytes(b"not a database\n" * 1000)


def _broken_head(path: Path) -> None:
    fill(path)
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)


def _broken_rows(path: Path) -> None:
    fill(path)
    content = bytearray(path.read_bytes())
    content[12 * 4096 :] = b"\xff" * (len(content) - 12 * 4096)
    path.write_bytes(content)


def _cut_off(path: Path) -> None:
    fill(path)
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [_no_database, _broken_head, _broken_rows, _cut_off])
def test_a_corrupt_file_is_set_aside_as_it_is_and_the_start_refused(path: Path, damage) -> None:
    damage(path)
    content = path.read_bytes()
    with pytest.raises(CorruptStore, match=r"set aside as store\.db\.corrupt-"):
        open_and_close(path)
    (name,) = (name for name in names(path) if not name.endswith(("-wal", "-shm")))
    assert name.startswith("store.db.corrupt-")
    assert path.with_name(name).read_bytes() == content


def test_after_that_no_start_makes_an_empty_store_unasked(path: Path) -> None:
    _broken_rows(path)
    for _ in range(3):
        with pytest.raises(StoreError, match=r"--set store\.on_corrupt=set-aside"):
            open_and_close(path)
    assert not path.exists()
    with opened(path, SET_ASIDE) as store:
        assert list(chain.from_iterable(store.recover(0, WALL))) == []
    with opened(path):  # the store exists now
        pass


def test_after_that_a_restored_copy_is_used(path: Path) -> None:
    fill(path)
    copy = path.read_bytes()
    path.write_bytes(copy[: len(copy) // 2])
    with pytest.raises(CorruptStore):
        open_and_close(path)
    path.write_bytes(copy)
    with opened(path) as store:
        assert len(list(chain.from_iterable(store.recover(0, WALL)))) == 200


def test_where_asked_an_empty_store_takes_its_place_at_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _broken_rows(path)
    content = path.read_bytes()
    with opened(path, SET_ASIDE) as store:
        assert list(chain.from_iterable(store.recover(0, WALL))) == []
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)
    (aside,) = (each for each in names(path) if each.endswith("Z"))
    assert path.with_name(aside).read_bytes() == content


def test_each_corrupt_file_gets_a_name_of_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file.time, "strftime", lambda *_: "T")
    for _ in range(3):
        _no_database(path)
        with pytest.raises(CorruptStore):
            open_and_close(path)
    assert names(path) == ["store.db.corrupt-T", "store.db.corrupt-T-2", "store.db.corrupt-T-3"]


def test_the_log_of_a_corrupt_file_goes_with_it_and_is_not_carried_over(path: Path) -> None:
    fill(path)
    leave_log(path)
    log = path.with_name("store.db-wal").read_bytes()
    assert log
    with path.open("r+b") as file:
        file.seek(30 * 4096)
        file.write(b"\xff" * 40960)
    content = path.read_bytes()
    with pytest.raises(CorruptStore):
        open_and_close(path)
    (kept,) = path.parent.glob("store.db.corrupt-*-wal")
    assert kept.read_bytes() == log
    assert kept.with_name(kept.name.removesuffix("-wal")).read_bytes() == content
    assert not path.with_name("store.db-wal").exists()


# -- when the file is checked -----------------------------------------------------------------


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    done: list[Path] = []
    check = store_file._check

    def noted(path: Path, connection: sqlite3.Connection) -> None:
        done.append(path)
        check(path, connection)

    monkeypatch.setattr(store_file, "_check", noted)
    return done


def test_a_small_file_is_checked_at_every_start(path: Path, checks: list[Path]) -> None:
    fill(path)
    for _ in range(2):
        with opened(path):
            pass
    assert len(checks) == 2


def test_a_large_file_is_checked_only_after_an_unclean_end(
    path: Path, checks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    monkeypatch.setattr(store_file, "CHECKED_ALWAYS_BYTES", 4096)
    with opened(path):
        pass
    assert not checks
    leave_log(path)
    with opened(path):
        pass
    assert len(checks) == 1
    with opened(path):
        pass
    assert len(checks) == 1


def test_what_looked_corrupt_while_in_use_is_checked_at_the_next_start(
    path: Path, checks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "CHECKED_ALWAYS_BYTES", 0)
    _broken_rows(path)
    with pytest.raises(StoreError, match="malformed"), opened(path) as store:
        list(chain.from_iterable(store.recover(0, WALL)))
    with pytest.raises(CorruptStore):
        open_and_close(path)
    assert len(checks) == 1


def test_a_check_that_takes_too_long_is_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path)
    monkeypatch.setattr(store_file, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(store_file, "CHECK_STEPS", 10)
    with opened(path) as store:
        assert len(list(chain.from_iterable(store.recover(0, WALL)))) == 200
    assert "the check was ended after 0 s" in caplog.text


def test_outcomes_of_the_first_version_can_still_be_read() -> None:
    import msgspec

    blob = encode(["id-2", "failed", b"", ["error", "ValueError", "no", "", 0, 0], 2, 1000])
    assert msgspec.msgpack.decode(blob, type=Outcome).attempts == 2


def test_a_log_without_its_store_is_kept_until_somebody_says_so(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite removes the log of an empty file, and the last commits with it."""
    beside = path.with_name("store.db-wal")
    beside.write_bytes(b"the last commits")
    with pytest.raises(StoreError, match=r"not there, but its log store\.db-wal is"):
        SqliteStore(path, "full")
    assert beside.read_bytes() == b"the last commits"
    assert not path.exists()
    SqliteStore(path, "full", "set-aside").close()
    (aside,) = path.parent.glob("store.db.lost-*-wal")
    assert aside.read_bytes() == b"the last commits"
    assert "its log store.db-wal is" in caplog.text


def test_a_copy_that_waits_for_its_place_comes_before_what_was_corrupt_once(path: Path) -> None:
    SqliteStore(path, "full").close()
    path.rename(path.with_name("store.db.new"))
    path.with_name("store.db.corrupt-20200101T000000Z").write_bytes(b"long ago")
    SqliteStore(path, "full").close()
    assert path.exists()


# -- what a killed daemon leaves behind -------------------------------------------------------


def leave_journal(path: Path) -> None:
    """Leave half a transaction behind, as a daemon that is killed while it gives a file its log."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    child = os.fork()
    if child == 0:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA cache_size = 1")  # so that changes reach the file at once
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM live")
        connection.execute("DELETE FROM sheets")
        connection.execute("CREATE TABLE half (x)")
        connection.execute("INSERT INTO half VALUES (zeroblob(1000000))")
        os._exit(0)
    os.waitpid(child, 0)


def test_a_start_undoes_the_transaction_that_a_kill_cut_off(path: Path) -> None:
    fill(path)
    leave_journal(path)
    assert path.with_name("store.db-journal").stat().st_size, "there is one to be undone"
    with opened(path) as store:
        assert store.unfinished() == 200
    assert names(path) == ["store.db"]


@pytest.mark.parametrize("trace", ["store.db.reserve", "store.db.new.tmp", "store.db-shm"])
def test_a_store_that_was_removed_under_a_killed_daemon_is_missed(
    path: Path, trace: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.with_name(trace).touch()
    with pytest.raises(StoreError, match=f"is not there, but {trace} is") as refused:
        open_and_close(path)
    assert "--set store.on_corrupt=set-aside" in str(refused.value)
    assert names(path) == [trace], "it is left as it was found"
    open_and_close(path, SET_ASIDE)
    assert "an empty store takes its place" in caplog.text
    assert trace not in names(path)
    open_and_close(path)


def test_a_log_that_was_removed_from_a_store_in_use_is_missed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path)
    leave_log(path)
    path.with_name("store.db-wal").unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="the last commits are missing"):
            open_and_close(path)
    with opened(path, SET_ASIDE) as store:
        assert store.unfinished() == 200
    assert "the store is used without them" in caplog.text
    with opened(path) as store:
        assert store.unfinished() == 200


def test_a_journal_goes_aside_with_its_file(path: Path) -> None:
    for ending in ("", "-journal"):
        path.with_name(path.name + ending).write_text("no database")
    with pytest.raises(CorruptStore):
        open_and_close(path)
    (aside,) = path.parent.glob("store.db.corrupt-*Z")
    assert names(path) == [aside.name, f"{aside.name}-journal"]
    with pytest.raises(StoreError, match=f"set aside as {aside.name},"):
        open_and_close(path)


def test_what_is_left_of_a_copy_goes_with_the_next_start(path: Path) -> None:
    fill(path)
    for ending in ("", "-journal"):
        path.with_name(f"store.db.new.tmp{ending}").write_text("half")
    open_and_close(path)
    assert names(path) == ["store.db"]
