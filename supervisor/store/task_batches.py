"""Batches of new tasks that came together, in one row of the table `sheets`.

Rows of its own, here and in `finished`, cost a task some 9 µs of the writer's time; its share of
two batches, here and in result_batches.py, costs 2 µs.

A batch never changes. Its mask, a bit for each task, says which of its tasks are still there. A
task leaves the batch when it ends, or moves to a row in `live` as soon as more than its submit is
to be stored. Ids grow with time (ipc/client/ids.py), and so do seqs, so a batch has a narrow range
of both and is found by them. Tasks with ids of other kinds, long tasks and tasks that came nearly
alone have rows.
"""

import sqlite3
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec import Raw, Struct

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model.actions import BulkRecord, NewRecord
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.store.interface import pool_of
from musterd.supervisor.store.rows import (
    SHORT_BYTES_MAX,
    UNREADABLE,
    decode_spec,
    deleting,
    inserting,
    opened,
    queued_tasks,
)

BATCH_TASKS = 128  # the span of seqs of one batch, and the bits of its mask
SEQ_MAX = 2**63 - 1
BATCH_MIN = 8  # fewer tasks get rows
BATCH_BYTES_MAX = 256 * 1024
MASK_BYTES = BATCH_TASKS // 8
# An id may be within the range of so many batches before its own and after it: clients are not all
# read at once.
OVERLAP_MAX = 32
SEARCHED_MAX = 2 * OVERLAP_MAX  # batches that end behind an id and are searched, its own included
CLOCK_AHEAD_MS = 3_600_000  # how far a client's clock may be ahead of ours
# An old batch with fewer than 1/LEFT_SHARE of its tasks moves them to rows: one task that waits for
# days must not keep the arguments of all others.
OLD_NS = 60_000_000_000
LEFT_SHARE = 4

_BATCHES = (
    "SELECT sheets.first, coalesce(sheet_masks.mask, sheets.mask), tasks"
    " FROM sheets LEFT JOIN sheet_masks USING (first) %s"
)
# The inner limit ends the search: all later batches end behind the id too. The result is one row:
# each step of SQLite releases the interpreter lock, and a busy loop keeps it for a while each time.
_AROUND = f"""
SELECT group_concat(first), group_concat(hex(mask)), group_concat(length(tasks)),
    CAST(group_concat(CAST(tasks AS TEXT), '') AS BLOB)
FROM (
    SELECT sheets.first AS first, coalesce(sheet_masks.mask, sheets.mask) AS mask, tasks
    FROM (SELECT first, low FROM sheets WHERE high >= ? ORDER BY high LIMIT {SEARCHED_MAX}) AS near
    JOIN sheets USING (first) LEFT JOIN sheet_masks USING (first)
    WHERE near.low <= ?)
"""
_MASKS = (
    "SELECT sheets.first, coalesce(sheet_masks.mask, sheets.mask), sheets.mask"
    " FROM sheets LEFT JOIN sheet_masks USING (first) ORDER BY sheets.first"
)


insert_batches = inserting("INSERT INTO sheets (first, mask, low, high, tasks)")
mark_batches = inserting("INSERT OR REPLACE INTO sheet_masks (first, mask)")
delete_batches = deleting("DELETE FROM sheets WHERE first")
delete_masks = deleting("DELETE FROM sheet_masks WHERE first")


class _Queued(Struct, array_like=True, frozen=True, gc=False):
    """The content of a batch, with specs not decoded."""

    ids: list[str]
    seqs: list[int]
    submits: list[int]
    specs: list[Raw]


class _QueuedTasks(Struct, array_like=True, frozen=True, gc=False):
    """The content of a batch, decoded."""

    ids: list[str]
    seqs: list[int]
    submits: list[int]
    specs: list[TaskSpec]


_decode_queued = msgspec.msgpack.Decoder(_Queued).decode
_decode_tasks = msgspec.msgpack.Decoder(_QueuedTasks).decode


def is_short(spec: TaskSpec) -> bool:
    return len(spec.args) <= SHORT_BYTES_MAX and spec.fallback is None


