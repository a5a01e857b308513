"""The bed says what it lacks before it tries."""

import os
import shutil
from pathlib import Path

import bed
import pytest


@pytest.mark.root
@pytest.mark.parametrize("lacking", bed.COMMANDS)
def test_a_command_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for name in bed.COMMANDS:
        found = shutil.which(name)
        if found and name != lacking:
            (tmp_path / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bed.missing() == f"commands are missing: {lacking}"


def test_every_command_of_the_script_is_looked_for() -> None:
    """Those that are not on every Debian, or only where root looks."""
    script = bed.SCRIPT.read_text()
    for name in ("pivot_root", "setpriv", "unshare", "chroot", "mountpoint"):
        assert (name in script) == (name in bed.COMMANDS), name


def test_a_tree_without_systemd_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    assert bed.missing(tmp_path) == f"{tmp_path}/lib/systemd/systemd is missing"
