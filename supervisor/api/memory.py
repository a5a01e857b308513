"""The answer to `musterctl memory`: the daemon fills it, musterctl shows it."""

from msgspec import Struct


class MachineFigures(Struct, frozen=True, kw_only=True):
    """Figures of the machine; rates are means since the last look, 0 at the first."""

    cpu_share: float = 0.0  # of all processors together
    cpus: int = 1
    load: float = 0.0  # load average of the last minute
    swap_used_bytes: int = 0
    swap_total_bytes: int = 0
    disk_used_bytes: int = 0  # of the file system that holds state_dir
    disk_total_bytes: int = 0
    disk_read_rate: float = 0.0  # bytes a second, of all disks
    disk_write_rate: float = 0.0
    network_received_rate: float = 0.0  # bytes a second, of all interfaces but loopback
    network_sent_rate: float = 0.0
    supervisor_rss_bytes: int = 0
    supervisor_cpu_share: float = 0.0  # of one processor


class SourceStatus(Struct, frozen=True, kw_only=True):
    name: str
    total_bytes: int
    used_bytes: int
    share: float


class PoolMemory(Struct, frozen=True, kw_only=True):
    name: str
    size: int  # workers that were asked for
    limit: int | None = None  # workers that memory allows; none: any number
    held: int = 0  # workers that memory holds back
    recommended_workers: int = 0  # the most that memory has room for
    footprint_bytes: int = 0  # what one more worker will probably take
    memory_bytes: int = 0  # what all its workers take
    sacrifice: bool = False


class WorkerMemory(Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    memory_bytes: int  # PSS of the worker and all it started; 0: not looked at yet


class MemoryStatus(Struct, frozen=True, kw_only=True):
    watched: bool = True  # false: nothing is measured, [monitor] enabled = false
    enabled: bool
    level: str  # normal, warning, critical
    stage: str  # normal, half, one, sacrifice, kill
    share: float = 0.0  # used, of the tightest source
    source: str = ""  # the tightest one
    warning: float = 0.0
    critical: float = 0.0
    sources: list[SourceStatus] = []
    stalled_some: float = 0.0
    stalled_full: float = 0.0
    age_seconds: float | None = None  # of these figures
    notifications: int = 0  # how often systemd has told that memory is short
    pools: list[PoolMemory] = []
    workers: list[WorkerMemory] = []
    machine: MachineFigures = MachineFigures()
