"""A slot is a place in a pool (`parser/0`); a worker is the process in it now.

              start             ready
    STOPPED ─────────► STARTING ──────► RUNNING         RUNNING with a lease is shown as BUSY
       ▲ ▲                │ ▲ │            │
       │ │           lost │ │ │ stop       │ stop / lost
       │ │ gone           ▼ │ ▼            ▼
       │ └──────────── BACKOFF, DRAINING ◄─┘
       │  stop            │ give up
       └───────────── FATAL ── reset ──► STARTING

Every change goes through `Slot.become`; one that the table does not list is our own mistake and
raises. What an exit means is decided in one function, `after_crash`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from musterd.ipc.resilience.backoff import pause_ns
from musterd.supervisor.core.model.events import WorkerExited
from musterd.supervisor.core.model.policy import RestartPolicy
from musterd.supervisor.core.model.task import Task

if TYPE_CHECKING:
    from musterd.supervisor.core.model.pool import Pool


NO_LIMIT = 2**62
RETURNED_MAX = 1024  # leases remembered: several times as many as a worker may hold at once


class Cause(StrEnum):
    BOOT = "boot"
    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"
    HUNG = "hung"
    UNHEALTHY = "unhealthy"


class SlotState(StrEnum):
    STOPPED = "STOPPED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    BACKOFF = "BACKOFF"
    FATAL = "FATAL"


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.STOPPED: frozenset({SlotState.STARTING}),
    SlotState.STARTING: frozenset(
        {
            SlotState.RUNNING,
            SlotState.BACKOFF,
            SlotState.FATAL,
            SlotState.DRAINING,
            SlotState.STOPPED,
        }
    ),
    SlotState.RUNNING: frozenset({SlotState.DRAINING, SlotState.BACKOFF, SlotState.FATAL}),
    SlotState.DRAINING: frozenset({SlotState.STOPPED, SlotState.STARTING}),
    SlotState.BACKOFF: frozenset({SlotState.STARTING, SlotState.STOPPED, SlotState.FATAL}),
    SlotState.FATAL: frozenset({SlotState.STARTING, SlotState.STOPPED}),
}


class Slot:
    def __init__(self, pool: Pool, index: int) -> None:
        self.pool = pool
        self.index = index
        self.name = f"{pool.name}/{index}"
        self.state = SlotState.STOPPED
        self.reason = ""  # why it is in BACKOFF or FATAL, for people
        self.restart_after_stop = False  # a restart was asked for: DRAINING leads to STARTING
        self.halt = ""  # "paused" or "drained" by a person: see core/tasks/pauses.py
        self.removed = False  # beyond the pool's size: forgotten once stopped
        self.held = False  # beyond what memory allows: stopped, and started again when it does

        self.trial = False  # it is the first to be started from a new build

        # The worker in it now; 0 for none.
        self.worker = 0
        self.build = ""
        self.pid = 0
        self.spawned_ns = 0
        self.forked_ns = 0
        self.ready_ns = 0
        self.terminated = False  # SIGTERM was sent: what runs is being interrupted
        self.killed_for = ""  # why we killed it, until its exit arrives
        self.killed_cause = Cause.HUNG  # the same as one of the causes
        self.killed_lease = 0  # the lease that made us do it, 0 for none
        self.pss_bytes = 0  # what it and everything it started take, 0 if not known

        # Its leases, in the order the worker runs them: one at a time, or `width` at once.
        self.leases: dict[int, Task] = {}
        self.width = 1
        self.recalling = False
        self.progress_ns = 0  # when it was last given or finished something
        self.watching = False  # a look at its progress is due
        self.deadline_ns = 0  # the look at its scoreboard that is due, 0 for none
        self.idle_looks = 0  # looks in a row that found nothing running although it has leases
        self.missed = 0  # rounds in a row that found no sign of life in time
        self.returned: deque[int] = deque(maxlen=RETURNED_MAX)  # leases that its worker gave back

        # How worn it is (core/workers/recycling.py).
        self.worker_tasks = 0  # it has run
        self.limit_factor = 1.0  # at which share of the pool's limits it is worn enough
        self.overtime = 0  # tasks beyond max_tasks that it may run
        self.worn = ""  # why it is to be replaced
        self.worn_ns = 0  # since when

        # Its history.
        self.restarts = 0
        self.lost: dict[Cause, int] = {}  # its workers that ended unasked
        self.recycled = 0
        self.tasks_done = 0
        self.failures = 0  # consecutive
        self.crash_times: deque[int] = deque()
        self.backoff_until_ns = 0

    def become(self, state: SlotState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.name}: {self.state} -> {state}"
        self.state = state

    @property
    def alive(self) -> bool:
        """Whether there is a process, or one is being made."""
        return self.worker != 0

    @property
    def shown_state(self) -> str:
        return "BUSY" if self.state == SlotState.RUNNING and self.leases else str(self.state)

    def forget_worker(self) -> None:
        assert not self.leases, self.leases
        self.worker = 0
        self.pid = 0
        self.ready_ns = 0
        self.terminated = False
        self.killed_for = ""
        self.killed_cause = Cause.HUNG
        self.killed_lease = 0
        self.pss_bytes = 0
        self.width = 1
        self.recalling = False
        self.deadline_ns = 0
        self.idle_looks = 0
        self.missed = 0
        self.returned.clear()
        self.worker_tasks = self.overtime = 0
        self.limit_factor = 1.0
        self.worn = ""
        self.worn_ns = 0

    def runs_returned(self, running: Iterable[int]) -> bool:
        """Whether its worker runs what it says it has given back."""
        return bool(self.returned) and any(lease in self.returned for lease in running)

    @property
    def spent(self) -> bool:
        """Whether its worker is to be given no task any more: it has had its number."""
        return self.tasks_left <= 0

    @property
    def tasks_left(self) -> int:
        """How many more its worker may be given."""
        max_tasks = self.pool.policy.max_tasks
        if not max_tasks:
            return NO_LIMIT
        return max_tasks + self.overtime - self.worker_tasks - len(self.leases)

    def inherit(self, old: Slot) -> None:
        """Go on with the history of the slot whose place this one takes."""
        self.halt = old.halt
        self.restarts = old.restarts
        self.lost = old.lost
        self.recycled = old.recycled
        self.failures = old.failures
        self.crash_times = old.crash_times
        self.tasks_done, old.tasks_done = old.tasks_done, 0  # what it still does is added later

    def forgive(self) -> None:
        self.failures = 0
        self.crash_times.clear()
        self.reason = ""

    def after_crash(
        self, policy: RestartPolicy, now_ns: int, rng: Random, *, counts: bool
    ) -> int | None:
        """The pause before the next start, or None when the slot has used up its restarts.

        A crash that does not count (a known poison task did it) is followed by a start at once.
        """
        if self.ready_ns and now_ns - self.ready_ns >= policy.reset_ns:
            self.forgive()
        if not counts:
            return 0
        self.failures += 1
        self.crash_times.append(now_ns)
        while self.crash_times[0] <= now_ns - policy.window_ns:
            self.crash_times.popleft()
        if len(self.crash_times) > policy.limit:
            return None
        return restart_pause_ns(policy, self.failures, rng)


def restart_pause_ns(policy: RestartPolicy, failures: int, rng: Random) -> int:
    """The pause after so many failures in a row: none after the first."""
    if failures <= 1:
        return 0
    pause = pause_ns(policy.backoff, failures - 1, rng)
    if failures < policy.pause_after:
        return pause
    spread = 1.0 + policy.backoff.jitter * (2.0 * rng.random() - 1.0)
    return max(pause, int(policy.pause_ns * spread))


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
