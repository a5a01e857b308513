"""Measure the time from `kill -9` of a worker to its replacement, and to the next result.

The next task is measured with a single worker, killed during a task, so that no other worker can
take the next one. The benchmark also notes whether the task of the killed worker still comes back:
a Pool loses it silently, a ProcessPoolExecutor breaks as a whole.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path

import peers
from figures import SECONDS, Figure, Measure
from fleet import BenchError, Fleet
from plan import ANSWER_SECONDS, ARGUMENT, Stage

HOLD_SECONDS = 600.0  # duration of the task whose worker is killed
LOST_SECONDS = 0.5  # after the next task; then a missing one counts as lost
LOOK_SECONDS = 0.001
READY = frozenset(("RUNNING", "BUSY"))

CAME_BACK, LOST, BROKEN = "came back", "lost", "failed: the pool broke and was made anew"


def measure(stage: Stage) -> Measure:
    replaced = Figure(
        key="recovery.musterd.replacement",
        label="musterd, parser worker: its replacement is ready",
        unit=SECONDS,
        samples=[],
    )
    systems: list[tuple[Figure, Callable[[Path], tuple[float, str]]]] = [
        (_next_task("musterd", "musterd"), lambda path: _musterd(stage.durable, path)),
        (_next_task("pool", "Pool"), _pool),
        (_next_task("executor", "ProcessPoolExecutor"), _executor),
    ]
    for number in range(stage.plan.rounds):
        replaced.samples.append(replacement(stage.durable, "parser/0"))
        for figure, run in systems:
            seconds, fate = run(stage.folder / f"{figure.key}.{number}")
            figure.samples.append(seconds)
            figure.note = f"killed task: {fate}"
    return Measure(
        name="recovery",
        title="Recovery: from kill -9 of a worker",
        figures=[replaced, *(figure for figure, _ in systems)],
    )


def _next_task(key: str, label: str) -> Figure:
    return Figure(
        key=f"recovery.{key}.next_task",
        label=f"{label}: the next task's result",
        unit=SECONDS,
        samples=[],
        baseline="recovery.pool.next_task",
    )


def replacement(fleet: Fleet, name: str) -> float:
    """Measure the time from the kill of this slot's worker until another one runs."""
    fleet.wait_until_idle(name.partition("/")[0])
    fleet.forgive(name)
    victim = fleet.worker(name).pid
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    deadline = began + ANSWER_SECONDS
    while time.perf_counter() < deadline:
        worker = fleet.worker(name)
        if worker.pid not in (0, victim) and worker.state in READY:
            return time.perf_counter() - began
        time.sleep(LOOK_SECONDS)
    raise BenchError(f"{name} was killed and not replaced: it is {worker.state} {worker.reason}")


def _musterd(fleet: Fleet, path: Path) -> tuple[float, str]:
    name = "solo/0"
    fleet.wait_until_idle("solo")
    fleet.forgive(name)
    victim = fleet.worker(name).pid
    with fleet.client() as client:
        held = client.submit("solo.hold", {"path": str(path), "seconds": HOLD_SECONDS})
        _wait_for(path)
        began = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        client.submit("solo.noop", {"data": ARGUMENT}).result(ANSWER_SECONDS)
        seconds = time.perf_counter() - began
        held.result(ANSWER_SECONDS)
    return seconds, CAME_BACK


def _pool(path: Path) -> tuple[float, str]:
    with peers.make_pool(1) as pool:
        held = pool.apply_async(peers.hold, (str(path), HOLD_SECONDS))
        _wait_for(path)
        victim = peers.worker_pids(pool)[0]
        began = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        pool.apply_async(peers.noop, (ARGUMENT,)).get(ANSWER_SECONDS)
        seconds = time.perf_counter() - began
        try:
            held.get(LOST_SECONDS)
        except multiprocessing.TimeoutError:
            return seconds, LOST
    return seconds, CAME_BACK


def _executor(path: Path) -> tuple[float, str]:
    executor = peers.make_executor(1)
    fate = CAME_BACK
    try:
        held = executor.submit(peers.hold, str(path), HOLD_SECONDS)
        _wait_for(path)
        victim = peers.worker_pids(executor)[0]
        began = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        try:
            executor.submit(peers.noop, ARGUMENT).result(ANSWER_SECONDS)
        except BrokenExecutor:
            executor.shutdown(wait=False)
            executor = peers.make_executor(1)
            executor.submit(peers.noop, ARGUMENT).result(ANSWER_SECONDS)
        seconds = time.perf_counter() - began
        if held.exception(ANSWER_SECONDS) is not None:
            fate = BROKEN
    finally:
        executor.shutdown()
    return seconds, fate


def _wait_for(path: Path) -> None:
    deadline = time.perf_counter() + ANSWER_SECONDS
    while not path.exists():
        if time.perf_counter() > deadline:
            raise BenchError(f"the task to be killed did not begin: {path} was not made")
        time.sleep(LOOK_SECONDS)
