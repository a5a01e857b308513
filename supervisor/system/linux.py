"""Linux system calls that Python 3.11 does not wrap, files in memory, the family of a process.

A child subreaper inherits processes it never made. `known` and their session tell them from its own
children: a child that the daemon starts elsewhere shares its session, a process that comes from a
fork server or a worker never does.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_M_ARENA_MAX = -8  # malloc.h of glibc

_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_NOEXEC = 0x8
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000

REAPED_PER_CALL_MAX = 64  # the next call reaps the rest

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.unshare.argtypes = [ctypes.c_int]
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def become_subreaper(*, until_now: bool = False) -> None:
    """Inherit orphaned descendants from now on; or no longer, with `until_now`."""
    reaps = 0 if until_now else 1
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, reaps, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def use_one_heap() -> None:
    """Give all threads one heap, as only one runs Python at a time. By default each thread has its
    own, and memory that one allocates and another frees is of no use to a third: after eleven
    million tasks a supervisor had 61 MB, and 58 MB with one heap."""
    if hasattr(_libc, "mallopt"):  # glibc only
        _libc.mallopt(_M_ARENA_MAX, 1)


def die_with_parent(signum: int) -> None:
    """Request a signal for the end of the parent *thread*. Children do not inherit this."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def unshare_processes(*, user: bool) -> None:
    """Make the next child PID 1 of a namespace of its own; separate mounts from here on.

    With `user`, use a user namespace, which needs no privilege. Ids are mapped to themselves: files
    keep their owner, and no process inside believes it is root.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWPID | CLONE_NEWNS | (CLONE_NEWUSER if user else 0)
    names = "user, PID and mount namespaces" if user else "PID and mount namespaces"
    _checked(_libc.unshare(flags), f"unshare of {names}")
    if user:
        Path("/proc/self/setgroups").write_text("deny")  # required before an unprivileged gid_map
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def mount_own_proc() -> None:
    """Mount a /proc of this PID namespace, for this mount namespace alone."""
    # Private first: else the mount would show up outside as well.
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")
    # The kernel refuses a /proc with fewer restrictions than the one it covers: hence the flags.
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _checked(_libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount of /proc")


def memory_file(content: bytes) -> int:
    """Return a descriptor to read the content from, as a child's standard input."""
    fd = os.memfd_create("musterd", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:  # no memory
        os.close(fd)
        raise
    return fd


def family() -> dict[int, list[int]]:
    """Return the children of each visible process; a moment later there may be more."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            stat = stat_of(int(name))
            if stat is not None:
                children.setdefault(stat.parent, []).append(int(name))
    return children


def descendants(root: int, children: dict[int, list[int]]) -> list[int]:
    """Return every process below `root` in a family()."""
    found: list[int] = []
    unvisited = [root]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found += below
        unvisited += below
    return found


class Stat(NamedTuple):
    state: str  # "R", "S", "T" stopped, "Z" zombie, ...
    parent: int
    started: int  # clock ticks since the boot: with the pid, identifies a process forever


def stat_of(pid: int) -> Stat | None:
    """Read /proc/PID/stat; None if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold anything
    return Stat(fields[0].decode(), int(fields[1]), int(fields[19]))


def is_alive(pid: int, started: int = 0) -> bool:
    """Tell whether a process runs and, given `started`, is the same one. Zombies do not run."""
    stat = stat_of(pid)
    return stat is not None and stat.state not in "ZX" and started in (0, stat.started)


def reap_inherited(known: Set[int]) -> None:
    """Reap inherited children that have ended."""
    for _ in range(REAPED_PER_CALL_MAX):
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if not _is_inherited(ended.si_pid, known):
            _reap_behind(known)  # other code waits for this child, which hides the others
            return
        os.waitpid(ended.si_pid, 0)


def _reap_behind(known: Set[int]) -> None:
    try:
        children = family()
    except OSError:  # no descriptor left: the next call tries again
        return
    for child in children.get(os.getpid(), []):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if _is_inherited(child, known):
                os.waitpid(child, os.WNOHANG)


def kill_inherited(known: Set[int]) -> bool:
    """Kill inherited children and everything below them; return False if there were none."""
    try:
        children = family()
    except OSError:  # no descriptor left: the next call tries again
        return True
    found = False
    for child in children.get(os.getpid(), []):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if _is_inherited(child, known):
                found = True
                for pid in (child, *descendants(child, children)):
                    os.kill(pid, signal.SIGKILL)
    return found


def _is_inherited(pid: int, known: Set[int]) -> bool:
    return pid not in known and os.getsid(pid) != os.getsid(0)
