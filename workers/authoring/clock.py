"""Clock and alarm of a worker: all that its runtime measures and limits time with.

Tests of workers (musterd.testing) hand the runtime a clock on which pauses take no time.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

OnAlarm = Callable[[int, FrameType | None], object]  # as Python calls the handler of a signal


class Clock(Protocol):
    def now_ns(self) -> int:
        """Return the monotonic time."""

    def on_alarm(self, handler: OnAlarm | None) -> None:
        """Call this at each alarm, in place of what was called before; None ignores alarms."""

    def set_alarm(self, seconds: float, again: float = 0.0) -> None:
        """Set off the alarm once this time is over, and each `again` from then on; 0: never."""


class SystemClock:
    """Clock and interval timer of the process."""

    now_ns = staticmethod(time.monotonic_ns)

    def on_alarm(self, handler: OnAlarm | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN if handler is None else handler)

    def set_alarm(self, seconds: float, again: float = 0.0) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds, again)
