"""Sidecars: the lifecycle of processes beside the fleet, on which no task depends.

    down ── StartSidecar ──► starting ── SidecarReady ──► up
      ▲                           │ overdue: killed             │ no beat: killed
      └── a pause ── backoff ◄────┴───── SidecarExited ◄──────┘
                      fatal      it said that another try will not help; a reload tries again

`web` shows the fleet in a browser, `alerts` tells people what happens to the fleet, and `events`
tells programs. All of them speak to the daemon over control.sock like any other client.

A sidecar is restarted for as long as the daemon runs, with pauses that grow to a minute. After a
change of its policy the process is stopped, and the next one is started when it is gone: two would
want the same address, or the same file. A process is known by its number, so late news of a former
process are recognised.

A sidecar that finds that another daemon has its place (EXIT_TAKEN: the cluster has a live node of
this name) takes the daemon along: two of them would take turns for ever.
"""

from collections.abc import Callable
from enum import StrEnum

from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy
from musterd.supervisor.core.model.actions import (
    KillSidecar,
    StartSidecar,
    StopSidecar,
)
from musterd.supervisor.core.model.events import (
    ALERTS,
    CLUSTER,
    EVENTS,
    EXIT_TAKEN,
    WEB,
    SidecarBeat,
    SidecarExited,
    SidecarReady,
)
from musterd.supervisor.core.model.policy import FleetPolicy, RestartPolicy
from musterd.supervisor.core.model.slot import restart_pause_ns
from musterd.supervisor.core.model.state import State

# No task waits for a sidecar, so it has the time that a loaded machine takes to import modules.
START_NS = 30 * SECOND_NS
# A sidecar says every few seconds that it lives (web/server.py); a silent one is stopped or stuck.
SILENCE_NS = 30 * SECOND_NS
STOP_NS = 3 * SECOND_NS  # from SIGTERM to SIGKILL
RESTART = RestartPolicy(
    BackoffPolicy(base_ns=SECOND_NS, factor=2.0, max_ns=60 * SECOND_NS, jitter=0.1),
    pause_after=1000,
)


class SidecarState(StrEnum):
    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FATAL = "fatal"


