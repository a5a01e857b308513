"""What the spawner knows of the processes it made, and a few things done to any of them."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from musterd.ipc.scoreboard import Scoreboard
from musterd.supervisor import cgroups, journal
from musterd.supervisor.core.events import (
    LeftoversEnded,
    NurseryExited,
    NurseryFailed,
    NurseryReady,
    SpawnFailed,
    WorkerExited,
    WorkerForked,
)
from musterd.supervisor.init import GO, KILL_TREE, PIDNS
from musterd.supervisor.nursery_messages import NurseryMessage, receive
from musterd.supervisor.outputs import Source

MESSAGES_PER_TURN_MAX = 64  # taken from one nursery before the others have their turn

log = logging.getLogger(__name__)

# What the spawner tells.
Event = (
    NurseryReady
    | NurseryFailed
    | NurseryExited
    | WorkerForked
    | SpawnFailed
    | WorkerExited
    | LeftoversEnded
)

# Addressed to the daemon alone; a worker that heeded them would speak to systemd in its name.
_ENVIRONMENT_OF_DAEMON = frozenset(
    (
        "NOTIFY_SOCKET",
        "WATCHDOG_PID",
        "WATCHDOG_USEC",
        "LISTEN_PID",
        "LISTEN_FDS",
        "LISTEN_FDNAMES",
        "MEMORY_PRESSURE_WATCH",
        "MEMORY_PRESSURE_WRITE",
    )
)


class Containment(NamedTuple):
    """What keeps the workers of a pool together, and why not more."""

    mode: str
    why: str


@dataclass(slots=True, eq=False)
class NurseryProcess:
    pool: str
    process: subprocess.Popen[bytes]
    pidfd: int
    channel: socket.socket
    output: Source  # what it says
    containment: Containment | None = None  # None until it is up
    awaited: set[int] = field(default_factory=set)  # workers whose fork is not reported yet
    wanted: dict[int, int] = field(default_factory=dict)  # not asked for yet: worker, its index
    mark: int = 0
    build: str = ""

    def hear(self) -> tuple[list[tuple[NurseryMessage, int]], bool]:
        """What it and its workers have said, each with the pid that said it, up to a limit; and
        whether the nursery and all its forks have closed the channel."""
        heard: list[tuple[NurseryMessage, int]] = []
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                received = receive(self.channel)
            except BlockingIOError:
                break
            except msgspec.DecodeError as error:
                log.error("malformed message of a nursery dropped: %s", error)
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
    number: int
    index: int
    nursery: NurseryProcess
    board: Scoreboard
    token: str
    temp_dir: Path
    go_fd: int
    mark: int
    group: Path | None  # its control group
    output: Source  # what it and its init say
    init_pid: int = 0
    init_fd: int = -1  # pidfd
    pid: int = 0
    pidfd: int = -1
    ended: bool = False  # we asked for its end

    @property
    def mode(self) -> str:
        containment = self.nursery.containment
        assert containment is not None, "a nursery forks only after it is up"
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

    def go(self) -> None:
        """Lets its init go on."""
        with contextlib.suppress(BrokenPipeError):  # dead already: its pidfd tells
            os.write(self.go_fd, GO)
        os.close(self.go_fd)
        self.go_fd = -1

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
        """Its descriptors, after what it has said to the end; nothing is said to it."""
        self.output.end()
        for fd in (self.go_fd, self.init_fd, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.board.close()

    def reap(self) -> int:
        """How the init ended: an exit code, or -N for signal N."""
        try:
            result = os.waitid(os.P_PIDFD, self.init_fd, os.WEXITED)  # at once: its pidfd said so
        except ChildProcessError:
            journal.note("worker.status_taken", "error", pid=self.init_pid)
            return -signal.SIGKILL
        assert result is not None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in _ENVIRONMENT_OF_DAEMON}
    return {**inherited, **extra}


def send_signal(pidfd: int, signum: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
