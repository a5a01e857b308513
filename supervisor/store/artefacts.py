"""Artefacts of failed attempts, as the supervisor sees them: a thread lists, reads and trims them.

Workers write them (ipc/wire/artefacts.py). The loop never touches their files: it polls `fileno()`
and calls `settle()`. A disk that hangs holds up those who ask for artefacts, and nobody else.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from musterd.ipc.wire import artefacts
from musterd.ipc.wire.artefacts import Artefact, Keep
from musterd.supervisor.system.threads import Wakeup

TRIM_SECONDS = 60.0
CALLS_MAX = 256  # that wait for the thread; more are refused
CLOSE_SECONDS_MAX = 2.0  # nothing is lost with a call that is not answered

log = logging.getLogger(__name__)

Call = Callable[[], Callable[[], None]]  # in the thread; what it returns is called in the loop


class ArtefactFiles:
    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._wakeup = Wakeup()
        self._calls: queue.Queue[Call | None] = queue.Queue()
        self._done: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="artefacts", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when settle() has answers."""
        return self._wakeup.fileno()

    def settle(self) -> None:
        """Hand out the answers that have come."""
        self._wakeup.clear()
        while self._done:
            self._done.popleft()()

    @property
    def full(self) -> bool:
        """Whether nothing more can be asked now."""
        return self._calls.qsize() >= CALLS_MAX

    def find(self, task_id: str, then: Callable[[list[Artefact]], None]) -> None:
        """Call `then` with the artefacts of a task; with none if they cannot be read."""

        def look() -> Callable[[], None]:
            try:
                found = artefacts.artefacts_of(self._keep.folder, task_id)
            except OSError as error:
                log.warning("artefacts cannot be listed: %s", error)
                found = []
            return partial(then, found)

        self._calls.put(look)

    def read(
        self, task_id: str, name: str, offset: int, size: int, then: Callable[[bytes | None], None]
    ) -> None:
        """Call `then` with a part of an artefact; with None if there is no such artefact."""

        def look() -> Callable[[], None]:
            try:
                found = artefacts.artefacts_of(self._keep.folder, task_id)
                file = next((each for each in found if each.name == name), None)
                part = None if file is None else artefacts.read(file, offset, size)
            except OSError as error:  # trimmed meanwhile
                log.info("an artefact cannot be read: %s", error)
                part = None
            return partial(then, part)

        self._calls.put(look)

    def forget(self, task_ids: list[str] | None, before_ns: int) -> None:
        """Remove those of these tasks; with None, all that are older than this time of day."""

        def remove() -> Callable[[], None]:
            try:
                if task_ids is not None:
                    artefacts.remove(self._keep.folder, task_ids)
                else:
                    artefacts.remove_before(self._keep.folder, before_ns)
            except OSError as error:
                log.warning("artefacts cannot be removed: %s", error)
            return _nothing

        self._calls.put(remove)

    def forget_attached(self, task_id: str) -> None:
        """Remove the picture of a result that is no change. While many callers wait it stays until
        it is trimmed."""

        def remove() -> Callable[[], None]:
            try:
                artefacts.remove_attached(self._keep.folder, task_id)
            except OSError as error:
                log.warning("a picture cannot be removed: %s", error)
            return _nothing

        if not self.full:
            self._calls.put(remove)

    def close(self) -> None:
        """End the thread; answers that are still to come are dropped."""
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS_MAX)
        self._wakeup.close()

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._trim()
        due = time.monotonic() + TRIM_SECONDS
        while True:
            try:
                call = self._calls.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._trim()
                due = time.monotonic() + TRIM_SECONDS
                continue
            if call is None:
                return
            self._done.append(call())
            self._wakeup.set()

    def _trim(self) -> None:
        try:
            Path(self._keep.folder).mkdir(mode=0o700, exist_ok=True)
            removed = artefacts.trim(self._keep, time.time_ns())
        except OSError as error:
            log.warning("artefacts cannot be kept: %s: %s", self._keep.folder, error)
        else:
            if removed:
                log.debug("artefacts of %d attempts were removed", removed)


def _nothing() -> None: ...
