"""Count file descriptors: used, free and needed; and say what to do when they are short."""

import os
import resource
from typing import NamedTuple

from musterd.ipc.errors import MusterdError

# Clients do not get these: they are for workers, callers of control.sock and files.
RESERVE_SHARE = 4  # a quarter of the limit
RESERVE_MAX = 8192
# What the daemon needs to start. Counted: 39 without a pool (store, sockets, log, epolls), 10 more
# for each pool (its fork server and its spare), 7 more for each worker; some are needed for a
# moment. And a few clients are to be served, outside the reserve.
BASE = 48
PER_POOL = 12
PER_WORKER = 8
CLIENTS = 16


class DescriptorsShort(MusterdError):
    """The limit of open files is too low to run."""


class Descriptors(NamedTuple):
    used: int
    limit: int

    @property
    def free(self) -> int:
        return self.limit - self.used


def descriptors() -> Descriptors:
    """Count the descriptors of this process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = os.stat("/proc/self/fd").st_size  # since Linux 6.2; 0 before
    if not used:
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # listing takes a descriptor itself
            used = limit
    return Descriptors(used, limit)


def enough() -> bool:
    """Tell whether one more connection may be accepted."""
    found = descriptors()
    return found.free >= min(found.limit // RESERVE_SHARE, RESERVE_MAX)


def problem() -> str:
    """Return what is wrong and what to do, or ""."""
    if enough():
        return ""
    found = descriptors()
    return (
        f"{found.used} of {found.limit} descriptors are in use: clients are disconnected and wait: "
        "raise the limit of open files (LimitNOFILE= of the unit, ulimit -n), or see who opens "
        "so many connections"
    )


def needed_for(pools: int, workers: int) -> int:
    """Return how many descriptors a daemon with this many pools and workers needs."""
    used = BASE + PER_POOL * pools + PER_WORKER * workers
    return (used + CLIENTS) * RESERVE_SHARE // (RESERVE_SHARE - 1)


def double() -> None:
    """Double the soft limit as far as the hard one allows: here each client takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def provide(wanted: int) -> None:
    """Raise the soft limit to what is wanted.

    DescriptorsShort if the hard limit is lower: a start would fail somewhere in the middle.
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
