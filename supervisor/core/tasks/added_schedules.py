"""Schedules that are added at run time, by clients and by `musterctl schedule add`.

One fact is kept for each: the section as it was given. The shell checks a section as it checks
files, when it is put, at each start and at each reload. So a section that was good when it was put
may be unusable later: its pool is gone, or a file has a schedule of its name, which wins. Such a
schedule is kept, with what is remembered of its runs, is shown with its problem, and goes on when
the problem is over.

A put and what is remembered of the schedule are written in one transaction, and so is a delete: an
acknowledged put survives, and after an acknowledged delete no run is made.
"""

import msgspec
from msgspec import Raw, Struct

from musterd.ipc.wire.messages import (
    SHUTTING_DOWN,
    Arguments,
    Rejection,
)
from musterd.ipc.wire.schedule_messages import (
    IN_USE,
    INVALID_SCHEDULE,
    READ_ONLY,
    STORE_FAILS,
    TOO_MANY,
    UNKNOWN_SCHEDULE,
)
from musterd.supervisor.core.model import schedule_events
from musterd.supervisor.core.model.actions import Acknowledge, Report
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.policy import SCHEDULES_MAX, SchedulePolicy
from musterd.supervisor.core.model.schedule_events import AddedSchedule
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.core.tasks.refusals import NAMES_SHOWN_MAX
from musterd.supervisor.core.tasks.schedules import Schedules

ADDED = "added"  # Fact.kind
# All sections together; each is in memory twice, as it was given and as a policy.
SECTIONS_BYTES_MAX = 32 * 1024 * 1024


_arguments = msgspec.msgpack.Decoder(dict[str, Raw]).decode


class Unusable(Struct):
    """An added schedule that is not run."""

    problem: str
    hidden: bool = False  # a file has a schedule of its name
    record: bytes | None = None  # what is remembered of its runs, unless it is hidden


