"""Whether a long queue is slower than a short one, and what it costs the supervisor in memory.

The pool is paused and filled to a depth; the tasks that are timed stand in the middle of it, behind
what is kept in memory. Then it works, and they say when they began: the rate between the first and
the last of them is that of the dispatch, with the queue almost as deep as before.
"""

import psutil
from figures import BYTES, TASKS_PER_SECOND, Figure, Measure
from fleet import BENCH_WORKERS, BenchError, Fleet
from memory import pss
from msgspec import Struct
from plan import ANSWER_SECONDS, ARGUMENT, WORKERS, Stage
from processes import processor_seconds

from musterd.supervisor import rpc

BATCH = 5_000
CLIENT_TASKS = 50_000  # then another client: one that waits for a million results needs memory too
BEHIND = 40_000  # what is queued before the timed ones: more than is kept in memory
TIMED_MAX = 10_000
POOLS = {"bench": (BENCH_WORKERS, WORKERS)}


def measure(stage: Stage) -> Measure:
    depths = stage.plan.depths
    base = _key("rate", depths[0])
    rates = {
        depth: Figure(
            key=_key("rate", depth),
            label=f"{depth:,} queued",
            unit=TASKS_PER_SECOND,
            samples=[],
            baseline=base,
        )
        for depth in depths
    }
    weights = {
        depth: Figure(
            key=_key("supervisor", depth),
            label=f"supervisor, PSS, {depth:,} queued",
            unit=BYTES,
            samples=[],
        )
        for depth in depths
    }
    for number in range(stage.plan.backlog_rounds):
        for depth in depths:
            with Fleet(stage.folder / f"deep-{number}-{depth}", "full", POOLS) as fleet:
                drained = drain(fleet, depth)
            rates[depth].samples.append(drained.rate)
            weights[depth].samples.append(drained.weight)
    return Measure(
        name="backlog",
        title=f"Backlog: durable tasks per second out of a deep queue, {WORKERS} workers",
        figures=[*rates.values(), *weights.values()],
    )


def _key(what: str, depth: int) -> str:
    return f"backlog.{what}.{depth}"


class Drained(Struct, frozen=True):
    rate: float  # tasks per second
    weight: float  # of the supervisor when its queue is full, in bytes
    work: float  # processor seconds of the supervisor for a task, from the first one on


def drain(fleet: Fleet, depth: int) -> Drained:
    """Fill the queue, then work until the timed ones are done."""
    timed = min(depth, TIMED_MAX)
    before = min(BEHIND, (depth - timed) // 2)
    with fleet.connection() as connection:
        connection.request(rpc.Pause(names=["bench"]))
    _fill(fleet, before)
    with fleet.client() as client:
        handles = client.submit_many([("bench.stamp", {})] * timed)
        client.flush(ANSWER_SECONDS)
        _fill(fleet, depth - before - timed)
        pool = next(each for each in fleet.status().pools if each.name == "bench")
        queued = sum(pool.queued.values())
        if queued != depth:
            raise BenchError(f"{queued} of {depth} tasks are queued")
        weight = pss(fleet.pid)
        supervisor = psutil.Process(fleet.pid)
        spent = processor_seconds(supervisor)
        with fleet.connection() as connection:
            connection.request(rpc.Resume(names=["bench"]))
        stamps = sorted(handle.result(ANSWER_SECONDS) for handle in handles)
        work = (processor_seconds(supervisor) - spent) / (before + timed)
    rate = (len(stamps) - 1) / ((stamps[-1] - stamps[0]) / 1e9)
    return Drained(rate, weight, work)


def _fill(fleet: Fleet, count: int) -> None:
    for start in range(0, count, CLIENT_TASKS):
        with fleet.client() as client:
            left = min(CLIENT_TASKS, count - start)
            while left:
                size = min(BATCH, left)
                client.submit_many([("bench.noop", {"data": ARGUMENT})] * size)
                client.flush(ANSWER_SECONDS)
                left -= size
