"""The manual pages and completions name everything there is, and are well formed."""

import shutil
import subprocess
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from musterd.supervisor.__main__ import main
from musterd.supervisor.config.schema import Config
from musterd.supervisor.ctl.app import cli
from musterd.supervisor.service import manpages
from musterd.supervisor.service.install import COMPLETIONS, completion

PAGES = {page.file: page for page in manpages.pages(main, cli)}


def unescaped(name: str) -> str:
    return PAGES[name].text.replace("\\-", "-")


@pytest.mark.parametrize(("page", "group"), [("musterd.8", main), ("musterctl.1", cli)])
def test_every_command_and_option_has_its_place(page: str, group: click.Group) -> None:
    text = unescaped(page)
    assert len(group.commands) > 5
    for name, command in group.commands.items():
        _, found, rest = text.partition(f'.SS "{name}')
        assert found, name
        part = rest.partition(".SS")[0]
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.opts[-1] in part, (name, parameter.opts)


def test_every_section_of_the_configuration_is_named_with_its_keys() -> None:
    text = unescaped("musterd.toml.5")
    for field in msgspec.structs.fields(Config):
        if field.encode_name == "target_defaults":  # has the keys of targets.NAME
            assert field.encode_name in text
            continue
        assert f'.SS "{field.encode_name}' in text, field.encode_name
    for key in ("supervisor.drain_timeout", "pools.NAME.worker", "memory.critical"):
        assert f".B {key}\n" in text


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
@pytest.mark.parametrize("name", PAGES)
def test_man_has_nothing_to_complain_about(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(PAGES[name].text)
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", "MANROFFSEQ": "", "MANWIDTH": "80"},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", COMPLETIONS)
@pytest.mark.parametrize("command", ["musterd", "musterctl"])
def test_the_completion_of_a_shell_asks_the_command(command: str, shell: str) -> None:
    script = completion(command, shell)
    assert f"_{command.upper()}_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        checked = subprocess.run(
            [shell, "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(("command", "group"), [("musterd", main), ("musterctl", cli)])
def test_what_is_completed_are_the_commands_there_are(command: str, group: click.Group) -> None:
    done = CliRunner().invoke(
        group,
        prog_name=command,
        env={
            f"_{command.upper()}_COMPLETE": "bash_complete",
            "COMP_WORDS": f"{command} ",
            "COMP_CWORD": "1",
        },
    )
    found = {line.partition(",")[2] for line in done.output.splitlines()}
    assert found == set(group.commands)
