"""`make bench-browser` in seconds: every figure is measured, nothing is left behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.workers.browser import chromium, find_executable

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "browser.py"
SECONDS_MAX = 200
SYSTEMS = ("musterd.playwright", "musterd.cdp", "bare", "launched", "program")


@pytest.mark.long
@pytest.mark.timeout(SECONDS_MAX + 20)
def test_quick_bench_measures_every_figure_and_cleans_up(tmp_path: Path) -> None:
    found = tmp_path / "figures.json"
    with tempfile.TemporaryDirectory(prefix="mb-") as scratch:
        done = subprocess.run(
            [sys.executable, SCRIPT, "--quick", "--json", found, "--executable", find_executable()],
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        left = [path.name for path in Path(scratch).glob("musterd-bench-*")]
        assert left == []
    report = json.loads(found.read_text())
    samples = {
        figure["key"]: figure["samples"]
        for measure in report["measures"]
        for figure in measure["figures"]
    }
    pages = {f"page.{system}.{what}" for system in SYSTEMS for what in ("seconds", "rate")}
    name = Path(find_executable()).name
    others = {f"recovery.{backend}" for backend in ("playwright", "cdp")}
    others |= {f"memory.{backend}.{name}" for backend in ("playwright", "cdp")}
    assert samples.keys() == pages | others
    assert all(value > 0 for values in samples.values() for value in values)
    assert len(report["targets"]) == 6


def test_the_browser_itself_is_found_before_debians_script_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script stays as the parent of Chromium, which would outlive it."""
    first, second, *_ = chromium.EXECUTABLES
    assert (Path(first).parent, Path(first).name) == (Path("/usr/lib/chromium"), second)
    for name in ("shell", "script"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(
        chromium, "EXECUTABLES", (str(tmp_path / "none"), str(tmp_path / "shell"), "script")
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_executable() == str(tmp_path / "shell")
