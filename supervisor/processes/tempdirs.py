"""Remove temporary directories of workers, in a thread: a large one takes seconds.

The thread waits a moment before it begins: right after the end of a worker, the interpreter and
the disk are needed by its successor.
"""

import logging
import os
import queue
import secrets
import shutil
import subprocess
import threading
from pathlib import Path

from musterd.ipc.errors import SpawnError

CLOSE_SECONDS_MAX = 10.0  # the next start removes the rest
PAUSE_SECONDS = 0.05
WAITING_MAX = 10_000  # directories; the next start removes those beyond, which a stuck disk leaves

log = logging.getLogger(__name__)


class Janitor:
    def __init__(self) -> None:
        self._doomed: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._pending: set[Path] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)
        self._thread.start()

    def remove(self, path: Path) -> None:
        """Remove a directory that nothing uses any more, some time later."""
        if len(self._pending) >= WAITING_MAX:
            log.warning("a temporary directory is left to the next start: %s", path)
            return
        self._pending.add(path)
        self._doomed.put(path)

    def removes(self, path: Path) -> bool:
        """Tell whether a directory is going to be removed."""
        return path in self._pending

    def empty(self, root: Path) -> int:
        """Make `root` an empty directory; return how many entries it had.

        Entries are renamed now and removed later. An entry that cannot be renamed, such as a
        directory of a lower layer on overlayfs, is removed in place; one that cannot be removed
        either is logged and stays. SpawnError if `root` cannot be a directory of ours.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            entries = list(root.iterdir())
        except OSError as error:
            raise SpawnError(
                f"{root} cannot be used for the temporary directories of workers: "
                f"{error.strerror}: remove what is there, and check supervisor.state_dir"
            ) from error
        for entry in entries:
            dead = root / f".dead-{secrets.token_hex(8)}"
            try:
                entry.rename(dead)
            except OSError as error:
                log.info("a temporary directory is removed where it is: %s: %s", entry, error)
                dead = entry
            self.remove(dead)
        return len(entries)

    def close(self) -> None:
        """Wait until all is removed, for CLOSE_SECONDS_MAX."""
        self._doomed.put(None)
        self._closing.set()
        self._thread.join(CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        while True:
            doomed = [self._doomed.get()]
            self._closing.wait(PAUSE_SECONDS)
            doomed += [self._doomed.get() for _ in range(self._doomed.qsize())]  # one pause for all
            for path in doomed:
                if path is None:
                    return
                self._forget(path)

    def _forget(self, path: Path) -> None:
        try:
            _remove(path)
        except (OSError, RecursionError) as error:
            log.warning("a temporary directory is not removed: %s: %s", path, error)
        finally:
            self._pending.discard(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except RecursionError:  # of Python 3.11 and 3.12, whose rmtree() calls itself for each level
        subprocess.run(["rm", "-rf", "--", path], stdin=subprocess.DEVNULL, check=False)
        if path.exists():
            raise
    except PermissionError:  # the worker left directories that even their owner may not enter
        path.chmod(0o700)
        for folder, names, _ in os.walk(path):
            for name in names:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o700)
        shutil.rmtree(path)
