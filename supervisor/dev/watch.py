"""Reload what was saved: code by the pools that run it, the configuration by the daemon.

A thread waits for files of the project to be written. It asks the daemon to reload, which knows
which pools run older code than is on disk; so a save too many does no harm, and none is missed.
Whether the new code could be loaded is in the daemon's log.

Folders are watched one by one, without those that hold no code of the project: a virtual
environment or node_modules may have more of them than the kernel lets one user watch.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import ReloadResult
from musterd.supervisor.ctl.connection import Connection, Unreachable
from musterd.supervisor.dev.project import Project
from musterd.supervisor.dev.screen import BOLD, DIM, RED, YELLOW, Screen

CODE = ".py"
# Beside code: what a configuration is, and what it reads (`foreach`).
DATA = frozenset({".toml", ".yaml", ".yml", ".json", ".csv"})
NO_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})
FOLDERS_MAX = 1000  # watched
SETTLE_MS = 100  # between two looks for further files of one save
ANSWER_SECONDS = 10.0
START_SECONDS = 10.0  # a daemon that starts answers within
LOOK_SECONDS = 0.1
FILES_SHOWN = 3
END_SECONDS = 2.0


class Watcher:
    """A thread that reloads what was saved, until it is stopped."""

    def __init__(self, project: Project, screen: Screen) -> None:
        self._project = project
        self._screen = screen
        self._stop = threading.Event()
        self._limit_told = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            for files in self._saved():
                self._reload(files)
        except OSError as error:  # the kernel's limit of watches
            self._screen.say(
                f"files are not watched any more: {error}: type musterctl reload --code", YELLOW
            )

    # -- what was saved ---------------------------------------------------------------------------

    def _saved(self) -> Iterator[list[Path]]:
        """Yield the files of each save; also none, after a folder has come."""
        from watchfiles import watch

        while not self._stop.is_set():
            folders = list(islice(folders_of(self._roots()), FOLDERS_MAX + 1))
            if len(folders) > FOLDERS_MAX:
                self._tell_limit()
                folders.pop()
            for changes in watch(
                *folders,
                watch_filter=None,
                step=SETTLE_MS,
                stop_event=self._stop,
                recursive=False,
                raise_interrupt=False,
            ):
                paths = [Path(path) for _, path in changes]
                found = sorted({path for path in paths if counts(path)})
                if found:
                    yield found
                known = set(folders)
                if any(path not in known and path.is_dir() and _has_code(path) for path in paths):
                    break  # to be watched as well
            yield []  # what was written before the folder was watched

    def _tell_limit(self) -> None:
        if not self._limit_told:
            self._limit_told = True
            self._screen.say(
                f"the project has more than {FOLDERS_MAX} folders: files in the others are not "
                "reloaded when they are saved",
                YELLOW,
            )

    def _roots(self) -> list[Path]:
        """Return the folders that code and configuration are in."""
        places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        roots = [self._project.folder, *(file.parent for file in self._project.files)]
        roots += [Path(os.path.abspath(each)) for each in places if each]
        return [root for root in dict.fromkeys(roots) if root.is_dir()]

    # -- reloading --------------------------------------------------------------------------------

    def _reload(self, files: list[Path]) -> None:
        try:
            result = self._ask()
        except (MusterdError, msgspec.DecodeError) as error:
            if files and not self._stop.is_set():
                self._screen.say(f"{self._names(files)}: not reloaded: {error}", RED)
            return
        rolled = [pool.name for pool in result.pools if pool.effect == "rolls"]
        for change in result.changes:
            old, new = change.old or "(not set)", change.new or "(not set)"
            self._screen.say(f"{change.key}: {old} -> {new}  ({change.effect})", BOLD)
        if rolled:
            self._screen.say(f"{self._names(files)} saved: reloading {', '.join(rolled)}", BOLD)
        elif any(file.suffix == CODE for file in files) and not result.changes:
            self._screen.say(f"{self._names(files)} saved: no pool has imported it", DIM)
        if result.restart:
            self._screen.say(
                f"type Ctrl-C and start anew to apply {', '.join(result.restart)}", YELLOW
            )

    def _ask(self) -> ReloadResult:
        give_up = time.monotonic() + START_SECONDS
        while True:
            try:
                with Connection(str(self._project.control), ANSWER_SECONDS) as connection:
                    return connection.get(rpc.Reload(no_block=True, code=True), ReloadResult)
            except Unreachable:
                if time.monotonic() > give_up or self._stop.wait(LOOK_SECONDS):
                    raise

    def _names(self, files: list[Path]) -> str:
        if not files:
            return "files"
        shown = ", ".join(self._project.short(file) for file in files[:FILES_SHOWN])
        more = len(files) - FILES_SHOWN
        return f"{shown} and {more} more" if more > 0 else shown


def counts(path: Path) -> bool:
    """Tell whether a file that was written may concern a pool or the configuration."""
    if path.name.startswith("."):  # what an editor keeps while it writes
        return False
    return path.suffix == CODE or path.suffix in DATA


def folders_of(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield these folders and all below them that may have code of the project."""
    for root in roots:
        for folder, below, _ in os.walk(root):
            below[:] = sorted(name for name in below if _has_code(Path(folder, name)))
            yield Path(folder)


def _has_code(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in NO_CODE:
        return False
    return not (folder / "pyvenv.cfg").exists()  # a virtual environment


def is_possible() -> bool:
    """Whether the library that watches files is installed."""
    with contextlib.suppress(ImportError):
        import watchfiles  # noqa: F401

        return True
    return False
