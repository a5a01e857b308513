"""`musterd install` and `uninstall` are stopped at each of their steps, and run again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from musterd.supervisor.__main__ import main
from musterd.supervisor.ctl.app import cli
from musterd.supervisor.service import install, manpages

STOPPING = Path(__file__).parents[1] / "system" / "bed_stopping.py"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A systemctl that tells a version of itself that has drop-ins, and knows nothing else."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'systemd 257 (257.1-1)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("systemctl")
@pytest.mark.parametrize("how", ["error", "death"])
def test_what_was_stopped_at_any_step_is_finished_by_the_next_run(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, str(STOPPING), str(tmp_path / "root"), how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stops = dict(line.split() for line in done.stdout.splitlines())
    assert set(stops) == {"uninstall", "install"}
    count = len(list(install.items(0, list(manpages.pages(main, cli)))))
    assert all(int(each) > count for each in stops.values()), stops
