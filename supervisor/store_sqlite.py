"""The durable store: one SQLite file, one thread that writes, one that reads.

A finish moves a task from `live` to `finished` in one transaction, so a task is always in exactly
one of them. The writer takes everything that waits into one transaction (group commit), and
publishes the group's highest ticket after its commit. A group that cannot be written is kept and
tried again; meanwhile nothing completes.
"""

import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from musterd.ipc.messages import SUCCEEDED
from musterd.supervisor.core.actions import Persist
from musterd.supervisor.core.events import Recovered
from musterd.supervisor.store import (
    LIST_TASKS_MAX,
    Bell,
    Found,
    StoredTask,
    StoreError,
    without_payload,
)
from musterd.supervisor.store_file import claim, connect, prepare, unusable
from musterd.supervisor.store_rows import (
    FINISHED_COLUMNS,
    LIVE_COLUMNS,
    TRIM,
    Group,
    delete_live,
    filled_up,
    finished_task,
    insert_finished,
    insert_live,
    live_task,
    recovered_task,
    update_live,
    values,
)

RETRY_SECONDS = 1.0  # after a failed commit or read; a full disk is not emptied faster than that
READ_TRIES = 3  # after that the question is dropped: one broken page must not block all others
READS_WAITING_MAX = 20_000  # questions; about a second of work
TRIM_ROWS = 1000  # per transaction: some milliseconds, so that no commit is held up for longer
KEEP_NS_MAX = 2**62  # a time of day plus this is still an integer of SQLite's
# How far list_finished() looks back. Without an end, a filter that nothing matches reads it all.
LIST_ROWS_SEARCHED_MAX = 200_000

log = logging.getLogger("musterd")


class _Question(Struct, frozen=True):
    """find() where there are ids, else list_finished()."""

    token: object
    ids: list[str] | None
    state: str | None = None
    pool: str | None = None
    limit: int = 0


