"""Event loop of a worker under test: its timers go by the clock of the worker.

Where nothing is ready, the loop hands over to the world (world.py), which moves the clock to the
next timer. While a socket is open, a job of an executor runs or a thread of the worker is alive,
timers take real time: nobody can know what comes from there. Plain pauses (`asyncio.sleep()`) are
cut short even then: an idle connection must not make a test wait for a minute.
"""

import asyncio
import math
import selectors
from asyncio import futures
from collections.abc import Callable
from time import monotonic  # Python's own
from typing import Any, Protocol

from musterd.testing.outside import Outside

SLEEP_SECONDS_MAX = 0.05  # of real time, in an asyncio.sleep() while a socket is open
LOOK_SECONDS = 0.05  # how often a wait for threads looks whether they are still alive
SETTLE_SECONDS = 0.005  # for the wake-up by a job or thread that has ended a moment ago

# What asyncio.sleep() has called at its end. Not public; without it, sleeps are like other timers.
_END_OF_SLEEP: Any = getattr(futures, "_set_result_unless_cancelled", None)

Ready = list[tuple[selectors.SelectorKey, int]]


class World(Protocol):
    """What the loop needs of the world around the worker."""

    outside: Outside
    patience: float  # real seconds of silence of what is outside; then the clock goes on

    within: int  # while it is not 0, signals wait

    @property
    def over(self) -> bool:
        """Whether the loop is to come back, if it can."""

    def now_ns(self) -> int: ...

    def next_due_ns(self) -> float:
        """Return when the world has something to do; math.inf for never."""

    def pass_time(self, until_ns: float) -> None:
        """Move the clock to that time, and do what is due; raise where that is math.inf."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, world: World) -> None:
        self._world = world
        self._own_selector = selector = _Selector(world, self._next_is_sleep)
        super().__init__(selector)
        selector.own = {key.fd for key in selector.get_map().values()}

    def time(self) -> float:
        return self._world.now_ns() / 1e9

    def knows(self, fd: int) -> None:
        """Note a descriptor that nobody outside writes to."""
        self._own_selector.own.add(fd)

    def _next_is_sleep(self) -> bool:
        """Tell whether the next timer ends an asyncio.sleep()."""
        timers = getattr(self, "_scheduled", ())
        callback = getattr(timers[0], "_callback", None) if timers else None
        return callback is not None and callback is _END_OF_SLEEP


class _Selector(selectors.EpollSelector):
    def __init__(self, world: World, next_is_sleep: Callable[[], bool]) -> None:
        super().__init__()
        self._world = world
        self._next_is_sleep = next_is_sleep
        self._quiet = 0.0  # real seconds without a sign from outside
        self.own: set[int] = set()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._quiet = 0.0
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> Ready:
        world = self._world
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        end_ns = math.inf if timeout is None else world.now_ns() + math.ceil(timeout * 1e9)
        grace = SLEEP_SECONDS_MAX
        while not ready and world.now_ns() < end_ns:
            due_ns = min(end_ns, world.next_due_ns())
            sleeps = self._next_is_sleep()
            ready = self._wait_for_outside(due_ns, grace if sleeps else math.inf)
            if not ready:
                grace = 0.0 if sleeps else grace
                world.pass_time(due_ns)
                ready = super().select(0)
            if world.over:
                break
        return ready

    def _wait_for_outside(self, due_ns: float, grace: float) -> Ready:
        """Wait for what is outside, at most as long as the clock would take, or `grace` seconds."""
        left = min((due_ns - self._world.now_ns()) / 1e9, self._world.patience - self._quiet, grace)
        waited = False
        while left > 0 and (self._world.outside.busy() or self._is_open()):
            waited = True
            began = monotonic()
            ready = self._wait(min(left, LOOK_SECONDS))
            if ready:
                self._quiet = 0.0
                return ready
            passed = monotonic() - began
            left -= passed
            self._quiet += passed
        return self._wait(SETTLE_SECONDS) if waited and left > 0 else []

    def _wait(self, seconds: float) -> Ready:
        self._world.within += 1
        try:
            return super().select(seconds)
        finally:
            self._world.within -= 1

    def _is_open(self) -> bool:
        """Tell whether a descriptor is watched that somebody outside may write to."""
        return any(key.fd not in self.own for key in self.get_map().values())
