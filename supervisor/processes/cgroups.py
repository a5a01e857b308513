"""Control groups of version 2: one for each worker, below the group of the daemon.

    GROUP OF THE DAEMON/musterd-RUN/POOL-INDEX-WORKER

The daemon, its fork servers and inits stay where they are. A worker enters its group before it runs
code of its own, and its children start in the group. No controller is used: groups serve to know
and to kill what belongs together. The daemon's own group has to be writable, as for root, and for a
systemd unit with `Delegate=yes`.
"""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path

from musterd.ipc.errors import SpawnError

KILL_SECONDS_MAX = 10.0  # a process that resists SIGKILL for this long is stuck in the kernel
KILL_ROUND_SECONDS = 0.005  # between two checks of what is left


def own_group() -> Path:
    """Return the directory of this process's group. SpawnError says why there is none."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    names = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    if not names:
        raise SpawnError("this kernel has no control groups of version 2")
    (name,) = names
    if name.startswith("/.."):
        raise SpawnError(f"the daemon's control group {name} is outside of its cgroup namespace")
    for root, mount_point in _mounts():
        if root in (name, "/") or name.startswith(f"{root}/"):
            return Path(mount_point + name.removeprefix("" if root == "/" else root))
    raise SpawnError("no hierarchy of control groups of version 2 is mounted (type cgroup2)")


def _mounts() -> list[tuple[str, str]]:
    """Return (group that is the root here, mount point) of each mounted hierarchy."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, mount_point = place.split(" ")[3:5]
            found.append((_unescaped(root), _unescaped(mount_point)))
    return found


def _unescaped(path: str) -> str:
    """Decode a path of mountinfo, where a space is written as \\040."""
    return path.encode("latin-1", "backslashreplace").decode("unicode_escape")


def enter(group: Path) -> None:
    """Move this process into a group."""
    (group / "cgroup.procs").write_text("0")


def is_empty(group: Path) -> bool:
    """Tell whether no process is in a group or below it. Zombies do not count."""
    try:
        return "populated 0" in (group / "cgroup.events").read_text()
    except FileNotFoundError:
        return True  # removed


def kill(group: Path) -> None:
    """Send SIGKILL to all processes in a group and below it; they end a moment later."""
    try:
        (group / "cgroup.kill").write_text("1")
    except FileNotFoundError:  # the group is gone, or Linux is older than 5.14
        kill_each(group)


def kill_each(group: Path) -> None:
    """Kill once without cgroup.kill; repeat this until the group is empty."""
    with contextlib.suppress(FileNotFoundError):
        (group / "cgroup.freeze").write_text("1")  # nothing forks any more; SIGKILL still works
    for folder in _tree(group):
        with contextlib.suppress(OSError):  # removed meanwhile
            for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                if pid:  # 0 stands for a process that this PID namespace cannot name
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def remove(group: Path) -> bool:
    """Remove a group with all groups below it; return False if something still runs there."""
    for folder in _tree(group):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def clear(group: Path) -> bool:
    """Kill all processes in a group, wait and remove the group; return False if that failed."""
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while _is_there(group):
        try:
            if not is_empty(group):
                kill(group)
            elif remove(group):
                break
        except OSError as error:
            if error.errno != errno.ENODEV:  # ENODEV: the group goes away at this moment
                return False
        if time.monotonic() > deadline:
            return False
        time.sleep(KILL_ROUND_SECONDS)
    return True


def _is_there(group: Path) -> bool:
    try:
        return group.exists()
    except OSError:  # a group that cannot be read cannot be removed either
        return True


def _tree(group: Path) -> list[Path]:
    """Return a group and all groups below it, the deepest first."""
    return [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
