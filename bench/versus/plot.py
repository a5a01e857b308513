"""Draw the picture of a run: bars on logarithmic scales, as an SVG for light and dark pages."""

import math
from html import escape

from figures import Figure
from msgspec import Struct
from table import shown
from versus.results import P50, P99, RATE, WAIT, Report
from versus.systems import NOWHERE

WIDTH, MARGIN, NAMES_WIDTH, VALUES_WIDTH = 760, 16, 184, 96
TITLE_HEIGHT, ROW_HEIGHT, BAR_HEIGHT, GAP = 34, 22, 14, 18
CAPTION = "Logarithmic: each line is ten times the one before. Pale: nothing is kept on disk."
BARS_LEFT = MARGIN + NAMES_WIDTH
BARS_WIDTH = WIDTH - BARS_LEFT - VALUES_WIDTH - MARGIN
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 14px; font-weight: 600; }
  .faint { fill: #59636e; }
  .bar { fill: #9aa4af; } .ours { fill: #1a7f37; } .pale { fill-opacity: 0.45; }
  .line { stroke: #d1d9e0; } .spread { stroke: #59636e; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .faint { fill: #9198a1; }
    .bar { fill: #656c76; } .ours { fill: #3fb950; }
    .line { stroke: #3d444d; } .spread { stroke: #9198a1; }
  }
"""


class Panel(Struct, frozen=True):
    name: str
    title: str
    more: bool  # more is better
    reach: str = ""  # the figure where a thin line ends


PANELS = (
    Panel(RATE, "Tasks per second, results in hand (more is better)", more=True),
    Panel(P50, "One task, there and back: p50, line to p99 (less is better)", False, P99),
    Panel(WAIT, "Urgent task behind {backlog:,} queued: until it starts (less is better)", False),
)


def draw(report: Report) -> str:
    """Draw the whole picture, without panels that were not measured."""
    parts: list[str] = []
    top = MARGIN
    for panel in PANELS:
        rows = _rows(report, panel)
        if rows:
            title = panel.title.format(backlog=report.plan.backlog)
            parts += _panel(title, rows, top)
            top += TITLE_HEIGHT + ROW_HEIGHT * len(rows) + GAP
    if parts:
        parts.append(f'<text class="faint" x="{MARGIN}" y="{top}">{CAPTION}</text>')
        top += GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}" role="img" aria-label="musterd beside other queues">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


class Row(Struct, frozen=True):
    label: str
    figure: Figure
    reach: float  # the end of the thin line; 0 for none
    ours: bool
    kept: bool  # its tasks are on disk


def _rows(report: Report, panel: Panel) -> list[Row]:
    """Return the rows, the best first."""
    rows = [
        Row(
            outcome.label,
            figure,
            reach.median if (reach := outcome.figures.get(panel.reach)) is not None else 0.0,
            outcome.key.startswith("musterd"),
            outcome.disk != NOWHERE,
        )
        for outcome in report.outcomes
        if (figure := outcome.figures.get(panel.name)) is not None and figure.samples
    ]
    return sorted(rows, key=lambda row: row.figure.median, reverse=panel.more)


def _panel(title: str, rows: list[Row], top: int) -> list[str]:
    values = [value for row in rows for value in (row.figure.median, row.reach) if value > 0]
    low, high = _decades(values)
    bottom = top + TITLE_HEIGHT + ROW_HEIGHT * len(rows)
    parts = [f'<text class="title" x="{MARGIN}" y="{top + 14}">{escape(title)}</text>']
    for power in range(low, high + 1):
        x = _x(10.0**power, low, high)
        parts.append(
            f'<line class="line" x1="{x}" x2="{x}" y1="{top + TITLE_HEIGHT - 4}" y2="{bottom}"/>'
        )
    for number, row in enumerate(rows):
        parts += _row(row, top + TITLE_HEIGHT + ROW_HEIGHT * number, low, high)
    return parts


def _row(row: Row, top: int, low: int, high: int) -> list[str]:
    middle = top + ROW_HEIGHT // 2
    end = _x(row.figure.median, low, high)
    far = max(end, _x(row.reach, low, high) if row.reach else end)
    kind = ("ours" if row.ours else "bar") + ("" if row.kept else " pale")
    parts = [
        f'<text x="{BARS_LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(row.label)}</text>',
        f'<rect class="{kind}" x="{BARS_LEFT}" y="{middle - BAR_HEIGHT // 2}" '
        f'width="{round(end - BARS_LEFT, 1)}" height="{BAR_HEIGHT}" rx="2"/>',
        f'<text class="faint" x="{round(far + 6, 1)}" y="{middle + 4}">'
        f"{escape(shown(row.figure.median, row.figure.unit))}</text>",
    ]
    if far > end:
        parts.append(f'<line class="spread" x1="{end}" x2="{far}" y1="{middle}" y2="{middle}"/>')
    return parts


def _decades(values: list[float]) -> tuple[int, int]:
    """Return the powers of ten around the values; the lowest value still has a visible bar."""
    low = math.floor(math.log10(min(values)) - 0.2)
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def _x(value: float, low: int, high: int) -> float:
    share = (math.log10(value) - low) / (high - low)
    return round(BARS_LEFT + BARS_WIDTH * share, 1)
