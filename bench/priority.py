"""Measure how long an urgent task waits behind a long queue, until its handler starts.

The handler answers with the monotonic clock, which all processes share. The standard library's
pools have no priorities: the urgent task waits for everything in front of it.
"""

import statistics
import time

import peers
from figures import SECONDS, Figure, Measure
from fleet import Fleet
from plan import ANSWER_SECONDS, WORKERS, Plan, Stage

PROBE_GAP_SECONDS = 0.05


def measure(stage: Stage) -> Measure:
    plan = stage.plan
    ours, worst, pool, executor = (
        Figure(
            key=f"priority.{key}", label=label, unit=SECONDS, samples=[], baseline="priority.pool"
        )
        for key, label in (
            ("musterd", f"musterd, CRITICAL, median of {plan.probes}"),
            ("musterd.worst", f"musterd, CRITICAL, worst of {plan.probes}"),
            ("pool", "Pool.apply_async"),
            ("executor", "ProcessPoolExecutor.submit"),
        )
    )
    for _ in range(plan.priority_rounds):
        waits = _musterd(stage.durable, plan)
        ours.samples.append(statistics.median(waits))
        worst.samples.append(max(waits))
        pool.samples.append(_pool(plan))
        executor.samples.append(_executor(plan))
    return Measure(
        name="priority",
        title=f"Priority: wait behind {plan.backlog:,} LOW tasks of "
        f"{plan.backlog_seconds * 1000:g} ms, {WORKERS} workers",
        figures=[ours, worst, pool, executor],
    )


def _musterd(fleet: Fleet, plan: Plan) -> list[float]:
    # Enough tasks that the last probe still has the whole backlog in front of it.
    spare = int(plan.probes * PROBE_GAP_SECONDS / plan.backlog_seconds * WORKERS)
    low = ("bench.nap", {"seconds": plan.backlog_seconds}, {"priority": "low"})
    with fleet.client() as client:
        client.submit("bench.stamp").result(ANSWER_SECONDS)
        handles = client.submit_many([low] * (plan.backlog + spare))
        client.flush(ANSWER_SECONDS)
        waits = []
        for _ in range(plan.probes):
            time.sleep(PROBE_GAP_SECONDS)
            began_ns = time.monotonic_ns()
            started_ns = client.submit("bench.stamp", priority="critical").result(ANSWER_SECONDS)
            waits.append((started_ns - began_ns) / 1e9)
        for handle in handles:
            handle.result(ANSWER_SECONDS)
    return waits


def _pool(plan: Plan) -> float:
    with peers.make_pool(WORKERS) as pool:
        for _ in range(plan.backlog):
            pool.apply_async(peers.nap, (plan.backlog_seconds,))
        began_ns = time.monotonic_ns()
        started_ns = pool.apply_async(peers.stamp).get(ANSWER_SECONDS)
        return (started_ns - began_ns) / 1e9


def _executor(plan: Plan) -> float:
    with peers.make_executor(WORKERS) as executor:
        for _ in range(plan.backlog):
            executor.submit(peers.nap, plan.backlog_seconds)
        began_ns = time.monotonic_ns()
        started_ns = executor.submit(peers.stamp).result(ANSWER_SECONDS)
        return (started_ns - began_ns) / 1e9
