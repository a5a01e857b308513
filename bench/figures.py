"""Figures of a benchmark, the ratios between them, and the targets they must reach.

A figure has one sample per round. The systems take turns within a round, so that a slow moment of
the machine hits all of them; a ratio is taken within each round, and the median of those counts.
"""

import statistics
from collections.abc import Iterable

from msgspec import Struct

TASKS_PER_SECOND, SECONDS, BYTES, COUNT, SHARE = "tasks/s", "s", "B", "", "of 1"
PER_MINUTE = "1/min"


class Figure(Struct, kw_only=True):
    key: str  # "throughput.musterd.submit_many"
    label: str
    unit: str
    samples: list[float]
    baseline: str = ""  # key of the figure to compare with; "" for none
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)


class Measure(Struct, kw_only=True):
    """One table: our figures first, then those of other systems."""

    name: str
    title: str
    figures: list[Figure]

    def figure(self, key: str) -> Figure | None:
        return next((each for each in self.figures if each.key == key), None)


class Target(Struct, kw_only=True, frozen=True):
    """A figure, or its ratio to another, and the bound it must keep."""

    label: str
    key: str
    bound: float
    at_least: bool = False  # otherwise at most
    relative_to: str = ""


class Verdict(Struct, kw_only=True):
    label: str
    unit: str  # "x" for a ratio
    bound: float
    at_least: bool
    value: float
    low: float
    high: float
    reached: bool


MILLISECOND = 0.001
MEGABYTE = 1e6

TARGETS = (
    Target(
        label="durable throughput, submit_many, to Pool.imap_unordered(chunksize=1)",
        key="throughput.musterd.submit_many",
        relative_to="throughput.pool.imap_unordered",
        bound=1.5,
        at_least=True,
    ),
    Target(
        label="durable throughput, single submit, to Pool.imap_unordered(chunksize=1)",
        key="throughput.musterd.submit",
        relative_to="throughput.pool.imap_unordered",
        bound=1.0,
        at_least=True,
    ),
    Target(
        label="round trip p50 in memory, to ProcessPoolExecutor",
        key="roundtrip.musterd.memory.p50",
        relative_to="roundtrip.executor.p50",
        bound=1.0,
    ),
    Target(
        label="round trip p50, durable, beyond two fdatasync",
        key="roundtrip.musterd.beyond",
        bound=0.3 * MILLISECOND,
    ),
    Target(
        label="a killed parser worker's replacement is ready",
        key="recovery.musterd.replacement",
        bound=100 * MILLISECOND,
    ),
    Target(
        label="CRITICAL starts behind 10,000 LOW tasks of 1 ms (median)",
        key="priority.musterd",
        bound=20 * MILLISECOND,
    ),
    Target(
        label="dispatch out of 1,000,000 queued tasks, to that out of 1,000",
        key="backlog.rate.1000000",
        relative_to="backlog.rate.1000",
        bound=0.8,
        at_least=True,
    ),
    Target(
        label="supervisor with 1,000,000 queued tasks, PSS",
        key="backlog.supervisor.1000000",
        bound=300 * MEGABYTE,
    ),
    Target(label="idle supervisor, PSS", key="memory.musterd.supervisor", bound=60 * MEGABYTE),
    Target(
        label="idle parser worker with its init, PSS",
        key="memory.musterd.parser",
        bound=25 * MEGABYTE,
    ),
)


def ratios(figure: Figure, base: Figure) -> list[float]:
    """Return ratios by round; where the numbers of rounds differ, to the median of the base."""
    if len(figure.samples) == len(base.samples):
        return [ours / theirs for ours, theirs in zip(figure.samples, base.samples, strict=True)]
    return [sample / base.median for sample in figure.samples]


def judged(targets: Iterable[Target], measures: list[Measure]) -> list[Verdict]:
    """Return the verdicts on targets that were measured."""
    return [found for target in targets if (found := judge(target, measures)) is not None]


def judge(target: Target, measures: list[Measure]) -> Verdict | None:
    """Judge whether a target was reached; None if its figures were not measured."""
    figure = find(measures, target.key)
    if figure is None:
        return None
    samples, unit = figure.samples, figure.unit
    if target.relative_to:
        base = find(measures, target.relative_to)
        if base is None:
            return None
        samples, unit = ratios(figure, base), "x"
    value = statistics.median(samples)
    return Verdict(
        label=target.label,
        unit=unit,
        bound=target.bound,
        at_least=target.at_least,
        value=value,
        low=min(samples),
        high=max(samples),
        reached=value >= target.bound if target.at_least else value <= target.bound,
    )


def find(measures: list[Measure], key: str) -> Figure | None:
    return next((found for each in measures if (found := each.figure(key))), None)


def percentile(samples: list[float], share: float) -> float:
    """Return the sample that `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
