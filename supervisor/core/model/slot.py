"""Slot: a place in a pool (`parser/0`); a worker is the process that is in it now.

              start             ready
    STOPPED ─────────► STARTING ──────► RUNNING         RUNNING with a lease is shown as BUSY
       ▲ ▲                │ ▲ │            │
       │ │           lost │ │ │ stop       │ stop / lost
       │ │ gone           ▼ │ ▼            ▼
       │ └──────────── BACKOFF, DRAINING ◄─┘
       │  stop            │ give up
       └───────────── FATAL ── reset ──► STARTING

Every change goes through `Slot.become`; a change that the table does not list is our own mistake
and raises. `after_crash` alone decides what an exit means. Every loss has one cause, and is counted
under it:

    boot        the worker ended, or could not be started, before it was ready
    exit        it exited by itself
    signal      a signal ended it that we did not send
    oom         the kernel killed it because memory ran out
    hung        we killed it: it gave no sign of life, or did not stop when it had to
    unhealthy   its healthy() said no, raised, or did not answer in time

All causes are followed by the same pauses. A worker that is stopped for an operator, a recycle or
memory is not lost, and has no cause.
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
RETURNED_MAX = 1024  # leases remembered: several times as many as a worker can hold


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
        self.reason = ""  # why the slot is in BACKOFF or FATAL, for people
        self.restart_after_stop = False  # a restart is wanted: DRAINING leads to STARTING
        self.halt = ""  # "paused" or "drained" by an operator: core/tasks/pauses.py
        self.removed = False  # beyond the pool's size: the slot is forgotten once stopped
        self.held = False  # stopped until memory allows its worker
        self.trial = False  # the first slot that is started from a new build

        # Leases, in the order in which the worker runs them: one at a time, or `width` at once.
        self.leases: dict[int, Task] = {}
        self.build = ""
        self.spawned_ns = 0
        self.forked_ns = 0
        self.progress_ns = 0  # when the worker last got or finished something
        self.watching = False  # a look at its progress is scheduled
        self.forget_worker()

        # The history of the slot.
        self.restarts = 0
        self.lost: dict[Cause, int] = {}  # workers that ended unasked
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
        """Whether there is a process, or one is being started."""
        return self.worker != 0

    @property
    def shown_state(self) -> str:
        return "BUSY" if self.state == SlotState.RUNNING and self.leases else str(self.state)

    def forget_worker(self) -> None:
        """Begin without a worker."""
        assert not self.leases, self.leases
        self.worker = 0  # its number; 0 for none
        self.pid = 0
        self.ready_ns = 0
        self.terminated = False  # SIGTERM was sent: the running task is being interrupted
        self.killed_for = ""  # why we killed the worker, until its exit arrives
        self.killed_cause = Cause.HUNG  # and under which cause that counts
        self.killed_lease = 0  # the lease for which we killed it, 0 for none
        self.pss_bytes = 0  # memory of the worker and all it started, 0 if not known
        self.width = 1
        self.recalling = False
        self.deadline_ns = 0  # when to look at its scoreboard, 0 for never
        self.idle_looks = 0  # looks in a row that found it idle although it has leases
        self.debugged_ns = 0  # since when a person debugs its task or is waited for, 0 if nobody
        self.missed = 0  # health checks in a row without a sign of life in time
        self.returned: deque[int] = deque(maxlen=RETURNED_MAX)  # leases that it gave back
        # How worn the worker is (core/workers/recycling.py).
        self.worker_tasks = 0  # tasks that it has run
        self.limit_factor = 1.0  # the share of the pool's limits at which it counts as worn
        self.overtime = 0  # tasks that it may run beyond max_tasks
        self.worn = ""  # why the worker is to be replaced
        self.worn_ns = 0  # since when

    def runs_returned(self, running: Iterable[int]) -> bool:
        """Whether the worker runs a lease that it says it has given back."""
        return bool(self.returned) and any(lease in self.returned for lease in running)

    @property
    def spent(self) -> bool:
        """Whether the worker has had its number of tasks."""
        return self.tasks_left <= 0

    @property
    def tasks_left(self) -> int:
        """Return how many more tasks the worker may get."""
        max_tasks = self.pool.policy.max_tasks
        if not max_tasks:
            return NO_LIMIT
        return max_tasks + self.overtime - self.worker_tasks - len(self.leases)

    def inherit(self, old: Slot) -> None:
        """Take over the history of the slot that this one replaces."""
        self.halt = old.halt
        self.restarts = old.restarts
        self.lost = old.lost
        self.recycled = old.recycled
        self.failures = old.failures
        self.crash_times = old.crash_times
        self.tasks_done, old.tasks_done = old.tasks_done, 0  # what `old` still does is added later

    def forgive(self) -> None:
        self.failures = 0
        self.crash_times.clear()
        self.reason = ""

    def after_crash(
        self, policy: RestartPolicy, now_ns: int, rng: Random, *, counts: bool
    ) -> int | None:
        """Return the pause before the next start, or None when the restarts are used up.

        After a crash that does not count (a known poison task did it) the slot starts at once.
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
    """Return the pause after this many failures in a row: none after the first."""
    if failures <= 1:
        return 0
    pause = pause_ns(policy.backoff, failures - 1, rng)
    if failures < policy.pause_after:
        return pause
    spread = 1.0 + policy.backoff.jitter * (2.0 * rng.random() - 1.0)
    return max(pause, int(policy.pause_ns * spread))


def cause_of(slot: Slot, event: WorkerExited) -> tuple[Cause, str]:
    """Return the cause of a worker's end, and the cause in words."""
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