class SqliteStore:
    """`durability`: "full" (on disk before completed() says so) or "normal" (a moment later)."""

    immediate = False

    def __init__(self, path: Path, durability: str) -> None:
        synchronous = {"full": "FULL", "normal": "NORMAL"}[durability]
        self.commits = 0
        self.conflicts = 0  # rows that were not as the core believed: a mistake of ours
        self._path = path
        self._lock_fd = claim(path)
        try:
            prepare(path)
            self._writer = connect(path)
            self._reader = connect(path)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._writer.execute(f"PRAGMA synchronous = {synchronous}")
        self._reader.execute("PRAGMA query_only = ON")
        self._bell = Bell()
        self._closing = threading.Event()
        self._closed = False
        self._problems: dict[str, str] = {}  # of the writer and of the reader, by their names
        self._keep_ns: int | None = None  # while a trim is under way
        self._ticket: int | None = None  # the highest that is durable
        self._told: int | None = None  # the highest that completed() told
        self._last: int | None = None  # the highest that write() was given
        self._writes: queue.SimpleQueue[Persist | None] = queue.SimpleQueue()  # None only wakes
        self._reads: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._answers: deque[Found] = deque()
        self._threads = [
            threading.Thread(target=self._guard, args=(loop, name), name=f"store-{name}")
            for name, loop in (("writer", self._write_loop), ("reader", self._read_loop))
        ]
        for thread in self._threads:
            thread.start()

    # -- for the loop's thread ----------------------------------------------------------------

    def recover(self, now_ns: int, wall_ns: int) -> list[Recovered]:
        recovered = []
        try:
            with closing(connect(self._path)) as connection:
                for row in connection.execute(f"SELECT {LIVE_COLUMNS} FROM live ORDER BY seq"):
                    task = recovered_task(row, now_ns, wall_ns)
                    if task is not None:
                        recovered.append(task)
        except sqlite3.Error as error:
            raise unusable(self._path, str(error)) from error
        return recovered

    def last_seq(self) -> int:
        try:
            with closing(connect(self._path)) as connection:
                query = "SELECT seq FROM sqlite_sequence WHERE name = 'live'"
                return int(connection.execute(query).fetchone()[0])
        except sqlite3.Error as error:
            raise unusable(self._path, str(error)) from error

    def write(self, persist: Persist) -> None:
        assert not self._closed
        self._last = persist.ticket
        self._writes.put(persist)

    def fileno(self) -> int:
        return self._bell.fileno()

    def completed(self) -> int | None:
        self._bell.clear()  # first: whatever is published after this rings again
        ticket = self._ticket
        if ticket == self._told:
            return None
        self._told = ticket
        return ticket

    def find(self, ids: list[str], token: object) -> bool:
        return self._ask(_Question(token, ids))

    def list_finished(self, state: str | None, pool: str | None, limit: int, token: object) -> bool:
        return self._ask(_Question(token, None, state, pool, limit))

    def found(self) -> list[Found]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def problem(self) -> str | None:
        return "; ".join(list(self._problems.values())) or None

    def trim(self, keep_ns: int) -> None:
        self._keep_ns = min(keep_ns, KEEP_NS_MAX)
        self._writes.put(None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join()
        self._reader.close()
        self._writer.close()  # the last one: SQLite moves the log into the file and removes it
        os.close(self._lock_fd)
        self._bell.close()
        if self._ticket != self._last:
            raise StoreError(
                f"the store {self._path} was closed without the latest changes: {self.problem()}."
                " Tasks that they were about will run again."
            )

    def _ask(self, question: _Question) -> bool:
        assert not self._closed
        if self._reads.qsize() >= READS_WAITING_MAX:
            return False
        self._reads.put(question)
        return True

    # -- for both threads ---------------------------------------------------------------------

    def _guard(self, loop: Callable[[], None], name: str) -> None:
        try:
            loop()
        except BaseException as error:
            self._problems[name] = f"the store's {name} ended: {error!r}"
            self._bell.ring()
            raise

    def _failed(self, name: str, error: Exception) -> None:
        reason = f"the store {self._path} cannot be used by its {name}: {error}"
        if self._problems.get(name) != reason:
            log.error(
                "store fails, trying again",
                extra={"fields": {"EVENT": "store.failed", "REASON": reason}},
            )
        self._problems[name] = reason
        self._bell.ring()

    def _works(self, name: str) -> None:
        if self._problems.pop(name, None):
            log.info("store works again", extra={"fields": {"EVENT": "store.recovered"}})
            self._bell.ring()

    # -- the writer's thread ------------------------------------------------------------------

    def _write_loop(self) -> None:
        while not (self._closing.is_set() and self._writes.empty()):
            group = self._next_group(wait=self._keep_ns is None)
            if group is not None:
                if not self._write_group(group):
                    return
                self._ticket = group.ticket
                self._bell.ring()
            if self._keep_ns is not None:
                self._trim_slice(self._keep_ns)

    def _next_group(self, *, wait: bool) -> Group | None:
        group = Group()
        with suppress(queue.Empty):
            persist = self._writes.get(block=wait)
            wall_ns = time.time_ns()
            while True:
                if persist is not None:
                    group.take(persist, wall_ns)
                    if group.full():
                        break
                persist = self._writes.get_nowait()
        return group if group.ticket is not None else None

    def _write_group(self, group: Group) -> bool:
        """Until it is written; False if that failed and the store is being closed."""
        while True:
            last_try = self._closing.is_set()
            try:
                self._commit(group)
            except sqlite3.Error as error:
                self._roll_back()
                self._failed("writer", error)
            else:
                self._works("writer")
                return True
            if last_try:
                return False
            self._closing.wait(RETRY_SECONDS)

    def _commit(self, group: Group) -> None:
        if group.added:
            rows = list(group.added.values())
            if self._execute(insert_live, rows) != len(rows):
                self._report_conflicts(rows)
        if group.changed:
            self._execute(update_live, list(group.changed.values()))
        if group.finished:
            self._execute(insert_finished, group.finished)
        if group.ended:
            self._execute(delete_live, group.ended)
        if group.last_seq:
            self._writer.execute(
                "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'live'",
                (group.last_seq,),
            )
        self._writer.commit()
        self.commits += 1

    def _execute(self, statement: Callable[[int], str], rows: Sequence[Sequence[Any]]) -> int:
        """The number of rows that were changed."""
        # executemany() with one set: execute() would give the interpreter lock away once more.
        return sum(
            self._writer.executemany(statement(size), (parameters,)).rowcount
            for size, parameters in filled_up(rows)
        )

    def _report_conflicts(self, rows: list[tuple[Any, ...]]) -> None:
        """The core never gives a seq or a live id twice; if it does, the others must not suffer."""
        query = "SELECT 1 FROM live WHERE seq = ? AND id = ?"
        for seq, task_id, *_ in rows:
            if self._writer.execute(query, (seq, task_id)).fetchone() is None:
                self.conflicts += 1
                log.error(
                    "task is not stored: its seq or id is taken",
                    extra={"fields": {"EVENT": "store.conflict", "TASK": task_id, "SEQ": seq}},
                )

    def _trim_slice(self, keep_ns: int) -> None:
        """One small transaction; the trim ends with a slice that finds nothing."""
        wall_ns = time.time_ns()
        try:
            slice_ = (TRIM_ROWS, wall_ns - keep_ns, wall_ns + keep_ns)
            deleted = self._writer.execute(TRIM, slice_).rowcount
            self._writer.commit()
        except sqlite3.Error as error:
            self._roll_back()
            self._failed("writer", error)
            deleted = 0  # the next trim() tries again
        else:
            self._works("writer")
        if deleted == 0 or self._closing.is_set():
            self._keep_ns = None

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):  # after most errors SQLite has rolled back by itself
            self._writer.rollback()

    # -- the reader's thread ------------------------------------------------------------------

    def _read_loop(self) -> None:
        while not self._closing.is_set():
            question = self._reads.get()
            if question is not None:
                self._answer(question)

    def _answer(self, question: _Question) -> None:
        """Dropped after READ_TRIES: no answer is better than a wrong "no such task"."""
        for _ in range(READ_TRIES):
            try:
                tasks = self._look_up(question)
            except sqlite3.Error as error:
                self._failed("reader", error)
                if self._closing.wait(RETRY_SECONDS):
                    return
            else:
                self._works("reader")
                self._answers.append((question.token, tasks))
                self._bell.ring()
                return

    def _look_up(self, question: _Question) -> list[StoredTask]:
        return self._list(question) if question.ids is None else self._find(question.ids)

    def _find(self, ids: list[str]) -> list[StoredTask]:
        tasks: dict[str, StoredTask] = {}
        wall_ns = time.time_ns()
        for size, parameters in filled_up([(task_id,) for task_id in ids]):
            among = f"WHERE id IN {values(size, 1)}"
            # The newest finish counts, and a task that is live again before all.
            query = f"SELECT {FINISHED_COLUMNS} FROM finished {among} ORDER BY number"
            stored = [finished_task(row) for row in self._reader.execute(query, parameters)]
            query = f"SELECT {LIVE_COLUMNS} FROM live {among}"
            stored += [live_task(row, wall_ns) for row in self._reader.execute(query, parameters)]
            tasks.update((task.spec.id, task) for task in stored if task is not None)
        return [tasks[task_id] for task_id in dict.fromkeys(ids) if task_id in tasks]

    def _list(self, question: _Question) -> list[StoredTask]:
        where = ["number > (SELECT max(number) FROM finished) - ?"]
        parameters: list[Any] = [LIST_ROWS_SEARCHED_MAX]
        if question.state is not None:
            where.append("state = ?")
            parameters.append(question.state)
            if question.state != SUCCEEDED:  # said aloud, so that the index of these is used
                where.append(f"state <> '{SUCCEEDED}'")
        if question.pool is not None:
            where.append("pool = ?")
            parameters.append(question.pool)
        parameters.append(min(question.limit, LIST_TASKS_MAX))
        query = (
            f"SELECT {FINISHED_COLUMNS} FROM finished WHERE {' AND '.join(where)}"
            " ORDER BY number DESC LIMIT ?"
        )
        tasks = map(finished_task, self._reader.execute(query, parameters))
        return [without_payload(task) for task in tasks if task is not None]
