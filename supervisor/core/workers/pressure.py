"""Memory pressure: shrinks the fleet at once and lets it grow back step by step.

              warning          critical         10 s more          10 s more
    NORMAL ───────────► HALF ───────────► ONE ───────────► SACRIFICE ───────► KILL
                        each pool         one worker       pools with          workers still
                        is halved         per pool         `sacrifice`: none   draining are killed

The stage rises with one sample, and falls one step after `calm`, a time in which use stayed a
margin below the line of the level. A level that comes back soon after a step down doubles that
time, so that use which swings around the line does not make the fleet swing. Workers that give way
finish their task; only the last stage kills them, and their tasks go back to the queue.
"""

from enum import IntEnum

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.events import MemorySampled
from musterd.supervisor.core.model.memory_use import MemoryLevel, shown
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.workers.lifecycle import WorkerLifecycle

# With less than this in use, a stall is not ours: another group is at its own limit.
STALL_SHARE_MIN = 0.5
RELAPSE_NS = 60 * SECOND_NS  # a level that comes back within this time was left too soon
CALM_GROWTH_MAX = 16  # the most that `calm` grows to, times its configured value
LARGEST_SHOWN = 3


class Stage(IntEnum):
    NORMAL = 0
    HALF = 1
    ONE = 2
    SACRIFICE = 3
    KILL = 4


_MESSAGES = {
    Stage.HALF: ("memory.warning", "warning", "each pool is halved"),
    Stage.ONE: ("memory.critical", "error", "each pool keeps one worker"),
    Stage.SACRIFICE: ("memory.sacrifice", "error", "pools marked as sacrifice have no worker"),
    Stage.KILL: ("memory.kill", "error", "workers that are still at a task are killed"),
}


