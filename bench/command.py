"""The command line of benchmarks: options, errors, verdicts, and the file of figures."""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from figures import Verdict
from fleet import BenchError
from msgspec import Struct
from rich.console import Console
from table import print_verdicts

from musterd import MusterdError

RESULTS = Path(__file__).resolve().parent / "results"

Report = TypeVar("Report", bound=Struct)
Function = Callable[..., Any]


def benchmark(names: Iterable[str], *options: Callable[[Function], Function]) -> Any:
    """Make a command with --quick, --json, --only and further options."""
    shared = (
        click.option("--quick", is_flag=True, help="Show that it works, without useful figures."),
        click.option("--json", "path", type=click.Path(path_type=Path), help="File for figures."),
        click.option("--only", type=click.Choice(list(names)), multiple=True, help="Measure this."),
    )

    def decorate(function: Function) -> click.Command:
        for option in reversed((*shared, *options)):
            function = option(function)
        return click.command(context_settings={"help_option_names": ["-h", "--help"]})(function)

    return decorate


def carry_out(
    name: str, run: Callable[[Console], Report], *, quick: bool, path: Path | None
) -> Report:
    """Run a benchmark, print its verdicts and write its report; exit with 1 if it fails."""
    console = Console()
    try:
        report = run(console)
    except (BenchError, MusterdError, TimeoutError) as error:
        console.print(f"[bold red]the benchmark failed:[/] {error}", markup=True)
        sys.exit(1)
    targets: list[Verdict] | None = getattr(report, "targets", None)
    if quick:
        console.print("quick run: it works; the figures mean nothing and no target is judged")
    elif targets is not None:
        print_verdicts(console, targets)
    save(report, path or default_path(name), console)
    return report


def default_path(name: str) -> Path:
    return RESULTS / f"{name}{time.strftime('%Y%m%d-%H%M%S')}.json"


def save(report: Struct, path: Path, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    console.print(f"written to {path}")
