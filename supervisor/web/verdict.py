"""The verdict on the fleet: a headline, and its reasons."""

from msgspec import Struct

from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import (
    BACKOFF,
    FATAL,
    STARTING,
    BreakerStatus,
    FleetStatus,
    PoolStatus,
)

# Levels: nothing to do, look at it soon, act now, not known.
OK, WARNING, BAD, UNKNOWN = "ok", "warning", "bad", "unknown"
NAMES_SHOWN_MAX = 3

_HEADLINES = {
    "starting": "Starting",
    "draining": "Shutting down: finishing running tasks",
    "stopping": "Shutting down: stopping workers",
}


class Reason(Struct, frozen=True):
    level: str
    text: str


class Verdict(Struct, frozen=True):
    level: str
    text: str
    reasons: list[Reason] = []  # the worst first


def unreachable(why: str) -> Verdict:
    """Return the verdict on a daemon that does not answer: the page shows old data."""
    return Verdict(UNKNOWN, "The supervisor does not answer", [Reason(BAD, why)])


def verdict(
    fleet: FleetStatus, memory: MemoryStatus | None, breakers: list[BreakerStatus]
) -> Verdict:
    reasons = [Reason(BAD, fleet.problem)] if fleet.problem else []
    for pool in fleet.pools:
        reasons += _of_pool(pool)
    if memory is not None:
        reasons += _of_memory(memory)
    reasons += _of_breakers(breakers)
    reasons.sort(key=lambda each: each.level != BAD)  # stable: in the order they were found
    level = reasons[0].level if reasons else OK
    if fleet.state in _HEADLINES:
        return Verdict(max(level, WARNING, key=_RANK.index), _HEADLINES[fleet.state], reasons)
    if not reasons:
        return Verdict(OK, "Running normally")
    headline = "Action needed" if level == BAD else "Running, with warnings"
    return Verdict(level, headline, reasons)


_RANK = (OK, WARNING, BAD)


def _of_pool(pool: PoolStatus) -> list[Reason]:
    found = []
    why = f": {pool.reason}" if pool.reason else ""
    states = [worker.state for worker in pool.workers]
    fatal, backoff = states.count(FATAL), states.count(BACKOFF)
    if pool.state == FATAL and (not fatal or (pool.reason and fatal == len(states))):
        found.append(Reason(BAD, f"{pool.name} cannot run{why}"))  # its class cannot be loaded
    elif fatal:
        text = f"{pool.name}: {fatal} of {len(states)} workers gave up after too many failures"
        found.append(Reason(BAD, text + why))
    if backoff:
        text = f"{pool.name}: {backoff} of {len(states)} workers waiting to restart"
        found.append(Reason(WARNING, text + ("" if fatal else why)))
    if pool.halt:
        text = f"{pool.name} is {pool.halt}: tasks wait until it is resumed"
        found.append(Reason(WARNING, text))
    missing = pool.size - pool.running - fatal - backoff
    if pool.state != FATAL and missing > 0 and not fatal and not backoff:
        starting = " (starting)" if STARTING in states else ""
        text = f"{pool.name}: {pool.running} of {pool.size} workers are up{starting}"
        found.append(Reason(WARNING, text + why))
    elif pool.reason and not found:
        found.append(Reason(WARNING, f"{pool.name}: {pool.reason}"))
    return found


def _of_memory(memory: MemoryStatus) -> list[Reason]:
    if not memory.enabled or memory.level == "normal":
        return []
    level = BAD if memory.level == "critical" else WARNING
    cut = sum(each.held for each in memory.pools)
    held = f"; {cut} workers held back" if cut else ""
    text = f"memory is low: {memory.share:.0%} of {memory.source or 'memory'} in use{held}"
    return [Reason(level, text)]


def _of_breakers(breakers: list[BreakerStatus]) -> list[Reason]:
    shut = [each for each in breakers if each.state in ("open", "forced-open", "half-open")]
    if not shut:
        return []
    names = ", ".join(each.target for each in shut[:NAMES_SHOWN_MAX])
    more = f" and {len(shut) - NAMES_SHOWN_MAX} more" if len(shut) > NAMES_SHOWN_MAX else ""
    plural = "breaker is" if len(shut) == 1 else "breakers are"
    return [Reason(WARNING, f"{len(shut)} {plural} open: {names}{more}")]
