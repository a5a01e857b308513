"""Control groups of version 2: one for each worker, below the group that the daemon is in.

    GROUP OF THE DAEMON/musterd-RUN/POOL-INDEX-WORKER

The daemon, its fork servers and its inits stay where they are; a worker enters its group before it
runs anything of its own, and whatever it starts is born in there. No controller is used: groups are
made to know and to kill what belongs together. The daemon's own group has to be writable, as it is
for root, and for a systemd unit with `Delegate=yes`.
"""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path

from musterd.ipc.errors import SpawnError

KILL_SECONDS_MAX = 10.0  # what resists SIGKILL for so long is stuck in the kernel
KILL_ROUND_SECONDS = 0.005  # between two looks at what is left


def own_group() -> Path:
    """The group of this process in the file system. SpawnError, with the reason, if there is
    none."""
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
    """Of each mounted hierarchy: which group is its root here, and where it is."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, mount_point = place.split(" ")[3:5]
            found.append((_unescaped(root), _unescaped(mount_point)))
    return found


def _unescaped(path: str) -> str:
    """Spaces and the like are written as \\040 in there."""
    return path.encode("latin-1", "backslashreplace").decode("unicode_escape")


def enter(group: Path) -> None:
    """Moves this process."""
    (group / "cgroup.procs").write_text("0")


def is_empty(group: Path) -> bool:
    """Whether no process is in it or below it. Zombies do not count."""
    try:
        return "populated 0" in (group / "cgroup.events").read_text()
    except FileNotFoundError:
        return True  # removed


def kill(group: Path) -> None:
    """SIGKILL to everything in it and below it; they end a moment later."""
    try:
        (group / "cgroup.kill").write_text("1")
    except FileNotFoundError:  # it is gone, or Linux is older than 5.14
        kill_each(group)


def kill_each(group: Path) -> None:
    """The same for kernels without cgroup.kill: one round, to be repeated until it is empty."""
    with contextlib.suppress(FileNotFoundError):
        (group / "cgroup.freeze").write_text("1")  # nothing forks any more; SIGKILL still works
    for folder in _tree(group):
        with contextlib.suppress(OSError):  # removed meanwhile
            for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                if pid:  # 0 stands for one that this PID namespace cannot name
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def remove(group: Path) -> bool:
    """Removes it with all groups below it; False if something still runs there."""
    for folder in _tree(group):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def clear(group: Path) -> bool:
    """Kills all that is in there, waits for it and removes the group; False if that failed."""
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while _is_there(group):
        try:
            if not is_empty(group):
                kill(group)
            elif remove(group):
                break
        except OSError as error:
            if error.errno != errno.ENODEV:  # else it goes away at this moment
                return False
        if time.monotonic() > deadline:
            return False
        time.sleep(KILL_ROUND_SECONDS)
    return True


def _is_there(group: Path) -> bool:
    try:
        return group.exists()
    except OSError:  # what cannot be looked at cannot be removed either
        return True


def _tree(group: Path) -> list[Path]:
    """The groups below it and itself, the deepest first."""
    return [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
