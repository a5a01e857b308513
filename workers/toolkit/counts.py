"""Metrics of the toolkit itself: `musterd_custom_toolkit_...`.

A pool has room for few names with their labels, and most of that belongs to the worker's own
metrics: of each kind only the first NAMES_MAX have their own label, the others are `other`.
"""

from musterd.workers.metrics import metrics

NAMES_MAX = 20
OTHER = "other"

_known: dict[str, set[str]] = {}


def _told(kind: str, name: str) -> str:
    known = _known.setdefault(kind, set())
    if name not in known and len(known) >= NAMES_MAX:
        return OTHER
    known.add(name)
    return name


def retried(function: str) -> None:
    """Count a retry of a function."""
    metrics.counter("toolkit_retries", function=_told("retry", function)).inc()


def breaker_changed(key: str, state: str) -> None:
    """Count a new state of a breaker."""
    breaker = _told("breaker", key)
    metrics.counter("toolkit_breaker_changes", breaker=breaker, state=state).inc()
    metrics.gauge("toolkit_breaker_open", breaker=breaker).set(float(state != "closed"))


def breaker_refused(key: str) -> None:
    """Count a call that a breaker refused."""
    metrics.counter("toolkit_breaker_refused", breaker=_told("breaker", key)).inc()


def bulkhead_entered(name: str) -> None:
    """Count a call that got a place."""
    metrics.counter("toolkit_bulkhead_calls", bulkhead=_told("bulkhead", name)).inc()


def bulkhead_refused(name: str) -> None:
    """Count a call that got no place in time."""
    metrics.counter("toolkit_bulkhead_refused", bulkhead=_told("bulkhead", name)).inc()
