"""Resources of a process, as the kernel counts them."""

from pathlib import Path

import psutil
from fleet import BenchError


def anonymous(process: psutil.Process) -> float:
    """Return anonymous memory in bytes: PSS changes with other users of its libraries."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "RssAnon":
            return int(rest.split()[0]) * 1024.0
    raise BenchError(f"/proc/{process.pid}/status has no line RssAnon")


def processor_seconds(process: psutil.Process) -> float:
    """Return CPU time as the scheduler counts it, finer than ticks."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{process.pid}/task").iterdir()
    )
