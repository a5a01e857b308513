"""Measure the round trip of one task, with nothing else under way."""

import time
from collections.abc import Callable
from pathlib import Path

import peers
from figures import SECONDS, Figure, Measure, percentile
from fleet import Fleet, fsync_seconds
from plan import ANSWER_SECONDS, ARGUMENT, WORKERS, Stage
from wire import wire

WARM_UP = 50
MESSAGE = bytes(200)  # as long as the message of a task


def measure(stage: Stage) -> Measure:
    plan = stage.plan
    systems: list[tuple[str, str, Callable[[int], list[float]]]] = [
        ("musterd.memory", "musterd, memory", lambda count: _musterd(stage.memory, count)),
        ("musterd.full", "musterd, durable", lambda count: _musterd(stage.durable, count)),
        ("executor", "ProcessPoolExecutor.submit().result()", _executor),
        ("pool", "Pool.apply", _pool),
        ("wire", "ZeroMQ, nothing behind it", lambda count: _wire(stage.folder, count)),
    ]
    figures: dict[str, Figure] = {}
    for key, label, _ in systems:
        for name in ("p50", "p99"):
            figures[f"{key}.{name}"] = Figure(
                key=f"roundtrip.{key}.{name}",
                label=f"{label}, {name}",
                unit=SECONDS,
                samples=[],
                baseline=f"roundtrip.executor.{name}",
            )
    beyond = figures["beyond"] = Figure(
        key="roundtrip.musterd.beyond",
        label="musterd, durable, p50, beyond two fdatasync",
        unit=SECONDS,
        samples=[],
    )
    for _ in range(plan.rounds):
        for key, _, run in systems:
            times = run(plan.round_trips)
            figures[f"{key}.p50"].samples.append(percentile(times, 0.50))
            figures[f"{key}.p99"].samples.append(percentile(times, 0.99))
            if key == "musterd.full":
                disk = fsync_seconds(stage.folder / "sync")
                beyond.samples.append(percentile(times, 0.50) - 2 * disk)
    return Measure(
        name="roundtrip",
        title=f"Round trip: one noop at a time, {plan.round_trips:,} per round",
        figures=list(figures.values()),
    )


def _timed(call: Callable[[], object], count: int) -> list[float]:
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def _musterd(fleet: Fleet, count: int) -> list[float]:
    arguments = {"data": ARGUMENT}
    with fleet.client() as client:
        return _timed(lambda: client.submit("bench.noop", arguments).result(ANSWER_SECONDS), count)


def _wire(folder: Path, count: int) -> list[float]:
    with wire(folder) as end:

        def there_and_back() -> None:
            end.send(MESSAGE)
            end.receive()

        return _timed(there_and_back, count)


def _executor(count: int) -> list[float]:
    with peers.make_executor(WORKERS) as executor:
        return _timed(lambda: executor.submit(peers.noop, ARGUMENT).result(ANSWER_SECONDS), count)


def _pool(count: int) -> list[float]:
    with peers.make_pool(WORKERS) as pool:
        return _timed(lambda: pool.apply(peers.noop, (ARGUMENT,)), count)
