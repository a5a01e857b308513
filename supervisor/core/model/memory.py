"""Memory as the core knows it: what the probe saw last, and whether one more worker fits.

Each source (the machine, the control group) has a total and a use; the tightest one counts. A
worker is made only if the use with it stays under a line: `warning` while all is well, `critical`
once the pools are made smaller already; a fleet that grows stays a margin below, so that it does
not grow over the line. The first worker of a pool needs no more than that it fits at all: on a
machine that is always full, a fleet of one worker per pool is better than none.

What a worker of a pool takes is measured: the largest mean of the pool's workers, which is
forgotten slowly, so that a fleet that grew too big once does not grow there again at once. What was
made and what has ended since the last look is not in the figures yet: it is counted as promised.
"""

from collections.abc import Iterable
from enum import IntEnum

from musterd.ipc.resilience.policy import POOL_SIZE_MAX, SECOND_NS
from musterd.supervisor.core.model.events import MemorySampled, MemorySource
from musterd.supervisor.core.model.policy import MemoryPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.sizes import MEBIBYTE, shown
from musterd.supervisor.core.model.slot import Slot, SlotState

UNKNOWN_BYTES = 64 * MEBIBYTE  # of a worker, before the first one was measured
HALF_LIFE_NS = 600 * SECOND_NS  # what a worker took long ago says little about the next one
# After its start a worker still grows; later than this it is in the figures of the machine, even
# where its own cannot be read.
SETTLED_NS = 3 * SECOND_NS


class Level(IntEnum):
    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


class Memory:
    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.level = Level.NORMAL
        self.sample: MemorySampled | None = None  # None: nothing is known, or nobody looks
        self.sampled_ns = 0
        self._footprints: dict[str, float] = {}
        self._promised = 0  # bytes; less than nothing when more has ended than was made

    # -- looking ------------------------------------------------------------------------------

    def note(self, sample: MemorySampled, now_ns: int, pools: Iterable[Pool]) -> None:
        passed_ns = now_ns - self.sampled_ns
        self.sample, self.sampled_ns = sample, now_ns
        self._promised = 0
        for pool in pools:
            measured = []
            for slot in pool.everyone:
                slot.pss_bytes = sample.workers.get(slot.worker, 0)
                if slot.pss_bytes and slot.ready_ns:
                    measured.append(slot.pss_bytes)
            known = self._footprints.get(pool.name)
            if measured:
                mean = sum(measured) / len(measured)
                faded = known * 0.5 ** (passed_ns / HALF_LIFE_NS) if known is not None else 0.0
                self._footprints[pool.name] = max(mean, faded)
            elif known is not None:
                self._footprints[pool.name] = known * 0.5 ** (passed_ns / HALF_LIFE_NS)
            self._promised += sum(self._growth(slot) for slot in pool.everyone)

    def _growth(self, slot: Slot) -> int:
        """What this slot's worker will probably still take."""
        if not slot.worker or slot.state == SlotState.DRAINING:
            return 0
        if slot.ready_ns and self.sampled_ns - slot.ready_ns >= SETTLED_NS:
            return 0
        return max(0, self.footprint(slot.pool) - slot.pss_bytes)

    @property
    def tightest(self) -> MemorySource | None:
        sample = self.sample
        return max(sample.sources, key=lambda each: each.share) if sample is not None else None

    @property
    def share(self) -> float:
        """Of the tightest source, how much is in use."""
        source = self.tightest
        return source.share if source is not None else 0.0

    def forget(self) -> None:
        """Nobody looks any more: what was seen last says nothing."""
        self.sample = None
        self._promised = 0

    # -- admission ----------------------------------------------------------------------------

    def footprint(self, pool: Pool) -> int:
        """What one more worker of this pool will probably take."""
        return int(self._footprints.get(pool.name, UNKNOWN_BYTES))

    def line(self, *, growing: bool) -> float:
        """The share that use may reach with one more worker."""
        policy = self.policy
        high = policy.warning if self.level == Level.NORMAL else policy.critical
        return max(0.0, high - policy.margin) if growing else high

    def admits(self, pool: Pool, *, growing: bool = False) -> bool:
        """Whether one more worker of this pool fits; `growing`: it takes nobody's place."""
        if self.sample is None or not self.policy.enabled:
            return True
        first = not any(slot.worker for slot in pool.everyone)
        line = 1.0 if first else self.line(growing=growing)
        need = self.footprint(pool) + self._promised
        return all(
            each.used_bytes + need <= line * each.total_bytes for each in self.sample.sources
        )

    def fitting(self, pool: Pool) -> int | None:
        """How many more workers of a pool that grows fit: none unless all is well, None for any."""
        if self.level != Level.NORMAL:
            return 0
        if self.sample is None:
            return None
        line = self.line(growing=True)
        free = min(line * each.total_bytes - each.used_bytes for each in self.sample.sources)
        return max(0, int((free - self._promised) // max(1, self.footprint(pool))))

    def recommended(self, pool: Pool) -> int:
        """How many workers the pool should have at most, as far as memory is concerned: those it
        has and those that still fit, were it alone to grow; less while memory is tight. As many as
        were asked for where nobody looks."""
        if self.sample is None:
            return pool.size
        if pool.limit is not None:
            return min(pool.size, pool.limit)
        alive = sum(slot.alive for slot in pool.everyone)
        return min(POOL_SIZE_MAX, max(1, alive + (self.fitting(pool) or 0)))

    def promise(self, pool: Pool) -> None:
        """One more worker of this pool is being made."""
        if self.sample is not None:
            self._promised += self.footprint(pool)

    def freed(self, slot: Slot) -> None:
        """The worker of this slot is gone."""
        self._promised -= slot.pss_bytes

    def shortage(self, pool: Pool) -> str:
        """Why there is no worker more, for people."""
        return (
            f"one more needs about {shown(self.footprint(pool))}, and use may not go over "
            f"{self.line(growing=True):.0%}: {self.described()}"
        )

    def described(self) -> str:
        """The tightest source: `72% of the machine's memory is in use (17.3 of 24.0 GiB)`."""
        source = self.tightest
        if source is None:
            return "memory is not looked at"
        used, total = shown(source.used_bytes), shown(source.total_bytes)
        return f"{source.share:.0%} of {source.name} is in use ({used} of {total})"
