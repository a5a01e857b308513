"""Clock of a worker under test: it stands still, and moves when somebody waits.

What is waited for through this clock (a pause before the next attempt, `time.sleep()`, a timer of
the event loop) takes no real time: the clock moves to its end. Code takes no time by this clock,
unless it runs or blocks for longer than STILL_NS at a stretch: then that time counts, so that a
loop that looks at the clock ends, and so does a handler that blocks for longer than its timeout.
"""

from time import monotonic_ns, time_ns  # Python's own: times.py replaces those of `time`

from musterd.workers.authoring.clock import OnAlarm

# Tests look the same on a machine that is busy for a moment; and half a second is seldom the point.
STILL_NS = 500_000_000


class VirtualClock:
    """Clock of musterd.workers.authoring.clock, with an alarm, and the time of day."""

    def __init__(self) -> None:
        self._ns = self._real_ns = self._moved_ns = monotonic_ns()
        self._wall_ns = time_ns() - self._ns
        self.alarm_ns: int | None = None  # when the alarm goes off
        self.handler: OnAlarm | None = None
        self.running = False  # code of the worker runs

    def now_ns(self) -> int:
        if self.running:
            self.count(STILL_NS)
        return self._ns

    def wall_ns(self) -> int:
        return self.now_ns() + self._wall_ns

    def move_to(self, when_ns: int) -> None:
        """Make it that time; real time that has passed meanwhile is not counted beside."""
        self._ns = max(self._ns, when_ns)
        self._real_ns = self._moved_ns = monotonic_ns()

    def count(self, beyond_ns: int = 0) -> None:
        """Count the real time since the clock moved last, if it is more than this."""
        real_ns = monotonic_ns()
        if real_ns - self._real_ns > beyond_ns:
            self._ns += real_ns - self._real_ns
            self._real_ns = real_ns

    @property
    def uncounted_ns(self) -> int:
        """Real time that has passed and was not counted."""
        return monotonic_ns() - self._real_ns

    @property
    def still_ns(self) -> int:
        """Real time since somebody has moved the clock."""
        return monotonic_ns() - self._moved_ns

    def run(self, running: bool) -> None:
        """Note that code of the worker begins to run, or ends."""
        self.running = running
        self.forgive()

    def forgive(self) -> None:
        """Count nothing of the real time so far."""
        self._real_ns = self._moved_ns = monotonic_ns()

    # -- the alarm ----------------------------------------------------------------------------

    def on_alarm(self, handler: OnAlarm | None) -> None:
        self.handler = handler

    def set_alarm(self, seconds: float, again: float = 0.0) -> None:
        # An alarm of this clock is never missed, so there is no need to repeat it.
        self.alarm_ns = self._ns + int(seconds * 1e9) if seconds else None
