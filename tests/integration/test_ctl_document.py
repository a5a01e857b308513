"""The examples in docs/musterctl.md are what musterctl prints.

The real musterctl runs each command, against a real control.sock that has the answers of
`support.document_answers`. The numbers of the examples are made up; the text is not.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from musterd import __version__
from support.terminal import MUSTERCTL, SECONDS

Answering = Callable[[str], str]
PAGE = (Path(__file__).parents[2] / "docs" / "musterctl.md").read_text()
# What needs more than a daemon that answers, and where it is tested.
ELSEWHERE = {
    "cluster nodes": "tests/unit/supervisor/ctl/test_cluster_view.py",
    "cluster adopt": "tests/cluster/test_adopt.py",
    "not allowed": "tests/integration/test_control_access.py",
}
URLWATCH = """\
url: https://shop.example/kites
name: kites
---
url: https://tea.example/green
name: tea
---
command: ls -l
name: backups
"""


def examples() -> list[tuple[str, str]]:
    """Return each command of the document with what is printed below it."""
    found = []
    for block in re.findall(r"^```\n(\$ .*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, printed = _divided(part)
            if command.startswith("musterctl "):
                found.append((command.removeprefix("musterctl "), printed))
    return found


def _divided(part: str) -> tuple[str, str]:
    lines = part.split("\n")
    command = lines.pop(0)
    while command.endswith("\\"):
        command = command[:-1] + lines.pop(0).strip()
    return command, "\n".join(lines).strip("\n")


def is_elsewhere(command: str, printed: str) -> bool:
    return any(command.startswith(each) for each in ELSEWHERE) or "not allowed" in printed


EXAMPLES = [each for each in examples() if not is_elsewhere(*each)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the document has."""
    for name, text in re.findall(r"^\$ cat (\S+)\n(.*?)^\$ ", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / "urls.yaml").write_text(URLWATCH)
    return tmp_path


@pytest.mark.parametrize(("command", "printed"), EXAMPLES, ids=[each for each, _ in EXAMPLES])
def test_an_example_prints_what_the_document_shows(
    answering: Answering, folder: Path, command: str, printed: str
) -> None:
    words = [word for word in shlex.split(command) if word != "-f"]  # it would not end
    done = subprocess.run(
        [*MUSTERCTL, "-s", answering("support.document_answers"), *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "TZ": "UTC"},
    )
    assert done.returncode == code_of(printed), done.stdout
    if printed:
        assert comparable(done.stdout) == comparable(printed)


def code_of(printed: str) -> int:
    if "there is no command" in printed:
        return 2
    return 1 if ": refused:" in printed else 0


def comparable(text: str) -> str:
    """Return a text without what differs from run to run: moments, and our version."""
    moment = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "MOMENT", text)
    return re.sub(rf"0\.1\.0|{re.escape(__version__)}", "VERSION", moment).rstrip()


def test_the_document_has_examples_of_each_kind() -> None:
    assert len(EXAMPLES) > 15
    commands = {command.split()[0] for command, _ in EXAMPLES}
    assert commands > {"status", "breaker", "schedule", "memory", "task", "events", "import"}
    for each, place in ELSEWHERE.items():
        test = (Path(__file__).parents[2] / place).read_text()
        assert each in PAGE
        assert "musterctl.md" in test or each.split()[-1] in test, place
