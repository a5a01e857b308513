"""Measure what a fleet costs: thousands of restarts, hundreds of idle workers, its shutdown.

python bench/endurance.py [--quick] [--json FILE] [--only NAME]
"""

import contextlib
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import psutil
from command import benchmark, carry_out
from figures import (
    BYTES,
    COUNT,
    SECONDS,
    SHARE,
    TASKS_PER_SECOND,
    Figure,
    Measure,
    Target,
    Verdict,
    judged,
)
from fleet import BENCH_WORKERS, PARSER_WORKER, BenchError, Fleet, disk_directory
from msgspec import Struct
from plan import ANSWER_SECONDS, ARGUMENT
from processes import anonymous, processor_seconds
from recovery import READY, replacement
from rich.console import Console
from table import measured

from musterd import Client
from musterd.ipc.client.sync_submit import TaskHandle

LOOK_SECONDS = 0.005
LOOKS = 5
# Every restart should be like the first one. A standby process comes and goes, and would count as
# growth or as a leftover.
AT_ONCE = {
    "restart.reset": "1ms",
    "restart.base": "1ms",
    "restart.limit": 10_000,
    "spare": "false",
}
REST_SECONDS_MAX = 30.0  # until killed processes are gone
# Restarts between measurements of memory: a leak grows at each.
MARKS = 10
KEPT = 100_000  # results of the long run
UNDER_WAY_MAX, BATCH = 10_000, 1_000


class Plan(Struct, frozen=True, kw_only=True):
    tasks: int = 10_000_000
    restarts: int = 10_000
    restarting: int = 8  # workers that are killed repeatedly, all at once
    idle: int = 200  # workers
    idle_seconds: float = 30.0
    ending: int = 20  # workers
    rounds: int = 5


FULL = Plan()
QUICK = Plan(tasks=2_000, restarts=40, restarting=4, idle=4, idle_seconds=0.5, ending=4, rounds=1)

TARGETS = (
    Target(
        label="memory of the supervisor, second half of the tasks to the first",
        key="tasks.memory_late",
        relative_to="tasks.memory_early",
        bound=1.05,
    ),
    Target(label="file descriptors gained over the tasks", key="tasks.descriptors_gained", bound=0),
    Target(
        label="file descriptors gained over the restarts",
        key="restarts.descriptors_gained",
        bound=0,
    ),
    Target(
        label="memory of supervisor and fork server, second half of the restarts to the first",
        key="restarts.memory_late",
        relative_to="restarts.memory_early",
        bound=1.05,
    ),
    Target(label="processes left over", key="restarts.left_over", bound=0),
    Target(
        label="idle workers cost the supervisor, of one processor",
        key="idle.supervisor",
        bound=0.02,
    ),
    Target(label="shutdown of idle workers", key="shutdown.seconds", bound=1.0),
    Target(
        label="a killed parser worker's replacement is ready",
        key="replacement.seconds",
        bound=0.1,
    ),
)


# -- tasks ------------------------------------------------------------------------------------


