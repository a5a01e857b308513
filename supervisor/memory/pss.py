"""What each worker and everything it started take: the sum of their PSS.

PSS counts a page that n processes share as one n-th for each, so that sums are true; sums of RSS
were measured 3.5 times too high for browsers. The kernel reckons it page by page, which costs about
a millisecond per process; so it is not done more often than the share of time it may take.

A worker's init adopts whatever its worker leaves behind, so all of a worker's processes are below
its init.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree_sizes(roots: Mapping[int, int]) -> dict[int, int]:
    """The bytes of each tree, by worker; `roots` tells the pid that each begins with. Those that
    are gone, or cannot be looked at, are left out."""
    if not roots:
        return {}
    children = _children()
    sizes = {}
    for worker, root in roots.items():
        size, waiting = 0, [root]
        while waiting:
            pid = waiting.pop()
            size += _size(pid)
            waiting += children.get(pid, ())
        if size:
            sizes[worker] = size
    return sizes


def _children() -> dict[int, list[int]]:
    """The pids below each pid, of all processes."""
    found: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir(PROC):
        if name.isdigit():
            try:
                stat = (PROC / name / "stat").read_bytes()
            except OSError:
                continue  # it has ended meanwhile
            # The name in parentheses may hold anything, spaces and parentheses too.
            parent = int(stat[stat.rindex(b")") + 2 :].split(None, 2)[1])
            found[parent].append(int(name))
    return found


def _size(pid: int) -> int:
    """PSS, or what it has for itself alone where that cannot be read."""
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
