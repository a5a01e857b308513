"""The orphan census: find and end what a dead worker left, before its slot gets a new worker.

A dead worker should leave nothing: the kernel, its control group or its init make sure. If it left
something after all (its init was killed, a removal failed), the census finds it: processes by their
marks (marks.py), directories by their names.

A census reads every process of the machine, and a restart waits for it, unless the init of a PID
namespace has said that it is alone: no process leaves a namespace, so that was a census already.
Then the census follows a moment later, as a check of this very claim.
"""

import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

from musterd.supervisor.log import log
from musterd.supervisor.processes import cgroups, marks
from musterd.supervisor.processes.epoll import Watch
from musterd.supervisor.processes.tempdirs import Janitor

FORK_SERVER = -1  # the index that stands for the fork server of a pool
# How long a slot waits for killed processes to be gone. A process that takes longer is stuck in the
# kernel and must not keep the slot empty forever.
PATIENCE_SECONDS = 5.0

CHECK_SECONDS = 0.25  # from the ALONE of an init to the census that checks it

Slot = tuple[str, int]


class _Stray(NamedTuple):
    pid: int
    mark: int
    slot: Slot
    pidfd: int
    since: float


class Census:
    """Calls `tell(pool, index, processes, directories)` with everything found."""

    def __init__(
        self,
        run: int,
        watch: Watch,
        janitor: Janitor,
        temp_root: Path,
        tell: Callable[[str, int, int, int], None],
    ) -> None:
        self._run = run
        self._watch = watch
        self._janitor = janitor
        self._temp_root = temp_root
        self._tell = tell
        self._departed: dict[int, Slot] = {}  # by mark: dead, and not known to have left nothing
        self._vouched: set[int] = set()  # marks of the departed whose init was alone
        self._check_at = math.inf  # when to check these
        self._strays: dict[int, _Stray] = {}  # by pid: killed, and not gone yet
        self._groups: list[Path] = []  # control groups of the departed that are not empty yet
        self._resisting: set[int] = set()  # pids that no slot waits for any more
        self._stubborn: set[str] = set()  # names of directories that were counted before

    def departed(self, mark: int, pool: str, index: int, *, alone: bool = False) -> None:
        """Note a dead worker or fork server; `alone`: its init was the last in its namespace."""
        self._departed[mark] = (pool, index)
        if alone:
            self._vouched.add(mark)
            self._check_at = min(self._check_at, time.monotonic() + CHECK_SECONDS)

    def remove_group(self, group: Path) -> None:
        """Remove the control group of a departed worker; look() kills what is still in it."""
        if not cgroups.remove(group):
            self._groups.append(group)

    def _clear_groups(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            with contextlib.suppress(OSError):  # no descriptor left: the next look tries again
                cgroups.kill(group)
            self.remove_group(group)

    def due(self) -> set[Slot]:
        """Return the slots whose last worker may have left something."""
        return {slot for mark, slot in self._departed.items() if mark not in self._vouched}

    @property
    def check_due(self) -> bool:
        return time.monotonic() >= self._check_at

    def look(self, living: Set[str], leaving: Set[int] = frozenset()) -> None:
        """Find what the departed left, and begin to end it. `living` are the names of directories
        in use, `leaving` the pids of inits that end by themselves."""
        self._check_at = math.inf
        with contextlib.suppress(OSError):  # no descriptor left: the next look tries again
            self._look_for_processes(leaving)
            self._look_for_directories(living)
        self._clear_groups()

    def _look_for_processes(self, leaving: Set[int]) -> None:
        if self._departed:
            found = marks.find(self._run)
            self._vouched.clear()  # they are like all others from here on
            for mark in list(self._departed):
                slot = self._departed[mark]
                if not (pids := [pid for pid in found.get(mark, ()) if pid not in leaving]):
                    del self._departed[mark]
                elif new := sum(self._end(pid, mark, slot) for pid in pids):
                    self._tell(*slot, new, 0)

    def ending(self, pool: str, index: int) -> bool:
        """Tell whether something of a slot was killed and is not gone yet."""
        overdue = time.monotonic() - PATIENCE_SECONDS
        for stray in list(self._strays.values()):
            if stray.slot == (pool, index) and stray.pid not in self._resisting:
                if stray.since > overdue:
                    return True
                log.note("worker.resists", "error", pool=pool, pid=stray.pid)
                self._resisting.add(stray.pid)
        return False

    def close(self) -> None:
        for stray in list(self._strays.values()):
            self._gone(stray)

    def _end(self, pid: int, mark: int, slot: Slot) -> bool:
        """Kill a process; return whether it was not known before."""
        if pid in self._strays:
            return False
        pidfd = marks.open_marked(pid, mark)
        if pidfd is None:
            return False
        _kill(pidfd)
        stray = _Stray(pid, mark, slot, pidfd, time.monotonic())
        self._strays[pid] = stray
        self._watch.add(pidfd, functools.partial(self._gone, stray))
        return True

    def _gone(self, stray: _Stray) -> None:
        del self._strays[stray.pid]
        self._resisting.discard(stray.pid)
        self._watch.remove(stray.pidfd)
        os.close(stray.pidfd)

    def _look_for_directories(self, living: Set[str]) -> None:
        left: dict[Slot, int] = {}
        for name in os.listdir(self._temp_root):
            slot = _slot_of(name)
            path = self._temp_root / name
            if slot is None or name in living or self._janitor.removes(path):
                continue
            self._janitor.remove(path)
            if name not in self._stubborn:  # a directory that cannot be removed is counted once
                self._stubborn.add(name)
                left[slot] = left.get(slot, 0) + 1
        for slot, count in left.items():
            self._tell(*slot, 0, count)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def directory_name(pool: str, index: int, worker: int) -> str:
    """Return the name of a worker's temporary directory."""
    return f"{pool}-{index}-{worker}"


def _slot_of(name: str) -> Slot | None:
    pool, *numbers = name.rsplit("-", 2)
    if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
        return None  # not made by directory_name
    return pool, int(numbers[0])
