"""Measure memory continuously, in two threads.

The loop never waits for the kernel to add up pages, and a process that cannot be measured delays
only its own figure.

    figures   the sources and their stalls, every `check_interval` and as soon as systemd says that
              memory is short. Half a millisecond.
    trees     what each worker takes, and the figures of the machine. As often as their cost
              allows: TREES_SHARE of the time.

`take()` returns the newest sample; `fileno()` is readable when there is one.
"""

import base64
import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from musterd.supervisor.api.memory import MachineFigures
from musterd.supervisor.core.model.events import MemorySampled
from musterd.supervisor.log import log
from musterd.supervisor.memory.machine import Machine
from musterd.supervisor.memory.pss import tree_sizes
from musterd.supervisor.memory.sources import MemorySources
from musterd.supervisor.system.threads import Wakeup

TREES_SHARE = 0.005  # of one processor: 200 idle workers are then measured every twenty seconds
TREES_PAUSE_MIN = 1.0  # seconds
TREES_PAUSE_MAX = 60.0
LAUNCH_PAUSE = 1.0  # seconds: by then a new worker has loaded its first modules
NOTIFICATION_PAUSE = 0.1  # seconds between two samples, however often systemd notifies
PRESSURE_WATCH = "MEMORY_PRESSURE_WATCH"
PRESSURE_WRITE = "MEMORY_PRESSURE_WRITE"
OFF = "/dev/null"  # systemd names this file where pressure is not to be watched
OFF_SECONDS = 1.0  # how often a probe that is switched off checks whether it is on again
CLOSE_SECONDS = 5.0  # a thread that is stuck in the kernel is left behind


class Probe:
    def __init__(
        self, interval_seconds: float, state_dir: Path, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._interval = interval_seconds
        self._on = True
        self._sources = MemorySources()
        self._machine = Machine(state_dir)
        self._roots: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._figures = MachineFigures()
        self._newest: MemorySampled | None = None
        self._unseen: set[str] = set()  # what could not be measured
        self.notifications = 0
        self._closing = threading.Event()
        self._launches = threading.Event()
        self._ready = Wakeup()  # for the loop
        self._wakeup = Wakeup()  # for the thread
        self._pressure = _open_notification(environ)
        self._threads = [
            threading.Thread(target=self._watch_figures, name="memory", daemon=True),
            threading.Thread(target=self._watch_trees, name="trees", daemon=True),
        ]

    def start(self) -> MemorySampled:
        """Take the first sample here, before any worker exists, then start the threads."""
        sample = self._look()
        self.begin()
        return sample

    def begin(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def look(self, *, on: bool) -> None:
        """Switch measuring on or off; off forgets the last figures."""
        self._on = on
        if not on:
            self._newest, self._sizes, self._figures = None, {}, MachineFigures()

    def look_every(self, interval_seconds: float) -> None:
        """Set the interval, from the next sample on."""
        self._interval = interval_seconds

    def fileno(self) -> int:
        return self._ready.fileno()

    def take(self) -> MemorySampled | None:
        """Return the newest sample, once."""
        self._ready.clear()
        sample, self._newest = self._newest, None
        return sample

    def watch(self, roots: dict[int, int]) -> None:
        """Set the workers to measure: the pid of the init of each."""
        if roots.keys() - self._roots.keys():
            self._launches.set()
        self._roots = roots

    @property
    def figures(self) -> MachineFigures:
        return self._figures

    def close(self) -> None:
        self._closing.set()
        self._launches.set()
        self._wakeup.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            return  # the thread may still use the descriptors; the process ends anyway
        self._drop_notification()
        self._wakeup.close()
        self._ready.close()

    # -- figures ------------------------------------------------------------------------------

    def _look(self) -> MemorySampled:
        stalls = self._sources.stalls()
        sizes = self._sizes
        return MemorySampled(self._sources.read(), stalls.some, stalls.full, sizes)

    def _watch_figures(self) -> None:
        poller = select.poll()
        poller.register(self._wakeup.fileno(), select.POLLIN)
        if self._pressure is not None:
            poller.register(self._pressure, select.POLLIN | select.POLLPRI)
        while not self._closing.is_set():
            if not self._on:
                self._closing.wait(OFF_SECONDS)
                continue
            told = poller.poll(self._interval * 1000)
            if self._closing.is_set():
                return
            if not self._on:
                continue
            if self._pressure is not None and any(fd == self._pressure for fd, _ in told):
                self._hear(poller, told)
            with self._forbearing("memory"):
                self._newest = self._look()
                self._ready.set()

    def _hear(self, poller: select.poll, told: list[tuple[int, int]]) -> None:
        """Take a notification of systemd that memory is short."""
        assert self._pressure is not None
        self.notifications += 1
        mask = dict(told)[self._pressure]
        if mask & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            poller.unregister(self._pressure)
            self._drop_notification()
            return
        if mask & select.POLLIN:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pressure, 4096)
        self._closing.wait(NOTIFICATION_PAUSE)

    def _drop_notification(self) -> None:
        if self._pressure is not None:
            os.close(self._pressure)
            self._pressure = None

    @contextlib.contextmanager
    def _forbearing(self, what: str) -> Iterator[None]:
        """Log a failed measurement once, until one succeeds: descriptors may be short."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - what the kernel shows changes with its version
            if what not in self._unseen:
                reason = f"{what}: {type(error).__name__}: {error}"
                log.note("memory.unreadable", "warning", reason=reason)
                self._unseen.add(what)
        else:
            self._unseen.discard(what)

    # -- trees --------------------------------------------------------------------------------

    def _watch_trees(self) -> None:
        due = 0.0
        while not self._closing.is_set():
            if not self._on:
                self._closing.wait(OFF_SECONDS)
                continue
            self._launches.clear()
            if time.monotonic() >= due:
                began = time.thread_time()
                with self._forbearing("workers"):
                    self._sizes = tree_sizes(self._roots)
                self._look_at_machine()
                cost = time.thread_time() - began
                pause = min(max(cost / TREES_SHARE, TREES_PAUSE_MIN), TREES_PAUSE_MAX)
                due = time.monotonic() + pause
            else:  # only those that were never measured
                known = self._sizes
                new = {w: pid for w, pid in self._roots.items() if w not in known}
                with self._forbearing("workers"):
                    self._sizes = {**known, **tree_sizes(new)}
            self._launches.wait(max(0.0, due - time.monotonic()))
            if self._launches.is_set():
                self._closing.wait(LAUNCH_PAUSE)

    def _look_at_machine(self) -> None:
        with self._forbearing("machine"):  # state_dir may be gone, or its disk
            self._figures = self._machine.look()


def _open_notification(environ: Mapping[str, str]) -> int | None:
    """Open what systemd's memory pressure protocol asks us to poll; None for nothing."""
    path = environ.get(PRESSURE_WATCH, "")
    if not path or path == OFF:
        return None
    try:
        word = base64.b64decode(environ.get(PRESSURE_WRITE, ""), validate=True)
        fd = _open_any(path)
    except (OSError, ValueError) as error:
        reason = f"{PRESSURE_WATCH}={path!r} cannot be watched: {error}"
        log.note("memory.unwatched", "warning", reason=reason)
        return None
    try:
        if word:
            os.write(fd, word)
    except OSError as error:
        os.close(fd)
        reason = f"{PRESSURE_WATCH}={path!r} takes no {PRESSURE_WRITE}: {error}"
        log.note("memory.unwatched", "warning", reason=reason)
        return None
    return fd


def _open_any(path: str) -> int:
    """Open a file of the kernel, a FIFO or a socket."""
    if stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(path)
            return connection.detach()
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
