"""The fleet as Prometheus reads it. docs/monitoring.md lists every name.

Names of pools, schedules and priorities come from the configuration. What others make up (sites,
types of errors, names of handlers' metrics) and slots by the hundred are bounded, here or before.
"""

import re
from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

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

WORKERS_MAX = 300  # told one by one; the others are added up
OTHER = "other"
STATES = ("starting", "running", "degraded", "draining", "stopping")
SLOT_STATES = (STOPPED, STARTING, RUNNING, BUSY, DRAINING, BACKOFF, FATAL)
LEVELS = ("normal", "warning", "critical")
TASK_BITS = range(14, 39)  # 16 µs to 275 s
COMMIT_BITS = range(16, 35)  # 66 µs to 17 s
TURN_BITS = range(14, 34)  # 16 µs to 8.6 s
CUSTOM = "musterd_custom_"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
# What the format itself adds to names, and would be taken for.
_ENDINGS = re.compile(r"(_total|_created|_bucket|_count|_sum|_info)+$")

POOL = ("pool",)
Samples = Iterable[tuple[tuple[str, ...], float]]
NO_LABELS: tuple[str, ...] = ()


def fleet_metrics(figures: FleetFigures) -> Iterator[Metric]:
    yield gauge(
        "musterd_build_info",
        "1, with the versions of the daemon and of its Python",
        ("version", "python"),
        [((figures.version, figures.python), 1)],
    )
    yield number("musterd_start_time_seconds", "When the daemon started", figures.started_at)
    yield chosen("musterd_state", "What the daemon is doing", "state", STATES, figures.state)
    yield number(
        "musterd_problem",
        "1 while something is wrong with the daemon itself, such as a disk that is full",
        float(bool(figures.problem)),
    )
    yield from _tasks(figures.pools)
    yield from _workers(figures.pools)
    yield from _breakers(figures)
    yield from _schedules(figures)
    yield from _daemon(figures)
    yield from custom_metrics(figures.pools)


def _tasks(pools: list[PoolFigures]) -> Iterator[Metric]:
    yield counter(
        "musterd_tasks_submitted",
        "Tasks accepted",
        POOL,
        [((pool.name,), pool.submitted) for pool in pools],
    )
    yield counter(
        "musterd_tasks_rejected",
        "Tasks refused: the queue was full, drained, or the store could not write",
        POOL,
        [((pool.name,), pool.rejected) for pool in pools],
    )
    yield counter(
        "musterd_tasks_finished",
        "Tasks ended, by their final state",
        ("pool", "state"),
        [((p.name, state), count) for p in pools for state, count in p.finished.items()],
    )
    yield counter(
        "musterd_tasks_retried",
        "Attempts that were followed by another one",
        POOL,
        [((pool.name,), pool.retried) for pool in pools],
    )
    yield counter(
        "musterd_tasks_fallback",
        "Tasks that ended with their last good result or a default instead of a result",
        POOL,
        [((pool.name,), pool.fallbacks) for pool in pools],
    )
    yield counter(
        "musterd_task_attempts_failed",
        "Attempts that failed, by the type of their error",
        ("pool", "type"),
        [((p.name, kind), count) for p in pools for kind, count in p.failures.items()],
    )
    yield durations(
        "musterd_task_run_seconds",
        "How long attempts ran",
        POOL,
        [((pool.name,), pool.run_times) for pool in pools],
        TASK_BITS,
    )
    yield durations(
        "musterd_task_wait_seconds",
        "How long tasks that were ready waited for a worker",
        POOL,
        [((pool.name,), pool.wait_times) for pool in pools],
        TASK_BITS,
    )
    yield gauge(
        "musterd_queue_tasks",
        "Tasks that are ready and wait, by priority",
        ("pool", "priority"),
        [((p.name, priority), count) for p in pools for priority, count in p.queued.items()],
    )
    yield gauge(
        "musterd_queue_limit_tasks",
        "How many tasks may wait (queue_size)",
        POOL,
        [((pool.name,), pool.queue_size) for pool in pools],
    )
    yield gauge(
        "musterd_tasks_waiting",
        "Tasks that are delayed, between two attempts, or behind another of their key",
        POOL,
        [((pool.name,), pool.waiting) for pool in pools],
    )
    yield gauge(
        "musterd_tasks_running",
        "Tasks that workers have",
        POOL,
        [((pool.name,), pool.running) for pool in pools],
    )


