"""Spares: which pools keep a process made ahead, so that the next restart is quicker.

A pool that has a worker, or waits to start one, keeps one spare. No spare is kept while memory is
short: it saves ten milliseconds of a restart, and takes 3 to 4 MB.
"""

from musterd.supervisor.core.model.pool import ForkServerState
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.workers.pressure import Stage

_IN_USE = frozenset((SlotState.STARTING, SlotState.RUNNING, SlotState.BACKOFF))


def spares_kept(state: State, stage: Stage) -> frozenset[tuple[str, str]]:
    """Return the pools that keep a spare, each with the spare's build."""
    if not state.intake_open or stage != Stage.NORMAL:
        return frozenset()
    return frozenset(
        (pool.name, pool.build)
        for pool in state.pools.values()
        if pool.policy.spare
        and pool.is_open
        and pool.fork_server == ForkServerState.UP
        and any(slot.state in _IN_USE for slot in pool.slots)
    )
