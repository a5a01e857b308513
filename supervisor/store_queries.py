"""What is asked of the store's tables, over the reader's connection."""

import sqlite3
import time
from typing import Any

import msgspec
from msgspec import Struct

from musterd.ipc.messages import SUCCEEDED, FailedAttempt
from musterd.supervisor.core.events import Recovered
from musterd.supervisor.store import (
    ATTEMPTS_KEPT,
    LIST_TASKS_MAX,
    PAGE_BYTES_MAX,
    RECOVERED_AT_ONCE,
    Answer,
    FoundFact,
    Page,
    StoredTask,
    StrandedTasks,
    without_payload,
)
from musterd.supervisor.store_rows import (
    FINISHED_COLUMNS,
    LIVE_COLUMNS,
    STATEMENT_ROWS_MAX,
    failed_attempt,
    filled_up,
    finished_task,
    live_task,
    queued_tasks,
    read_short,
    recovered_task,
    values,
)

# How far a list looks back. Without an end, a filter that nothing matches reads it all.
LIST_ROWS_SEARCHED_MAX = 200_000


class Tasks(Struct, frozen=True):
    """Those of these ids, live or finished."""

    ids: list[str]
    attempts: bool  # with their failed attempts


class Queued(Struct, frozen=True):
    """Those of these ids that are live, to be run."""

    ids: list[str]


class Listing(Struct, frozen=True):
    """The newest finished ones, without arguments and values."""

    state: str | None
    pool: str | None
    limit: int


class LiveListing(Struct, frozen=True):
    """The newest unfinished ones, without arguments."""

    pool: str | None
    limit: int


class OneFact(Struct, frozen=True):
    kind: str
    key: str


class Unfinished(Struct, frozen=True):
    """The next live ones of a pool, in the order of their seq."""

    pool: str
    after_seq: int


Query = Tasks | Queued | Listing | LiveListing | OneFact | Unfinished


def answer(connection: sqlite3.Connection, query: Query) -> Answer:
    if isinstance(query, Tasks):
        return _look_up(connection, query)
    if isinstance(query, Queued):
        return _read(connection, query.ids)
    if isinstance(query, Listing):
        return _list(connection, query)
    if isinstance(query, LiveListing):
        return _list_live(connection, query)
    if isinstance(query, Unfinished):
        return _unfinished(connection, query)
    return _fact(connection, query)


def _look_up(connection: sqlite3.Connection, query: Tasks) -> list[StoredTask]:
    # One view for all of it: between two, a task may go from one table to the other, and be in
    # neither.
    connection.execute("BEGIN")
    try:
        tasks = _find(connection, query.ids)
        return [_with_attempts(connection, task) for task in tasks] if query.attempts else tasks
    finally:
        connection.rollback()


def _find(connection: sqlite3.Connection, ids: list[str]) -> list[StoredTask]:
    tasks: dict[str, StoredTask] = {}
    wall_ns = time.time_ns()
    for size, parameters in filled_up([(task_id,) for task_id in ids]):
        among = f"WHERE id IN {values(size, 1)}"
        # The newest finish counts, and a task that is live again before all.
        query = f"SELECT {FINISHED_COLUMNS} FROM finished {among} ORDER BY number"
        stored = [finished_task(row) for row in connection.execute(query, parameters)]
        query = f"SELECT {LIVE_COLUMNS} FROM live {among}"
        stored += [live_task(row, wall_ns) for row in connection.execute(query, parameters)]
        tasks.update((task.spec.id, task) for task in stored if task is not None)
    return [tasks[task_id] for task_id in dict.fromkeys(ids) if task_id in tasks]


def _read(connection: sqlite3.Connection, ids: list[str]) -> Page:
    """The short ones all at once, as is usual; the long ones one by one while they fit."""
    tasks: list[Recovered] = []
    for start in range(0, len(ids), STATEMENT_ROWS_MAX):
        part = ids[start : start + STATEMENT_ROWS_MAX]
        ((size, parameters),) = filled_up([(task_id,) for task_id in part])
        short = queued_tasks(*connection.execute(read_short(size), parameters).fetchone())
        tasks += short
        if len(short) < len(part):
            read = {task.spec.id for task in short}
            long, unread = _read_long(connection, [id_ for id_ in part if id_ not in read])
            tasks += long
            if unread:
                return Page(tasks, unread + ids[start + STATEMENT_ROWS_MAX :])
    return Page(tasks, [])


