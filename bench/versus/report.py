"""Show the outcomes: two tables, in the terminal and in Markdown, and what beats musterd."""

import statistics
from collections.abc import Callable

from figures import COUNT, TASKS_PER_SECOND, Figure, ratios
from fleet import BenchError
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from table import ratio, shown
from versus.results import (
    NEXT,
    P50,
    P99,
    RATE,
    WAIT,
    WEIGHT,
    WORKERS,
    Machine,
    Outcome,
    Report,
    Survival,
)

OURS = "musterd"
BEGIN, END = "<!-- figures of make bench-peers -->", "<!-- end of figures -->"
NAMES = {
    RATE: "throughput",
    P50: "round trip, p50",
    P99: "round trip, p99",
    WAIT: "wait of an urgent task",
    NEXT: "next task after a killed worker",
    WEIGHT: "idle memory",
}


class Cell(Struct, frozen=True):
    text: str
    best: bool = False  # of its column


class Sheet(Struct, frozen=True):
    title: str
    heads: list[str]
    rows: list[list[Cell]]


def sheets(report: Report) -> list[Sheet]:
    found = [_speed(report), _losses(report)]
    return [sheet for sheet in found if len(sheet.heads) > 1]


def _speed(report: Report) -> Sheet:
    base = report.outcome(OURS)
    return _sheet(
        f"Speed, {WORKERS} worker processes: median (lowest–highest)",
        report,
        [
            ("synced to disk", lambda each: Cell(each.disk)),
            ("tasks/s", lambda each: _figure(report, each, RATE)),
            ("to musterd", lambda each: _to(each, base)),
            ("round trip, p50", lambda each: _figure(report, each, P50)),
            ("p99", lambda each: _figure(report, each, P99)),
            (
                f"urgent behind {report.plan.backlog:,}",
                lambda each: _figure(report, each, WAIT),
            ),
            ("idle, PSS", lambda each: _figure(report, each, WEIGHT)),
        ],
    )


def _losses(report: Report) -> Sheet:
    return _sheet(
        f"After kill -9, within {report.plan.patience_seconds:g} s",
        report,
        [
            ("the killed worker's task", lambda each: Cell(each.killed_task)),
            ("the next task", lambda each: _figure(report, each, NEXT)),
            ("tasks finished, Redis killed", lambda each: _survival(each.broker_killed)),
            ("tasks finished, main process killed", lambda each: _survival(each.main_killed)),
            ("processes left behind", lambda each: _left(report, each)),
        ],
    )


def _sheet(
    title: str, report: Report, columns: list[tuple[str, Callable[[Outcome], Cell]]]
) -> Sheet:
    """Make a sheet without empty columns and rows."""
    made = [(head, [make(each) for each in report.outcomes]) for head, make in columns]
    made = [(head, cells) for head, cells in made if any(cell.text for cell in cells)]
    told = {"synced to disk"}  # means nothing by itself
    rows = [
        [Cell(outcome.label), *(cells[index] for _, cells in made)]
        for index, outcome in enumerate(report.outcomes)
        if any(cells[index].text for head, cells in made if head not in told)
    ]
    return Sheet(title, ["", *(head for head, _ in made)] if rows else [], rows)


def _figure(report: Report, outcome: Outcome, name: str) -> Cell:
    figure = outcome.figures.get(name)
    if figure is None:
        return Cell("")
    if not figure.samples:
        return Cell(f"not within {report.plan.patience_seconds:g} s")
    text = _number(figure.median, figure)
    if len(figure.samples) > 1:
        text += f" ({_spread(figure)})"
    medians = [
        found.median
        for each in report.outcomes
        if (found := each.figures.get(name)) is not None and found.samples
    ]
    best = max(medians) if figure.unit == TASKS_PER_SECOND else min(medians)
    return Cell(text, best=figure.median == best)


def _spread(figure: Figure) -> str:
    """Format lowest and highest; without their units where the median has the same."""
    unit = _number(figure.median, figure).partition(" ")[2]
    ends = [_number(each, figure) for each in (figure.low, figure.high)]
    if all(end.partition(" ")[2] == unit for end in ends):
        ends = [end.partition(" ")[0] for end in ends]
    return "–".join(ends)


