"""Results of schedules: judge each good one, keep history, tell changes, count failures.

What is noted here is written with the schedule's record, by the caller (core/tasks/schedules.py).
"""

from collections.abc import Iterable

from musterd.ipc.wire.messages import Change, Outcome
from musterd.supervisor.core.model.actions import ForgetPicture, Report, TellChanges
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task
from musterd.supervisor.core.model.watching import (
    HISTORY,
    encode_entry,
    history_key,
    judge,
    note_failure,
    stale_why,
    trim,
)
from musterd.supervisor.core.tasks.schedule import Schedule, change_report, seen_of


class ScheduleResults:
    def __init__(self, state: State, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger

    def look_at(self, schedule: Schedule, task: Task, outcome: Outcome) -> None:
        """Judge a good result; write its entry of history in the transaction of the result."""
        watched = schedule.record.watched
        watched.failures = 0
        if watched.stale:
            watched.stale = False
            self.report(schedule, "watch.recovered")
        if not self._is_change(schedule, task, outcome) and schedule.policy.watching.picture:
            self._state.out.append(ForgetPicture(task.spec.id))

    def _is_change(self, schedule: Schedule, task: Task, outcome: Outcome) -> bool:
        policy, watched = schedule.policy, schedule.record.watched
        seen = seen_of(task, outcome, self._state.wall_ns(), by_rules=bool(policy.watching.name))
        if seen is None or task.spec.watch != policy.watching.rules:
            return False  # the result of another task, or one by the rules before a reload
        judgement = judge(policy.watching, watched, seen)
        if judgement.entry is not None:
            key = history_key(policy.name, judgement.entry.number)
            self._ledger.remember(HISTORY, key, encode_entry(judgement.entry))
        self._forget_entries(schedule, judgement.forgotten)
        if judgement.change is None:
            return False
        self._ledger.tell(change_report(schedule, judgement.change))
        return True

    def settle_told(self, schedule: Schedule) -> None:
        """Forget that changes are to be told which surely were."""
        watched, told = schedule.record.watched, schedule.told
        watched.untold = [note for note in watched.untold if note not in told]
        schedule.told = []
        self._forget_entries(schedule, trim(schedule.policy.watching, watched))

    def _forget_entries(self, schedule: Schedule, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self._ledger.remember(HISTORY, history_key(schedule.policy.name, number), None)

    def count_failure(self, schedule: Schedule, outcome: Outcome) -> None:
        """Count a failed run, one that ended with a substitute included; report many in a row."""
        watched = schedule.record.watched
        if note_failure(schedule.policy.watching, watched):
            why = stale_why(watched, outcome.error)
            self.report(schedule, "watch.stale", "warning", reason=why, count=watched.failures)

    def tell_newest(self, peer: bytes, schedules: Iterable[Schedule]) -> None:
        """Tell a client that follows changes the newest change of each schedule."""
        changes = [
            Change(each.policy.name, note.task, note.digest, note.at_ns, note.number, note.before)
            for each in schedules
            if (note := each.record.watched.newest) is not None
        ]
        self._ledger.tell(TellChanges(peer, changes))

    def report(
        self,
        schedule: Schedule,
        event: str,
        level: str = "info",
        *,
        reason: str = "",
        count: int = 0,
    ) -> None:
        self._state.out.append(
            Report(
                event,
                level,
                pool=schedule.policy.task.partition(".")[0],
                reason=reason,
                schedule=schedule.policy.name,
                count=count,
            )
        )