class Sidecar:
    def __init__(
        self,
        state: State,
        name: str,
        wanted: Callable[[FleetPolicy], str],
        taken: Callable[[str], None],
    ) -> None:
        """`wanted` returns the build that a policy wants; "" for none. `taken` ends the daemon."""
        self._state = state
        self._taken = taken
        self.name = name
        self._wanted = wanted
        self.state = SidecarState.DOWN
        self.build = ""  # of the process, or of the next one; "": none is wanted
        self.number = 0  # of the process that lives, or lived last
        self.pid = 0
        self.address = ""
        self.restarts = 0
        self.reason = ""  # why the process is not up
        self.ready_ns = 0
        self._failures = 0  # in a row
        self._beat_ns = 0
        self._killed_for = ""

    @property
    def alive(self) -> bool:
        """Return whether there is a process, as far as is known."""
        return self.state in (SidecarState.STARTING, SidecarState.UP, SidecarState.STOPPING)

    def started(self) -> None:
        self.build = self._wanted(self._state.policy)
        if self.build and self._state.intake_open:
            self._start()

    def follow(self) -> None:
        """Apply another policy. A sidecar that was given up is tried again in any case."""
        before, self.build = self.build, self._wanted(self._state.policy)
        if self.alive:
            if self.build != before and self.state != SidecarState.STOPPING:
                self._stop()
        elif not self.build:
            self.state, self.reason = SidecarState.DOWN, ""
        elif self.build != before or self.state == SidecarState.FATAL:
            self._failures = 0
            self._start()

    def stop_for_good(self) -> None:
        """Stop the process and start no other: the daemon ends."""
        self.build = ""
        if self.alive and self.state != SidecarState.STOPPING:
            self._stop()
        elif not self.alive:
            self.state = SidecarState.DOWN

    def _start(self) -> None:
        self.number += 1
        self.state = SidecarState.STARTING
        self.pid, self.address, self.ready_ns, self._killed_for = 0, "", 0, ""
        self._state.out.append(StartSidecar(self.number, self.build, self.name))
        self._state.timers.at(self._state.now_ns + START_NS, self._overdue, self.number)

    def _stop(self) -> None:
        self.state = SidecarState.STOPPING
        self._state.out.append(StopSidecar(self.number, self.name))
        self._state.timers.at(self._state.now_ns + STOP_NS, self._stop_overdue, self.number)

    # -- what happens to it -------------------------------------------------------------------

    def ready(self, event: SidecarReady) -> None:
        if event.number != self.number or self.state != SidecarState.STARTING:
            return
        self.state = SidecarState.UP
        self.pid, self.address, self.reason = event.pid, event.address, ""
        self.ready_ns = self._beat_ns = self._state.now_ns
        self._report("ready", "info", reason=event.address)
        self._state.timers.at(self._beat_ns + SILENCE_NS, self._listen, self.number)

    def beat(self, event: SidecarBeat) -> None:
        if event.number == self.number:
            self._beat_ns = self._state.now_ns

    def exited(self, event: SidecarExited) -> None:
        if event.number != self.number or not self.alive:
            return
        was, self.pid, self.address = self.state, 0, ""
        if was == SidecarState.STOPPING:
            self.state, self.reason = SidecarState.DOWN, ""
            if self.build and self._state.intake_open:
                self._failures = 0
                self._start()
            return
        self.reason = self._killed_for or event.reason
        if event.code == EXIT_TAKEN and self.name == CLUSTER:
            self.state = SidecarState.FATAL
            self._report("fatal", "error", reason=self.reason)
            self._taken(self.reason)
            return
        if event.fatal and not self._killed_for:
            self.state = SidecarState.FATAL
            self._report("fatal", "error", reason=self.reason)
            return
        self._back_off(lasted_ns=self._state.now_ns - self.ready_ns if self.ready_ns else 0)

    def _back_off(self, lasted_ns: int) -> None:
        if lasted_ns >= RESTART.reset_ns:
            self._failures = 0
        self._failures += 1
        self.restarts += 1
        self.state = SidecarState.BACKOFF
        pause_ns = restart_pause_ns(RESTART, self._failures, self._state.rng)
        self._report("crashed", "warning", reason=self.reason, seconds=pause_ns / SECOND_NS)
        self._state.timers.at(self._state.now_ns + pause_ns, self._again, self.number)

    def _again(self, number: int) -> None:
        if number == self.number and self.state == SidecarState.BACKOFF:
            self._start()

    def _overdue(self, number: int) -> None:
        if number == self.number and self.state == SidecarState.STARTING:
            self._kill(f"it was not up within {START_NS / SECOND_NS:g} s")

    def _listen(self, number: int) -> None:
        if number != self.number or self.state != SidecarState.UP or self._killed_for:
            return
        if self._state.now_ns - self._beat_ns >= SILENCE_NS:
            self._kill(f"it gave no sign of life for {SILENCE_NS / SECOND_NS:g} s")
        else:
            self._state.timers.at(self._beat_ns + SILENCE_NS, self._listen, number)

    def _stop_overdue(self, number: int) -> None:
        if number == self.number and self.state == SidecarState.STOPPING:
            self._state.out.append(KillSidecar(number, self.name))

    def _kill(self, why: str) -> None:
        """Kill the process; SidecarExited follows."""
        self._killed_for = f"killed: {why}"
        self._state.out.append(KillSidecar(self.number, self.name))

    def _report(self, what: str, level: str, *, reason: str, seconds: float = 0.0) -> None:
        self._state.report(f"{self.name}.{what}", level, reason=reason, seconds=seconds)


def make_sidecars(state: State, taken: Callable[[str], None]) -> dict[str, Sidecar]:
    """Make all sidecars, by name. `taken` ends the daemon, for the reason given."""
    wanted: dict[str, Callable[[FleetPolicy], str]] = {
        WEB: lambda policy: policy.web,
        ALERTS: lambda policy: policy.alerts,
        EVENTS: lambda policy: policy.events,
        CLUSTER: lambda policy: policy.cluster,
    }
    return {name: Sidecar(state, name, build, taken) for name, build in wanted.items()}
