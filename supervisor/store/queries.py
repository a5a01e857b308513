"""Read the store's tables for one request, over a connection that only reads."""

import queue
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import FAILED, SUCCEEDED, FailedAttempt
from musterd.ipc.wire.selection import ENDED, Selection
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.store.file import connect_reader
from musterd.supervisor.store.interface import (
    ATTEMPTS_KEPT,
    LIST_LOOKS_MAX,
    LIST_TASKS_MAX,
    PAGE_BYTES_MAX,
    RECOVERED_AT_ONCE,
    REFUSED,
    FindFact,
    FindFacts,
    FindSome,
    FindStranded,
    FindTasks,
    Listed,
    ListFinished,
    ListLive,
    Page,
    Portion,
    Query,
    ReadQueued,
    StoredTask,
    StrandedTasks,
    ended_fits,
    pool_of,
    without_payload,
)
from musterd.supervisor.store.result_batches import (
    first_number,
    last_number,
    newest_results,
    result_rows_of,
)
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
from musterd.supervisor.store.task_batches import (
    BATCH_TASKS,
    queued_rows,
    queued_rows_of,
    queued_tasks_of,
)

# Numbers, or seqs, that one query of a list passes: SQLite alone looks at most of these rows.
LIST_ROWS_SEARCHED_MAX = 200_000
_UNWELL = f"state = ? AND state <> '{SUCCEEDED}'"


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


def _list(connection: sqlite3.Connection, query: ListFinished) -> Listed:
    """List the newest finished tasks below a number."""
    where = query.where
    below = query.below or last_number(connection) + 1
    states: list[str] = [where.state if where.state != ENDED else ""]
    if where.state == FAILED and not query.dead:
        states.append(REFUSED)
    after = max(_search_end(connection, state, below) for state in states)
    rest = after + 1 if after and first_number(connection) <= after else 0
    parts = [_newest(connection, state, where, after, below) for state in states]
    if states[0] in ("", SUCCEEDED) and not where.error:  # nothing in batches has failed
        found = newest_results(connection, after, below)
        parts.append((number, finished_task(row)) for number, row in found)
    tasks = merge(*parts, key=itemgetter(0), reverse=True)
    return _page(tasks, query.limit, rest, below, lambda task: _fits(where, task))


def _search_end(connection: sqlite3.Connection, state: str, below: int) -> int:
    """Return the number below which a query does not look. Of failures it is the index that counts:
    tasks that succeeded are not passed."""
    if state in ("", SUCCEEDED):
        return max(0, below - 1 - LIST_ROWS_SEARCHED_MAX)
    row = connection.execute(
        f"SELECT number FROM finished WHERE {_UNWELL} AND number < ?"
        " ORDER BY number DESC LIMIT 1 OFFSET ?",
        (state, below, LIST_ROWS_SEARCHED_MAX),
    ).fetchone()
    return int(row[0]) if row is not None else 0


def _newest(
    connection: sqlite3.Connection, state: str, where: Selection, after: int, below: int
) -> Iterator[tuple[int, StoredTask | None]]:
    """Yield finished tasks in rows of their own, newest first, each with its number. They fit as
    far as SQLite can tell."""
    conditions, parameters = _conditions(where, "finished_at")
    conditions += ["number > ?", "number < ?"]
    parameters += [after, below]
    if state:
        # SQLite uses the index of tasks that did not succeed only with its own condition.
        conditions.append("state = ?" if state == SUCCEEDED else _UNWELL)
        parameters.append(state)
    query = (
        f"SELECT number, {FINISHED_COLUMNS} FROM finished WHERE {' AND '.join(conditions)}"
        " ORDER BY number DESC LIMIT ?"
    )
    rows = connection.execute(query, (*parameters, LIST_LOOKS_MAX + 1))
    return ((row[0], finished_task(row[1:])) for row in rows)


def _conditions(where: Selection, moment: str) -> tuple[list[str], list[Any]]:
    """Return what SQLite can tell about rows that do not fit, without the interpreter lock.

    Site and key are looked for as they are encoded, anywhere in the spec: fits() is exact.
    """
    wanted: list[tuple[str, Any]] = []
    if where.pool:
        wanted.append(("pool = ?", where.pool))
    wanted += [("instr(spec, ?)", encode(text)) for text in (where.target, where.key) if text]
    if where.id_prefix:
        wanted.append(("substr(id, 1, ?) = ?", (len(where.id_prefix), where.id_prefix)))
    if where.since:
        wanted.append((f"{moment} >= ?", where.since_ns))
    if where.before:
        wanted.append((f"{moment} < ?", where.before_ns))
    parameters: list[Any] = []
    for _, value in wanted:
        parameters += value if isinstance(value, tuple) else [value]
    return [condition for condition, _ in wanted], parameters


def _page(
    tasks: Iterable[tuple[int, StoredTask | None]],
    limit: int,
    rest: int,
    top: int,
    fits: Callable[[StoredTask], bool],
) -> Listed:
    """Take what fits. `rest` is where to go on behind all of the tasks."""
    page: list[StoredTask] = []
    for looks, (number, task) in enumerate(tasks, 1):
        if task is not None and fits(task):
            page.append(without_payload(task))
        if len(page) >= min(limit, LIST_TASKS_MAX) or looks >= LIST_LOOKS_MAX:
            return Listed(page, number if number > 1 else 0, top)
    return Listed(page, rest, top)


def _fits(where: Selection, task: StoredTask) -> bool:
    outcome = task.outcome
    return outcome is not None and ended_fits(where, task.spec, outcome, task.finished_wall_ns)


def _list_live(connection: sqlite3.Connection, query: ListLive, wall_ns: int) -> Listed:
    """List the newest unfinished tasks below a seq."""
    where = query.where
    ((first, last),) = connection.execute(
        "SELECT min(seq), max(seq) FROM (SELECT min(seq) AS seq FROM live UNION ALL"
        " SELECT max(seq) FROM live UNION ALL SELECT min(first) FROM sheets UNION ALL"
        f" SELECT max(first) + {BATCH_TASKS} FROM sheets)"
    )
    if last is None:
        return Listed([], 0, 1)
    below = min(query.below, last + 1) if query.below else last + 1
    after = max(0, below - 1 - LIST_ROWS_SEARCHED_MAX)
    conditions, parameters = _conditions(where, "submitted_at")
    rows = connection.execute(
        f"SELECT {LIVE_COLUMNS} FROM live"
        f" WHERE {' AND '.join([*conditions, 'seq > ?', 'seq < ?'])} ORDER BY seq DESC LIMIT ?",
        (*parameters, after, below, LIST_LOOKS_MAX + 1),
    )
    on_batches = queued_rows(connection, after=after, below=below, newest=True)
    merged = merge(rows, on_batches, key=itemgetter(0), reverse=True)
    tasks = ((row[0], live_task(row, wall_ns)) for row in merged)

    def fits(task: StoredTask) -> bool:
        return where.fits_state(task.state) and where.fits(task.spec, task.submitted_wall_ns)

    rest = after + 1 if first <= after else 0
    return _page(tasks, query.limit, rest, below, fits)


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
