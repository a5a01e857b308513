"""How many slots of a pool may run, and which of them give way when memory is tight.

`Pool.size` is what was asked for (configuration, `scale`, autoscale.py), `Pool.limit` what memory
allows, and `Pool.target` the smaller of the two. What the size has no place for is removed: idle
slots first, of these the highest index, as people expect; a new slot gets the lowest free index. A
slot beyond the limit stays where it is and is *held*: stopped now, started again when there is
room. Whatever a person stopped, and what is FATAL, takes nobody's place.
"""

from musterd.supervisor.core.policy import POOL_SIZE_MAX
from musterd.supervisor.core.pool import Pool
from musterd.supervisor.core.slot import Slot, SlotState


def active(pool: Pool) -> list[Slot]:
    """The slots that run or will run again without anybody's word."""
    return [slot for slot in pool.slots if _active(slot)]


def _active(slot: Slot) -> bool:
    if slot.removed or slot.held or slot.state in (SlotState.STOPPED, SlotState.FATAL):
        return False
    return slot.state != SlotState.DRAINING or slot.restart_after_stop


def room(pool: Pool) -> int:
    """How many more slots of this pool memory allows to run; negative when too many do."""
    return POOL_SIZE_MAX if pool.limit is None else pool.limit - len(active(pool))


def claimed(pool: Pool) -> int:
    """How many workers others cannot have: its size, or what it may always have, and those that
    are still leaving or about to come."""
    first = max(1, pool.scaler.policy.min) if pool.scaler is not None else 0
    leaving = sum(slot.removed and slot.alive for slot in pool.everyone)
    return max(pool.size + leaving, first)


def victims(pool: Pool, count: int) -> list[Slot]:
    """Who gives way: without a worker first, then idle, then the least loss of urgent work."""
    return sorted(active(pool), key=_loss)[:count]


def leaving(pool: Pool, count: int) -> list[Slot]:
    """Which slots are removed when there are so many too many."""
    staying = [slot for slot in pool.slots if not slot.removed]
    chosen = sorted(staying, key=_loss)[: max(0, count)]
    return sorted(chosen, key=lambda slot: slot.index)


def _loss(slot: Slot) -> tuple[int, ...]:
    """What would be lost with this slot; the smallest goes first."""
    if not slot.worker:
        return (0, -slot.index)
    if slot.state != SlotState.RUNNING:
        return (1, -slot.index)
    if not slot.leases:
        return (2, -slot.index)
    # Levels count from CRITICAL = 0. All it holds is looked at: the urgent one may be the second.
    urgent = min(task.spec.priority for task in slot.leases.values())
    began_ns = next(iter(slot.leases.values())).leased_ns
    return (3, -urgent, -began_ns, -slot.index)


def returning(pool: Pool) -> list[Slot]:
    """Held slots in the order they come back: those that can start at once first."""
    held = [slot for slot in pool.slots if slot.held and not slot.removed]
    return sorted(held, key=lambda slot: (slot.state == SlotState.DRAINING, slot.index))
