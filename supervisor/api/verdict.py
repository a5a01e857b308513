"""The verdict on the fleet: a headline and its reasons, for `musterctl top` and the dashboard."""

from msgspec import Struct

from musterd.supervisor.api.cluster import DOWN, FENCED, MEMBER, ClusterStatus, headline
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
SHUT = ("open", "forced-open", "half-open")  # states of breakers that hold tasks back

_HEADLINES = {
    "starting": "Starting",
    "draining": "Shutting down: finishing running tasks",
    "stopping": "Shutting down: stopping workers",
}


class Reason(Struct, frozen=True):
    level: str
    text: str


class Verdict(Struct, frozen=True):
    level: str = OK
    text: str = "Running normally"
    reasons: list[Reason] = []  # the worst first

    @property
    def problems(self) -> list[Reason]:
        """Return the reasons, and the headline where it is about the daemon's own state."""
        own = [Reason(WARNING, self.text)] if self.text in _HEADLINES.values() else []
        return self.reasons + own


def unreachable(why: str) -> Verdict:
    """Return the verdict on a daemon that does not answer: old data are shown."""
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
    if fleet.cluster is not None:
        reasons += _of_cluster(fleet.cluster)
    reasons.sort(key=lambda each: each.level != BAD)  # stable: in the order they were found
    bad = bool(reasons) and reasons[0].level == BAD
    if fleet.state in _HEADLINES:
        return Verdict(BAD if bad else WARNING, _HEADLINES[fleet.state], reasons)
    if not reasons:
        return Verdict()
    headline = "Action needed" if bad else "Running, with warnings"
    return Verdict(reasons[0].level, headline, reasons)


def _of_pool(pool: PoolStatus) -> list[Reason]:
    found = []
    why = f": {pool.reason}" if pool.reason else ""
    states = [worker.state for worker in pool.workers]
    fatal, backoff = states.count(FATAL), states.count(BACKOFF)
    if pool.state == FATAL and (not fatal or (pool.reason and fatal == len(states))):
        found.append(Reason(BAD, f"{pool.name} cannot run{why}"))  # its class cannot be loaded
    elif fatal:
        found.append(Reason(BAD, _of_workers(pool, FATAL, "gave up after too many failures")))
    if backoff:
        found.append(Reason(WARNING, _of_workers(pool, BACKOFF, "waiting to restart")))
    if pool.halt:
        text = f"{pool.name} is {pool.halt}: musterctl resume {pool.name}"
        found.append(Reason(WARNING, text))
    else:
        halted = [worker.name for worker in pool.workers if worker.halt]
        found += [Reason(WARNING, f"paused: {_listed(halted)}")] if halted else []
    missing = pool.size - pool.running - fatal - backoff
    if pool.state != FATAL and missing > 0 and not fatal and not backoff:
        starting = " (starting)" if STARTING in states else ""
        text = f"{pool.name}: {pool.running} of {pool.size} workers are up{starting}"
        found.append(Reason(WARNING, text + why))
    elif pool.reason and not found:
        found.append(Reason(WARNING, f"{pool.name}: {pool.reason}"))
    return found


def _of_workers(pool: PoolStatus, state: str, what: str) -> str:
    """Say how many workers are in this state, and why the first of them is."""
    those = [worker for worker in pool.workers if worker.state == state]
    why = next((worker.reason for worker in those if worker.reason), pool.reason)
    text = f"{pool.name}: {len(those)} of {len(pool.workers)} workers {what}"
    return f"{text}: {why}" if why else text


def _of_memory(memory: MemoryStatus) -> list[Reason]:
    if not memory.enabled or memory.level == "normal":
        return []
    level = BAD if memory.level == "critical" else WARNING
    cut = sum(each.held for each in memory.pools)
    held = f"; {cut} workers held back" if cut else ""
    text = f"memory is low: {memory.share:.0%} of {memory.source or 'memory'} in use{held}"
    return [Reason(level, text)]


def _of_breakers(breakers: list[BreakerStatus]) -> list[Reason]:
    shut = [each.target for each in breakers if each.state in SHUT]
    if not shut:
        return []
    plural = "breaker is" if len(shut) == 1 else "breakers are"
    return [Reason(WARNING, f"{len(shut)} {plural} open: {_listed(shut)}")]


def _of_cluster(cluster: ClusterStatus) -> list[Reason]:
    found = []
    if cluster.state in (FENCED, DOWN) or cluster.unreachable:
        found.append(Reason(BAD, headline(cluster)))
    elif cluster.state != MEMBER:
        found.append(Reason(WARNING, headline(cluster)))
    silent = [each.name for each in cluster.nodes if each.state == "silent"]
    if silent:
        found.append(Reason(WARNING, f"nodes of the cluster are silent: {_listed(silent)}"))
    if cluster.stalled:
        minutes = cluster.oldest_snapshot_seconds / 60
        text = f"a transaction in the cluster's database has been open for {minutes:.0f} min"
        found.append(Reason(BAD, f"{text}: {cluster.dead_tuples} dead rows slow down claims"))
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + more
