"""The bed names what it lacks before it starts, and shows nothing of the machine below."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import bed


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
    """The commands are those that not every Debian has, or that only root finds."""
    script = bed.SCRIPT.read_text()
    for name in ("pivot_root", "setpriv", "unshare", "chroot", "mountpoint", "awk"):
        assert (name in script) == (name in bed.COMMANDS), name


def test_a_tree_without_systemd_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    assert bed.missing(tmp_path) == f"{tmp_path}/lib/systemd/systemd is missing"


# Files that a machine with musterd and users may have.
OF_ITS_OWN = (
    "etc/musterd/musterd.toml",
    "etc/musterd/musterd.d/broken.toml",
    "etc/systemd/system.conf.d/hasty.conf",
    "etc/systemd/system/musterd.service.d/override.conf",
    "home/alice/.config/musterd/musterd.toml",
    "opt/musterd/bin/musterd",
    "run/musterd/tasks.sock",
    "run/systemd/system/musterd.service",
    "srv/bed/bed_jobs.py",
    "tmp/musterd-0/tasks.sock",
    "usr/local/bin/musterd",
    "usr/local/lib/systemd/system/musterd.service",
    "usr/src/musterd/tests/unit/test_gone.py",
    "var/lib/musterd/store.db",
    "var/lib/musterd-shop/store.db",
    "var/lib/systemd/linger/alice",
    "var/log/musterd/musterd.log",
)
OF_THE_SYSTEM = ("usr/bin/python3", "etc/pip.conf", "var/lib/dpkg/status", "var/cache/here")
PASSWD = """root:x:0:0:root:/root:/bin/bash
musterd:x:997:997::/var/lib/musterd:/usr/sbin/nologin
alice:x:1000:1000::/home/alice:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
SHADOW = "root:*:1::::::\nmusterd:!:1::::::\nalice:!:1::::::\nnobody:*:1::::::\n"


@pytest.fixture
def shop() -> Iterator[bed.Workshop]:
    if reason := bed.missing():
        pytest.skip(f"no machine can be booted here: {reason}")
    made = bed.Workshop()
    yield made
    made.close()
    assert bed.left_of(made) == []


def test_a_machine_sees_nothing_of_what_the_system_below_has_of_its_own(
    shop: bed.Workshop, tmp_path: Path
) -> None:
    for name in (*OF_ITS_OWN, *OF_THE_SYSTEM):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of the system below")
    for name, text in (("passwd", PASSWD), ("shadow", SHADOW), ("group", "root:x:0:\n")):
        (tmp_path / "etc" / name).write_text(text)

    def run(*words: str) -> None:
        subprocess.run(shop.inside("bash", str(bed.SCRIPT), *words), check=True)

    def seen(machine: str) -> list[str]:
        root = shop.path(f"{machine}/root")
        return [name for name in (*OF_ITS_OWN, *OF_THE_SYSTEM) if (root / name).exists()]

    image = str(shop.folder / "image")
    run("layers", image, str(tmp_path))
    run("forget", f"{image}/root")
    assert seen("image") == list(OF_THE_SYSTEM)
    etc = shop.path("image/root/etc")
    for name in ("passwd", "shadow"):
        lines = (etc / name).read_text().splitlines()
        assert [line.partition(":")[0] for line in lines] == ["root", "nobody"]

    # Directories of what the image installs hold nothing else, also in its machines.
    installed = shop.path("image/root/etc/musterd/own.toml")
    installed.parent.mkdir()
    installed.touch()
    subprocess.run(shop.inside("umount", "-R", f"{image}/root"), check=True)
    run("layers", str(shop.folder / "machine"), str(tmp_path), image)
    assert seen("machine") == list(OF_THE_SYSTEM)
    assert os.listdir(shop.path("machine/root/etc/musterd")) == ["own.toml"]
    assert all((tmp_path / name).exists() for name in OF_ITS_OWN), "nothing is removed below"