def measure_tasks(plan: Plan, folder: Path) -> Measure:
    """Run all tasks through one daemon and one client, which forgets finished ones."""
    fleet = Fleet(folder, "full", {"bench": (BENCH_WORKERS, 2)})
    fleet.set("store.keep_results_max", KEPT)  # the store reaches its size in the first tenth
    with fleet, fleet.client() as client:
        supervisor = psutil.Process(fleet.pid)
        descriptors, weights = [], []
        began = time.perf_counter()
        for mark in range(1, MARKS + 1):
            _run_tasks(client, plan.tasks * mark // MARKS - plan.tasks * (mark - 1) // MARKS)
            descriptors.append(_descriptors(supervisor))
            weights.append(anonymous(supervisor))
        seconds = time.perf_counter() - began
    early, late = weights[MARKS // 5 : MARKS // 2], weights[MARKS // 2 :]
    gained = max(0, descriptors[-1] - descriptors[0])
    note = f"{plan.tasks:,} in {seconds:.0f} s"
    figures = [
        _figure("tasks.rate", "tasks", TASKS_PER_SECOND, [plan.tasks / seconds], note),
        _figure("tasks.descriptors_gained", "file descriptors gained", COUNT, [gained]),
        _figure("tasks.memory", "memory of the supervisor", BYTES, weights),
        _figure("tasks.memory_early", "first half (from the third tenth on)", BYTES, early),
        _figure("tasks.memory_late", "second half", BYTES, late),
    ]
    return Measure(name="tasks", title="Tasks: durable, at each tenth", figures=figures)


def _run_tasks(client: Client, count: int) -> None:
    """Run this many tasks, a bounded number of them at a time."""
    under_way: deque[TaskHandle] = deque()
    while count or under_way:
        if count and len(under_way) < UNDER_WAY_MAX:
            batch = min(BATCH, count)
            under_way += client.submit_many([("bench.noop", {"data": ARGUMENT})] * batch)
            count -= batch
        else:
            under_way.popleft().result(ANSWER_SECONDS)


# -- restarts ---------------------------------------------------------------------------------


def measure_restarts(plan: Plan, folder: Path) -> Measure:
    with Fleet(folder, "full", {"bench": (BENCH_WORKERS, plan.restarting)}, AT_ONCE) as fleet:
        supervisor = psutil.Process(fleet.pid)
        before = len(supervisor.children(recursive=True))
        descriptors, weights, fork_servers = [], [], []
        seconds = 0.0
        for mark in range(1, MARKS + 1):
            began = time.perf_counter()
            _kill_until(fleet, plan.restarts * mark // MARKS)
            seconds += time.perf_counter() - began
            _at_rest(supervisor, before)  # those that are dying hold descriptors
            descriptors.append(_descriptors(supervisor))
            weights.append(anonymous(supervisor))
            fork_servers.append(sum(anonymous(each) for each in _fork_servers(supervisor)))
        pool = fleet.status().pools[0]
        after = _at_rest(supervisor, before)
    note = f"{pool.restarts} restarts of {plan.restarting} workers in {seconds:.0f} s"
    gained = max(0, descriptors[-1] - descriptors[0])
    both = [own + other for own, other in zip(weights, fork_servers, strict=True)]
    early, late = both[MARKS // 5 : MARKS // 2], both[MARKS // 2 :]
    figures = [
        _figure("restarts.seconds", "one restart", SECONDS, [seconds / pool.restarts], note),
        _figure("restarts.descriptors", "file descriptors in use", COUNT, descriptors),
        _figure("restarts.descriptors_gained", "gained since the first tenth", COUNT, [gained]),
        _figure("restarts.memory", "memory of the supervisor", BYTES, weights),
        _figure("restarts.memory_fork_server", "memory of the fork server", BYTES, fork_servers),
        _figure(
            "restarts.memory_early", "both, first half (from the third tenth on)", BYTES, early
        ),
        _figure("restarts.memory_late", "both, second half", BYTES, late),
        _figure("restarts.left_over", "processes left over", COUNT, [max(0, after - before)]),
    ]
    return Measure(name="restarts", title="Restarts: kill -9, at each tenth", figures=figures)


def _kill_until(fleet: Fleet, restarts: int) -> None:
    """Kill every worker as soon as it is up, until this many restarts; leave all of them up."""
    killed: dict[str, int] = {}  # the last pid killed, by slot; pids may be reused
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        pool = fleet.status().pools[0]
        up = {
            each.name: each.pid
            for each in pool.workers
            if each.state in READY and each.pid not in (0, killed.get(each.name))
        }
        if pool.restarts >= restarts:
            if len(up) == len(pool.workers):
                return
        elif up:
            deadline = time.monotonic() + ANSWER_SECONDS
            for pid in up.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= up
        time.sleep(LOOK_SECONDS)
    states = ", ".join(f"{each.name} {each.state} {each.reason}" for each in pool.workers)
    raise BenchError(f"{pool.restarts} restarts of {restarts}, then nothing more: {states}")


def _at_rest(supervisor: psutil.Process, expected: int) -> int:
    """Return the number of processes when it is as expected, or after a while."""
    deadline = time.monotonic() + REST_SECONDS_MAX
    while (count := len(supervisor.children(recursive=True))) > expected:
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
    return count


def _fork_servers(supervisor: psutil.Process) -> list[psutil.Process]:
    found = []
    for each in supervisor.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # the init of a killed worker
            if "fork server" in " ".join(each.cmdline()):
                found.append(each)
    return found


def _descriptors(supervisor: psutil.Process) -> float:
    """Return descriptors of the lasting processes, without those open for a moment only."""
    looks = []
    for _ in range(LOOKS):
        looks.append(sum(each.num_fds() for each in (supervisor, *_fork_servers(supervisor))))
        time.sleep(LOOK_SECONDS)
    return float(min(looks))


# -- idle workers, the end, a replacement -----------------------------------------------------


def measure_idle(plan: Plan, folder: Path) -> Measure:
    began = time.perf_counter()
    with Fleet(folder, "full", {"bench": (BENCH_WORKERS, plan.idle)}) as fleet:
        note = f"{plan.idle} workers were up after {time.perf_counter() - began:.1f} s"
        supervisor = psutil.Process(fleet.pid)
        workers = [psutil.Process(each.pid) for each in fleet.status().pools[0].workers]
        time.sleep(min(5.0, plan.idle_seconds))  # work left over from the start
        watched = [supervisor, *workers]
        before = [processor_seconds(each) for each in watched]
        slept = time.perf_counter()
        time.sleep(plan.idle_seconds)
        slept = time.perf_counter() - slept
        spent = [processor_seconds(each) - had for each, had in zip(watched, before, strict=True)]
    own, *others = [each / slept for each in spent]
    figures = [
        _figure("idle.supervisor", "supervisor, of one processor", SHARE, [own], note),
        _figure("idle.worker", "a worker, of one processor", SHARE, [sum(others) / len(others)]),
    ]
    return Measure(name="idle", title=f"Idle: {plan.idle} workers", figures=figures)


def measure_shutdown(plan: Plan, folder: Path) -> Measure:
    samples = []
    for number in range(plan.rounds):
        pools = {"bench": (BENCH_WORKERS, plan.ending)}
        with Fleet(folder.with_name(f"{folder.name}{number}"), "full", pools) as fleet:
            began = time.perf_counter()
            fleet.stop()
            samples.append(time.perf_counter() - began)
    figure = _figure("shutdown.seconds", "from SIGTERM to the exit", SECONDS, samples)
    return Measure(name="shutdown", title=f"Shutdown: {plan.ending} workers", figures=[figure])


def measure_replacement(plan: Plan, folder: Path) -> Measure:
    with Fleet(folder, "full", {"parser": (PARSER_WORKER, 2)}) as fleet:
        samples = [replacement(fleet, "parser/0") for _ in range(2 * plan.rounds)]
    figure = _figure("replacement.seconds", "from kill -9 to RUNNING", SECONDS, samples)
    return Measure(
        name="replacement", title="Replacement: a killed parser worker", figures=[figure]
    )


def _figure(key: str, label: str, unit: str, samples: list[float], note: str = "") -> Figure:
    return Figure(key=key, label=label, unit=unit, samples=samples, note=note)


MEASURES: dict[str, Callable[[Plan, Path], Measure]] = {
    "replacement": measure_replacement,
    "tasks": measure_tasks,
    "shutdown": measure_shutdown,
    "idle": measure_idle,
    "restarts": measure_restarts,
}


class Report(Struct, kw_only=True):
    load: float  # average of the last minute, before the run
    processors: int
    plan: Plan
    measures: list[Measure]
    targets: list[Verdict]


def run(plan: Plan, names: list[str], console: Console) -> Report:
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    console.print(f"{processors} processors, load {load:.1f}")
    with tempfile.TemporaryDirectory(prefix="musterd-bench-", dir=disk_directory()) as place:
        folder = Path(place)
        measures = measured(names, lambda name: MEASURES[name](plan, folder / name), console)
    verdicts = judged(TARGETS, measures)
    return Report(load=load, processors=processors, plan=plan, measures=measures, targets=verdicts)


@benchmark(MEASURES)
def main(quick: bool, path: Path | None, only: tuple[str, ...]) -> None:
    """Measure what a fleet costs when it is idle, restarts and ends."""
    plan, names = QUICK if quick else FULL, list(only or MEASURES)
    carry_out("fleet-", lambda console: run(plan, names, console), quick=quick, path=path)


if __name__ == "__main__":
    main()
