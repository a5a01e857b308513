"""Ask the daemon for the state of everything that an alert can be about."""

import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Raw

from musterd.supervisor.alerts.kinds import Survey
from musterd.supervisor.alerts.link import Asking
from musterd.supervisor.api import rpc
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import (
    BreakerList,
    FleetStatus,
    PoolStatus,
    ScheduleList,
    SessionList,
    WorkerStatus,
)

LISTED: tuple[Literal["paused", "stale"], ...] = ("paused", "stale")  # states of schedules

Then = Callable[[Survey, int, float], None]  # the daemon's pid and start time


class Surveyor:
    def __init__(self, then: Then) -> None:
        self._then = then
        self._number = 0
        self._memory = MemoryStatus(enabled=False, level="normal", stage="normal")
        self._breakers = BreakerList(breakers=[])
        self._schedules: dict[str, set[str]] = {}
        self._held = SessionList(sessions=[])

    def ask(self, asking: Asking) -> None:
        """Send requests; answers come in the same order, so the last one completes the survey.

        Schedules come in portions, of which all are asked for: one that is not listed is well.
        """
        self._number += 1
        number = self._number
        self._schedules = {state: set() for state in LISTED}

        def memory(result: Raw) -> None:
            self._memory = msgspec.json.decode(result, type=MemoryStatus)

        def breakers(result: Raw) -> None:
            self._breakers = msgspec.json.decode(result, type=BreakerList)

        def list_next(place: int, after: str = "") -> None:
            def listed(result: Raw) -> None:
                if number != self._number or asking.gone:
                    return
                answer = msgspec.json.decode(result, type=ScheduleList)
                names = [each.name for each in answer.schedules]
                self._schedules[LISTED[place]].update(names)
                if answer.more and names:
                    list_next(place, names[-1])
                else:
                    list_next(place + 1)

            if place < len(LISTED):
                asking.ask(rpc.ListSchedules(after=after, state=LISTED[place]), listed)
            else:
                asking.ask(rpc.Status(), status)

        def held(result: Raw) -> None:
            self._held = msgspec.json.decode(result, type=SessionList)

        def status(result: Raw) -> None:
            if number == self._number:
                self._made(msgspec.json.decode(result, type=FleetStatus))

        asking.ask(rpc.ShowMemory(), memory)
        asking.ask(rpc.ListBreakers(), breakers)
        asking.ask(rpc.ListSessions(held=True), held)
        list_next(0)

    def _made(self, fleet: FleetStatus) -> None:
        workers = [worker for pool in fleet.pools for worker in pool.workers]
        both: list[PoolStatus | WorkerStatus] = [*fleet.pools, *workers]
        survey = Survey(
            pools={pool.name: pool.state for pool in fleet.pools},
            workers={worker.name: worker.state for worker in workers},
            pauses={each.name: each.halt for each in both if each.halt},
            reasons={each.name: each.reason for each in both if each.reason},
            breakers={each.target: each.state for each in self._breakers.breakers},
            paused=frozenset(self._schedules["paused"]),
            stale=frozenset(self._schedules["stale"]),
            held=frozenset(each.name for each in self._held.sessions),
            stage=self._memory.stage,
            problem=fleet.problem,
            web=fleet.web.state if fleet.web is not None else "",
            cluster=fleet.cluster,
        )
        self._then(survey, fleet.pid, time.time() - fleet.uptime_seconds)
