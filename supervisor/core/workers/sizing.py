"""Sizing: how many slots of a pool run, and which give way when memory is tight.

`Pool.size` is what was asked for (configuration, `scale`, autoscale.py), `Pool.limit` what memory
allows, and `Pool.target` the smaller of the two. Slots beyond the size are removed: idle slots
first, of these the highest index, as people expect. A new slot gets the lowest free index. A slot
beyond the limit, or one whose worker would not fit, stays and is *held*: stopped now, started again
when memory allows it. Slots that a person stopped and FATAL slots do not count against the limit.
"""

from itertools import count

from musterd.ipc.resilience.policy import POOL_SIZE_MAX
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.workers.forkservers import SlotActions

HELD_BACK = "held back by memory"


class Sizing:
    def __init__(self, state: State, slots: SlotActions) -> None:
        self._state = state
        self._slots = slots

    def fit(self, pool: Pool) -> None:
        """Start and stop slots until the pool has its target size."""
        if not self._state.intake_open:
            return
        self._fit_size(pool)
        for slot in victims(pool, -slots_left(pool)):
            self.hold(slot)
        for slot in returning(pool):
            if not self._state.memory.admits(pool, growing=True):
                self._tell_shortage(pool)
                break
            self._release(slot)

    def readmit(self) -> None:
        """Start held slots that fit by now; the pool with the smallest part of its size first."""
        waiting: list[tuple[float, Slot]] = []
        for pool in self._state.pools.values():
            for number, slot in enumerate(returning(pool), len(active(pool))):
                waiting.append((number / pool.size, slot))
        waiting.sort(key=lambda each: each[0])
        for _, slot in waiting:
            if self._state.memory.admits(slot.pool, growing=True):
                self._release(slot)
        for pool in self._state.pools.values():
            if pool.short and not any(slot.held for slot in pool.slots):
                pool.short = False

    def _fit_size(self, pool: Pool) -> None:
        """Add missing slots, held at first, and remove slots beyond the size."""
        missing = pool.size - sum(not slot.removed for slot in pool.slots)
        # Leaving slots come back first, so that there are never more processes than asked for.
        back = [slot for slot in pool.slots if slot.removed][: max(0, missing)]
        taken = {slot.index for slot in pool.slots}
        free = (index for index in count() if index not in taken)
        new = [Slot(pool, next(free)) for _ in range(missing - len(back))]
        for slot in (*back, *new):
            slot.removed = False
            slot.held = True
            slot.reason = HELD_BACK
        pool.slots += new
        pool.slots.sort(key=lambda each: each.index)
        for slot in leaving(pool, -missing):
            slot.removed = True
            slot.held = False
            slot.restart_after_stop = False
            if slot.state == SlotState.STOPPED:
                pool.slots.remove(slot)
            else:
                self._slots.stop(slot, within_ns=self._state.policy.drain_timeout_ns)

    def begin(self, slot: Slot) -> None:
        """Start a slot that is stopped or stopping, or hold it back when memory is tight."""
        if _active(slot):
            return  # it stops and will be started again
        if slots_left(slot.pool) > 0:
            self._release(slot)
        else:
            self.hold(slot)

    def hold(self, slot: Slot) -> None:
        """Stop a slot until memory allows it."""
        slot.held = True
        slot.restart_after_stop = False
        self._slots.stop(slot, within_ns=self._state.policy.drain_timeout_ns)
        if slot.state == SlotState.STOPPED:
            slot.reason = HELD_BACK

    def refuse(self, slot: Slot) -> None:
        """Hold a slot that was about to start: its worker does not fit."""
        slot.become(SlotState.STOPPED)
        slot.held = True
        slot.reason = HELD_BACK
        self._tell_shortage(slot.pool)

    def _tell_shortage(self, pool: Pool) -> None:
        if not pool.short:
            pool.short = True
            reason = self._state.memory.shortage(pool)
            self._state.report("memory.held", "warning", pool=pool, reason=reason)

    def _release(self, slot: Slot) -> None:
        slot.held = False
        slot.reason = ""
        if slot.state == SlotState.DRAINING:
            slot.restart_after_stop = True
        else:
            self._slots.start_slot(slot)


def active(pool: Pool) -> list[Slot]:
    """Return the slots that run, or will run again without a command."""
    return [slot for slot in pool.slots if _active(slot)]


def _active(slot: Slot) -> bool:
    if slot.removed or slot.held or slot.state in (SlotState.STOPPED, SlotState.FATAL):
        return False
    return slot.state != SlotState.DRAINING or slot.restart_after_stop


def slots_left(pool: Pool) -> int:
    """Return how many more slots the limit allows to run; negative when too many do."""
    return POOL_SIZE_MAX if pool.limit is None else pool.limit - len(active(pool))


def claimed(pool: Pool) -> int:
    """Return how many workers the pool takes from the others: its size or its minimum, and
    workers that are still leaving or about to come."""
    first = max(1, pool.scaler.policy.min) if pool.scaler is not None else 0
    leaving = sum(slot.removed and slot.alive for slot in pool.slots)  # they come back first
    return max(pool.size + leaving, first) + sum(slot.alive for slot in pool.beside)


def expected(pool: Pool) -> int:
    """Return how many workers should be there now: the size, less the held slots."""
    return min(pool.target, pool.size - sum(slot.held for slot in pool.slots))


def victims(pool: Pool, count: int) -> list[Slot]:
    """Choose slots that give way: without a worker first, then idle (the largest first), then
    those with the least urgent work (the youngest first)."""
    return sorted(active(pool), key=lambda slot: _loss(slot, slot.pss_bytes))[: max(0, count)]


def leaving(pool: Pool, count: int) -> list[Slot]:
    """Choose slots to remove when `count` are too many."""
    staying = [slot for slot in pool.slots if not slot.removed]
    chosen = sorted(staying, key=_loss)[: max(0, count)]
    return sorted(chosen, key=lambda slot: slot.index)


def _loss(slot: Slot, gain: int = 0) -> tuple[int, ...]:
    """Return what would be lost with this slot, for sorting; `gain` decides among idle ones."""
    if not slot.worker:
        return (0, -slot.index)
    if slot.state != SlotState.RUNNING:
        return (1, -slot.index)
    if not slot.leases:
        return (2, -gain, -slot.index)
    # Levels count from CRITICAL = 0. The most urgent task may be the second.
    urgent = min(task.spec.priority for task in slot.leases.values())
    began_ns = next(iter(slot.leases.values())).leased_ns
    return (3, -urgent, -began_ns, -slot.index)


def returning(pool: Pool) -> list[Slot]:
    """Return the held slots that the limit allows to run, those that can start at once first."""
    held = [slot for slot in pool.slots if slot.held and not slot.removed]
    if not held:
        return []
    held.sort(key=lambda slot: (slot.state == SlotState.DRAINING, slot.index))
    return held[: max(0, slots_left(pool))]
