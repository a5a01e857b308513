"""Convert tasks to rows of the store's tables, and back.

Whole groups go into single statements: sqlite3 releases the interpreter lock for every step, and a
busy loop thread may keep the lock for 5 ms each time. So a step should carry many rows. Compared
with one step per row (executemany) this also saves about a sixth of the writer's processor time.
Statements exist for powers of two and are padded with NULLs, which never match, so that sqlite3
caches all statements.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeVar

import msgspec

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import FAILED, SUCCEEDED, FailedAttempt, Failure, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import (
    AttemptRecord,
    BulkRecord,
    Fact,
    FinalRecord,
    NewRecord,
    Persist,
    ReopenRecord,
)
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.store.interface import (
    ATTEMPTS_KEPT,
    PAGE_BYTES_MAX,
    REFUSED,
    StoredTask,
    fact_end_ns,
    kept_failure,
    listed_state,
    live_state,
    log_fields,
    pool_of,
    time_left_ns,
)

# A group ends here, so that no commit, and no memory for one, grows without end.
GROUP_ROWS_MAX = 4096
GROUP_BYTES_MAX = 16 * 1024 * 1024
# 10 columns of this many rows stay under SQLite's default limit of 32766 parameters.
STATEMENT_ROWS_MAX = 1024
SHORT_BYTES_MAX = PAGE_BYTES_MAX // STATEMENT_ROWS_MAX  # a page holds a statement of such tasks

Statement = Callable[[int], str]  # the SQL for so many rows

log = logging.getLogger("musterd")
_T = TypeVar("_T")
decode_spec = msgspec.msgpack.Decoder(TaskSpec).decode
_decode_specs = msgspec.msgpack.Decoder(list[TaskSpec]).decode
_ARRAY_32 = b"\xdd"  # the head of a msgpack array, followed by its length in 32 bits
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
_decode_failure = msgspec.msgpack.Decoder(Failure).decode
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

LIVE_COLUMNS = "seq, submitted_at, attempt, crashes, interruptions, begun, wait_ns, wait_from, spec"
FINISHED_COLUMNS = "seq, crashes, submitted_at, finished_at, spec, outcome"
# The limit counts numbers, gone ones included: counting rows would read them all.
TRIM = """
DELETE FROM finished WHERE number IN (
    SELECT number FROM (SELECT number, finished_at FROM finished ORDER BY number LIMIT ?)
    WHERE finished_at < ? OR number <= ?)
RETURNING seq
"""
TRIM_RESULTS = """
SELECT number, tasks FROM results WHERE number IN (
    SELECT number FROM (SELECT number, size, finished_at FROM results ORDER BY number LIMIT ?)
    WHERE finished_at < ? OR number + size - 1 <= ?)
"""
_DATE_AGAIN = """
UPDATE %s SET finished_at = ? WHERE number IN (
    SELECT number FROM (SELECT number, finished_at FROM %s ORDER BY number LIMIT ?)
    WHERE finished_at > ? OR finished_at < ?)
"""
DATE_AGAIN = _DATE_AGAIN % ("finished", "finished")
DATE_RESULTS_AGAIN = _DATE_AGAIN % ("results", "results")
_PURGE = f"""
DELETE FROM finished WHERE number IN (
    SELECT number FROM finished
    WHERE {{states}}state <> '{SUCCEEDED}' AND finished_at < ? {{ids}} LIMIT ?)
RETURNING seq, id
"""
_FAILED = f"state IN ('{FAILED}', '{REFUSED}') AND "
PURGE_ALL = _PURGE.format(states=_FAILED, ids="")
TRIM_FACTS = """
DELETE FROM facts WHERE rowid IN (
    SELECT rowid FROM facts WHERE expires_at > 0 AND expires_at <= ? LIMIT ?)
