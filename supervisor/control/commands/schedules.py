"""What people ask about schedules on control.sock."""

from collections.abc import Callable
from typing import Any, Protocol

from musterd.ipc.wire.messages import QUEUED, Rejection
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import FAILED, NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import ScheduleList, ScheduleStatus
from musterd.supervisor.control.connection import Pending
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.core.tasks.schedules import Schedule
from musterd.supervisor.text.units import format_duration
from musterd.supervisor.views import fleet as fleet_view

PEER_PREFIX = b"control:schedule:"  # of those who wait for an answer of the core
NAMES_SHOWN_MAX = 20


class Office(Protocol):
    """What these commands need of the daemon."""

    fleet: Fleet

    def feed(self, event: object) -> None: ...
    def now_ns(self) -> int: ...


class ScheduleCommands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._waiting: dict[bytes, tuple[Pending, str]] = {}
        self._peers = 0

    def methods(self) -> dict[type, Callable[[Any], object]]:
        return {
            rpc.ListSchedules: self._list,
            rpc.RunSchedule: self._run,
            rpc.PauseSchedule: lambda params: self._pause(params.name, True),
            rpc.ResumeSchedule: lambda params: self._pause(params.name, False),
        }

    def _list(self, _params: rpc.ListSchedules) -> object:
        return ScheduleList(schedules=[self._status(each) for each in self._all().values()])

    def _run(self, params: rpc.RunSchedule) -> object:
        return self._ask(params.name, lambda peer: events.ScheduleRunRequested(params.name, peer))

    def _pause(self, name: str, paused: bool) -> object:
        return self._ask(name, lambda peer: events.SchedulePauseRequested(name, paused, peer))

    def _all(self) -> dict[str, Schedule]:
        return self._office.fleet.schedules

    def _ask(self, name: str, make: Callable[[bytes], object]) -> Pending:
        if name not in self._all():
            known = ", ".join(list(self._all())[:NAMES_SHOWN_MAX]) or "none"
            raise RpcError(NO_SUCH_NAME, f"no such schedule: {name!r}: there are {known}")
        self._peers += 1
        peer = PEER_PREFIX + str(self._peers).encode()
        pending = Pending(on_abandoned=lambda: self._waiting.pop(peer, None))
        self._waiting[peer] = (pending, name)
        self._office.feed(make(peer))
        return pending

    def acknowledged(self, peer: bytes, rejected: list[Rejection]) -> None:
        """The core's answer, which is on disk."""
        pending, name = self._waiting.pop(peer, (None, ""))
        if pending is None:
            return
        if rejected:
            pending.fail(convert.rejected(rejected[0]))
        else:
            pending.resolve(self._status(self._all()[name]))

    def ending(self) -> None:
        for pending, _ in self._waiting.values():
            pending.fail(RpcError(FAILED, "the daemon is shutting down"))
        self._waiting = {}

    def _status(self, schedule: Schedule) -> ScheduleStatus:
        policy, memory = schedule.policy, schedule.memory
        state = "active"
        if not policy.enabled:
            state = "disabled"
        elif memory.paused:
            state = "paused"
        last_state = memory.state
        task = self._office.fleet.tasks.get(memory.task)
        if task is not None:
            last_state = fleet_view.live_view(task, self._office.now_ns()).state
        elif memory.task and schedule.alive == memory.task:
            last_state = QUEUED
        return ScheduleStatus(
            name=policy.name,
            state=state,
            task=policy.task,
            when=_when(schedule),
            next_at=(schedule.next_ns or 0) / 1e9 if schedule.active else 0.0,
            last_at=memory.ran_ns / 1e9,
            last_task=memory.task,
            last_state=last_state,
            runs=memory.runs,
            skipped=memory.skipped,
        )


def _when(schedule: Schedule) -> str:
    timing = schedule.policy.timing
    if isinstance(timing, Every):
        return f"every {format_duration(timing.every_ns)}"
    return f"{timing.expression} ({timing.zone})"