def latest_id() -> str:
    """Return a bound that no client's id exceeds now."""
    return f"{time.time_ns() // 1_000_000 + CLOCK_AHEAD_MS:011x}"


# -- new tasks ------------------------------------------------------------------------------------


class Range:
    """The ids that may go into batches: newer than most in batches, and not of tomorrow."""

    def __init__(self, highest: str) -> None:
        self._highest = highest  # in any batch
        self._before = deque([highest] * OVERLAP_MAX)  # `_highest` after each of the last batches

    @property
    def low(self) -> str:
        """Return the lower bound: ids are greater than this, and lower than latest_id()."""
        return self._before[0]

    def note(self, high: str) -> None:
        self._highest = max(self._highest, high)
        self._before.append(self._highest)
        self._before.popleft()


class Batch:
    """A written batch, as the writer knows it."""

    __slots__ = ("first", "made_ns", "mask", "size", "span")

    def __init__(self, first: int, mask: int, whole: int, made_ns: int) -> None:
        self.first = first
        self.mask = mask  # of the tasks that are still there
        self.span = whole.bit_length()
        self.size = whole.bit_count()  # as it was written
        self.made_ns = made_ns


class NewBatch(Struct, frozen=True):
    """A batch to write."""

    first: int
    mask: int
    high: str
    row: tuple[Any, ...]


