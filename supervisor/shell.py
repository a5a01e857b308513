"""The daemon as its parts see it: one protocol, which `loop.daemon.Daemon` implements.

It lies beside the rooms because views, sockets, service and control all need it and may not import
the loop, which imports them. It names only what those rooms know anyway. A part that needs more
(`BackgroundCalls`, `Reloading`) is handed that when it is made.

May import: api, core, core.model, ipc.wire, log, store.
"""

from collections.abc import Callable
from typing import Protocol

from musterd.ipc.wire.node_messages import FindTasks, FoundTasks
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.log.worker_output import Outputs
from musterd.supervisor.store.artefacts import ArtefactFiles
from musterd.supervisor.store.requests import StoreRequests


class Shell(Protocol):
    """What the parts of the daemon need of it."""

    fleet: Fleet  # to look at; it changes by feed() alone
    store_requests: StoreRequests
    outputs: Outputs
    artefacts: ArtefactFiles

    def feed(self, event: object) -> None:
        """Hand an event to the core and perform the actions it answers with."""

    def submit(self, event: events.TasksSubmitted) -> None:
        """Feed new tasks: complete what `@task` declares, refuse what gives a secret away."""

    def put_schedules(
        self,
        puts: list[tuple[str, bytes]],
        peer: bytes,
        request: int = 0,
        *,
        paused: frozenset[str] = frozenset(),
        replace: bool = True,
        dry_run: bool = False,
    ) -> None:
        """Feed schedules that are added at run time: refuse those that a file could not have."""

    def shut_down(self, reason: str) -> None:
        """Begin a shutdown, or speed up the one that is under way."""

    def signal_worker(self, worker: int, number: int) -> None:
        """Send a signal to one worker."""

    def status(self) -> FleetStatus:
        """Return the state of the whole fleet."""

    def find_in_cluster(self, wanted: FindTasks, found: Callable[[FoundTasks], None]) -> None:
        """Look for tasks of the cluster; `found` is called once."""

    def memory_status(self) -> MemoryStatus:
        """Return the memory of the machine, the pools and the workers."""

    @property
    def ready(self) -> bool:
        """Whether the fleet has been up once since the start."""

    @property
    def problem(self) -> str:
        """What is wrong with the daemon itself, or ""."""

    def now_ns(self) -> int:
        """Return the monotonic time, which decides."""

    def wall_ns(self) -> int:
        """Return the time of day, which is shown and stored."""
