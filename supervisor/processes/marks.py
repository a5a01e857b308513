"""Marks that tell our processes from all others, wherever they went.

Each process that comes from a fork server or a worker carries a mark: a number in its RLIMIT_LOCKS.
Linux has ignored that limit since 2.4.25 (getrlimit(2)). Children inherit the mark, and it survives
setsid, double forks, exec, closed descriptors and a cleared environment: only a process that sets
this very limit loses the mark. Pids are reused; marks are not, so a process with our mark is ours.

    mark = run (39 random bits, new for each start of the daemon) << 24 | owner
"""

import contextlib
import os
import resource
import secrets
import signal
import time

from musterd.supervisor.processes.cgroups import KILL_ROUND_SECONDS, KILL_SECONDS_MAX
from musterd.supervisor.system.linux import is_alive

RLIMIT_LOCKS = 10  # on every architecture of Linux; the module `resource` has no name for it
OWNER_BITS = 24
RUN_BITS = 63 - OWNER_BITS  # Python's setrlimit takes 63 bits
_OWNERS = 1 << OWNER_BITS
_FORK_SERVERS = _OWNERS // 2  # the upper half is for fork servers, the lower one for workers


def new_run() -> int:
    """Return the common part of all marks of one start of the daemon."""
    return (secrets.randbelow((1 << RUN_BITS) - 1) + 1) << OWNER_BITS


def of_worker(run: int, worker: int) -> int:
    return run | worker % _FORK_SERVERS


def of_fork_server(run: int, fork_server: int) -> int:
    return run | _FORK_SERVERS | fork_server % _FORK_SERVERS


def put_on(mark: int) -> None:
    """Mark this process and everything it will start; 0 is no mark. OSError if that is refused."""
    if not mark:
        return
    try:
        resource.setrlimit(RLIMIT_LOCKS, (mark, resource.getrlimit(RLIMIT_LOCKS)[1]))
    except ValueError as error:  # Python's error for a hard limit that was lowered
        raise OSError(f"RLIMIT_LOCKS cannot be set: {error}") from error


def find(run: int) -> dict[int, list[int]]:
    """Return the pids of living processes by their mark, for all marks of a run."""
    found: dict[int, list[int]] = {}
    prlimit = resource.prlimit  # a restart waits for this search through all processes
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            mark = prlimit(int(name), RLIMIT_LOCKS)[0]
        except (ProcessLookupError, PermissionError):  # gone, or not ours to ask
            continue
        if mark & -_OWNERS == run and is_alive(int(name)):
            found.setdefault(mark, []).append(int(name))
    return found


def carried(run: int) -> bool:
    """Tell whether this very process carries a mark of a run."""
    return _mark_of(os.getpid()) & -_OWNERS == run


def open_marked(pid: int, mark: int) -> int | None:
    """Open a pidfd if the process carries the mark: never one that reuses the pid."""
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return None
    if _mark_of(pid) != mark:  # read after the pidfd was opened
        os.close(pidfd)
        return None
    return pidfd


def end_all(run: int) -> tuple[int, int]:
    """Kill everything with a mark of a run and wait; return how many ended and how many resist."""
    ended: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while found := find(run):
        for mark, pids in found.items():
            for pid in pids:
                pidfd = open_marked(pid, mark)
                if pidfd is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        ended.add(pid)
                    os.close(pidfd)
        if time.monotonic() > deadline:
            left = {pid for pids in found.values() for pid in pids}
            return len(ended - left), len(left)
        time.sleep(KILL_ROUND_SECONDS)  # they are not our children: there is nothing to wait on
    return len(ended), 0


def _mark_of(pid: int) -> int:
    """Return the mark of a process; 0 if it is gone or not ours to ask."""
    try:
        return max(0, resource.prlimit(pid, RLIMIT_LOCKS)[0])
    except (ProcessLookupError, PermissionError):
        return 0
