"""Tab in the shell of musterctl, and in bash, zsh and fish with the scripts that are installed.

The names are those of `support.long_names`, behind a real control.sock; some tests ask a daemon.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from musterd.supervisor.service.install import completion
from support import long_names
from support.daemon import Jobs
from support.terminal import MUSTERCTL, SECONDS, CtlTerminal, Terminal
from support.waiting import Waiting

BIN = Path(sys.executable).parent
FAILED = long_names.task_id(3)
RUNNING = long_names.task_id(0)
KITES = "nightly-import-of-the-whole-warehouse"


Answering = Callable[[str], str]


@pytest.fixture(scope="module")
def socket_path(answering: Answering) -> str:
    return answering("support.long_names")


def offered(socket_path: str, words: str) -> list[str]:
    """Return what musterctl offers for the last word; the way is that of scripts for bash."""
    done = subprocess.run(
        MUSTERCTL,
        env={
            **os.environ,
            "_MUSTERCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - (not words.endswith(" "))),
            "MUSTERD_CONTROL": socket_path,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("musterctl schedule pause night", [*long_names.SCHEDULES[1:3]]),
        ("musterctl schedule add night", []),
        ("musterctl history k", ["kites"]),
        ("musterctl changes k", ["kites"]),
        ("musterctl breaker close shop", ["shop.example"]),
        ("musterctl sessions forget acc", ["account-of-the-aurora-shop-in-the-second-region"]),
        ("musterctl alerts test m", ["mail"]),
        ("musterctl submit parser.e", ["parser.extract", f"parser.{long_names.METHODS[1]}"]),
        ("musterctl schedule add x --task browser.f", ["browser.fetch"]),
        ("musterctl submit a.b --session sh", ["shop"]),
        ("musterctl submit a.b --target shop", ["shop.example"]),
        ("musterctl tasks --pool brow", ["browser"]),
        ("musterctl reload brow", ["browser"]),
        ("musterctl scale brow", ["browser"]),
        ("musterctl stop browser/", ["browser/0", "browser/1", "browser/2"]),
        ("musterctl signal US", ["USR1", "USR2"]),
        ("musterctl signal USR1 browser/0", ["browser/0"]),
        (f"musterctl task {FAILED}", [FAILED]),
        (f"musterctl task {RUNNING}", [RUNNING]),
        (f"musterctl retry {FAILED}", [FAILED]),
        (f"musterctl retry {RUNNING}", []),
        (f"musterctl purge {FAILED}", [FAILED]),
        (f"musterctl cancel {RUNNING}", [RUNNING]),
        (f"musterctl cancel {FAILED}", []),
        ("musterctl --json --no-block breaker close shop", ["shop.example"]),
        ("musterctl sta", ["start", "status"]),
        ("musterctl events --lev", ["--level"]),
    ],
)
def test_every_name_is_offered_where_it_is_typed(
    socket_path: str, words: str, found: list[str]
) -> None:
    assert offered(socket_path, words) == found


def test_recent_ids_are_offered_the_newest_first(socket_path: str) -> None:
    ids = offered(socket_path, "musterctl task ")
    assert ids == [task.id for task in long_names.tasks().tasks]


def test_nobody_answers_and_nothing_is_offered(tmp_path: Path) -> None:
    assert offered(str(tmp_path / "nobody.sock"), "musterctl schedule pause ") == []


def test_a_daemon_offers_its_tasks_and_their_ids(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(1, schedule__hourly={"task": "jobs.echo", "every": "1h"})
    waiting("its class is loaded", lambda: daemon.pool("jobs").tasks)
    assert offered(daemon.control_socket, "musterctl submit jobs.f") == ["jobs.fail", "jobs.flaky"]
    assert offered(daemon.control_socket, "musterctl schedule run h") == ["hourly"]
    assert offered(daemon.control_socket, "musterctl schedule edit h") == [], "it is in a file"
    with daemon.client() as client:
        task = client.submit("jobs.fail", {"text": "no"})
        waiting("it has failed", task.done)
    assert offered(daemon.control_socket, "musterctl retry ") == [task.id]
    assert offered(daemon.control_socket, "musterctl cancel ") == []


# -- shells -----------------------------------------------------------------------------------


@pytest.fixture
def typed(socket_path: str, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Run a shell that completes musterctl: typed("bash")."""
    opened: list[Terminal] = []

    def start(shell: str) -> Terminal:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        script = tmp_path / f"musterctl.{shell}"
        script.write_text(completion("musterctl", shell))
        program = {
            "bash": ["bash", "--norc", "--noprofile", "-i"],
            "zsh": ["zsh", "-f", "-i"],
        }[shell]
        made = Terminal(
            program,
            columns=160,
            environ={
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "MUSTERD_CONTROL": socket_path,
                "PS1": "> ",
                "LC_ALL": "C.UTF-8",
            },
        )
        opened.append(made)
        made.wait("it asks", lambda lines: lines[0].startswith(">"))
        if shell == "zsh":
            made.press(f"autoload -Uz compinit && compinit -u -d {tmp_path}/dump\n")
        made.press(f"source {script} && clear\n")
        made.wait("it is read", lambda lines: lines[0].startswith(">") and not any(lines[1:]))
        return made

    yield start
    for each in opened:
        each.close()