def _workers(pools: list[PoolFigures]) -> Iterator[Metric]:
    states = {(pool.name, state): 0 for pool in pools for state in SLOT_STATES}
    for pool in pools:
        for worker in pool.workers:
            states[pool.name, worker.state] += 1
    yield gauge("musterd_workers", "Workers, by their state", ("pool", "state"), states.items())
    yield gauge(
        "musterd_workers_wanted",
        "Workers that a pool shall have now",
        POOL,
        [((pool.name,), pool.size) for pool in pools],
    )
    yield gauge(
        "musterd_recommended_workers",
        "Workers that a pool should have at most, as far as memory is concerned",
        POOL,
        [((pool.name,), pool.recommended) for pool in pools],
    )
    up = {pool.name: sum(states[pool.name, state] for state in UP_STATES) for pool in pools}
    yield gauge(
        "musterd_pool_utilization_ratio",
        "The share of a pool's workers that have tasks",
        POOL,
        [((p.name,), min(1.0, p.busy / up[p.name]) if up[p.name] else 0.0) for p in pools],
    )
    yield gauge(
        "musterd_pool_fatal",
        "1 while a pool is given up: its worker class cannot be loaded",
        POOL,
        [((pool.name,), float(pool.fatal)) for pool in pools],
    )
    yield counter(
        "musterd_worker_restarts",
        "Workers started in the place of a lost one",
        POOL,
        [((pool.name,), pool.restarts) for pool in pools],
    )
    yield counter(
        "musterd_worker_losses",
        "Workers that ended unasked, by cause",
        ("pool", "cause"),
        [((p.name, cause), count) for p in pools for cause, count in p.lost.items()],
    )
    yield counter(
        "musterd_workers_recycled",
        "Workers replaced because they were worn",
        POOL,
        [((pool.name,), pool.recycled) for pool in pools],
    )
    yield counter(
        "musterd_orphans_ended",
        "Processes that outlived their worker, found and ended",
        POOL,
        [((pool.name,), pool.orphans) for pool in pools],
    )
    yield gauge(
        "musterd_pool_memory_bytes",
        "Memory (PSS) of a pool's workers and all they started",
        POOL,
        [((p.name,), sum(each.memory_bytes for each in p.workers)) for p in pools],
    )
    yield from _each_worker([worker for pool in pools for worker in pool.workers])


def _each_worker(workers: list[WorkerFigures]) -> Iterator[Metric]:
    shown, others = workers[:WORKERS_MAX], workers[WORKERS_MAX:]
    if others:
        tasks, memory = sum(w.tasks for w in others), sum(w.memory_bytes for w in others)
        shown = [*shown, WorkerFigures(OTHER, "", tasks, 0, memory)]
    yield gauge(
        "musterd_worker_memory_bytes",
        "Memory (PSS) of one worker and all it started; 0: not looked at yet",
        ("worker",),
        [((each.name,), each.memory_bytes) for each in shown],
    )
    yield counter(
        "musterd_worker_tasks",
        "Attempts that ended in this place, whatever worker was in it",
        ("worker",),
        [((each.name,), each.tasks) for each in shown],
    )


