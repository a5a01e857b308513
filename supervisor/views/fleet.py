"""The state of the fleet as people see it: pools, workers and tasks, read from the core."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from musterd import __version__
from musterd.ipc.wire.messages import PRIORITY_NAMES, QUEUED, RUNNING, WAITING, TaskView
from musterd.ipc.wire.resolving import NAMES_SHOWN_MAX, Resolved
from musterd.supervisor.api.status import (
    BACKOFF,
    FATAL,
    STARTING,
    STOPPED,
    UP_STATES,
    FleetStatus,
    MetricStatus,
    PoolStatus,
    WebStatus,
    WorkerStatus,
)
from musterd.supervisor.api.status import RUNNING as SLOT_RUNNING
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.events import EVENTS, WEB
from musterd.supervisor.core.model.lanes import Lane
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import Cause, Slot, SlotState
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.core.tasks.debugging import DebugSession
from musterd.supervisor.core.workers.sidecar import Sidecar
from musterd.supervisor.core.workers.sizing import HELD_BACK, expected
from musterd.supervisor.store.interface import StoredTask
from musterd.supervisor.views.cluster import cluster_status

_SHOWN = {
    TaskState.NEW: QUEUED,
    TaskState.QUEUED: QUEUED,
    TaskState.WAITING: WAITING,
    TaskState.LEASED: RUNNING,
    TaskState.ENDING: RUNNING,
    TaskState.JOINED: WAITING,
}


def fleet_status(
    fleet: Fleet,
    now_ns: int,
    *,
    pid: int,
    started_ns: int,
    containment: Mapping[str, tuple[str, str]],
    problem: str = "",
    ready: bool = True,
    last_words: Callable[[str], str] = lambda _: "",
) -> FleetStatus:
    """Return the status of the whole fleet.

    `ready`: the fleet has been up once since the start. `last_words` returns the last output of the
    worker of a slot.
    """
    sessions = fleet.debugged
    pools = [pool_status(pool, now_ns, last_words, sessions) for pool in fleet.pools.values()]
    modes = sorted({mode for mode, _ in containment.values()})
    reasons = sorted({why for _, why in containment.values() if why})
    return FleetStatus(
        version=__version__,
        pid=pid,
        uptime_seconds=(now_ns - started_ns) / 1e9,
        state=fleet_state(fleet, ready),
        pools=pools,
        containment=", ".join(modes),
        containment_reason="; ".join(reasons),
        problem=problem,
        web=web_status(fleet.sidecars[WEB], now_ns),
        events=web_status(fleet.sidecars[EVENTS], now_ns),
        cluster=cluster_status(fleet, now_ns),
    )


def web_status(web: Sidecar, now_ns: int) -> WebStatus | None:
    if not web.build and not web.alive:
        return None
    return WebStatus(
        state=web.state,
        address=web.address,
        pid=web.pid,
        uptime_seconds=(now_ns - web.ready_ns) / 1e9 if web.pid else 0.0,
        restarts=web.restarts,
        reason=web.reason,
    )


def fleet_state(fleet: Fleet, ready: bool) -> str:
    if fleet.phase == Phase.UP:
        if not ready:
            return "starting"
        return "degraded" if degraded(fleet) else "running"
    return "draining" if fleet.phase <= Phase.DRAIN else "stopping"


def degraded(fleet: Fleet) -> bool:
    """Whether a pool or worker is down that nobody has stopped."""
    return any(
        pool.fork_server == ForkServerState.FAILED
        or any(slot.state in (FATAL, BACKOFF) for slot in pool.slots)
        for pool in fleet.pools.values()
    )


def settled(fleet: Fleet) -> bool:
    """Whether every pool is up, but for slots that have given up."""
    return all(_settled(pool) for pool in fleet.pools.values())


def _settled(pool: Pool) -> bool:
    up = sum(slot.shown_state in UP_STATES for slot in pool.slots)
    given_up = sum(_given_up(slot) for slot in pool.slots)
    wanted = pool.target
    if pool.scaler is not None:
        wanted = min(wanted, pool.scaler.policy.min)
    return up + given_up >= wanted


def _given_up(slot: Slot) -> bool:
    """Whether the slot will not run soon: stopped, held back, FATAL, or in the long pause that
    follows many failures."""
    if slot.state == SlotState.BACKOFF:
        return slot.failures >= slot.pool.policy.restart.pause_after
    return slot.state in (SlotState.FATAL, SlotState.STOPPED)


def headline(fleet: Fleet, ready: bool, problem: str = "") -> str:
    """Return the whole fleet in one line, with what is wrong first."""
    pools = fleet.pools.values()
    up = sum(slot.shown_state in UP_STATES for pool in pools for slot in pool.slots)
    leased = sum(pool.leased for pool in pools)
    if fleet.phase != Phase.UP:
        phase = fleet.phase.name.lower()
        return f"stopping ({phase}): running tasks: {leased}, workers left: {up}"
    size = sum(pool.size for pool in pools)
    queued = sum(pool.live - pool.leased for pool in pools)
    done = sum(pool.counters.succeeded for pool in pools)
    busy = sum(pool.busy for pool in pools)
    figures = f"{up} of {size} workers, {busy} busy; {queued} tasks waiting, {done} done"
    wrong = [text for pool in pools if (text := _shortcoming(pool))]
    wrong += [problem] if problem else []
    if not ready:
        return f"starting: {figures}"
    return f"degraded: {'; '.join(wrong)}; {figures}" if wrong else figures


def _shortcoming(pool: Pool) -> str:
    """Return in a few words what is down in a pool that nobody has stopped."""
    if pool.fork_server == ForkServerState.FAILED:
        return f"{pool.name} is FATAL"
    bad = [slot.state for slot in pool.slots if slot.state in (SlotState.FATAL, SlotState.BACKOFF)]
    held = sum(slot.held for slot in pool.slots)
    words = [f"{bad.count(state)} {state}" for state in dict.fromkeys(bad)]
    words += [f"{held} {HELD_BACK}"] if held else []
    return f"{pool.name}: {', '.join(words)}" if words else ""


def pool_status(
    pool: Pool,
    now_ns: int,
    last_words: Callable[[str], str] = lambda _: "",
    sessions: Mapping[int, DebugSession] = MappingProxyType({}),
) -> PoolStatus:
    """Return the status of a pool; `sessions` are the handlers that are debugged, by worker."""

    def shown(slot: Slot) -> WorkerStatus:
        return worker_status(slot, now_ns, last_words, sessions.get(slot.worker))

    workers = [shown(slot) for slot in pool.slots]
    states = [worker.state for worker in workers]
    running = sum(state in UP_STATES for state in states)
    counters = pool.counters
    return PoolStatus(
        name=pool.name,
        state=_pool_state(pool, states, running),
        size=expected(pool),
        running=running,
        busy=pool.busy,
        queued={
            name: level.size + level.waiting
            for name, level in zip(PRIORITY_NAMES, pool.queue.levels, strict=True)
        },
        waiting=pool.waiting,
        submitted=counters.submitted,
        succeeded=counters.succeeded,
        failed=counters.failed,
        cancelled=counters.cancelled,
        expired=counters.expired,
        restarts=counters.restarts,
        lost=by_cause(counters.lost),
        failures=dict(pool.tally.failures),
        metrics=counted(pool),
        metrics_dropped=pool.tally.dropped,
        orphans=counters.orphans,
        recycled=counters.recycled,
        reason=_pool_reason(pool) or _held(pool),
        halt=pool.halt,
        tasks=[f"{pool.name}.{method}" for method in pool.declarations or ()],
        workers=workers,
        leaving=[shown(pool.leaving)] if pool.leaving is not None else [],
        **_scaling(pool),
    )


def counted(pool: Pool) -> list[MetricStatus]:
    """Return the metrics that the pool's handlers have counted."""
    return [
        MetricStatus(name=name, value=each.value, labels=dict(labels), gauge=each.gauge)
        for (name, labels), each in pool.tally.series.items()
    ]


