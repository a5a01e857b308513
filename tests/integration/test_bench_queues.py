"""`make bench-peers` without other systems: the protocol, the tables and the picture."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 100
SVG = "{http://www.w3.org/2000/svg}"
FIGURES = ROOT / "docs" / "figures" / "peers.json"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "peers.svg"
EMPTY_PAGE = "before\n<!-- figures of make bench-peers -->\nold\n<!-- end of figures -->\nafter\n"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Make a directory with a path short enough for sockets; afterwards it must be empty."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


def queues(scratch: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "queues.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        env={**os.environ, "TMPDIR": str(scratch)},
        check=False,
    )


def figure(name: str, key: str, unit: str, *samples: float) -> dict[str, object]:
    return {"key": f"{name}.{key}", "label": key, "unit": unit, "samples": list(samples)}


def outcome(key: str, rate: float, trip: float, wait: list[float]) -> dict[str, object]:
    return {
        "key": key,
        "label": key.title(),
        "version": f"{key} 1.0",
        "disk": "each commit",
        "urgent_by": "none",
        "settings": "as it comes",
        "figures": {
            "throughput": figure("throughput", key, "tasks/s", rate, rate * 2, rate * 3),
            "p50": figure("p50", key, "s", trip),
            "p99": figure("p99", key, "s", trip * 10),
            "urgent": figure("urgent", key, "s", *wait),
        },
        "killed_task": "runs again",
        "main_killed": {"acknowledged": 200, "finished": 199, "twice": 3, "left_behind": 2},
    }


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Write a small run in which one system was faster but never reached its urgent task."""
    machine = {
        "musterd": "0.1.0",
        "python": "3.11.2",
        "kernel": "6.1",
        "processors": 2,
        "filesystem": "ext4",
        "fsync_seconds": 0.001,
        "load": 0.5,
    }
    outcomes = [outcome("musterd", 1000, 0.002, [0.01]), outcome("other", 2000, 0.001, [])]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"machine": machine, "plan": {}, "outcomes": outcomes}))
    return path


def test_tables_say_what_was_measured_and_who_was_better(
    scratch: Path, tmp_path: Path, report: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY_PAGE)
    done = queues(scratch, "--from", str(report), "--document", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert (
        "| Musterd | each commit | 2,000 (1,000–3,000) | 1 | 2000 µs | 20.0 ms | **10.0 ms** |"
    ) in lines
    assert (
        "| Other | each commit | **4,000 (2,000–6,000)** | 2.00x | **1000 µs** | **10.0 ms** "
        "| not within 30 s |"
    ) in lines
    assert "| Other | runs again | 199 of 200, 3 twice | 2 |" in lines
    assert "- throughput: Other (2.00x)" in lines
    assert "- wait of an urgent task: none" in lines
    assert "throughput: Other (2.00x)" in done.stdout


def test_the_picture_has_a_bar_for_every_figure_the_best_first(
    scratch: Path, tmp_path: Path, report: Path
) -> None:
    picture = tmp_path / "picture.svg"
    done = queues(scratch, "--from", str(report), "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    root = ElementTree.fromstring(picture.read_text())
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert [text for text in texts if text in ("Musterd", "Other")] == [
        *("Other", "Musterd"),  # throughput
        *("Other", "Musterd"),  # round trip
        "Musterd",  # urgent
    ]
    widths = [float(each.attrib["width"]) for each in root.iter(f"{SVG}rect")]
    assert len(widths) == 5
    assert all(0 < width <= float(root.attrib["width"]) for width in widths)
    assert widths[0] > widths[1]


def test_a_page_without_a_place_for_tables_is_left_alone(
    scratch: Path, tmp_path: Path, report: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    done = queues(scratch, "--from", str(report), "--document", str(page))
    assert done.returncode == 1
    assert "no place for tables" in done.stdout
    assert page.read_text() == "nothing\n"


@pytest.mark.skipif(not FIGURES.exists(), reason="no run is kept")
def test_the_documents_show_the_run_that_is_kept(scratch: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text(PAGE.read_text())
    queues(scratch, "--from", str(FIGURES), "--document", str(page), "--plot", str(picture))
    assert page.read_text() == PAGE.read_text()
    assert picture.read_text() == PICTURE.read_text()


@pytest.mark.long
def test_systems_are_measured_by_the_same_protocol(scratch: Path, tmp_path: Path) -> None:
    """Measure the two systems that need no network and no Redis."""
    path = tmp_path / "report.json"
    measures = "throughput,roundtrip,memory,urgent,survival"
    done = queues(
        scratch,
        *("--quick", "--only", "musterd,pool", "--measure", measures, "--json", str(path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours, pool = json.loads(path.read_text())["outcomes"]
    for each in (ours, pool):
        assert set(each["figures"]) == {"throughput", "p50", "p99", "memory", "urgent"}
        assert all(found["samples"] for found in each["figures"].values())
    assert (ours["main_killed"]["finished"], ours["main_killed"]["left_behind"]) == (40, 0)
    assert pool["main_killed"]["finished"] < 40
    assert str(ROOT) not in path.read_text()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--measure", "speed"]])
def test_what_it_does_not_know_is_refused(scratch: Path, arguments: list[str]) -> None:
    done = queues(scratch, *arguments)
    assert done.returncode == 2
    assert "is none of" in done.stderr
