"""Spares: one process per fork server, made in advance, ready to be the next worker.

A spare is forked, contained, connected and ready to open its worker, and waits on its line
(init.py) to be called. It has no slot, no token, no temporary directory, and has run no user code.
So a message replaces a dead worker, instead of three forks, which take 10 ms.

The core decides which fork servers keep one (core/workers/forkservers.py); this module decides when
a spare is made: while nobody waits for a worker of its fork server, a moment after the last launch,
never during a recovery.
"""

import select
import time
from collections.abc import Callable, Iterable, Set

from musterd.supervisor.processes.handles import ForkServerProcess, WorkerProcess

# After a launch. Less than the shortest pause before a second restart, so that the restart finds a
# spare again; more than a worker needs to open and to take up waiting tasks.
SETTLED_NS = 250_000_000
# After a spare that ended or could not be made: something is wrong, and workers matter more.
AGAIN_NS = 10_000_000_000

Keys = Set[tuple[str, str]]  # pool and build


class Spares:
    def __init__(
        self,
        make: Callable[[ForkServerProcess], WorkerProcess],
        end: Callable[[WorkerProcess], None],
    ) -> None:
        """Take functions that make and end a process; `make` may raise OSError."""
        self._make = make
        self._end = end
        self._kept: Keys = frozenset()

    def keep(self, kept: Keys) -> None:
        """Set the fork servers that have a spare while they are up."""
        self._kept = kept

    def settle(self, fork_server: ForkServerProcess) -> None:
        """Note that a worker was just requested from a fork server."""
        fork_server.spare_ns = max(fork_server.spare_ns, time.monotonic_ns() + SETTLED_NS)

    def lost(self, fork_server: ForkServerProcess) -> None:
        """Note that a spare ended by itself or could not be made."""
        fork_server.spare = None
        fork_server.spare_ns = time.monotonic_ns() + AGAIN_NS

    def take(self, fork_server: ForkServerProcess) -> WorkerProcess | None:
        """Take the spare for a worker; None if there is no living one."""
        spare, fork_server.spare = fork_server.spare, None
        if spare is not None and spare.init_fd >= 0 and _any_ended(spare):
            return None  # its end is about to be noticed
        return spare

    def drop(self, fork_server: ForkServerProcess) -> None:
        """End a spare that nobody needs."""
        spare, fork_server.spare = fork_server.spare, None
        if spare is not None:
            self._end(spare)

    def tend(self, fork_servers: Iterable[ForkServerProcess]) -> None:
        """Make the spares that are due and end those that are not kept."""
        now_ns = time.monotonic_ns()
        for fork_server in fork_servers:
            if fork_server.key not in self._kept:
                self.drop(fork_server)
            elif now_ns >= (self._due_ns(fork_server) or now_ns + 1):
                try:
                    fork_server.spare = self._make(fork_server)
                except OSError:  # no descriptor or no process is left to be had
                    self.lost(fork_server)

    def next_deadline(self, fork_servers: Iterable[ForkServerProcess]) -> int | None:
        """Return when tend() has work, or None."""
        return min(filter(None, map(self._due_ns, fork_servers)), default=None)

    def _due_ns(self, fork_server: ForkServerProcess) -> int | None:
        """Return when to make a spare of a fork server; None if it has one or is busy."""
        busy = fork_server.containment is None or fork_server.awaited or fork_server.wanted
        if busy or fork_server.spare is not None or fork_server.key not in self._kept:
            return None
        return fork_server.spare_ns


def _any_ended(spare: WorkerProcess) -> bool:
    poll = select.poll()
    for fd in (spare.init_fd, spare.pidfd):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
