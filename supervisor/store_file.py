"""The store's file: who may use it, what is in it, and how it is opened.

live       one row per unfinished task; small and hot
finished   one row per finished task, appended in the order of finishing, trimmed from the front
"""

import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from musterd.ipc.messages import SUCCEEDED
from musterd.supervisor.store import StoreError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x6D757374  # "must": tells our files from other databases
FILE_MODE = 0o600  # arguments and results are nobody else's business

# Statements kept ready per connection: the four of a group, each for all powers of two up to 1024.
STATEMENTS_CACHED = 64
# 16 MB of log between checkpoints. A checkpoint holds up the commit that causes it: fewer of them
# are each longer, and throughput was the same within the noise from 4 to 64 MB.
CHECKPOINT_PAGES = 4096
LOG_BYTES_KEPT = 64 * 1024 * 1024  # what a burst may leave behind of the log file
CACHE_KIB = 8 * 1024  # the hot end of both tables and of the index on id
BUSY_SECONDS = 5.0  # somebody else, such as a backup, may hold the file for a moment

_MAGIC = b"SQLite format 3\0"

# AUTOINCREMENT remembers the greatest seq ever used, also after its row went away. `wait_ns` counts
# from `wait_from` (wall clock); -1: nothing changed yet, the spec's delay counts from the submit.
# The blobs are last: what stands behind a long one is slow to read.
_SCHEMA = f"""
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
CREATE INDEX finished_unwell ON finished (state, number) WHERE state <> '{SUCCEEDED}';
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


def claim(path: Path) -> int:
    """A descriptor that keeps others from this store; to be closed after the last connection.

    Nothing is written to a file that is not ours, and SQLite does not see it before we looked.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise StoreError(
            f"the store {path} cannot be opened: {error.strerror}."
            " Check supervisor.state_dir and who owns it."
        ) from error
    try:
        try:
            # flock does not meddle with SQLite's own locks, which are of another kind.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"the store {path} is in use by another daemon."
                " Stop that one, or give this one a supervisor.state_dir of its own."
            ) from None
        head = os.pread(fd, len(_MAGIC), 0)
        if head and head != _MAGIC:
            raise unusable(path, "file is not a database")
        os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def connect(path: Path) -> sqlite3.Connection:
    """A connection that may be handed to another thread; each is used by one thread at a time."""
    connection = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level="IMMEDIATE",
        check_same_thread=False,
        cached_statements=STATEMENTS_CACHED,
    )
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_KEPT}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    # Debian builds SQLite to overwrite what is deleted with zeros: more pages to write each time.
    connection.execute("PRAGMA secure_delete = OFF")
    return connection


def prepare(path: Path) -> None:
    """Make the tables in a new file; refuse one that is foreign, newer or broken."""
    try:
        with closing(connect(path)) as connection:
            _check(path, connection)
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"the store {path} cannot have a write-ahead log on its file system."
                    " Put supervisor.state_dir on a local disk."
                )
            if not _tables(connection):
                connection.executescript(_SCHEMA)
    except sqlite3.OperationalError as error:  # of the disk or of locks, not of the content
        raise StoreError(
            f"the store {path} cannot be opened: {error}."
            " Check that the disk has room, works and is writable, and that nobody holds the file."
        ) from error
    except sqlite3.DatabaseError as error:
        raise unusable(path, str(error)) from error


def _check(path: Path, connection: sqlite3.Connection) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if _tables(connection) and application != APPLICATION_ID:
        raise StoreError(
            f"{path} is the database of another program (application id {application:#x})."
            " It was left as it is: give the daemon a supervisor.state_dir of its own."
        )
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the store {path} has version {version}, and this musterd knows versions up to"
            f" {SCHEMA_VERSION}. Install the musterd that wrote it, or a newer one."
        )


def _tables(connection: sqlite3.Connection) -> int:
    (count,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return int(count)


def unusable(path: Path, reason: str) -> StoreError:
    """The error for a file that cannot be read as a store."""
    return StoreError(
        f"the store {path} cannot be used: {reason}. It was left as it is: restore a copy, or move"
        f" it away together with {path.name}-wal and {path.name}-shm to start with an empty one."
    )
