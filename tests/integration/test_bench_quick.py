"""`make bench` in a few seconds: every figure is measured, nothing is left behind."""

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

FIGURES = {
    "throughput": [
        "throughput.musterd.submit_many",
        "throughput.musterd.submit",
        "throughput.pool.imap_unordered",
        "throughput.pool.apply_async",
        "throughput.executor.submit",
    ],
    "roundtrip": [
        f"roundtrip.{system}.{share}"
        for system in ("musterd.memory", "musterd.full", "executor", "pool", "wire")
        for share in ("p50", "p99")
    ]
    + ["roundtrip.musterd.beyond"],
    "recovery": [
        "recovery.musterd.replacement",
        "recovery.musterd.next_task",
        "recovery.pool.next_task",
        "recovery.executor.next_task",
    ],
    "priority": [
        "priority.musterd",
        "priority.musterd.worst",
        "priority.pool",
        "priority.executor",
    ],
    "memory": [
        "memory.musterd.supervisor",
        "memory.musterd.fork server",
        "memory.musterd.parser",
        "memory.musterd.worker",
        "memory.musterd.supervisor_after",
        "memory.pool.worker",
        "memory.pool.parser",
    ],
    "backlog": [
        "backlog.rate.100",
        "backlog.rate.1000",
        "backlog.supervisor.100",
        "backlog.supervisor.1000",
    ],
}
TARGETS = 8  # a quick run does not judge the targets of a million queued tasks


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Make a directory with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="mb-") as name:
        yield Path(name)


def bench(
    scratch: Path, *arguments: str, script: str = "run.py"
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / script), *arguments],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )


def test_quick_bench_measures_every_figure_and_cleans_up(tmp_path: Path, scratch: Path) -> None:
    done = bench(scratch, "--quick", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "figures.json").read_text())
    found = {
        measure["name"]: [figure["key"] for figure in measure["figures"]]
        for measure in report["measures"]
    }
    assert found == FIGURES
    for measure in report["measures"]:
        for figure in measure["figures"]:
            assert figure["samples"], figure["key"]
            if figure["key"] != "roundtrip.musterd.beyond":  # one commit may serve two tasks
                assert all(sample > 0 for sample in figure["samples"]), figure
    assert len(report["targets"]) == TARGETS
    assert "came back" in next(
        figure["note"]
        for measure in report["measures"]
        for figure in measure["figures"]
        if figure["key"] == "recovery.musterd.next_task"
    )
    assert list(scratch.iterdir()) == []


def test_bench_measures_only_what_is_asked_for(tmp_path: Path, scratch: Path) -> None:
    done = bench(scratch, "--quick", "--only", "memory", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "figures.json").read_text())
    assert [measure["name"] for measure in report["measures"]] == ["memory"]
    assert {verdict["unit"] for verdict in report["targets"]} == {"B"}


@pytest.mark.long
def test_the_figures_of_a_fleet_are_measured_in_a_few_seconds(
    tmp_path: Path, scratch: Path
) -> None:
    path = tmp_path / "figures.json"
    done = bench(scratch, "--quick", "--json", str(path), script="endurance.py")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    figures = {each["key"]: each for found in report["measures"] for each in found["figures"]}
    names = [found["name"] for found in report["measures"]]
    assert names == ["replacement", "tasks", "shutdown", "idle", "restarts"]
    assert all(each["samples"] for each in figures.values())
    assert figures["restarts.descriptors_gained"]["samples"] == [0]
    assert figures["restarts.left_over"]["samples"] == [0]
    assert len(report["targets"]) == 8
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_the_curves_of_growth_are_measured_and_drawn(tmp_path: Path, scratch: Path) -> None:
    path, svg = tmp_path / "figures.json", tmp_path / "curves.svg"
    done = bench(scratch, "--quick", "--json", str(path), "--svg", str(svg), script="growth.py")
    assert done.returncode == 0, done.stdout + done.stderr
    measures = json.loads(path.read_text())["measures"]
    assert [found["name"] for found in measures] == ["queued", "workers", "sites", "clients"]
    samples = [each["samples"] for found in measures for each in found["figures"]]
    assert all(len(found) == 1 and found[0] > 0 for found in samples)
    drawn = ElementTree.fromstring(svg.read_text())
    assert len(drawn.findall(".//{*}polyline")) == 2 * len(measures)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--fast"]])
def test_bench_refuses_what_it_does_not_know(scratch: Path, arguments: list[str]) -> None:
    done = bench(scratch, *arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
