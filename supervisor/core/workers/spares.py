"""Spares: which pools keep a process made ahead, so that the next restart is quicker.

A pool that has a worker, or waits to start one, keeps one. None is kept while memory is short: a
spare is worth ten milliseconds of a restart, and takes 3 to 4 MB.

The set is looked at when a process has come or gone and once a second, with the clock: a spare is
never urgent, and other events need not pay for the look.
"""

from musterd.supervisor.core.model.actions import KeepSpares
from musterd.supervisor.core.model.pool import ForkServerState
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.workers.pressure import Governor, Stage

_IN_USE = frozenset((SlotState.STARTING, SlotState.RUNNING, SlotState.BACKOFF))


class Spares:
    def __init__(self, state: State, governor: Governor) -> None:
        self._state = state
        self._governor = governor
        self._kept: tuple[tuple[str, str], ...] = ()

    def look(self, _event: object) -> None:
        """Have spares kept by other pools than before, if it has come to that."""
        kept = self._wanted()
        if kept != self._kept:
            self._kept = kept
            self._state.out.append(KeepSpares(kept))

    def _wanted(self) -> tuple[tuple[str, str], ...]:
        """Return the pools that keep a spare, each with the build it is made of."""
        if not self._state.intake_open or self._governor.stage != Stage.NORMAL:
            return ()
        return tuple(
            (pool.name, pool.build)
            for pool in self._state.pools.values()
            if pool.policy.spare
            and pool.is_open
            and pool.fork_server == ForkServerState.UP
            and any(slot.state in _IN_USE for slot in pool.slots)
        )
