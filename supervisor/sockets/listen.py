"""Listening Unix sockets: their files, groups and modes, and who is at the other end."""

import errno
import grp
import logging
import os
import pwd
import socket
import stat
import struct
from contextlib import ExitStack

from msgspec import Struct

from musterd.ipc.errors import ConfigurationError

OWN_GROUP_MODE = 0o660  # of the socket's file: for its owner and one group
BACKLOG = 128  # callers that have connected and are not accepted yet

SPARES = 4  # descriptors kept for callers that come when no others are left

SO_PEERGROUPS = 59  # asm-generic/socket.h; the socket module does not name it
_CREDENTIALS = struct.Struct("3i")
_GROUPS_BYTES_MAX = 1024  # the most that Python's getsockopt() allows: 256 groups

log = logging.getLogger(__name__)


class Caller(Struct, frozen=True):
    """The process at the other end of a connection, as the kernel says."""

    pid: int
    uid: int
    gid: int


def listen(
    path: str, group_id: int | None, mode: int = OWN_GROUP_MODE, backlog: int = BACKLOG
) -> socket.socket:
    """Return a listening socket, as bind_file() does, for a socket in runtime_dir."""
    try:
        return bind_file(path, group_id, mode, backlog)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {path}: {error.strerror or error}: check runtime_dir (its owner, "
            "and its length: a socket's path has at most 107 bytes) and the groups of sockets"
        ) from error


def bind_file(path: str, group_id: int | None, mode: int, backlog: int) -> socket.socket:
    """Return a listening socket that at no moment is open to more callers than `mode` says.

    It takes the place of another socket; ConfigurationError if anything else is there.
    """
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigurationError(f"{path} is in the way and is not a socket: remove it")
            os.unlink(path)
        os.fchmod(sock.fileno(), 0o600)  # the mode that bind() gives the file
        sock.bind(path)
        if group_id is not None:
            os.chown(path, -1, group_id)
        os.chmod(path, mode)
        sock.listen(backlog)
        undo.pop_all()
    return sock


def is_listened_on(path: str) -> bool:
    """Tell whether another program listens on the socket of this path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) in (0, errno.EAGAIN)


def adopt(
    sock: socket.socket, path: str, group_id: int | None, mode: int = OWN_GROUP_MODE
) -> socket.socket:
    """Use a socket that is listened on already.

    Its maker has decided who may connect, unless a group is given or everybody may.
    """
    sock.setblocking(False)
    if group_id is not None or mode != OWN_GROUP_MODE:
        try:
            os.chown(path, -1, -1 if group_id is None else group_id)
            os.chmod(path, mode)
        except OSError as error:
            raise ConfigurationError(
                f"cannot give {path} to group {group_id} with mode {mode:o}: {error.strerror}: "
                "make the daemon's user its owner (SocketUser=) and a member of the group "
                "(SupplementaryGroups= of the service)"
            ) from error
    return sock


def say_and_close(sock: socket.socket, line: bytes) -> None:
    """Tell a refused caller why; the socket's buffer is empty, so the line always fits."""
    try:
        sock.send(line)
    except OSError as error:
        log.debug("control: a refused caller was gone already: %s", error)
    finally:
        sock.close()


class Spares:
    """Descriptors kept to be given away: people must be able to ask why there are no others."""

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spares: list[int] = []
        self.refill()

    def give(self) -> bool:
        """Free one descriptor for the next caller; whether there was one."""
        if not self._spares:
            return False
        os.close(self._spares.pop())
        return True

    def refill(self) -> None:
        while len(self._spares) < SPARES:
            try:
                self._spares.append(os.dup(self._null))
            except OSError:  # not yet
                return

    def close(self) -> None:
        for fd in (self._null, *self._spares):
            os.close(fd)
        self._spares.clear()


def group_id_of(group: str, key: str = "supervisor.control_group") -> int | None:
    """Return the number of a group, None for ""; `key` is the setting that names it."""
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigurationError(
            f"{key} = {group!r}: there is no such group: make it with groupadd, or name another"
        ) from None


def inode(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def caller_of(sock: socket.socket) -> Caller:
    """Return who is at the other end of a connection."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Caller(pid, uid & 0xFFFFFFFF, gid & 0xFFFFFFFF)


def groups_of(sock: socket.socket, caller: Caller) -> list[int]:
    """Return the caller's supplementary groups, from the kernel: it waits for no name service."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES_MAX)
        return [number for (number,) in struct.iter_unpack("I", raw)]
    except OSError:  # Linux before 4.13, or more groups than fit
        pass
    try:
        return os.getgrouplist(pwd.getpwuid(caller.uid).pw_name, caller.gid)
    except KeyError:  # a uid without a name has no groups
        return []
