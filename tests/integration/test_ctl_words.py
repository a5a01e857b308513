"""Arguments of musterctl that are not UTF-8 or in any case; and signals that do not kill."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import Jobs, Muster, Musters
from support.waiting import Waiting

COMMANDS = [
    *(["status"], ["submit"], ["submit", "jobs.echo", "a=1"], ["submit", "--json-args"], ["task"]),
    *(["signal", "CONT"], ["tail"], ["scale", "jobs"], ["events"], ["breaker", "open"], ["cancel"]),
    *(
        ["schedule", "run"],
        ["start"],
        ["drain"],
        ["dead"],
        ["retry"],
        ["purge"],
        ["cache", "clear"],
    ),
    *(["alerts", "test"], ["help"], []),
]


def run(daemon: Muster, *words: str | bytes) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket, *words]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=60, check=False
    )


def test_what_is_not_utf_8_is_a_usage_error_of_every_command(jobs: Jobs) -> None:
    daemon = jobs()
    for words in COMMANDS:
        done = run(daemon, *words, b"a\xffb")
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        assert "argument 'a\\xffb' is not valid UTF-8" in done.stderr, words
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("priority", ["HIGH", "High", "high"])
def test_a_priority_is_taken_in_any_case(jobs: Jobs, priority: str) -> None:
    daemon = jobs()
    done = run(daemon, "submit", "jobs.echo", "--priority", priority)
    assert done.returncode == 0, done.stderr
    assert "priority:" in (shown := run(daemon, "task", done.stdout.strip()).stdout)
    assert "high" in shown


def test_a_worker_tells_its_stacks_by_usr1_and_works_on(
    jobs: Jobs, waiting: Waiting, tmp_path: Path
) -> None:
    """The commands are those of docs/musterctl.md, for an idle worker and a busy one."""
    daemon = jobs(1)
    waiting("it is up", lambda: daemon.pool("jobs").running == 1)
    pid = daemon.worker("jobs/0").pid
    assert run(daemon, "signal", "USR1", "jobs/0").returncode == 0
    waiting("its stack", lambda: "most recent call first" in _said(daemon))
    tell = tmp_path / "told"
    task = daemon.client().submit("jobs.nap", {"seconds": 1, "tell": str(tell)})
    waiting("it runs", tell.exists)
    assert run(daemon, "signal", "USR1", "jobs/0").returncode == 0
    waiting("the handler", lambda: "in nap" in _said(daemon))
    assert task.result(60) == 0
    assert daemon.worker("jobs/0").pid == pid


def _said(daemon: Muster) -> str:
    return run(daemon, "tail", "-n", "99", "jobs/0").stdout


# The import starts a thread, so each worker imports it anew; the second import takes a while.
SLOW = """
import pathlib, threading, time
from musterd import Worker, task

threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
FOLDER = pathlib.Path(__file__).parent
if FOLDER.joinpath("loaded").exists():
    FOLDER.joinpath("begun").touch()
    while not FOLDER.joinpath("go on").exists():
        time.sleep(0.01)
FOLDER.joinpath("loaded").touch()

class Slow(Worker):
    @task
    def echo(self, ctx) -> None: ...
"""


def test_usr1_does_not_kill_a_worker_that_is_still_starting(
    muster: Musters, waiting: Waiting
) -> None:
    pool = {"worker": "slow:Slow", "size": 1, "start_timeout": "5m"}
    daemon = muster({"slow": pool}, start=False)
    daemon.folder.joinpath("slow.py").write_text(SLOW)
    daemon.start(wait=False)
    waiting("it imports its class", daemon.folder.joinpath("begun").exists)
    waiting("its process is known", lambda: daemon.worker("slow/0").pid)
    pid = daemon.worker("slow/0").pid
    assert run(daemon, "signal", "USR1", "slow/0").returncode == 0
    waiting("its stack", lambda: "slow.py" in run(daemon, "tail", "slow/0", "-n", "99").stdout)
    daemon.folder.joinpath("go on").touch()
    waiting("it is up", lambda: daemon.pool("slow").running == 1)
    assert daemon.worker("slow/0").pid == pid
