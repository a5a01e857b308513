"""The private gateway of a program: a process through which its clients speak to a cluster.

    Client("postgresql://…") ── socketpair ──► gateway (supervisor/node/direct.py) ──► PostgreSQL

All clients of a process that have the same URL share one gateway. Nobody else can reach it: nothing
is in the file system, and a connection is one end of a socketpair that is handed over the control
socket. The gateway ends when the control socket or the program is gone. If the gateway dies, the
next connection starts another one, which has the same `waiter`: it ends the sessions of the one
before, and the clients send again what was not acknowledged.

The gateway is no child of the program, which may wait for its children as it likes. It gets the URL
over the control socket, and nothing else of the program but its environment, where libpq looks for
passwords and certificates.

A fork shares nothing with its parent: it closes the copy of the control socket, and starts a
gateway of its own.
"""

import errno
import os
import secrets
import socket
import sys
import threading
import time
from array import array
from importlib.util import find_spec
from pathlib import Path

import msgspec

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.direct import (
    HAND_OVER,
    MESSAGE_BYTES_MAX,
    Start,
    State,
    decode_state,
    encode,
    place,
)

# The first process ends at once, so that the second one is nobody's child. What the program had
# open is closed; a module of its working directory is not taken for one of ours (-P).
_RUN = (
    "import os, sys\n"
    "os.closerange(3, 65536)\n"
    "os.setsid()\n"
    "if os.fork():\n"
    "    os._exit(0)\n"
    "sys.path.append(sys.argv[1])\n"
    "from musterd.supervisor.node.direct import main\n"
    "sys.exit(main())\n"
)
_PACKAGES = str(Path(__file__).parents[3])  # where musterd itself is
GAP_SECONDS, GAP_SECONDS_MAX = 0.1, 5.0  # between two starts of a gateway that does not get ready

_STARTING = State("away", "the process that speaks to the database has not answered yet")
_ENDED = State("away", "the process that speaks to the database has ended")


class DirectGateway:
    """Safe to share between threads."""

    def __init__(self, url: str) -> None:
        self.place = place(url)
        if find_spec("psycopg") is None:
            raise ConfigurationError(
                f"a client of the cluster at {self.place} needs psycopg, which is not installed: "
                "pip install 'musterd[cluster]'"
            )
        self._url = url
        self._waiter = secrets.randbits(61) + 1
        self._lock = threading.Lock()
        self._control = -1  # a descriptor: it is open until the program ends; -1: no gateway
        self._ending: list[int] = []  # processes to wait for, where they are children of this one
        self._state = _STARTING
        self._gap_seconds = GAP_SECONDS
        self._due = 0.0  # when the next gateway may be started

    def connect(self) -> socket.socket:
        """Return a new connection to the gateway, which is started if it is not there.

        BlockingIOError if it cannot take one now, ConnectionRefusedError if it has just ended.
        """
        with self._lock:
            self._listen()
            if self._control < 0:
                self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._hand_over(theirs)
                except (BrokenPipeError, ConnectionResetError):
                    ours.close()
                    self._ended()
                    raise ConnectionRefusedError("the gateway has ended") from None
                except BaseException:
                    ours.close()
                    raise
            return ours

    def _hand_over(self, theirs: socket.socket) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))
        control = socket.socket(fileno=self._control)
        try:
            control.sendmsg([HAND_OVER], [rights], socket.MSG_NOSIGNAL)
        finally:
            control.detach()

    def state(self) -> State:
        """Return how the gateway stands with the database."""
        with self._lock:
            self._listen()
            return self._state

    def forget(self) -> None:
        """Leave the gateway to the parent, in a fork."""
        self._lock = threading.Lock()
        control, self._control = self._control, -1
        if control >= 0:
            os.close(control)

    def _listen(self) -> None:
        """Hear what the gateway has said; the lock is held."""
        self._ending = [pid for pid in self._ending if not _is_waited_for(pid)]
        while self._control >= 0:
            try:
                message = os.read(self._control, MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._ended()
                return
            try:
                self._state = decode_state(message)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if self._state.state == "ready":
                self._gap_seconds = GAP_SECONDS

    def _ended(self) -> None:
        os.close(self._control)
        self._control = -1
        if self._state.pid:  # orphans of a program that is process 1 become its children
            self._ending.append(self._state.pid)
        if self._state.state == "ready" or self._state is _STARTING:
            self._state = _ENDED

    def _start(self) -> None:
        now = time.monotonic()
        if now < self._due:
            raise BlockingIOError(f"the gateway to {self.place} has just been started")
        self._due = now + self._gap_seconds
        self._gap_seconds = min(2 * self._gap_seconds, GAP_SECONDS_MAX)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                ours.setblocking(False)
                ours.send(encode(Start(self._url, self._waiter, os.getpid())))
                self._ending.append(_spawn(theirs.fileno()))
            except BaseException as error:
                ours.close()
                self._state = State("away", f"its gateway cannot be started: {error}")
                raise
        if self._state.state == "ready":
            self._state = _STARTING
        self._control = ours.detach()


def _spawn(control_fd: int) -> int:
    """Start a gateway with this descriptor as its standard input; return the process in between."""
    python = _interpreter()
    actions = [
        (os.POSIX_SPAWN_DUP2, control_fd, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    arguments = [python, "-P", "-c", _RUN, _PACKAGES]
    try:
        return os.posix_spawn(python, arguments, os.environ, file_actions=actions, setsigmask=[])
    except FileNotFoundError:
        raise OSError(errno.ENOEXEC, f"there is no {python} to start the gateway with") from None


def _is_waited_for(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # somebody else has waited for it, or will
        return True


def _interpreter() -> str:
    """Return a Python like this one; a server that embeds Python names itself."""
    if "python" in os.path.basename(sys.executable or ""):
        return sys.executable
    return os.path.join(sys.exec_prefix, "bin", f"python{sys.version_info[0]}")


# -- the gateways of this process ---------------------------------------------------------------

_gateways: dict[str, DirectGateway] = {}
_lock = threading.Lock()


def gateway_to(url: str) -> DirectGateway:
    """Return the gateway of this process to a cluster; nothing is started yet."""
    with _lock:
        found = _gateways.get(url)
        if found is None:
            found = _gateways[url] = DirectGateway(url)
        return found


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for gateway in _gateways.values():
        gateway.forget()
    _gateways.clear()


os.register_at_fork(after_in_child=_after_fork)
