"""The store's tables, and the migration of older versions.

live       unfinished tasks, a row each; small and hot
sheets     batches of new tasks, many to a row, as they were submitted (task_batches.py)
finished   finished tasks, a row each, in the order of their end, trimmed from the front
results    batches of tasks that succeeded, many to a row; result_ids finds each task
attempts   errors of failed attempts, live or finished, by seq; a ring of the last ones per task
facts      what else survives restarts, by kind and key

The code says batch; the tables `sheets` and `sheet_masks` keep their older names, so that stores of
older versions can be read.

Step N leads from version N-1 to N. A new file takes all steps, an old file those it lacks, in one
transaction, after a copy of the old file was made beside it.
"""

import logging
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from musterd.ipc.wire.messages import SUCCEEDED
from musterd.supervisor.store.interface import log_fields

APPLICATION_ID = 0x6D757374  # "must": tells our files from other databases
FILE_MODE = 0o600  # arguments and results are nobody else's business

# AUTOINCREMENT remembers the greatest seq ever used, even after its row is gone. `wait_ns` counts
# from `wait_from` (wall clock); -1: nothing changed yet, the spec's delay counts from the submit.
# Blobs come last: columns behind a long blob are slow to read.
_TASKS = f"""
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
"""
# `place` is the attempt's place in the ring; attempts from before a manual retry have negative
# places. Small rows need no rowid; `facts` has one, because its values may be long.
_ATTEMPTS_AND_FACTS = """
CREATE TABLE attempts (
    seq INTEGER NOT NULL, place INTEGER NOT NULL, attempt INTEGER NOT NULL, at INTEGER NOT NULL,
    worker TEXT NOT NULL, failure BLOB NOT NULL, PRIMARY KEY (seq, place)) WITHOUT ROWID;
CREATE TABLE facts (
    kind TEXT NOT NULL, key TEXT NOT NULL, expires_at INTEGER NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (kind, key));
CREATE INDEX facts_ending ON facts (expires_at) WHERE expires_at > 0;
"""
# Small columns come first: they are read without the long one. `sheet_masks` has the masks of
# batches that have lost tasks. `results` and `finished` share one numbering.
_BATCHES = """
CREATE TABLE sheets (
    first INTEGER PRIMARY KEY, mask BLOB NOT NULL, low TEXT NOT NULL, high TEXT NOT NULL,
    tasks BLOB NOT NULL);
CREATE INDEX sheets_ids ON sheets (high, low);
CREATE TABLE sheet_masks (first INTEGER PRIMARY KEY, mask BLOB NOT NULL);
CREATE TABLE results (
    number INTEGER PRIMARY KEY, size INTEGER NOT NULL, finished_at INTEGER NOT NULL,
    tasks BLOB NOT NULL);
CREATE TABLE result_ids (id TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""
STEPS = (_TASKS, _ATTEMPTS_AND_FACTS, _BATCHES)
SCHEMA_VERSION = len(STEPS)

log = logging.getLogger("musterd")


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of the tables in this file, 0 for none."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the tables to this version, all or none."""
    version = version_of(connection)
    if version == SCHEMA_VERSION:
        return
    copy = _copy(connection, path, version) if version else None
    connection.executescript(
        f"BEGIN IMMEDIATE; {''.join(STEPS[version:])}"
        f" PRAGMA application_id = {APPLICATION_ID};"
        f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )
    if copy is not None:
        log.warning(
            f"store: migrated from version {version} to {SCHEMA_VERSION}; {copy.name} is a copy"
            " of the old one, delete it when all is well",
            extra=log_fields("store.migrated", copy),
        )


def _copy(connection: sqlite3.Connection, path: Path, version: int) -> Path:
    """Make a copy that an older musterd can use, on disk before anything changes."""
    copy = path.with_name(f"{path.name}.v{version}.bak")
    unfinished = copy.with_name(f"{copy.name}.tmp")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
    try:
        with closing(sqlite3.connect(unfinished)) as target:
            connection.backup(target)
        sync(unfinished)
        unfinished.rename(copy)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync(path.parent)
    return copy


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
