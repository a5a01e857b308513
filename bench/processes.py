"""What a process uses, as the kernel counts it."""

from pathlib import Path

import psutil
from fleet import BenchError


def anonymous(process: psutil.Process) -> float:
    """What it has made itself, in bytes: PSS changes with those who share its libraries."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "RssAnon":
            return int(rest.split()[0]) * 1024.0
    raise BenchError(f"/proc/{process.pid}/status has no line RssAnon")


def processor_seconds(process: psutil.Process) -> float:
    """By the scheduler's own count, which is finer than that of the ticks."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{process.pid}/task").iterdir()
    )
