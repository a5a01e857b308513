"""Makes fork servers, and what a worker needs before its fork server is asked for it."""

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
    ForkServerSetup,
    WorkerSettings,
    encode,
)
from musterd.supervisor.processes.handles import ForkServerProcess, WorkerProcess
from musterd.supervisor.processes.init import CGROUP
from musterd.supervisor.processes.orphans import directory_name
from musterd.supervisor.processes.previous_run import RunRecord

# The daemon keeps a few descriptors for each worker; with the usual soft limit of 1024 a fleet of
# some hundred workers would run out of them. More than this nobody needs.
OPEN_FILES_MAX = 65_536


def raise_open_files_limit() -> int:
    """For this process; what the soft limit was before. Fork servers get that one back: a program
    that uses select() cannot have more than 1024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


class Launcher:
    def __init__(
        self,
        workers_socket: str,
        containment: str,
        runtime: str,
        *,
        temp_root: Path,
        run_record: RunRecord,
        outputs: Outputs,
        is_doomed: Callable[[Path], bool],
    ) -> None:
        """`is_doomed` tells whether a directory is going to be removed."""
        self._workers_socket = workers_socket
        self._containment = containment
        self._runtime = runtime
        self._temp_root = temp_root
        self._run_record = run_record
        self._outputs = outputs
        self._is_doomed = is_doomed
        self._fork_servers = 0
        self._launches = 0
        self._own_pidfd = os.pidfd_open(os.getpid())
        self._open_files = raise_open_files_limit()

    def open_fork_server(
        self,
        pool: str,
        worker: str,
        options: bytes,
        env: Mapping[str, str],
        worker_settings: WorkerSettings,
    ) -> ForkServerProcess:
        """A process that begins to load the worker class. OSError if it cannot be made."""
        self._fork_servers += 1
        setup = ForkServerSetup(
            pool,
            worker,
            options,
            self._workers_socket,
            self._containment,
            worker_settings,
            self._runtime,
            marks.of_fork_server(self._run_record.run, self._fork_servers),
            self._run_record.group,
            self._run_record.group_refused,
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
        return ForkServerProcess(pool, process, pidfd, ours, output, mark=setup.mark)

    def ask(self, fork_server: ForkServerProcess) -> WorkerProcess:
        """Make what any worker needs, and ask its fork server for one. OSError
        if that fails, and then nothing of it is left."""
        self._run_record.note()  # before there is somebody to be found
        self._launches += 1
        mark = marks.of_worker(self._run_record.run, self._launches)
        group = None
        with contextlib.ExitStack() as undo:
            if fork_server.containment is not None and fork_server.containment.mode == CGROUP:
                group = Path(self._run_record.group, f"{fork_server.pool}-{self._launches}")
                group.mkdir()
                undo.callback(cgroups.remove, group)
            board = Scoreboard.create()
            undo.callback(board.close)
            line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(line.close)
            request = ForkRequest(self._launches, mark, "" if group is None else str(group))
            with theirs, self._outputs.open(fork_server.pool, known=False) as output:
                line.setblocking(False)
                fds = [board.fd, theirs.fileno(), output.write_fd]
                socket.send_fds(fork_server.channel, [encode(request)], fds)
            undo.pop_all()
        return WorkerProcess(self._launches, fork_server, board, line, mark, group, output)

    def call(self, record: WorkerProcess, worker: int, index: int) -> None:
        """From now on it is this worker. OSError if that fails, and then it is none."""
        temp_dir = self._make_directory(record.fork_server.pool, index, worker)
        self._outputs.introduce(record.output, f"{record.fork_server.pool}/{index}")
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
