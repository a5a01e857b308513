"""Stop `musterd install` and `uninstall` at each of their steps, and run them again.

    python bed_stopping.py ROOT error|death [EVERY]

A step changes a file below ROOT or runs a program. `error`: the step fails as a system call does.
`death`: nothing more is done, as after SIGKILL. EVERY = 10 stops at one in ten of the steps that
change files. After the second run, everything has to be as after a run without a stop. The program
prints how often each command was stopped.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from musterd.supervisor.__main__ import main as musterd
from musterd.supervisor.ctl.app import cli as musterctl
from musterd.supervisor.service import manpages
from musterd.supervisor.service.install import InstallError, install, uninstall

CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod"}
LOOKED_AT = ("usr/local", "etc/musterd", "etc/systemd")
WRITING = os.O_WRONLY | os.O_RDWR
MANUAL = list(manpages.pages(musterd, musterctl))


class Death(BaseException):
    """The process ends here; our code may not catch it."""


class Stop:
    """Lets the steps of one run pass until the one to stop at."""

    def __init__(self, root: Path, how: str, every: int) -> None:
        self._root = str(root)
        self._how = how
        self._every = every
        self._seen = 0  # file changes so far
        self._left = -1  # steps to let pass; -1: all
        self.stopped = False
        sys.addaudithook(self._hear)

    def at(self, step: int) -> None:
        self._left, self._seen, self.stopped = step, 0, False

    def never(self) -> None:
        self._left = -1

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._left < 0 or not self._is_step(event, arguments):
            return
        self._left -= 1
        if self._left < 0:
            self.stopped = True
            if self._how == "death":
                raise Death
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))

    def _is_step(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "subprocess.Popen":
            return True
        if event not in CHANGES or not str(arguments[0]).startswith(self._root):
            return False
        if event == "open" and not arguments[2] & WRITING:
            return False
        self._seen += 1
        return self._seen % self._every == 0


def state(root: Path) -> list[str]:
    """Return all files of an installation."""
    found = [
        f"{path} -> {os.readlink(path)}" if path.is_symlink() else f"{path} {path.stat().st_size}"
        for place in LOOKED_AT
        for path in sorted((root / place).rglob("*"))
        if "musterd" in str(path.relative_to(root)) and not path.is_dir()
    ]
    if root == Path("/"):
        words = ["systemctl", "list-units", "--plain", "--no-legend", "--full"]
        units = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        found += [line.split()[0] for line in units.splitlines() if "musterd" in line]
    return found


def try_all(stop: Stop, root: Path, action: Callable[..., None], undo: Callable[..., None]) -> int:
    """Stop `action` at each step once; return the number of steps."""

    def run(chosen: Callable[..., None]) -> None:
        chosen(root, lambda _: None, MANUAL)
        if chosen is install and root == Path("/"):
            subprocess.run(["systemctl", "enable", "musterd"], check=True, capture_output=True)
            subprocess.run(["systemctl", "start", "musterd-control.socket"], check=True)

    run(undo)
    run(action)
    wanted = state(root)
    step = 0
    while True:
        run(undo)
        stop.at(step)
        try:
            action(root, lambda _: None, MANUAL)
        except (Death, InstallError, OSError):
            pass
        finally:
            stop.never()
        if not stop.stopped:
            return step
        run(action)
        found = state(root)
        if found != wanted:
            sys.exit(f"{action.__name__} stopped at step {step}: {set(found) ^ set(wanted)}")
        step += 1


def main(root: str, how: str, every: str = "1") -> None:
    stop = Stop(Path(root), how, int(every))
    print("uninstall", try_all(stop, Path(root), uninstall, install))
    print("install", try_all(stop, Path(root), install, uninstall))


if __name__ == "__main__":
    main(*sys.argv[1:])
