"""Measure the memory of each worker with everything it started: the sum of their PSS.

PSS counts a page that n processes share as one n-th for each, so that sums are true; sums of RSS
were measured 3.5 times too high for browsers. The kernel adds PSS up page by page, which costs
about a millisecond per process; so the probe limits the share of time it may take.

A worker's init adopts whatever the worker leaves behind, so all of a worker's processes are below
its init.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from musterd.supervisor.system.linux import descendants, family

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree_sizes(roots: Mapping[int, int]) -> dict[int, int]:
    """Return the bytes of each tree, by worker; `roots` has the pid of each root. Trees that are
    gone or unreadable are left out."""
    if not roots:
        return {}
    children = family()
    sizes = {}
    for worker, root in roots.items():
        size = sum([_size(pid) for pid in (root, *descendants(root, children))])
        if size:
            sizes[worker] = size
    return sizes


def _size(pid: int) -> int:
    """Return the PSS of a process, or its private memory if PSS is unreadable."""
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_bytes()
    except OSError:
        return _private(pid)
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _private(pid: int) -> int:
    try:
        _, resident, shared, *_ = (PROC / str(pid) / "statm").read_bytes().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES
