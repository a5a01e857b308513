"""What a pool counts: tasks and workers, durations, errors by type, samples of its handlers.

Names come from handlers, which may make up names without end. So each pool has a bound on names;
samples beyond it are dropped, and the drops are counted.
"""

from msgspec import Struct

from musterd.ipc.wire.messages import SAMPLE_CHARS_MAX, SAMPLE_LABELS_MAX, Failure, Sample
from musterd.supervisor.core.model.slot import Cause

BUCKETS = 65  # enough for any duration in a message: 2**64 ns are 584 years
SERIES_MAX = 200  # names with their labels, of one pool
FAILURE_KINDS_MAX = 50  # error types that are told apart; the others are OTHER
OTHER = "other"

Key = tuple[str, tuple[tuple[str, str], ...]]


class Counters(Struct, gc=False):
    """What a pool has done since the daemon started."""

    submitted: int = 0
    rejected: int = 0
    withdrawn: int = 0  # of `submitted`: the store could not take them
    succeeded: int = 0
    failed: int = 0
    fallbacks: int = 0  # of `succeeded`: with a last good result or a default
    cancelled: int = 0
    expired: int = 0
    retried: int = 0
    restarts: int = 0
    lost: dict[Cause, int] = {}  # workers that ended unasked
    orphans: int = 0  # processes that outlived their worker or fork server, and were ended
    recycled: int = 0


class Histogram:
    """Durations in buckets that double in width: adding one costs two additions.

    Bucket n counts durations of n bits: 2**(n-1) to 2**n - 1 nanoseconds; bucket 0 counts zeros.
    Hot callers add to `buckets` and `total_ns` themselves.
    """

    __slots__ = ("buckets", "total_ns")

    def __init__(self) -> None:
        self.buckets = [0] * BUCKETS
        self.total_ns = 0

    def add(self, duration_ns: int) -> None:
        self.buckets[duration_ns.bit_length()] += 1
        self.total_ns += duration_ns

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Series(Struct, gc=False):
    value: float
    gauge: bool


class Tally(Struct):
    failures: dict[str, int] = {}  # failed attempts, by the type of their error
    series: dict[Key, Series] = {}
    dropped: int = 0  # samples beyond the bounds

    def failed(self, failure: Failure) -> None:
        """Count a failed attempt under the class of its error, without the module."""
        kind = failure.type.rpartition(".")[2][:SAMPLE_CHARS_MAX] or failure.kind
        if kind not in self.failures and len(self.failures) >= FAILURE_KINDS_MAX:
            kind = OTHER
        self.failures[kind] = self.failures.get(kind, 0) + 1

    def add(self, samples: list[Sample]) -> None:
        for sample in samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            known = self.series.get(key)
            if known is None:
                if len(self.series) >= SERIES_MAX or not _fits(sample):
                    self.dropped += 1
                else:
                    self.series[key] = Series(sample.value, sample.gauge)
            elif known.gauge != sample.gauge:
                self.dropped += 1  # a counter and a gauge of one name
            else:
                known.value = sample.value if sample.gauge else known.value + sample.value


def _fits(sample: Sample) -> bool:
    texts = [sample.name, *sample.labels, *sample.labels.values()]
    return len(sample.labels) <= SAMPLE_LABELS_MAX and all(
        len(text) <= SAMPLE_CHARS_MAX for text in texts
    )
