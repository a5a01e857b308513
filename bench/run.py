"""Measure musterd side by side with Python's built-in pools; print figures and ratios.

python bench/run.py [--quick] [--json FILE] [--only NAME]
"""

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import backlog
import memory
import priority
import recovery
import roundtrip
import throughput
from command import benchmark, carry_out
from figures import TARGETS, Measure, Verdict, judged
from fleet import Fleet, disk_directory, filesystem_of, fsync_seconds
from msgspec import Struct
from plan import FULL, POOLS, QUICK, Plan, Stage
from rich.console import Console
from table import measured, shown

from musterd import __version__

MEASURES: dict[str, Callable[[Stage], Measure]] = {
    "throughput": throughput.measure,
    "roundtrip": roundtrip.measure,
    "recovery": recovery.measure,
    "priority": priority.measure,
    "memory": memory.measure,
    "backlog": backlog.measure,
}
EXPECTED = "event=worker.crashed"
LINES_SHOWN = 20  # lines of the daemon's log


class Machine(Struct, kw_only=True):
    """The machine that was measured."""

    musterd: str
    python: str
    kernel: str
    processors: int
    filesystem: str
    fsync_seconds: float
    load: float  # average of the last minute, before the run
    containment: str


class Report(Struct, kw_only=True):
    machine: Machine
    plan: Plan
    measures: list[Measure]
    targets: list[Verdict]


def run(plan: Plan, names: list[str], console: Console) -> Report:
    load = os.getloadavg()[0]
    place = disk_directory()
    with tempfile.TemporaryDirectory(prefix="musterd-bench-", dir=place) as name:
        folder = Path(name)
        with (
            Fleet(folder / "durable", "full", POOLS) as durable,
            Fleet(folder / "memory", "memory", POOLS) as in_memory,
        ):
            machine = _machine(folder, durable, load)
            _introduce(console, machine)
            stage = Stage(plan=plan, folder=folder, durable=durable, memory=in_memory)
            measures = measured(names, lambda name: MEASURES[name](stage), console)
            for fleet in (durable, in_memory):
                _show_log(console, fleet)
    verdicts = judged(TARGETS, measures)
    return Report(machine=machine, plan=plan, measures=measures, targets=verdicts)


def _show_log(console: Console, fleet: Fleet) -> None:
    """Print what the daemon logged, except for workers that the benchmark killed."""
    lines = [line for line in fleet.log().splitlines() if EXPECTED not in line]
    if lines:
        console.print(f"[yellow]the daemon in {fleet.folder.name} said:[/]")
        console.print("\n".join(lines[-LINES_SHOWN:]), markup=False)


def _machine(folder: Path, fleet: Fleet, load: float) -> Machine:
    return Machine(
        musterd=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        processors=len(os.sched_getaffinity(0)),
        filesystem=filesystem_of(folder),
        fsync_seconds=fsync_seconds(folder / "sync"),
        load=load,
        containment=fleet.status().containment,
    )


def _introduce(console: Console, machine: Machine) -> None:
    console.print(
        f"musterd {machine.musterd}, Python {machine.python}, {machine.processors} processors, "
        f"load {machine.load:.1f}, containment {machine.containment}, store on "
        f"{machine.filesystem} (fdatasync {shown(machine.fsync_seconds, 's')})"
    )


@benchmark(MEASURES)
def main(quick: bool, path: Path | None, only: tuple[str, ...]) -> None:
    """Measure musterd side by side with multiprocessing.Pool and ProcessPoolExecutor."""
    plan, names = QUICK if quick else FULL, list(only or MEASURES)
    carry_out("", lambda console: run(plan, names, console), quick=quick, path=path)


if __name__ == "__main__":
    main()
