"""Memory in use: what the probe saw last, and whether one more worker fits.

Each source (the machine, the control group) has a total and a use; the tightest source counts. A
worker starts only if the use with that worker stays under a line: `warning` while all is well,
`critical` once the pools have been made smaller. A pool that grows stays a margin below the line.
The first worker of a pool only has to fit at all: on a machine that is always full, one worker per
pool is better than none.

The memory of a pool's worker is measured: the largest mean of the pool's workers. That figure fades
slowly, so that a fleet that grew too large does not grow there again at once. Workers started and
ended since the last sample are not in its figures yet: their memory is counted as promised.
"""

from collections.abc import Iterable
from enum import IntEnum

from musterd.ipc.resilience.policy import POOL_SIZE_MAX, SECOND_NS
from musterd.supervisor.core.model.events import MemorySampled, MemorySource
from musterd.supervisor.core.model.policy import MemoryPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot, SlotState

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE
GIBIBYTE = 1024 * MEBIBYTE
UNKNOWN_BYTES = 64 * MEBIBYTE  # of a worker, before one was measured
HALF_LIFE_NS = 600 * SECOND_NS  # an old measurement says little about the next worker
# After its start a worker still grows; later than this its memory is in the figures of the machine,
# even where its own figure cannot be read.
SETTLED_NS = 3 * SECOND_NS


class MemoryLevel(IntEnum):
    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


class MemoryUse:
    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.level = MemoryLevel.NORMAL
        self.sample: MemorySampled | None = None  # None: nothing is known, or memory is not watched
        self.sampled_ns = 0
        self._footprints: dict[str, float] = {}
        self._promised = 0  # bytes; negative when more workers ended than started

    # -- sampling -----------------------------------------------------------------------------

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
        """Estimate how much the worker of a slot will still grow."""
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
        """Return the used share of the tightest source."""
        source = self.tightest
        return source.share if source is not None else 0.0

    def forget(self) -> None:
        """Forget the last sample: memory is not watched any more."""
        self.sample = None
        self._promised = 0

    # -- admission ----------------------------------------------------------------------------

    def footprint(self, pool: Pool) -> int:
        """Estimate the memory of one more worker of this pool."""
        return int(self._footprints.get(pool.name, UNKNOWN_BYTES))

    def line(self, *, growing: bool) -> float:
        """Return the share that use may reach with one more worker."""
        policy = self.policy
        high = policy.warning if self.level == MemoryLevel.NORMAL else policy.critical
        return max(0.0, high - policy.margin) if growing else high

    def admits(self, pool: Pool, *, growing: bool = False) -> bool:
        """Whether one more worker of this pool fits; `growing`: it replaces no other."""
        if self.sample is None or not self.policy.enabled:
            return True
        first = not any(slot.worker for slot in pool.everyone)
        line = 1.0 if first else self.line(growing=growing)
        need = self.footprint(pool) + self._promised
        return all(
            each.used_bytes + need <= line * each.total_bytes for each in self.sample.sources
        )

    def fitting(self, pool: Pool) -> int | None:
        """Return how many more workers fit: 0 unless all is well, None for any number."""
        if self.level != MemoryLevel.NORMAL:
            return 0
        if self.sample is None:
            return None
        line = self.line(growing=True)
        free = min(line * each.total_bytes - each.used_bytes for each in self.sample.sources)
        return max(0, int((free - self._promised) // max(1, self.footprint(pool))))

    def recommended(self, pool: Pool) -> int:
        """Return how many workers memory allows: those alive and those that still fit if no other
        pool grows; fewer while memory is tight. The pool's size where memory is not watched."""
        if self.sample is None:
            return pool.size
        if pool.limit is not None:
            return min(pool.size, pool.limit)
        alive = sum(slot.alive for slot in pool.everyone)
        return min(POOL_SIZE_MAX, max(1, alive + (self.fitting(pool) or 0)))

    def promise(self, pool: Pool) -> None:
        """Count a worker of this pool that is being started."""
        if self.sample is not None:
            self._promised += self.footprint(pool)

    def freed(self, slot: Slot) -> None:
        """Count the memory of a worker that is gone."""
        self._promised -= slot.pss_bytes

    def shortage(self, pool: Pool) -> str:
        """Say why no more workers start, for people."""
        return (
            f"one more needs about {shown(self.footprint(pool))}, and use may not go over "
            f"{self.line(growing=True):.0%}: {self.described()}"
        )

    def described(self) -> str:
        """Describe the tightest source: `72% of the machine's memory is in use (17 of 24 GiB)`."""
        source = self.tightest
        if source is None:
            return "memory is not watched"
        used, total = shown(source.used_bytes), shown(source.total_bytes)
        return f"{source.share:.0%} of {source.name} is in use ({used} of {total})"


def shown(size: float) -> str:
    """Return a number of bytes as people read it."""
    if size >= GIBIBYTE:
        return f"{size / GIBIBYTE:.1f} GiB"
    if size >= MEBIBYTE:
        return f"{size / MEBIBYTE:.0f} MiB"
    return f"{size / KIBIBYTE:.0f} KiB"