"""


@cache
def values(columns: int, rows: int) -> str:
    return ",".join(["(" + ",".join("?" * columns) + ")"] * rows)


def inserting(head: str) -> Statement:
    """Return a statement that inserts as many rows as are wanted; rows of NULL only fill it up."""
    columns = head.count(",") + 1

    def statement(rows: int) -> str:
        return f"{head} SELECT * FROM (VALUES {values(columns, rows)}) WHERE column1 IS NOT NULL"

    return cache(statement)


def deleting(head: str) -> Statement:
    """Return a statement that deletes as many rows as are wanted, by the column named last."""
    return cache(lambda rows: f"{head} IN {values(rows, 1)}")


insert_live = inserting(
    "INSERT OR IGNORE INTO live (seq, id, pool, target, priority, submitted_at, spec)"
)
insert_finished = inserting(
    "INSERT INTO finished"
    " (number, seq, id, pool, state, crashes, submitted_at, finished_at, spec, outcome)"
)
insert_result_ids = inserting("INSERT OR REPLACE INTO result_ids (id, number)")
insert_attempts = inserting(
    "INSERT OR REPLACE INTO attempts (seq, place, attempt, at, worker, failure)"
)
insert_facts = inserting("INSERT OR REPLACE INTO facts (kind, key, value, expires_at)")
delete_live = deleting("DELETE FROM live WHERE seq")
delete_attempts = deleting("DELETE FROM attempts WHERE seq")


@cache
def read_short(rows: int) -> str:
    """Read short tasks in one step; short_tasks() takes the row apart."""
    return (
        "SELECT group_concat(seq), group_concat(submitted_at),"
        " CAST(group_concat(CAST(spec AS TEXT), '') AS BLOB)"
        f" FROM live WHERE id IN {values(rows, 1)} AND length(spec) <= {SHORT_BYTES_MAX}"
    )


@cache
def update_live(rows: int) -> str:
    return (
        "UPDATE live SET attempt = v.column2, crashes = v.column3, interruptions = v.column4,"
        " begun = v.column5, wait_ns = v.column6, wait_from = v.column7"
        f" FROM (VALUES {values(7, rows)}) AS v WHERE live.seq = v.column1"
    )


@cache
def purge_named(rows: int, *, unwell: bool) -> str:
    """Purge failed tasks, or all that did not succeed."""
    named = f"AND id IN {values(rows, 1)}"
    return _PURGE.format(states="" if unwell else _FAILED, ids=named)


@cache
def delete_facts(rows: int) -> str:
    return f"DELETE FROM facts WHERE (kind, key) IN (VALUES {values(2, rows)})"


def filled_up(rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, list[Any]]]:
    """Yield slices of the rows, padded, as (rows of the statement, its parameters)."""
    for start in range(0, len(rows), STATEMENT_ROWS_MAX):
        part = rows[start : start + STATEMENT_ROWS_MAX]
        size = 1 << (len(part) - 1).bit_length()
        parameters = list(chain.from_iterable(part))
        parameters += (None,) * ((size - len(part)) * len(part[0]))
        yield size, parameters


class Group:
    """Everything that one transaction writes."""

    def __init__(self) -> None:
        self.ticket: int | None = None
        self.patient = True  # a moment's delay costs nobody anything
        self.wall_ns = 0
        self.added: dict[int, NewRecord] = {}  # by seq
        self.runs: list[BulkRecord] = []  # more new tasks
        self.changed: dict[int, tuple[Any, ...]] = {}  # by seq; the last change counts
        self.finished: list[FinalRecord] = []
        self.ended: list[int] = []  # seqs of the finished tasks that are in the store
        self.last_seq = 0  # the greatest seq of the finished tasks that never were there
        self.last_added = 0  # the greatest seq of a new task
        self.reopened: dict[int, ReopenRecord] = {}  # by their new seq
        self.failed: list[tuple[Any, ...]] = []
        self.facts: dict[tuple[str, str], tuple[Any, ...]] = {}  # the last value counts
        self.forgotten: dict[tuple[str, str], tuple[str, str]] = {}
        self._bytes = 0

    def full(self) -> bool:
        rows = len(self.added) + len(self.changed) + len(self.finished) + len(self.failed)
        rows += sum([len(run.specs) for run in self.runs])
        rows += len(self.facts) + len(self.forgotten)
        return rows >= GROUP_ROWS_MAX or self._bytes >= GROUP_BYTES_MAX

    def empty(self) -> bool:
        """Tell whether there is nothing to write."""
        return not (
            self.added
            or self.runs
            or self.changed
            or self.finished
            or self.failed
            or self.facts
            or self.forgotten
            or self.last_seq
        )

    def for_batches(self) -> Iterable[NewRecord]:
        """Return the new tasks that nothing but their submit is known of."""
        if not (self.changed or self.reopened):
            return self.added.values()
        return [new for seq, new in self.added.items() if not self._has_story(seq)]

    def for_rows(self) -> Iterable[NewRecord]:
        """Return the other new tasks."""
        if not (self.changed or self.reopened):
            return ()
        return [new for seq, new in self.added.items() if self._has_story(seq)]

    def _has_story(self, seq: int) -> bool:
        return seq in self.changed or seq in self.reopened

    def take(self, persist: Persist, wall_ns: int, withdrawn: set[int]) -> None:
        """Add a page. A task that is added and finished in one group goes straight to finished."""
        self.wall_ns = wall_ns
        for reopened in persist.reopened:
            self.reopened[reopened.seq] = reopened
        added, size = self.added, 0
        for new in persist.added:
            added[new.seq] = new
            size += len(new.spec.args)
        if persist.added:
            self.last_added = persist.added[-1].seq
        for run in persist.bulk:
            self.runs.append(run)
            self.last_added = run.end - 1
            size += sum([len(spec.args) for spec in run.specs])
        for change in persist.changed:
            self.changed[change.seq] = (
                change.seq, change.attempt, change.crashes, change.interruptions,
                int(change.begun), change.wait_ns, wall_ns,
            )  # fmt: skip
        self._bytes += size
        if persist.finished:
            self._take_ends(persist.finished)
        for failed in persist.failed:
            self._take_attempt(failed, wall_ns)
        for fact in persist.facts:
            self._take_fact(fact, wall_ns)
        self.ticket = persist.ticket
        self.patient &= persist.patient
        if withdrawn:
            self.drop(withdrawn)

    def _take_ends(self, finished: list[FinalRecord]) -> None:
        added, ended, last, size = self.added, self.ended, self.last_seq, 0
        for final in finished:
            seq = final.seq
            if added.pop(seq, None) is None:
                ended.append(seq)
            elif seq > last:
                last = seq
            size += len(final.spec.args) + len(final.outcome.value)
        self.finished += finished
        self.last_seq = last
        self._bytes += size
        if self.changed:
            for final in finished:
                self.changed.pop(final.seq, None)

    def drop(self, withdrawn: set[int]) -> None:
        """Leave withdrawn tasks out, and take them from the set: a seq comes only once."""
        self.take_apart()
        for seq in withdrawn.intersection(self.added):
            del self.added[seq]
            self.reopened.pop(seq, None)
            withdrawn.discard(seq)

    def take_apart(self) -> None:
        """Turn runs into single new tasks."""
        if self.runs:
            news = [new for run in self.runs for new in run.records()]
            news += self.added.values()
            news.sort(key=_seq)
            self.added = {new.seq: new for new in news}
            self.runs = []

    def _take_attempt(self, failed: AttemptRecord, wall_ns: int) -> None:
        blob = encode(kept_failure(failed.failure))
        place = failed.ordinal % ATTEMPTS_KEPT
        self.failed.append((failed.seq, place, failed.attempt, wall_ns, failed.worker, blob))
        self._bytes += len(blob)

    def _take_fact(self, fact: Fact, wall_ns: int) -> None:
        name = (fact.kind, fact.key)
        if fact.value is None:
            self.facts.pop(name, None)
            self.forgotten[name] = name
        else:
            self.forgotten.pop(name, None)
            self.facts[name] = (*name, fact.value, fact_end_ns(fact, wall_ns))
            self._bytes += len(fact.value)


def _seq(new: NewRecord) -> int:
    return new.seq


def live_row(new: NewRecord) -> tuple[Any, ...]:
    spec = new.spec
    return (
        new.seq, spec.id, new.pool, spec.target, spec.priority, new.submitted_wall_ns, encode(spec),
    )  # fmt: skip


def finished_row(number: int, final: FinalRecord, wall_ns: int) -> tuple[Any, ...]:
    spec, outcome = final.spec, final.outcome
    return (
        number, final.seq, spec.id, pool_of(spec), listed_state(outcome), final.crashes,
        final.submitted_wall_ns, wall_ns, encode(spec), encode(outcome),
    )  # fmt: skip


# -- rows to structs; None for a row that cannot be decoded ---------------------------------------


def opened(number: int, decode: Callable[[bytes], _T], blob: bytes) -> _T | None:
    """Decode a blob; report it and return None if it is unreadable."""
    try:
        return decode(blob)
    except UNREADABLE as error:
        log.error(
            "a stored task cannot be read; it is left in the store",
            extra=log_fields("store.unreadable", error, seq=number),
        )
        return None


def queued_tasks(rows: Iterable[tuple[Any, ...]]) -> OnDisk:
    """Decode rows with LIVE_COLUMNS of tasks that have not run yet; leave out unreadable ones."""
    tasks = OnDisk()
    for seq, submitted, *_, blob in rows:
        spec = opened(seq, decode_spec, blob)
        if spec is not None:
            tasks.add(seq, spec, submitted)
    return tasks


def short_tasks(seqs: str | None, submits: str | None, specs: bytes | None) -> OnDisk:
    """Decode the row of read_short(): tasks that have not run yet; none if one is unreadable.

    Concatenated specs are an array of specs without its head.
    """
    if seqs is None or submits is None or specs is None:
        return OnDisk()
    numbers = seqs.split(",")
    head = _ARRAY_32 + len(numbers).to_bytes(4, "big")
    try:
        read = _decode_specs(head + specs)
    except UNREADABLE:
        return OnDisk()  # reading them one by one finds the unreadable one
    return OnDisk(list(map(int, numbers)), read, list(map(int, submits.split(","))))


def recovered_task(row: tuple[Any, ...], now_ns: int, wall_ns: int) -> Recovered | None:
    seq, submitted, attempt, crashes, interruptions, begun, wait_ns, wait_from, blob = row
    spec = opened(seq, decode_spec, blob)
    if spec is None:
        return None
    wait_left = _wait_left_ns(spec, submitted, wait_ns, wait_from, wall_ns)
    return Recovered(
        seq=seq,
        spec=spec,
        submitted_wall_ns=submitted,
        ready_ns=now_ns + wait_left if wait_left else 0,
        expires_at_ns=(
            now_ns + time_left_ns(submitted, spec.expires_ns, wall_ns) if spec.expires_ns else 0
        ),
        attempt=attempt,
        crashes=crashes,
        interruptions=interruptions,
        begun=bool(begun),
    )


def _wait_left_ns(
    spec: TaskSpec, submitted: int, wait_ns: int, wait_from: int, wall_ns: int
) -> int:
    if wait_ns < 0:
        return time_left_ns(submitted, spec.delay_ns, wall_ns)
    return time_left_ns(wait_from, wait_ns, wall_ns)


def live_task(row: tuple[Any, ...], wall_ns: int) -> StoredTask | None:
    seq, submitted, attempt, crashes, _, begun, wait_ns, wait_from, blob = row
    spec = opened(seq, decode_spec, blob)
    if spec is None:
        return None
    state = live_state(bool(begun), _wait_left_ns(spec, submitted, wait_ns, wait_from, wall_ns))
    return StoredTask(seq, spec, state, None, crashes, attempt, submitted)


def finished_task(row: tuple[Any, ...]) -> StoredTask | None:
    seq, crashes, submitted, finished, blob, result = row
    spec, outcome = opened(seq, decode_spec, blob), opened(seq, _decode_outcome, result)
    if spec is None or outcome is None:
        return None
    return StoredTask(
        seq, spec, outcome.state, outcome, crashes, outcome.attempts, submitted, finished
    )


def failed_attempt(row: tuple[Any, ...]) -> FailedAttempt | None:
    seq, attempt, at, worker, blob = row
    failure = opened(seq, _decode_failure, blob)
    return FailedAttempt(attempt, at / 1e9, worker, failure) if failure is not None else None
