"""Write to the store's tables: one transaction per call, over the writer's connection."""

import logging
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct

from musterd.supervisor.core.model.actions import NewRecord, ReopenRecord
from musterd.supervisor.core.model.clock import EARLIEST_NS, STEP_MAX_NS
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.store.file import is_unwritten
from musterd.supervisor.store.interface import (
    ATTEMPTS_KEPT,
    Purge,
    Purged,
    WallTime,
    Withdraw,
    log_fields,
)
from musterd.supervisor.store.result_batches import (
    delete_results,
    insert_results,
    last_number,
    results_blob,
    sort_results,
)
from musterd.supervisor.store.rows import (
    DATE_AGAIN,
    DATE_RESULTS_AGAIN,
    PURGE_ALL,
    TRIM,
    TRIM_FACTS,
    TRIM_RESULTS,
    Group,
    Statement,
    delete_attempts,
    delete_facts,
    delete_live,
    filled_up,
    finished_row,
    insert_attempts,
    insert_facts,
    insert_finished,
    insert_live,
    insert_result_ids,
    live_row,
    purge_named,
    update_live,
)
from musterd.supervisor.store.task_batches import (
    BATCH_TASKS,
    Batch,
    NewBatch,
    TaskBatches,
    delete_batches,
    delete_masks,
    insert_batches,
    mark_batches,
    mask_bytes,
    tasks_of_batch,
)

MEASURE_NS = 1_000_000_000  # how often the files are measured
# Tasks forgotten per transaction: some milliseconds, so that no commit waits longer.
SLICE_ROWS = 1000
SLICE_BATCHES = SLICE_ROWS // BATCH_TASKS
SEQS_AHEAD = 1000  # seqs that are noted as used at once; a start goes on behind them
# A full disk counts as having room again once this much fits.
PROBE_BYTES = 256 * 1024
PROBE = "probe"  # the kind of the fact that a probe writes

log = logging.getLogger("musterd")


class Purging(Struct):
    """A purge that is under way."""

    query: Purge
    token: object
    done: bool = False
    count: int = 0
    gone: list[str] = []

    def answer(self) -> Purged:
        return Purged(self.count, self.gone)


