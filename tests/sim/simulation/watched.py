"""An account of the results of one schedule, kept from what is committed, which checks that:

- a change is told at least once, whatever dies, and a second time only with the mark `again`;
- nothing is told that is no change: not the first result, not a flicker, not a failure;
- what is told has the results before and after it, as history has them on disk;
- history is bounded, and every entry of it is one that the schedule knows;
- failures in a row are reported once, before they are committed, and so is the recovery.
"""

from random import Random
from typing import Any

import msgspec

from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import FAILED, SUCCEEDED, Lease, View
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model.policy import SchedulePolicy, WatchPolicy
from musterd.supervisor.core.model.watching import HISTORY_BYTES_MAX, Watched

RULES = b"rules"  # of a simulated worker: the price counts, and not what stands behind it
PRICES = (50, 50, 45, 38)
LIMIT = 40
NEEDED = 4  # entries that are kept whatever `keep` says


def policy_of(rng: Random) -> WatchPolicy:
    """Return one of the ways to watch."""
    name, rules = rng.choice((("", b""), ("r", RULES)))
    numbers: dict[str, Any] = {}
    if name:
        numbers = rng.choice(({}, {"below": float(LIMIT)}, {"by": 0.2, "by_share": True}))
    confirm, keep, stale = rng.choice((1, 1, 2, 3)), rng.choice((2, 20)), rng.choice((0, 1, 3))
    pictures = keep > 2  # of half of them
    return WatchPolicy(rules, name, confirm, keep=keep, stale=stale, picture=pictures, **numbers)


def result_of(lease: Lease, rng: Random) -> tuple[bytes, View | None]:
    """Return what a simulated handler finds, and its view."""
    price = rng.choice(PRICES)
    if not lease.watch:
        return b"%d" % price, None
    value = b"%d %d" % (price, rng.randrange(9))
    return value, View(str(price), {"price": float(price)}, b"%d" % price)


class WatchAccount:
    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self._told: int | None = None  # price of the baseline
        self._high = True
        self._last = 0
        self._row = 0  # results in a row that speak for a change
        self.changes: dict[str, tuple[int, int]] = {}  # by id: the prices before and after
        self.told: dict[str, None] = {}
        self.history: dict[int, HistoryEntry] = {}  # on disk
        self.failures = 0  # in a row
        self.stale = False
        self._heard: dict[str, bool] = {}  # reports of conditions that are not committed yet
        self.repeated = 0
        self.stales = 0

    # -- what is committed --------------------------------------------------------------------

    def ended(self, final: act.FinalRecord) -> None:
        if not self.policy.notify:
            return
        if final.outcome.state == SUCCEEDED:
            self._good(final.spec.id, int(final.outcome.value.split()[0]))
        elif final.outcome.state == FAILED or final.outcome.attempts:
            self.failures += 1
            most = self.policy.watching.stale
            if most and self.failures >= most and not self.stale:
                self.stale = True
                self.stales += 1
                assert self._heard.pop("watch.stale", False), "stale, and nobody was told"

    def _good(self, id_: str, price: int) -> None:
        if self.stale:
            assert self._heard.pop("watch.recovered", False), "well again, and nobody was told"
        self.failures, self.stale = 0, False
        if self._told is None:
            self._settle(price)
            return
        watching = self.policy.watching
        if watching.by:
            speaks, same = abs(price - self._told) * 5 >= self._told, True
        elif watching.below is not None:
            speaks, same = self._high and price < LIMIT, True
        else:
            speaks, same = price != self._told, price == self._last
        self._last = price
        self._row = (self._row + 1 if same else 1) if speaks else 0
        if not speaks:
            self._high = price >= LIMIT
        elif self._row >= watching.confirm:
            self.changes.pop(id_, None)  # retried by hand: it is the newest again
            self.changes[id_] = (self._told, price)
            self._settle(price)

    def _settle(self, price: int) -> None:
        self._told, self._high, self._last, self._row = price, price >= LIMIT, price, 0

    def remember(self, fact: act.Fact) -> None:
        number = int(fact.key.rpartition(".")[2])
        if fact.value is None:
            del self.history[number]
        else:
            self.history[number] = msgspec.msgpack.decode(fact.value, type=HistoryEntry)

    def check(self, watched: Watched) -> None:
        """Compare with what the schedule itself has committed."""
        if not self.policy.notify:
            assert not self.history
            return
        kept = [(each.number, each.size) for each in watched.history]
        assert kept == [(each.number, len(each.value)) for each in self.history.values()]
        most = max(self.policy.watching.keep, NEEDED) + 2 * len(watched.untold)
        assert len(kept) <= most, f"{len(kept)} are kept"
        assert sum(size for _, size in kept) <= HISTORY_BYTES_MAX
        assert (watched.failures, watched.stale) == (self.failures, self.stale)
        newest = list(self.changes)[-1:]
        assert [watched.newest.task] * bool(newest) == newest if watched.newest else not newest

    # -- what is heard ------------------------------------------------------------------------

    def hear(self, report: act.Report) -> None:
        """Hear a report of the core."""
        if report.event in ("watch.stale", "watch.recovered"):
            assert self.policy.notify
            self._heard[report.event] = True

    def published(self, report: act.Report) -> None:
        """Hear a change as people do, once the shell has looked up what it is about."""
        assert report.task in self.changes, f"{report.task} is called changed, and is not"
        prices = self.changes[report.task]
        for number, price in zip((report.number_before, report.number), prices, strict=True):
            entry = self.history.get(number)
            assert entry is not None, f"entry {number} of {report.task} is gone"
            assert int(entry.value) == price, f"{entry}, and the price was {price}"
        assert report.again or report.task not in self.told, f"{report.task} is told twice"
        self.repeated += report.task in self.told
        self.told.pop(report.task, None)
        self.told[report.task] = None