class TaskBatches:
    """All batches of new tasks, for the writer."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        rows = connection.execute(_MASKS).fetchall()
        self._batches = [Batch(first, _mask(mask), _mask(whole), 0) for first, mask, whole in rows]
        self._firsts = [batch.first for batch in self._batches]
        self._end = max((batch.first + batch.span for batch in self._batches), default=0)
        ((highest,),) = connection.execute("SELECT max(high) FROM sheets").fetchall()
        self.range = Range(highest or "")

    @property
    def tasks(self) -> int:
        """How many tasks the batches still hold."""
        return sum(batch.mask.bit_count() for batch in self._batches)

    def strike(self, seqs: Iterable[int], masks: dict[Batch, int]) -> list[int]:
        """Take tasks out of their batches, in `masks`; return the seqs of those with rows."""
        rows: list[int] = []
        batch: Batch | None = None
        first = span = mask = 0
        for seq in seqs:
            place = seq - first
            if not 0 <= place < span:
                if batch is not None:
                    masks[batch] = mask
                batch = self.holding(seq)
                if batch is None:
                    first = span = 0
                    rows.append(seq)
                    continue
                first, span = batch.first, batch.span
                mask = masks.get(batch, batch.mask)
                place = seq - first
            bit = 1 << place
            if mask & bit:
                mask ^= bit
            else:
                rows.append(seq)
        if batch is not None:
            masks[batch] = mask
        return rows

    def bits_of(self, seqs: Iterable[int]) -> dict[Batch, int]:
        """Return the bits of those seqs that are in batches."""
        bits: dict[Batch, int] = {}
        for seq in seqs:
            batch = self.holding(seq)
            if batch is not None:
                bits[batch] = bits.get(batch, 0) | 1 << (seq - batch.first)
        return bits

    def holding(self, seq: int) -> Batch | None:
        """Return the batch whose span includes a seq."""
        place = bisect_right(self._firsts, seq) - 1
        if place < 0:
            return None
        batch = self._batches[place]
        return batch if seq - batch.first < batch.span else None

    def sort_out(self, added: Iterable[NewRecord]) -> tuple[list[NewBatch], list[NewRecord]]:
        """Split new tasks, ordered by seq, into batches to write and tasks that get rows."""
        batches: list[NewBatch] = []
        rows: list[NewRecord] = []
        part: list[NewRecord] = []
        low, high = self.range.low, latest_id()
        end, limit, size = self._end - 1, 0, 0
        for new in added:
            spec, seq = new.spec, new.seq
            if not (low < spec.id < high and seq > end and is_short(spec)):
                rows.append(new)
                continue
            if seq >= limit or size > BATCH_BYTES_MAX:
                _close(part, batches, rows)
                part, limit, size = [], seq + BATCH_TASKS, 0
            part.append(new)
            size += len(spec.args)
            end = seq
        _close(part, batches, rows)
        return batches, rows

    def sort_runs(self, runs: list[BulkRecord]) -> tuple[list[NewBatch], list[NewRecord]] | None:
        """Split runs as sort_out() does; None if sort_out() has to look at each task."""
        first, end = runs[0].first, runs[-1].end
        specs = [spec for run in runs for spec in run.specs]
        ids = [spec.id for spec in specs]
        size = max([len(spec.args) for spec in specs])
        if (
            first < self._end
            or end - first != len(specs)  # other tasks came between them
            or min(ids) <= self.range.low
            or max(ids) >= latest_id()
            or size > SHORT_BYTES_MAX
            or size * BATCH_TASKS > BATCH_BYTES_MAX
            or [spec for spec in specs if spec.fallback is not None]
        ):
            return None
        walls = [run.submitted_wall_ns for run in runs for _ in run.specs]
        batches: list[NewBatch] = []
        rows: list[NewRecord] = []
        for begin in range(0, len(specs), BATCH_TASKS):
            part = slice(begin, begin + BATCH_TASKS)
            seqs = range(first + begin, min(end, first + begin + BATCH_TASKS))
            if len(seqs) < BATCH_MIN:
                parts = zip(seqs, specs[part], walls[part], strict=True)
                rows = [NewRecord(seq, spec, wall, pool_of(spec)) for seq, spec, wall in parts]
            else:
                mask = (1 << len(seqs)) - 1
                batches.append(_batch(ids[part], list(seqs), mask, walls[part], specs[part]))
        return batches, rows

    def written(self, batches: list[NewBatch], masks: dict[Batch, int]) -> None:
        """Note what was committed."""
        now_ns = time.monotonic_ns()
        for new in batches:
            batch = Batch(new.first, new.mask, new.mask, now_ns)
            self._end = batch.first + batch.span
            self._batches.append(batch)
            self._firsts.append(new.first)
            self.range.note(new.high)
        for batch, mask in masks.items():
            batch.mask = mask
            if not mask:
                place = bisect_right(self._firsts, batch.first) - 1
                del self._batches[place], self._firsts[place]

    def sparse(self, count: int) -> list[Batch]:
        """Return some old batches that are nearly empty."""
        before_ns = time.monotonic_ns() - OLD_NS
        found = (
            batch
            for batch in self._batches
            if batch.made_ns <= before_ns and batch.mask.bit_count() * LEFT_SHARE < batch.size
        )
        return list(islice(found, count))


def _close(part: list[NewRecord], batches: list[NewBatch], rows: list[NewRecord]) -> None:
    if len(part) < BATCH_MIN:
        rows.extend(part)
        return
    ids = [new.spec.id for new in part]
    seqs = [new.seq for new in part]
    mask = sum([1 << (seq - seqs[0]) for seq in seqs])
    submits = [new.submitted_wall_ns for new in part]
    batches.append(_batch(ids, seqs, mask, submits, [new.spec for new in part]))


def _batch(
    ids: list[str], seqs: list[int], mask: int, submits: list[int], specs: list[TaskSpec]
) -> NewBatch:
    blob = encode((ids, seqs, submits, specs))
    high = max(ids)
    return NewBatch(seqs[0], mask, high, (seqs[0], mask_bytes(mask), min(ids), high, blob))


def mask_bytes(mask: int) -> bytes:
    return mask.to_bytes(MASK_BYTES, "little")


def _mask(blob: bytes) -> int:
    return int.from_bytes(blob, "little")


# -- reading new tasks, over any connection -------------------------------------------------------


def queued_rows(
    connection: sqlite3.Connection,
    *,
    after: int = 0,
    below: int = SEQ_MAX,
    newest: bool = False,
) -> Iterator[tuple[Any, ...]]:
    """Yield the tasks of all batches between two seqs as rows with LIVE_COLUMNS, by seq."""
    order = "DESC" if newest else "ASC"
    limits = "WHERE sheets.first > ? AND sheets.first < ?"
    query = _BATCHES % f"{limits} ORDER BY sheets.first {order}"
    for first, mask, blob in connection.execute(query, (after - BATCH_TASKS, below)):
        queued = opened(first, _decode_queued, blob)
        if queued is not None:
            rows = [row for row in _rows(first, _mask(mask), queued) if after < row[0] < below]
            yield from reversed(rows) if newest else rows


def tasks_of_batch(connection: sqlite3.Connection, batch: Batch, mask: int) -> list[NewRecord]:
    """Return the tasks of a batch whose bits are in `mask`."""
    ((blob,),) = connection.execute("SELECT tasks FROM sheets WHERE first = ?", (batch.first,))
    queued = opened(batch.first, _decode_queued, blob)
    tasks: list[NewRecord] = []
    for seq, submitted_ns, *_, raw in _rows(batch.first, mask, queued) if queued else ():
        spec = opened(seq, decode_spec, raw)
        if spec is not None:
            tasks.append(NewRecord(seq, spec, submitted_ns, pool_of(spec)))
    return tasks


def queued_rows_of(connection: sqlite3.Connection, ids: Iterable[str]) -> list[tuple[Any, ...]]:
    """Return those tasks that are in batches, as rows with LIVE_COLUMNS."""
    found: list[tuple[Any, ...]] = []
    for first, mask, blob, wanted in _batches_with(connection, ids, together=False):
        queued = opened(first, _decode_queued, blob)
        if queued is not None:
            found += [_row(queued, place) for place in _places(first, mask, queued, wanted)]
    return found


def queued_tasks_of(connection: sqlite3.Connection, ids: Iterable[str]) -> OnDisk:
    """Return those tasks that are in batches and readable, to be run."""
    found = OnDisk()
    for first, mask, blob, wanted in _batches_with(connection, ids, together=True):
        try:
            queued = _decode_tasks(blob)
        except UNREADABLE:  # decoding row by row finds the unreadable one
            raws = opened(first, _decode_queued, blob)
            if raws is not None:
                places = _places(first, mask, raws, wanted)
                found.extend(queued_tasks([_row(raws, place) for place in places]))
            continue
        seqs, specs, submits = queued.seqs, queued.specs, queued.submits
        places = _places(first, mask, queued, wanted)
        if len(places) == len(specs):
            found.extend(OnDisk(seqs, specs, submits))
        else:
            for place in places:
                found.add(seqs[place], specs[place], submits[place])
    return found


def _batches_with(
    connection: sqlite3.Connection, ids: Iterable[str], *, together: bool
) -> Iterator[tuple[int, int, bytes, set[str]]]:
    """Yield the batches that may hold some of these ids: first, mask, tasks, ids still wanted.

    The caller removes the ids it finds. `together`: most ids are near each other.
    """
    asked = list(ids)
    wanted = set(asked)
    last = max(asked, default="") if together else ""
    for id_ in asked:
        if not wanted:
            return
        if id_ not in wanted:
            continue
        row = connection.execute(_AROUND, (id_, last or id_)).fetchone()
        firsts, masks, sizes, tasks = row
        if firsts is None:
            continue
        at = 0
        for first, mask, size in zip(
            firsts.split(","), masks.split(","), sizes.split(","), strict=True
        ):
            end = at + int(size)
            yield int(first), _mask(bytes.fromhex(mask)), tasks[at:end], wanted
            at = end


def _places(
    first: int, mask: int, queued: _Queued | _QueuedTasks, wanted: set[str]
) -> Sequence[int]:
    """Return the places of wanted tasks that a batch still holds, and remove them from `wanted`."""
    ids, seqs = queued.ids, queued.seqs
    if mask.bit_count() == len(ids) and wanted.issuperset(ids):
        wanted.difference_update(ids)
        return range(len(ids))
    places = [
        place
        for place, id_ in enumerate(ids)
        if id_ in wanted and mask >> (seqs[place] - first) & 1
    ]
    wanted.difference_update([ids[place] for place in places])
    return places


def _rows(first: int, mask: int, queued: _Queued) -> Iterator[tuple[Any, ...]]:
    for place, seq in enumerate(queued.seqs):
        if mask >> (seq - first) & 1:
            yield _row(queued, place)


def _row(queued: _Queued, place: int) -> tuple[Any, ...]:
    return (queued.seqs[place], queued.submits[place], 0, 0, 0, 0, -1, 0, queued.specs[place])
