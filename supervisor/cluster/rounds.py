"""What each node does for the time that passes, although one of them would be enough.

tick        delays and expiries that are due
reap        nodes whose lease is over
retain      results that are old, and room for those to come
statistics  a look at the whole cluster, for people: one node in turn makes one every LOOK_AGE_NS
"""

from random import Random

from musterd.ipc.resilience.policy import SECOND_NS

TICK_NS = SECOND_NS // 2
REAP_NS = 2 * SECOND_NS
RETAIN_NS = 600 * SECOND_NS  # partitions for ended tasks are made hours ahead
LOOK_NS = 12 * SECOND_NS
LOOK_AGE_NS = 10 * SECOND_NS


class Rounds:
    def __init__(self, keep_ns: int, rng: Random) -> None:
        """`keep_ns`: how long results stay."""
        self._rng = rng
        # In the order of their turns, when several are due: how often, and with which arguments.
        self._calls: dict[str, tuple[int, tuple[object, ...]]] = {
            "reap": (REAP_NS, ()),
            "retain": (RETAIN_NS, (keep_ns,)),
            "statistics": (LOOK_NS, (LOOK_AGE_NS,)),
            "tick": (TICK_NS, ()),
        }
        self._at_ns = dict.fromkeys(self._calls, 0)

    @property
    def due_ns(self) -> int:
        return min(self._at_ns.values())

    def look_soon(self) -> None:
        """Look at the cluster at the next turn."""
        self._at_ns["statistics"] = 0

    def turn(self, now_ns: int) -> tuple[str, tuple[object, ...]]:
        """Return the next call that is due, with its arguments."""
        method = next(name for name, at_ns in self._at_ns.items() if at_ns <= now_ns)
        every_ns, arguments = self._calls[method]
        self._at_ns[method] = now_ns + round(every_ns * self._rng.uniform(0.8, 1.2))
        return method, arguments
