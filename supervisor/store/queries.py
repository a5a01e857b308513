"""Read the store's tables for one request, over a connection that only reads."""

import queue
import sqlite3
import time
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import msgspec

from musterd.ipc.wire.messages import FAILED, SUCCEEDED, FailedAttempt
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.store.file import connect_reader
from musterd.supervisor.store.interface import (
    ATTEMPTS_KEPT,
    LIST_TASKS_MAX,
    PAGE_BYTES_MAX,
    RECOVERED_AT_ONCE,
    REFUSED,
    FindFact,
    FindFacts,
    FindSome,
    FindStranded,
    FindTasks,
    ListFinished,
    ListLive,
    Page,
    Portion,
    Query,
    ReadQueued,
    StoredTask,
    StrandedTasks,
    pool_of,
    without_payload,
)
from musterd.supervisor.store.result_batches import last_number, newest_results, result_rows_of
from musterd.supervisor.store.rows import (
    FINISHED_COLUMNS,
    LIVE_COLUMNS,
    SHORT_BYTES_MAX,
    STATEMENT_ROWS_MAX,
    failed_attempt,
    filled_up,
    finished_task,
    live_task,
    read_short,
    recovered_task,
    short_tasks,
    values,
)
from musterd.supervisor.store.task_batches import queued_rows, queued_rows_of, queued_tasks_of

# How far a list looks back. Without a limit, a filter that nothing matches reads everything.
LIST_ROWS_SEARCHED_MAX = 200_000


class Reader:
    """A connection that reads, and the requests that wait for the thread that uses it."""

    def __init__(self, name: str, path: Path, tries_max: int | None) -> None:
        self.name = name
        self.tries_max = tries_max  # of one request; None: until it is answered
        self.requests: queue.SimpleQueue[tuple[object, Query[Any]] | None] = queue.SimpleQueue()
        self.stale = False  # the connection is to a file that was lost
        self._path = path
        self._connection = connect_reader(path)

    @property
    def connection(self) -> sqlite3.Connection:
        """Return the connection, to the rewritten file if there is one."""
        if self.stale:
            self.stale = False  # first: the file may be written anew once more
            self._connection.close()
            self._connection = connect_reader(self._path)
        return self._connection

    def close(self) -> None:
        self._connection.close()


def answer(  # noqa: PLR0911 - one for each query
    connection: sqlite3.Connection, query: Query[Any], wall_ns: int
) -> object:
    """Return the answer to a query that only reads."""
    match query:
        case FindTasks() | FindSome():
            return _look_up(connection, query, wall_ns)
        case ReadQueued():
            return _read(connection, query.ids)
        case ListFinished():
            return _list(connection, query)
        case ListLive():
            return _list_live(connection, query, wall_ns)
        case FindStranded():
            return _stranded(connection, query, wall_ns)
        case FindFact():
            return _fact(connection, query.kind, query.key, wall_ns)
        case FindFacts():
            return [_fact(connection, query.kind, key, wall_ns) for key in query.keys]
    raise AssertionError(query)


def _look_up(
    connection: sqlite3.Connection, query: FindTasks | FindSome, wall_ns: int
) -> list[StoredTask] | Portion:
    # One transaction for all reads: between two, a task may move to another table and be missed.
    connection.execute("BEGIN")
    try:
        ids, fitting, next_bytes = query.ids, len(query.ids), 0
        if isinstance(query, FindSome):
            fitting, next_bytes = _fitting(connection, query)
        tasks = _find(connection, ids[:fitting], wall_ns)
        if query.attempts:
            tasks = [_with_attempts(connection, task) for task in tasks]
        if isinstance(query, FindSome):
            return Portion(tasks, ids[fitting:], next_bytes)
        return tasks
    finally:
        connection.rollback()


