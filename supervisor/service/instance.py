"""Locks that allow one daemon per runtime directory and state directory, and die with it."""

import contextlib
import fcntl
import os
from pathlib import Path

from musterd.ipc.errors import ConfigurationError, MusterdError

RUNTIME_LOCK = "lock"
STATE_LOCK = "state.lock"  # another name: both may be the same directory


class AnotherInstance(MusterdError):
    """Another daemon uses the runtime or the state directory; the command exits with 69."""


class InstanceLock:
    def __init__(self, runtime_dir: Path, state_dir: Path) -> None:
        """Take both locks or raise AnotherInstance; the files stay, only the locks count."""
        self._fds = [_lock(runtime_dir / RUNTIME_LOCK, "supervisor.runtime_dir")]
        try:
            self._fds.append(_lock(state_dir / STATE_LOCK, "supervisor.state_dir"))
        except MusterdError:
            self.release()
            raise

    def release(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _lock(path: Path, key: str) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot be opened: {error.strerror}: remove it, or give another {key}"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise AnotherInstance(
            f"another musterd (pid {holder}) runs with {key} = {path.parent}: "
            f"stop it with 'musterctl shutdown', or give another {key}"
        ) from None
    with contextlib.suppress(OSError):  # the disk is full: the pid is for people only
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
