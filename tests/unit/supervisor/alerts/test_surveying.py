"""A survey asks for everything, however many portions it comes in."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from musterd.supervisor.alerts.kinds import Finding, Survey
from musterd.supervisor.alerts.surveying import Surveyor
from musterd.supervisor.api import rpc
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import (
    BreakerList,
    FleetStatus,
    ScheduleList,
    ScheduleStatus,
    SessionList,
)

PORTION = 2
STATUS = FleetStatus(version="1", pid=7, uptime_seconds=1.0, state="running", pools=[])


class Daemon:
    """Answers requests at once, with schedules in small portions."""

    gone = False

    def __init__(self, **schedules: list[str]) -> None:
        self.schedules = schedules

    def ask(self, asked: rpc.Params, then: Callable[[Raw], None]) -> None:
        then(Raw(msgspec.json.encode(self.answer(asked))))

    def answer(self, asked: rpc.Params) -> Any:
        match asked:
            case rpc.ListSchedules():
                names = [name for name in self.schedules[asked.state] if name > asked.after]
                rows = [
                    ScheduleStatus(name=name, state="active", task="p.t", when="every 1m")
                    for name in names[:PORTION]
                ]
                return ScheduleList(schedules=rows, more=len(names) > PORTION)
            case rpc.ShowMemory():
                return MemoryStatus(enabled=False, level="normal", stage="normal")
            case rpc.ListBreakers():
                return BreakerList(breakers=[])
            case rpc.ListSessions():
                return SessionList(sessions=[])
        return STATUS


def test_schedules_of_all_portions_are_known() -> None:
    made: list[Survey] = []
    stale = [f"s{number}" for number in range(5)]
    surveyor = Surveyor(lambda survey, _pid, _started: made.append(survey))
    surveyor.ask(Daemon(paused=["p"], stale=stale))  # type: ignore[arg-type]
    [survey] = made
    assert (survey.paused, survey.stale) == ({"p"}, set(stale))
    assert survey.finding("watch.stale", "s4") == Finding.HOLDS
    surveyor.ask(Daemon(paused=[], stale=[]))  # type: ignore[arg-type]
    assert made[1].finding("watch.stale", "s4") == Finding.OVER