CASES = [
    ("musterctl schedule pause ki", "musterctl schedule pause kites"),
    ("musterctl schedule pause це", r"musterctl schedule pause цены\ на\ воздушных\ змеев"),
    ("musterctl schedule pause 'це", "musterctl schedule pause 'цены на воздушных змеев'"),
    (
        "musterctl schedule pause aurora:https://www",
        r"musterctl schedule pause aurora:https://www.aurora-kites-and-sails.example/kites/red/"
        r"large\?size=10\&colour=crimson",
    ),
    ("musterctl breaker close sho", "musterctl breaker close shop.example"),
    (f"musterctl retry {FAILED[:-1]}3", f"musterctl retry {FAILED}"),
    ("musterctl submit parser.f", "musterctl submit parser.fetch"),
]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_names(typed: Callable[..., Terminal], shell: str) -> None:
    screen = typed(shell)
    for begun, whole in CASES:
        screen.press(f"{begun}\t")
        screen.wait(whole, lambda lines, whole=whole: same(lines[0], f"> {whole}"))
        screen.press("\x15\x0c")  # a new line on a clear screen
        screen.wait("it asks", lambda lines: lines[0].strip() == ">" and not any(lines[1:]))


def same(line: str, whole: str) -> bool:
    """Shells differ in what they escape; pyte has an empty cell behind a wide character."""
    return line.replace("\\=", "=").replace("\\:", ":").rstrip() == whole


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_names_and_says_what_ids_are(socket_path: str, tmp_path: Path) -> None:
    script = tmp_path / "musterctl.fish"
    script.write_text(completion("musterctl", "fish"))

    def completed(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {script}; complete -C $argv[1]", line],
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
            env={
                **os.environ,
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "MUSTERD_CONTROL": socket_path,
                "HOME": str(tmp_path),
            },
        )
        return done.stdout.splitlines()

    assert [line.split("\t")[0] for line in completed("musterctl schedule pause це")] == [
        "цены на воздушных змеев"
    ]
    assert completed("musterctl submit parser.f") == ["parser.fetch"]
    (line,) = completed(f"musterctl retry {FAILED}")
    assert line.startswith(f"{FAILED}\taurora-price-watch-parser-night.извлечь_цены failed ")


def test_the_shell_of_musterctl_completes_names(socket_path: str, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "sites.csv").touch()
    shell = CtlTerminal(tmp_path, "-s", socket_path, columns=160)
    try:
        shell.wait("it asks", lambda lines: any("musterctl>" in line for line in lines))
        for begun, whole in [
            *((words.removeprefix("musterctl "), to) for words, to in CASES if ":" not in words),
            (f"import {tmp_path}/a", rf"musterctl import {tmp_path}/a\ folder/"),
            (f"import '{tmp_path}/a folder/s", f"musterctl import '{tmp_path}/a folder/sites.csv'"),
        ]:
            shell.press(f"{begun}\t")
            wanted = f"musterctl> {whole.removeprefix('musterctl ')}"
            shell.wait(wanted, lambda lines, wanted=wanted: last(lines) == wanted)
            shell.press("\x15")
            shell.wait("the line is empty", lambda lines: last(lines) == "musterctl>")
    finally:
        shell.close()


def last(lines: list[str]) -> str:
    return [line for line in lines if line][-1].rstrip()
