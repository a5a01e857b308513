"""All processes that fork servers made, each from its request until nothing of it is left.

Each process has a launch number, and becomes a worker when it is called (launcher.py): at once, or,
as a spare (spares.py), when a worker is needed. The registry reports the fate of a worker as an
event of the core, and nothing about spares.

An end has two signs. ALONE on the line of an init says that nothing else is left of its worker:
then the end is reported, and the init is reaped silently later. Without ALONE, because the init was
killed or something outlived the worker, the end of the init is the sign.
"""

import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Set

from musterd.supervisor.core.model.events import SpawnFailed, WorkerExited, WorkerForked
from musterd.supervisor.log import log
from musterd.supervisor.processes.epoll import Watch
from musterd.supervisor.processes.handles import (
    Event,
    ForkServerProcess,
    WorkerProcess,
    how_it_ended,
    reap,
    send_signal,
)
from musterd.supervisor.processes.init import FORWARDED, PIDNS
from musterd.supervisor.processes.launcher import Launcher
from musterd.supervisor.processes.oom import OomWatch
from musterd.supervisor.processes.orphans import Census
from musterd.supervisor.processes.spares import Spares
from musterd.supervisor.processes.tempdirs import Janitor

ENDED_TOKENS_MAX = 100  # of workers whose hello may still be unread
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)  # they end a worker that has not begun


