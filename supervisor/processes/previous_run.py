"""Find and end what a killed supervisor left, at the next start on the same directory.

Each start notes who it is and how to recognise its processes: the run of its marks (marks.py) and
its control group. The next start reads the note and, if that supervisor is dead, ends everything
that carries one of its marks. While that supervisor lives, nothing of it is touched, whatever
somebody did with the file (a copied state directory).
"""

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from musterd.ipc.errors import SpawnError
from musterd.supervisor.log import log
from musterd.supervisor.processes import cgroups, marks
from musterd.supervisor.system.linux import is_alive, stat_of


class _Run(Struct, frozen=True):
    """One start of the daemon, as noted."""

    boot: str  # of the machine: after a reboot nothing can be left
    pid: int
    started: int  # clock ticks since the boot: with the pid, names the process forever
    marks: int
    group: str  # the parent of its control groups; "" for none


class Ended(NamedTuple):
    processes: int = 0
    resisting: int = 0


class RunRecord:
    """The marks and the control group of this start of the daemon, and the note of both."""

    def __init__(self, note: Path) -> None:
        """End what the start that `note` describes has left, then note this start."""
        self._note = note
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.former = _end_former(note)
        self.run = marks.new_run()
        self.group, self.group_refused = "", ""
        try:
            self.group = str(cgroups.own_group() / f"musterd-{self.run >> marks.OWNER_BITS:x}")
        except (SpawnError, OSError) as error:
            self.group_refused = str(error)
        self._noted = False
        if problem := self.note():
            log.note("leftovers.unnoted", "warning", reason=problem)

    def note(self) -> str:
        """Write the note unless it is written; return why that failed, or ""."""
        if not self._noted:
            try:
                self._write_down()
            except OSError as error:  # the disk is full
                return str(error)
            self._noted = True
        return ""

    def close(self) -> None:
        """Remove the note: nothing of this start is left."""
        if not self.group or cgroups.remove(Path(self.group)):
            self._note.unlink(missing_ok=True)

    def _write_down(self) -> None:
        own = stat_of(os.getpid())
        assert own is not None
        written = _Run(_boot_id(), os.getpid(), own.started, self.run, self.group)
        draft = self._note.with_name(self._note.name + ".new")
        draft.write_bytes(msgspec.json.encode(written))
        draft.replace(self._note)


def _end_former(note: Path) -> Ended:
    try:
        former = msgspec.json.decode(note.read_bytes(), type=_Run)
    except (FileNotFoundError, msgspec.DecodeError):
        return Ended()  # the first start, or the last one ended cleanly
    except OSError as error:
        log.note("leftovers.unread", "warning", reason=error)
        return Ended()
    if former.boot != _boot_id() or _lives(former) or marks.carried(former.marks):
        return Ended()
    ended = Ended(*marks.end_all(former.marks))
    if ended.resisting:
        log.note("worker.resists", "error", count=ended.resisting)
    if former.group and not cgroups.clear(Path(former.group)):
        log.note("leftovers.group", "warning", reason=f"{former.group} cannot be removed")
    return ended


def _lives(run: _Run) -> bool:
    return run.pid != os.getpid() and is_alive(run.pid, run.started)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