class Writer:
    def __init__(self, connection: sqlite3.Connection, path: Path, wall_ns: WallTime) -> None:
        self._connection = connection
        self._wall_ns = wall_ns
        self._files = [path, path.with_name(f"{path.name}-wal")]
        self._measured_ns = 0
        self.size_bytes = self._measure()
        self.commits = 0
        self.times = Histogram()  # of commits
        self.conflicts = 0  # rows that contradicted the core: our own mistake
        self.withdrawn: set[int] = set()  # seqs to leave out when they come
        self._last_added = 0  # the greatest seq that is in the store
        self._doubtful = 0  # the greatest seq of a commit that failed and may yet be in the log
        self._batches = TaskBatches(connection)
        self._number = last_number(connection)  # of the last finished task
        ((seq,),) = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'live'")
        self._seq_noted = int(seq)

    def close(self) -> None:
        self._connection.close()

    @property
    def connection(self) -> sqlite3.Connection:
        return self._connection

    def move(self, connection: sqlite3.Connection) -> None:
        """Switch to another connection, to a file with the same content."""
        self._connection.close()
        self._connection = connection

    @property
    def on_batches(self) -> int:
        """How many unfinished tasks are in batches."""
        return self._batches.tasks

    def roll_back(self) -> None:
        with suppress(sqlite3.Error):  # after most errors SQLite has rolled back by itself
            self._connection.rollback()

    def commit(self, group: Group) -> None:
        began_ns = time.monotonic_ns()
        for reopened in group.reopened.values():
            self._reopen(reopened)
        masks: dict[Batch, int] = {}  # of the batches that lose tasks
        batches, alone = self._sort_out(group)
        if batches:
            self._execute(insert_batches, [batch.row for batch in batches])
        self._add_rows(chain(alone, group.for_rows()))
        if group.changed:
            self._move_out(self._batches.bits_of(group.changed), masks)
            self._execute(update_live, list(group.changed.values()))
        number = self._finish(group) if group.finished else self._number
        rows = self._batches.strike(group.ended, masks)
        if rows:
            self._execute(delete_live, [(seq,) for seq in rows])
        self._mark(masks)
        if group.failed:
            self._execute(insert_attempts, group.failed)
        if group.facts:
            self._execute(insert_facts, list(group.facts.values()))
        if group.forgotten:
            self._execute(delete_facts, list(group.forgotten.values()))
        seq_noted = self._note_seq(max(group.last_seq, group.last_added if batches else 0))
        self._end_transaction(group)
        self._seq_noted = seq_noted
        self._batches.written(batches, masks)
        self._number = number
        self._last_added = max(self._last_added, group.last_added)
        self.commits += 1
        now_ns = time.monotonic_ns()
        self.times.add(now_ns - began_ns)
        if now_ns - self._measured_ns >= MEASURE_NS:
            self._measured_ns = now_ns
            self.size_bytes = self._measure()

    def _end_transaction(self, group: Group) -> None:
        """Commit. SQLite appends the whole transaction to its log before it syncs the log: after a
        failed sync the log may be complete, and the next start would read the transaction."""
        try:
            self._connection.commit()
        except BaseException as error:
            if not is_unwritten(error):
                self._doubtful = max(self._doubtful, group.last_added)
            raise

    def _sort_out(self, group: Group) -> tuple[list[NewBatch], list[NewRecord]]:
        """Split new tasks into batches to write and tasks that get rows."""
        if group.runs and not group.added:
            sorted_out = self._batches.sort_runs(group.runs)
            if sorted_out is not None:
                return sorted_out
        group.take_apart()
        return self._batches.sort_out(group.for_batches())

    def _note_seq(self, seq: int) -> int:
        """Note that a seq without a row is in use; return the greatest seq noted as used.

        Seqs are noted ahead, so that most commits write one page less.
        """
        if seq <= self._seq_noted:
            return self._seq_noted
        noted = seq + SEQS_AHEAD
        self._connection.execute(
            "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'live'", (noted,)
        )
        return noted

    def _add_rows(self, added: Iterable[NewRecord]) -> None:
        rows = [live_row(new) for new in added]
        if rows and self._execute(insert_live, rows) != len(rows):
            self._report_conflicts(rows)

    def _finish(self, group: Group) -> int:
        """Write finished tasks; return the number of the last one."""
        number, wall_ns = self._number, group.wall_ns
        parts, alone = sort_results(group.finished)
        if alone:
            rows = [finished_row(number + n, final, wall_ns) for n, final in enumerate(alone, 1)]
            self._execute(insert_finished, rows)
            number += len(alone)
        results: list[tuple[Any, ...]] = []
        ids: list[tuple[str, int]] = []
        for part in parts:
            first = number + 1
            results.append((first, len(part), wall_ns, results_blob(part)))
            ids += [(final.spec.id, first) for final in part]
            number += len(part)
        if parts:
            self._execute(insert_results, results)
            self._execute(insert_result_ids, ids)
        return number

    def _move_out(self, bits: dict[Batch, int], masks: dict[Batch, int]) -> int:
        """Move tasks from batches to rows of their own; return how many."""
        moved = 0
        for batch, wanted in bits.items():
            mask = masks.get(batch, batch.mask)
            tasks = tasks_of_batch(self._connection, batch, mask & wanted)
            rows = [live_row(new) for new in tasks]
            for new in tasks:
                mask ^= 1 << (new.seq - batch.first)
            if rows:
                self._execute(insert_live, rows)
                masks[batch] = mask
                moved += len(rows)
        return moved

    def _mark(self, masks: dict[Batch, int]) -> None:
        left = [(batch.first, mask_bytes(mask)) for batch, mask in masks.items() if mask]
        gone = [(batch.first,) for batch, mask in masks.items() if not mask]
        if left:
            self._execute(mark_batches, left)
        if gone:
            self._execute(delete_batches, gone)
            self._execute(delete_masks, gone)

    def _measure(self) -> int:
        size = 0
        for file in self._files:
            with suppress(OSError):  # the log does not exist before the first commit
                size += file.stat().st_size
        return size

    def _reopen(self, reopened: ReopenRecord) -> None:
        execute = self._connection.execute
        execute("DELETE FROM finished WHERE id = ?", (reopened.id,))
        execute("DELETE FROM result_ids WHERE id = ?", (reopened.id,))
        # The attempts from before an earlier retry make room for those from before this one.
        execute("DELETE FROM attempts WHERE seq = ? AND place < 0", (reopened.former_seq,))
        execute(
            "UPDATE attempts SET seq = ?, place = place - ? WHERE seq = ?",
            (reopened.seq, ATTEMPTS_KEPT, reopened.former_seq),
        )

    def _execute(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> int:
        """Execute a statement for all rows; return the number of rows changed."""
        # executemany() with one set: execute() would release the interpreter lock once more.
        return sum(
            self._connection.executemany(statement(size), (parameters,)).rowcount
            for size, parameters in filled_up(rows)
        )

    def _report_conflicts(self, rows: list[tuple[Any, ...]]) -> None:
        """Log tasks whose seq or live id is taken: a mistake of the core must not hurt others."""
        query = "SELECT 1 FROM live WHERE seq = ? AND id = ?"
        for seq, task_id, *_ in rows:
            if self._connection.execute(query, (seq, task_id)).fetchone() is None:
                self.conflicts += 1
                log.error(
                    "task is not stored: its seq or id is taken",
                    extra=log_fields("store.conflict", task=task_id, seq=seq),
                )

    # -- when the disk fails ------------------------------------------------------------------

    def withdraw(self, withdraw: Withdraw, group: Group) -> list[int]:
        """Return the answer; `group` is being written. Seqs come in order, so a seq above the last
        one in the store is in the group or still on its way.

        A task that may be in the log is not withdrawn: it would be refused, yet run after a
        restart. It is written when the disk works again."""
        seqs = [seq for seq in withdraw.seqs if seq > max(self._last_added, self._doubtful)]
        self.withdrawn.update(seqs)
        group.drop(self.withdrawn)
        return seqs

    def probe(self) -> None:
        """Write a fact and delete it, to see whether the disk has room."""
        execute = self._connection.execute
        execute(
            "INSERT OR REPLACE INTO facts (kind, key, value, expires_at) VALUES (?, '', ?, 0)",
            (PROBE, bytes(PROBE_BYTES)),
        )
        self._connection.commit()
        execute("DELETE FROM facts WHERE kind = ?", (PROBE,))
        self._connection.commit()

    # -- forgetting ---------------------------------------------------------------------------

    @property
    def ended(self) -> int:
        """How many tasks have ever ended."""
        return self._number

    def trim_slice(self, keep_ns: int | None, keep_max: int, rows: int = SLICE_ROWS) -> int:
        """Forget about `rows` tasks at most in one transaction; return the rows changed."""
        wall_ns, parts = self._wall_ns(), rows // BATCH_TASKS
        limits = (0 if keep_ns is None else wall_ns - keep_ns, self._number - keep_max)
        dated = 0 if keep_ns is None else self._date_again(rows, parts, wall_ns)
        seqs = self._connection.execute(TRIM, (rows, *limits)).fetchall()
        batches = self._connection.execute(TRIM_RESULTS, (parts, *limits)).fetchall()
        for number, blob in batches:
            seqs += [(seq,) for seq in delete_results(self._connection, number, blob)]
        if seqs:
            self._execute(delete_attempts, seqs)
        facts = 0
        if keep_ns is not None:
            facts = self._connection.execute(TRIM_FACTS, (wall_ns, SLICE_ROWS)).rowcount
        masks: dict[Batch, int] = {}
        moved = self._move_out(dict.fromkeys(self._batches.sparse(SLICE_BATCHES), -1), masks)
        self._mark(masks)
        self._connection.commit()
        self._batches.written([], masks)
        return len(seqs) + len(batches) + facts + moved + dated

    def _date_again(self, rows: int, parts: int, wall_ns: int) -> int:
        """Date results of the future, or of 1970, to now: they were written under a wrong clock.

        Otherwise a result of the future would keep older ones forever."""
        execute = self._connection.execute
        wrong = (wall_ns + STEP_MAX_NS, EARLIEST_NS if wall_ns >= EARLIEST_NS else 0)
        count = execute(DATE_AGAIN, (wall_ns, rows, *wrong)).rowcount
        return count + execute(DATE_RESULTS_AGAIN, (wall_ns, parts, *wrong)).rowcount

    def purge_slice(self, purging: Purging) -> None:
        """Forget some of the tasks in one small transaction."""
        ids, before_ns = purging.query.ids, purging.query.before_wall_ns
        gone: list[tuple[int, str]] = []
        if ids is None:
            gone = self._connection.execute(PURGE_ALL, (before_ns, SLICE_ROWS)).fetchall()
        else:
            for size, named in filled_up([(id_,) for id_ in ids]):
                parameters = (before_ns, *named, -1)
                statement = purge_named(size, unwell=purging.query.unwell)
                gone += self._connection.execute(statement, parameters).fetchall()
        if gone:
            self._execute(delete_attempts, [(seq,) for seq, _ in gone])
        self._connection.commit()
        purging.count += len(gone)
        purging.done = ids is not None or not gone
        if ids is not None:
            purging.gone = [id_ for _, id_ in gone]
