"""The processes that the spawner made: what is known of each, and what can be done to it."""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

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

READ_BYTES = 65536  # as much as a pipe holds
MESSAGES_PER_TURN_MAX = 64  # of one fork server; then the others have their turn

log = logging.getLogger(__name__)

# The events of the spawner.
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
    """How the workers of a pool are contained, and why not better."""

    mode: str
    why: str


@dataclass(slots=True, eq=False)
class ForkServerProcess:
    pool: str
    process: subprocess.Popen[bytes]
    pidfd: int
    channel: socket.socket
    output: Source
    containment: Containment | None = None  # None until the fork server is up
    awaited: set[int] = field(default_factory=set)  # launches that are not reported yet
    wanted: dict[int, int] = field(default_factory=dict)  # not requested yet: worker, its index
    mark: int = 0
    build: str = ""
    spare: "WorkerProcess | None" = None  # a process that is no worker yet (spares.py)
    spare_ns: int = 1  # when the next spare may be made

    def hear(self) -> tuple[list[tuple[ForkServerMessage, int]], bool]:
        """Receive messages of the fork server and its workers, each with the pid of its sender.

        Also tell whether the fork server and all its forks have closed the channel.
        """
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
        """Read the last output, release the process and return its exit code."""
        code = self.process.wait()  # returns at once: the pidfd was readable
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
    line: socket.socket  # to the init and the worker
    mark: int
    group: Path | None  # the control group
    output: Source  # of the worker and its init
    number: int = 0  # which worker this is, 0 for a spare: then the next three mean nothing
    index: int = 0
    token: str = ""
    temp_dir: Path = Path()
    init_pid: int = 0
    init_fd: int = -1  # pidfd
    pid: int = 0
    pidfd: int = -1
    ended: bool = False  # we ended it

    @property
    def mode(self) -> str:
        containment = self.fork_server.containment
        assert containment is not None, "a fork server forks only when it is up"
        return containment.mode

    def kill(self) -> None:
        """Kill the worker, whose init is known, and everything it started."""
        if self.mode == PIDNS:
            send_signal(self.init_fd, signal.SIGKILL)
            return
        if self.group is not None:
            with contextlib.suppress(OSError):  # no descriptor left: the init kills as well
                cgroups.kill(self.group)
        send_signal(self.init_fd, KILL_TREE)
        send_signal(self.init_fd, signal.SIGCONT)  # the init may have been stopped

    def go(self, init_pid: int, init_fd: int) -> None:
        """Let the init, which is our child by now, go on."""
        self.init_pid, self.init_fd = init_pid, init_fd
        self._say(GO)
        if self.number:
            self._tell_who()

    def call(self, worker: int, index: int, token: str, temp_dir: Path) -> None:
        """Make this process a worker: tell it which one as soon as it can hear."""
        assert not self.number, self.number
        self.number, self.index, self.token, self.temp_dir = worker, index, token, temp_dir
        if self.init_fd >= 0:
            self._tell_who()

    def _tell_who(self) -> None:
        self._say(encode(Call(self.index, self.token, str(self.temp_dir))))

    def _say(self, frame: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: the pidfd tells
            self.line.send(frame)

    def is_alone(self) -> bool:
        """Tell whether the init said that nothing else is left. Call this when the line is
        readable: False then means that nothing more will be said."""
        try:
            return self.line.recv(len(ALONE)) == ALONE
        except ConnectionResetError:
            return False

    def name(self, pid: int) -> None:
        """Take the pid of the worker, which the init made."""
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            pass  # dead already: the pidfd of the init tells
        except OSError:
            self.kill()  # no descriptor is left to reach the worker by

    def close(self) -> None:
        """Read the last output and release all but the pidfd of the init."""
        self.output.end()
        self.line.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.board.close()


def open_pidfd(process: "subprocess.Popen[bytes]", output: Source) -> int:
    """Open the pidfd of a new process; if no descriptor is left, end the process and raise."""
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        output.end()
        raise


def reap(init_pid: int, init_fd: int) -> int:
    """Reap an init; return its exit code, or -N for signal N."""
    try:
        result = os.waitid(os.P_PIDFD, init_fd, os.WEXITED)  # returns at once: it was readable
    except ChildProcessError:
        journal.note("worker.status_taken", "error", pid=init_pid)
        return -signal.SIGKILL
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def send_signal(pidfd: int, signum: int) -> bool:
    """Send a signal; return False if the process is gone."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def follow_output(
    process: "subprocess.Popen[bytes]", seconds: float, take: Callable[[bytes], object]
) -> bool:
    """Hand over the output of a process until it ends; return False if the time is up first."""
    end = time.monotonic() + seconds
    output = process.stdout
    assert output is not None
    os.set_blocking(output.fileno(), False)
    pidfd = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            selector.register(pidfd, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                ready = [key.fd for key, _ in selector.select(left)]
                data = output.read(READ_BYTES) if ready else None
                take(data or b"")
                if pidfd in ready:
                    return True
                if data == b"":
                    selector.unregister(output)
            return False
    finally:
        os.close(pidfd)


def how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
