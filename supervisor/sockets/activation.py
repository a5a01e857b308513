"""Sockets that systemd listens on and hands over at the start (sd_listen_fds(3)).

They outlive the daemon: clients that connect between two daemons wait in the kernel's queue. So the
files are not removed at the end, and a shutdown leaves new tasks to the next daemon instead of
refusing them.
"""

import os
import socket
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from musterd.ipc.errors import ConfigurationError

FIRST_FD = 3  # SD_LISTEN_FDS_START
VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")

Handed = dict[Path, socket.socket]


def take(environ: MutableMapping[str, str]) -> Handed:
    """Return the sockets meant for this process, by path.

    The variables are removed: they mean nothing to the processes that we start.
    """
    pid, count, _ = (environ.pop(name, "") for name in VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    handed: Handed = {}
    for fd in range(FIRST_FD, FIRST_FD + int(count)):
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        name = sock.getsockname()
        unix = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
        if not unix or not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"systemd handed over {name!r}, which is no Unix stream socket with a path: "
                "correct ListenStream= of the socket units"
            )
        handed[Path(name)] = sock
    return handed


def check(handed: Handed, wanted: Iterable[Path]) -> None:
    """Raise ConfigurationError for a socket that nobody serves: its clients would wait forever."""
    known = {os.path.realpath(path) for path in wanted}
    for path in handed:
        if os.path.realpath(path) not in known:
            raise ConfigurationError(
                f"systemd listens on {path}, the daemon on {', '.join(sorted(known))}: let "
                "supervisor.runtime_dir and ListenStream= of the socket units agree"
            )


def pick(handed: Handed, path: Path) -> socket.socket | None:
    """Return the socket that was handed over for this path, if one was."""
    wanted = os.path.realpath(path)
    return next((sock for each, sock in handed.items() if os.path.realpath(each) == wanted), None)
