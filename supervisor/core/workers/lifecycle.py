"""Worker lifecycle: start, crash, restart, stop.

A pool's fork server (forkservers.py) is started first; it forks the pool's workers when it is up. A
worker that ends unasked is replaced as the restart policy of its slot says. A stop is a request
(finish the task), then SIGTERM (drop the task), then SIGKILL, each with its own deadline.
"""

from collections.abc import Iterable

from musterd.ipc.resilience.policy import POOL_SIZE_MAX, SECOND_NS
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    KillWorker,
    SpawnWorker,
    StopWorker,
    TerminateWorker,
)
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import Cause, Slot, SlotState, cause_of
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.endings import Endings
from musterd.supervisor.core.tasks.leases import Leases
from musterd.supervisor.core.workers.forkservers import ForkServers
from musterd.supervisor.core.workers.recycling import Recycling
from musterd.supervisor.core.workers.rolling import RollingReplacement
from musterd.supervisor.core.workers.sizing import HELD_BACK, Sizing

Names = tuple[tuple[str, int], ...]


class WorkerLifecycle:
    def __init__(self, state: State, leases: Leases, endings: Endings) -> None:
        self._state = state
        self._leases = leases
        self._endings = endings
        self._last_worker = 0
        self.fork_servers = ForkServers(state, self)
        self.recycling = Recycling(state, leases, self)
        self.sizing = Sizing(state, self)
        self.replacement = RollingReplacement(state, self, self.fork_servers, self.recycling)

    # -- starting -----------------------------------------------------------------------------

    def started(self) -> None:
        if self.closed("start"):
            return
        for pool in self._state.pools.values():
            self.open(pool)

    def open(self, pool: Pool) -> None:
        """Start a pool that runs nothing yet."""
        self.fork_servers.start(pool)
        for slot in pool.slots:
            self.sizing.begin(slot)

    def start_slot(self, slot: Slot) -> None:
        """Start a slot that has no worker."""
        slot.become(SlotState.STARTING)
        self.start_waiting(slot)

    def start_waiting(self, slot: Slot) -> None:
        """Continue to start a slot in STARTING, as far as its fork server allows."""
        fork_server = self._fork_server_of(slot)
        if fork_server == ForkServerState.UP:
            self.spawn(slot)
        elif fork_server == ForkServerState.FAILED:
            slot.become(SlotState.FATAL)
            slot.reason = slot.pool.reason

    def _fork_server_of(self, slot: Slot) -> ForkServerState:
        pool = slot.pool
        return (
            pool.rollout.fork_server
            if slot.trial and pool.rollout is not None
            else pool.fork_server
        )

    def spawn(self, slot: Slot) -> None:
        """Ask the fork server, which is up, for a worker, if memory allows one."""
        if not self._state.memory.admits(slot.pool):
            self.sizing.refuse(slot)
            return
        self._state.memory.promise(slot.pool)
        self._last_worker += 1
        slot.worker = self._last_worker
        slot.spawned_ns = self._state.now_ns
        self._state.workers[slot.worker] = slot
        pool = slot.pool
        slot.build = pool.rollout.build if slot.trial and pool.rollout is not None else pool.build
        self._state.out.append(SpawnWorker(slot.worker, pool.name, slot.index, slot.build))
        self._state.timers.at(
            self._state.now_ns + slot.pool.policy.start_timeout_ns,
            self._start_overdue,
            slot,
            slot.worker,
        )

    def forked(self, event: events.WorkerForked) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None:
            self._state.out.append(KillWorker(event.worker))  # given up before it was forked
        else:
            slot.pid = event.pid
            slot.forked_ns = slot.pool.forked_ns = self._state.now_ns

    def ready(self, event: events.WorkerReady) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None or slot.state != SlotState.STARTING:
            return
        slot.become(SlotState.RUNNING)
        slot.reason = ""
        slot.width = event.width
        slot.pool.width = max(each.width for each in slot.pool.everyone)
        slot.ready_ns = self._state.now_ns
        slot.pool.fork_server_failures = 0
        self._state.report(
            "worker.ready", slot=slot, seconds=(slot.ready_ns - slot.spawned_ns) / SECOND_NS
        )
        self.recycling.welcome(slot)
        if slot is slot.pool.successor:
            self.recycling.take_over(slot)
        self._leases.feed(slot)

    def _start_overdue(self, slot: Slot, worker: int) -> None:
        if slot.worker != worker or slot.state != SlotState.STARTING:
            return
        # A fork server forks one worker after another: while it forks, the next slots wait.
        since_ns = slot.forked_ns if slot.pid else max(slot.spawned_ns, slot.pool.forked_ns)
        due_ns = since_ns + slot.pool.policy.start_timeout_ns
        if self._state.now_ns < due_ns:
            self._state.timers.at(due_ns, self._start_overdue, slot, worker)
            return
        if not slot.pid and slot.pool.fork_server == ForkServerState.UP and not slot.trial:
            self.fork_servers.stuck(slot.pool)
            return
        seconds = slot.pool.policy.start_timeout_ns / SECOND_NS
        slot.killed_cause = Cause.HUNG
        slot.killed_for = f"not ready within its start_timeout of {seconds:g} s"
        self._state.out.append(KillWorker(worker, dump=True))
        if not slot.pid:  # no process will report its exit
            self._gone(slot, Cause.BOOT, slot.killed_for, counts=False)

    def unborn(self, slot: Slot) -> None:
        """Give up a fork that was never reported; its slot waits for the next fork server."""
        self._state.out.append(KillWorker(slot.worker))
        del self._state.workers[slot.worker]
        slot.forget_worker()
        if slot is slot.pool.successor:
            self.recycling.failed(slot, "the fork server did not fork it")

    # -- ending -------------------------------------------------------------------------------

    def leftovers_ended(self, event: events.LeftoversEnded) -> None:
        """Report processes and directories that outlived a worker, a fork server or an earlier
        supervisor."""
        what = f"processes: {event.processes}, temporary directories: {event.directories}"
        level = "warning" if event.processes else "info"
        pool = self._state.pools.get(event.pool)
        if pool is None:
            self._state.report("daemon.leftovers", level, reason=what)
            return
        pool.counters.orphans += event.processes
        slot = next((slot for slot in pool.slots if slot.index == event.index), None)
        self._state.report("worker.leftovers", level, pool=pool, slot=slot, reason=what)

    def spawn_failed(self, event: events.SpawnFailed) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is not None:
            # If the fork server is to blame, its own failures count instead.
            counts = self._fork_server_of(slot) == ForkServerState.UP
            if slot.trial and not counts and slot.state == SlotState.STARTING:
                self.unborn(slot)  # the slot waits for the next fork server
                return
            why = f"could not be started: {event.reason}"
            self._gone(slot, Cause.BOOT, why, counts=counts)

    def exited(self, event: events.WorkerExited) -> None:
        slot = self._state.workers.get(event.worker)
        if slot is None:
            return
        cause, how = cause_of(slot, event)
        running = (event.lease, *event.beside)
        poison = self._endings.lost(slot, running, how, stopped=slot.terminated)
        self._gone(slot, cause, how, counts=not poison)

    def _gone(self, slot: Slot, cause: Cause, why: str, *, counts: bool) -> None:
        """Decide what happens to the slot of a worker that is gone."""
        self._state.memory.freed(slot)
        del self._state.workers[slot.worker]
        if slot.state == SlotState.DRAINING:
            slot.forget_worker()
            self._stopped(slot)
            self._state.recycling_due = True
            return
        if slot.trial:
            self.replacement.trial_failed(slot, why)
            counts = False  # the slot starts again from the old build
        if slot is slot.pool.successor:
            slot.forget_worker()
            self.recycling.failed(slot, why)
            return
        uptime = (self._state.now_ns - slot.ready_ns) / SECOND_NS if slot.ready_ns else 0.0
        pause = slot.after_crash(
            slot.pool.policy.restart, self._state.now_ns, self._state.rng, counts=counts
        )
        slot.forget_worker()
        slot.reason = why
        slot.lost[cause] = slot.lost.get(cause, 0) + 1
        lost = slot.pool.counters.lost
        lost[cause] = lost.get(cause, 0) + 1
        if pause is None:
            policy = slot.pool.policy.restart
            slot.reason = (
                f"more than {policy.limit} crashes within {policy.window_ns / SECOND_NS:g} s, "
                f"the last: {why}"
            )
            slot.become(SlotState.FATAL)
            self._state.report("worker.fatal", "error", slot=slot, reason=slot.reason, cause=cause)
            self.fit(slot.pool)  # its place is free for a held slot
            return
        self._state.report(
            "worker.crashed", "error", slot=slot, reason=why, seconds=uptime, cause=cause
        )
        self.back_off(slot, why, pause)

    def back_off(self, slot: Slot, why: str, pause: int) -> None:
        """Let a slot wait in BACKOFF, then start the next worker."""
        slot.become(SlotState.BACKOFF)
        slot.reason = why
        slot.backoff_until_ns = self._state.now_ns + pause
        if pause:
            self._state.timers.at(
                slot.backoff_until_ns, self._backoff_over, slot, slot.backoff_until_ns
            )
        else:
            self._backoff_over(slot, slot.backoff_until_ns)

    def _backoff_over(self, slot: Slot, until_ns: int) -> None:
        if slot.state == SlotState.BACKOFF and slot.backoff_until_ns == until_ns:
            slot.restarts += 1
            slot.pool.counters.restarts += 1
            self.start_slot(slot)

    # -- stopping -----------------------------------------------------------------------------

    def stop(self, slot: Slot, *, within_ns: int) -> None:
        """Stop a slot; its running task has `within_ns` to end."""
        self.recycling.abandon(slot)
        if slot.state == SlotState.RUNNING:
            slot.become(SlotState.DRAINING)
            slot.pool.free_slots.pop(slot, None)
            self._state.out.append(StopWorker(slot.worker))
            self._state.timers.at(
                self._state.now_ns + within_ns, self._drain_over, slot, slot.worker
            )
        elif slot.state == SlotState.STARTING and slot.worker:
            slot.become(SlotState.DRAINING)
            self.terminate(slot)
        elif slot.state in (SlotState.STARTING, SlotState.BACKOFF, SlotState.FATAL):
            slot.become(SlotState.STOPPED)
            self._stopped(slot)

    def _stopped(self, slot: Slot) -> None:
        slot.reason = HELD_BACK if slot.held else ""  # else a person asked for the stop
        if slot.state == SlotState.DRAINING:
            slot.become(SlotState.STOPPED)
        if slot.removed:
            slot.pool.dismiss(slot)
        elif slot.restart_after_stop and self._state.intake_open:
            slot.restart_after_stop = False
            self.start_slot(slot)
        slot.restart_after_stop = False

    def _drain_over(self, slot: Slot, worker: int) -> None:
        if slot.worker != worker or slot.state != SlotState.DRAINING:
            return
        # A task of a worker that is only replaced has its time, which stands while it is debugged.
        if slot in (slot.pool.leaving, slot.pool.recycled) and self._state.intake_open:
            due_ns = self._leases.last_due_ns(slot)
            if due_ns > self._state.now_ns:
                self._state.timers.at(due_ns, self._drain_over, slot, worker)
                return
        self.terminate(slot)

    def terminate(self, slot: Slot) -> None:
        """Send SIGTERM, which interrupts the running task; SIGKILL if the worker lives on."""
        if slot.terminated:
            return
        slot.terminated = True
        self._state.out.append(TerminateWorker(slot.worker))
        self._state.timers.at(
            self._state.now_ns + self._state.policy.stop_timeout_ns,
            self._kill_overdue,
            slot,
            slot.worker,
        )

    def _kill_overdue(self, slot: Slot, worker: int) -> None:
        if slot.worker != worker or slot.state != SlotState.DRAINING:
            return
        self._state.report(
            "worker.killed", "warning", slot=slot, reason="it did not stop in time after SIGTERM"
        )
        self._state.out.append(KillWorker(worker))
        if not slot.pid and not slot.ready_ns:  # no process will report its exit
            self._gone(slot, Cause.BOOT, "never started", counts=False)

    def kill(self, slot: Slot) -> None:
        if slot.worker:
            slot.killed_for = slot.killed_for or "the daemon was told to end at once"
            self._state.out.append(KillWorker(slot.worker))

    # -- what people ask for ------------------------------------------------------------------

    def _named(self, names: Names) -> Iterable[Slot]:
        for pool_name, index in names:
            pool = self._state.pools.get(pool_name)
            for slot in list(pool.slots) if pool is not None else ():
                if index in (-1, slot.index):
                    yield slot

    def closed(self, command: str) -> bool:
        """Return whether the daemon is shutting down and starts nothing any more."""
        if self._state.intake_open:
            return False
        self._state.report(
            "command.ignored", "warning", reason=f"{command}: the daemon is shutting down"
        )
        return True

    def start(self, event: events.StartRequested) -> None:
        if self.closed("start"):
            return
        for slot in self._named(event.names):
            if slot.state in (SlotState.STOPPED, SlotState.DRAINING):
                self.sizing.begin(slot)
            elif slot.state == SlotState.BACKOFF:
                self.fork_servers.revive(slot.pool)
                self._backoff_over(slot, slot.backoff_until_ns)

    def stop_named(self, event: events.StopRequested) -> None:
        pools: dict[str, Pool] = {}
        for slot in self._named(event.names):
            slot.restart_after_stop = slot.held = False
            slot.reason = ""
            self.stop(slot, within_ns=self._state.policy.drain_timeout_ns)
            pools[slot.pool.name] = slot.pool
        for pool in pools.values():
            self.fit(pool)  # its place is free for a held slot

    def restart(self, event: events.RestartRequested) -> None:
        if self.closed("restart"):
            return
        for slot in self._named(event.names):
            self.fork_servers.revive(slot.pool)  # the worker class may load now
            if slot.state in (SlotState.STOPPED, SlotState.DRAINING):
                self.sizing.begin(slot)
            elif slot.state == SlotState.FATAL:
                self.reset_slot(slot)
            else:
                slot.restart_after_stop = True
                self.stop(slot, within_ns=self._state.policy.drain_timeout_ns)

    def reset(self, event: events.ResetRequested) -> None:
        if self.closed("reset"):
            return
        for slot in self._named(event.names):
            self.fork_servers.revive(slot.pool)
            slot.restarts = 0
            if slot.state in (SlotState.FATAL, SlotState.BACKOFF):
                self.reset_slot(slot)
            else:
                slot.forgive()
                slot.reason = HELD_BACK if slot.held else ""

    def reset_slot(self, slot: Slot) -> None:
        """Try a slot again that waits in BACKOFF or FATAL."""
        slot.forgive()
        if slot.state == SlotState.BACKOFF:
            self.start_slot(slot)
        else:
            self.sizing.begin(slot)

    def resize(self, pool: Pool, size: int) -> None:
        """Change the number of workers that the pool should have."""
        size = max(0, min(size, POOL_SIZE_MAX))
        self._state.report("pool.scaled", pool=pool, reason=f"from {pool.size} to {size}")
        pool.size = size
        self.fit(pool)

    # -- the number of workers ----------------------------------------------------------------

    def fit(self, pool: Pool) -> None:
        """Start and stop slots until the pool has its target size."""
        if pool.is_open:
            self.sizing.fit(pool)

    def kill_held(self, slot: Slot, why: str) -> None:
        """Kill a worker that was asked to give way and did not; its task runs again later."""
        if not slot.killed_for:
            slot.killed_for = why
            self._state.report("worker.killed", "warning", slot=slot, reason=why)
            self._state.out.append(KillWorker(slot.worker))
