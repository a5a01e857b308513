"""The store's file: claim it, check it and open it.

The check uses a connection that cannot write, so that a foreign, newer or corrupt file stays
exactly as it was found. A corrupt file is set aside under another name.
"""

import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

from musterd.supervisor.store.identity import ENDINGS
from musterd.supervisor.store.interface import StoreError, log_fields
from musterd.supervisor.store.reserve import reserve_of
from musterd.supervisor.store.schema import (
    APPLICATION_ID,
    FILE_MODE,
    SCHEMA_VERSION,
    bring_up_to_date,
    sync,
    version_of,
)

FOLDER_MODE = 0o700  # of a state directory that has to be made again
# A transaction that is under way before there is a log: SQLite undoes it at the next opening.
JOURNAL = "-journal"
STOP, SET_ASIDE = "stop", "set-aside"  # values of store.on_corrupt

# Statements cached per connection: those of a group, each for all powers of two up to 1024.
STATEMENTS_CACHED = 96
# 16 MB of log between checkpoints. A checkpoint delays the commit that causes it: fewer checkpoints
# take longer each, and throughput was the same within the noise from 4 to 64 MB.
CHECKPOINT_PAGES = 4096
LOG_BYTES_KEPT = 64 * 1024 * 1024  # the log file that a burst may leave behind
CACHE_KIB = 8 * 1024  # the hot end of both tables and of the index on id
BUSY_SECONDS = 5.0  # another process, such as a backup, may hold the file for a moment

# A file up to this size is checked at every start (measured: 0.04 s for 50 MB, 0.6 s for 500 MB,
# more on a slow disk), a larger one only after an unclean end, and never for longer than
# CHECK_SECONDS: a start must not take minutes.
CHECKED_ALWAYS_BYTES = 64 * 1024 * 1024
CHECK_SECONDS = 10.0
CHECK_STEPS = 100_000  # of SQLite's virtual machine between two clock reads: well under 0.1 s
FAULTS_SHOWN_MAX = 5

_MAGIC = b"SQLite format 3\0"

log = logging.getLogger("musterd")


class CorruptStore(StoreError):
    """The content of the file cannot be trusted."""


class LostStore(StoreError):
    """The file was replaced or cut while the daemon used it."""


def take(path: Path, on_corrupt: str) -> int:
    """Prepare the store's file; return a descriptor that keeps other daemons out.

    Close the descriptor after the last connection.
    """
    if not _anew(path).exists():
        if not path.exists():
            _take_leave(path, on_corrupt)
        elif _index(path).exists() and not _log(path).exists():
            _miss_log(path, on_corrupt)
    try:
        return _open(path)
    except CorruptStore as error:
        if on_corrupt != SET_ASIDE:
            aside = _set_aside_before(path)
            raise CorruptStore(f"{error}. {_what_to_do(path, aside or path)}") from error
        log.critical(
            f"{error}: an empty one takes its place", extra=log_fields("store.corrupt", error)
        )
    return _open(path)


def _take_leave(path: Path, on_corrupt: str) -> None:
    """Go on without a missing store; StoreError unless the operator has allowed that."""
    if on_corrupt != SET_ASIDE and (aside := _set_aside_before(path)):
        raise StoreError(
            f"the store {path} was corrupt and is set aside as {aside.name}, and there is none in"
            f" its place. {_what_to_do(path, aside)}"
        )
    traces = [each for each in _traces(path) if each.exists()]
    if not traces:
        return
    # SQLite would remove the log with the last commits as soon as it makes a new file.
    beside = _log(path)
    if beside in traces:
        reason = f"the store {path} is not there, but its log {beside.name} is"
    else:
        reason = (
            f"the store {path} is not there, but {traces[0].name} is: it was removed or moved while"
            " a daemon used it, and that daemon was killed"
        )
    if on_corrupt != SET_ASIDE:
        raise StoreError(
            f"{reason}. Put {path.name} back beside it, or restore a copy; or start once with"
            " --set store.on_corrupt=set-aside to go on with an empty one."
        )
    set_aside(path)
    _forget_draft(path)
    log.critical(
        f"{reason}: it is set aside, and an empty store takes its place",
        extra=log_fields("store.corrupt", reason),
    )


def _traces(path: Path) -> list[Path]:
    """Return files that only a killed daemon leaves: a clean end removes them."""
    beside = [_log(path)] if _log(path).exists() and _log(path).stat().st_size else []
    return [*beside, _draft(path), _index(path), reserve_of(path)]


def _miss_log(path: Path, on_corrupt: str) -> None:
    """Report a lost log of a store that was in use when its daemon was killed. Raise StoreError
    unless `on_corrupt` says to go on without the log."""
    index = _index(path)
    reason = (
        f"the log {_log(path).name} of the store {path} is not there, but {index.name} is: the log"
        " was removed or moved, and the last commits are missing"
    )
    if on_corrupt != SET_ASIDE:
        raise StoreError(
            f"{reason}. Put the log back beside it, or restore a copy; or remove {index.name} to go"
            " on without them."
        )
    index.unlink()
    log.critical(
        f"{reason}: the store is used without them", extra=log_fields("store.corrupt", reason)
    )


