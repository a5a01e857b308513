"""Snapshots for `musterctl top`, taken once a second in a thread of their own.

The thread keeps the keyboard responsive while the daemon is slow. The daemon does not know the
processor time of each worker's tree: it is read from /proc, where pids are those of the host.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import psutil
from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.events import Event
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import (
    BreakerList,
    BreakerStatus,
    FleetStatus,
    RecentEvents,
    ScheduleList,
    ScheduleStatus,
    TaskList,
    TaskStatus,
)
from musterd.supervisor.api.verdict import BAD, Reason, Verdict, verdict
from musterd.supervisor.ctl.app import Settings, connect, connect_to_cluster
from musterd.supervisor.ctl.connection import Connection
from musterd.supervisor.system.linux import descendants, family

if TYPE_CHECKING:
    from musterd.supervisor.ctl.cluster_answers import ClusterConnection

ANSWER_SECONDS = 5.0  # a slower daemon is shown as unreachable
EVENTS_SHOWN_MAX = 5
DEAD_SHOWN_MAX = 3
DEAD_EVERY = 30  # snapshots; also when none has failed: some may have been purged
WARNING, CRITICAL = 0.70, 0.85  # shares of memory, where the daemon gives none


class Use(Struct, frozen=True):
    """Resources used by the processes of one worker."""

    cpu_share: float = 0.0  # of one processor
    rss_bytes: int = 0  # too high: shared pages count for each process


class Memory(Struct, frozen=True):
    used_bytes: int
    total_bytes: int
    warning: float = WARNING
    critical: float = CRITICAL
    source: str = ""  # "" for the machine's memory

    @property
    def share(self) -> float:
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


class Snapshot(Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    at: float  # wall-clock time
    fleet: FleetStatus
    health: Verdict = Verdict()
    breakers: list[BreakerStatus] = []
    events: list[Event] = []  # the latest of level warning and above
    schedules: list[ScheduleStatus] = []
    dead: list[TaskStatus] = []  # the newest
    memory: Memory = Memory(0, 0)  # the tightest
    cpu_share: float = 0.0  # of all processors of the machine
    uses: dict[str, Use] = {}  # by worker
    done_rates: dict[str, float] = {}  # finished tasks a second, by pool
    failed_rates: dict[str, float] = {}


class Rates:
    """Rates of counters between two snapshots."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._at = 0.0

    def since(self, now: float, counters: dict[str, float]) -> dict[str, float]:
        """Return rates by name; 0 for a counter that is new or was reset."""
        seconds = now - self._at if self._at else 0.0
        before, self._before, self._at = self._before, counters, now
        if seconds <= 0:
            return {}
        return {
            name: max(0.0, value - before.get(name, value)) / seconds
            for name, value in counters.items()
        }


