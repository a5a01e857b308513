"""The figures of the fleet, gathered in one go when somebody asks: see api/metrics.py."""

import heapq
import os
import platform
import time

from musterd import __version__
from musterd.ipc.resilience.breaker import BreakerState
from musterd.ipc.wire.messages import CANCELLED, EXPIRED, FAILED, PRIORITY_NAMES, SUCCEEDED
from musterd.supervisor.api.metrics import (
    BreakerFigures,
    FleetFigures,
    PoolFigures,
    ScheduleFigures,
    Times,
    WorkerFigures,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.core.model.gates import Site
from musterd.supervisor.core.model.memory_use import MemoryUse
from musterd.supervisor.core.model.pool import ForkServerState, Pool
from musterd.supervisor.core.model.slot import Cause
from musterd.supervisor.core.workers.sizing import expected
from musterd.supervisor.log import log
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import Store
from musterd.supervisor.views.cluster import cluster_figures
from musterd.supervisor.views.fleet import counted, fleet_state

SLOW_TURN_NS = 50_000_000
BREAKERS_MAX = 50  # told one by one: a bot may know thousands of sites
SCHEDULES_MAX = 200  # told one by one: each is a label of three metrics


class Figures:
    def __init__(self, shell: Shell, store: Store) -> None:
        self._shell = shell
        self._store = store
        self._started_at = shell.wall_ns() / 1e9
        self._python = platform.python_version()
        self._turns = Histogram()
        self._slow_turns = 0
        self._cpu_ns = time.thread_time_ns()  # of the loop's thread

    def begun(self) -> None:
        """Note that the loop begins: the time of the start counts for no turn."""
        self._cpu_ns = time.thread_time_ns()

    def turned(self, turn_ns: int) -> None:
        """Count a turn of the loop. Processor time tells a slow daemon from a busy machine."""
        self._turns.add(turn_ns)
        before_ns, self._cpu_ns = self._cpu_ns, time.thread_time_ns()
        if turn_ns > SLOW_TURN_NS:
            self._slow_turns += 1
            cpu_ns = self._cpu_ns - before_ns
            log.note(
                "loop.slow", "warning", seconds=f"{turn_ns / 1e9:.3f}", cpu=f"{cpu_ns / 1e9:.3f}"
            )

    def all(self) -> FleetFigures:
        shell, fleet = self._shell, self._shell.fleet
        memory = fleet.memory
        return FleetFigures(
            version=__version__,
            python=self._python,
            pid=os.getpid(),
            started_at=self._started_at,
            state=fleet_state(fleet, shell.ready),
            problem=shell.problem,
            pools=[_pool(pool, memory) for pool in fleet.pools.values()],
            breakers=_breakers(fleet),
            breaker_states=_breaker_states(fleet),
            breaker_transitions=fleet.breaker_transitions,
            schedules=[
                ScheduleFigures(
                    name,
                    each.record.runs,
                    each.record.skipped,
                    (each.next_ns or 0) / 1e9 if each.active else 0.0,
                )
                for name, each in list(fleet.schedules.items())[:SCHEDULES_MAX]
            ],
            memory_share=memory.share,
            memory_warning=fleet.policy.memory.warning,
            memory_critical=fleet.policy.memory.critical,
            memory_level=memory.level.name.lower(),
            commit_times=_times(self._store.commit_times),
            store_bytes=self._store.size_bytes,
            turn_times=_times(self._turns),
            slow_turns=self._slow_turns,
            cluster=cluster_figures(fleet, shell.now_ns()),
        )


def _pool(pool: Pool, memory: MemoryUse) -> PoolFigures:
    counters = pool.counters
    return PoolFigures(
        name=pool.name,
        submitted=counters.submitted + counters.withdrawn,
        rejected=counters.rejected,
        finished={
            SUCCEEDED: counters.succeeded,
            FAILED: counters.failed,
            CANCELLED: counters.cancelled,
            EXPIRED: counters.expired,
        },
        retried=counters.retried,
        fallbacks=counters.fallbacks,
        failures=pool.tally.failures,
        run_times=_times(pool.run_times),
        wait_times=_times(pool.wait_times),
        queued={
            name: level.size + level.waiting
            for name, level in zip(PRIORITY_NAMES, pool.queue.levels, strict=True)
        },
        waiting=pool.waiting,
        running=pool.leased,
        queue_size=pool.policy.queue_size,
        size=expected(pool),
        recommended=memory.recommended(pool),
        fatal=pool.fork_server == ForkServerState.FAILED,
        busy=pool.busy,
        restarts=counters.restarts,
        lost={str(cause): counters.lost.get(cause, 0) for cause in Cause},
        recycled=counters.recycled,
        orphans=counters.orphans,
        workers=[
            WorkerFigures(
                slot.name, slot.shown_state, slot.tasks_done, slot.restarts, slot.pss_bytes
            )
            for slot in pool.slots
        ],
        metrics=counted(pool),
        metrics_dropped=pool.tally.dropped,
    )


def _times(histogram: Histogram) -> Times:
    buckets = histogram.buckets
    end = len(buckets)
    while end and not buckets[end - 1]:
        end -= 1
    return Times(buckets[:end], histogram.total_ns)


def _breaker_states(fleet: Fleet) -> dict[str, int]:
    states = {str(state): 0 for state in BreakerState}
    for site in fleet.sites.values():
        states[site.breaker.state] += 1
    return states


def _breakers(fleet: Fleet) -> list[BreakerFigures]:
    """Return those that keep tasks away first, then those of the busiest sites."""
    most = heapq.nlargest(BREAKERS_MAX, fleet.sites.values(), key=_importance)
    return [
        BreakerFigures(
            site.target,
            str(site.breaker.state),
            site.inside,
            sum(lane.alive for lane in site.lanes if lane.waits_among is not None),
            site.breaker.failed,
        )
        for site in most
    ]


def _importance(site: Site) -> tuple[bool, int, int, str]:
    calm = site.breaker.state in (BreakerState.CLOSED, BreakerState.DISABLED)
    return (not calm, site.breaker.failures, site.inside, site.target)
