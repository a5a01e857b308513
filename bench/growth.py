"""Measure how throughput, and the supervisor's work per task, change with size.

python bench/growth.py [--quick] [--rounds N] [--only AXIS] [--json FILE] [--svg FILE]

One thing grows at a time: queued tasks, workers, sites, clients. Each point is a separate daemon;
the points of an axis take turns, and the median of the rounds counts.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import backlog
import click
import curves
import msgspec
import psutil
from command import benchmark, carry_out
from figures import SECONDS, TASKS_PER_SECOND, Figure, Measure
from fleet import BENCH_WORKERS, Fleet, disk_directory
from msgspec import Struct
from plan import ANSWER_SECONDS, ARGUMENT, WORKERS, Standing
from processes import processor_seconds
from rich.console import Console
from table import measured

from musterd import Client

BATCH = 1_000
WARM_UP = 500  # tasks before the clock starts


class Plan(Struct, frozen=True, kw_only=True):
    rounds: int = 3
    tasks: int = 30_000  # at each point
    queued: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    standing: Standing = Standing()
    workers: tuple[int, ...] = (2, 8, 32, 128)
    sites: tuple[int, ...] = (1, 100, 10_000)
    clients: tuple[int, ...] = (1, 10, 100)


FULL = Plan()
QUICK = Plan(
    rounds=1,
    tasks=400,
    queued=(100, 1_000),
    standing=Standing(200, 400),
    workers=(1, 2),
    sites=(1, 50),
    clients=(1, 3),
)


class Point(Struct, frozen=True):
    rate: float  # tasks per second, results in hand
    work: float  # processor seconds of the supervisor for a task, all its threads


# -- one point --------------------------------------------------------------------------------


def _queued(folder: Path, plan: Plan, depth: int) -> Point:
    with Fleet(folder, "full", {"bench": (BENCH_WORKERS, WORKERS)}) as fleet:
        held = backlog.hold(fleet, depth, plan.standing)
    return Point(held.rate, held.work)


def _workers(folder: Path, plan: Plan, count: int) -> Point:
    with Fleet(folder, "full", {"bench": (BENCH_WORKERS, count)}) as fleet:
        return _run(fleet, plan.tasks)


def _sites(folder: Path, plan: Plan, count: int) -> Point:
    with Fleet(folder, "full", {"bench": (BENCH_WORKERS, WORKERS)}) as fleet:
        return _run(fleet, plan.tasks, sites=count)


def _clients(folder: Path, plan: Plan, count: int) -> Point:
    with Fleet(folder, "full", {"bench": (BENCH_WORKERS, WORKERS)}) as fleet:
        return _run(fleet, plan.tasks, clients=count)


def _run(fleet: Fleet, count: int, *, sites: int = 0, clients: int = 1) -> Point:
    """Run this many tasks from all clients, evenly spread over the sites."""
    supervisor = psutil.Process(fleet.pid)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(fleet.client()) for _ in range(clients)]
        _submit_and_wait(crowd, WARM_UP, sites)
        spent, began = processor_seconds(supervisor), time.perf_counter()
        _submit_and_wait(crowd, count, sites)
        seconds = time.perf_counter() - began
        return Point(count / seconds, (processor_seconds(supervisor) - spent) / count)


def _submit_and_wait(crowd: list[Client], count: int, sites: int) -> None:
    batch = min(BATCH, -(-count // len(crowd)))
    handles = []
    for turn, start in enumerate(range(0, count, batch)):
        numbers = range(start, min(start + batch, count))
        handles += crowd[turn % len(crowd)].submit_many([_request(n, sites) for n in numbers])
    for handle in handles:
        handle.result(ANSWER_SECONDS)


def _request(number: int, sites: int) -> tuple[str, dict[str, str], dict[str, str]]:
    target = {"target": f"site-{number % sites}.example"} if sites else {}
    return "bench.noop", {"data": ARGUMENT}, target


class Axis(Struct, frozen=True):
    title: str
    point: Callable[[Path, Plan, int], Point]
    counts: Callable[[Plan], tuple[int, ...]]


AXES = {
    "queued": Axis("tasks queued", _queued, lambda plan: plan.queued),
    "workers": Axis("workers", _workers, lambda plan: plan.workers),
    "sites": Axis("sites", _sites, lambda plan: plan.sites),
    "clients": Axis("clients", _clients, lambda plan: plan.clients),
}


# -- all of them ------------------------------------------------------------------------------


def measure(name: str, plan: Plan, folder: Path) -> Measure:
    axis = AXES[name]
    counts = axis.counts(plan)
    rates = _figures(f"growth.{name}.rate", counts, f"{name}", TASKS_PER_SECOND)
    works = _figures(f"growth.{name}.work", counts, f"{name}: supervisor, per task", SECONDS)
    for number in range(plan.rounds):
        for count, rate, work in zip(counts, rates, works, strict=True):
            point = axis.point(folder / f"{name}-{number}-{count}", plan, count)
            rate.samples.append(point.rate)
            work.samples.append(point.work)
    return Measure(name=name, title=f"More {axis.title}", figures=[*rates, *works])


def _figures(key: str, counts: tuple[int, ...], label: str, unit: str) -> list[Figure]:
    return [
        Figure(
            key=f"{key}.{count}",
            label=f"{count:,} {label}",
            unit=unit,
            samples=[],
            baseline=f"{key}.{counts[0]}",
        )
        for count in counts
    ]


class Report(Struct, kw_only=True):
    load: float  # average of the last minute, before the run
    processors: int
    plan: Plan
    measures: list[Measure]


def run(plan: Plan, names: list[str], console: Console) -> Report:
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    console.print(f"{processors} processors, load {load:.1f}")
    with tempfile.TemporaryDirectory(prefix="musterd-bench-", dir=disk_directory()) as place:
        measures = measured(names, lambda name: measure(name, plan, Path(place)), console)
    return Report(load=load, processors=processors, plan=plan, measures=measures)


@benchmark(
    AXES,
    click.option("--svg", type=click.Path(path_type=Path), help="File for the curves."),
    click.option("--rounds", type=click.IntRange(1), help="How often each point is measured."),
)
def main(
    quick: bool, path: Path | None, svg: Path | None, only: tuple[str, ...], rounds: int | None
) -> None:
    """Measure how throughput and the supervisor's work change with size."""
    plan, names = QUICK if quick else FULL, list(only or AXES)
    if rounds is not None:
        plan = msgspec.structs.replace(plan, rounds=rounds)
    report = carry_out("growth-", lambda console: run(plan, names, console), quick=quick, path=path)
    if svg is not None:
        svg.write_text(curves.draw(report.measures))
        click.echo(f"drawn to {svg}")


if __name__ == "__main__":
    main()
