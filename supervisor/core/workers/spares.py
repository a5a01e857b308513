"""Which pools keep a spare: a process made ahead, so that the next restart need not wait for it.

A pool that has a worker, or waits to start one, keeps one. None is kept while memory is short: a
spare is worth ten milliseconds of a restart, and takes 3 to 4 MB.
"""

from musterd.supervisor.core.model.pool import ForkServerState
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.workers.pressure import Stage

_STAFFED = frozenset((SlotState.STARTING, SlotState.RUNNING, SlotState.BACKOFF))


def spares_kept(state: State, stage: Stage) -> frozenset[tuple[str, str]]:
    """Their names, each with the build it is made of."""
    if not state.intake_open or stage != Stage.NORMAL:
        return frozenset()
    return frozenset(
        (pool.name, pool.build)
        for pool in state.pools.values()
        if pool.policy.spare
        and pool.is_open
        and pool.fork_server == ForkServerState.UP
        and any(slot.state in _STAFFED for slot in pool.slots)
    )