class AddedSchedules:
    def __init__(self, state: State, ledger: Ledger, schedules: Schedules) -> None:
        self._state = state
        self._ledger = ledger
        self._schedules = schedules
        self.sections: dict[str, bytes] = {}  # of all that were added, by name
        self.unusable: dict[str, Unusable] = {}
        self._bytes = 0

    # -- at the start, and with another policy --------------------------------------------------

    def recovered(self, event: schedule_events.AddedRecovered) -> None:
        """Take the schedules that the store has; called before what is remembered of them."""
        for each in event.added:
            self._keep(each)
        for policy in self._judge(event.added):
            self._schedules.apply(policy)

    def records_recovered(self, facts: list[tuple[str, bytes]]) -> None:
        """Take what is remembered of all schedules."""
        usable = []
        for name, value in facts:
            unusable = self.unusable.get(name)
            if unusable is not None and not unusable.hidden:
                unusable.record = value
            else:
                usable.append((name, value))
        self._schedules.recovered(usable)

    def follow(self, added: list[AddedSchedule]) -> None:
        """Apply another policy to all schedules: `added` is what it makes of those added."""
        before = self.unusable
        usable = self._judge(added)
        for name, each in self.unusable.items():
            if each.hidden:
                continue
            if name not in before:
                each.record = self._schedules.release(name)
            elif not before[name].hidden:
                each.record = before[name].record
        self._schedules.follow(usable)
        for name, former in before.items():
            if former.record is not None and name in self._schedules.by_name:
                self._schedules.restore(name, former.record)

    def _judge(self, added: list[AddedSchedule]) -> list[SchedulePolicy]:
        """Return those that may run; note and report the problems of the others."""
        files = self._files()
        before, self.unusable = self.unusable, {}
        usable = []
        for each in added:
            if each.name in files:
                why = (
                    f"{files[each.name] or 'the configuration'} has a schedule '{each.name}' too, "
                    f"which runs: take it out there, or this one with "
                    f"`musterctl schedule remove {each.name}`"
                )
                self.unusable[each.name] = Unusable(why, hidden=True)
            elif each.policy is None or each.problem:
                self.unusable[each.name] = Unusable(each.problem)
            else:
                usable.append(each.policy)
        known = {name: each.problem for name, each in before.items()}
        new = [name for name, each in self.unusable.items() if known.get(name) != each.problem]
        if new:  # thousands may have lost the same pool
            self._report("schedule.unusable", new, "warning", self.unusable[new[0]].problem)
        return usable

    # -- commands -------------------------------------------------------------------------------

    def put(self, event: schedule_events.SchedulePutRequested) -> None:
        files = self._files()
        # Of a file's schedule the file's name helps more than what is wrong with the keys.
        rejected = [
            _read_only(each.id, files[each.id]) if each.id in files else each
            for each in event.rejected
        ]
        taken: list[SchedulePolicy] = []
        new = []
        for each in event.added:
            refusal = self._refusal_of(each, files, replace=event.replace)
            if refusal is not None:
                rejected.append(refusal)
            if refusal is not None or event.dry_run:
                continue
            assert each.policy is not None and not each.problem, "the shell has refused it"
            former = self.unusable.pop(each.name, None)
            self._keep(each)
            self._ledger.remember(ADDED, each.name, each.section)
            taken.append(each.policy)
            if self._schedules.apply(each.policy):
                if former is not None and former.record is not None:
                    self._schedules.restore(each.name, former.record)
                else:
                    new.append(each.policy)
        for policy in taken:
            if policy.name in event.paused:
                self._schedules.hold(policy.name)
        for place, policy in enumerate(new):
            # Those that come together are spread over their interval: all at once would be too
            # much for their sites and for the workers, again and again.
            timing = policy.timing
            ago_ns = timing.every_ns * place // len(new) if isinstance(timing, Every) else 0
            self._schedules.begin(policy.name, ago_ns)
        self._answer(event.peer, event.request, rejected, done=bool(taken))
        if taken:
            self._report("schedule.put", [policy.name for policy in taken])

    def _files(self) -> dict[str, str]:
        """Return the names of the configuration's schedules, with their files."""
        return {each.name: each.origin for each in self._state.policy.schedules}

    def _refusal_of(
        self, each: AddedSchedule, files: dict[str, str], *, replace: bool
    ) -> Rejection | None:
        name = each.name
        refusal = self._not_now(name)
        if refusal is None:
            known = name in files
            refusal = _read_only(name, files[name]) if known else self._unknown_task(each)
        if refusal is not None:
            return refusal
        if name in self.sections and not replace:
            why = "is there already: edit it, replace it (import --replace), or give another name"
            return Rejection(name, IN_USE, f"schedule '{name}': {why}")
        count = len(self._schedules.by_name) + len(self.unusable)  # the hidden ones twice
        if name not in self.sections and count >= SCHEDULES_MAX:
            why = f"there are {count} schedules, and {SCHEDULES_MAX} at most: delete some"
            return Rejection(name, TOO_MANY, f"schedule '{name}': {why}")
        before = len(self.sections.get(name, b""))
        if self._bytes - before + len(each.section) > SECTIONS_BYTES_MAX:
            most = SECTIONS_BYTES_MAX // 1024 // 1024
            why = f"all schedules together would take over {most} MiB: shorten their arguments"
            return Rejection(name, TOO_MANY, f"schedule '{name}': {why}")
        return None

    def _unknown_task(self, each: AddedSchedule) -> Rejection | None:
        """Refuse a task that its pool does not have, or that does not take these arguments, as far
        as its code is loaded."""
        pool_name, _, method = each.policy.task.partition(".") if each.policy else ("", "", "")
        pool = self._state.pools.get(pool_name)
        if each.policy is None or pool is None or pool.declarations is None:
            return None
        declared = pool.declarations.get(method)
        if declared is None:
            known = ", ".join(sorted(pool.declarations)[:NAMES_SHOWN_MAX]) or "none"
            why = f"key 'task': pool '{pool_name}' has no task '{method}': it has {known}"
        elif problem := _misfit(declared.arguments, each.policy.args):
            why = f"key 'args': {each.policy.task} {problem}"
        else:
            return None
        return Rejection(each.name, INVALID_SCHEDULE, f"schedule '{each.name}': {why}")

    def _not_now(self, name: str) -> Rejection | None:
        if not self._state.intake_open:
            why = "the daemon is shutting down: ask again when it is back"
            return Rejection(name, SHUTTING_DOWN, f"schedule '{name}': {why}")
        if self._state.store_problem:
            why = f"nothing can be stored ({self._state.store_problem}): try again later"
            return Rejection(name, STORE_FAILS, f"schedule '{name}': {why}")
        return None

    def delete(self, event: schedule_events.ScheduleDeleteRequested) -> None:
        rejected, deleted, files = [], [], self._files()
        for name in dict.fromkeys(event.names):
            refusal = self._not_now(name)
            if refusal is None and name not in self.sections:
                refusal = Rejection(name, UNKNOWN_SCHEDULE, f"there is no schedule '{name}'")
                if name in files:
                    refusal = _read_only(name, files[name])
            if refusal is not None:
                rejected.append(refusal)
                continue
            self._forget(name)
            deleted.append(name)
        self._answer(event.peer, event.request, rejected, done=bool(deleted))
        if deleted:
            self._report("schedule.deleted", deleted)

    def _forget(self, name: str) -> None:
        self._bytes -= len(self.sections.pop(name))
        self._ledger.remember(ADDED, name, None)
        unusable = self.unusable.pop(name, None)
        if unusable is None:
            self._schedules.remove(name)
        elif not unusable.hidden:
            self._schedules.forget(name, unusable.record or b"")

    def _keep(self, each: AddedSchedule) -> None:
        self._bytes += len(each.section) - len(self.sections.get(each.name, b""))
        self.sections[each.name] = each.section

    def _answer(self, peer: bytes, request: int, rejected: list[Rejection], *, done: bool) -> None:
        answer = Acknowledge(peer, request, rejected)
        if done:
            self._ledger.tell(answer)
        else:  # a refusal need not wait for the disk, which may be full
            self._state.out.append(answer)

    def _report(self, event: str, names: list[str], level: str = "info", reason: str = "") -> None:
        """Report what happened to schedules, by the first of them and their number."""
        self._state.out.append(
            Report(event, level, reason=reason, schedule=names[0], count=len(names))
        )

    def validate(self) -> None:
        """Check that each added schedule either runs or has a problem."""
        assert self._bytes == sum(map(len, self.sections.values()))
        names = self._schedules.by_name
        for name in self.sections:
            unusable = self.unusable.get(name)
            assert (name in names) == (unusable is None or unusable.hidden), name
        assert self.unusable.keys() <= self.sections.keys()
        self._schedules.validate()


def _misfit(takes: Arguments | None, args: bytes) -> str:
    """Return which argument a task does not take, or lacks; "" for none."""
    if takes is None:
        return ""
    given = _arguments(args)
    known = ", ".join(sorted(takes.names)[:NAMES_SHOWN_MAX]) or "none"
    for name in given:
        if name not in takes.names and not takes.open:
            return f"takes no argument '{name}': it takes {known}"
    for name in takes.required:
        if name not in given:
            return f"needs the argument '{name}': give it a value"
    return ""


def _read_only(name: str, file: str) -> Rejection:
    where = file or "the configuration"
    why = f"schedule '{name}' is in {where}, and is changed only there: edit it, then reload"
    return Rejection(name, READ_ONLY, why)
