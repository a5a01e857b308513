"""One task on its way through the fleet.

    NEW ──stored──► QUEUED ──lease──► LEASED ──result──► ENDING ──stored──► (forgotten)
                      ▲  ▲               │  │
                      │  └─ready─ WAITING ◄─┘ retry after a pause
                      └────── given back: crash, recall, shutdown

NEW and ENDING wait for the disk: nobody is told of a task or of its end before it is committed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from musterd.ipc.messages import NOT_GIVEN, Outcome, TaskSpec

if TYPE_CHECKING:
    from musterd.supervisor.core.pool import Pool
    from musterd.supervisor.core.slot import Slot


class TaskState(IntEnum):
    NEW = 0
    QUEUED = 1
    WAITING = 2
    LEASED = 3
    ENDING = 4


class Route(Struct):
    """Where tasks of one name go, what is declared about them, and what they cost."""

    pool: Pool
    name: str
    method: str
    timeout_ns: int
    max_retries: int
    cost_ns: int  # measured run time, smoothed; UNKNOWN_COST_NS before the first result


class Task(Struct, gc=False):
    # gc=False: the one cycle (task <-> slot) is always cut when a lease ends.
    seq: int
    spec: TaskSpec
    route: Route
    submitted_wall_ns: int
    peer: bytes  # who submitted it and waits; b"" for nobody
    state: int = TaskState.NEW
    attempt: int = 0  # attempts begun so far
    crashes: int = 0
    interruptions: int = 0
    queued_ns: int = 0  # when it became ready
    expires_at_ns: int = 0
    lease: int = 0
    leased_ns: int = 0
    slot: Slot | None = None
    begun_recorded: bool = False
    cancelled: bool = False
    watchers: list[bytes] | None = None  # others who wait, besides `peer`
    outcome: Outcome | None = None

    @property
    def timeout_ns(self) -> int:
        return self.spec.timeout_ns or self.route.timeout_ns

    @property
    def max_retries(self) -> int:
        given = self.spec.max_retries
        return given if given != NOT_GIVEN else self.route.max_retries