def _number(value: float, figure: Figure) -> str:
    """Format a number; the head of the column has "/s" already."""
    return shown(value, COUNT if figure.unit == TASKS_PER_SECOND else figure.unit)


def _to(outcome: Outcome, base: Outcome | None) -> Cell:
    if base is None or RATE not in base.figures or RATE not in outcome.figures:
        return Cell("")
    return Cell(ratio(outcome.figures[RATE], base.figures[RATE]))


def _survival(survival: Survival | None) -> Cell:
    if survival is None:
        return Cell("")
    text = f"{survival.finished} of {survival.acknowledged}"
    if survival.twice:
        text += f", {survival.twice} twice"
    return Cell(text, best=survival.finished == survival.acknowledged)


def _left(report: Report, outcome: Outcome) -> Cell:
    if outcome.main_killed is None:
        return Cell("")
    left = outcome.main_killed.left_behind
    return Cell(str(left), best=left == 0)


def wins(report: Report) -> list[str]:
    """Say where another system was better than musterd, line by line, or that none was."""
    ours = report.outcome(OURS)
    if ours is None:
        return []
    lines = []
    for name, called in NAMES.items():
        base = ours.figures.get(name)
        if base is None or not base.samples:
            continue
        better = [
            f"{each.label} ({statistics.median(ratios(figure, base)):.2f}x)"
            for each in report.outcomes
            if not each.key.startswith(OURS)
            and (figure := each.figures.get(name)) is not None
            and figure.samples
            and _is_better(figure, base)
        ]
        lines.append(f"{called}: {', '.join(better) or 'none'}")
    return lines


def _is_better(figure: Figure, base: Figure) -> bool:
    if figure.unit == TASKS_PER_SECOND:
        return figure.median > base.median
    return figure.median < base.median


def introduction(machine: Machine) -> str:
    redis = f", Redis {machine.redis}" if machine.redis else ""
    return (
        f"musterd {machine.musterd}, Python {machine.python}{redis}, {machine.processors} "
        f"processors, load {machine.load:.1f}, files on {machine.filesystem} (fdatasync "
        f"{shown(machine.fsync_seconds, 's')})"
    )


def print_report(console: Console, report: Report) -> None:
    for sheet in sheets(report):
        table = Table(title=sheet.title, title_justify="left", title_style="bold")
        for number, head in enumerate(sheet.heads):
            table.add_column(head, justify="right" if number else "left")
        for row in sheet.rows:
            table.add_row(*(f"[bold green]{c.text}[/]" if c.best else c.text for c in row))
        console.print(table)
    console.print("The best of each column is green. Better than musterd, and by how much:")
    for line in wins(report):
        console.print(f"  {line}", highlight=False)


def check_place(page: str) -> None:
    """Check that a page in Markdown has its marks."""
    if BEGIN not in page or END not in page:
        raise BenchError(f"the page has no place for tables: {BEGIN} and {END}")


def filled(page: str, report: Report) -> str:
    """Return the page with the tables of this report between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_markdown(report)}{END}{after}"


def _markdown(report: Report) -> str:
    """Format a row in Markdown; the best value of each column is bold."""
    lines = [f"{introduction(report.machine)}."]
    for sheet in sheets(report):
        lines += ["", f"{sheet.title}:", "", f"| {' | '.join(sheet.heads)} |"]
        lines.append("|---" * len(sheet.heads) + "|")
        for row in sheet.rows:
            lines.append(f"| {' | '.join(f'**{c.text}**' if c.best else c.text for c in row)} |")
    lines += ["", "Better than musterd, and by how much:", ""]
    lines += [f"- {line}" for line in wins(report)]
    lines += ["", "What was set:", ""]
    lines += [_settings(outcome) for outcome in report.outcomes]
    return "\n".join(lines) + "\n"


def _settings(outcome: Outcome) -> str:
    urgent = f"; urgent by {outcome.urgent_by}" if outcome.urgent_by != "none" else ""
    return f"- *{outcome.label}* ({outcome.version}): {outcome.settings}{urgent}"
