"""Every Python block of docs/toolkit.md runs and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from musterd.workers import toolkit

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "toolkit.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
HEADINGS = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)


def test_every_section_has_an_example() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert [part.partition("\n")[0] for part in sections if "```python" in part] == HEADINGS


def test_what_the_page_imports_is_what_the_toolkit_offers() -> None:
    assert set(re.findall(r"^    (\w+),$", BLOCKS[0], re.MULTILINE)) <= set(toolkit.__all__)


def test_the_links_within_the_page_lead_somewhere() -> None:
    anchors = {heading.lower().replace(" ", "-") for heading in HEADINGS}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_prints_what_it_says(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = re.findall(r"^\s*# > (.*)$", block, re.MULTILINE)
    assert done.stdout.splitlines() == expected
