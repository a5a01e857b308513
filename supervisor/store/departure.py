"""Take unfinished tasks out of a store whose daemon is stopped: another queue takes them over.

A task leaves in three steps: its batch is noted in a file beside the store, the other queue takes
the batch, the store loses it. After a kill at any point a task is in the store, or out of it,
or *in doubt*: it is in the store, and in the batch that the file names. No daemon starts while a
batch is in doubt, because it would run tasks that the other queue may have.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path

import msgspec
from msgspec import Struct

from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.core.model.ledger import CANCEL
from musterd.supervisor.store.file import STOP, connect_writer, take
from musterd.supervisor.store.interface import StoreError
from musterd.supervisor.store.rows import LIVE_COLUMNS, Group, delete_attempts, recovered_task
from musterd.supervisor.store.schema import FILE_MODE, sync
from musterd.supervisor.store.task_batches import queued_rows
from musterd.supervisor.store.writer import Writer

DOUBT_FILE = "adopting.json"  # beside the store


class Doubt(Struct, frozen=True):
    """A batch that another queue may have taken."""

    cluster: str  # which one
    place: str  # where that is, for people
    at: float  # wall-clock time of the first attempt
    ids: list[str]


def doubt_file(store: Path) -> Path:
    return store.with_name(DOUBT_FILE)


def refuse_in_doubt(store: Path) -> None:
    """Raise StoreError if a batch is in doubt."""
    path = doubt_file(store)
    if path.exists():
        raise StoreError(
            f"tasks of the store {store} are in doubt: musterctl cluster adopt was cut off while "
            "it moved them into a cluster. Run it again. If that cluster is gone for good, remove "
            f"{path}: tasks that it names may then run twice."
        )


class Departure:
    """A store that loses tasks. No daemon can use it meanwhile."""

    def __init__(self, path: Path) -> None:
        """StoreError if the store is in use, or cannot be used."""
        self._path = path
        self._lock_fd = take(path, STOP)
        try:
            connection = connect_writer(path, "FULL")
            self._writer = Writer(connection, path, time.time_ns)
        except BaseException:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        self._writer.close()
        os.close(self._lock_fd)

    # -- what there is ------------------------------------------------------------------------

    def tasks(self, after: int, limit: int) -> tuple[list[Recovered], int]:
        """Return the next unfinished tasks by seq, and the seq of the last one, 0 if there is none.

        Times of a task are what is left of them. A task that cannot be read is logged and left out.
        """
        connection = self._writer.connection
        query = f"SELECT {LIVE_COLUMNS} FROM live WHERE seq > ? ORDER BY seq LIMIT ?"
        live = connection.execute(query, (after, limit)).fetchall()
        merged = merge(live, queued_rows(connection, after=after), key=itemgetter(0))
        rows = list(islice(merged, limit))
        wall_ns = time.time_ns()
        read = [recovered_task(row, 0, wall_ns) for row in rows]
        return [task for task in read if task is not None], rows[-1][0] if rows else 0

    def cancelled(self) -> set[str]:
        """Return tasks that were cancelled, and have not ended: a daemon ends them."""
        query = "SELECT key FROM facts WHERE kind = ?"
        return {key for (key,) in self._writer.connection.execute(query, (CANCEL,))}

    # -- what leaves --------------------------------------------------------------------------

    def doubt(self) -> Doubt | None:
        """Return the batch that is in doubt."""
        try:
            data = doubt_file(self._path).read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=Doubt)
        except msgspec.DecodeError as error:
            raise StoreError(f"{doubt_file(self._path)} cannot be read: {error}") from error

    def announce(self, doubt: Doubt) -> None:
        """Note a batch before the other queue hears of it. It is on disk when this returns."""
        path = doubt_file(self._path)
        new = path.with_name(f"{path.name}.new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(doubt))
            file.flush()
            os.fsync(fd)
        new.rename(path)
        sync(path.parent)

    def remove(self, seqs: Sequence[int]) -> None:
        """Remove tasks that the other queue has. They are gone on disk when this returns."""
        if not seqs:
            return
        group = Group()
        group.ended = sorted(seqs)
        self._forget_attempts(group.ended)
        self._writer.commit(group)

    def _forget_attempts(self, seqs: Sequence[int]) -> None:
        for part in _portions(seqs):
            self._writer.connection.execute(delete_attempts(len(part)), part)

    def settle(self) -> None:
        """Note that no batch is in doubt any more."""
        with suppress(FileNotFoundError):
            doubt_file(self._path).unlink()
            sync(self._path.parent)


def _portions(seqs: Sequence[int], size: int = 512) -> Iterator[list[int]]:
    for start in range(0, len(seqs), size):
        yield list(seqs[start : start + size])
