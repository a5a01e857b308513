"""Check pauses: a paused pool or slot gets no leases, a drained pool no new tasks.

The watch believes only the commands it saw, and what was on disk at the supervisor's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.model.actions import Acknowledge, AssignLeases, Persist
from musterd.supervisor.core.model.events import DrainRequested, PauseRequested, ResumeRequested
from musterd.supervisor.core.tasks.pauses import DRAINED, FACT, PAUSED

if TYPE_CHECKING:
    from simulation.world import World


class PauseWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.held: dict[str, str] = {}  # POOL or POOL/N
        self._drained_once: dict[str, None] = {}  # in this life: a refusal may wait for the disk

    def new_life(self) -> None:
        self.held = {name: value.decode() for name, value in self._world.store.facts(FACT)}
        self._drained_once = {name: None for name, how in self.held.items() if how == DRAINED}

    def before(self, event: Any) -> None:
        pools = self._world.fleet.pools
        if not isinstance(event, PauseRequested | DrainRequested | ResumeRequested):
            return
        for pool, index in event.names:
            slots = [slot.index for slot in pools[pool].slots] if pool in pools else []
            if pool not in pools or (index >= 0 and index not in slots):
                continue
            name = pool if index < 0 else f"{pool}/{index}"
            if isinstance(event, PauseRequested):
                self.held.setdefault(name, PAUSED)
            elif isinstance(event, DrainRequested):
                self.held[name] = DRAINED
                self._drained_once[name] = None
            else:
                self.held.pop(name, None)
                for slot in slots if index < 0 else ():
                    self.held.pop(f"{pool}/{slot}", None)

    def handled(self, event: Any, actions: list[Any]) -> None:
        self._forget_removed()
        for action in actions:
            if type(action) is AssignLeases:
                slot = self._world.fleet._state.workers[action.worker]
                for name in (slot.pool.name, slot.name):
                    assert name not in self.held, f"{name} is {self.held[name]} and gets leases"
            elif type(action) is Persist:
                self._check_added(action)
            elif type(action) is Acknowledge:
                self._check_refusals(action)

    def halted(self, pool: str, slot: str) -> bool:
        return pool in self.held or slot in self.held

    def _forget_removed(self) -> None:
        """Forget slots that were scaled away: one that comes back is new."""
        pools = self._world.fleet.pools
        there = {slot.name for pool in pools.values() for slot in pool.slots} | set(pools)
        self.held = {name: how for name, how in self.held.items() if name in there}

    def _check_added(self, page: Persist) -> None:
        at_once = {final.spec.id for final in page.finished}  # by the result of another task
        for new in page.news():
            drained = self.held.get(new.pool) == DRAINED
            assert not drained or new.spec.id in at_once, f"{new.spec.id} came into a drained pool"

    def _check_refusals(self, action: Acknowledge) -> None:
        for each in action.rejected:
            if "is drained" in each.message:
                pool = each.message.split("'")[1].partition(".")[0]
                assert pool in self._drained_once, each
