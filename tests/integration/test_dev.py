"""`musterd new` and `musterd dev` as a newcomer uses them, in a terminal of 80 columns."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.daemon import is_gone
from support.terminal import Terminal

BIN = Path(sys.executable).parent
MUSTERD = str(BIN / "musterd")
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
ROWS = 150  # nothing scrolls away

BOT = """
from musterd import Worker, task

from words import GREETING


class Bot(Worker):
    @task
    def hello(self, ctx, name: str) -> str:
        return f"{GREETING} {name}"

    @task(max_retries=1)
    def fail(self, ctx, gate: str) -> None:
        import pathlib
        import time

        while ctx.attempt > 1 and not pathlib.Path(gate).exists():
            time.sleep(0.01)
        raise KeyError("price")

    @task
    def nap(self, ctx, seconds: float) -> None:
        import time

        print("napping", flush=True)
        time.sleep(seconds)
"""
CONFIGURATION = '[pools.bot]\nworker = "bot:Bot"\n'


class Session:
    """A project, and the terminals in which its commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[Terminal] = []
        self.seen: dict[int, psutil.Process] = {}

    def dev(self, *arguments: str, columns: int = 80, **environ: str) -> Terminal:
        made = Terminal(
            [MUSTERD, "dev", *arguments],
            cwd=self.folder,
            environ={"PATH": PATH, "XDG_RUNTIME_DIR": "", **environ},
            columns=columns,
            rows=ROWS,
        )
        self.opened.append(made)
        return made

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        """Run what is typed in the folder of the project."""
        return subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env={**os.environ, "PATH": PATH},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def submit(self, task: str, *arguments: str) -> str:
        done = self.run(f"musterctl submit {task} {' '.join(arguments)} --wait")
        return done.stdout.strip() or done.stderr

    def note(self, terminal: Terminal) -> list[psutil.Process]:
        """Remember the processes that are below this terminal; return those of the daemon."""
        dev = psutil.Process(terminal.process.pid)
        found = dev.children(recursive=True)
        self.seen |= {process.pid: process for process in (dev, *found)}
        return found

    def write(self, name: str, text: str) -> None:
        """Save a file as editors do: beside it first."""
        new = self.folder / f".{name}.swp"
        new.write_text(text)
        new.rename(self.folder / name)

    def all_gone(self) -> bool:
        return all(is_gone(process) for process in self.seen.values())


@pytest.fixture
def session(short_folder: Path) -> Iterator[Session]:
    """A project with a worker that greets, in a path with a space; nothing may be left behind."""
    folder = short_folder / "my bots"
    folder.mkdir()
    (folder / "bot.py").write_text(BOT)
    (folder / "words.py").write_text('GREETING = "hello"\n')
    (folder / "musterd.toml").write_text(CONFIGURATION)
    made = Session(folder)
    yield made
    for each in made.opened:
        each.close()


def has(text: str, times: int = 1) -> Callable[[list[str]], bool]:
    """Tell whether a text is there, wherever its lines are broken."""
    return lambda lines: " ".join(" ".join(lines).split()).count(text) >= times


def up(terminal: Terminal) -> str:
    """Wait until the dashboard is up; return its address."""
    lines = terminal.wait("the dashboard is up", has("dashboard http"))
    return next(line.split()[-1] for line in lines if line.split()[:1] == ["dashboard"])


def stop(session: Session, terminal: Terminal, waiting: Any) -> None:
    """One Ctrl-C ends everything, in phases."""
    session.note(terminal)
    terminal.press("\x03")
    assert terminal.exit_code() == 0
    lines = terminal.lines()
    phases = ("intake", "drain", "stop", "cleanup", "close", "over")
    found = [line.split()[2] for line in lines if " shutdown " in line]
    assert found == list(phases)
    waiting("all processes are gone", session.all_gone)
    assert not list(session.folder.glob(".musterd/run/*.sock"))
    assert not list(session.folder.glob(".musterd/state/tmp/*"))


