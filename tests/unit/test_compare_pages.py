"""docs/compare claims nothing that was not measured: its figures are in docs/performance.md."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = (DOCS / "performance.md").read_text()
PAGES = sorted((DOCS / "compare").glob("*.md"))
ELSEWHERE = {"crawlers": ["10 s"]}  # how Crawlee scales, by its source
FIGURE = re.compile(r"\d[\d,.]*\d(?: (?:µs|ms|s|MB)\b)|\d+,\d{3}\b|\d+ of \d+")


def test_there_are_pages() -> None:
    assert len(PAGES) == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_figures_were_measured(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    figures = {each for row in rows for each in FIGURE.findall(row.partition("|")[2])}
    missing = [each for each in sorted(figures) if each not in MEASURED]
    assert missing == ELSEWHERE.get(page.stem, []), "not in docs/performance.md"
    if page.stem in ("celery", "queues"):
        assert len(figures) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_says_when_to_stay_away(page: Path) -> None:
    assert "\n## When not to\n" in page.read_text()
