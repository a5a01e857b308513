"""Measure a cluster on PostgreSQL beside other queues; print figures and ratios.

python bench/cluster.py [--quick] [--json FILE] [--only NAME] [--long]

Everything is on this machine: a PostgreSQL of its own (Debian's, on loopback, fsync on), daemons as
nodes. `make bench-cluster` installs Procrastinate, Celery and Redis first.
"""

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import cluster_engine
import cluster_loss
import cluster_peers
from cluster_plan import FULL, QUICK, Plan, Stage
from command import benchmark, carry_out
from figures import MEGABYTE, MILLISECOND, Measure, Target, Verdict, judged
from fleet import disk_directory, filesystem_of, fsync_seconds
from msgspec import Struct
from nodes import Server
from rich.console import Console
from table import measured, shown

from musterd import __version__

LONG = "snapshot"
MEASURES: dict[str, Callable[[Stage], Measure]] = {
    "peers": cluster_peers.measure,
    "claims": cluster_engine.measure_claims,
    "loss": cluster_loss.measure,
    LONG: cluster_engine.measure_snapshot,
}
TARGETS = (
    Target(
        label="end to end through two nodes, submit_many",
        key="throughput.cluster",
        bound=5_000,
        at_least=True,
    ),
    Target(
        label="end to end through two nodes, to Procrastinate",
        key="throughput.cluster",
        relative_to="throughput.procrastinate",
        bound=10,
        at_least=True,
    ),
    Target(label="idle round trip, p50", key="roundtrip.p50.cluster", bound=8 * MILLISECOND),
    Target(label="idle round trip, p99", key="roundtrip.p99.cluster", bound=25 * MILLISECOND),
    *(
        Target(
            label=f"claim of {number} behind a long queue, to one of an empty queue",
            key=f"claims.queued.{number}",
            relative_to=f"claims.empty.{number}",
            bound=1.5,
        )
        for number in (1, cluster_engine.BATCH)
    ),
    Target(label="a killed node's tasks have run elsewhere", key="loss.gone", bound=12),
    Target(label="the same, it is restarted", key="loss.restarted", bound=2),
    Target(
        label="claim beside a held snapshot, p99", key="snapshot.claim.p99", bound=10 * MILLISECOND
    ),
    Target(label="live tables beside it", key="snapshot.live", bound=500 * MEGABYTE),
)


class Machine(Struct, kw_only=True):
    """The machine that was measured."""

    musterd: str
    python: str
    postgresql: str
    kernel: str
    processors: int
    filesystem: str
    fsync_seconds: float
    load: float  # average of the last minute, before the run


class Report(Struct, kw_only=True):
    machine: Machine
    plan: Plan
    measures: list[Measure]
    targets: list[Verdict]


def run(plan: Plan, names: list[str], console: Console) -> Report:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="musterd-bench-", dir=disk_directory()) as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL, another user, has a folder in it
        with Server(folder / "database") as server:
            machine = _machine(folder, server, load)
            _introduce(console, machine)
            stage = Stage(plan=plan, folder=folder, server=server)
            measures = measured(names, lambda name: MEASURES[name](stage), console)
    verdicts = judged(TARGETS, measures)
    return Report(machine=machine, plan=plan, measures=measures, targets=verdicts)


def _machine(folder: Path, server: Server, load: float) -> Machine:
    return Machine(
        musterd=__version__,
        python=platform.python_version(),
        postgresql=server.version,
        kernel=platform.release(),
        processors=len(os.sched_getaffinity(0)),
        filesystem=filesystem_of(folder),
        fsync_seconds=fsync_seconds(folder / "sync"),
        load=load,
    )


def _introduce(console: Console, machine: Machine) -> None:
    console.print(
        f"musterd {machine.musterd}, PostgreSQL {machine.postgresql}, Python {machine.python}, "
        f"{machine.processors} processors, load {machine.load:.1f}, on {machine.filesystem} "
        f"(fdatasync {shown(machine.fsync_seconds, 's')})"
    )


@benchmark(
    MEASURES,
    click.option("--long", is_flag=True, help=f"Measure {LONG!r} as well, which takes minutes."),
)
def main(quick: bool, path: Path | None, only: tuple[str, ...], long: bool) -> None:
    """Measure a cluster of two nodes side by side with Procrastinate and Celery."""
    plan = QUICK if quick else FULL
    names = list(only) or [name for name in MEASURES if name != LONG or long or quick]
    carry_out("cluster-", lambda console: run(plan, names, console), quick=quick, path=path)


if __name__ == "__main__":
    main()
