"""Schedules of the engine in memory: their runs, and the results of those."""

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import (
    IN_USE,
    INVALID_SCHEDULE,
    READ_ONLY,
    SECTION_BYTES_MAX,
    TOO_MANY,
    UNKNOWN_SCHEDULE,
)
from musterd.supervisor.cluster.adding import (
    PLAN_BYTES_MAX,
    SECTIONS_BYTES_MAX,
    AddedSchedule,
    refusal,
)
from musterd.supervisor.cluster.engine import (
    RETRYING_MAX,
    DueSchedule,
    Run,
    ScheduleCard,
    ScheduleView,
    Settled,
)
from musterd.supervisor.cluster.model_records import Schedule, Task
from musterd.supervisor.cluster.model_views import Views
from musterd.supervisor.cluster.watching import (
    CHANGED,
    CHANGES_MAX,
    SILENT_NS,
    WATCHED_MAX,
    Changed,
    ChangeNote,
    Judged,
    KeptChange,
    WatchedSchedule,
)
from musterd.supervisor.core.model.policy import SCHEDULES_MAX
from musterd.supervisor.core.model.runs import Way, replaced_why


class Schedules(Views):
    silent_ns = SILENT_NS

    def _follow(self, cards: Sequence[ScheduleCard]) -> None:
        """Take over the schedules of a policy."""
        wanted = {card.name: card for card in cards}
        known = self.board.schedules.items()
        for name in [name for name, each in known if name not in wanted and not each.added]:
            del self.board.schedules[name]
        for name, card in wanted.items():
            schedule = self._reschedule(name, card)
            schedule.added, schedule.section = False, b""
        self._forget_results()

    def _reschedule(self, name: str, card: ScheduleCard) -> Schedule:
        known = self.board.schedules.setdefault(name, Schedule(card))
        if known.card.plan != card.plan:  # the node looks at it anew
            known.turn += 1
            known.next_ns = 0
        known.card = card
        return known

    @property
    def scheduled(self) -> int:
        return max([1 + each.card.notify for each in self.board.schedules.values()], default=0)

    def put(self, schedules: Sequence[AddedSchedule], *, replace: bool = True) -> list[Rejection]:
        refused = []
        for each in sorted(schedules, key=lambda each: each.card.name):
            code = self._put_refused(each, replace=replace)
            if code:
                refused.append(refusal(each.card.name, code))
                continue
            new = each.card.name not in self.board.schedules
            known = self._reschedule(each.card.name, each.card)
            known.added, known.section = True, each.section
            known.paused = known.paused or each.paused
            if new:
                known.last_ns = self.clock() + self.wall_ns - each.ago_ns
                known.memory = each.memory
        self._forget_results()
        return refused

    def _put_refused(self, each: AddedSchedule, *, replace: bool) -> str:
        known = self.board.schedules.get(each.card.name)
        if known is not None and not known.added:
            return READ_ONLY
        if known is not None and not replace:
            return IN_USE
        if len(each.section) > SECTION_BYTES_MAX or len(each.card.plan) > PLAN_BYTES_MAX:
            return INVALID_SCHEDULE
        others = [each for each in self.board.schedules.values() if each is not known]
        size = sum(len(other.section) for other in others) + len(each.section)
        return TOO_MANY if len(others) >= SCHEDULES_MAX or size > SECTIONS_BYTES_MAX else ""

    def delete(self, names: Sequence[str]) -> list[Rejection]:
        refused = []
        for name in names:
            known = self.board.schedules.get(name)
            if known is None or not known.added:
                refused.append(refusal(name, UNKNOWN_SCHEDULE if known is None else READ_ONLY))
            else:
                del self.board.schedules[name]
        self._forget_results()
        return refused

    def _forget_results(self) -> None:
        """Forget the results of schedules that are gone, or whose changes nobody wants to know."""
        wanted = {name for name, each in self.board.schedules.items() if each.card.notify}
        for name in [name for name in self.board.watched if name not in wanted]:
            del self.board.watched[name]
        for name in [name for name in self.board.history if name not in wanted]:
            del self.board.history[name]
        self.board.seen = [each for each in self.board.seen if each[0] in wanted]

    def due(self) -> list[DueSchedule]:
        wall_ns = self.clock() + self.wall_ns
        return [
            self._due(name, each)
            for name, each in sorted(self.board.schedules.items())
            if each.next_ns is not None and each.next_ns <= wall_ns and not each.paused
        ]

    def _due(self, name: str, each: Schedule) -> DueSchedule:
        alive = self._live_runs(name)
        return DueSchedule(
            name,
            each.card.plan,
            each.turn,
            each.last_ns,
            self.clock() + self.wall_ns,
            each.memory,
            alive[-1].spec.id if alive else "",
            0 < len(alive) <= RETRYING_MAX and all(task.retrying for task in alive),
            max([task.spec.id for task in alive if task.asked], default=""),
        )

    def _live_runs(self, name: str) -> list[Task]:
        """Return the live runs of a schedule, in the order of their ids."""
        found = [each for id_, each in self.board.live.items() if id_.startswith(f"@{name}.")]
        return sorted(found, key=lambda each: each.spec.id)

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
        known = self.board.schedules.get(due.name)
        if known is None or known.turn != due.turn:
            return None
        last = self._live_runs(due.name)
        asked = [each for each in last if each.asked]
        if way in ("replaces", "hastens") and (
            not all(each.retrying for each in last) or bool(asked) != (way == "hastens")
        ):
            return None
        known.turn += 1
        known.last_ns, known.next_ns, known.memory = last_ns, next_ns, memory
        known.skipped += skipped
        if anew and known.card.notify:
            self.note_seen(due.name, "anew")
        verdicts = self.submit([each.spec for each in runs], resend=resend)
        for run, verdict in zip(runs, verdicts, strict=True):
            if verdict.state == "rejected":
                known.skipped += 1
            else:
                known.runs += 1
                known.task, known.ran_ns = run.spec.id, run.instant_ns
        if way == "hastens":
            self.hasten(asked[-1])
        elif way == "replaces" and any(each.state != "rejected" for each in verdicts):
            for task in last:
                self.withdraw(task, replaced_why(due.name))
        return Settled(tuple(verdicts))

    def schedules(
        self, name: str = "", *, after: str = "", limit: int = SCHEDULES_MAX
    ) -> list[ScheduleView]:
        views = []
        for known, each in sorted(self.board.schedules.items()):
            if name not in ("", known) or known <= after:
                continue
            newest = self.view(each.task)
            views.append(
                ScheduleView(
                    self._due(known, each),
                    each.next_ns,
                    each.paused,
                    each.card.notify,
                    each.runs,
                    each.skipped,
                    each.task,
                    each.ran_ns,
                    newest.state if newest is not None else "",
                    each.added,
                    each.section,
                    self.board.watched.get(known, (0, b""))[1],
                )
            )
        return views[:limit]

    def pause(self, name: str, *, paused: bool) -> bool:
        known = self.board.schedules.get(name)
        if known is not None and known.paused != paused:
            known.paused = paused
            known.turn += 1
            if not paused and known.last_ns:
                known.last_ns = max(known.last_ns, self.clock() + self.wall_ns)
            if not paused and known.next_ns is not None:
                known.next_ns = 0
        return known is not None

    # -- results ------------------------------------------------------------------------------

    def watched(self, skip: Sequence[str] = ()) -> list[WatchedSchedule]:
        chosen: dict[str, list[Any]] = {}
        waiting = [each for each in self.board.seen if each[0] not in skip]
        for name, run in waiting[:WATCHED_MAX]:
            chosen.setdefault(name, []).append(run)
        untold = [each for each in self.board.changes if each.number not in self.board.told]
        return [
            WatchedSchedule(
                name,
                self.board.schedules[name].card.plan,
                *self.board.watched.get(name, (0, b"")),
                tuple([each.entry for each in untold if each.schedule == name]),
                tuple(runs),
            )
            for name, runs in sorted(chosen.items())
            if name in self.board.schedules
        ]

    def judged(self, found: Sequence[Judged]) -> list[str]:
        return [each.name for each in found if self._judged(each)]

    def _judged(self, found: Judged) -> bool:
        known = self.board.schedules.get(found.name)
        turn, _ = self.board.watched.get(found.name, (0, b""))
        waiting = {run.number for _, run in self.board.seen}
        if known is None or not known.card.notify or turn != found.turn:
            return False
        if not waiting.issuperset(found.runs):
            return False  # it was forgotten, and is there anew
        self.board.watched[found.name] = (turn + 1, found.record)
        self.board.seen = [each for each in self.board.seen if each[1].number not in found.runs]
        kept = self.board.history.setdefault(found.name, {})
        kept.update({entry.number: entry for entry in found.entries})
        for number in found.forgotten:
            kept.pop(number, None)
        for note in found.notes:
            number = len(self.board.changes) + 1
            said = structs.asdict(note)
            told = ChangeNote(number=number, schedule=found.name, **said)
            self.board.changes.append(told)
            self.board.noted_ns[number] = self.clock()
        return True

    def history(
        self, name: str, numbers: Sequence[int] | None = None, *, limit: int = CHANGES_MAX
    ) -> list[HistoryEntry] | None:
        if name not in self.board.schedules:
            return None
        kept = sorted(self.board.history.get(name, {}).items())
        return [entry for number, entry in kept if numbers is None or number in numbers][-limit:]

    def changed(self, name: str = "", limit: int = 20) -> list[KeptChange]:
        found = [
            KeptChange(each, self.board.schedules[each].card.plan, kept.get(entry.before), entry)
            for each, kept in sorted(self.board.history.items())
            for entry in kept.values()
            if entry.changed and name in ("", each)
        ]
        return sorted(found, key=lambda each: -each.after.at_ns)[:limit]

    def changes(self, after: str = "") -> Changed:
        changes = self.board.changes
        if after:
            found = [note for note in changes if note.number > int(after)]
        else:
            real = [note for note in changes if note.event == CHANGED]
            found = sorted({note.schedule: note for note in real}.values(), key=_number)
        return Changed(tuple(found[-CHANGES_MAX:]), str(len(changes)))

    def untold(self) -> list[ChangeNote]:
        before_ns = self.clock() - self.silent_ns
        return [
            note
            for note in self.board.changes
            if note.number not in self.board.told and self.board.noted_ns[note.number] <= before_ns
        ][:CHANGES_MAX]

    def announce(self, number: int, token: int) -> int:
        holder = self.board.announced.get(number)
        if number in self.board.told:
            return 0
        if holder == token:
            return 1 + (number in self.board.retaken)
        if holder is not None and self.board.noted_ns[number] > self.clock() - self.silent_ns:
            return 0
        note = self.board.changes[number - 1]
        self.board.changes[number - 1] = structs.replace(note, announced=True)
        self.board.announced[number] = token
        self.board.noted_ns[number] = self.clock()
        if holder is None:
            return 1
        self.board.retaken[number] = None
        return 2

    def told(self, numbers: Sequence[int]) -> None:
        self.board.told.update(dict.fromkeys(numbers))


def _number(note: ChangeNote) -> int:
    return note.number