def _breakers(figures: FleetFigures) -> Iterator[Metric]:
    yield gauge(
        "musterd_breakers",
        "Circuit breakers of all targets, by state",
        ("state",),
        [((state,), count) for state, count in figures.breaker_states.items()],
    )
    yield gauge(
        "musterd_breaker_state",
        "1, with the state of a target's breaker; of those that matter most",
        ("target", "state"),
        [((each.target, each.state), 1) for each in figures.breakers],
    )
    yield gauge(
        "musterd_breaker_waiting_tasks",
        "Tasks that wait at a target's breaker, rate or bulkhead; of those that matter most",
        ("target",),
        [((each.target,), each.waiting) for each in figures.breakers],
    )
    yield counter(
        "musterd_breaker_failures",
        "Failures that said that a target is unwell; of those that matter most",
        ("target",),
        [((each.target,), each.failed) for each in figures.breakers],
    )
    yield counter(
        "musterd_breaker_transitions",
        "How often breakers came to a state",
        ("state",),
        [((s,), figures.breaker_transitions.get(s, 0)) for s in figures.breaker_states],
    )


def _schedules(figures: FleetFigures) -> Iterator[Metric]:
    labels = ("schedule",)
    schedules = figures.schedules
    yield counter(
        "musterd_schedule_runs",
        "Tasks made by a schedule",
        labels,
        [((each.name,), each.runs) for each in schedules],
    )
    yield counter(
        "musterd_schedule_skipped",
        "Due times that were let go",
        labels,
        [((each.name,), each.skipped) for each in schedules],
    )
    yield gauge(
        "musterd_schedule_next_run_timestamp_seconds",
        "When it is due; 0: paused",
        labels,
        [((each.name,), each.next_at) for each in schedules],
    )


def _daemon(figures: FleetFigures) -> Iterator[Metric]:
    yield number(
        "musterd_memory_used_ratio",
        "The share of memory in use, of whichever source is tightest",
        figures.memory_share,
    )
    yield gauge(
        "musterd_memory_threshold_ratio",
        "From which share on the fleet is made smaller",
        ("level",),
        [(("warning",), figures.memory_warning), (("critical",), figures.memory_critical)],
    )
    yield chosen(
        "musterd_memory_level", "How tight memory is", "level", LEVELS, figures.memory_level
    )
    yield durations(
        "musterd_store_commit_seconds",
        "How long transactions of the store took",
        (),
        [((), figures.commit_times)],
        COMMIT_BITS,
    )
    yield number("musterd_store_bytes", "Size of the store's files", figures.store_bytes)
    yield durations(
        "musterd_loop_turn_seconds",
        "How long turns of the supervisor's loop took",
        (),
        [((), figures.turn_times)],
        TURN_BITS,
    )
    yield total("musterd_loop_slow_turns", "Turns that took over 50 ms", figures.slow_turns)


# -- of handlers ------------------------------------------------------------------------------


def custom_metrics(pools: list[PoolFigures]) -> Iterator[Metric]:
    """`ctx.metrics` of all pools: musterd_custom_NAME, with the pool as a label.

    A name is a counter or a gauge, as it was first; the other kind of it is left out, and counted.
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
        family = Metric(name, "Of handlers (ctx.metrics)", kind)
        for key, value in found.items():
            family.add_sample(name if kinds[name] else f"{name}_total", dict(key), value)
        yield family
    yield counter(
        "musterd_custom_dropped",
        "Samples of handlers that had no place",
        POOL,
        [((name,), count) for name, count in dropped.items()],
    )


def custom_name(name: str) -> str:
    cleaned = _NOT_IN_NAMES.sub("_", name)
    return CUSTOM + (_ENDINGS.sub("", cleaned) or "unnamed")


def _labels(pool: str, each: MetricStatus) -> tuple[tuple[str, str], ...]:
    """Its own, by names that Prometheus takes; one that is taken already gets another."""
    labels = {"pool": pool}
    for name, value in each.labels.items():
        cleaned = _NOT_IN_NAMES.sub("_", name)
        if not cleaned or cleaned[0].isdigit() or cleaned.startswith("__") or cleaned in labels:
            cleaned = f"label_{cleaned.lstrip('_')}"
        labels[cleaned] = value
    return tuple(sorted(labels.items()))


# -- families ---------------------------------------------------------------------------------


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
