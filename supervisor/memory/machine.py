"""Measure the machine and the supervisor itself, for people: processor, disk, network."""

import os
import time
from pathlib import Path

import psutil
from msgspec import Struct

from musterd.supervisor.api.memory import MachineFigures


class Totals(Struct, frozen=True):
    when: float
    disk_read: int = 0
    disk_written: int = 0
    received: int = 0
    sent: int = 0


class Machine:
    """Measures the machine, in one thread."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._self = psutil.Process()
        psutil.cpu_percent()  # measures from here on
        self._self.cpu_percent()
        self._before = _totals()

    def look(self) -> MachineFigures:
        before, self._before = self._before, _totals()
        now = self._before
        seconds = max(now.when - before.when, 1e-9)
        swap = psutil.swap_memory()
        disk = psutil.disk_usage(str(self._state_dir))
        return MachineFigures(
            cpu_share=psutil.cpu_percent() / 100,
            cpus=psutil.cpu_count() or 1,
            load=os.getloadavg()[0],
            swap_used_bytes=swap.used,
            swap_total_bytes=swap.total,
            disk_used_bytes=disk.used,
            disk_total_bytes=disk.total,
            disk_read_rate=_rate(before.disk_read, now.disk_read, seconds),
            disk_write_rate=_rate(before.disk_written, now.disk_written, seconds),
            network_received_rate=_rate(before.received, now.received, seconds),
            network_sent_rate=_rate(before.sent, now.sent, seconds),
            supervisor_rss_bytes=self._self.memory_info().rss,
            supervisor_cpu_share=self._self.cpu_percent() / 100,
        )


def _rate(before: int, now: int, seconds: float) -> float:
    return max(0, now - before) / seconds  # a new device restarts its counter


def _totals() -> Totals:
    disk = psutil.disk_io_counters()
    interfaces = psutil.net_io_counters(pernic=True)
    outside = [figures for name, figures in interfaces.items() if name != "lo"]
    return Totals(
        time.monotonic(),
        disk.read_bytes if disk is not None else 0,
        disk.write_bytes if disk is not None else 0,
        sum(each.bytes_recv for each in outside),
        sum(each.bytes_sent for each in outside),
    )
