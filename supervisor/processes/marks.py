"""How processes of ours are told from all others, wherever they went.

Each process that comes from a fork server or a worker carries a mark: a number in its RLIMIT_LOCKS.
Linux has ignored that limit since 2.4.25 (getrlimit(2)). Children inherit it, and it stays the same
over setsid, double forks, exec, closed descriptors and a cleared environment: only a process that
sets this very limit loses it. A pid is used again by others; a mark is not, so a process with our
mark is ours and nobody else's.

    mark = run (39 random bits, new for each start of the daemon) << 24 | whose it is
"""

import contextlib
import os
import resource
import secrets
import signal
import time

from musterd.supervisor.system.linux import is_alive

RLIMIT_LOCKS = 10  # the same on every architecture of Linux; the module `resource` has no name
OWNER_BITS = 24
RUN_BITS = 63 - OWNER_BITS  # what Python's setrlimit takes
_OWNERS = 1 << OWNER_BITS
_FORK_SERVERS = _OWNERS // 2  # the upper half is for fork servers, the lower one for workers

KILL_SECONDS_MAX = 10.0  # what resists SIGKILL for so long is stuck in the kernel
KILL_ROUND_SECONDS = 0.005  # between two looks at what is left


def new_run() -> int:
    """The marks of one start of the daemon: of_worker and of_fork_server make them."""
    return (secrets.randbelow((1 << RUN_BITS) - 1) + 1) << OWNER_BITS


def of_worker(run: int, worker: int) -> int:
    return run | worker % _FORK_SERVERS


def of_fork_server(run: int, fork_server: int) -> int:
    return run | _FORK_SERVERS | fork_server % _FORK_SERVERS


def put_on(mark: int) -> None:
    """Marks this process and everything it will start; 0 is no mark. OSError where limits cannot
    be set."""
    if not mark:
        return
    try:
        resource.setrlimit(RLIMIT_LOCKS, (mark, resource.getrlimit(RLIMIT_LOCKS)[1]))
    except ValueError as error:  # what Python makes of a limit that was lowered for us
        raise OSError(f"RLIMIT_LOCKS cannot be set: {error}") from error


def find(run: int) -> dict[int, list[int]]:
    """Each mark of this run that a living process carries, and the pids of those."""
    found: dict[int, list[int]] = {}
    prlimit = resource.prlimit  # a restart waits for this look at every process of the machine
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
    """Whether this very process carries a mark of that run."""
    return _run_of(_mark_of(os.getpid())) == run


def open_marked(pid: int, mark: int) -> int | None:
    """A pidfd of the process with this pid, if it carries this mark: never one that came later."""
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return None
    if _mark_of(pid) != mark:  # looked at after the pidfd was opened
        os.close(pidfd)
        return None
    return pidfd


def end_all(run: int) -> tuple[int, int]:
    """Kills everything with a mark of this run and waits; how many were ended and how many
    resist."""
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
        time.sleep(KILL_ROUND_SECONDS)  # they are nobody's children that we could wait for
    return len(ended), 0


def _run_of(mark: int) -> int:
    return mark & -_OWNERS


def _mark_of(pid: int) -> int:
    """What its limit says; 0 if it is gone or not ours to ask."""
    try:
        return max(0, resource.prlimit(pid, RLIMIT_LOCKS)[0])
    except (ProcessLookupError, PermissionError):
        return 0
