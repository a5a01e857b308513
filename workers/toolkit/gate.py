"""Gates: places that threads and coroutines wait for together, first come, first served.

A gate has a name and a number of places. It exists while a place is held, so there are at most as
many gates as holders, and there is nothing to clean up.

A permit is made before the `try` in whose `finally` it is given back, whatever became of it:

    permit = Permit(name)
    try:
        if not gates.enter(permit, limit, timeout): raise ...
        ...
    finally:
        gates.leave(permit)

because a task's timeout is raised anywhere in a handler, even between taking a place and the next
line: only the gate knows whether the permit has a place.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from msgspec import Struct


class GateStatus(Struct, frozen=True):
    limit: int
    used: int
    waiting: int


class Permit:
    """Claim of one holder to a place."""

    __slots__ = ("name", "thread", "wake")

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = threading.current_thread()
        self.wake: Callable[[], bool] = bool  # wakes the waiting holder; False if it is gone


class _Gate:
    __slots__ = ("holders", "limit", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.holders: set[Permit] = set()
        self.waiting: deque[Permit] = deque()


class Gates:
    """Gates of one kind, by name."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._gates: dict[str, _Gate] = {}

    def enter(self, permit: Permit, limit: int, timeout: float | None) -> bool:
        """Wait for a place in this thread; return False if there was none in time."""
        ready = threading.Event()

        def wake() -> bool:
            ready.set()
            return True

        permit.wake = wake
        if self._ask(permit, limit):
            return True
        ready.wait(timeout)
        return self._holds(permit)

    async def enter_async(self, permit: Permit, limit: int, timeout: float | None) -> bool:
        """Wait for a place in an event loop."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def wake() -> bool:
            try:
                loop.call_soon_threadsafe(ready.set)
            except RuntimeError:  # the loop was closed during the wait
                return False
            return True

        permit.wake = wake
        if self._ask(permit, limit):
            return True
        try:
            async with asyncio.timeout(timeout):
                await ready.wait()
        except TimeoutError:
            return self._holds(permit)
        return True

    def leave(self, permit: Permit) -> None:
        """Give back the place, or the claim to one; do nothing without either."""
        with self._lock:
            gate = self._gates.get(permit.name)
            if gate is None:
                return
            if permit in gate.holders:
                gate.holders.discard(permit)
            elif permit in gate.waiting:
                gate.waiting.remove(permit)
            while gate.waiting and len(gate.holders) < gate.limit:
                next_permit = gate.waiting.popleft()
                gate.holders.add(next_permit)
                if not next_permit.wake():
                    gate.holders.discard(next_permit)
            if not gate.holders:
                del self._gates[permit.name]

    def holder(self, name: str) -> threading.Thread | None:
        """Return the thread that holds a place; any of them where there are several."""
        with self._lock:
            gate = self._gates.get(name)
            return next((permit.thread for permit in gate.holders), None) if gate else None

    def status(self) -> dict[str, GateStatus]:
        with self._lock:
            return {
                name: GateStatus(gate.limit, len(gate.holders), len(gate.waiting))
                for name, gate in sorted(self._gates.items())
            }

    def _ask(self, permit: Permit, limit: int) -> bool:
        """Take a place, or queue for one; return whether a place was free."""
        with self._lock:
            gate = self._gates.get(permit.name)
            if gate is None:
                gate = self._gates[permit.name] = _Gate(limit)
            elif gate.limit != limit:
                raise ValueError(
                    f"{self._what} {permit.name!r} is in use with a limit of {gate.limit}, not "
                    f"{limit}; give the same limit wherever you give this name"
                )
            if gate.waiting or len(gate.holders) >= gate.limit:
                gate.waiting.append(permit)
                return False
            gate.holders.add(permit)
            return True

    def _holds(self, permit: Permit) -> bool:
        with self._lock:
            gate = self._gates.get(permit.name)
            return gate is not None and permit in gate.holders
