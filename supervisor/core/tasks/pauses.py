"""Pauses: a person stops work from being given out (pause, drain, resume).

    paused   no task is taken from the queue; new tasks are accepted and wait
    drained  as paused, and new tasks are refused until the pool is resumed

Both hold for a pool or for one slot; a slot has no queue, so there both mean the same. Running
tasks may end. Workers live, crash, are replaced and scaled as ever; a new worker finds the pause in
force. A pool's pause is on disk: a pool that was paused because of a problem must not go on because
the daemon was restarted. A slot's pause ends with the slot or the daemon.
"""

from collections.abc import Iterator

from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.leases import Leases

FACT = "halt"  # Fact.kind; the key is the pool
PAUSED, DRAINED = "paused", "drained"
WHOLE_POOL = -1


class Pauses:
    def __init__(self, state: State, ledger: Ledger, leases: Leases) -> None:
        self._state = state
        self._ledger = ledger
        self._leases = leases

    def pause(self, event: events.PauseRequested) -> None:
        for held in self._named(event.names):
            if not held.halt:  # a drained pool is paused already
                self._set(held, PAUSED)

    def drain(self, event: events.DrainRequested) -> None:
        for held in self._named(event.names):
            self._set(held, DRAINED)

    def resume(self, event: events.ResumeRequested) -> None:
        for held in self._named(event.names):
            for slot in held.slots if isinstance(held, Pool) else ():
                self._set(slot, "")  # resuming a pool resumes its slots
            self._set(held, "")

    def recovered(self, event: events.FactsRecovered) -> None:
        for name, value in event.facts:
            pool = self._state.pools.get(name)
            if pool is None:
                self._ledger.remember(FACT, name, None)  # no longer in the configuration
            else:
                pool.halt = PAUSED if value == PAUSED.encode() else DRAINED
                self._report(pool, "warning", "since before the daemon was started")

    def _named(self, names: tuple[tuple[str, int], ...]) -> Iterator[Pool | Slot]:
        for pool_name, index in names:
            pool = self._state.pools.get(pool_name)
            if pool is not None and index == WHOLE_POOL:
                yield pool
            elif pool is not None:
                yield from [slot for slot in pool.slots if slot.index == index]

    def _set(self, held: Pool | Slot, halt: str) -> None:
        if held.halt == halt:
            return
        held.halt = halt
        if isinstance(held, Pool):
            self._ledger.remember(FACT, held.name, halt.encode() or None)
        elif held.state == SlotState.RUNNING:
            self._leases.feed(held)
        self._report(held, "info", "")

    def _report(self, held: Pool | Slot, level: str, reason: str) -> None:
        what = held.halt or "resumed"
        if isinstance(held, Slot):
            self._state.report(f"worker.{what}", level, slot=held, reason=reason)
        else:
            self._state.report(f"pool.{what}", level, pool=held, reason=reason)
