"""Print figures: a table per measure, then a line per target."""

from collections.abc import Callable, Iterable

from figures import (
    BYTES,
    COUNT,
    PER_MINUTE,
    SECONDS,
    SHARE,
    TASKS_PER_SECOND,
    Figure,
    Measure,
    Verdict,
    ratios,
)
from rich.console import Console
from rich.table import Table

RATES = {TASKS_PER_SECOND: "/s", PER_MINUTE: "/min"}


def shown(value: float, unit: str) -> str:
    """Format a value in the most readable unit."""
    if unit in RATES:
        return f"{value:,.0f}{RATES[unit]}"
    if unit in (COUNT, SHARE):
        return f"{value:,.0f}" if unit == COUNT else f"{value:.2%}"
    if unit == BYTES:
        return f"{value / 1e6:.1f} MB"
    if unit == SECONDS:
        if value >= 1:
            return f"{value:.2f} s"
        return f"{value * 1e3:.1f} ms" if value >= 0.01 else f"{value * 1e6:.0f} µs"
    return f"{value:.2f}x"


def measured(
    names: Iterable[str], measure: Callable[[str], Measure | None], console: Console
) -> list[Measure]:
    """Measure one after the other, and print each; without those that cannot be measured here."""
    measures = []
    for name in names:
        with console.status(f"measuring {name} ..."):
            found = measure(name)
        if found is not None:
            measures.append(found)
            print_measure(console, found)
    return measures


def print_measure(console: Console, measure: Measure) -> None:
    table = Table(title=measure.title, title_justify="left", title_style="bold")
    table.add_column("")
    for head in ("median", "lowest", "highest", "ratio"):
        table.add_column(head, justify="right")
    for figure in measure.figures:
        table.add_row(
            f"{figure.label}\n[dim]{figure.note}[/]" if figure.note else figure.label,
            *(shown(each, figure.unit) for each in (figure.median, figure.low, figure.high)),
            ratio(figure, measure.figure(figure.baseline)),
        )
    console.print(table)


def ratio(figure: Figure, base: Figure | None) -> str:
    """Format the median ratio of the rounds."""
    if base is None:
        return ""
    if base is figure:
        return "1"
    found = sorted(ratios(figure, base))
    middle = found[len(found) // 2]
    return f"{middle:.2f}x" if middle >= 0.1 else f"1/{1 / middle:,.0f}"


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    table = Table(title="Targets", title_justify="left", title_style="bold")
    for head in ("", "target", "measured", ""):
        table.add_column(head, justify="left" if not head else "right")
    for verdict in verdicts:
        sign = "≥" if verdict.at_least else "≤"
        table.add_row(
            verdict.label,
            f"{sign} {shown(verdict.bound, verdict.unit)}",
            f"{shown(verdict.value, verdict.unit)}\n[dim]{shown(verdict.low, verdict.unit)} to "
            f"{shown(verdict.high, verdict.unit)}[/]",
            "[green]reached[/]" if verdict.reached else f"[red]missed{_missing(verdict)}[/]",
        )
    console.print(table)


def _missing(verdict: Verdict) -> str:
    if not verdict.bound:
        return ""
    return f" by {abs(verdict.value - verdict.bound) / verdict.bound:.0%}"
