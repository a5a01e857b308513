"""`ctx.metrics`: metrics of a worker, for `musterctl status --json` and the metrics page.

    ctx.metrics.counter("promos_found").inc()
    ctx.metrics.counter("pages", site="shop.example").inc(3)
    ctx.metrics.gauge("open_tabs").set(2)

Each worker process has one set; `metrics` here is that set, for code outside of a task. Changes go
to the supervisor with the next result and are added up there for the whole pool: a counter over all
workers, a gauge as it was last set. A worker that dies takes the changes since its last result
along.

Each change is one entry in a deque: no other thread can tear an append apart, nor can the signal
handler that sends results in the middle of a task.

May import: ipc.wire, workers.texts.
"""

import math
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from musterd.ipc.wire.messages import SAMPLE_CHARS_MAX, SAMPLE_LABELS_MAX, SAMPLES_MAX, Sample
from musterd.workers.texts import plain_text, shown_whole

NAME = re.compile(rf"[a-z][a-z0-9_]{{0,{SAMPLE_CHARS_MAX - 1}}}")
PENDING_MAX = 1000  # changes that are kept one by one; then they are added up
WHOLE_MAX = 2**53  # whole numbers up to here stay exact when read as floats
VALUE_MAX = sys.float_info.max  # a counter stops here: readers of metrics take no infinity

Labels = tuple[tuple[str, str], ...]
Change = tuple[str, Labels, float, bool]  # name, labels, value, whether of a gauge


class _Metric:
    __slots__ = ("_labels", "_metrics", "_name")

    def __init__(self, metrics: "Metrics", name: str, labels: Labels) -> None:
        self._metrics, self._name, self._labels = metrics, name, labels


class Counter(_Metric):
    """Number that only grows."""

    __slots__ = ()

    def inc(self, amount: float = 1) -> None:
        """Add to the number."""
        value = _number(amount)
        if not 0 <= value < math.inf:
            raise ValueError(f"counter {self._name!r}: inc({value!r}): give a number, 0 or more")
        self._metrics.note((self._name, self._labels, value, False))


class Gauge(_Metric):
    """Number as it was last set."""

    __slots__ = ()

    def set(self, value: float) -> None:
        """Say what the number is now."""
        number = _number(value)
        if not -math.inf < number < math.inf:
            raise ValueError(f"gauge {self._name!r}: set({number!r}): give a finite number")
        self._metrics.note((self._name, self._labels, number, True))


class Metrics:
    """Metrics of a worker process, told with its results and added up for the pool."""

    def __init__(self) -> None:
        self._pending: deque[Change] = deque()
        self.redact: Callable[[str], str] = str  # removes secrets of running tasks from labels

    def counter(self, name: str, **labels: Any) -> Counter:
        """Return the counter of this name and these labels."""
        return Counter(self, self._checked(name), self._read(name, labels))

    def gauge(self, name: str, **labels: Any) -> Gauge:
        """Return the gauge of this name and these labels."""
        return Gauge(self, self._checked(name), self._read(name, labels))

    def _read(self, name: str, labels: dict[str, Any]) -> Labels:
        if len(labels) > SAMPLE_LABELS_MAX:
            raise ValueError(f"metric {name!r} has {len(labels)} labels, over {SAMPLE_LABELS_MAX}")
        return tuple(
            sorted(
                (self._checked(key), plain_text(self.redact(str(text)), SAMPLE_CHARS_MAX))
                for key, text in labels.items()
            )
        )

    def _checked(self, name: str) -> str:
        if isinstance(name, str) and NAME.fullmatch(name):
            if self.redact(name) == name:
                return name
            raise ValueError(
                f"the name of a metric, or of a label, contains a secret: {self.redact(name)[:80]}"
            )
        raise ValueError(
            f"a metric is named by lower-case letters, digits and _, beginning with a letter, "
            f"at most {SAMPLE_CHARS_MAX}; not {shown_whole(name)}"
        )

    def note(self, change: Change) -> None:
        self._pending.append(change)
        if len(self._pending) > PENDING_MAX:
            self._pending.extend(self._added_up())

    def _added_up(self) -> list[Change]:
        found: dict[tuple[str, Labels, bool], float] = {}
        while True:
            try:
                name, labels, value, gauge = self._pending.popleft()
            except IndexError:
                break
            key = (name, labels, gauge)
            found[key] = value if gauge else min(found.get(key, 0) + value, VALUE_MAX)
        # The supervisor refuses endless new names; here they only must not pile up.
        kept = list(found.items())[:SAMPLES_MAX]
        return [(name, labels, value, gauge) for (name, labels, gauge), value in kept]

    def take(self) -> list[Sample]:
        """Return the changes since the last call."""
        if not self._pending:
            return []
        return [Sample(name, dict(labels), value, g) for name, labels, value, g in self._added_up()]


metrics = Metrics()  # of this process


def _number(value: Any) -> float:
    """Convert any number to a plain one: the supervisor reads no other."""
    if isinstance(value, int) and -WHOLE_MAX <= value <= WHOLE_MAX:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
