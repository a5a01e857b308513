"""The spawner: starts, watches and ends worker processes; nothing else in the supervisor does.

Each pool has a fork server (forkserver.py) that forks its workers under an init (init.py). The
spawner reports events of the core, and never blocks: everything it waits for is in one epoll, whose
descriptor the daemon polls.

    spawn() ── ForkRequest ──► fork server ── forks ──► init
               ◄── Forked ────                        the init is now our child: pidfd, GO, Call
               ◄── WorkerPid ──────────── worker      WorkerForked
               ◄── ALONE ──────────────── init        WorkerExited: nothing of it is left
               pidfd of the init readable             WorkerExited, unless ALONE came before

A worker whose fork is not reported yet has run nothing: ending it means never saying GO. Its init
sees the line close, ends by itself and is reaped as an orphan. A fork server gets a few requests at
a time, the other workers wait their turn. Before a slot gets a new worker, the census (orphans.py)
looks for what is left of the old one. A fork server with a spare (spares.py) forks nothing: the
spare is called.

The supervisor is child subreaper, so it also inherits processes it never made. Their session tells
them from the daemon's own children: a child that the daemon starts elsewhere must stay in the
daemon's session, or the spawner may take its exit status.

All methods are for the main thread: the kernel ends fork servers and inits with the *thread* that
is their parent.
"""

import functools
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from musterd.ipc.errors import SpawnError
from musterd.ipc.user_code import Source
from musterd.ipc.wire.scoreboard import Pulse, Reading
from musterd.supervisor.core.model.events import (
    ForkServerExited,
    ForkServerFailed,
    ForkServerReady,
    LeftoversEnded,
    SpawnFailed,
    WorkerExited,
)
from musterd.supervisor.log import log
from musterd.supervisor.log.worker_output import Outputs
from musterd.supervisor.processes.containment import AUTO, CONTAINMENTS
from musterd.supervisor.processes.epoll import Watch
from musterd.supervisor.processes.forkserver_messages import (
    RUNTIME,
    Forked,
    ForkFailed,
    ForkServerDown,
    ForkServerMessage,
    ForkServerUp,
    WorkerPid,
    WorkerSettings,
)
from musterd.supervisor.processes.handles import (
    Containment,
    Event,
    ForkServerProcess,
    how_it_ended,
    send_signal,
)
from musterd.supervisor.processes.launcher import Launcher
from musterd.supervisor.processes.oom import OomWatch
from musterd.supervisor.processes.orphans import FORK_SERVER, Census
from musterd.supervisor.processes.previous_run import RunRecord
from musterd.supervisor.processes.registry import ENDS, ProcessRegistry
from musterd.supervisor.processes.spares import Keys
from musterd.supervisor.processes.tempdirs import Janitor
from musterd.supervisor.system.linux import become_subreaper, kill_inherited, reap_inherited

CLOSE_SECONDS_MAX = 10.0  # a process that lives this long after SIGKILL is stuck in the kernel
# Requests to one fork server that are not reported yet. Its channel holds less than 300 of them,
# and a fork server forks one process after the other: more requests would gain nothing.
LAUNCHES_AT_ONCE_MAX = 32

WORKER_SETTINGS = WorkerSettings()


class Code(NamedTuple):
    """What a fork server has imported, and when it had."""

    sources: tuple[Source, ...]
    at_ns: int  # of the wall clock, as files have it


