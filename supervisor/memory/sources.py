"""Read how much memory there is and is in use: the machine, control groups, stalls.

    machine    MemTotal - MemAvailable of /proc/meminfo
    cgroup v2  memory.current of our group and of each above it, against its memory.max
    cgroup v1  memory.usage_in_bytes against memory.limit_in_bytes, likewise
    stalls     avg10 of the group's memory.pressure (v2), else of /proc/pressure/memory

The page cache of files does not count as used, neither in a group nor by MemAvailable: the kernel
takes it back when memory is needed. If that goes so far that programs wait for their own pages, the
stalls tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from musterd.supervisor.core.model.events import MemorySource

MACHINE = "the machine's memory"
GROUPS_MAX = 16  # levels of control groups above ours: people do not nest them deeper
_CACHE_KEYS = ("inactive_file", "active_file")


class Stalls(NamedTuple):
    """Shares of the last ten seconds."""

    some: float = 0.0
    full: float = 0.0


class Group(NamedTuple):
    """The files of one control group that has, or may be given, a limit."""

    name: str
    limit: Path
    usage: Path
    statistics: Path
    prefix: str  # of the statistics that include the groups below


class MemorySources:
    """The sources of this machine; tests give another `root` than /."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._groups, own = _own_groups(root)
        pressure = own / "memory.pressure" if own is not None else None
        if pressure is None or not _readable(pressure):
            pressure = root / "proc/pressure/memory"
        self._pressure = pressure

    def read(self) -> tuple[MemorySource, ...]:
        """Read the machine, and each control group with a limit below the machine's memory."""
        machine = psutil.virtual_memory()
        used = machine.total - machine.available
        sources = [MemorySource(MACHINE, machine.total, used)]
        for group in self._groups:
            limit = _number(group.limit)
            if limit is None or not 0 < limit < machine.total:
                continue  # "max", or a number that means no limit
            usage = _number(group.usage)
            if usage is not None:
                used = max(0, usage - _cached(group))
                sources.append(MemorySource(group.name, limit, used))
        return tuple(sources)

    def stalls(self) -> Stalls:
        """Read the stalls; zero where the kernel does not measure them."""
        try:
            text = self._pressure.read_text()
        except OSError:
            return Stalls()
        found = {}
        for line in text.splitlines():
            kind, _, figures = line.partition(" ")
            shares = dict(each.split("=", 1) for each in figures.split() if "=" in each)
            found[kind] = float(shares.get("avg10", 0.0)) / 100
        return Stalls(found.get("some", 0.0), found.get("full", 0.0))


def _own_groups(root: Path) -> tuple[list[Group], Path | None]:
    """Find our group and those above it, and the directory of our own group in v2."""
    mounts = _mounts(root)
    groups: list[Group] = []
    own = None
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers and "cgroup2" in mounts:
            own, names = mounts["cgroup2"], ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(",") and "memory" in mounts:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        top = mounts["cgroup2" if not controllers else "memory"]
        # In a container the path may be the host's and missing here: then the top is ours.
        here = top / path.strip("/")
        here = here if here.is_dir() and here.is_relative_to(top) else top
        if not controllers:
            own = here
        levels = [here, *here.parents]
        for place in levels[: levels.index(top) + 1][:GROUPS_MAX]:
            inside = str(place.relative_to(top))
            shown = f"the control group {'/' if inside == '.' else '/' + inside}"
            limit, usage, prefix = names
            groups.append(Group(shown, place / limit, place / usage, place / "memory.stat", prefix))
    return [group for group in groups if _readable(group.limit)], own


def _mounts(root: Path) -> dict[str, Path]:
    """Return where cgroup v2 ("cgroup2") and the memory controller of v1 ("memory") are mounted."""
    found: dict[str, Path] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        place = root / fields[4].replace("\\040", " ").lstrip("/")
        if kinds[0] == "cgroup2":
            found.setdefault("cgroup2", place)
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            found.setdefault("memory", place)
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _readable(path: Path) -> bool:
    try:
        path.read_text()
    except OSError:  # also if the kernel has the file but not the feature
        return False
    return True


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(group: Group) -> int:
    wanted = {group.prefix + key for key in _CACHE_KEYS}
    cached = 0
    for line in _lines(group.statistics):
        key, _, value = line.partition(" ")
        if key in wanted:
            cached += int(value)
    return cached
