"""What a pool's workers count, and what their attempts failed of: named numbers, not too many.

Names come from handlers, which may make them up without end. So each pool has a bound; what comes
beyond it is dropped, and how much that was is counted.
"""

from msgspec import Struct

from musterd.ipc.wire.messages import SAMPLE_CHARS_MAX, SAMPLE_LABELS_MAX, Failure, Sample

SERIES_MAX = 200  # names with their labels, of one pool
FAILURE_KINDS_MAX = 50  # types of errors that are told apart; the others are OTHER
OTHER = "other"

Key = tuple[str, tuple[tuple[str, str], ...]]


class Series(Struct, gc=False):
    value: float
    gauge: bool


class Tally:
    __slots__ = ("dropped", "failures", "series")

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}  # attempts, by the type of their error
        self.series: dict[Key, Series] = {}
        self.dropped = 0  # samples that had no place

    def failed(self, failure: Failure) -> None:
        """An attempt has failed: by the class of its error, without the module."""
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
                self.dropped += 1  # it was the other kind before
            else:
                known.value = sample.value if sample.gauge else known.value + sample.value


def _fits(sample: Sample) -> bool:
    texts = [sample.name, *sample.labels, *sample.labels.values()]
    return len(sample.labels) <= SAMPLE_LABELS_MAX and all(
        len(text) <= SAMPLE_CHARS_MAX for text in texts
    )
