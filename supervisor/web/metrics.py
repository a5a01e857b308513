"""Metrics of the fleet for Prometheus. docs/monitoring.md lists every name.

Names of pools, schedules and priorities come from the configuration. Labels that others make up
(sites, types of errors, metrics of handlers) and hundreds of slots are bounded, here or before.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from musterd.supervisor.api.cluster import (
    AWAY,
    DOWN,
    FENCED,
    JOINING,
    MEMBER,
    ClusterFigures,
    ClusterStatus,
)
from musterd.supervisor.api.cluster import DRAINING as CLUSTER_DRAINING
from musterd.supervisor.api.metrics import FleetFigures, PoolFigures, Times, WorkerFigures
from musterd.supervisor.api.status import (
    BACKOFF,
    BUSY,
    DRAINING,
    FATAL,
    RUNNING,
    STARTING,
    STOPPED,
    UP_STATES,
    MetricStatus,
)

WORKERS_MAX = 300  # with samples of their own; the others are added up
OTHER = "other"
STATES = ("starting", "running", "degraded", "draining", "stopping")
SLOT_STATES = (STOPPED, STARTING, RUNNING, BUSY, DRAINING, BACKOFF, FATAL)
LEVELS = ("normal", "warning", "critical")
TASK_BITS = range(14, 39)  # 16 µs to 275 s
COMMIT_BITS = range(16, 35)  # 66 µs to 17 s
TURN_BITS = range(14, 34)  # 16 µs to 8.6 s
CUSTOM = "musterd_custom_"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
# Endings that the format itself adds to names.
_ENDINGS = re.compile(r"(_total|_created|_bucket|_count|_sum|_info)+$")

POOL = ("pool",)
Samples = Iterable[tuple[tuple[str, ...], float]]
NO_LABELS: tuple[str, ...] = ()


# -- families ---------------------------------------------------------------------------------


def counter(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """Make a counter; `_total` is added to the name."""
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
    """Make a gauge that is 1 for the current value and 0 for the others."""
    return gauge(name, text, (label,), [((each,), float(each == current)) for each in values])


def durations(
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Iterable[tuple[tuple[str, ...], Times]],
    bits: range,
) -> Metric:
    """Make a histogram in seconds, with bounds of 2**n nanoseconds for n in `bits`."""
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


def task_times(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Any]) -> Metric:
    return durations(name, text, labels, samples, TASK_BITS)


# -- the fleet --------------------------------------------------------------------------------

# For each family: how it is made, its name, the field that has its value, its text; and the label
# of the entries, where that field is a table.
Table = tuple[tuple[Any, ...], ...]
_OF_POOLS: Table = (
    (counter, "musterd_tasks_submitted", "submitted", "Tasks accepted"),
    (counter, "musterd_tasks_rejected", "rejected",
     "Tasks refused: the queue was full or drained, or the store could not write"),
    (counter, "musterd_tasks_finished", "finished", "Tasks finished, by final state", "state"),
    (counter, "musterd_tasks_retried", "retried", "Attempts that were retried"),
    (counter, "musterd_tasks_fallback", "fallbacks",
     "Tasks that ended with a fallback: their last good result or a given value"),
    (counter, "musterd_task_attempts_failed", "failures",
     "Failed attempts, by type of error", "type"),
    (task_times, "musterd_task_run_seconds", "run_times", "Run time of attempts"),
    (task_times, "musterd_task_wait_seconds", "wait_times",
     "Time that ready tasks waited for a worker"),
    (gauge, "musterd_queue_tasks", "queued", "Ready tasks in the queue, by priority", "priority"),
    (gauge, "musterd_queue_limit_tasks", "queue_size",
     "Maximum number of queued tasks (queue_size)"),
    (gauge, "musterd_tasks_waiting", "waiting",
     "Tasks that are delayed, between two attempts, or behind a task of the same key"),
    (gauge, "musterd_tasks_running", "running", "Tasks that are running"),
    (gauge, "musterd_workers_wanted", "size", "Workers that a pool should have now"),
    (gauge, "musterd_recommended_workers", "recommended",
     "Maximum number of workers that fit in memory"),
    (gauge, "musterd_pool_fatal", "fatal",
     "1 while a pool is FATAL: its worker class cannot be loaded"),
    (counter, "musterd_worker_restarts", "restarts", "Workers started to replace a lost one"),
    (counter, "musterd_worker_losses", "lost", "Workers lost, by cause", "cause"),
    (counter, "musterd_workers_recycled", "recycled", "Workers replaced by age, tasks or memory"),
    (counter, "musterd_orphans_ended", "orphans",
     "Processes that outlived their worker and were killed"),
)  # fmt: skip

_OF_WORKERS: Table = (
    (gauge, "musterd_worker_memory_bytes", "memory_bytes",
     "Memory (PSS) of one worker and its processes; 0: not sampled yet"),
    (counter, "musterd_worker_tasks", "tasks",
     "Attempts that ended in this slot, of all its workers"),
)  # fmt: skip

_OF_BREAKERS: Table = (
    (gauge, "musterd_breaker_waiting_tasks", "waiting",
     "Tasks waiting for a site's breaker, rate limit or bulkhead; of the busiest sites"),
    (counter, "musterd_breaker_failures", "failed",
     "Failures counted by a site's breaker; of the busiest sites"),
)  # fmt: skip

_OF_SCHEDULES: Table = (
    (counter, "musterd_schedule_runs", "runs", "Tasks submitted by a schedule"),
    (counter, "musterd_schedule_skipped", "skipped", "Runs of a schedule that were skipped"),
    (gauge, "musterd_schedule_next_run_timestamp_seconds", "next_at",
     "Next run of a schedule; 0: paused"),
)  # fmt: skip


_OF_CLUSTER: Table = (
    (total, "musterd_cluster_claims", "claims", "Calls that claimed tasks of the cluster"),
    (total, "musterd_cluster_claimed_attempts", "attempts", "Attempts that this node was granted"),
    (total, "musterd_cluster_ends", "ends", "Ends of attempts that the database has heard of"),
    (total, "musterd_cluster_fenced_results", "fenced",
     "Results of this node that did not count: its lease was over"),
    (total, "musterd_cluster_reaped_nodes", "reaped", "Silent nodes that this node has given up"),
    (total, "musterd_cluster_failed_calls", "failed_calls", "Calls of the database that failed"),
    (total, "musterd_cluster_tasks_submitted", "submitted",
     "Tasks accepted from clients of this node"),
    (total, "musterd_cluster_tasks_refused", "refused", "Tasks refused to clients of this node"),
    (total, "musterd_cluster_results_told", "told", "Results told to clients of this node"),
)  # fmt: skip

_OF_MEMBERSHIP: Table = (
    (number, "musterd_cluster_lease_seconds", "lease_seconds",
     "Time left of this node's lease; 0: it is no member"),
    (number, "musterd_cluster_away_seconds", "away_seconds",
     "How long the database has not answered; 0: it answers"),
    (number, "musterd_cluster_draining", "draining", "1 while the cluster drains this node"),
    (number, "musterd_cluster_policy_version", "policy", "Version of the applied policy"),
    (number, "musterd_cluster_attempts", "attempts", "Attempts of the cluster that are here"),
    (number, "musterd_cluster_unconfirmed_ends", "unconfirmed",
     "Attempts that have ended here and the database does not know it yet"),
)  # fmt: skip

# The same at each node; some seconds old.
_OF_DATABASE: Table = (
    (number, "musterd_cluster_seen_age_seconds", "seen_seconds",
     "Age of the figures of the whole cluster"),
    (number, "musterd_cluster_oldest_snapshot_seconds", "oldest_snapshot_seconds",
     "Age of the oldest snapshot in the database, behind which no dead row is removed"),
    (number, "musterd_cluster_dead_tuples", "dead_tuples", "Dead rows of the table of live tasks"),
    (number, "musterd_cluster_live_bytes", "live_bytes",
     "Size of the table of live tasks, with its indexes"),
)  # fmt: skip


def fleet_metrics(figures: FleetFigures) -> Iterator[Metric]:
    yield gauge(
        "musterd_build_info",
        "Always 1, with the versions of the daemon and of Python",
        ("version", "python"),
        [((figures.version, figures.python), 1)],
    )
    yield number("musterd_start_time_seconds", "When the daemon started", figures.started_at)
    yield chosen("musterd_state", "State of the daemon", "state", STATES, figures.state)
    yield number(
        "musterd_problem",
        "1 while the daemon itself has a problem, such as a full disk",
        float(bool(figures.problem)),
    )
    yield from _of_each(_OF_POOLS, "pool", figures.pools)
    yield from _workers(figures.pools)
    yield from _breakers(figures)
    yield from _of_each(_OF_SCHEDULES, "schedule", figures.schedules)
    yield from _daemon(figures)
    if figures.cluster is not None:
        yield from _cluster(figures.cluster)
    yield from custom_metrics(figures.pools)


def _of_each(
    table: Table, label: str, found: Sequence[Any], owner: str = "name"
) -> Iterator[Metric]:
    """Yield the families of a table, with samples of each that is found."""
    for make, name, field, text, *entry in table:
        values = [(getattr(each, owner), getattr(each, field)) for each in found]
        samples: list[Any] = [((whose,), value) for whose, value in values]
        if entry:
            samples = [((whose, key), n) for whose, value in values for key, n in value.items()]
        yield make(name, text, (label, *entry), samples)


def _workers(pools: list[PoolFigures]) -> Iterator[Metric]:
    states = {(pool.name, state): 0 for pool in pools for state in SLOT_STATES}
    for pool in pools:
        for worker in pool.workers:
            states[pool.name, worker.state] += 1
    yield gauge("musterd_workers", "Workers, by state", ("pool", "state"), states.items())
    up = {pool.name: sum(states[pool.name, state] for state in UP_STATES) for pool in pools}
    yield gauge(
        "musterd_pool_utilization_ratio",
        "Share of a pool's workers that run tasks",
        POOL,
        [((p.name,), min(1.0, p.busy / up[p.name]) if up[p.name] else 0.0) for p in pools],
    )
    yield gauge(
        "musterd_pool_memory_bytes",
        "Memory (PSS) of a pool's workers and their processes",
        POOL,
        [((p.name,), sum(each.memory_bytes for each in p.workers)) for p in pools],
    )
    workers = [worker for pool in pools for worker in pool.workers]
    shown, others = workers[:WORKERS_MAX], workers[WORKERS_MAX:]
    if others:
        tasks, memory = sum(w.tasks for w in others), sum(w.memory_bytes for w in others)
        shown = [*shown, WorkerFigures(OTHER, "", tasks, 0, memory)]
    yield from _of_each(_OF_WORKERS, "worker", shown)


def _breakers(figures: FleetFigures) -> Iterator[Metric]:
    yield gauge(
        "musterd_breakers",
        "Circuit breakers of all sites, by state",
        ("state",),
        [((state,), count) for state, count in figures.breaker_states.items()],
    )
    yield gauge(
        "musterd_breaker_state",
        "Always 1, with the state of a site's breaker; of the busiest sites",
        ("target", "state"),
        [((each.target, each.state), 1) for each in figures.breakers],
    )
    yield from _of_each(_OF_BREAKERS, "target", figures.breakers, "target")
    yield counter(
        "musterd_breaker_transitions",
        "Transitions of breakers into a state",
        ("state",),
        [((s,), figures.breaker_transitions.get(s, 0)) for s in figures.breaker_states],
    )


def _daemon(figures: FleetFigures) -> Iterator[Metric]:
    yield number(
        "musterd_memory_used_ratio",
        "Share of memory in use, of the tightest source",
        figures.memory_share,
    )
    yield gauge(
        "musterd_memory_threshold_ratio",
        "Share of memory above which the fleet shrinks",
        ("level",),
        [(("warning",), figures.memory_warning), (("critical",), figures.memory_critical)],
    )
    yield chosen(
        "musterd_memory_level", "Memory pressure level", "level", LEVELS, figures.memory_level
    )
    yield durations(
        "musterd_store_commit_seconds",
        "Duration of store transactions",
        (),
        [((), figures.commit_times)],
        COMMIT_BITS,
    )
    yield number("musterd_store_bytes", "Size of the store's files", figures.store_bytes)
    yield durations(
        "musterd_loop_turn_seconds",
        "Duration of turns of the supervisor's loop",
        (),
        [((), figures.turn_times)],
        TURN_BITS,
    )
    yield total("musterd_loop_slow_turns", "Turns that took over 50 ms", figures.slow_turns)


def _cluster(figures: ClusterFigures) -> Iterator[Metric]:
    status = figures.status
    states = (MEMBER, CLUSTER_DRAINING, JOINING, AWAY, FENCED, DOWN)
    yield chosen(
        "musterd_cluster_state", "State of this node in the cluster", "state", states, status.state
    )
    yield from _of_one(_OF_MEMBERSHIP, status)
    yield from _of_one(_OF_CLUSTER, figures)
    yield durations(
        "musterd_cluster_claim_seconds",
        "Duration of the calls that claim tasks",
        (),
        [((), Times(figures.claim_buckets, figures.claim_ns))],
        COMMIT_BITS,
    )
    if status.seen_seconds is None:
        return
    yield from _of_one(_OF_DATABASE, status)
    known = [node.state for node in status.nodes]
    yield gauge(
        "musterd_cluster_nodes",
        "Nodes of the cluster, by state",
        ("state",),
        [((state,), known.count(state)) for state in ("alive", "draining", "silent", "gone")],
    )
    yield gauge(
        "musterd_cluster_queue_tasks",
        "Live tasks of all nodes, by pool, priority and state",
        ("pool", "priority", "state"),
        [((each.pool, each.priority, each.state), each.tasks) for each in status.queue],
    )


def _of_one(table: Table, found: ClusterFigures | ClusterStatus) -> Iterator[Metric]:
    for make, name, field, text in table:
        yield make(name, text, float(getattr(found, field)))


# -- of handlers ------------------------------------------------------------------------------


def custom_metrics(pools: list[PoolFigures]) -> Iterator[Metric]:
    """Yield `ctx.metrics` of all pools as musterd_custom_NAME, labelled with the pool.

    The first use of a name makes it a counter or a gauge; samples of the other kind are dropped
    and counted.
    """
    kinds: dict[str, bool] = {}
    series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    dropped = {pool.name: pool.metrics_dropped for pool in pools}
    for pool in pools:
        for each in pool.metrics:
            name = custom_name(each.name)
            if kinds.setdefault(name, each.gauge) != each.gauge:
                dropped[pool.name] += 1
                continue
            found = series.setdefault(name, {})
            key = _labels(pool.name, each)
            found[key] = each.value + (0.0 if each.gauge else found.get(key, 0.0))
    for name, found in series.items():
        kind = "gauge" if kinds[name] else "counter"
        family = Metric(name, "Reported by handlers (ctx.metrics)", kind)
        for key, value in found.items():
            family.add_sample(name if kinds[name] else f"{name}_total", dict(key), value)
        yield family
    yield counter(
        "musterd_custom_dropped",
        "Samples of handlers that were dropped",
        POOL,
        [((name,), count) for name, count in dropped.items()],
    )


def custom_name(name: str) -> str:
    cleaned = _NOT_IN_NAMES.sub("_", name)
    return CUSTOM + (_ENDINGS.sub("", cleaned) or "unnamed")


def _labels(pool: str, each: MetricStatus) -> tuple[tuple[str, str], ...]:
    """Return labels with names that Prometheus accepts, each used once."""
    labels = {"pool": pool}
    for name, value in each.labels.items():
        cleaned = _NOT_IN_NAMES.sub("_", name)
        if not cleaned or cleaned[0].isdigit() or cleaned.startswith("__") or cleaned in labels:
            cleaned = f"label_{cleaned.lstrip('_')}"
        labels[cleaned] = value
    return tuple(sorted(labels.items()))
