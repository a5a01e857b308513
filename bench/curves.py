"""Draw the curves of growth.py: one panel per axis and figure, as an SVG."""

import math

from figures import Figure, Measure
from table import shown

PANEL_WIDTH, PANEL_HEIGHT = 200, 150
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 12, 30, 150, 80
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .faint { fill: #59636e; }
  .frame { stroke: #d1d9e0; fill: none; }
  .curve { stroke: #1a7f37; stroke-width: 2; fill: none; }
  .dot { fill: #1a7f37; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .faint { fill: #9198a1; } .frame { stroke: #3d444d; }
    .curve { stroke: #3fb950; } .dot { fill: #3fb950; }
  }
"""
ROWS = (("rate", "tasks per second"), ("work", "work per task"))


def draw(measures: list[Measure]) -> str:
    """Draw each curve over its logarithmic axis, upwards from zero."""
    width, height = PANEL_WIDTH * len(measures), PANEL_HEIGHT * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="throughput and work by size">',
        f"<style>{STYLE}</style>",
    ]
    for column, measure in enumerate(measures):
        for row, (what, title) in enumerate(ROWS):
            figures = [each for each in measure.figures if f".{what}." in each.key]
            parts.append(f'<g transform="translate({PANEL_WIDTH * column} {PANEL_HEIGHT * row})">')
            parts += _panel(f"{title} by {measure.name}", figures)
            parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, figures: list[Figure]) -> list[str]:
    counts = [int(each.key.rpartition(".")[2]) for each in figures]
    most = max(each.median for each in figures) * 1.15
    points = [
        (_x(count, counts), TOP + PLOT_HEIGHT * (1 - figure.median / most))
        for count, figure in zip(counts, figures, strict=True)
    ]
    parts = [
        f'<text class="title" x="{LEFT}" y="18">{title}</text>',
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/>',
        f'<polyline class="curve" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>',
    ]
    for place, ((x, y), count, figure) in enumerate(zip(points, counts, figures, strict=True)):
        anchor = "start" if place == 0 else "end" if place == len(points) - 1 else "middle"
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        parts.append(
            f'<text class="faint" x="{x:.1f}" y="{TOP + PLOT_HEIGHT + 14}" text-anchor="{anchor}">'
            f"{_short(count)}</text>"
        )
        if place in (0, len(points) - 1):
            parts.append(
                f'<text x="{x:.1f}" y="{TOP + PLOT_HEIGHT + 28}" text-anchor="{anchor}">'
                f"{shown(figure.median, figure.unit)}</text>"
            )
    return parts


def _x(count: int, counts: list[int]) -> float:
    low, high = math.log(counts[0]), math.log(counts[-1])
    share = (math.log(count) - low) / (high - low) if high > low else 0.5
    return LEFT + PLOT_WIDTH * share


def _short(count: int) -> str:
    if count >= 1_000_000:
        return f"{count // 1_000_000}M"
    return f"{count // 1_000}k" if count >= 1_000 else str(count)
