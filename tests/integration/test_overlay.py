"""A daemon whose state is on an overlay file system, as in a container whose image has state."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Jobs
from support.waiting import Waiting

SECONDS = 60


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def layered(jobs: Jobs, tmp_path: Path) -> Iterator[Any]:
    """Make a daemon whose lower layer holds the state that an earlier daemon left."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    daemon = jobs(size=2, start=False)
    daemon.state.mkdir(mode=0o700)
    layers = tmp_path / "layers"  # overlayfs may not lie on another overlay
    layers.mkdir()
    if not mount("-t", "tmpfs", "-o", "mode=0700", "musterd-test", str(layers)):
        pytest.skip("mounting is not allowed here")
    mounted = [layers]
    try:
        for name in ("lower", "upper", "work"):
            (layers / name).mkdir(mode=0o700)
        for name in ("jobs-0-1", "jobs-1-2", "other"):
            (layers / "lower" / "tmp" / name / "deeper").mkdir(parents=True)
            (layers / "lower" / "tmp" / name / "left").write_text("x")
        names = ",".join(f"{name}dir={layers / name}" for name in ("lower", "upper", "work"))
        if not mount("-t", "overlay", "-o", names, "musterd-test", str(daemon.state)):
            pytest.skip("there is no overlayfs here")
        mounted.append(daemon.state)
        yield daemon
    finally:
        daemon.close()
        for place in reversed(mounted):
            subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
def test_what_a_lower_layer_has_left_does_not_end_the_start(layered: Any, waiting: Waiting) -> None:
    left = layered.state / "tmp" / "jobs-0-1"
    with pytest.raises(OSError, match="Invalid cross-device link"):
        left.rename(left.with_name("moved"))
    layered.start()
    with layered.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(SECONDS) == 1
    names = {"jobs-0-1", "jobs-1-2", "other"}

    def leftovers() -> list[Path]:
        found = [path for path in (layered.state / "tmp").iterdir() if path.name in names]
        return [path for path in found if (path / "left").exists()]

    waiting("they are removed", lambda: not leftovers())
    assert layered.stop() == 0


@pytest.mark.root
def test_what_cannot_be_removed_is_said_and_left(layered: Any, waiting: Waiting) -> None:
    held = layered.state / "tmp" / "jobs-0-1"
    assert mount("-t", "tmpfs", "musterd-test", str(held))  # a mount point cannot be removed
    try:
        layered.start()
        with layered.client() as client:
            assert client.submit("jobs.echo", {"value": 1}).result(SECONDS) == 1
        waiting("it is said", lambda: "directory is not removed" in layered.log())
        assert held.exists()
        assert layered.stop() == 0
    finally:
        subprocess.run(["umount", str(held)], check=True)
