"""Shutdown of the daemon, in phases.

    intake   no new tasks; clients get a clear answer, or none if the next daemon has their socket:
             then they wait, and ask the next daemon
    drain    running tasks may end, for drain_timeout; a second request ends this phase at once
    stop     running tasks are interrupted (SIGTERM), then killed; a third request kills at once
    cleanup  the configured functions run, for cleanup_timeout; a third request ends this phase
    close    the daemon waits for writes under way, and for the cluster to hear of ends, then exits

Queued tasks stay in the store. No phase is skipped without a line in the log.
"""

from enum import IntEnum

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.actions import Exit, RunCleanup
from musterd.supervisor.core.model.events import CLUSTER
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.slot import Slot
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.claims import Claims
from musterd.supervisor.core.workers.lifecycle import WorkerLifecycle
from musterd.supervisor.core.workers.sidecar import Sidecar

# The runner of the clean-up functions keeps the time itself; the slack is in case it does not.
CLEANUP_SLACK_NS = 1 * SECOND_NS
CLOSE_BUDGET_NS = 10 * SECOND_NS  # a store that cannot write must not keep the daemon forever
# For the ends of attempts, while the engine is away: beyond a short restart of it, their tasks run
# again elsewhere sooner than anybody would take them.
AWAY_BUDGET_NS = 2 * SECOND_NS


class Phase(IntEnum):
    UP = 0
    INTAKE = 1
    DRAIN = 2
    STOP = 3
    CLEANUP = 4
    CLOSE = 5
    OVER = 6


class Shutdown:
    def __init__(
        self,
        state: State,
        ledger: Ledger,
        lifecycle: WorkerLifecycle,
        sidecars: dict[str, Sidecar],
        claims: Claims,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._lifecycle = lifecycle
        self._sidecars = sidecars
        self._claims = claims
        self._requests = 0
        self._code = 0
        self._entered_ns = 0
        self._patient = True
        self.phase = Phase.UP

    def request(self, reason: str, *, sockets_survive: bool, code: int = 0) -> None:
        """Begin a shutdown, or hasten it. `code`: with which the daemon exits in the end."""
        self._requests += 1
        if self._requests == 1:
            self._code = code
            self._state.intake_open = False
            self._state.sockets_survive = sockets_survive
            self._lifecycle.replacement.stop_all()
            self._enter(Phase.INTAKE, reason)
            self._drain()
        elif self._requests == 2:
            if self.phase == Phase.DRAIN:  # else the drain is over already
                self._stop("asked a second time")
        elif self.phase <= Phase.STOP:
            self._state.report("shutdown.kill", "warning", reason=reason, phase="stop")
            for slot in self._slots():
                self._lifecycle.kill(slot)
        elif self.phase == Phase.CLEANUP:
            self.cleaned_up("asked once more")

    def _enter(self, phase: Phase, reason: str = "") -> None:
        before = self._entered_ns or self._state.now_ns
        self._entered_ns = self._state.now_ns
        self.phase = phase
        self._state.report(
            "shutdown.phase",
            phase=phase.name.lower(),
            reason=reason,
            seconds=(self._state.now_ns - before) / SECOND_NS,
        )

    def _busy(self) -> bool:
        return any(pool.leased for pool in self._state.pools.values())

    def _slots(self) -> list[Slot]:
        return [slot for pool in self._state.pools.values() for slot in pool.everyone]

    def _drain(self) -> None:
        budget_ns = self._state.policy.drain_timeout_ns
        self._enter(Phase.DRAIN, "" if self._busy() else "nothing runs")
        for slot in self._slots():
            slot.restart_after_stop = False
            self._lifecycle.stop(slot, within_ns=budget_ns)
        self._state.timers.at(self._state.now_ns + budget_ns, self._drain_over)

    def _drain_over(self) -> None:
        if self.phase == Phase.DRAIN:
            self._stop("drain_timeout passed")

    def _stop(self, reason: str) -> None:
        self._enter(Phase.STOP, reason)
        for slot in list(self._state.workers.values()):
            if slot.leases or not slot.ready_ns:
                self._lifecycle.terminate(slot)
        self._state.timers.at(
            self._state.now_ns + self._state.policy.stop_timeout_ns, self._stop_over
        )

    def _stop_over(self) -> None:
        """Terminate, then kill, all workers, idle ones that did not stop included."""
        if self.phase == Phase.STOP:
            for slot in list(self._state.workers.values()):
                self._lifecycle.terminate(slot)

    def _cleanup_over(self) -> None:
        if self.phase == Phase.CLEANUP:
            self.cleaned_up("cleanup_timeout passed")

    def cleaned_up(self, reason: str) -> None:
        if self.phase != Phase.CLEANUP:
            return
        self._enter(Phase.CLOSE, reason)
        self._lifecycle.fork_servers.stop_all()
        for sidecar in self._sidecars.values():
            if sidecar.name != CLUSTER:  # told until the end how the last attempts ended
                sidecar.stop_for_good()
        self._state.timers.at(self._state.now_ns + CLOSE_BUDGET_NS, self._close_over)
        self._state.timers.at(self._state.now_ns + AWAY_BUDGET_NS, self._wait_over)

    def _close_over(self) -> None:
        if self.phase == Phase.CLOSE:
            late = "the cluster" if self._ledger.settled else "the store"
            self._exit(f"{late} did not finish in time")

    def _wait_over(self) -> None:
        """Wait no longer for an engine that is away; advance() looks at it."""
        self._patient = False

    def _exit(self, reason: str = "") -> None:
        self._enter(Phase.OVER, reason)
        self._state.out.append(Exit(self._code))

    def advance(self) -> None:
        """After every event: leave a phase that has nothing left to wait for."""
        if self.phase == Phase.DRAIN and not self._busy():
            self._stop("" if self._state.workers else "there are no workers")
        if self.phase == Phase.STOP and not self._state.workers:
            policy = self._state.policy
            self._enter(Phase.CLEANUP, "" if policy.cleanup else "nothing is configured")
            self._state.out.append(RunCleanup(policy.cleanup, policy.cleanup_timeout_ns))
            due_ns = self._state.now_ns + policy.cleanup_timeout_ns + CLEANUP_SLACK_NS
            self._state.timers.at(due_ns, self._cleanup_over)
        if self.phase == Phase.CLOSE and self._ledger.settled:
            if self._claims.settled:
                self._exit()
            elif self._claims.away and not self._patient:
                self._exit("the cluster's database does not answer: what ended last runs again")
