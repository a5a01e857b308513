"""Metrics of the machine, and of the supervisor's process: read here, at no cost to it."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
from prometheus_client.core import Metric

from musterd.supervisor.web.metrics import counter, number, total

CPU_MODES = ("user", "system", "nice", "iowait", "irq", "softirq", "steal", "idle")
PRESSURE = Path("/proc/pressure")
RESOURCES = ("cpu", "memory", "io")


def system_metrics(state_dir: str) -> Iterator[Metric]:
    times = psutil.cpu_times()
    yield counter(
        "musterd_system_cpu_seconds",
        "CPU time of all processors, by mode",
        ("mode",),
        [((mode,), getattr(times, mode)) for mode in CPU_MODES if hasattr(times, mode)],
    )
    yield number("musterd_system_cpus", "Processors", psutil.cpu_count() or 1)
    yield number("musterd_system_load1", "Load average of the last minute", os.getloadavg()[0])
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield number("musterd_system_memory_size_bytes", "Memory of the machine", memory.total)
    yield number(
        "musterd_system_memory_available_bytes",
        "Memory available without swapping",
        memory.available,
    )
    yield number("musterd_system_swap_size_bytes", "Swap space", swap.total)
    yield number("musterd_system_swap_used_bytes", "Swap space in use", swap.used)
    yield from _disks(state_dir)
    interfaces = psutil.net_io_counters(pernic=True)
    outside = [each for name, each in interfaces.items() if name != "lo"]
    yield total(
        "musterd_system_network_received_bytes",
        "By all interfaces but loopback",
        sum(each.bytes_recv for each in outside),
    )
    yield total(
        "musterd_system_network_sent_bytes",
        "By all interfaces but loopback",
        sum(each.bytes_sent for each in outside),
    )
    yield from _pressure()


def _disks(state_dir: str) -> Iterator[Metric]:
    try:
        place = os.statvfs(state_dir)
    except OSError:  # not readable by us, or missing
        place = None
    if place is not None:
        yield number(
            "musterd_system_disk_size_bytes",
            "Size of the file system that holds the store",
            place.f_blocks * place.f_frsize,
        )
        yield number(
            "musterd_system_disk_free_bytes",
            "Free space of that file system, for users other than root",
            place.f_bavail * place.f_frsize,
        )
    disks = psutil.disk_io_counters()
    yield total("musterd_system_disk_read_bytes", "By all disks", disks.read_bytes if disks else 0)
    yield total(
        "musterd_system_disk_written_bytes", "By all disks", disks.write_bytes if disks else 0
    )


def _pressure() -> Iterator[Metric]:
    """Yield pressure stall times; nothing on a kernel without PSI."""
    samples = []
    for resource in RESOURCES:
        try:
            lines = (PRESSURE / resource).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            kind, *fields = line.split()
            stalled_us = int(dict(field.split("=") for field in fields)["total"])
            samples.append(((resource, kind), stalled_us / 1e6))
    if samples:
        yield counter(
            "musterd_system_pressure_seconds",
            "Time in which some processes, or all of them (full), were stalled on a resource",
            ("resource", "kind"),
            samples,
        )


def supervisor_metrics(pid: int) -> Iterator[Metric]:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
            name = process.name()
    except psutil.Error:  # gone meanwhile, or in a PID namespace that is not ours
        return
    if "musterd" not in name and "python" not in name:
        return  # a pid of another namespace
    yield total(
        "musterd_supervisor_cpu_seconds",
        "CPU time of the supervisor",
        times.user + times.system,
    )
    yield number("musterd_supervisor_resident_bytes", "Memory (RSS) of the supervisor", memory.rss)
