"""Fork servers: start, crash, hang, restart, give up.

The slots of a pool wait for its fork server in STARTING. A fork server that ends, does not load the
worker class in time, or does not fork in time is replaced: the first time at once, then after
growing pauses, in which the slots are in BACKOFF. After `restart.limit` failures in a row the pool
waits for a person. Running workers are left alone.

A pool that has a worker, or waits to start one, keeps a *spare*: a process made ahead, so that the
next restart is quicker. None is kept while memory is short: a spare is worth ten milliseconds of a
restart, and takes 3 to 4 MB. The spares are looked at when a process has come or gone and once a
second, with the clock: a spare is never urgent, and other events need not pay for the look.
"""

from typing import Protocol

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    Declare,
    KeepSpares,
    StartForkServer,
    StopForkServer,
)
from musterd.supervisor.core.model.memory_use import MemoryLevel
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import Slot, SlotState, restart_pause_ns
from musterd.supervisor.core.model.state import State

_IN_USE = (SlotState.STARTING, SlotState.RUNNING, SlotState.BACKOFF)

News = events.ForkServerReady | events.ForkServerFailed | events.ForkServerExited


class SlotActions(Protocol):
    """What WorkerLifecycle does with one slot, for the parts that decide when."""

    def start_slot(self, slot: Slot) -> None: ...
    def start_waiting(self, slot: Slot) -> None: ...
    def spawn(self, slot: Slot) -> None: ...
    def unborn(self, slot: Slot) -> None: ...
    def back_off(self, slot: Slot, why: str, pause: int) -> None: ...
    def reset_slot(self, slot: Slot) -> None: ...
    def stop(self, slot: Slot, *, within_ns: int) -> None: ...


class ForkServers:
    def __init__(self, state: State, slots: SlotActions) -> None:
        self._state = state
        self._slots = slots
        self._spares: tuple[tuple[str, str], ...] = ()  # by pool and build

    def start(self, pool: Pool) -> None:
        pool.fork_server = ForkServerState.STARTING
        pool.fork_server_since_ns = self._state.now_ns
        self._state.out.append(StartForkServer(pool.name, pool.build))
        self.watch(pool)

    def watch(self, pool: Pool) -> None:
        """Set the timer in which a loading fork server must come up."""
        since_ns = pool.fork_server_since_ns
        due_ns = since_ns + pool.policy.start_timeout_ns
        self._state.timers.at(due_ns, self._overdue, pool, since_ns)

    def revive(self, pool: Pool) -> None:
        """Start a failed fork server again, because a person asked."""
        if pool.is_open and pool.fork_server in (ForkServerState.FAILED, ForkServerState.DOWN):
            pool.fork_server_failures = 0
            pool.reason = ""
            self.start(pool)

    def stop_all(self) -> None:
        for pool in self._state.pools.values():
            pool.fork_server = ForkServerState.DOWN
            self._state.out.append(StopForkServer(pool.name, pool.build))

    def heard(self, event: News) -> None:
        """Take news of a fork server, unless it was stopped or replaced meanwhile."""
        pool = self._state.pools.get(event.pool)
        if pool is None or pool.build != event.build:
            return
        loading = pool.fork_server == ForkServerState.STARTING
        match event:
            case events.ForkServerReady() if loading:
                self._ready(pool, event)
            case events.ForkServerFailed() if loading:  # another try will not help
                self._give_up(pool, event.reason)
            case events.ForkServerExited() if loading or pool.fork_server == ForkServerState.UP:
                self._lost(pool, event.reason)

    def _ready(self, pool: Pool, event: events.ForkServerReady) -> None:
        pool.fork_server = ForkServerState.UP
        pool.fork_server_since_ns = self._state.now_ns
        pool.reason = ""
        if pool.rollout is None or not pool.rollout.knows:
            pool.declare(event.declarations)
            self._state.out.append(Declare(pool.name, event.declarations))
        for slot in _waiting(pool):
            self._slots.spawn(slot)
        self._state.recycling_due = True

    def keep_spares(self, _event: object) -> None:
        """Have spares kept by other pools than before, if it has come to that."""
        spares: tuple[tuple[str, str], ...] = ()
        if self._state.intake_open and self._state.memory.level == MemoryLevel.NORMAL:
            pools = self._state.pools.values()
            spares = tuple((pool.name, pool.build) for pool in pools if _wants_spare(pool))
        if spares != self._spares:
            self._spares = spares
            self._state.out.append(KeepSpares(spares))

    # -- what goes wrong ----------------------------------------------------------------------

    def _overdue(self, pool: Pool, since_ns: int) -> None:
        if pool.fork_server == ForkServerState.STARTING and pool.fork_server_since_ns == since_ns:
            self._state.out.append(StopForkServer(pool.name, pool.build))
            self._lost(pool, f"the worker class was not loaded within {_start_timeout(pool)}")

    def stuck(self, pool: Pool) -> None:
        """Replace a fork server that did not fork a worker in time."""
        self._state.out.append(StopForkServer(pool.name, pool.build))
        for slot in pool.everyone:
            unborn = slot.state == SlotState.STARTING and slot.worker and not slot.pid
            if unborn and not slot.trial:
                self._slots.unborn(slot)
        self._lost(pool, f"the fork server forked no worker within {_start_timeout(pool)}")

    def _lost(self, pool: Pool, why: str) -> None:
        """Replace a fork server that ended; its workers live on."""
        now_ns, restart = self._state.now_ns, pool.policy.restart
        if (
            pool.fork_server == ForkServerState.UP
            and now_ns - pool.fork_server_since_ns >= restart.reset_ns
        ):
            pool.fork_server_failures = 0
        pool.fork_server_failures += 1
        if pool.fork_server_failures > restart.limit:
            many = f"more than {restart.limit} failures of its fork server in a row"
            self._give_up(pool, f"{many}, the last: {why}")
            return
        pool.fork_server = ForkServerState.DOWN
        pool.reason = why
        pause = restart_pause_ns(restart, pool.fork_server_failures, self._state.rng)
        self._state.report(
            "forkserver.crashed", "error", pool=pool, reason=why, seconds=pause / SECOND_NS
        )
        for slot in _waiting(pool):
            slot.reason = why
            if pause:
                self._slots.back_off(slot, why, pause)
        self._state.timers.at(now_ns + pause, self._again, pool)

    def _again(self, pool: Pool) -> None:
        if (
            pool.fork_server == ForkServerState.DOWN
            and self._state.intake_open
            and not pool.removed
        ):
            self.start(pool)

    def _give_up(self, pool: Pool, reason: str) -> None:
        """Let the pool wait for a person; other pools run on."""
        pool.fork_server = ForkServerState.FAILED
        pool.reason = reason
        self._state.report("pool.fatal", "error", pool=pool, reason=reason)
        for slot in pool.slots:
            waits = slot.state in (SlotState.STARTING, SlotState.BACKOFF) and not slot.worker
            if waits and not slot.trial:
                slot.become(SlotState.FATAL)
                slot.reason = reason


def _wants_spare(pool: Pool) -> bool:
    up = pool.policy.spare and pool.is_open and pool.fork_server == ForkServerState.UP
    return up and any(slot.state in _IN_USE for slot in pool.slots)


def _waiting(pool: Pool) -> list[Slot]:
    """Return the slots that wait for the pool's own fork server."""
    return [
        slot
        for slot in pool.slots
        if slot.state == SlotState.STARTING and not slot.worker and not slot.trial
    ]


def _start_timeout(pool: Pool) -> str:
    return f"its start_timeout of {pool.policy.start_timeout_ns / SECOND_NS:g} s"
