"""Rows that the functions of the schema return, as structs."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field, msgpack

from musterd.ipc.wire.messages import (
    CANCELLED,
    EXPIRED,
    FAILED,
    NOT_GIVEN,
    PRIORITY_NAMES,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    WAITING,
    FailedAttempt,
    Failure,
    Outcome,
    TaskSpec,
    TaskView,
)
from musterd.supervisor.cluster.engine import (
    DEAD,
    FINISHED,
    UNSUCCESSFUL,
    Grant,
    Run,
    TaskFilter,
    Told,
    Verdict,
)

Row = tuple[Any, ...]

# States as numbers of the tables.
STATES = {
    0: QUEUED,
    1: RUNNING,
    2: WAITING,
    3: WAITING,
    4: SUCCEEDED,
    5: FAILED,
    6: CANCELLED,
    7: EXPIRED,
}

SCOPE_CHARS = 12

unpack_failure = msgpack.Decoder(Failure).decode


class Wakes(Struct):
    """What has to be woken after a commit."""

    lanes: list[int] = field(default_factory=list)
    low: int | None = None
    targets: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    hasten: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    waiter: int = 0
    told: dict[int, None] = field(default_factory=dict)


def note_lanes(row: Sequence[Any], wakes: Wakes) -> None:
    """Note which lanes a submit has filled, and which leaders have to hurry."""
    lanes, low, hasten = row
    wakes.lanes += lanes or []
    wakes.low = low if wakes.low is None else min(wakes.low, low or wakes.low)
    wakes.hasten += hasten or []


def tell(rows: Sequence[Row], wakes: Wakes) -> list[Told]:
    """Turn rows of the type `told` into what counted, and note what has to be woken."""
    told = []
    for id_, waiter, state, lane, held, held_class in rows:
        if id_ is None:
            continue
        if held is not None:
            wakes.targets.append(held)
        if held_class is not None:
            wakes.classes.append(held_class)
        if lane is not None:
            wakes.ready.append(id_)
            wakes.hasten.append(id_)
        if state > 1 and waiter:
            wakes.told[waiter] = None
        told.append(Told(id_, waiter, STATES[state] if state > 1 else ""))
    return told


def outcome(id_: str, state: int, value: bytes, failure: bytes | None, *rest: Any) -> Outcome:
    attempts, run_ns, source = rest
    return Outcome(
        id_,
        STATES[state],
        value,
        unpack_failure(failure) if failure is not None else None,
        attempts,
        run_ns,
        stale=source == "s",
        cached=source == "c",
        fallback=source == "f",
    )


def grant(row: Row) -> Grant:
    id_, claim, attempt, crashes, interruptions, class_, probe, expires_in = row[:8]
    spec = TaskSpec(
        id=id_,
        name=row[8],
        args=row[9],
        priority=row[10],
        target=row[11],
        key=_unscoped(row[12] or ""),
        timeout_ns=row[13] or 0,
        max_retries=NOT_GIVEN if row[14] is None else row[14],
        delay_ns=row[15] or 0,
        expires_ns=row[16] or 0,
        cache_ns=row[17] or 0,
        debounce_ns=row[18] or 0,
        fallback=row[19],
        fallback_on=row[20] or "",
        policy=row[21] or "",
        on_open=row[22] or "",
        watch=row[23] or b"",
        session=row[24] or "",
    )
    return Grant(spec, claim, attempt, crashes, interruptions, class_, probe, expires_in)


def _unscoped(key: str) -> str:
    """Return a key as it was submitted; those of submitters have a scope (10_tables.sql)."""
    return key[SCOPE_CHARS:] if key.startswith("\x01") else key


def tally(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> tuple[object, ...]:
    """Return how many runs of a schedule were taken, how many refused, and the newest of them."""
    taken = [
        run for run, verdict in zip(runs, verdicts, strict=True) if verdict.state != "rejected"
    ]
    newest = (taken[-1].spec.id, taken[-1].instant_ns) if taken else (None, None)
    return (len(taken), len(runs) - len(taken), *newest)


def conditions(which: TaskFilter) -> tuple[object, ...]:
    groups = {FINISHED: [4, 5, 6, 7], UNSUCCESSFUL: [5, 6, 7], DEAD: [-5]}
    states = [number for number, state in STATES.items() if state == which.state]
    states = groups.get(which.state, states)
    return (
        which.pool,
        which.target,
        states if which.state else None,
        which.error,
        which.key,
        which.schedule,
    )


def view(row: Row) -> TaskView:
    numbers, ats, workers, failures = row[17:]
    return TaskView(
        id=row[0],
        name=row[1],
        state=STATES[row[2]],
        priority=PRIORITY_NAMES[row[3]],
        target=row[4],
        attempt=row[5],
        crashes=row[6],
        worker=row[7],
        submitted_at=row[8],
        finished_at=row[9],
        run_seconds=row[10] / 1e9,
        failure=unpack_failure(row[11]) if row[11] is not None else None,
        value=row[12],
        source={"s": "stale", "c": "cached", "f": "fallback"}.get(row[13], ""),
        progress=row[14],
        progress_text=row[15],
        args=row[16],
        attempts=[
            FailedAttempt(number, at, worker, unpack_failure(failure))
            for number, at, worker, failure in zip(
                numbers or (), ats or (), workers or (), failures or (), strict=True
            )
        ],
    )