def test_a_project_is_run_and_what_is_saved_is_reloaded(session, waiting):
    terminal = session.dev()
    address = up(terminal)
    shown = terminal.lines()
    steer = next(line.split(maxsplit=2)[2] for line in shown if line.startswith("  steer it"))
    status = session.run(steer)
    assert (status.returncode, "bot" in status.stdout) == (0, True), status.stderr
    assert session.submit("bot.hello", "name=you") == "hello you"

    with urllib.request.urlopen(address.partition("#")[0], timeout=30) as page:
        assert page.status == 200
    token = address.partition("#token=")[2]
    request = urllib.request.Request(
        address.partition("#")[0] + "api/token",
        data=b"{}",
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 204

    session.write("words.py", 'GREETING = "good morning"\n')
    terminal.wait("it is reloaded", has("words.py saved: reloading bot"))
    terminal.wait("it was reloaded", has("the workers of a pool were replaced bot"))
    assert session.submit("bot.hello", "name=you") == "good morning you"

    session.write("words.py", 'GREETING = "good morning"\nGREETINGS = [\n')
    terminal.wait("it says what is wrong", has("at words.py:2;"))
    lines = terminal.wait("it says what to do", has("bot goes on as before: mend it"))
    said = [line.partition(" | ")[2] for line in lines if " bot | " in line]
    assert said[0].startswith("Traceback")
    assert '  File "bot.py", line 4, in <module>' in said
    assert '  File "words.py", line 2' in said
    assert said[-1] == "SyntaxError: '[' was never closed"
    assert "importlib" not in "".join(said)
    assert session.submit("bot.hello", "name=you") == "good morning you"

    session.write("words.py", 'GREETING = "good evening"\n')
    terminal.wait("it is mended", has("the workers of a pool were replaced bot", 2))
    assert session.submit("bot.hello", "name=you") == "good evening you"
    assert [line for line in terminal.said() if len(line) > 80] == []
    stop(session, terminal, waiting)


ASK = """
from musterd import Client

with Client() as musterd:
    print(musterd.submit("bot.hello", {"name": "you"}).result(timeout=60))
"""


def test_programs_and_musterctl_find_it_anywhere_in_the_project(session, waiting):
    terminal = session.dev()
    up(terminal)
    below = session.folder / "tools" / "deep"
    below.mkdir(parents=True)
    (below / "ask.py").write_text(ASK)
    status = session.run("cd tools/deep && musterctl status bot/0")
    assert "bot/0" in status.stdout, status.stderr
    asked = session.run(f"cd tools/deep && {sys.executable} ask.py")
    assert asked.stdout == "hello you\n", asked.stderr
    stop(session, terminal, waiting)
    nobody = session.run("musterctl -s nobody.sock status")
    assert "change into the folder of `musterd dev`" in nobody.stderr
    elsewhere = session.run("musterctl --json status")
    assert ".musterd" not in elsewhere.stdout + elsewhere.stderr, "it runs no more"


def test_the_first_failure_of_a_task_shows_its_traceback(session, waiting):
    terminal = session.dev()
    up(terminal)
    session.run(f"musterctl submit bot.fail 'gate={session.folder / 'gate'}'")
    shown = has('Traceback (most recent call last): File "bot.py", line')
    lines = terminal.wait("the first failure is shown", shown)
    assert not has("task is dead")(lines), "another attempt runs"
    (session.folder / "gate").touch()
    terminal.wait("the last failure is shown", has("task is dead: it is not retried"))
    stop(session, terminal, waiting)


def test_the_configuration_is_reloaded_too_and_other_files_are_told_apart(session, waiting):
    terminal = session.dev()
    up(terminal)
    session.write("musterd.toml", CONFIGURATION + "size = 2\n")
    terminal.wait("it is scaled", has("pools.bot.size: 1 -> 2 (scales)"))
    session.write("musterd.toml", CONFIGURATION + "sizes = 2\n")
    terminal.wait("it is refused", has("unknown key: did you mean 'size'?"))
    session.write("musterd.toml", CONFIGURATION + "size = 1\n")
    terminal.wait("it is scaled back", has("pools.bot.size: 2 -> 1 (scales)"))
    session.write("notes.py", "print('nobody imports this')\n")
    terminal.wait("that is said", has("notes.py saved: no pool has imported it"))
    (session.folder / "deep").mkdir()
    session.write("words.py", "from deep.words import GREETING\n")
    terminal.wait("it is not there yet", has("No module named 'deep.words'"))
    (session.folder / "deep" / "words.py").write_text('GREETING = "moin"\n')
    terminal.wait("a new folder is watched", has("the workers of a pool were replaced bot"))
    assert session.submit("bot.hello", "name=you") == "moin you"
    stop(session, terminal, waiting)


def test_a_project_that_cannot_be_imported_starts_when_it_is_mended(session, waiting):
    session.write("words.py", "import nothing_like_that\n")
    terminal = session.dev()
    terminal.wait(
        "it says what is wrong", has("No module named 'nothing_like_that', at words.py:1")
    )
    terminal.wait("and what to do", has("bot starts when that is mended and saved"))
    session.write("words.py", 'GREETING = "hello"\n')
    terminal.wait("it starts", has("worker is ready bot/0"))
    assert session.submit("bot.hello", "name=you") == "hello you"
    stop(session, terminal, waiting)


def test_nothing_is_left_when_it_is_killed(session, waiting):
    terminal = session.dev()
    up(terminal)
    daemon = session.note(terminal)
    assert len(daemon) >= 5  # supervisor, web, fork server, init, worker
    os.kill(terminal.process.pid, signal.SIGKILL)
    waiting("all processes are gone", session.all_gone)
    assert not list(session.folder.glob(".musterd/run/*.sock"))
    again = session.dev()  # nothing is in its way
    up(again)
    stop(session, again, waiting)


def test_a_second_and_a_third_ctrl_c_do_not_wait(session, waiting):
    terminal = session.dev()
    up(terminal)
    session.run("musterctl submit bot.nap seconds=600")
    terminal.wait("it naps", has("bot/0 | napping"))
    session.note(terminal)
    terminal.press("\x03")
    terminal.wait("it drains", has("shutdown drain"))
    assert terminal.process.poll() is None
    terminal.press("\x03")
    assert terminal.exit_code() == 0
    waiting("all processes are gone", session.all_gone)


def test_a_terminal_that_is_closed_ends_it(session, waiting):
    terminal = session.dev()
    up(terminal)
    session.note(terminal)
    terminal.hang_up()
    waiting("all processes are gone", session.all_gone)
    assert not list(session.folder.glob(".musterd/run/*.sock"))


def test_mistakes_at_the_start_are_told(session, waiting):
    session.write("musterd.toml", "[pools.bot]\nworker = 3\n")
    terminal = session.dev()
    assert terminal.exit_code() == 78
    assert has("key 'pools.bot.worker': value 3")(terminal.lines())
    session.write("musterd.toml", CONFIGURATION)
    (session.folder / "elsewhere").mkdir()
    nowhere = subprocess.run(
        [MUSTERD, "dev"],
        cwd=session.folder / "elsewhere",
        capture_output=True,
        text=True,
        check=False,
    )
    assert nowhere.returncode == 1
    assert "`musterd new NAME`" in nowhere.stderr
    first = session.dev("-c", "../my bots/musterd.toml")
    up(first)
    second = session.dev()
    assert second.exit_code() == 69
    assert has("another musterd (pid")(second.lines())
    stop(session, first, waiting)


def test_without_the_extra_it_runs_and_says_what_is_missing(session, waiting):
    (session.folder / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name not in ('watchfiles', 'uvicorn'):\n"
        "            return super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
    )
    terminal = session.dev(PYTHONPATH=str(session.folder))
    terminal.wait("it is up", has("musterd is ready"))
    lines = terminal.lines()
    assert has("dashboard none: pip install 'musterd[dev]'")(lines)
    assert has("reload nothing is reloaded when saved: pip install 'musterd[dev]'")(lines)
    stop(session, terminal, waiting)


# -- a new project ------------------------------------------------------------------------------


def test_a_new_project_passes_its_own_checks_and_runs_as_it_says(short_folder, waiting):
    parent = short_folder / "my projects"
    parent.mkdir()
    terminal = Terminal(
        [MUSTERD, "new", "mybot"], cwd=parent, environ={"PATH": PATH}, rows=40, columns=80
    )
    assert terminal.exit_code() == 0
    lines = terminal.lines()
    assert [line for line in terminal.said() if len(line) > 80] == []
    terminal.close()
    folder = parent / "mybot"
    typed = [line.strip() for line in lines if line.startswith("  ")]
    assert [line for line in typed if line.startswith(("cd", "musterd ", "pytest"))] == [
        "cd mybot",
        "musterd dev",
        "pytest",
    ]
    session = Session(folder)
    for command in ("pytest -q", "musterd check-config -c musterd.toml", "mypy --strict ."):
        done = session.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    for command in ("ruff check", "ruff format --check"):
        done = session.run(f"{command} --isolated .")
        assert done.returncode == 0, done.stdout
    again = subprocess.run(
        [MUSTERD, "new", "mybot"], cwd=parent, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert "exists" in again.stderr

    running = session.dev()
    try:
        up(running)
        submit = "\n".join(lines).partition("musterctl submit")[2].partition("\n  pytest")[0]
        page = f"http://127.0.0.1:{_port_of_a_page(session)}/"
        done = session.run(f"musterctl submit{submit.replace('https://example.com/', page)}")
        assert (done.returncode, "Tea time" in done.stdout) == (0, True), done.stderr
        stop(session, running, waiting)
    finally:
        running.close()


def _port_of_a_page(session: Session) -> int:
    """Serve a page with a headline until the test ends."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<h1>Tea time</h1>")

        def log_message(self, *_args: object) -> None: ...

    site = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    return site.server_port


def test_the_template_names_what_there_is() -> None:
    readme = (Path(__file__).parents[2] / "supervisor/dev/template/README.md.txt").read_text()
    from musterd.supervisor.__main__ import main as musterd
    from musterd.supervisor.ctl.app import cli as musterctl

    for name, group in (("musterd", musterd), ("musterctl", musterctl)):
        for command in re.findall(rf"^{name} (?:-s \S+ )?([a-z-]+)", readme, re.MULTILINE):
            assert command in group.commands, command
