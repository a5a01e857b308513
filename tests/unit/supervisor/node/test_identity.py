"""What a node is known by: kept in state_dir, and not taken along by a copy of it."""

import shutil
from pathlib import Path

import pytest

from musterd.supervisor.node import process
from musterd.supervisor.node.process import IDENTITY_FILE, identity_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    machine = tmp_path / "machine-id"
    machine.write_text("m1\n")
    monkeypatch.setattr(process, "MACHINE_FILE", machine)
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def test_a_node_keeps_its_identity(folder: Path) -> None:
    made, former = identity_of(folder)
    assert former == ""
    assert identity_of(folder) == (made, "")
    folder.rename(folder.with_name("renamed"))
    assert identity_of(folder.with_name("renamed")) == (made, "")


def test_a_copied_folder_has_another_identity(folder: Path) -> None:
    made, _ = identity_of(folder)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    other, former = identity_of(copy)
    assert other != made
    assert former == made
    assert identity_of(copy) == (other, "")
    assert identity_of(folder) == (made, "")


def test_the_disk_of_another_machine_has_another_identity(folder: Path) -> None:
    made, _ = identity_of(folder)
    process.MACHINE_FILE.write_text("m2\n")
    other, former = identity_of(folder)
    assert (other != made, former) == (True, made)


def test_a_machine_without_a_name_keeps_its_identity(folder: Path) -> None:
    process.MACHINE_FILE.unlink()
    made, _ = identity_of(folder)
    assert identity_of(folder) == (made, "")


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_file_without_an_identity_gets_one(folder: Path, text: str) -> None:
    (folder / IDENTITY_FILE).write_text(text)
    made, former = identity_of(folder)
    assert (len(made), former) == (32, "")


def test_an_identity_of_an_earlier_version_stays(folder: Path) -> None:
    (folder / IDENTITY_FILE).write_text("abc")
    assert identity_of(folder) == ("abc", "")
    assert identity_of(folder) == ("abc", "")