def _fitting(connection: sqlite3.Connection, query: FindSome) -> tuple[int, int]:
    """Return how many of the ids fit into `bytes_max`, and the size of the next task.

    SQLite knows the length of a blob without reading it. Tasks in batches are short, and as a rule
    much shorter than allowed.
    """
    ids, left = query.ids, query.bytes_max
    for start in range(0, len(ids), STATEMENT_ROWS_MAX):
        part = ids[start : start + STATEMENT_ROWS_MAX]
        ((size, parameters),) = filled_up([(task_id,) for task_id in part])
        among = f"WHERE id IN {values(size, 1)}"
        sizes: dict[str, int] = {}
        for lengths in (
            f"SELECT id, length(spec) + length(outcome) FROM finished {among}",
            f"SELECT id, length(spec) FROM live {among}",
        ):
            for task_id, length in connection.execute(lengths, parameters):
                sizes[task_id] = sizes.get(task_id, 0) + length
        for place, task_id in enumerate(part):
            length = sizes.get(task_id, SHORT_BYTES_MAX // 8)
            if length > left:
                return start + place, length
            left -= length
    return len(ids), 0


def _find(connection: sqlite3.Connection, ids: list[str], wall_ns: int) -> list[StoredTask]:
    tasks: dict[str, StoredTask] = {}
    for start in range(0, len(ids), STATEMENT_ROWS_MAX):
        part = ids[start : start + STATEMENT_ROWS_MAX]
        ((size, parameters),) = filled_up([(task_id,) for task_id in part])
        among = f"WHERE id IN {values(size, 1)}"
        # The newest end of a task counts, unless the task is live again.
        query = f"SELECT number, {FINISHED_COLUMNS} FROM finished {among}"
        ended = [(row[0], row[1:]) for row in connection.execute(query, parameters)]
        query = f"SELECT id, number FROM result_ids {among}"
        ended += result_rows_of(connection, connection.execute(query, parameters).fetchall())
        ended.sort(key=itemgetter(0))
        stored = [finished_task(row) for _, row in ended]
        query = f"SELECT {LIVE_COLUMNS} FROM live {among}"
        rows = connection.execute(query, parameters).fetchall() + queued_rows_of(connection, part)
        stored += [live_task(row, wall_ns) for row in rows]
        tasks.update((task.spec.id, task) for task in stored if task is not None)
    return [tasks[task_id] for task_id in dict.fromkeys(ids) if task_id in tasks]


def _read(connection: sqlite3.Connection, ids: list[str]) -> Page:
    """Read short tasks all at once, as is usual, and long ones one by one while they fit.

    Batches come first: meanwhile a task may move from its batch to a row, but never back.
    """
    tasks = OnDisk()
    for start in range(0, len(ids), STATEMENT_ROWS_MAX):
        part = ids[start : start + STATEMENT_ROWS_MAX]
        on_batches = queued_tasks_of(connection, part)
        tasks.extend(on_batches)
        part = _without(part, on_batches)
        if part:
            ((size, parameters),) = filled_up([(task_id,) for task_id in part])
            in_rows = short_tasks(*connection.execute(read_short(size), parameters).fetchone())
            tasks.extend(in_rows)
            part = _without(part, in_rows)
        if part:
            unread = _read_long(connection, part, tasks)
            if unread:
                return Page(tasks, unread + ids[start + STATEMENT_ROWS_MAX :])
    return Page(tasks, [])


def _without(ids: list[str], tasks: OnDisk) -> list[str]:
    if len(tasks.specs) == len(ids):
        return []
    read = {spec.id for spec in tasks.specs}
    return [id_ for id_ in ids if id_ not in read]


def _read_long(connection: sqlite3.Connection, ids: list[str], tasks: OnDisk) -> list[str]:
    """Add tasks up to PAGE_BYTES_MAX; return the ids of the rest."""
    size = 0
    query = f"SELECT {LIVE_COLUMNS} FROM live WHERE id = ?"
    for done, task_id in enumerate(ids):
        if size > PAGE_BYTES_MAX:
            return ids[done:]
        row = connection.execute(query, (task_id,)).fetchone()
        task = recovered_task(row, 0, 0) if row is not None else None
        if task is not None:
            tasks.add(task.seq, task.spec, task.submitted_wall_ns)
            size += len(task.spec.args)
    return []


def _with_attempts(connection: sqlite3.Connection, task: StoredTask) -> StoredTask:
    query = (
        "SELECT seq, attempt, at, worker, failure FROM attempts WHERE seq = ?"
        " ORDER BY at DESC, place DESC LIMIT ?"
    )
    rows = connection.execute(query, (task.seq, ATTEMPTS_KEPT)).fetchall()
    found: list[FailedAttempt | None] = [failed_attempt(row) for row in reversed(rows)]
    attempts = [attempt for attempt in found if attempt is not None]
    return msgspec.structs.replace(task, attempts=attempts) if attempts else task


def _list(connection: sqlite3.Connection, listing: ListFinished) -> list[StoredTask]:
    """List the newest finished tasks."""
    states = [listing.state]
    if listing.state == FAILED and not listing.dead:
        states.append(REFUSED)
    limit = min(listing.limit, LIST_TASKS_MAX)
    parts = [_newest(connection, state, listing.pool, limit) for state in states]
    if listing.state in (None, SUCCEEDED):
        after = last_number(connection) - LIST_ROWS_SEARCHED_MAX
        found = ((number, finished_task(row)) for number, row in newest_results(connection, after))
        parts.append(each for each in found if _is_of(each[1], listing.pool))
    tasks = (task for _, task in merge(*parts, key=itemgetter(0), reverse=True) if task is not None)
    return [without_payload(task) for task in islice(tasks, limit)]


def _newest(
    connection: sqlite3.Connection, state: str | None, pool: str | None, limit: int
) -> Iterator[tuple[int, StoredTask | None]]:
    """Yield the newest finished tasks in rows of their own, each with its number. An index skips
    tasks of other states."""
    where = ""
    parameters: list[Any] = []
    if state is not None:
        # SQLite uses the index of tasks that did not succeed only with its own condition.
        unwell = f" AND state <> '{SUCCEEDED}'" if state != SUCCEEDED else ""
        where = f"WHERE state = ?{unwell}"
        parameters = [state]
    newest = f"SELECT number, pool FROM finished {where} ORDER BY number DESC LIMIT ?"
    of_pool = "WHERE pool = ?" if pool is not None else ""
    parameters.append(LIST_ROWS_SEARCHED_MAX)
    if pool is not None:
        parameters.append(pool)
    parameters.append(limit)
    query = (
        f"SELECT number, {FINISHED_COLUMNS} FROM finished"
        f" WHERE number IN (SELECT number FROM ({newest}) {of_pool} LIMIT ?)"
        " ORDER BY number DESC"
    )
    return ((row[0], finished_task(row[1:])) for row in connection.execute(query, parameters))


def _is_of(task: StoredTask | None, pool: str | None) -> bool:
    return task is not None and (pool is None or pool_of(task.spec) == pool)


def _list_live(connection: sqlite3.Connection, listing: ListLive, wall_ns: int) -> list[StoredTask]:
    newest = f"SELECT {LIVE_COLUMNS}, pool FROM live ORDER BY seq DESC LIMIT ?"
    of_pool = "WHERE pool = ?" if listing.pool is not None else ""
    query = f"SELECT {LIVE_COLUMNS} FROM ({newest}) {of_pool} LIMIT ?"
    pool = [listing.pool] if listing.pool is not None else []
    limit = min(listing.limit, LIST_TASKS_MAX)
    parameters = [LIST_ROWS_SEARCHED_MAX, *pool, limit]
    in_rows = (live_task(row, wall_ns) for row in connection.execute(query, parameters))
    rows = islice(queued_rows(connection, newest=True), LIST_ROWS_SEARCHED_MAX)
    on_batches = (live_task(row, wall_ns) for row in rows)
    tasks = merge(
        (task for task in in_rows if task is not None),
        (task for task in on_batches if task is not None and _is_of(task, listing.pool)),
        key=attrgetter("seq"),
        reverse=True,
    )
    return [without_payload(task) for task in islice(tasks, limit)]


def unfinished_rows(connection: sqlite3.Connection) -> Iterator[tuple[Any, ...]]:
    """Yield all unfinished tasks as rows with LIVE_COLUMNS, by seq."""
    live = connection.execute(f"SELECT {LIVE_COLUMNS} FROM live ORDER BY seq")
    return merge(live, queued_rows(connection), key=itemgetter(0))


def newest_wall_ns(connection: sqlite3.Connection) -> int:
    """Return the newest time of day of the last tasks, 0 for none."""
    query = (
        "SELECT max(coalesce((SELECT submitted_at FROM live ORDER BY seq DESC LIMIT 1), 0),"
        " coalesce((SELECT finished_at FROM finished ORDER BY number DESC LIMIT 1), 0),"
        " coalesce((SELECT finished_at FROM results ORDER BY number DESC LIMIT 1), 0))"
    )
    ((newest,),) = connection.execute(query)
    return int(newest)


def contents(connection: sqlite3.Connection) -> tuple[list[StoredTask], list[StoredTask]]:
    """Return all unfinished tasks, and all finished ones with duplicates; for tests."""
    wall_ns = time.time_ns()
    live = [live_task(row, wall_ns) for row in unfinished_rows(connection)]
    query = f"SELECT number, {FINISHED_COLUMNS} FROM finished"
    ended = [(row[0], row[1:]) for row in connection.execute(query)]
    ended += newest_results(connection, 0, gone=True)
    ended.sort(key=itemgetter(0))
    finished = [finished_task(row) for _, row in ended]
    return [each for each in live if each], [each for each in finished if each]


def _stranded(connection: sqlite3.Connection, query: FindStranded, wall_ns: int) -> StrandedTasks:
    live = connection.execute(
        f"SELECT {LIVE_COLUMNS} FROM live WHERE pool = ? AND seq > ? ORDER BY seq LIMIT ?",
        (query.pool, query.after_seq, RECOVERED_AT_ONCE),
    )
    now_ns = time.monotonic_ns()
    rows = merge(live, queued_rows(connection, after=query.after_seq), key=itemgetter(0))
    found = (recovered_task(row, now_ns, wall_ns) for row in rows)
    of_pool = (task for task in found if task is not None and pool_of(task.spec) == query.pool)
    tasks = list(islice(of_pool, RECOVERED_AT_ONCE))
    return StrandedTasks(tasks, tasks[-1].seq if len(tasks) == RECOVERED_AT_ONCE else 0)


def _fact(connection: sqlite3.Connection, kind: str, key: str, wall_ns: int) -> bytes | None:
    query = "SELECT value, expires_at FROM facts WHERE kind = ? AND key = ?"
    row = connection.execute(query, (kind, key)).fetchone()
    value, end_ns = row or (None, 0)
    return None if 0 < end_ns <= wall_ns else value
