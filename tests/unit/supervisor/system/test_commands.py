"""Commands are named by words that work when they are typed."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from musterd.supervisor.system import commands
from musterd.supervisor.system.commands import typed

OURS = Path(sys.executable).parent


def test_the_plain_name_where_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"/nowhere:{OURS}")
    assert typed("musterctl", "-s", "a b/control.sock", "status") == (
        "musterctl -s 'a b/control.sock' status"
    )


def test_the_path_where_the_name_is_another_ones_or_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = tmp_path / "musterctl"
    foreign.write_text("#!/bin/sh\n")
    foreign.chmod(0o755)
    for path in (str(tmp_path), "/nowhere"):
        monkeypatch.setenv("PATH", path)
        assert typed("musterctl", "status") == f"{shlex.quote(str(OURS / 'musterctl'))} status"
    assert typed("musterd", cwd=OURS.parent) == f"{OURS.name}/musterd"


def test_a_source_that_is_not_installed_is_run_as_a_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands.sys, "executable", str(tmp_path / "python 3"))
    assert typed("musterctl", "version") == (
        f"'{tmp_path}/python 3' -m musterd.supervisor.ctl version"
    )
    monkeypatch.undo()
    for module in commands.MODULES.values():
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
        )
        assert "Usage" in done.stdout or "usage" in done.stdout
