"""`make bench-cluster` in less than a minute: every figure is measured, nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 300
FIGURES = {
    "peers": {"throughput.cluster", "roundtrip.p50.cluster", "roundtrip.p99.cluster"},
    "claims": {
        f"claims.{kind}.{number}" for kind in ("empty", "queued") for number in ("1", "100")
    },
    "loss": {"loss.gone", "loss.restarted"},
    "snapshot": {
        *("snapshot.rate", "snapshot.live", "snapshot.claim.first", "snapshot.claim.last"),
        "snapshot.claim.p99",
    },
}


def check(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "figures.json"
    options = [word for name in names for word in ("--only", name)]
    with tempfile.TemporaryDirectory(prefix="mb-") as scratch:
        Path(scratch).chmod(0o711)
        done = subprocess.run(
            [sys.executable, ROOT / "bench/cluster.py", "--quick", "--json", path, *options],
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert os.listdir(scratch) == []
    report = json.loads(path.read_text())
    assert [measure["name"] for measure in report["measures"]] == names
    for measure in report["measures"]:
        figures = {figure["key"]: figure["samples"] for figure in measure["figures"]}
        assert FIGURES[measure["name"]] <= figures.keys()
        assert all(samples and min(samples) > 0 for samples in figures.values()), figures
    if "peers" not in names:
        return
    assert any("end to end" in verdict["label"] for verdict in report["targets"])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_no_database(how: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(prefix="mb-") as scratch:
        Path(scratch).chmod(0o711)
        bench = subprocess.Popen(
            [sys.executable, ROOT / "bench/cluster.py", "--only", "claims"],
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for("its database is up", lambda: _serves(scratch), seconds=SECONDS_MAX)
            (pid,) = _pids(scratch)
            server = psutil.Process(pid)
        finally:
            bench.send_signal(how)
            bench.wait()
        wait_for("its database has ended", lambda: not server.is_running(), seconds=SECONDS_MAX)
        wait_for("it has stopped in order", lambda: not _pids(scratch), seconds=SECONDS_MAX)


def _pids(scratch: str) -> list[int]:
    """Return the main process of each PostgreSQL in a folder, as its own file says."""
    found = Path(scratch).glob("*/database/data/postmaster.pid")
    return [int(path.read_text().split()[0]) for path in found]


def _serves(scratch: str) -> bool:
    return any(Path(scratch).glob("*/database/.s.PGSQL.*[0-9]")) and bool(_pids(scratch))


def test_the_figures_of_the_engine_are_measured(tmp_path: Path) -> None:
    check(tmp_path, ["claims", "snapshot"])


@pytest.mark.long
def test_the_figures_of_nodes_are_measured_beside_other_systems(tmp_path: Path) -> None:
    check(tmp_path, ["peers", "loss"])