def _scaling(pool: Pool) -> dict[str, Any]:
    scaler = pool.scaler
    if scaler is None:
        return {}
    return {
        "scaling": "manual" if scaler.manual else "auto",
        "min": scaler.policy.min,
        "max": scaler.policy.max,
        "scaled": scaler.why,
        "held": scaler.held,
    }


def _held(pool: Pool) -> str:
    held = sum(slot.held for slot in pool.slots)
    return f"{held} of {pool.size} workers are {HELD_BACK}" if held else ""


def _pool_reason(pool: Pool) -> str:
    """Return what people should know about the pool, or ""."""
    if pool.removed:
        return "it was removed and is being drained"
    if pool.arriving:
        return "its tasks are being read back"
    if pool.reason or pool.rollout is None:
        problem = pool.rollout_problem and f"its workers were not replaced: {pool.rollout_problem}"
        return pool.reason or problem
    return f"its workers are being replaced ({pool.rollout.phase})"


def _pool_state(pool: Pool, states: list[str], running: int) -> str:
    """Return the state of a pool: the worst state of its slots that matters."""
    if pool.fork_server == ForkServerState.FAILED:
        return FATAL
    for state in (FATAL, BACKOFF, STARTING):
        if state in states:
            return state
    return SLOT_RUNNING if running else STOPPED


def debugged(slot: Slot, session: DebugSession, now_ns: int) -> str:
    """Return where a task waits for a debugger and for how long, or who debugs it."""
    if session.who:
        return f"debugged at {session.where} by {session.who}"
    left = max(0, session.until_ns - now_ns) / 1e9
    return f"at a breakpoint, {session.where}: musterctl debug {slot.name} ({left:.0f} s left)"


