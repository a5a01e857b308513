"""A sidecar driven by a seed: it dies, hangs, starts late or never, is wanted or not.

`SidecarWorld(seed).run()` is one scenario: a time of faults and reloads, then a calm in which the
sidecar has to come up if it is wanted, then the end of the daemon. The following must hold:

- there is never a second process beside one that lives: the two would want the same address;
- a healthy sidecar is killed only when another is wanted or the daemon ends;
- a hanging sidecar is killed in time, and started again;
- none is started after the sidecar was ended for good;
- a cluster sidecar whose place is taken ends the daemon, which exits with that code.
"""

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import structs

from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events
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
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.core.workers.sidecar import (
    SILENCE_NS,
    START_NS,
    STOP_NS,
    Sidecar,
    SidecarState,
)
from simulation.door import ask
from simulation.profile import MS, SEC, US

BEAT_NS = 5 * SEC
FAULTS_NS = 600 * SEC
CALM_NS = 200 * SEC
SLACK_NS = 1 * SEC
BUILDS = ("", "a", "b")
NAMES = (WEB, ALERTS, EVENTS, CLUSTER)


class Process:
    def __init__(self, number: int, build: str, now_ns: int) -> None:
        self.number = number
        self.build = build
        self.alive = True
        self.ready = False
        self.hangs_since_ns = 0  # 0: healthy
        self.deaf = False  # ignores SIGTERM
        self.code = 0
        self.made_ns = now_ns


