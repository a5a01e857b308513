"""Which folders and files of a project are watched."""

from pathlib import Path

import pytest

from musterd.supervisor.dev.watch import counts, folders_of


@pytest.mark.parametrize("name", ["bot.py", "musterd.toml", "sites.csv", "x.yaml", "x.json"])
def test_code_and_what_a_configuration_reads_counts(name: str) -> None:
    assert counts(Path("/srv/bot", name))


@pytest.mark.parametrize(
    "name", ["bot.pyc", ".bot.py.swp", "bot.py~", ".#bot.py", "log.txt", "4913"]
)
def test_what_editors_and_programs_leave_does_not(name: str) -> None:
    assert not counts(Path("/srv/bot", name))


def test_folders_without_code_of_the_project_are_not_watched(tmp_path: Path) -> None:
    kept = {tmp_path, tmp_path / "shop", tmp_path / "shop" / "deep"}
    for folder in (*kept, tmp_path / "env"):
        folder.mkdir(exist_ok=True, parents=True)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "env" / "lib").mkdir()
    for name in (".git", ".venv", ".musterd", "__pycache__", "node_modules"):
        (tmp_path / name / "below").mkdir(parents=True)
    assert set(folders_of([tmp_path])) == kept
