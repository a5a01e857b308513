"""Measure tasks per second, from the first submit to the last result."""

import time
from collections.abc import Callable

import peers
from figures import TASKS_PER_SECOND, Figure, Measure
from fleet import BenchError, Fleet
from plan import ANSWER_SECONDS, ARGUMENT, WORKERS, Stage

BATCH = 1000
BASELINE = "throughput.pool.imap_unordered"
WARM_UP = 200  # tasks before the clock starts: workers are up, run times are known

Seconds = float


def measure(stage: Stage) -> Measure:
    plan, durable = stage.plan, stage.durable
    systems: list[tuple[str, str, int, Callable[[int], Seconds]]] = [
        (
            "musterd.submit_many",
            f"musterd, durable, submit_many of {BATCH}",
            plan.tasks,
            lambda count: _musterd_many(durable, count),
        ),
        (
            "musterd.submit",
            "musterd, durable, single submit, pipelined",
            plan.tasks,
            lambda count: _musterd_single(durable, count),
        ),
        (
            "pool.imap_unordered",
            "Pool.imap_unordered(chunksize=1)",
            plan.tasks,
            _pool_imap_unordered,
        ),
        ("pool.apply_async", "Pool.apply_async", plan.tasks, _pool_apply_async),
        (
            "executor.submit",
            "ProcessPoolExecutor.submit",
            plan.executor_tasks,
            _executor_submit,
        ),
    ]
    figures = [
        Figure(
            key=f"throughput.{key}",
            label=label,
            unit=TASKS_PER_SECOND,
            samples=[],
            baseline=BASELINE,
        )
        for key, label, _, _ in systems
    ]
    for _ in range(plan.rounds):
        for figure, (_, _, count, run) in zip(figures, systems, strict=True):
            figure.samples.append(count / run(count))
    return Measure(
        name="throughput",
        title=f"Throughput: noop with {len(ARGUMENT)} bytes, {WORKERS} workers, "
        f"{plan.tasks:,} tasks per round",
        figures=figures,
    )


def _musterd_many(fleet: Fleet, count: int) -> Seconds:
    request = ("bench.noop", {"data": ARGUMENT})
    with fleet.client() as client:
        for handle in client.submit_many([request] * WARM_UP):
            handle.result(ANSWER_SECONDS)
        began = time.perf_counter()
        handles = []
        for start in range(0, count, BATCH):
            handles += client.submit_many([request] * min(BATCH, count - start))
        for handle in handles:
            handle.result(ANSWER_SECONDS)
        return _checked(began, len(handles), count)


def _musterd_single(fleet: Fleet, count: int) -> Seconds:
    arguments = {"data": ARGUMENT}
    with fleet.client() as client:
        for handle in [client.submit("bench.noop", arguments) for _ in range(WARM_UP)]:
            handle.result(ANSWER_SECONDS)
        began = time.perf_counter()
        handles = [client.submit("bench.noop", arguments) for _ in range(count)]
        for handle in handles:
            handle.result(ANSWER_SECONDS)
        return _checked(began, len(handles), count)


def _pool_imap_unordered(count: int) -> Seconds:
    with peers.make_pool(WORKERS) as pool:
        pool.map(peers.noop, [ARGUMENT] * WARM_UP, chunksize=1)
        began = time.perf_counter()
        results = sum(1 for _ in pool.imap_unordered(peers.noop, [ARGUMENT] * count, chunksize=1))
        return _checked(began, results, count)


def _pool_apply_async(count: int) -> Seconds:
    with peers.make_pool(WORKERS) as pool:
        pool.map(peers.noop, [ARGUMENT] * WARM_UP, chunksize=1)
        began = time.perf_counter()
        pending = [pool.apply_async(peers.noop, (ARGUMENT,)) for _ in range(count)]
        for result in pending:
            result.get(ANSWER_SECONDS)
        return _checked(began, len(pending), count)


def _executor_submit(count: int) -> Seconds:
    with peers.make_executor(WORKERS) as executor:
        for future in [executor.submit(peers.noop, ARGUMENT) for _ in range(WARM_UP)]:
            future.result(ANSWER_SECONDS)
        began = time.perf_counter()
        futures = [executor.submit(peers.noop, ARGUMENT) for _ in range(count)]
        for future in futures:
            future.result(ANSWER_SECONDS)
        return _checked(began, len(futures), count)


def _checked(began: float, results: int, count: int) -> Seconds:
    took = time.perf_counter() - began
    if results != count:
        raise BenchError(f"{results} of {count} tasks came back")
    return took