class SidecarWorld:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now_ns = 1
        self.name = NAMES[seed % len(NAMES)]
        self.policy = self.wanting(FleetPolicy(pools=()), self.rng.choice(BUILDS))
        self.fleet = Fleet(self.policy, Random(seed + 1))
        self.sidecar: Sidecar = self.fleet.sidecars[self.name]
        self.process: Process | None = None
        self.calm = self.ending = self.over = False
        self.starts = self.kills = 0
        self.code = 0  # with which the daemon has to exit
        self.exits: list[int] = []
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def wanting(self, policy: FleetPolicy, build: str) -> FleetPolicy:
        return structs.replace(policy, **{self.name: build})

    @property
    def wanted(self) -> str:
        build: str = getattr(self.policy, self.name)
        return build

    @property
    def _is_left_to_the_shell(self) -> bool:
        """Whether the daemon is over; it ends the cluster sidecar at last."""
        return bool(self.exits) and self.name == CLUSTER

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, call, args))

    def run(self) -> None:
        self.tell(events.Started())
        for _ in range(self.rng.randint(0, 12)):
            fault = self.rng.choice((self._crash, self._hang, self._reload, self._reload))
            self.after(self.rng.randrange(FAULTS_NS), fault)
        if self.rng.random() < 0.3:
            self.after(self.rng.randrange(FAULTS_NS), self._find_taken)
        self.after(FAULTS_NS, self._calm_down)
        self.after(FAULTS_NS + CALM_NS, self._end)
        while not self.over:
            due_ns = None if self._is_left_to_the_shell else self.fleet.next_deadline()
            if due_ns is not None and (not self._heap or due_ns <= self._heap[0][0]):
                self.now_ns = max(self.now_ns, due_ns)
                self.tell(events.Ticked())
                continue
            when_ns, _, call, args = heapq.heappop(self._heap)
            self.now_ns = max(self.now_ns, when_ns)
            call(*args)

    # -- faults -------------------------------------------------------------------------------

    def _crash(self) -> None:
        if self.process is not None:
            self._die(self.process)

    def _hang(self) -> None:
        if self.process is not None and not self.process.hangs_since_ns:
            self.process.hangs_since_ns = self.now_ns
            limit_ns = max(START_NS, SILENCE_NS) + STOP_NS + SLACK_NS
            self.after(limit_ns, self._check_hung, self.process)

    def _check_hung(self, process: Process) -> None:
        killed = not process.alive or self._is_left_to_the_shell
        assert killed, "it hangs, and nobody has killed it"

    def _reload(self) -> None:
        self.policy = self.wanting(self.policy, self.rng.choice(BUILDS))
        self.tell(events.PolicyChanged(self.policy))

    def _find_taken(self) -> None:
        """The process ends with the code that means more than its own end, for one of them."""
        if self.process is not None and self.process.alive:
            self.process.code = EXIT_TAKEN
            self._die(self.process)

    def _calm_down(self) -> None:
        if self.ending:
            return
        self.calm = True
        self.tell(events.PolicyChanged(self.policy))  # a sidecar that was given up is tried again

    def _end(self) -> None:
        if self.ending:
            return
        state = self.sidecar.state
        wanted = SidecarState.UP if self.wanted else SidecarState.DOWN
        assert state == wanted, f"in the calm it is {state}, not {wanted}"
        assert not self.wanted or (self.process and self.process.build == self.wanted)
        if self.rng.random() < 0.3:
            self._crash()
        self.ending = True
        self.tell(events.ShutdownRequested("the end"))
        self._close()

    def _close(self) -> None:
        self.tell(events.CleanupFinished())
        self.after(STOP_NS + SLACK_NS, self._finish)

    def _finish(self) -> None:
        assert self.exits == [self.code], f"the daemon exits with {self.exits}, not {self.code}"
        assert self.process is None or self._is_left_to_the_shell, "it outlives the daemon"
        self.over = True

    # -- the process --------------------------------------------------------------------------

    def _start(self, action: act.StartSidecar) -> None:
        assert self.process is None, "a second one was started beside the first"
        assert action.name == self.name, "it is not this one that is wanted"
        assert action.build == self.wanted, "it is made of what is not wanted"
        told = self.name == CLUSTER and not self.code  # how the last tasks ended
        assert told or not self.ending, "it is started although the daemon ends"
        self.starts += 1
        process = self.process = Process(action.number, action.build, self.now_ns)
        chance = 1.0 if self.calm else self.rng.random()
        process.deaf = not self.calm and self.rng.random() < 0.2
        boot_ns = self.rng.randrange(100 * MS, 3 * SEC)
        if chance < 0.1:
            self.after(boot_ns, self._die, process, self.rng.random() < 0.3)
        elif chance < 0.2:
            process.hangs_since_ns = self.now_ns
            self.after(START_NS + STOP_NS + SLACK_NS, self._check_hung, process)
        else:
            self.after(boot_ns, self._come_up, process)

    def _come_up(self, process: Process) -> None:
        if process.alive and not process.hangs_since_ns:
            process.ready = True
            self.tell(SidecarReady(process.number, 4242, "http://127.0.0.1:7717", self.name))
            self.after(BEAT_NS, self._beat, process)

    def _beat(self, process: Process) -> None:
        if process.alive and not process.hangs_since_ns:
            self.tell(SidecarBeat(process.number, self.name))
            self.after(BEAT_NS, self._beat, process)

    def _die(self, process: Process, fatal: bool = False) -> None:
        if process.alive:
            process.alive = False
            fatal = fatal and not self.calm
            self.after(self.rng.randrange(20 * US, 5 * MS), self._tell_exit, process, fatal)

    def _tell_exit(self, process: Process, fatal: bool) -> None:
        self.process = None
        stopping = self.sidecar.state == SidecarState.STOPPING
        taken = process.code == EXIT_TAKEN and self.name == CLUSTER and not stopping
        begins = taken and not self.ending
        if begins:
            self.ending, self.code = True, EXIT_TAKEN
        self.tell(SidecarExited(process.number, "it ended", fatal, self.name, process.code))
        if begins:
            self._close()

    def _stop(self, action: act.StopSidecar) -> None:
        process = self.process
        if process is None or process.number != action.number or process.deaf:
            return
        if not process.hangs_since_ns:
            self.after(self.rng.randrange(1 * MS, 1 * SEC), self._die, process)

    def _kill(self, action: act.KillSidecar) -> None:
        process = self.process
        if process is None or process.number != action.number:
            return
        unwanted = self.ending or process.build != self.wanted
        was_unwanted = self.sidecar.state == SidecarState.STOPPING
        assert process.hangs_since_ns or unwanted or was_unwanted, "it was well and is killed"
        self.kills += 1
        self._die(process)

    def _exited(self, action: act.Exit) -> None:
        self.exits.append(action.code)

    def tell(self, event: object) -> None:
        if self._is_left_to_the_shell:
            return
        for action in ask(self.fleet, self.now_ns, event):
            carry_out = self.carried_out.get(type(action))
            if carry_out is not None:
                carry_out(self, action)
        web = self.sidecar
        alive = self.process is not None and self.process.alive
        assert not alive or web.alive, f"it lives, and the core says that it is {web.state}"

    # Only actions about the sidecar: this world has nothing else.
    carried_out: dict[type, Callable[["SidecarWorld", Any], None]] = {  # noqa: RUF012  # a table
        act.StartSidecar: _start,
        act.StopSidecar: _stop,
        act.KillSidecar: _kill,
        act.Exit: _exited,
    }
