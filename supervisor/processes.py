"""What the spawner knows of the processes it made, and a few things done to any of them."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from musterd.ipc.scoreboard import Scoreboard
from musterd.supervisor import journal

# Addressed to the daemon alone; a worker that heeded them would speak to systemd in its name.
_ENVIRONMENT_OF_DAEMON = frozenset(
    ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
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
    containment: Containment | None = None  # None until it is up
    awaited: set[int] = field(default_factory=set)  # workers whose fork is not reported yet


@dataclass(slots=True, eq=False)
class WorkerProcess:
    number: int
    nursery: NurseryProcess
    board: Scoreboard
    token: str
    temp_dir: Path
    go_fd: int
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
