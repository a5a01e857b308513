"""File descriptors: how many there are and are needed, and what to say when they are short."""

import os
import resource
from typing import NamedTuple

from musterd.ipc.errors import MusterdError

# What is kept free of connections of clients: for workers, callers of control.sock and files.
RESERVE_SHARE = 4  # of the limit, a quarter
RESERVE_MAX = 8192
# What the daemon needs to start. Counted: 39 without a pool (store, sockets, log, epolls), 10 more
# with one (its fork server, a process ready to be the next worker), 7 more with each worker; some
# are needed for a moment. And a few clients are to be served, outside the reserve.
BASE = 48
PER_POOL = 12
PER_WORKER = 8
CLIENTS = 16


class DescriptorsShort(MusterdError):
    """The limit of open files is too low to run with."""


class Descriptors(NamedTuple):
    used: int
    limit: int

    @property
    def free(self) -> int:
        return self.limit - self.used


def descriptors() -> Descriptors:
    """Of this process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = os.stat("/proc/self/fd").st_size  # since Linux 6.2; before it says 0
    if not used:
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # that takes a descriptor itself
            used = limit
    return Descriptors(used, limit)


def enough() -> bool:
    """Whether there may be one connection more."""
    found = descriptors()
    return found.free >= min(found.limit // RESERVE_SHARE, RESERVE_MAX)


def problem() -> str:
    """What is wrong and what to do, or ""."""
    if enough():
        return ""
    found = descriptors()
    return (
        f"{found.used} of {found.limit} descriptors are in use: clients are put out and wait: "
        "raise the limit of open files (LimitNOFILE= of the unit, ulimit -n), or see who opens "
        "so many connections"
    )


def needed_for(pools: int, workers: int) -> int:
    """How many a daemon with so many pools and workers needs."""
    used = BASE + PER_POOL * pools + PER_WORKER * workers
    return (used + CLIENTS) * RESERVE_SHARE // (RESERVE_SHARE - 1)


def provide(wanted: int) -> None:
    """Raise the soft limit to what is wanted where the hard limit allows it.

    DescriptorsShort if it does not: without them a start would fail somewhere in the middle.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise DescriptorsShort(
            f"the limit of open files is {hard}, and {wanted} are needed for these pools and "
            "workers: raise it (LimitNOFILE= in the unit, `ulimit -n` in a shell, nofile in "
            "/etc/security/limits.conf), or run fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
