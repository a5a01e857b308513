"""What the spawner knows of the processes it made, and a few things done to any of them."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from musterd.ipc.wire.environment import TO_DAEMON
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.supervisor.core.model.events import (
    ForkServerExited,
    ForkServerFailed,
    ForkServerReady,
    LeftoversEnded,
    SpawnFailed,
    WorkerExited,
    WorkerForked,
)
from musterd.supervisor.log import log as journal
from musterd.supervisor.log.worker_output import Source
from musterd.supervisor.processes import cgroups
from musterd.supervisor.processes.forkserver_messages import (
    Call,
    ForkServerMessage,
    encode,
    receive,
)
from musterd.supervisor.processes.init import ALONE, GO, KILL_TREE, PIDNS

MESSAGES_PER_TURN_MAX = 64  # taken from one fork server before the others have their turn

log = logging.getLogger(__name__)

# What the spawner tells.
Event = (
    ForkServerReady
    | ForkServerFailed
    | ForkServerExited
    | WorkerForked
    | SpawnFailed
    | WorkerExited
    | LeftoversEnded
)


class Containment(NamedTuple):
    """What keeps the workers of a pool together, and why not more."""

    mode: str
    why: str


@dataclass(slots=True, eq=False)
class ForkServerProcess:
    pool: str
    process: subprocess.Popen[bytes]
    pidfd: int
    channel: socket.socket
    output: Source  # what it says
    containment: Containment | None = None  # None until it is up
    awaited: set[int] = field(default_factory=set)  # births that are not reported yet
    wanted: dict[int, int] = field(default_factory=dict)  # not asked for yet: worker, its index
    mark: int = 0
    build: str = ""
    spare: "WorkerProcess | None" = None  # one that is nobody yet (spares.py)
    spare_ns: int = 1  # when the next may be made

    def hear(self) -> tuple[list[tuple[ForkServerMessage, int]], bool]:
        """What it and its workers have said, each with the pid that said it, up to a limit; and
        whether the fork server and all its forks have closed the channel."""
        heard: list[tuple[ForkServerMessage, int]] = []
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                received = receive(self.channel)
            except BlockingIOError:
                break
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.error("malformed message of a fork server dropped: %s", error)
                continue
            if received is None:
                return heard, True
            heard.append(received)
        return heard, False

    def reap(self) -> int:
        """How it ended, after what it has said to the end."""
        code = self.process.wait()  # at once: its pidfd said so
        self.output.end()
        os.close(self.pidfd)
        self.pidfd = -1
        return code

    @property
    def key(self) -> tuple[str, str]:
        return self.pool, self.build


@dataclass(slots=True, eq=False)
class WorkerProcess:
    launch: int
    fork_server: ForkServerProcess
    board: Scoreboard
    line: socket.socket  # to its init and to itself
    mark: int
    group: Path | None  # its control group
    output: Source  # what it and its init say
    number: int = 0  # which worker it is, 0 for none yet: then the next three say nothing
    index: int = 0
    token: str = ""
    temp_dir: Path = Path()
    init_pid: int = 0
    init_fd: int = -1  # pidfd
    pid: int = 0
    pidfd: int = -1
    ended: bool = False  # we asked for its end

    @property
    def mode(self) -> str:
        containment = self.fork_server.containment
        assert containment is not None, "a fork server forks only after it is up"
        return containment.mode

    def kill(self) -> None:
        """The worker, whose init is known, and everything it started."""
        if self.mode == PIDNS:
            send_signal(self.init_fd, signal.SIGKILL)
            return
        if self.group is not None:
            with contextlib.suppress(OSError):  # no descriptor for it: its init kills as well
                cgroups.kill(self.group)
        send_signal(self.init_fd, KILL_TREE)
        send_signal(self.init_fd, signal.SIGCONT)  # it may have been stopped

    def go(self, init_pid: int, init_fd: int) -> None:
        """Lets its init, which is our child by now, go on."""
        self.init_pid, self.init_fd = init_pid, init_fd
        self._say(GO)
        if self.number:
            self._tell_who()

    def call(self, worker: int, index: int, token: str, temp_dir: Path) -> None:
        """Makes it this worker: it is told as soon as it can hear."""
        assert not self.number, self.number
        self.number, self.index, self.token, self.temp_dir = worker, index, token, temp_dir
        if self.init_fd >= 0:
            self._tell_who()

    def _tell_who(self) -> None:
        self._say(encode(Call(self.index, self.token, str(self.temp_dir))))

    def _say(self, frame: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: its pidfd tells
            self.line.send(frame)

    def is_alone(self) -> bool:
        """Whether its init said that nothing is left but itself. Asked when the line is readable,
        so a False means that nothing more will be said."""
        try:
            return self.line.recv(len(ALONE)) == ALONE
        except ConnectionResetError:
            return False

    def name(self, pid: int) -> None:
        """This is the worker: its init made it."""
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            pass  # dead already: its init's pidfd tells
        except OSError:
            self.kill()  # no descriptor is left to reach it by

    def close(self) -> None:
        """All but its init's pidfd, after what it has said to the end; nothing is said to it."""
        self.output.end()
        self.line.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.board.close()


def reap(init_pid: int, init_fd: int) -> int:
    """How an init ended: an exit code, or -N for signal N."""
    try:
        result = os.waitid(os.P_PIDFD, init_fd, os.WEXITED)  # at once: its pidfd said so
    except ChildProcessError:
        journal.note("worker.status_taken", "error", pid=init_pid)
        return -signal.SIGKILL
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def environment() -> dict[str, str]:
    """For a process that is part of the daemon: the web's, that of alerts, a clean-up."""
    return {k: v for k, v in os.environ.items() if k not in TO_DAEMON}


def send_signal(pidfd: int, signum: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
