"""What is remembered from one life to the next: a small file, replaced as a whole."""

import fcntl
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from musterd.supervisor.alerts.rules import RuleState

FILE_BYTES_MAX = 64 * 1024 * 1024  # 50 rules with 500 matters each: a larger one is not ours


class Memory(Struct, kw_only=True):
    """What was so when it was written."""

    wall_ns: int
    now_ns: int
    daemon_pid: int = 0
    daemon_started: float = 0.0  # wall-clock time
    stopped: bool = False  # the daemon has ended us, as it does at its own end
    seen_at: float = 0.0  # the time of the last event that was heard
    seen_count: int = 0  # and how many of that time
    rules: dict[str, RuleState] = {}


class MemoryFile:
    """One process at a time has it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def lock(self) -> bool:
        """False while another process has it."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def load(self) -> tuple[Memory | None, str]:
        """What is there, or why nothing is."""
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=Memory), ""
        except FileNotFoundError:
            return None, ""
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return None, f"{self._path} cannot be used, and is begun anew: {error}"

    def save(self, memory: Memory) -> str:
        """Why it could not be written, or ""."""
        beside = f"{self._path}.new"
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(memory))
            os.replace(beside, self._path)
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}"
        return ""

    def close(self) -> None:
        os.close(self._lock_fd)
