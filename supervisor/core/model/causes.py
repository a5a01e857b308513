"""Why a worker was lost: every loss has one cause, and is counted under it.

    boot        it ended, or could not be made, before it was ready
    exit        it exited by itself
    signal      a signal ended it, and it was not ours
    oom         the kernel killed it because memory ran out
    hung        we killed it: it gave no sign of life, or did not stop when it had to
    unhealthy   its healthy() said no, raised, or did not answer in time

All of them are followed by the same pauses (slot.after_crash). A worker that is stopped because a
person, a recycle or the memory wants it so is not lost, and has no cause.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from musterd.supervisor.core.model.events import WorkerExited

if TYPE_CHECKING:
    from musterd.supervisor.core.model.slot import Slot


class Cause(StrEnum):
    BOOT = "boot"
    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"
    HUNG = "hung"
    UNHEALTHY = "unhealthy"


def cause_of(slot: Slot, event: WorkerExited) -> tuple[Cause, str]:
    """What ended the worker, and the same in words."""
    if slot.killed_for:
        return slot.killed_cause, f"killed: {slot.killed_for}"
    how = (
        f"ended by signal {-event.exit_code}"
        if event.exit_code < 0
        else f"exited with code {event.exit_code}"
    )
    detail = f": {event.detail}" if event.detail else ""
    if event.oom:
        return Cause.OOM, f"{how}: {event.oom}{detail}"
    if event.unhealthy:
        return Cause.UNHEALTHY, event.detail or how
    if not slot.ready_ns:
        return Cause.BOOT, f"{how}{detail}"
    return (Cause.SIGNAL if event.exit_code < 0 else Cause.EXIT), f"{how}{detail}"
