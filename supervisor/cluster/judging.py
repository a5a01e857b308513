"""Judge ended runs of a cluster's schedules, by the rules that a daemon has for its own.

Pure calculation; see watching.py for who calls it, and core/model/watching.py for the rules.
"""

import msgspec

from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.cluster.watching import (
    CHANGED,
    RECOVERED,
    STALE,
    Judged,
    NewNote,
    SeenRun,
    WatchedSchedule,
)
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.watching import (
    CUT_OFF,
    Seen,
    Watched,
    begin_anew,
    judge,
    note_failure,
    stale_why,
)

_decode = msgspec.msgpack.Decoder(Watched).decode
_encode = msgspec.msgpack.Encoder().encode


def judged(schedule: WatchedSchedule, policy: SchedulePolicy) -> Judged:
    """Return what the runs of a schedule mean, one after the other."""
    watched, rules = _watched_of(schedule), policy.watching
    pool = policy.task.partition(".")[0]
    watched.untold = [note for note in watched.untold if note.number in schedule.untold]
    entries: dict[int, HistoryEntry] = {}
    forgotten: dict[int, None] = {}
    notes: list[NewNote] = []
    for run in schedule.runs:
        if run.kind == "anew":
            begin_anew(watched)
        elif run.kind == "failed":
            if note_failure(rules, watched):
                why = stale_why(watched, run.error)
                notes.append(
                    NewNote(
                        STALE,
                        pool,
                        run.task,
                        at_ns=run.at_ns,
                        reason=why,
                        count=watched.failures,
                    )
                )
        else:
            watched.failures = 0
            if watched.stale:
                watched.stale = False
                notes.append(NewNote(RECOVERED, pool, run.task, at_ns=run.at_ns))
            seen = _seen_of(run, by_rules=bool(rules.name))
            if seen is None or run.watch != rules.rules:
                continue  # the result of another task, or one by the rules before
            found = judge(rules, watched, seen)
            if found.entry is not None:
                entries[found.entry.number] = found.entry
            for number in found.forgotten:
                if entries.pop(number, None) is None:
                    forgotten[number] = None
            if found.change is not None:
                change = found.change
                both = (change.number, change.before)
                notes.append(
                    NewNote(CHANGED, pool, change.task, change.digest, *both, change.at_ns)
                )
    return Judged(
        schedule.name,
        schedule.turn,
        _encode(watched),
        tuple([run.number for run in schedule.runs]),
        tuple(entries.values()),
        tuple(forgotten),
        tuple(notes),
    )


def _watched_of(schedule: WatchedSchedule) -> Watched:
    if not schedule.record:
        return Watched()
    try:
        return _decode(schedule.record)
    except msgspec.MsgspecError:
        return Watched()  # it begins anew


def _seen_of(run: SeenRun, *, by_rules: bool) -> Seen | None:
    view = run.view
    if view is None:
        if by_rules:
            return None
        cut = run.value is None
        return Seen(run.task, run.digest, {}, run.value or CUT_OFF, cut, run.at_ns)
    kept = run.value if view.kept is None else view.kept
    return Seen(run.task, view.digest, view.numbers, kept or CUT_OFF, view.cut, run.at_ns)