def _open(path: Path) -> int:
    if _anew(path).exists():  # a daemon was killed while it put the file in place
        log.warning(
            "store: a file that was written anew is put in its place",
            extra=log_fields("store.rewritten", path),
        )
        try:
            _put_in_place(path)
        except OSError as error:
            raise StoreError(
                f"the store {path} was written anew and cannot be put in its place: {error}."
                " Check that the disk works and is writable."
            ) from error
    fd = _claim(path)
    try:
        _prepare(path, fd)
        _forget_draft(path)
    except CorruptStore as error:
        aside = _set_aside(path)  # while the descriptor keeps others out
        os.close(fd)
        raise CorruptStore(f"{error}. It is set aside as {aside.name}") from error
    except OSError as error:
        os.close(fd)
        raise StoreError(
            f"the store {path} cannot be prepared: {error}."
            " Check that the disk has room, works and is writable."
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _what_to_do(path: Path, aside: Path) -> str:
    return (
        f"Restore a copy as {path}, or what can be read of {aside.name} (see docs/operations.md);"
        " or start once with --set store.on_corrupt=set-aside to go on with an empty one."
    )


def connect_writer(path: Path, synchronous: str) -> sqlite3.Connection:
    """Open the connection that writes, to a file with a log."""
    connection = connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute(f"PRAGMA synchronous = {synchronous}")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    connection = connect(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection for any thread, but one thread at a time."""
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
    # Debian's SQLite overwrites deleted rows with zeros: more pages to write each time.
    connection.execute("PRAGMA secure_delete = OFF")
    return connection


def is_corruption(error: Exception) -> bool:
    """Tell whether an error is about the content of the file, not about the disk or locks."""
    return type(error) is sqlite3.DatabaseError


def is_full(error: BaseException) -> bool:
    """Tell whether the disk is full."""
    return (
        getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
        or getattr(error, "errno", 0) == errno.ENOSPC
    )


def remedy(error: Exception) -> str:
    """Return what an operator can do about an error."""
    if isinstance(error, MemoryError):
        return "give the daemon more memory"
    if is_full(error):
        return "make room on the disk"
    if isinstance(error, PermissionError):
        return "let the daemon's user write there, or make the directory for that user"
    if is_corruption(error):
        return "stop the daemon: the next start checks the file"
    return "repair the disk"


def is_unwritten(error: BaseException) -> bool:
    """Tell whether a failed commit is not in the log: the frame that ends a transaction is the last
    one, so a failed write means that this frame is missing."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def suspect(path: Path) -> None:
    """Request a check of the file at the next start, however large it is."""
    _suspicion(path).touch(FILE_MODE)


# -- a file that was lost while it was in use ---------------------------------------------------


def rewrite(connection: sqlite3.Connection, path: Path) -> int:
    """Put a copy of all that the connection can read in the place of the lost file.

    Returns a descriptor that keeps other daemons out, as take() does. Files in its place get other
    names. A daemon that is killed meanwhile loses nothing: the copy is complete before it gets the
    name that the next start looks for.
    """
    with suppress(FileExistsError):  # the directory may be gone with the files
        path.parent.mkdir(FOLDER_MODE)
    draft = _draft(path)
    fd = save(connection, draft)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(_anew(path))
        sync(path.parent)
        _put_in_place(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def save(connection: sqlite3.Connection, copy: Path) -> int:
    """Copy all that the connection can read to disk; return a descriptor of the copy."""
    copy.unlink(missing_ok=True)
    fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        connection.execute("VACUUM INTO ?", (str(copy),))
        os.fsync(fd)
    except BaseException:
        os.close(fd)
        with suppress(OSError):  # a part must not be taken for the whole
            copy.unlink()
        raise
    return fd


def forget_copy(path: Path) -> None:
    """Remove the copy of a file that is back: the file is newer, and no start may use the copy."""
    with suppress(FileNotFoundError):
        _anew(path).unlink()
        sync(path.parent)


def saved_name(path: Path, word: str) -> Path:
    """Return an unused name beside the store."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name, count = path.with_name(f"{path.name}.{word}-{stamp}"), 1
    while name.exists():
        count += 1
        name = path.with_name(f"{path.name}.{word}-{stamp}-{count}")
    return name


def _anew(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _draft(path: Path) -> Path:
    """Return the path of a copy that is being written; an incomplete copy is useless."""
    return path.with_name(f"{path.name}.new.tmp")


def _forget_draft(path: Path) -> None:
    for ending in ("", JOURNAL):
        _draft(path).with_name(_draft(path).name + ending).unlink(missing_ok=True)


def set_aside(path: Path, endings: Iterable[str] = (*ENDINGS, JOURNAL)) -> None:
    """Give other names to what is at the place of the store's files."""
    aside = saved_name(path, "lost")
    for ending in endings:
        left = path.with_name(path.name + ending)
        if left.exists():
            left.rename(aside.with_name(aside.name + ending))
    sync(path.parent)


def _put_in_place(path: Path) -> None:
    set_aside(path)
    _anew(path).rename(path)
    sync(path.parent)


# -- opening ----------------------------------------------------------------------------------


def _claim(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise StoreError(
            f"the store {path} cannot be opened: {error.strerror}."
            " Check supervisor.state_dir and who owns it."
        ) from error
    try:
        # flock does not affect SQLite's own locks, which are POSIX locks.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreError(
            f"the store {path} is in use by another daemon."
            " Stop that one, or give this one a supervisor.state_dir of its own."
        ) from None
    os.fchmod(fd, FILE_MODE)
    return fd


def _prepare(path: Path, fd: int) -> None:
    """Check the file and bring its tables up to date; refuse a foreign or newer file."""
    head = os.pread(fd, len(_MAGIC), 0)
    if not head and _suspicion(path).exists():
        raise CorruptStore(f"the store {path} is empty, and was not before")
    if head and head != _MAGIC:
        raise CorruptStore(f"the store {path} cannot be used: file is not a database")
    try:
        if head:
            _undo_half(path)
            with closing(
                sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            ) as connection:
                _inspect(path, connection)
        with closing(connect(path)) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"the store {path} cannot have a write-ahead log on its file system."
                    " Put supervisor.state_dir on a local disk."
                )
            # The log may exist in the kernel's memory only: a failed sync is not repeated. So the
            # log moves into the file, with a sync of its own, before it counts.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            bring_up_to_date(connection, path)
    except sqlite3.OperationalError as error:  # about the disk or locks, not the content
        raise StoreError(
            f"the store {path} cannot be opened: {error}."
            " Check that the disk has room, works and is writable, and that nobody holds the file."
        ) from error
    except sqlite3.DatabaseError as error:
        raise CorruptStore(f"the store {path} cannot be used: {error}") from error


def _undo_half(path: Path) -> None:
    """Undo a transaction that a kill has cut off: before, a read-only connection would fail. The
    next connection that can write would do the same."""
    if path.with_name(path.name + JOURNAL).exists():
        with closing(connect(path)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()


def _inspect(path: Path, connection: sqlite3.Connection) -> None:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    version = version_of(connection)
    if tables and application != APPLICATION_ID:
        raise StoreError(
            f"{path} is the database of another program (application id {application:#x})."
            " It was left as it is: give the daemon a supervisor.state_dir of its own."
        )
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the store {path} has version {version}, and this musterd knows versions up to"
            f" {SCHEMA_VERSION}. Install the musterd that wrote it, or a newer one."
        )
    if _suspicious(path):
        _check(path, connection)
        _suspicion(path).unlink(missing_ok=True)


# -- checking ---------------------------------------------------------------------------------


def _suspicion(path: Path) -> Path:
    return path.with_name(f"{path.name}.suspect")


def _log(path: Path) -> Path:
    """Return SQLite's write-ahead log, which a clean end removes."""
    return path.with_name(f"{path.name}-wal")


def _index(path: Path) -> Path:
    """Memory that SQLite's connections share, which a clean end removes before the log."""
    return path.with_name(f"{path.name}-shm")


def _suspicious(path: Path) -> bool:
    log_file = _log(path)
    return (
        path.stat().st_size <= CHECKED_ALWAYS_BYTES
        or (log_file.exists() and log_file.stat().st_size > 0)
        or _suspicion(path).exists()
    )


def _check(path: Path, connection: sqlite3.Connection) -> None:
    began = time.monotonic()
    connection.set_progress_handler(lambda: time.monotonic() - began > CHECK_SECONDS, CHECK_STEPS)
    try:
        faults = connection.execute(f"PRAGMA quick_check({FAULTS_SHOWN_MAX})").fetchall()
    except sqlite3.OperationalError as error:
        if time.monotonic() - began <= CHECK_SECONDS:
            raise
        log.warning(
            f"store: the check was ended after {CHECK_SECONDS:g} s and found nothing until then",
            extra=log_fields("store.check", error),
        )
        return
    finally:
        connection.set_progress_handler(None, 0)
    if faults != [("ok",)]:
        found = "; ".join(" ".join(str(fault).split()) for (fault,) in faults)
        raise CorruptStore(f"the store {path} is corrupt: {found}")


def _set_aside_before(path: Path) -> Path | None:
    """Return the newest file that was set aside, or None."""
    names = [
        entry
        for entry in path.parent.glob(f"{path.name}.corrupt-*")
        if not entry.name.endswith(("-wal", "-shm", JOURNAL))
    ]
    return max(names, default=None)


def _set_aside(path: Path) -> Path:
    """Rename the file and its log; never overwrite anything."""
    aside = saved_name(path, "corrupt")
    for ending in ("-wal", "-shm", JOURNAL):
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + ending))
    path.rename(aside)
    _suspicion(path).unlink(missing_ok=True)
    return aside
