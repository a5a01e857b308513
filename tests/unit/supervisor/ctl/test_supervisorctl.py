"""Commands that people who come from supervisorctl type by habit."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from musterd.supervisor import ctl
from musterd.supervisor.ctl import app, supervisorctl
from musterd.supervisor.ctl.app import DONE, UNREACHABLE, USAGE, cli

ROOT = Path(__file__).resolve().parents[4]
# All commands of supervisorctl.
THEIRS = (
    *("add", "avail", "clear", "exit", "fg", "help", "maintail", "open", "pid", "quit", "reload"),
    *("remove", "reread", "restart", "shutdown", "signal", "start", "status", "stop", "tail"),
    *("update", "version"),
)
# Modules that load slowly and are not needed to ask the daemon something.
HEAVY = (
    *("asyncio", "cronsim", "curses", "zmq", "rich", "psutil", "sqlite3", "aiohttp", "lxml"),
    *("selectolax", "playwright", "logging", "multiprocessing", "concurrent.futures", "readline"),
    *("subprocess", "ssl", "unittest", "yaml", "tomllib", "email", "http.client"),
    *("musterd.supervisor.loop.daemon", "musterd.supervisor.config.load", "musterd.ipc.client"),
    *("musterd.workers", "musterd.supervisor.core.fleet", "hashlib", "pathlib"),
)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("parser", "parser"),
        ("parser/0", "parser/0"),
        ("all", "all"),
        ("*/0", "*/0"),
        ("parser:*", "parser"),
        ("parser:", "parser"),
        ("parser:0", "parser/0"),
        ("parser:parser_00", "parser/0"),
        ("parser:parser_012", "parser/12"),
        ("pa-r_2:pa-r_2_3", "pa-r_2/3"),
        ("parser:other", "parser:other"),  # the daemon says that there is no such name
    ],
)
def test_names_of_supervisord_mean_pools_and_slots(word: str, name: str) -> None:
    assert supervisorctl.name_of(word) == name


@pytest.mark.parametrize("command", THEIRS)
def test_every_command_of_supervisorctl_is_there_or_says_what_to_type(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"signal": ["HUP", "parser"], "tail": ["parser:*", "stderr"], "update": ["all"]}
    names = ["parser:*"] if command in ("start", "stop", "restart", "fg", "clear", "add") else []
    typed = [command, *words.get(command, names)]
    code = ctl.main(["-s", str(tmp_path / "nobody.sock"), *typed])
    said = capsys.readouterr().err
    assert "no such option" not in said.lower()
    if command in ("quit", "exit", "help"):
        assert (code, said) == (DONE, "")
    elif command in cli.commands:  # understood: musterctl tried to ask the daemon
        assert code in (UNREACHABLE, 4)
        assert "cannot reach the daemon" in said
    else:
        assert code == USAGE
        (ours, *more) = re.findall(r"musterctl (?:-s SOCKET )?([a-zA-Z]+)", said)
        for each in (ours, *more):
            assert each in cli.commands or each == "COMMAND", said


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        (["tail", "-100", "parser:0"], "type musterctl tail -n 100 parser/0"),
        (["fg", "parser:0"], "type musterctl tail -f parser/0"),
        (["clear", "all"], "type musterctl tail -f -n 0 all"),
        (["update", "parser"], "type musterctl update"),
        (["add", "parser"], "write [pools.parser] into the configuration"),
        (["maintail", "-f"], "journalctl -u musterd -f"),
    ],
)
def test_what_there_is_not_says_what_to_type(
    typed: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(typed) == USAGE
    assert instead in capsys.readouterr().err


def test_help_shows_the_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["help", "stop"]) == DONE
    assert "Let running tasks finish" in capsys.readouterr().out
    assert ctl.main(["?"]) == DONE
    assert "Control a running musterd." in capsys.readouterr().out


def test_the_document_tells_what_becomes_of_each_command_of_supervisorctl() -> None:
    page = (ROOT / "docs" / "musterctl.md").read_text()
    table = page.partition("## Coming from supervisorctl")[2].partition("\n## ")[0]
    rows = re.findall(r"^- (`.+?`):", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(THEIRS)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["version"], "daemon"),
        (["status"], "fleet"),
        (["start", "all"], "fleet"),
        (["tasks"], "tasks"),
        (["breaker"], "breakers"),
    ],
)
def test_a_command_loads_nothing_that_takes_long(
    words: list[str], module: str, tmp_path: Path
) -> None:
    """The time to load modules depends on the machine; which modules are loaded does not."""
    script = (
        "import sys\n"
        "from musterd.supervisor.ctl import main\n"
        "main(sys.argv[1:])\n"
        "print(*sys.modules, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "-s", str(tmp_path / "nobody.sock"), *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(done.stdout.split())
    commands = {f"musterd.supervisor.ctl.{name}" for name in set(app._MODULE_OF.values())}
    assert loaded & commands == {f"musterd.supervisor.ctl.{module}"}
    assert not loaded & set(HEAVY)


def test_every_command_is_in_its_module() -> None:
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
    assert sorted(cli.commands) == sorted(app._MODULE_OF)