class Looker:
    """Take snapshots."""

    def __init__(self, settings: Settings) -> None:
        self._settings = msgspec.structs.replace(
            settings, timeout=settings.timeout or ANSWER_SECONDS
        )
        self._done = Rates()
        self._failed = Rates()
        self._cpu = Rates()
        self._looks = 0
        self._dead: list[TaskStatus] = []
        self._dead_of = -1  # number of failed tasks when they were listed
        self._cluster: ClusterConnection | None = None
        self._events: list[Event] = []  # of a cluster, so far

    def close(self) -> None:
        """End the connection to a cluster, where there is one."""
        if self._cluster is not None:
            self._cluster.close()

    def look(self) -> Snapshot:
        """Take a snapshot; MusterdError if the daemon does not answer."""
        if self._settings.cluster:
            return self._of_cluster()
        with connect(self._settings) as connection:
            fleet = connection.get(rpc.Status(), FleetStatus)
            breakers = connection.get(rpc.ListBreakers(), BreakerList).breakers
            asked = rpc.Events(follow=False, level="warning", limit=EVENTS_SHOWN_MAX)
            events = msgspec.convert(connection.get(asked, RecentEvents).recent, list[Event])
            memory = connection.get(rpc.ShowMemory(), MemoryStatus)
            schedules = connection.get(rpc.ListSchedules(), ScheduleList).schedules
            self._refresh_dead(connection, fleet)
        now = time.monotonic()
        done = {p.name: float(p.succeeded + p.failed) for p in fleet.pools}
        failed = {p.name: float(p.failed) for p in fleet.pools}
        return Snapshot(
            at=time.time(),
            fleet=fleet,
            health=verdict(fleet, memory, breakers),
            breakers=breakers,
            events=events,
            schedules=schedules,
            dead=self._dead,
            memory=_tightest(memory),
            cpu_share=memory.machine.cpu_share,
            uses=self._uses(now, fleet),
            done_rates=self._done.since(now, done),
            failed_rates=self._failed.since(now, failed),
        )

    def _of_cluster(self) -> Snapshot:
        """Take a snapshot of all nodes, over one connection."""
        if self._cluster is None:
            self._cluster = connect_to_cluster(self._settings)
        connection = self._cluster
        fleet = connection.look()
        breakers = connection.get(rpc.ListBreakers(), BreakerList).breakers
        happened = connection.new_events()
        if self._looks:  # what differs from nothing did not happen now
            new = msgspec.convert(happened, list[Event])
            self._events = [*self._events, *new][-EVENTS_SHOWN_MAX:]
        self._refresh_dead(connection, fleet)
        wrong = [Reason(BAD, line) for line in fleet.problem.split("\n") if line]
        return Snapshot(
            at=time.time(),
            fleet=fleet,
            health=Verdict(BAD, "Action needed", wrong) if wrong else Verdict(),
            breakers=breakers,
            events=self._events,
            dead=self._dead,
            done_rates=connection.done_rates,
            failed_rates=connection.failed_rates,
        )

    def _refresh_dead(
        self, connection: "Connection | ClusterConnection", fleet: FleetStatus
    ) -> None:
        """List failed tasks only when there may be new ones: the daemon reads them from disk."""
        failed = sum(pool.failed for pool in fleet.pools)
        due = self._looks % DEAD_EVERY == 0
        self._looks += 1
        if failed == self._dead_of and not due:
            return
        try:
            found = connection.get(rpc.ListDead(limit=DEAD_SHOWN_MAX), TaskList)
        except rpc.RpcError as error:
            if error.code != rpc.NOT_ALLOWED:  # members of view_group see no tasks
                raise
            return
        self._dead, self._dead_of = found.tasks, failed

    def ask(self, params: rpc.Params) -> str:
        """Have something done; return why it was refused, or ""."""
        try:
            with connect(self._settings) as connection:
                connection.request(params)
        except MusterdError as error:
            return str(error)
        return ""

    def _uses(self, now: float, fleet: FleetStatus) -> dict[str, Use]:
        pids = {w.name: w.pid for pool in fleet.pools for w in pool.workers if w.pid}
        children = family() if pids else {}
        seconds: dict[str, float] = {}
        memory: dict[str, int] = {}
        for name, pid in pids.items():
            for each in (pid, *descendants(pid, children)):
                try:
                    process = psutil.Process(each)
                    with process.oneshot():
                        times = process.cpu_times()
                        memory[name] = memory.get(name, 0) + process.memory_info().rss
                except psutil.Error:
                    continue  # the process has ended
                key = f"{name} {each}"  # per process: a tree loses the time of one that ends
                seconds[key] = times.user + times.system
        shares: dict[str, float] = {}
        for key, share in self._cpu.since(now, seconds).items():
            name = key.partition(" ")[0]
            shares[name] = shares.get(name, 0.0) + share
        return {name: Use(shares.get(name, 0.0), memory.get(name, 0)) for name in pids}


def _tightest(memory: MemoryStatus) -> Memory:
    """Return the tightest source; the machine where the daemon does not monitor memory."""
    for source in memory.sources:
        if source.name == memory.source:
            return Memory(
                source.used_bytes,
                source.total_bytes,
                memory.warning or WARNING,
                memory.critical or CRITICAL,
                "" if source.name.startswith("the machine") else source.name,
            )
    machine = psutil.virtual_memory()
    return Memory(machine.total - machine.available, machine.total)


class Feed:
    """Take snapshots until closed, and call `changed` after each."""

    def __init__(self, looker: Looker, seconds: float, changed: Callable[[], None]) -> None:
        self._looker = looker
        self._seconds = seconds
        self._changed = changed
        self._closing = threading.Event()
        self._wanted: queue.SimpleQueue[rpc.Params | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)
        self.newest: Snapshot | None = None
        self.unreachable = ""  # why there is no newer snapshot
        self.refusal = ""  # why the last request was refused

    def start(self) -> None:
        self._thread.start()

    def ask(self, params: rpc.Params) -> None:
        """Send a request after the snapshot that is being taken."""
        self._wanted.put(params)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.newest, self.unreachable = self._looker.look(), ""
            except (MusterdError, msgspec.DecodeError) as error:
                self.unreachable = str(error)
            self._changed()
            with contextlib.suppress(queue.Empty):  # no request: take the next snapshot
                wanted = self._wanted.get(timeout=self._seconds)
                self.refusal = self._looker.ask(wanted) if wanted is not None else ""

    def close(self) -> None:
        """End the thread without waiting for an answer."""
        self._closing.set()
        self._wanted.put(None)