class ProcessRegistry:
    def __init__(
        self,
        watch: Watch,
        launcher: Launcher,
        census: Census,
        janitor: Janitor,
        oom: OomWatch,
        *,
        tell: Callable[[Event], None],
        hear: Callable[[ForkServerProcess], None],
    ) -> None:
        """Take `hear`, which receives what a fork server and its forks have said until now."""
        self._watch = watch
        self._launcher = launcher
        self._census = census
        self._janitor = janitor
        self._oom = oom
        self._tell = tell
        self._hear = hear
        self.spares = Spares(self._launch, self.end)
        self.workers: dict[int, WorkerProcess] = {}  # by number
        self._launched: dict[int, WorkerProcess] = {}  # by launch: workers, and those not called
        self._leaving: dict[int, int] = {}  # inits that were alone and end: pid, pidfd
        self._tokens: dict[str, int] = {}
        self._ended_tokens: deque[str] = deque(maxlen=ENDED_TOKENS_MAX)
        self.strays_due = False  # an init was killed, and its worker's processes are loose

    def __bool__(self) -> bool:
        """Tell whether any process is left."""
        return bool(self._launched or self._leaving)

    @property
    def init_pids(self) -> set[int]:
        """The pids of all inits that are left."""
        return {record.init_pid for record in self._launched.values()} | self._leaving.keys()

    def worker_of(self, token: str) -> int | None:
        """Return the worker of a token, once: the token is worthless after that.

        0 for a worker that ended before its hello was read.
        """
        return 0 if token in self._ended_tokens else self._tokens.pop(token, None)

    def look_around(self) -> None:
        """Find and end what dead workers have left."""
        directories = {record.temp_dir.name for record in self.workers.values()}
        self._census.look(directories, self._leaving.keys())

    # -- launches -----------------------------------------------------------------------------

    def ask(self, fork_server: ForkServerProcess, worker: int, index: int) -> None:
        """Make the spare, or a new process, this worker. WorkerForked or SpawnFailed follows."""
        self.spares.settle(fork_server)
        record = self.spares.take(fork_server)
        try:
            record = record or self._launch(fork_server)
            self._launcher.call(record, worker, index)
        except OSError as error:
            if record is not None:
                self.end(record)
            self._tell(SpawnFailed(worker, f"the worker cannot be prepared: {error}"))
            return
        self.workers[worker] = record
        self._tokens[record.token] = worker
        if record.pid:
            self._tell(WorkerForked(worker, record.pid))

    def _launch(self, fork_server: ForkServerProcess) -> WorkerProcess:
        """Request a process that is no worker yet. OSError if that fails."""
        record = self._launcher.ask(fork_server)
        fork_server.awaited.add(record.launch)
        self._launched[record.launch] = record
        return record

    def forked(self, launch: int, init_pid: int) -> None:
        """Watch an init, which is our child by now, then let it go on."""
        record = self._launched.get(launch)
        if record is None:
            return  # given up: the init sees its line closed
        try:
            init_fd = os.pidfd_open(init_pid)
        except OSError as error:
            self.not_forked({launch}, f"its init cannot be watched: {error}")
            return
        self._watch.add(init_fd, functools.partial(self._init_ended, record))
        self._watch.add(record.line.fileno(), functools.partial(self._line_ready, record))
        record.go(init_pid, init_fd)

    def named(self, launch: int, pid: int) -> None:
        """Take the pid of the process below its init."""
        record = self._launched.get(launch)
        if record is None:
            return
        record.name(pid)
        if record.number:
            self._tell(WorkerForked(record.number, pid))

    def not_forked(self, launches: Set[int], reason: str) -> None:
        """Give up launches that failed."""
        for launch in sorted(launches & self._launched.keys()):
            record = self._launched[launch]
            self._give_up(record, SpawnFailed(record.number, reason))

    # -- endings ------------------------------------------------------------------------------

    def signal(self, record: WorkerProcess, signum: int) -> bool:
        """Signal the worker alone; return False if its process is gone or not there yet."""
        record.ended |= signum == signal.SIGKILL
        if record.pidfd >= 0:
            return send_signal(record.pidfd, signum)
        if record.init_fd >= 0:  # not forked yet; the init forwards signals that end a process
            return signum in FORWARDED and send_signal(record.init_fd, signum)
        if signum in ENDS:
            self._give_up(record, WorkerExited(record.number, -signum, 0))
            return True
        return False

    def end(self, record: WorkerProcess) -> None:
        """Kill a process with everything it started."""
        record.ended = True
        if record.init_fd >= 0:
            record.kill()
        else:
            self._give_up(record, WorkerExited(record.number, -signal.SIGKILL, 0))

    def end_all(self) -> None:
        for record in list(self._launched.values()):
            self.end(record)
        for init_fd in self._leaving.values():
            send_signal(init_fd, signal.SIGKILL)

    def forget_all(self) -> None:
        """Drop the processes that resist."""
        for record in list(self._launched.values()):
            log.note("worker.resists", "error", pid=record.pid)
            self._forget(record)
        for init_fd in self._leaving.values():
            os.close(init_fd)

    def _give_up(self, record: WorkerProcess, event: Event) -> None:
        """End a process that has not begun: its init never sees GO. Report `event` of a worker."""
        self._forget(record)
        if record.number:
            self._tell(event)

    def _line_ready(self, record: WorkerProcess) -> None:
        """Hear that an init is alone, or that it ends without saying so."""
        self._watch.remove(record.line.fileno())
        if record.is_alone():
            self._watch.remove(record.init_fd)
            self._watch.add(record.init_fd, functools.partial(self._left, record.init_pid))
            self._leaving[record.init_pid] = record.init_fd
            self._ended(record, 0)

    def _left(self, init_pid: int) -> None:
        """Reap an init that was alone."""
        init_fd = self._leaving.pop(init_pid)
        self._watch.remove(init_fd)
        reap(init_pid, init_fd)
        os.close(init_fd)

    def _init_ended(self, record: WorkerProcess) -> None:
        self._ended(record, reap(record.init_pid, record.init_fd))

    def _ended(self, record: WorkerProcess, code: int) -> None:
        """Report an end that left nothing. `code` counts unless the board has an exit status."""
        if not record.pid:
            self._hear(record.fork_server)  # the worker may have sent its pid and ended since
            if record.launch not in self._launched:
                return  # given up with its fork server
        reading = record.board.read()
        if reading.exit_status is not None:
            code = reading.exit_status
        self._forget(record)
        if not record.number:
            return
        if record.mode != PIDNS and reading.exit_status is None:
            self.strays_due = True  # the init was killed: its descendants are our children now
            self.look_around()
        if record.pid or record.ended:
            lease = reading.lease or reading.unsent  # it may have died while sending its result
            oom = ""
            if code == -signal.SIGKILL and not record.ended:
                oom = self._oom.verdict(time.monotonic_ns())
            words, unhealthy = reading.last_words, reading.unhealthy
            beside = tuple(each for each, _ in reading.beside)
            self._tell(WorkerExited(record.number, code, lease, words, oom, unhealthy, beside))
        else:
            reason = (
                reading.last_words or f"its init {how_it_ended(code)} before there was a worker"
            )
            self._tell(SpawnFailed(record.number, reason))

    def _forget(self, record: WorkerProcess) -> None:
        del self._launched[record.launch]
        if record.fork_server.spare is record:  # neither taken nor dropped
            self.spares.lost(record.fork_server)
        self._watch.discard(record.line.fileno())
        record.close()
        alone = record.init_pid in self._leaving
        if record.init_fd >= 0 and not alone:
            self._watch.remove(record.init_fd)
            os.close(record.init_fd)
        if record.group is not None:
            self._census.remove_group(record.group)
        if not record.number:
            return  # a spare has neither token nor directory
        del self.workers[record.number]
        if self._tokens.pop(record.token, None) is not None:
            self._ended_tokens.append(record.token)
        if record.init_fd >= 0:
            vouched = alone and record.mode == PIDNS
            self._census.departed(record.mark, record.fork_server.pool, record.index, alone=vouched)
        self._janitor.remove(record.temp_dir)
