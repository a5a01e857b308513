"""Where the sockets are, for daemon and clients alike. Nothing is created here.

The runtime directory is /run/musterd for root, or where this user may write to it; else
$XDG_RUNTIME_DIR/musterd; else a private directory under the temporary directory. Clients take the
first of these that has the socket; but within a project that `musterd dev` runs, they take that.
"""

import os
import socket as sockets
import stat
from collections.abc import Mapping
from pathlib import Path

from musterd.ipc.errors import ConfigurationError

SYSTEM_RUNTIME_DIR = Path("/run/musterd")
PROJECT_DIR = ".musterd"  # of `musterd dev`, in the folder of the project
PROJECT_RUNTIME_DIR = f"{PROJECT_DIR}/run"
CONTROL_SOCKET = "control.sock"
TASKS_SOCKET = "tasks.sock"
WORKERS_SOCKET = "workers.sock"
NODE_SOCKET = "node.sock"
LOCAL_SOCKET = "local.sock"
TASKS_VARIABLE = "MUSTERD_TASKS"

# sun_path of a Unix socket address has 108 bytes, the last for the NUL (unix(7)).
SOCKET_PATH_BYTES_MAX = 107


def default_runtime_dir(environ: Mapping[str, str], system_dir: Path = SYSTEM_RUNTIME_DIR) -> Path:
    """Return the default runtime directory of this user's daemon."""
    if os.geteuid() == 0 or is_writable_directory(system_dir):
        return system_dir
    session = session_runtime_dir(environ)
    if session is not None and is_writable_directory(session.parent):
        return session
    return private_runtime_dir(environ)


def session_runtime_dir(environ: Mapping[str, str]) -> Path | None:
    """Return $XDG_RUNTIME_DIR/musterd; None if the variable is unset or no absolute path."""
    session = environ.get("XDG_RUNTIME_DIR", "")
    return Path(session, "musterd") if session.startswith("/") else None


def private_runtime_dir(environ: Mapping[str, str]) -> Path:
    """Return this user's directory under the temporary directory."""
    temporary = environ.get("TMPDIR", "")
    return Path(temporary if temporary.startswith("/") else "/tmp", f"musterd-{os.geteuid()}")


def is_writable_directory(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK, effective_ids=True)


def private_problem(path: Path) -> str:
    """Return why somebody else may have made or filled the directory; "" if nobody can.

    Anybody may create a name under the temporary directory, and whoever was first could pose as
    the daemon.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""  # nobody was first
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    uid, mode = os.geteuid(), status.st_mode
    if stat.S_ISDIR(mode) and status.st_uid == uid and not mode & 0o077:
        return ""
    return (
        f"must be a directory of uid {uid} with mode 0700, but it has uid {status.st_uid} "
        f"and mode {stat.filemode(mode)}"
    )


def check_private(path: Path) -> None:
    """Raise ConfigurationError unless the directory is this user's alone, or absent."""
    if problem := private_problem(path):
        raise ConfigurationError(
            f"{path}: {problem}: remove it, or choose another with supervisor.runtime_dir"
        )


# -- sockets ----------------------------------------------------------------------------------


def control_socket(runtime_dir: Path) -> Path:
    """Return the socket of musterctl; ConfigurationError if the path is too long."""
    return fitting(runtime_dir / CONTROL_SOCKET)


def tasks_socket(runtime_dir: Path) -> Path:
    """Return the socket of clients; ConfigurationError if the path is too long."""
    return fitting(runtime_dir / TASKS_SOCKET)


def workers_socket(runtime_dir: Path) -> Path:
    """Return the socket of the daemon's workers; ConfigurationError if the path is too long."""
    return fitting(runtime_dir / WORKERS_SOCKET)


def node_socket(runtime_dir: Path) -> Path:
    """Return the socket of the cluster sidecar; ConfigurationError if the path is too long."""
    return fitting(runtime_dir / NODE_SOCKET)


def local_socket(runtime_dir: Path) -> Path:
    """Return where the cluster sidecar asks about tasks of its machine; ConfigurationError if the
    path is too long."""
    return fitting(runtime_dir / LOCAL_SOCKET)


def fitting(socket: Path, key: str = "supervisor.runtime_dir") -> Path:
    """Return the path; ConfigurationError if no Unix socket can have it."""
    length = len(os.fsencode(socket))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigurationError(
            f"{socket}: the path has {length} bytes, but the path of a Unix socket has at most "
            f"{SOCKET_PATH_BYTES_MAX}: shorten {key}"
        )
    return socket


def find_tasks_socket(
    environ: Mapping[str, str] | None = None, system_dir: Path = SYSTEM_RUNTIME_DIR
) -> Path:
    """Find a client's socket: $MUSTERD_TASKS, that of `musterd dev` in this folder or above, the
    first existing, this user's own."""
    environ = os.environ if environ is None else environ
    if given := environ.get(TASKS_VARIABLE):
        return fitting(Path(given), TASKS_VARIABLE)
    return _find(TASKS_SOCKET, environ, system_dir)


def find_control_socket(
    environ: Mapping[str, str] | None = None, system_dir: Path = SYSTEM_RUNTIME_DIR
) -> Path:
    """Return musterctl's socket without -s: that of `musterd dev` in this folder or above, the
    first that exists, this user's own."""
    return _find(CONTROL_SOCKET, os.environ if environ is None else environ, system_dir)


def _find(name: str, environ: Mapping[str, str], system_dir: Path) -> Path:
    if (running := _project_runtime_dir()) is not None:
        return running / name
    private = private_runtime_dir(environ)
    for folder in (system_dir, session_runtime_dir(environ), private):
        if folder is None or not _exists(folder / name):
            continue
        if folder != private or not private_problem(private):
            return fitting(folder / name)
    folder = default_runtime_dir(environ, system_dir)
    if folder == private:
        check_private(private)
    return fitting(folder / name)


def _project_runtime_dir() -> Path | None:
    """Return the sockets' directory of the project that we are in, if its daemon runs."""
    try:
        here = Path.cwd()
    except OSError:  # a folder that was removed
        return None
    for folder in (here, *here.parents):
        if os.path.isdir(folder / PROJECT_DIR):  # also where we may not look
            break
    else:
        return None
    if private_problem(folder / PROJECT_DIR):
        return None  # somebody else's
    runtime = folder / PROJECT_RUNTIME_DIR
    if len(os.fsencode(runtime / WORKERS_SOCKET)) > SOCKET_PATH_BYTES_MAX:
        runtime = Path(os.path.realpath(runtime))  # a link to a short directory
    return runtime if _answers(runtime / CONTROL_SOCKET) else None


def _answers(path: Path) -> bool:
    """Tell whether a daemon listens there; one that was killed leaves its socket behind."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fsencode(path))
        except BlockingIOError:  # it listens, and is busy
            return True
        except OSError:
            return False
        return True


def _exists(socket: Path) -> bool:
    try:
        return stat.S_ISSOCK(socket.stat().st_mode)
    except OSError:  # absent, or in a directory that is not for us
        return False
