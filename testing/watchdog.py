"""Wakes code of a worker under test that blocks, or computes, beyond a deadline.

A handler that waits by the clock of the worker needs nobody to wake it. One that blocks in another
way (a socket, a lock, an endless loop) hears of its timeout by a signal, as it does in a daemon:
a thread sends it, because tests may have plans of their own for SIGALRM (pytest-timeout has).
"""

import signal
import threading
from time import sleep  # Python's own
from types import FrameType
from typing import Any

from musterd.ipc.wire.signals import INTERRUPT_SIGNAL
from musterd.testing import times
from musterd.testing.world import World

LOOK_SECONDS = 0.05
OUR_CODE = "musterd.testing."


class Watchdog:
    """One for the process; works while a worker is open."""

    def __init__(self) -> None:
        self._workers = 0
        self._lock = threading.Lock()  # no signal is sent once nobody hears it
        self._active = threading.Event()
        self._thread: threading.Thread | None = None
        self._former: Any = None

    def begin(self) -> None:
        """Watch, unless that is impossible: Python hears signals in its main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._workers += 1
        if self._workers == 1:
            self._former = signal.signal(INTERRUPT_SIGNAL, self._struck)
            self._active.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="musterd-testing", daemon=True)
            self._thread.start()

    def end(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._workers -= 1
        if not self._workers:
            with self._lock:
                self._active.clear()
            signal.signal(INTERRUPT_SIGNAL, self._former)

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while self._active.wait():
            sleep(LOOK_SECONDS)
            world = times.running()
            with self._lock:
                late = isinstance(world, World) and world.clock.still_ns > LOOK_SECONDS * 1e9
                if late and self._active.is_set():
                    signal.pthread_kill(main, INTERRUPT_SIGNAL)

    def _struck(self, _number: int, frame: FrameType | None) -> None:
        world = times.running()
        if not isinstance(world, World) or world.within or frame is None:
            return
        if _is_debugged(frame):
            world.clock.forgive()
        elif not _module_of(frame).startswith(OUR_CODE):
            world.catch_up(frame)


def _is_debugged(frame: FrameType | None) -> bool:
    """Tell whether somebody types into a debugger: then no time passes."""
    while frame is not None:
        if _module_of(frame) == "bdb":
            return True
        frame = frame.f_back
    return False


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


watchdog = Watchdog()