class Governor:
    def __init__(self, state: State, lifecycle: WorkerLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._policy = state.policy.memory
        self.stage = Stage.NORMAL
        self._entered_ns = 0
        self._calm_since_ns: int | None = None
        self._calm_ns = self._policy.calm_ns
        self._lowered_ns: int | None = None

    def follow(self) -> None:
        """Apply another policy; the next sample is judged by it."""
        self._policy = self._state.memory.policy = self._state.policy.memory
        self._calm_ns = self._policy.calm_ns
        if not self._policy.watched:
            self._state.memory.forget()
        if not self._policy.enabled and self.stage != Stage.NORMAL:
            self._enter(Stage.NORMAL)

    def welcome(self, pool: Pool) -> None:
        """Limit a new pool to what the stage allows."""
        pool.limit = _limit(self.stage, pool)

    def sampled(self, event: MemorySampled) -> None:
        state = self._state
        state.memory.note(event, state.now_ns, state.pools.values())
        if not state.intake_open or not self._policy.enabled:
            return
        self._judge()
        if self.stage == Stage.KILL:
            self._kill_draining()
        self._lifecycle.sizing.readmit()

    # -- which stage --------------------------------------------------------------------------

    def _judge(self) -> None:
        now_ns, seen = self._state.now_ns, self._seen()
        if seen > self._state.memory.level:
            self._rise(Stage(seen))
        elif seen == MemoryLevel.CRITICAL:
            self._calm_since_ns = None
            patient = now_ns - self._entered_ns < self._policy.patience_ns
            if self.stage < Stage.KILL and not patient:
                self._rise(Stage(self.stage + 1))
        elif self.stage == Stage.NORMAL or not self._calm():
            self._calm_since_ns = None
        elif self._calm_since_ns is None:
            self._calm_since_ns = now_ns
        elif now_ns - self._calm_since_ns >= self._calm_ns:
            self._fall()

    def _seen(self) -> MemoryLevel:
        """Return the level that this sample alone shows."""
        sample, policy, share = self._state.memory.sample, self._policy, self._state.memory.share
        assert sample is not None
        stalls = share >= STALL_SHARE_MIN and policy.pressure > 0
        if share >= policy.critical or (stalls and sample.stalled_full >= policy.pressure):
            return MemoryLevel.CRITICAL
        if share >= policy.warning or (stalls and sample.stalled_some >= policy.pressure):
            return MemoryLevel.WARNING
        return MemoryLevel.NORMAL

    def _calm(self) -> bool:
        """Return whether this sample is well below the line of the present level."""
        memory, policy = self._state.memory, self._policy
        assert memory.sample is not None
        critical = memory.level == MemoryLevel.CRITICAL
        line = policy.critical if critical else policy.warning
        stalled = memory.sample.stalled_full if critical else memory.sample.stalled_some
        stalls = memory.share >= STALL_SHARE_MIN and policy.pressure > 0
        return memory.share < line - policy.margin and not (
            stalls and stalled >= policy.pressure / 2
        )

    def _rise(self, stage: Stage) -> None:
        now_ns = self._state.now_ns
        if self._lowered_ns is not None and stage <= Stage.ONE:
            if now_ns - self._lowered_ns < RELAPSE_NS + self._calm_ns:
                self._calm_ns = min(self._calm_ns * 2, self._policy.calm_ns * CALM_GROWTH_MAX)
            else:
                self._calm_ns = self._policy.calm_ns
        self._enter(stage)
        name, level, measure = _MESSAGES[stage]
        self._state.report(name, level, reason=f"{self._why()}: {measure}{self._largest()}")

    def _fall(self) -> None:
        seconds = self._calm_ns / SECOND_NS
        lower = Stage(min(self.stage, Stage.SACRIFICE) - 1)
        if self.stage > Stage.ONE and not any(p.policy.sacrifice for p in self._pools()):
            lower = Stage.HALF  # the stages between change nothing
        self._enter(lower)
        self._lowered_ns = self._state.now_ns
        if self._calm():  # below the next line as well
            self._calm_since_ns = self._state.now_ns
        how = f"{self._state.memory.described()}, calm for {seconds:g} s"
        if lower == Stage.NORMAL:
            self._state.report("memory.normal", reason=f"{how}: workers return as memory allows")
        else:
            self._state.report("memory.recovering", reason=f"{how}: up to {_allowed(lower)}")

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._state.memory.level = MemoryLevel(min(stage, Stage.ONE))
        self._entered_ns = self._state.now_ns
        self._calm_since_ns = None
        for pool in self._pools():
            pool.limit = _limit(stage, pool)
        for pool in self._pools():
            self._lifecycle.fit(pool)

    # -- what is done -------------------------------------------------------------------------

    def _pools(self) -> list[Pool]:
        return list(self._state.pools.values())

    def _kill_draining(self) -> None:
        for pool in self._pools():
            for slot in pool.slots:
                if slot.held and slot.state == SlotState.DRAINING:
                    self._lifecycle.kill_held(slot, "memory stayed critical")

    def _why(self) -> str:
        memory, policy = self._state.memory, self._policy
        assert memory.sample is not None
        line = policy.critical if self.stage >= Stage.ONE else policy.warning
        if memory.share >= line:
            name = "critical" if self.stage >= Stage.ONE else "warning"
            return f"{memory.described()}, over {name} = {line:.0%}"
        stalled = (
            memory.sample.stalled_full if self.stage >= Stage.ONE else (memory.sample.stalled_some)
        )
        return (
            f"processes wait for memory {stalled:.0%} of the time, over pressure = "
            f"{policy.pressure:.0%}; {memory.described()}"
        )

    def _largest(self) -> str:
        slots = [slot for pool in self._pools() for slot in pool.everyone if slot.pss_bytes]
        slots.sort(key=lambda slot: -slot.pss_bytes)
        if not slots:
            return ""
        told = ", ".join(f"{slot.name} {shown(slot.pss_bytes)}" for slot in slots[:LARGEST_SHOWN])
        return f"; the largest workers: {told}"


def _limit(stage: Stage, pool: Pool) -> int | None:
    match stage:
        case Stage.NORMAL:
            return None
        case Stage.HALF:
            return max(1, pool.size // 2)
        case Stage.ONE:
            return 1
        case _:
            return 0 if pool.policy.sacrifice else 1


def _allowed(stage: Stage) -> str:
    return "half of each pool" if stage == Stage.HALF else "one worker per pool"
