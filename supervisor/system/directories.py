"""Find the daemon's directories, make them, and check that they are safe to use."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.paths import (
    check_private,
    control_socket,
    default_runtime_dir,
    is_writable_directory,
    local_socket,
    node_socket,
    private_runtime_dir,
    tasks_socket,
    workers_socket,
)

__all__ = [
    "check_lengths",
    "check_log_file",
    "control_socket",
    "local_socket",
    "node_socket",
    "prepare",
    "runtime_dir",
    "state_dir",
    "store_file",
    "tasks_socket",
    "workers_socket",
]

SYSTEM_STATE_DIR = Path("/var/lib/musterd")
STORE_FILE = "store.db"

# Clients of other users reach the sockets, which have groups of their own, through this directory.
RUNTIME_DIR_MODE = 0o755
# The store holds the arguments and results of every task.
PRIVATE_DIR_MODE = 0o700


def runtime_dir(configured: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of the sockets; `configured` is supervisor.runtime_dir, "" for the
    usual place."""
    if configured:
        return Path(configured)
    return default_runtime_dir(os.environ if environ is None else environ)


def state_dir(
    configured: str,
    environ: Mapping[str, str] | None = None,
    system_dir: Path = SYSTEM_STATE_DIR,
) -> Path:
    """Return the directory of the store; `configured` is supervisor.state_dir, "" for the usual
    place."""
    if configured:
        return Path(configured)
    if os.geteuid() == 0 or is_writable_directory(system_dir):
        return system_dir
    home = (os.environ if environ is None else environ).get("HOME", "")
    if not home.startswith("/"):
        raise ConfigurationError("no home directory is known ($HOME): give supervisor.state_dir")
    return Path(home, ".local/state/musterd")


def store_file(state_dir: Path) -> Path:
    return state_dir / STORE_FILE


def check_lengths(runtime_dir: Path) -> None:
    """Raise ConfigurationError if the path of a socket in the directory would be too long."""
    for socket in (control_socket, tasks_socket, workers_socket):
        socket(runtime_dir)


def check_log_file(log_file: str) -> None:
    """Raise ConfigurationError if the log file cannot be written; make nothing. "" is no file."""
    if not log_file:
        return
    path = Path(log_file)
    problem = ""
    if path.is_dir():
        problem = "is a directory"
    elif path.exists():
        problem = "" if _writable(path) else "is not writable"
    elif not path.parent.is_dir():
        problem = "its directory does not exist"
    elif not _writable(path.parent):
        problem = "its directory is not writable"
    if problem:
        raise ConfigurationError(
            f"supervisor.log_file = {log_file!r}: {problem}: make it so that uid {os.geteuid()} "
            "can write it, or give another"
        )


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=True)


def prepare(runtime_dir: Path, state_dir: Path, environ: Mapping[str, str] | None = None) -> None:
    """Make both directories if they are missing; ConfigurationError if one is unsafe."""
    check_lengths(runtime_dir)
    private = runtime_dir == private_runtime_dir(os.environ if environ is None else environ)
    if private:
        check_private(runtime_dir)
    mode = PRIVATE_DIR_MODE if private else RUNTIME_DIR_MODE
    _prepare(runtime_dir, mode, "supervisor.runtime_dir")
    _prepare(state_dir, PRIVATE_DIR_MODE, "supervisor.state_dir")
    if private:
        check_private(runtime_dir)  # now nobody else can replace it


def _prepare(folder: Path, mode: int, key: str) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(PRIVATE_DIR_MODE)
        except FileExistsError:
            pass  # checked below, whoever made it
        else:
            folder.chmod(mode)  # mkdir obeys the umask
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(
            f"{folder}: cannot be made: {error.strerror}: make it, or give another {key}"
        ) from None
    _check(folder, status, key)


def _check(folder: Path, status: os.stat_result, key: str) -> None:
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory: remove it"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to uid {status.st_uid}, not to uid {os.geteuid()}: run chown on it"
    elif status.st_mode & stat.S_IWOTH:
        problem = f"is writable for everybody ({stat.filemode(status.st_mode)}): run chmod o-w"
    elif os.statvfs(folder).f_flag & os.ST_RDONLY:
        problem = "is on a file system that is mounted read-only: remount it"
    elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        problem = f"is not writable ({stat.filemode(status.st_mode)}): run chmod u+rwx on it"
    if problem:
        raise ConfigurationError(f"{folder}: {problem}, or give another {key}")
