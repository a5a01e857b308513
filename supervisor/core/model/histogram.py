"""How long things take, counted in buckets that double in width: adding one costs two additions.

Bucket n counts durations of n bits: those from 2**(n-1) up to 2**n - 1 nanoseconds; bucket 0 those
of no time at all. Where it is hot, callers add to `buckets` and `total_ns` themselves.
"""

BUCKETS = 65  # whatever a message can hold: 2**64 ns are 584 years


class Histogram:
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
