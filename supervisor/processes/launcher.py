"""Makes nurseries, and what a worker needs before its nursery is asked for it."""

import contextlib
import os
import resource
import secrets
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.supervisor.log.worker_output import Outputs
from musterd.supervisor.processes import cgroups, marks
from musterd.supervisor.processes.environment import inherited
from musterd.supervisor.processes.forkserver import COMMAND
from musterd.supervisor.processes.forkserver_messages import (
    ForkRequest,
    Habits,
    NurserySetup,
    encode,
)
from musterd.supervisor.processes.handles import NurseryProcess, WorkerProcess
from musterd.supervisor.processes.init import CGROUP
from musterd.supervisor.processes.orphans import directory_name
from musterd.supervisor.processes.previous_run import Estate

# The daemon keeps a few descriptors for each worker; with the usual soft limit of 1024 a fleet of
# some hundred workers would run out of them. More than this nobody needs.
OPEN_FILES_MAX = 65_536


def raise_open_files_limit() -> int:
    """For this process; what the soft limit was before. Nurseries get that one back: a program
    that uses select() cannot have more than 1024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


class Midwife:
    def __init__(
        self,
        workers_socket: str,
        containment: str,
        runtime: str,
        *,
        temp_root: Path,
        estate: Estate,
        outputs: Outputs,
        is_doomed: Callable[[Path], bool],
    ) -> None:
        """`is_doomed` tells whether a directory is going to be removed."""
        self._workers_socket = workers_socket
        self._containment = containment
        self._runtime = runtime
        self._temp_root = temp_root
        self._estate = estate
        self._outputs = outputs
        self._is_doomed = is_doomed
        self._nurseries = 0
        self._births = 0
        self._own_pidfd = os.pidfd_open(os.getpid())
        self._open_files = raise_open_files_limit()

    def open_nursery(
        self, pool: str, worker: str, options: bytes, env: Mapping[str, str], habits: Habits
    ) -> NurseryProcess:
        """A process that begins to load the worker class. OSError if it cannot be made."""
        self._nurseries += 1
        setup = NurserySetup(
            pool,
            worker,
            options,
            self._workers_socket,
            self._containment,
            habits,
            self._runtime,
            marks.of_nursery(self._estate.run, self._nurseries),
            self._estate.group,
            self._estate.group_refused,
            self._open_files,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs:
            try:
                socket.send_fds(ours, [encode(setup)], [self._own_pidfd])
                with self._outputs.open(pool) as output:
                    process = subprocess.Popen(
                        [*COMMAND, str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=output.write_fd,
                        stderr=output.write_fd,
                        start_new_session=True,  # a terminal's ^C is for the daemon alone
                        env={**inherited(os.environ), **env},
                    )
            except OSError:
                ours.close()
                raise
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            output.end()
            ours.close()
            raise
        return NurseryProcess(pool, process, pidfd, ours, output, mark=setup.mark)

    def ask(self, nursery: NurseryProcess) -> WorkerProcess:
        """All that a worker needs whichever it will be, and its nursery was asked for it. OSError
        if that fails, and then nothing of it is left."""
        self._estate.note()  # before there is somebody to be found
        self._births += 1
        mark = marks.of_worker(self._estate.run, self._births)
        group = None
        with contextlib.ExitStack() as undo:
            if nursery.containment is not None and nursery.containment.mode == CGROUP:
                group = Path(self._estate.group, f"{nursery.pool}-{self._births}")
                group.mkdir()
                undo.callback(cgroups.remove, group)
            board = Scoreboard.create()
            undo.callback(board.close)
            line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(line.close)
            request = ForkRequest(self._births, mark, "" if group is None else str(group))
            with theirs, self._outputs.open(nursery.pool, known=False) as output:
                line.setblocking(False)
                fds = [board.fd, theirs.fileno(), output.write_fd]
                socket.send_fds(nursery.channel, [encode(request)], fds)
            undo.pop_all()
        return WorkerProcess(self._births, nursery, board, line, mark, group, output)

    def call(self, record: WorkerProcess, worker: int, index: int) -> None:
        """From now on it is this worker. OSError if that fails, and then it is none."""
        temp_dir = self._make_directory(record.nursery.pool, index, worker)
        self._outputs.introduce(record.output, f"{record.nursery.pool}/{index}")
        record.call(worker, index, secrets.token_hex(16), temp_dir)

    def _make_directory(self, pool: str, index: int, worker: int) -> Path:
        """For what the worker writes; of another name if something is in the way that an earlier
        daemon has left and that cannot be removed, or is about to be."""
        directory = self._temp_root / directory_name(pool, index, worker)
        if directory.exists() or self._is_doomed(directory):
            directory = self._temp_root / directory_name(pool, index, secrets.randbits(62))
        try:
            directory.mkdir(mode=0o700)
        except FileNotFoundError:  # somebody has removed the state directory, and it is back
            self._temp_root.mkdir(mode=0o700)
            directory.mkdir(mode=0o700)
        return directory

    def close(self) -> None:
        self._outputs.close()
        os.close(self._own_pidfd)
