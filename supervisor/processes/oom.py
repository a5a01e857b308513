"""Find out whether the kernel killed a worker because memory ran out, by its counters of kills.

A worker that a foreign SIGKILL ended may be a victim of the kernel's OOM killer, or of a person.
Two counters tell them apart: that of our own control group (memory.events, or memory.oom_control
of version 1), which is about us, and that of the machine (/proc/vmstat), where the victim may have
been any process. They are read once a second and at each such end. An increase explains one end
within CLAIM_NS, because a large process takes a while to be gone after the kill.
"""

import os
from pathlib import Path

CLAIM_NS = 10_000_000_000

SURE = "killed by the kernel because memory ran out (its control group counted the kill)"
LIKELY = (
    "probably killed by the kernel because memory ran out (a kill for want of memory was counted "
    "on this machine at that time)"
)

_KILLS = b"\noom_kill "
READ_BYTES_MAX = 65_536


class Counter:
    """The kills that one file of the kernel counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = self._read()
        self._claims: list[int] = []  # when each increase was seen

    def _read(self) -> int:
        try:
            fd = os.open(self._path, os.O_RDONLY)  # a restart waits for this: as fast as possible
        except OSError:  # the group is gone, or /proc hides the file
            return 0
        try:
            text = b"\n" + os.read(fd, READ_BYTES_MAX)
        except OSError:
            return 0
        finally:
            os.close(fd)
        _, found, after = text.partition(_KILLS)
        return int(after.partition(b"\n")[0]) if found else 0

    def sample(self, now_ns: int) -> None:
        count = self._read()
        self._claims += [now_ns] * (count - self._count)
        self._count = count
        self._claims = [seen_ns for seen_ns in self._claims if now_ns - seen_ns <= CLAIM_NS]

    def claim(self) -> bool:
        """Use up an increase that explains one end; return whether there was one."""
        if not self._claims:
            return False
        self._claims.pop(0)
        return True


class OomWatch:
    """All counters. Create this before the daemon changes its control group."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._groups = [Counter(path) for path in _files_of_own_group(root)]
        self._machine = Counter(root / "proc/vmstat")

    def sample(self, now_ns: int) -> None:
        """Read the counters, once a second: an old increase must not explain a later end."""
        for counter in (*self._groups, self._machine):
            counter.sample(now_ns)

    def verdict(self, now_ns: int) -> str:
        """Explain the end of a worker by a foreign SIGKILL: SURE, LIKELY or ""."""
        self.sample(now_ns)
        on_machine = self._machine.claim()  # the machine counts every kill
        sure = [group.claim() for group in self._groups]
        if any(sure):
            return SURE
        return LIKELY if on_machine else ""


def _files_of_own_group(root: Path) -> list[Path]:
    """Return the file that counts kills in our control group, of version 2 or 1, or none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mounted = root / "sys/fs/cgroup"
    places = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            for base in (mounted, mounted / "unified"):
                places += [base / inside / "memory.events", base / "memory.events"]
        elif "memory" in controllers.split(","):
            base = mounted / "memory"
            places += [base / inside / "memory.oom_control", base / "memory.oom_control"]
    # In a container the path is the host's, and our group is where the tree is mounted.
    return [place for place in places if place.exists()][:1]
