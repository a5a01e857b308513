"""Batches of results: tasks that succeeded together, in one row of the table `results`.

`result_ids` alone says which tasks a batch still holds: a later end of the same id, or a manual
retry, takes the id out. Tasks are numbered in the order of their end, those of `finished` and those
of batches in one count. A batch is forgotten as a whole.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import SUCCEEDED
from musterd.supervisor.core.model.actions import FinalRecord
from musterd.supervisor.store.rows import SHORT_BYTES_MAX, inserting, opened
from musterd.supervisor.store.task_batches import BATCH_BYTES_MAX, BATCH_MIN, BATCH_TASKS, is_short

NUMBER_MAX = 2**63 - 1  # of a finished task
insert_results = inserting("INSERT INTO results (number, size, finished_at, tasks)")


class _Succeeded(Struct, array_like=True, frozen=True, gc=False):
    """The content of a batch."""

    ids: list[str]
    seqs: list[int]
    crashes: list[int]
    submits: list[int]
    specs: list[Raw]
    outcomes: list[Raw]


_decode_succeeded = msgspec.msgpack.Decoder(_Succeeded).decode


@cache
def _marks(count: int) -> str:
    return ",".join("?" * count)


def sort_results(finished: list[FinalRecord]) -> tuple[list[list[FinalRecord]], list[FinalRecord]]:
    """Split finished tasks into the batches to write and the tasks that get rows."""
    parts: list[list[FinalRecord]] = []
    rows: list[FinalRecord] = []
    part: list[FinalRecord] = []
    size = 0
    for final in finished:
        spec, outcome = final.spec, final.outcome
        if (
            outcome.state == SUCCEEDED
            and len(outcome.value) <= SHORT_BYTES_MAX
            and outcome.failure is None
            and is_short(spec)
        ):
            part.append(final)
            size += len(spec.args) + len(outcome.value)
            if len(part) == BATCH_TASKS or size > BATCH_BYTES_MAX:
                parts.append(part)
                part, size = [], 0
        else:
            rows.append(final)
    if len(part) >= BATCH_MIN:
        parts.append(part)
    elif parts:
        rows.extend(part)
    else:
        rows = finished  # keeps the order
    return parts, rows


def last_number(connection: sqlite3.Connection) -> int:
    """Return the number of the last finished task, in rows and batches."""
    query = (
        "SELECT max(coalesce((SELECT max(number) FROM finished), 0), coalesce("
        "(SELECT number + size - 1 FROM results ORDER BY number DESC LIMIT 1), 0))"
    )
    ((number,),) = connection.execute(query)
    return int(number)


def first_number(connection: sqlite3.Connection) -> int:
    """Return the number of the first finished task that is there, 0 for none."""
    query = (
        "SELECT min(coalesce((SELECT min(number) FROM finished), ?1),"
        " coalesce((SELECT min(number) FROM results), ?1))"
    )
    ((number,),) = connection.execute(query, (NUMBER_MAX,))
    return int(number) if number < NUMBER_MAX else 0


def results_blob(part: list[FinalRecord]) -> bytes:
    return encode((
        [final.spec.id for final in part],
        [final.seq for final in part],
        [final.crashes for final in part],
        [final.submitted_wall_ns for final in part],
        [final.spec for final in part],
        [final.outcome for final in part],
    ))  # fmt: skip


def delete_results(connection: sqlite3.Connection, number: int, blob: bytes) -> list[int]:
    """Forget one batch; return the seqs of its tasks."""
    connection.execute("DELETE FROM results WHERE number = ?", (number,))
    results = opened(number, _decode_succeeded, blob)
    if results is None:
        return []
    named = f"DELETE FROM result_ids WHERE number = ? AND id IN ({_marks(len(results.ids))})"
    connection.execute(named, (number, *results.ids))
    return results.seqs


def result_rows_of(
    connection: sqlite3.Connection, places: Iterable[tuple[str, int]]
) -> list[tuple[int, tuple[Any, ...]]]:
    """Find (id, number of its batch); return each as (number, row with FINISHED_COLUMNS)."""
    by_batch: dict[int, set[str]] = {}
    for id_, number in places:
        by_batch.setdefault(number, set()).add(id_)
    found: list[tuple[int, tuple[Any, ...]]] = []
    query = "SELECT finished_at, tasks FROM results WHERE number = ?"
    for number, ids in by_batch.items():
        for finished_at, blob in connection.execute(query, (number,)):
            results = opened(number, _decode_succeeded, blob)
            if results is not None:
                found += [
                    (number + place, _result_row(results, place, finished_at))
                    for place, id_ in enumerate(results.ids)
                    if id_ in ids
                ]
    return found


def newest_results(
    connection: sqlite3.Connection, after: int, below: int = NUMBER_MAX, *, gone: bool = False
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield tasks with a number between the two, newest first, like result_rows_of(); `gone`
    includes those that were taken out."""
    query = (
        "SELECT number, finished_at, tasks FROM results WHERE number > ? AND number < ?"
        " ORDER BY number DESC"
    )
    for number, finished_at, blob in connection.execute(query, (after - BATCH_TASKS, below)):
        results = opened(number, _decode_succeeded, blob)
        if results is None:
            continue
        ids = results.ids
        named = f"SELECT id FROM result_ids WHERE number = ? AND id IN ({_marks(len(ids))})"
        there = {id_ for (id_,) in connection.execute(named, (number, *ids))}
        for place in reversed(range(len(ids))):
            if (gone or ids[place] in there) and after < number + place < below:
                yield number + place, _result_row(results, place, finished_at)


def _result_row(results: _Succeeded, place: int, finished_at: int) -> tuple[Any, ...]:
    return (
        results.seqs[place], results.crashes[place], results.submits[place], finished_at,
        results.specs[place], results.outcomes[place],
    )  # fmt: skip
