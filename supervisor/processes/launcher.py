"""Start fork servers, and prepare what a worker needs before its fork."""

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
from musterd.supervisor.processes.handles import ForkServerProcess, WorkerProcess, open_pidfd
from musterd.supervisor.processes.init import CGROUP
from musterd.supervisor.processes.orphans import directory_name
from musterd.supervisor.processes.previous_run import RunRecord

# The daemon keeps a few descriptors for each worker; the usual soft limit of 1024 is too low for
# some hundred workers. Nobody needs more than this.
OPEN_FILES_MAX = 65_536


def raise_open_files_limit() -> int:
    """Raise the soft limit of this process; return the former one. Fork servers get that one back:
    a program that uses select() cannot have more than 1024 descriptors."""
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
        """Take `is_doomed`, which tells whether a directory is going to be removed."""
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
        """Start a process that loads the worker class. OSError if that fails."""
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
                pidfd = open_pidfd(process, output)
            except OSError:
                ours.close()
                raise
        return ForkServerProcess(pool, process, pidfd, ours, output, mark=setup.mark)

    def ask(self, fork_server: ForkServerProcess) -> WorkerProcess:
        """Prepare a process and request it from the fork server. OSError leaves nothing behind."""
        self._run_record.note()  # before there is a process to be found
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
        """Make the process this worker. OSError if that fails: then it is none."""
        temp_dir = self._make_directory(record.fork_server.pool, index, worker)
        self._outputs.introduce(record.output, f"{record.fork_server.pool}/{index}")
        record.call(worker, index, secrets.token_hex(16), temp_dir)

    def _make_directory(self, pool: str, index: int, worker: int) -> Path:
        """Make the worker's temporary directory; under another name if an earlier daemon has left
        one that cannot be removed or is about to be removed."""
        directory = self._temp_root / directory_name(pool, index, worker)
        if directory.exists() or self._is_doomed(directory):
            directory = self._temp_root / directory_name(pool, index, secrets.randbits(62))
        try:
            directory.mkdir(mode=0o700)
        except FileNotFoundError:  # the state directory was removed and made again
            self._temp_root.mkdir(mode=0o700)
            directory.mkdir(mode=0o700)
        return directory

    def close(self) -> None:
        self._outputs.close()
        os.close(self._own_pidfd)
