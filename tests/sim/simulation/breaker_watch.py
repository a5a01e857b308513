"""Check the breakers that an operator commands.

A breaker that an operator opened lets no task begin; a breaker that an operator disabled stops no
task. Both stay so until an operator changes them, across every restart once they are on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import msgpack

from musterd.ipc.wire.messages import SHUT
from musterd.supervisor.core.model.actions import AssignLeases, Persist, Report
from musterd.supervisor.core.model.events import BreakerCommanded, FactsRecovered, TasksRecovered
from musterd.supervisor.core.model.held import HELD_TYPE
from musterd.supervisor.core.model.task import TaskState
from musterd.supervisor.core.tasks.gatekeeper import KIND, WAIT, SavedBreaker

if TYPE_CHECKING:
    from simulation.world import World

STATES = {
    "open": "forced-open",
    "disable": "disabled",
    "close": "closed",
    "reset": "closed",  # every policy of ours has its breakers enabled
}
HELD = ("forced-open", "disabled")


class BreakerWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.held: dict[str, str] = {}  # the states that an operator chose, by target
        self.commands = 0
        self.ended = 0  # tasks that ended because an operator holds their site open

    def new_life(self) -> None:
        self.held = {}

    def handled(self, event: Any, actions: list[Any]) -> None:
        if isinstance(event, FactsRecovered) and event.kind == KIND:
            saved = {key: msgpack.decode(value, type=SavedBreaker) for key, value in event.facts}
            self.held = {key: each.state for key, each in saved.items() if each.state in HELD}
        elif isinstance(event, BreakerCommanded):
            self._commanded(event)
        elif self.held:
            reports = [each for each in actions if type(each) is Report and each.target]
            moved = [each for each in reports if each.event.startswith("breaker.")]
            for report in moved:
                assert report.target not in self.held, f"{report} though a person holds it"
        if self.held:
            self._check(actions)
            # Nothing may end before all stored tasks are read.
            if not (isinstance(event, TasksRecovered) and event.more):
                self._check_queued()

    def _commanded(self, event: BreakerCommanded) -> None:
        self.commands += 1
        state = STATES[event.command]
        if state in HELD:
            self.held[event.target] = state
        else:
            self.held.pop(event.target, None)
            found = str(self._world.fleet.sites[event.target].breaker.state)
            assert found == state, f"{event} leaves the breaker {found}"

    def _check(self, actions: list[Any]) -> None:
        fleet = self._world.fleet
        for target, state in self.held.items():
            found = str(fleet.sites[target].breaker.state)
            assert found == state, f"{target} is {found}, and a person made it {state}"
        for action in actions:
            if type(action) is AssignLeases:
                for lease in action.leases:
                    held = self.held.get(fleet.tasks[lease.id].spec.target)
                    assert held != "forced-open", f"{lease.id} begins at a site held open"
            elif type(action) is Persist:
                for final in action.finished:
                    self._check_end(final)

    def _check_queued(self) -> None:
        for task in self._world.fleet.tasks.values():
            if task.state == TaskState.QUEUED and self.held.get(task.spec.target) == "forced-open":
                assert task.on_open == WAIT, f"{task.spec.id} does not want to wait, and does"

    def _check_end(self, final: Any) -> None:
        failure, held = final.outcome.failure, self.held.get(final.spec.target)
        if final.outcome.cached:  # it shares the outcome of a task with the same key, of any site
            return
        if failure is not None and failure.kind == SHUT and failure.type != HELD_TYPE:
            assert held != "disabled", f"{final.spec.id} was kept from a site held disabled"
            self.ended += held == "forced-open"
