"""One process more than there are workers, made ahead: for a fork server, its spare.

A spare is forked, contained, connected and ready to open its worker, and waits on its line
(init.py) to be called. It has no slot, no token, no temporary directory, and has run nothing of the
user's. So a worker that died is replaced by a message instead of three forks, which take 10 ms.

The core says who keeps one (core/workers/spares.py); this is about when. A spare is made while
nobody waits for a worker of its fork server, a moment after the last one was made: never during a
recovery.
"""

import select
import time
from collections.abc import Callable, Iterable, Set

from musterd.supervisor.processes.handles import ForkServerProcess, WorkerProcess

# After a birth of the fork server. Less than the shortest pause before a second restart, so that
# this finds a spare again; more than a worker needs to open and to begin with what waits for it.
SETTLED_NS = 250_000_000
# After a spare that ended by itself or could not be made: something is wrong, and workers are more
# important.
AGAIN_NS = 10_000_000_000

Keys = Set[tuple[str, str]]  # pool and build


class Spares:
    def __init__(
        self,
        make: Callable[[ForkServerProcess], WorkerProcess],
        end: Callable[[WorkerProcess], None],
    ) -> None:
        """`make` may raise OSError."""
        self._make = make
        self._end = end
        self._kept: Keys = frozenset()

    def keep(self, kept: Keys) -> None:
        """These fork servers have one, if they are up, and no others."""
        self._kept = kept

    def settle(self, fork_server: ForkServerProcess) -> None:
        """One was just asked of this fork server."""
        fork_server.spare_ns = max(fork_server.spare_ns, time.monotonic_ns() + SETTLED_NS)

    def lost(self, fork_server: ForkServerProcess) -> None:
        """There is none any more, or none could be made, and nobody wanted that."""
        fork_server.spare = None
        fork_server.spare_ns = time.monotonic_ns() + AGAIN_NS

    def take(self, fork_server: ForkServerProcess) -> WorkerProcess | None:
        """The spare, which is one no more; None if there is none that lives."""
        spare, fork_server.spare = fork_server.spare, None
        if spare is not None and spare.init_fd >= 0 and _any_ended(spare):
            return None  # its end is about to be heard
        return spare

    def drop(self, fork_server: ForkServerProcess) -> None:
        """Nobody needs it."""
        spare, fork_server.spare = fork_server.spare, None
        if spare is not None:
            self._end(spare)

    def tend(self, fork_servers: Iterable[ForkServerProcess]) -> None:
        """Makes those that are due and ends those that are not kept."""
        now_ns = time.monotonic_ns()
        for fork_server in fork_servers:
            if fork_server.key not in self._kept:
                self.drop(fork_server)
            elif now_ns >= (self._due_ns(fork_server) or now_ns + 1):
                try:
                    fork_server.spare = self._make(fork_server)
                except OSError:  # no descriptor or no process is left
                    self.lost(fork_server)

    def next_deadline(self, fork_servers: Iterable[ForkServerProcess]) -> int | None:
        """When tend() has something to do, or None."""
        return min(filter(None, map(self._due_ns, fork_servers)), default=None)

    def _due_ns(self, fork_server: ForkServerProcess) -> int | None:
        """When this fork server is to be asked for one; None if it has one or is busy."""
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
