"""Measure musterd beside other queues: the same tasks, one machine, two workers each.

python bench/queues.py [--quick] [--only KEYS] [--measure NAMES] [--json FILE] [--plot FILE]
python bench/queues.py --from FILE [--plot FILE] [--document FILE]

The peers are in bench/versus, one short file each, with their settings and the reasons;
`make bench-peers` installs them, and Redis, first.
"""

import os
import platform
import signal
import sys
import tempfile
import threading
from pathlib import Path

import click
import msgspec
from command import default_path, save
from fleet import BenchError, disk_directory, filesystem_of, fsync_seconds
from rich.console import Console
from versus import redis_server, stages
from versus.plot import draw
from versus.report import check_place, filled, introduction, print_report
from versus.results import QUICK, Machine, Plan, Report, blank
from versus.systems import KEYS, MEASURES, SYSTEMS, System

from musterd import MusterdError, __version__

WIDTH = 150  # of the tables in a file


def run(
    plan: Plan, systems: list[System], measures: list[str], fsync: str, console: Console
) -> Report:
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="musterd-queues-", dir=disk_directory()) as name,
        console.status("starting ...") as status,
    ):
        place = Path(name)
        machine = _machine(place, load, fsync if any(each.redis for each in systems) else "")
        console.print(introduction(machine), highlight=False)
        outcomes = [blank(system, fsync) for system in systems]
        stage = stages.Stage(
            plan=plan,
            place=place,
            fsync=fsync,
            measures=frozenset(measures),
            say=status.update,
            tell=lambda text: console.print(text, style="red", markup=False),
            over=threading.Event(),
        )
        stages.run(stage, list(zip(systems, outcomes, strict=True)))
    return Report(machine=machine, plan=plan, outcomes=outcomes)


def _machine(place: Path, load: float, fsync: str) -> Machine:
    return Machine(
        musterd=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        processors=len(os.sched_getaffinity(0)),
        filesystem=filesystem_of(place),
        fsync_seconds=fsync_seconds(place / "sync"),
        load=load,
        redis=f"{redis_server.version()}, appendfsync {fsync}" if fsync else "",
    )


def _some(known: tuple[str, ...], kind: str) -> "type[click.ParamType]":
    """Make a click type: a comma-separated list of known words."""

    class Some(click.ParamType):
        name = kind

        def convert(
            self, value: object, param: click.Parameter | None, ctx: click.Context | None
        ) -> list[str]:
            words = value.split(",") if isinstance(value, str) else list(known)
            for word in words:
                if word not in known:
                    self.fail(f"{word!r} is none of {', '.join(known)}", param, ctx)
            return words

    return Some


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt  # stops everything that was started


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Show that it works, without useful figures.")
@click.option("--only", type=_some(KEYS, "systems")(), help=f"Some of {', '.join(KEYS)}.")
@click.option("--measure", type=_some(MEASURES, "names")(), help=f"Some of {', '.join(MEASURES)}.")
@click.option("--rounds", type=click.IntRange(1), help="Number of rounds.")
@click.option(
    "--fsync",
    type=click.Choice(redis_server.FSYNCS),
    default=redis_server.FSYNCS[0],
    help="How often Redis syncs its file.",
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="File for figures.")
@click.option("--plot", type=click.Path(path_type=Path), help="File for the picture.")
@click.option(
    "--document",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Markdown page for the tables, between its marks.",
)
@click.option(
    "--from",
    "earlier",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Show the figures of an earlier run instead of measuring.",
)
def main(
    *,
    quick: bool,
    only: list[str] | None,
    measure: list[str] | None,
    rounds: int | None,
    fsync: str,
    path: Path | None,
    plot: Path | None,
    document: Path | None,
    earlier: Path | None,
) -> None:
    """Measure musterd beside Celery, Dramatiq, RQ, Huey, arq, Parsl and the standard library."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if document is not None:
            check_place(document.read_text())
        if earlier is not None:
            report = msgspec.json.decode(earlier.read_bytes(), type=Report)
        else:
            plan = QUICK if quick else Plan()
            plan = msgspec.structs.replace(plan, rounds=rounds or plan.rounds)
            systems = [system for system in SYSTEMS if only is None or system.key in only]
            report = run(plan, systems, measure or list(MEASURES), fsync, console)
            save(report, path or default_path("queues-"), console)
    except (BenchError, MusterdError, TimeoutError) as error:
        console.print(f"the benchmark failed: {error}", style="bold red", markup=False)
        sys.exit(1)
    print_report(console, report)
    if quick:
        console.print("quick run: it works; the figures mean nothing")
    if plot is not None:
        _write(plot, draw(report).encode())
    if document is not None:
        _write(document, filled(document.read_text(), report).encode())
    problems = [each for outcome in report.outcomes for each in outcome.problems]
    if problems:
        console.print("\n".join(["not everything was measured:", *problems]), markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
