"""Fork servers: start, crash, hang, restart, give up.

The slots of a pool wait for its fork server in STARTING. A fork server that ends, does not load the
worker class in time, or does not fork in time is replaced: the first time at once, then after
growing pauses, in which the slots are in BACKOFF. After `restart.limit` failures in a row the pool
waits for a person. Running workers are left alone.
"""

from typing import Protocol

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Declare, StartForkServer, StopForkServer
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import Slot, SlotState, restart_pause_ns
from musterd.supervisor.core.model.state import State

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

    def _of(self, event: News) -> Pool | None:
        """Return the pool of this fork server; None if the fork server was replaced meanwhile."""
        pool = self._state.pools.get(event.pool)
        return pool if pool is not None and pool.build == event.build else None

    def ready(self, event: events.ForkServerReady) -> None:
        pool = self._of(event)
        if pool is None or pool.fork_server != ForkServerState.STARTING:
            return  # stopped meanwhile
        pool.fork_server = ForkServerState.UP
        pool.fork_server_since_ns = self._state.now_ns
        pool.reason = ""
        if pool.rollout is None or not pool.rollout.knows:
            pool.declare(event.declarations)
            self._state.out.append(Declare(pool.name, event.declarations))
        for slot in _waiting(pool):
            self._slots.spawn(slot)
        self._state.recycling_due = True

    # -- what goes wrong ----------------------------------------------------------------------

    def failed(self, event: events.ForkServerFailed) -> None:
        """Give up: the worker class cannot be loaded, and another try will not help."""
        pool = self._of(event)
        if pool is not None and pool.fork_server == ForkServerState.STARTING:
            self._give_up(pool, event.reason)

    def exited(self, event: events.ForkServerExited) -> None:
        """Replace a fork server that ended; its workers live on."""
        pool = self._of(event)
        if pool is not None and pool.fork_server not in (
            ForkServerState.FAILED,
            ForkServerState.DOWN,
        ):
            self._lost(pool, event.reason)

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


def _waiting(pool: Pool) -> list[Slot]:
    """Return the slots that wait for the pool's own fork server."""
    return [
        slot
        for slot in pool.slots
        if slot.state == SlotState.STARTING and not slot.worker and not slot.trial
    ]


def _start_timeout(pool: Pool) -> str:
    return f"its start_timeout of {pool.policy.start_timeout_ns / SECOND_NS:g} s"
