"""Connect the probe with the daemon: workers to measure, samples as events, status, statistics."""

from pathlib import Path

from msgspec import structs

from musterd.supervisor.api.memory import (
    MachineFigures,
    MemoryStatus,
    PoolMemory,
    SourceStatus,
    WorkerMemory,
)
from musterd.supervisor.config.schema import MemoryConfig, MonitorConfig
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.events import MemorySampled
from musterd.supervisor.core.model.memory_use import MemoryUse, shown
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.log import log
from musterd.supervisor.memory.probe import Probe
from musterd.supervisor.processes.spawner import Spawner


class MemoryWatch:
    def __init__(
        self, config: MemoryConfig, monitor: MonitorConfig, spawner: Spawner, state_dir: Path
    ) -> None:
        self._config = config
        self._enabled = monitor.enabled
        self._spawner = spawner
        self._probe = Probe(config.check_interval_ns / 1e9, state_dir)
        self._told_ns = 0

    def open(self, now_ns: int) -> MemorySampled | None:
        """Start the probe; return the first sample, None if memory is not watched."""
        self._told_ns = now_ns
        self._probe.look(on=self._enabled)
        if self._enabled:
            return self._probe.start()
        self._probe.begin()
        return None

    def follow(self, config: MemoryConfig, monitor: MonitorConfig) -> None:
        """Apply a changed configuration."""
        self._config = config
        self._enabled = monitor.enabled
        self._probe.look(on=monitor.enabled)
        self._probe.look_every(config.check_interval_ns / 1e9)

    def fileno(self) -> int:
        return self._probe.fileno()

    def hear(self) -> MemorySampled | None:
        self._probe.watch(self._spawner.inits())
        sample = self._probe.take()
        return sample if self._enabled else None

    def close(self) -> None:
        self._probe.close()

    def status(self, fleet: Fleet, now_ns: int) -> MemoryStatus:
        return memory_status(fleet, now_ns, self._probe.figures, self._probe.notifications)

    def account(self, fleet: Fleet, now_ns: int) -> None:
        """Log the line of statistics when it is due."""
        interval_ns = self._config.statistics_ns
        if not self._enabled or not interval_ns or now_ns - self._told_ns < interval_ns:
            return
        self._told_ns = now_ns
        status = self.status(fleet, now_ns)
        machine = status.machine
        log.note(
            "machine.statistics",
            memory=fleet.memory.described(),
            workers=shown(sum(each.memory_bytes for each in status.workers)),
            cpu=f"{machine.cpu_share:.0%} of {machine.cpus}",
            load=f"{machine.load:.2f}",
            swap=f"{shown(machine.swap_used_bytes)} of {shown(machine.swap_total_bytes)}",
            disk=f"{shown(machine.disk_used_bytes)} of {shown(machine.disk_total_bytes)}",
            disk_read=f"{shown(machine.disk_read_rate)}/s",
            disk_written=f"{shown(machine.disk_write_rate)}/s",
            received=f"{shown(machine.network_received_rate)}/s",
            sent=f"{shown(machine.network_sent_rate)}/s",
            supervisor=f"{shown(machine.supervisor_rss_bytes)}, "
            f"{machine.supervisor_cpu_share:.1%} of a processor",
        )


def memory_status(
    fleet: Fleet, now_ns: int, figures: MachineFigures, notifications: int
) -> MemoryStatus:
    memory, sample, tightest = fleet.memory, fleet.memory.sample, fleet.memory.tightest
    return MemoryStatus(
        watched=memory.policy.watched,
        enabled=memory.policy.enabled,
        level=memory.level.name.lower(),
        stage=fleet.stage.name.lower(),
        share=memory.share,
        source=tightest.name if tightest is not None else "",
        warning=memory.policy.warning,
        critical=memory.policy.critical,
        sources=[
            SourceStatus(**structs.asdict(each), share=each.share)
            for each in (sample.sources if sample is not None else ())
        ],
        stalled_some=sample.stalled_some if sample is not None else 0.0,
        stalled_full=sample.stalled_full if sample is not None else 0.0,
        age_seconds=(now_ns - memory.sampled_ns) / 1e9 if sample is not None else None,
        notifications=notifications,
        pools=[_pool_memory(pool, memory) for pool in fleet.pools.values()],
        workers=[
            WorkerMemory(name=slot.name, pid=slot.pid, memory_bytes=slot.pss_bytes)
            for pool in fleet.pools.values()
            for slot in pool.everyone
            if slot.pid
        ],
        machine=figures,
    )


def _pool_memory(pool: Pool, memory: MemoryUse) -> PoolMemory:
    return PoolMemory(
        name=pool.name,
        size=pool.size,
        limit=pool.limit,
        held=sum(slot.held for slot in pool.slots),
        recommended_workers=memory.recommended(pool),
        footprint_bytes=memory.footprint(pool),
        memory_bytes=sum(slot.pss_bytes for slot in pool.everyone),
        sacrifice=pool.policy.sacrifice,
    )
