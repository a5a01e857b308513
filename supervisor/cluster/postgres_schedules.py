"""The engine on PostgreSQL: schedules, their runs, and the results of those."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import psycopg
from msgspec import msgpack

from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import Rejection, TaskSpec, View
from musterd.supervisor.cluster.adding import AddedSchedule, refusal
from musterd.supervisor.cluster.engine import (
    DueSchedule,
    EngineError,
    Run,
    ScheduleView,
    Settled,
    Verdict,
)
from musterd.supervisor.cluster.rows import STATES, Row, Wakes, tally, tell
from musterd.supervisor.cluster.watching import (
    CHANGES_MAX,
    SILENT_NS,
    Changed,
    ChangeNote,
    Judged,
    KeptChange,
    NewNote,
    SeenRun,
    WatchedSchedule,
)
from musterd.supervisor.core.model.policy import SCHEDULES_MAX
from musterd.supervisor.core.model.runs import Way

KINDS: tuple[Literal["good"], Literal["failed"], Literal["anew"]] = ("good", "failed", "anew")

_pack = msgpack.Encoder().encode
_unpack_view = msgpack.Decoder(View).decode
_unpack_entry = msgpack.Decoder(HistoryEntry).decode


class ScheduleCalls(Protocol):
    """What PostgresEngine does about schedules."""

    def _call(self, function: str, *parameters: object) -> list[Row]: ...
    def _connected(self) -> psycopg.Connection[Row]: ...
    def _refusal(self, error: psycopg.Error) -> EngineError: ...
    def _wake(self, wakes: Wakes) -> None: ...
    def _submit(
        self, tasks: Sequence[TaskSpec], waiter: int, resend: bool, wakes: Wakes
    ) -> list[Verdict]: ...

    def due(self) -> list[DueSchedule]:
        return [DueSchedule(*row) for row in self._call("due_1")]

    def settle(
        self,
        due: DueSchedule,
        runs: Sequence[Run],
        *,
        last_ns: int,
        next_ns: int | None,
        memory: bytes,
        skipped: int = 0,
        anew: bool = False,
        resend: bool = False,
        way: Way = "begins",
    ) -> Settled | None:
        assert not (anew and runs), "the row of its last result is locked after those of tasks"
        wakes, settled = Wakes(), False
        verdicts: list[Verdict] = []
        keys = [each.spec.key for each in runs if each.spec.key] if way == "replaces" else None
        try:
            with self._connected().transaction():
                row = (due.name, due.turn, last_ns, next_ns, memory, skipped, anew, keys)
                locked = self._call("settle_1", *row)[0][0]
                if locked is None:
                    return None
                if runs:
                    verdicts = self._submit([each.spec for each in runs], 0, resend, wakes)
                    self._call("ran_1", due.name, *tally(runs, verdicts))
                if way in ("replaces", "hastens"):
                    made = [each.id for each in verdicts if each.state != "rejected"]
                    rows = self._call("make_way_1", due.name, made, locked, way == "hastens")
                    if not rows:
                        raise psycopg.Rollback
                    tell(rows, wakes)
                settled = True
        except psycopg.Error as error:
            raise self._refusal(error) from error
        if not settled:
            return None
        self._wake(wakes)
        return Settled(tuple(verdicts))

    def schedules(
        self, name: str = "", *, after: str = "", limit: int = SCHEDULES_MAX
    ) -> list[ScheduleView]:
        views = []
        for row in self._call("schedules_1", name, after, limit):
            state = STATES[row[16]] if row[16] is not None else ""
            shown = [*row[9:16], state, *row[17:]]
            views.append(ScheduleView(DueSchedule(*row[:9]), *shown))
        return views

    def put(self, schedules: Sequence[AddedSchedule], *, replace: bool = True) -> list[Rejection]:
        rows = [
            (
                *(each.card.name, each.card.plan, each.card.notify, each.section),
                *(each.ago_ns, each.memory, each.paused),
            )
            for each in schedules
        ]
        refused = self._call("put_1", *_lists(rows, 7), replace)
        return [refusal(name, code) for name, code in refused]

    def delete(self, names: Sequence[str]) -> list[Rejection]:
        return [refusal(name, code) for name, code in self._call("delete_1", list(names))]

    def pause(self, name: str, *, paused: bool) -> bool:
        return bool(self._call("pause_1", name, paused)[0][0])

    # -- results ------------------------------------------------------------------------------

    def watched(self, skip: Sequence[str] = ()) -> list[WatchedSchedule]:
        found = []
        for name, plan, turn, record, untold, *lists in self._call("watched_1", list(skip)):
            runs = tuple([_seen(*row) for row in zip(*lists, strict=True)])
            found.append(WatchedSchedule(name, plan, turn, record, tuple(untold), runs))
        return found

    def judged(self, found: Sequence[Judged]) -> list[str]:
        runs = [(each.name, number) for each in found for number in each.runs]
        entries = [
            (each.name, e.number, e.at_ns if e.changed else 0, e.before, _pack(e))
            for each in found
            for e in each.entries
        ]
        gone = [(each.name, number) for each in found for number in each.forgotten]
        notes = [_note(each.name, note) for each in found for note in each.notes]
        rows = self._call(
            "judged_1",
            *_lists([(each.name, each.turn, each.record) for each in found], 3),
            *_lists(runs, 2),
            *_lists(entries, 5),
            *_lists(gone, 2),
            *_lists(notes, 10),
        )
        return [row[0] for row in rows]

    def history(
        self, name: str, numbers: Sequence[int] | None = None, *, limit: int = CHANGES_MAX
    ) -> list[HistoryEntry] | None:
        asked = list(numbers) if numbers is not None else None
        rows = self._call("history_1", name, asked, limit)
        if rows and rows[0][0] is None:
            return None
        return [_unpack_entry(entry) for (entry,) in rows]

    def changed(self, name: str = "", limit: int = 20) -> list[KeptChange]:
        return [
            KeptChange(
                schedule,
                plan,
                _unpack_entry(before) if before is not None else None,
                _unpack_entry(after),
            )
            for schedule, plan, before, after in self._call("changed_1", name, limit)
        ]

    def changes(self, after: str = "") -> Changed:
        [(now, *_), *rows] = self._call("changes_1", after)
        return Changed(tuple([ChangeNote(*row[1:]) for row in rows]), now)

    def untold(self) -> list[ChangeNote]:
        return [ChangeNote(*row) for row in self._call("untold_1", SILENT_NS)]

    def announce(self, number: int, token: int) -> int:
        return int(self._call("announce_1", number, token, SILENT_NS)[0][0])

    def told(self, numbers: Sequence[int]) -> None:
        self._call("told_1", list(numbers))


def _seen(number: int, kind: int, task: str, at_ns: int, digest: str, *rest: Any) -> SeenRun:
    value, view, watch, error = rest
    return SeenRun(
        number,
        KINDS[kind],
        task,
        at_ns,
        digest,
        value,
        _unpack_view(view) if view is not None else None,
        watch or b"",
        error or "",
    )


def _note(name: str, note: NewNote) -> tuple[object, ...]:
    said = note.reason.replace("\0", "")
    return (
        note.event,
        name,
        note.task,
        note.digest,
        note.entry,
        note.before,
        note.at_ns,
        said,
        note.count,
        note.pool,
    )


def _lists(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    """Return the columns of rows."""
    return [[row[place] for row in rows] for place in range(width)]