def worker_status(
    slot: Slot,
    now_ns: int,
    last_words: Callable[[str], str],
    session: DebugSession | None = None,
) -> WorkerStatus:
    task = next(iter(slot.leases.values()), None)
    if session is not None:
        task = slot.leases.get(session.lease, task)
    return WorkerStatus(
        name=slot.name,
        state=slot.shown_state,
        pid=slot.pid,
        memory_bytes=slot.pss_bytes,
        task_id=task.spec.id if task is not None else "",
        method=task.route.method if task is not None else "",
        uptime_seconds=(now_ns - slot.ready_ns) / 1e9 if slot.ready_ns else 0.0,
        task_seconds=(now_ns - task.leased_ns) / 1e9 if task is not None else 0.0,
        restarts=slot.restarts,
        lost=by_cause(slot.lost),
        recycled=slot.recycled,
        tasks_done=slot.tasks_done,
        reason=slot.reason if not slot.ready_ns else "",
        halt=slot.halt,
        debug=debugged(slot, session, now_ns) if session is not None else "",
        output=last_words(slot.name) if slot.state in (BACKOFF, FATAL) else "",
    )


def by_cause(lost: Mapping[Cause, int]) -> dict[str, int]:
    return {str(cause): count for cause, count in lost.items()}


def shown_state(task: Task) -> str:
    return _SHOWN[task.state]


def live_view(task: Task, now_ns: int) -> TaskView:
    """Return the view of a task that has not ended."""
    spec = task.spec
    waits_for = ""
    if task.debt is not None:
        waits_for = f"the retry budget of {spec.target}"
    elif task.state == TaskState.WAITING:
        what = "next attempt" if task.attempt else "delay"
        waits_for = f"{what} in {max(0, task.queued_ns - now_ns) / 1e9:.1f} s"
    elif task.state == TaskState.JOINED:
        waits_for = f"task {task.follows}, which has the same key"
    elif task.state in (TaskState.NEW, TaskState.ENDING):
        waits_for = "commit"
    elif task.state == TaskState.QUEUED:
        assert task.lane is not None
        waits_for = why_queued(task.route.pool, task.lane, now_ns)
    return TaskView(
        id=spec.id,
        name=spec.name,
        state=shown_state(task),
        priority=PRIORITY_NAMES[spec.priority],
        target=spec.target,
        attempt=task.attempt,
        crashes=task.crashes,
        worker=task.slot.name if task.slot is not None else "",
        progress=task.progress.fraction if task.progress is not None else 0.0,
        progress_text=task.progress.text if task.progress is not None else "",
        submitted_at=task.submitted_wall_ns / 1e9,
        waits_for=waits_for,
    )


def why_queued(pool: Pool, lane: Lane, now_ns: int) -> str:
    """Return what the tasks of a lane wait for."""
    if pool.halt:
        return f"musterctl resume {pool.name}: the pool is {pool.halt}"
    at_gate = lane.waits_among is not None and lane.gate is not None
    return (lane.gate.why(now_ns) if at_gate and lane.gate else "") or "a free worker"


def stored_view(stored: StoredTask) -> TaskView:
    """Return the view of a task as the store has it."""
    spec, outcome = stored.spec, stored.outcome
    return TaskView(
        id=spec.id,
        name=spec.name,
        state=stored.state,
        priority=PRIORITY_NAMES[spec.priority],
        target=spec.target,
        attempt=outcome.attempts if outcome is not None else stored.attempt,
        crashes=stored.crashes,
        submitted_at=stored.submitted_wall_ns / 1e9,
        finished_at=stored.finished_wall_ns / 1e9,
        run_seconds=outcome.run_ns / 1e9 if outcome is not None else 0.0,
        failure=outcome.failure if outcome is not None else None,
        value=outcome.value if outcome is not None else b"",
        source=outcome.source if outcome is not None else "",
        attempts=stored.attempts,
    )


def recommended_workers(fleet: Fleet) -> dict[str, int]:
    """Return how many workers each pool should have."""
    return {pool.name: fleet.memory.recommended(pool) for pool in fleet.pools.values()}


def tasks_at(fleet: Fleet, place: str) -> Resolved:
    """Return the tasks that run the function defined there; their request is not filled in."""
    most = NAMES_SHOWN_MAX
    pools = [pool for pool in fleet.pools.values() if not pool.removed]
    unloaded = [pool for pool in pools if pool.declarations is None]
    failed = [pool.name for pool in unloaded if pool.fork_server == ForkServerState.FAILED]
    loading = [pool.name for pool in unloaded if pool.fork_server != ForkServerState.FAILED]
    tasks = [
        f"{pool.name}.{method}"
        for pool in pools
        for method, declared in (pool.declarations or {}).items()
        if declared.place == place
    ]
    names = [pool.name for pool in pools]
    return Resolved(0, tasks[:most], loading[:most], failed[:most], names[:most])