class Spawner:
    """Fork servers and workers of one supervisor."""

    def __init__(
        self,
        workers_socket: str,
        temp_root: Path,
        containment: str = AUTO,
        *,
        runtime: str = RUNTIME,
        oom: OomWatch | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        if containment not in CONTAINMENTS:
            raise SpawnError(
                f"containment = {containment!r} is unknown: use one of {', '.join(CONTAINMENTS)}"
            )
        become_subreaper()
        self._janitor = Janitor()
        self._watch = Watch()
        self._fork_servers: dict[tuple[str, str], ForkServerProcess] = {}  # not stopped
        self._living: set[ForkServerProcess] = set()  # those, and stopped ones that still live
        self._happened: list[Event] = []
        # What the fork servers have imported that are not stopped, or have failed to load.
        self._code: dict[tuple[str, str], Code] = {}
        self._run_record = RunRecord(temp_root.with_name(temp_root.name + ".run"))
        directories = self._janitor.empty(temp_root)
        if self._run_record.former.processes or directories:
            self._found("", FORK_SERVER, self._run_record.former.processes, directories)
        self._launcher = Launcher(
            workers_socket,
            containment,
            runtime,
            temp_root=temp_root,
            run_record=self._run_record,
            outputs=outputs or Outputs(),
            is_doomed=self._janitor.removes,
        )
        self._census = Census(
            self._run_record.run, self._watch, self._janitor, temp_root, self._found
        )
        self._registry = ProcessRegistry(
            self._watch,
            self._launcher,
            self._census,
            self._janitor,
            oom or OomWatch(),
            tell=self._tell,
            hear=self._drain,
        )

    def fileno(self) -> int:
        """Return the descriptor that is readable when events() has news."""
        return self._watch.fileno()

    # -- fork servers ----------------------------------------------------------------------------

    def start_fork_server(
        self,
        pool: str,
        worker: str,
        options: bytes = b"",
        env: Mapping[str, str] | None = None,
        worker_settings: WorkerSettings = WORKER_SETTINGS,
        *,
        build: str = "",
    ) -> None:
        """Load the worker class; ForkServerReady, ForkServerFailed or ForkServerExited follows."""
        assert (pool, build) not in self._fork_servers, f"pool {pool!r} has a fork server"
        try:
            fork_server = self._launcher.open_fork_server(
                pool, worker, options, env or {}, worker_settings
            )
        except OSError as error:
            self._tell(ForkServerExited(pool, f"the fork server cannot be started: {error}", build))
            return
        fork_server.build = build
        self._fork_servers[fork_server.key] = fork_server
        self._living.add(fork_server)
        self._watch.add(
            fork_server.channel.fileno(), functools.partial(self._channel_ready, fork_server)
        )
        self._watch.add(fork_server.pidfd, functools.partial(self._fork_server_ended, fork_server))

    def stop_fork_server(self, pool: str, build: str = "") -> None:
        """End a fork server at once; its workers live on and no event follows."""
        self._code.pop((pool, build), None)
        fork_server = self._fork_servers.pop((pool, build), None)
        if fork_server is not None:
            send_signal(fork_server.pidfd, signal.SIGKILL)

    def code(self, pool: str, build: str) -> Code | None:
        """Return what the fork server of the build has imported; None if that is not known."""
        return self._code.get((pool, build))

    def keep_spares(self, kept: Keys) -> None:
        """Set the fork servers, by pool and build, that keep a spare."""
        self._registry.spares.keep(kept)

    def next_deadline(self) -> int | None:
        """Return when events() has work although nothing is readable, or None."""
        return self._registry.spares.next_deadline(self._fork_servers.values())

    def is_due(self, now_ns: int) -> bool:
        """Tell whether next_deadline() has come."""
        due_ns = self.next_deadline()
        return due_ns is not None and due_ns <= now_ns

    def containment(self) -> dict[str, Containment]:
        """Return the containment of each pool whose fork server is up."""
        fork_servers = self._fork_servers.values()
        return {
            each.pool: each.containment for each in fork_servers if each.containment is not None
        }

    # -- workers ------------------------------------------------------------------------------

    def spawn(self, worker: int, pool: str, index: int, build: str = "") -> None:
        """Request a worker of a pool; WorkerForked or SpawnFailed follows."""
        fork_server = self._fork_servers.get((pool, build))
        if fork_server is None:
            self._tell(SpawnFailed(worker, f"pool {pool!r} has no fork server"))
            return
        fork_server.wanted[worker] = index
        self._ask_for_wanted()

    def terminate(self, worker: int) -> None:
        """Send SIGTERM to the worker alone."""
        self.signal(worker, signal.SIGTERM)

    def signal(self, worker: int, signum: int) -> bool:
        """Signal the worker alone; return False if its process is gone or not there yet."""
        record = self._registry.workers.get(worker)
        if record is None:
            return signum in ENDS and self._call_off(worker, signum)
        return self._registry.signal(record, signum)

    def kill(self, worker: int) -> None:
        """Kill the worker and everything it started."""
        record = self._registry.workers.get(worker)
        if record is None:
            self._call_off(worker, signal.SIGKILL)
        else:
            self._registry.end(record)

    def board(self, worker: int) -> Reading | None:
        """Read the worker's scoreboard; None when the worker is gone."""
        record = self._registry.workers.get(worker)
        return record.board.read() if record is not None else None

    def pulse(self, worker: int) -> Pulse | None:
        """Read the pulse on the worker's scoreboard; None when the worker is gone."""
        record = self._registry.workers.get(worker)
        return record.board.pulse() if record is not None else None

    def inits(self) -> dict[int, int]:
        """Return the pid of each worker's init, the root of its process tree."""
        workers = self._registry.workers
        return {number: record.init_pid for number, record in workers.items() if record.pid}

    def pid(self, worker: int) -> int:
        """Return the worker's pid as the host sees it; 0 when it is gone or not known yet."""
        record = self._registry.workers.get(worker)
        return record.pid if record is not None else 0

    def worker_of(self, token: str) -> int | None:
        """Return the worker of a token, once; 0 for a worker that has ended, None for no worker."""
        return self._registry.worker_of(token)

    # -- what happened ------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return what happened since the last call. Call this now and then even if nothing is
        readable: orphans are reaped here."""
        self._watch.turn()
        if self._census.check_due:
            self._registry.look_around()
        self._ask_for_wanted()
        self._registry.spares.tend(self._fork_servers.values())
        if not any(fork_server.awaited for fork_server in self._living):
            # With launches under way an orphan may be an init that is about to be reported.
            reap_inherited(self._known())
            if self._registry.strays_due:
                self._registry.strays_due = kill_inherited(self._known())
        happened, self._happened = self._happened, []
        return happened

    def close(self) -> None:
        """Kill and reap everything that is left, and remove the temporary directories."""
        for key in list(self._fork_servers):
            self.stop_fork_server(*key)
        self._registry.end_all()
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        while self._anyone_left() and (left := deadline - time.monotonic()) > 0:
            self._watch.wait(left)
            self.events()
        while kill_inherited(self._known()) and time.monotonic() < deadline:
            reap_inherited(self._known())
            time.sleep(0.005)  # processes we never made have no descriptor to wait on
        self._registry.forget_all()
        for fork_server in list(self._living):
            self._close_channel(fork_server)
        self._census.close()
        self._run_record.close()
        self._launcher.close()
        self._watch.close()
        self._janitor.close()

    # -- launches -----------------------------------------------------------------------------

    def _ask_for_wanted(self) -> None:
        """Request the workers that wait, as far as fork servers and the census allow."""
        ready = [
            fork_server
            for fork_server in self._fork_servers.values()
            if fork_server.wanted and len(fork_server.awaited) < LAUNCHES_AT_ONCE_MAX
        ]
        due = self._census.due()
        if any((each.pool, index) in due for each in ready for index in each.wanted.values()):
            self._registry.look_around()
        for fork_server in ready:
            for worker, index in list(fork_server.wanted.items()):
                if len(fork_server.awaited) == LAUNCHES_AT_ONCE_MAX:
                    break
                if not self._census.ending(fork_server.pool, index):
                    del fork_server.wanted[worker]
                    self._registry.ask(fork_server, worker, index)

    def _call_off(self, worker: int, signum: int) -> bool:
        """Drop a worker that was not requested yet; return False if there is no such worker."""
        for fork_server in self._living:
            if fork_server.wanted.pop(worker, None) is not None:
                self._tell(WorkerExited(worker, -signum, 0))
                return True
        return False

    # -- handlers of descriptors --------------------------------------------------------------

    def _found(self, pool: str, index: int, processes: int, directories: int) -> None:
        self._tell(LeftoversEnded(pool, index, processes, directories))

    def _tell(self, event: Event) -> None:
        self._happened.append(event)
        self._watch.wake()

    def _channel_ready(self, fork_server: ForkServerProcess) -> None:
        messages, closed = fork_server.hear()
        for message, sender in messages:
            self._heard(fork_server, message, sender)
        if closed:
            self._close_channel(fork_server)

    def _heard(
        self, fork_server: ForkServerProcess, message: ForkServerMessage, sender: int
    ) -> None:
        match message:
            case ForkServerUp():
                fork_server.containment = Containment(message.containment, message.why)
                if self._fork_servers.get(fork_server.key) is fork_server:  # not stopped meanwhile
                    self._code[fork_server.key] = Code(message.sources, time.time_ns())
                    if message.threads:
                        names = ", ".join(message.threads)
                        log.note(
                            "forkserver.threads", "warning", pool=fork_server.pool, threads=names
                        )
                    self._tell(
                        ForkServerReady(fork_server.pool, message.declarations, fork_server.build)
                    )
            case ForkServerDown(reason, sources):
                if self._fork_servers.get(fork_server.key) is fork_server:
                    self.stop_fork_server(*fork_server.key)
                    self._code[fork_server.key] = Code(sources, time.time_ns())
                    self._tell(ForkServerFailed(fork_server.pool, reason, fork_server.build))
            case Forked(launch, init_pid):
                fork_server.awaited.discard(launch)
                self._registry.forked(launch, init_pid)
            case ForkFailed(launch, reason):
                fork_server.awaited.discard(launch)
                self._registry.not_forked({launch}, reason)
            case WorkerPid(launch):
                self._registry.named(launch, sender)

    def _fork_server_ended(self, fork_server: ForkServerProcess) -> None:
        self._drain(fork_server)
        self._watch.remove(fork_server.pidfd)
        code = fork_server.reap()
        if fork_server.channel.fileno() < 0:
            self._living.discard(fork_server)
        reason = f"the fork server {how_it_ended(code)}"
        if fork_server.containment is None:
            reason += " while it loaded the worker class"
        if self._fork_servers.get(fork_server.key) is fork_server:
            del self._fork_servers[fork_server.key]
            # First: the failures of its launches follow from it.
            self._tell(ForkServerExited(fork_server.pool, reason, fork_server.build))
        self._registry.spares.drop(fork_server)
        self._registry.not_forked(fork_server.awaited, reason)
        fork_server.awaited.clear()
        for worker in fork_server.wanted:
            self._tell(SpawnFailed(worker, reason))
        fork_server.wanted.clear()
        self._census.departed(fork_server.mark, fork_server.pool, FORK_SERVER)
        self._registry.look_around()

    # -- endings ------------------------------------------------------------------------------

    def _drain(self, fork_server: ForkServerProcess) -> None:
        if fork_server.channel.fileno() >= 0:
            self._channel_ready(fork_server)

    def _close_channel(self, fork_server: ForkServerProcess) -> None:
        if fork_server.channel.fileno() >= 0:
            self._watch.remove(fork_server.channel.fileno())
            fork_server.channel.close()
        if fork_server.pidfd < 0:
            self._living.discard(fork_server)

    def _anyone_left(self) -> bool:
        return bool(self._registry) or any(fork_server.pidfd >= 0 for fork_server in self._living)

    def _known(self) -> set[int]:
        """Return the pids of the children that we made."""
        known = {fork_server.process.pid for fork_server in self._living if fork_server.pidfd >= 0}
        return known | self._registry.init_pids
