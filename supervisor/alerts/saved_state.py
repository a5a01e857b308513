"""State of the alerts process across restarts: a small file, replaced as a whole."""

import fcntl
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from musterd.supervisor.alerts.rules import RuleState

FILE_BYTES_MAX = 64 * 1024 * 1024  # 50 rules with 500 incidents each: a larger file is not ours


class SavedState(Struct, kw_only=True):
    """The state when it was written."""

    wall_ns: int
    now_ns: int
    daemon_pid: int = 0
    daemon_started: float = 0.0  # wall-clock time
    stopped: bool = False  # the daemon has stopped us, as it does when it shuts down
    seen_at: float = 0.0  # time of the last event seen
    seen_count: int = 0  # events seen of that time
    rules: dict[str, RuleState] = {}


class StateFile:
    """The file, locked by one process at a time."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def lock(self) -> bool:
        """Lock the file; return False while another process has it."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def load(self) -> tuple[SavedState | None, str]:
        """Return the state, or why there is none."""
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=SavedState), ""
        except FileNotFoundError:
            return None, ""
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return None, f"{self._path} cannot be used and is replaced: {error}"

    def save(self, saved: SavedState) -> str:
        """Write the state; return why that failed, or ""."""
        beside = f"{self._path}.new"
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(saved))
            os.replace(beside, self._path)
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}"
        return ""

    def close(self) -> None:
        os.close(self._lock_fd)
