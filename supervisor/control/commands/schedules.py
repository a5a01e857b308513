"""Commands about schedules on control.sock: list, run, pause, resume."""

from collections.abc import Callable

from musterd.ipc.wire.messages import QUEUED, Rejection
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import ScheduleList, ScheduleStatus
from musterd.supervisor.control.answers import LaterAnswers, Methods, Pending
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.core.tasks.schedules import Schedule
from musterd.supervisor.shell import Shell
from musterd.supervisor.text.units import format_duration
from musterd.supervisor.views import fleet as fleet_view

NAMES_SHOWN_MAX = 20  # in the message that a schedule is not known


class ScheduleCommands:
    def __init__(self, shell: Shell, answers: LaterAnswers) -> None:
        self._shell = shell
        self._answers = answers

    def methods(self) -> Methods:
        return {
            rpc.ListSchedules: self._list,
            rpc.RunSchedule: self._run,
            rpc.PauseSchedule: lambda params: self._pause(params.name, True),
            rpc.ResumeSchedule: lambda params: self._pause(params.name, False),
        }

    def _list(self, _params: rpc.ListSchedules) -> ScheduleList:
        return ScheduleList(schedules=[self._status(each) for each in self._all().values()])

    def _run(self, params: rpc.RunSchedule) -> Pending:
        return self._ask(params.name, lambda token: events.ScheduleRunRequested(params.name, token))

    def _pause(self, name: str, paused: bool) -> Pending:
        return self._ask(name, lambda token: events.SchedulePauseRequested(name, paused, token))

    def _all(self) -> dict[str, Schedule]:
        return self._shell.fleet.schedules

    def _ask(self, name: str, make: Callable[[bytes], object]) -> Pending:
        if name not in self._all():
            raise self._no_such(name)

        def acknowledged(rejected: list[Rejection]) -> None:
            if rejected:
                pending.fail(convert.rejected(rejected[0]))
            elif name in self._all():
                pending.resolve(self._status(self._all()[name]))
            else:  # a reload has removed it meanwhile
                pending.fail(self._no_such(name))

        token, pending = self._answers.begin(acknowledged)
        self._shell.feed(make(token))
        return pending

    def _no_such(self, name: str) -> RpcError:
        known = ", ".join(list(self._all())[:NAMES_SHOWN_MAX]) or "none"
        return RpcError(NO_SUCH_NAME, f"no such schedule: {name!r}: there are {known}")

    def _status(self, schedule: Schedule) -> ScheduleStatus:
        policy, record = schedule.policy, schedule.record
        state = "active"
        if not policy.enabled:
            state = "disabled"
        elif record.paused:
            state = "paused"
        last_state = record.state
        task = self._shell.fleet.tasks.get(record.task)
        if task is not None:
            last_state = fleet_view.live_view(task, self._shell.now_ns()).state
        elif record.task and schedule.alive == record.task:
            last_state = QUEUED
        return ScheduleStatus(
            name=policy.name,
            state=state,
            task=policy.task,
            when=_when(schedule),
            next_at=(schedule.next_ns or 0) / 1e9 if schedule.active else 0.0,
            last_at=record.ran_ns / 1e9,
            last_task=record.task,
            last_state=last_state,
            runs=record.runs,
            skipped=record.skipped,
        )


def _when(schedule: Schedule) -> str:
    timing = schedule.policy.timing
    if isinstance(timing, Every):
        return f"every {format_duration(timing.every_ns)}"
    return f"{timing.expression} ({timing.zone})"
