"""Check that an acknowledged cancel holds: the task never runs again, whatever dies meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.model.actions import Acknowledge, AssignLeases
from musterd.supervisor.core.model.events import CancelRequested

if TYPE_CHECKING:
    from simulation.world import World


class CancelWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: dict[int | bytes, list[str]] = {}  # tasks that existed, by request
        self._answered: dict[str, None] = {}

    def new_life(self) -> None:
        self._asked.clear()

    def begins_anew(self, id_: str) -> None:
        """Forget the cancel of a task that was refused and may return, or that a person retries."""
        self._answered.pop(id_, None)
        for ids in self._asked.values():
            if id_ in ids:
                ids.remove(id_)

    def before(self, event: Any) -> None:
        if isinstance(event, CancelRequested):
            tasks = self._world.fleet.tasks
            self._asked[event.request or event.peer] = [id_ for id_ in event.ids if id_ in tasks]

    def handled(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Acknowledge):
                ids = self._asked.pop(action.request or action.peer, [])
                self._answered.update(dict.fromkeys(ids))
                for rejection in action.rejected:
                    self.begins_anew(rejection.id)
            elif isinstance(action, AssignLeases):
                for lease in action.leases:
                    assert lease.id not in self._answered, f"{lease.id} runs after its cancel"
