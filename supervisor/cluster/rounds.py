"""What each node does for the time that passes, although one of them would be enough.

    tick        delays and expiries that are due
    reap        nodes whose lease is over
    retain      results that are old, and room for those to come
    statistics  a look at the whole cluster, for people: one in LOOK_AGE_NS, by one node in turn

A look may take seconds, where a million tasks wait; the others do not wait for it. A node that has
a pool without workers looks soon after something was queued there: what it sees starts a worker.
"""

from collections.abc import Mapping
from random import Random

from musterd.ipc.resilience.policy import SECOND_NS

TICK_NS = SECOND_NS // 2
REAP_NS = SECOND_NS  # a lost node's tasks wait for this beyond its lease
RETAIN_NS = 600 * SECOND_NS  # partitions for ended tasks are made hours ahead
LOOK_NS = 12 * SECOND_NS
LOOK_AGE_NS = 10 * SECOND_NS
SOON_NS = SECOND_NS // 2  # age of a look, and between two, for a pool without workers


class Rounds:
    """Calls that are made again and again, of which one is under way at a time."""

    def __init__(self, rng: Random, calls: Mapping[str, tuple[int, tuple[object, ...]]]) -> None:
        """`calls` has how often and with which arguments; the first goes first, if many are due."""
        self._rng = rng
        self._calls = calls
        self._at_ns = dict.fromkeys(calls, 0)

    @property
    def due_ns(self) -> int:
        return min(self._at_ns.values())

    def at_ns(self, method: str) -> int:
        """Return when a call is due."""
        return self._at_ns[method]

    def hurry(self) -> None:
        """Make all calls at their next turn."""
        self._at_ns = dict.fromkeys(self._calls, 0)

    def turn(self, now_ns: int) -> tuple[str, tuple[object, ...]]:
        """Return the next call that is due, with its arguments."""
        method = next(name for name, at_ns in self._at_ns.items() if at_ns <= now_ns)
        every_ns, arguments = self._calls[method]
        self._at_ns[method] = now_ns + round(every_ns * self._rng.uniform(0.8, 1.2))
        return method, arguments


def of_time(rng: Random, keep_ns: int) -> Rounds:
    """Return what keeps the cluster going. `keep_ns`: how long results stay."""
    calls = {"reap": (REAP_NS, ()), "retain": (RETAIN_NS, (keep_ns,)), "tick": (TICK_NS, ())}
    return Rounds(rng, calls)


class Looks(Rounds):
    def __init__(self, rng: Random) -> None:
        super().__init__(rng, {"statistics": (LOOK_NS, (LOOK_AGE_NS,))})
        self._called_ns = 0
        self._queued_ns: int | None = None  # when something was queued that no look has seen

    def queued(self, now_ns: int) -> None:
        """Look soon: something was queued in a pool that has no workers here."""
        self._queued_ns = now_ns
        self._look_soon()

    def seen(self, at_ns: int) -> None:
        """Note how old a look is: one that others took before does not show what was queued."""
        if self._queued_ns is not None and at_ns >= self._queued_ns:
            self._queued_ns = None
        elif self._queued_ns is not None:
            self._look_soon()

    def _look_soon(self) -> None:
        at_ns = self._at_ns["statistics"]
        self._at_ns["statistics"] = min(at_ns, self._called_ns + SOON_NS)

    def turn(self, now_ns: int) -> tuple[str, tuple[object, ...]]:
        self._called_ns = now_ns
        method, arguments = super().turn(now_ns)
        return method, arguments if self._queued_ns is None else (SOON_NS,)
