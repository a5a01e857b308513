"""Tasks as rows of the store's tables, and back.

Why whole groups in single statements: sqlite3 gives the interpreter lock away for every step, and
a busy loop thread may keep it for 5 ms each time. So a step should carry many rows. Compared with
one step per row (executemany) it also saves about a sixth of the writer's processor time.
Statements are made for powers of two and filled up with NULLs, which never match, so that sqlite3
caches them all.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgspec

from musterd.ipc.codec import encode
from musterd.ipc.messages import Outcome, TaskSpec
from musterd.supervisor.core.actions import Persist
from musterd.supervisor.core.events import Recovered
from musterd.supervisor.store import StoredTask, live_state, pool_of, time_left_ns

# A group is cut here, so that no commit, and no memory for one, grows without end.
GROUP_ROWS_MAX = 4096
GROUP_BYTES_MAX = 16 * 1024 * 1024
# 9 columns of it stay under SQLite's default limit of 32766 parameters.
STATEMENT_ROWS_MAX = 1024

log = logging.getLogger("musterd")
_decode_spec = msgspec.msgpack.Decoder(TaskSpec).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

LIVE_COLUMNS = "seq, submitted_at, attempt, crashes, interruptions, begun, wait_ns, wait_from, spec"
FINISHED_COLUMNS = "seq, crashes, submitted_at, finished_at, spec, outcome"
# A time far ahead was written under a wrong clock; kept, such rows would block the front for ever.
TRIM = """
DELETE FROM finished WHERE number IN (
    SELECT number FROM (SELECT number, finished_at FROM finished ORDER BY number LIMIT ?)
    WHERE finished_at < ? OR finished_at > ?)
"""


@cache
def values(columns: int, rows: int) -> str:
    return ",".join(["(" + ",".join("?" * columns) + ")"] * rows)


@cache
def insert_live(rows: int) -> str:
    return (
        "INSERT OR IGNORE INTO live (seq, id, pool, target, priority, submitted_at, spec)"
        f" SELECT * FROM (VALUES {values(7, rows)}) WHERE column1 IS NOT NULL"
    )


@cache
def insert_finished(rows: int) -> str:
    return (
        "INSERT INTO finished"
        " (seq, id, pool, state, crashes, submitted_at, finished_at, spec, outcome)"
        f" SELECT * FROM (VALUES {values(9, rows)}) WHERE column1 IS NOT NULL"
    )


@cache
def update_live(rows: int) -> str:
    return (
        "UPDATE live SET attempt = v.column2, crashes = v.column3, interruptions = v.column4,"
        " begun = v.column5, wait_ns = v.column6, wait_from = v.column7"
        f" FROM (VALUES {values(7, rows)}) AS v WHERE live.seq = v.column1"
    )


@cache
def delete_live(rows: int) -> str:
    return f"DELETE FROM live WHERE seq IN {values(rows, 1)}"


def filled_up(rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, list[Any]]]:
    """The rows in slices, each as (rows of the statement, its parameters)."""
    for start in range(0, len(rows), STATEMENT_ROWS_MAX):
        part = rows[start : start + STATEMENT_ROWS_MAX]
        size = 1 << (len(part) - 1).bit_length()
        parameters = list(chain.from_iterable(part))
        parameters += (None,) * ((size - len(part)) * len(part[0]))
        yield size, parameters


class Group:
    """What goes into one transaction, as rows ready to be bound."""

    def __init__(self) -> None:
        self.ticket: int | None = None
        self.added: dict[int, tuple[Any, ...]] = {}  # by seq
        self.changed: dict[int, tuple[Any, ...]] = {}  # by seq; the last word counts
        self.finished: list[tuple[Any, ...]] = []
        self.ended: list[tuple[int]] = []  # the seqs to delete from live
        self.last_seq = 0  # of those that never came to live
        self._bytes = 0

    def full(self) -> bool:
        rows = len(self.added) + len(self.changed) + len(self.finished)
        return rows >= GROUP_ROWS_MAX or self._bytes >= GROUP_BYTES_MAX

    def take(self, persist: Persist, wall_ns: int) -> None:
        """A task that is added and finished within the group goes straight to finished."""
        for new in persist.added:
            spec = new.spec
            blob = encode(spec)
            self.added[new.seq] = (
                new.seq, spec.id, new.pool, spec.target, spec.priority, new.submitted_wall_ns, blob,
            )  # fmt: skip
            self._bytes += len(blob)
        for change in persist.changed:
            self.changed[change.seq] = (
                change.seq, change.attempt, change.crashes, change.interruptions,
                int(change.begun), change.wait_ns, wall_ns,
            )  # fmt: skip
        for final in persist.finished:
            seq, spec, outcome = final.seq, final.spec, final.outcome
            if self.added.pop(seq, None) is None:
                self.ended.append((seq,))
            else:
                self.last_seq = max(self.last_seq, seq)
            self.changed.pop(seq, None)
            blob, result = encode(spec), encode(outcome)
            self.finished.append((
                seq, spec.id, pool_of(spec), outcome.state, final.crashes,
                final.submitted_wall_ns, wall_ns, blob, result,
            ))  # fmt: skip
            self._bytes += len(blob) + len(result)
        self.ticket = persist.ticket


# -- rows to structs; None for a row that cannot be understood ------------------------------------


def _report_unreadable(seq: int, error: Exception) -> None:
    log.error(
        "a stored task cannot be read; it is left in the store",
        extra={"fields": {"EVENT": "store.unreadable", "SEQ": seq, "REASON": str(error)}},
    )


def recovered_task(row: tuple[Any, ...], now_ns: int, wall_ns: int) -> Recovered | None:
    seq, submitted, attempt, crashes, interruptions, begun, wait_ns, wait_from, blob = row
    try:
        spec = _decode_spec(blob)
    except _UNREADABLE as error:
        _report_unreadable(seq, error)
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
    try:
        spec = _decode_spec(blob)
    except _UNREADABLE as error:
        _report_unreadable(seq, error)
        return None
    state = live_state(bool(begun), _wait_left_ns(spec, submitted, wait_ns, wait_from, wall_ns))
    return StoredTask(seq, spec, state, None, crashes, attempt, submitted)


def finished_task(row: tuple[Any, ...]) -> StoredTask | None:
    seq, crashes, submitted, finished, blob, result = row
    try:
        spec, outcome = _decode_spec(blob), _decode_outcome(result)
    except _UNREADABLE as error:
        _report_unreadable(seq, error)
        return None
    return StoredTask(
        seq, spec, outcome.state, outcome, crashes, outcome.attempts, submitted, finished
    )
