"""Building blocks of an exposition: families of metrics with their samples."""

from collections.abc import Iterable

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from musterd.supervisor.api.metrics import Times

Samples = Iterable[tuple[tuple[str, ...], float]]
NO_LABELS: tuple[str, ...] = ()


def counter(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """`name` without _total, which is added."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def number(name: str, text: str, value: float) -> Metric:
    return gauge(name, text, NO_LABELS, [(NO_LABELS, value)])


def total(name: str, text: str, value: float) -> Metric:
    return counter(name, text, NO_LABELS, [(NO_LABELS, value)])


def chosen(name: str, text: str, label: str, values: Iterable[str], current: str) -> Metric:
    """1 for the one of these that holds, 0 for the others."""
    return gauge(name, text, (label,), [((each,), float(each == current)) for each in values])


def durations(
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Iterable[tuple[tuple[str, ...], Times]],
    bits: range,
) -> Metric:
    """Seconds; the bounds are 2**n nanoseconds for each n of `bits`."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, times in samples:
        below, start, buckets = 0, 0, []
        for bit in bits:
            below += sum(times.buckets[start : bit + 1])
            start = bit + 1
            buckets.append((repr(2**bit / 1e9), float(below)))
        buckets.append(("+Inf", float(sum(times.buckets))))
        family.add_metric(values, buckets, times.total_ns / 1e9)
    return family