def _read_long(connection: sqlite3.Connection, ids: list[str]) -> tuple[list[Recovered], list[str]]:
    """The first of them, and the ids of the rest."""
    tasks: list[Recovered] = []
    size = 0
    query = f"SELECT {LIVE_COLUMNS} FROM live WHERE id = ?"
    for done, task_id in enumerate(ids):
        if size > PAGE_BYTES_MAX:
            return tasks, ids[done:]
        row = connection.execute(query, (task_id,)).fetchone()
        task = recovered_task(row, 0, time.time_ns()) if row is not None else None
        if task is not None:
            tasks.append(task)
            size += len(task.spec.args)
    return tasks, []


def _with_attempts(connection: sqlite3.Connection, task: StoredTask) -> StoredTask:
    query = (
        "SELECT seq, attempt, at, worker, failure FROM attempts WHERE seq = ?"
        " ORDER BY at DESC, place DESC LIMIT ?"
    )
    rows = connection.execute(query, (task.seq, ATTEMPTS_KEPT)).fetchall()
    found: list[FailedAttempt | None] = [failed_attempt(row) for row in reversed(rows)]
    attempts = [attempt for attempt in found if attempt is not None]
    return msgspec.structs.replace(task, attempts=attempts) if attempts else task


def _list(connection: sqlite3.Connection, listing: Listing) -> list[StoredTask]:
    """The newest of a state, or of all, are looked through; the others of a state are not met."""
    where = ""
    parameters: list[Any] = []
    if listing.state is not None:
        # Said aloud for those that did not succeed, so that the index of these is used.
        unwell = f" AND state <> '{SUCCEEDED}'" if listing.state != SUCCEEDED else ""
        where = f"WHERE state = ?{unwell}"
        parameters = [listing.state]
    newest = f"SELECT number, pool FROM finished {where} ORDER BY number DESC LIMIT ?"
    of_pool = "WHERE pool = ?" if listing.pool is not None else ""
    parameters.append(LIST_ROWS_SEARCHED_MAX)
    if listing.pool is not None:
        parameters.append(listing.pool)
    parameters.append(min(listing.limit, LIST_TASKS_MAX))
    query = (
        f"SELECT {FINISHED_COLUMNS} FROM finished"
        f" WHERE number IN (SELECT number FROM ({newest}) {of_pool} LIMIT ?)"
        " ORDER BY number DESC"
    )
    tasks = map(finished_task, connection.execute(query, parameters))
    return [without_payload(task) for task in tasks if task is not None]


def _list_live(connection: sqlite3.Connection, listing: LiveListing) -> list[StoredTask]:
    newest = f"SELECT {LIVE_COLUMNS}, pool FROM live ORDER BY seq DESC LIMIT ?"
    of_pool = "WHERE pool = ?" if listing.pool is not None else ""
    query = f"SELECT {LIVE_COLUMNS} FROM ({newest}) {of_pool} LIMIT ?"
    pool = [listing.pool] if listing.pool is not None else []
    parameters = [LIST_ROWS_SEARCHED_MAX, *pool, min(listing.limit, LIST_TASKS_MAX)]
    wall_ns = time.time_ns()
    tasks = [live_task(row, wall_ns) for row in connection.execute(query, parameters)]
    return [without_payload(task) for task in tasks if task is not None]


def _unfinished(connection: sqlite3.Connection, query: Unfinished) -> StrandedTasks:
    rows = connection.execute(
        f"SELECT {LIVE_COLUMNS} FROM live WHERE pool = ? AND seq > ? ORDER BY seq LIMIT ?",
        (query.pool, query.after_seq, RECOVERED_AT_ONCE),
    ).fetchall()
    now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    tasks = [recovered_task(row, now_ns, wall_ns) for row in rows]
    last_seq = rows[-1][0] if len(rows) == RECOVERED_AT_ONCE else 0
    return StrandedTasks([task for task in tasks if task is not None], last_seq)


def _fact(connection: sqlite3.Connection, fact: OneFact) -> FoundFact:
    query = "SELECT value, expires_at FROM facts WHERE kind = ? AND key = ?"
    row = connection.execute(query, (fact.kind, fact.key)).fetchone()
    value, end_ns = row or (None, 0)
    return FoundFact(None if 0 < end_ns <= time.time_ns() else value)
