"""One daemon per runtime directory, by a lock that dies with its holder."""

import fcntl
import os
from pathlib import Path

from musterd.ipc.errors import MusterdError

LOCK_FILE = "lock"


class AnotherInstance(MusterdError):
    """The runtime directory is in use; the daemon exits with 69."""


class InstanceLock:
    def __init__(self, runtime_dir: Path) -> None:
        """Take the lock or raise AnotherInstance. The file stays; only the lock counts."""
        path = runtime_dir / LOCK_FILE
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise AnotherInstance(
                f"another musterd (pid {holder}) runs with the runtime directory {runtime_dir}: "
                f"stop it with 'musterctl shutdown', or give supervisor.runtime_dir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
