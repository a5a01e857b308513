"""musterctl in a terminal, as a person sees it: `top` and the shell."""

import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Muster
from support.terminal import LEAVES, SECONDS
from support.terminal import CtlTerminal as Terminal


@pytest.fixture
def ctl(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Run musterctl in a terminal: ctl(daemon, "command", ...)."""
    opened: list[Terminal] = []

    def make(daemon: Muster, *arguments: str) -> Terminal:
        opened.append(Terminal(tmp_path, "-s", daemon.control_socket, *arguments))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def top(ctl: Callable[..., Terminal]) -> Callable[..., Terminal]:
    return lambda daemon, *arguments: ctl(daemon, "top", "-d", "0.2", *arguments)


def has(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


def test_the_whole_fleet_is_on_one_screen_and_lives(jobs, top, tmp_path):
    daemon = jobs(size=3)
    screen = top(daemon)
    lines = screen.wait("it is shown", has("ALL OK"))
    assert [line.split()[0] for line in lines if line.startswith("jobs/")] == [
        *("jobs/0", "jobs/1", "jobs/2")
    ]
    assert lines[-1].startswith(" q  quit")
    with daemon.client() as client:
        nap = client.submit("jobs.nap", {"seconds": 600, "tell": str(tmp_path / "began")})
        screen.wait("it is busy", has("BUSY"))
        screen.wait("and with what", has("nap "))
        assert daemon.ctl("pause", "jobs").returncode == 0
        screen.wait("that is told first", lambda lines: "PROBLEM" in lines[0])
        screen.wait("and what it is", has("jobs is paused: musterctl resume jobs"))
        nap.cancel()
    screen.press("q")
    assert screen.ended() == 0


@pytest.mark.parametrize(
    "leave",
    [
        lambda screen: screen.press("\x03"),
        lambda screen: screen.process.send_signal(signal.SIGTERM),
        lambda screen: screen.process.send_signal(signal.SIGHUP),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_the_terminal_is_as_before_however_it_ends(jobs, top, leave):
    screen = top(jobs(size=1))
    screen.wait("it is shown", has("ALL OK"))
    leave(screen)
    assert screen.ended() == 0


def test_it_can_be_suspended_and_goes_on(jobs, top, waiting):
    screen = top(jobs(size=1))
    screen.wait("it is shown", has("ALL OK"))
    screen.press("\x1a")

    def stopped() -> bool:
        screen.read()
        with open(f"/proc/{screen.process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"

    waiting("it is stopped", stopped)
    assert screen.written.rindex(LEAVES) > screen.written.rindex(b"\x1b[?1049h")
    assert termios.tcgetattr(screen.theirs) == screen.before
    before = len(screen.written)
    screen.process.send_signal(signal.SIGCONT)
    screen.wait("it goes on", lambda _: b"ALL OK" in screen.written[before:])
    screen.press("q")
    assert screen.ended() == 0


def test_a_changed_size_and_keys_are_heeded_at_once(jobs, top):
    screen = top(jobs(size=30), "-d", "3600")
    lines = screen.wait("it is shown", has("more workers"))
    screen.press("s")
    screen.wait("another order", has("sort: cpu"))
    screen.press("\x1b[B" * 40)
    screen.wait("the end of the list", lambda lines: not has(lines[9].split()[0])(lines[10:11]))
    screen.resize(120, 50)

    def all_of_them(lines: list[str]) -> bool:
        screen.process.send_signal(signal.SIGWINCH)  # repeated, in case it was busy with the keys
        return sum(line.startswith("jobs/") for line in lines) == 30

    screen.wait("all of them", all_of_them)
    assert lines[-1].startswith(" q  quit")
    screen.press("q")
    assert screen.ended() == 0


def test_a_worker_is_found_and_restarted(jobs, top, waiting):
    daemon = jobs(size=3)
    before = daemon.worker("jobs/1").pid
    screen = top(daemon)
    screen.wait("it is shown", has("ALL OK"))
    screen.press("/s/1\r")
    screen.wait("the others are hidden", has("2 filtered out"))
    screen.press("j")
    screen.wait("it is chosen", has("restart jobs/1"))
    screen.press("r")
    screen.wait("it is asked for", has("restart jobs/1 after its task?"))
    screen.press("y")
    waiting("another is in its place", lambda: daemon.worker("jobs/1").pid not in (0, before))
    screen.wait("it is seen", has(f" {daemon.worker('jobs/1').pid} "))
    screen.press("\x1b")
    screen.wait("all are shown again", has("jobs/2"))
    screen.press("q")
    assert screen.ended() == 0


def test_a_restart_that_is_refused_says_why(jobs, top):
    daemon = jobs(size=1)
    screen = top(daemon, "-d", "3600")
    screen.wait("it is shown", has("ALL OK"))
    assert daemon.stop() == 0
    screen.press("jry")
    screen.wait("it is said", lambda lines: "cannot reach the daemon" in lines[-1])
    screen.press("j")
    screen.wait("until the next key", lambda lines: lines[-1].startswith(" q  quit"))
    screen.press("q")
    assert screen.ended() == 0


def test_what_failed_and_what_is_due_are_on_the_screen(jobs, top):
    daemon = jobs(size=1, schedule__hourly={"task": "jobs.echo", "every": "1h"})
    screen = top(daemon)
    lines = screen.wait("it is shown", has("schedule hourly in "))
    assert not has("last")(lines), "it has not run yet"
    with daemon.client() as client:
        task = client.submit("jobs.fail", {"text": "no price"}, max_retries=0)
        screen.wait("it is there with its error", has("no price"))
        screen.resize(110, 30)
        screen.wait("where there is room, it has its id", has(f"{task.id} "))
    screen.press("q")
    assert screen.ended() == 0


def test_a_daemon_that_goes_away_and_comes_back_is_shown_as_such(jobs, top):
    daemon = jobs(size=1)
    screen = top(daemon)
    screen.wait("it is shown", has("ALL OK"))
    assert daemon.stop() == 0
    screen.wait("it is gone", has("cannot reach the daemon"))
    daemon.start()
    screen.wait("it is back", has("ALL OK"))
    screen.press("q")
    assert screen.ended() == 0


def test_a_status_that_is_watched_follows_the_fleet_over_a_restart(jobs, ctl):
    daemon = jobs(size=1)
    screen = ctl(daemon, "status", "--watch")
    screen.wait("it is shown", has("jobs/0  RUNNING"))
    assert daemon.ctl("scale", "jobs", "2").returncode == 0
    lines = screen.wait("the new worker is there", has("jobs/1  RUNNING"))
    assert sum(line.startswith("jobs/0") for line in lines) == 1, "the old one is gone"
    daemon.kill()
    screen.wait("it is said that nobody answers", has("cannot reach the daemon"))
    daemon.start()
    screen.wait("it is shown again", has("jobs/0  RUNNING"))
    screen.press("\x03")
    assert screen.process.wait(SECONDS) == 0


def test_a_status_that_is_watched_is_a_line_of_json_each_time(jobs):
    daemon = jobs(size=1)
    command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
    with subprocess.Popen(
        [*command, "--json", "status", "-w"], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        seen = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.stdout.close()
        assert watching.wait(SECONDS) == 0, "it ends when nobody reads it any more"
    assert [each["pid"] for each in seen] == [daemon.pid] * 2


def test_without_a_terminal_it_prints_once(jobs):
    daemon = jobs(size=1)
    done = daemon.ctl("top")
    assert done.returncode == 0
    assert done.stdout.startswith(" ALL OK   musterd ")
    assert "jobs/0" in done.stdout
    assert "\x1b" not in done.stdout
    assert "quit" not in done.stdout
    assert '"fleet"' in daemon.ctl("--json", "top").stdout


def test_without_a_daemon_it_fails_like_every_command(top, short_folder):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "musterd.supervisor.ctl",
            "-s",
            str(short_folder / "no.sock"),
            "top",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 7
    assert "cannot reach the daemon" in done.stderr


# -- the shell --------------------------------------------------------------------------------


def test_commands_are_taken_one_after_the_other(jobs, ctl):
    daemon = jobs(size=2)
    shell = ctl(daemon)
    shell.wait("it asks", has("musterctl>"))
    shell.press("pid jobs/1\n")
    shell.wait("the answer", has(str(daemon.worker("jobs/1").pid)))
    shell.press("# nothing\n\nstart nosuch\n")
    shell.wait("an error, and it goes on", has("no such name: 'nosuch'"))
    shell.press("pause 'jobs\n")
    shell.wait("a quotation is not closed", has("No closing quotation"))
    shell.press("musterctl help pause\n")
    shell.wait("help", has("Dispatch no more tasks"))
    shell.press("quit\n")
    shell.wait("it ends", lambda _: shell.process.poll() is not None)
    assert shell.process.returncode == 0, "help was the last command"


def test_commands_and_names_are_completed(jobs, ctl):
    daemon = jobs(size=2)
    shell = ctl(daemon)
    shell.wait("it asks", has("musterctl>"))
    shell.press("pau\tjob\t\t")
    shell.wait("names", lambda lines: has("jobs/0")(lines) and has("jobs/1")(lines))
    shell.press("/1\t\n")
    shell.wait("it is done", has("jobs/1: paused"))
    assert daemon.worker("jobs/1").halt == "paused"


def test_what_was_typed_is_there_in_the_next_shell(jobs, ctl, tmp_path):
    daemon = jobs(size=1)
    shell = ctl(daemon)
    shell.wait("it asks", has("musterctl>"))
    shell.press("pause jobs\n")
    shell.wait("it is done", has("jobs: paused"))
    shell.press(" resume jobs\n")  # a line with a leading space is not kept
    shell.wait("it is done", has("jobs: resumed"))
    shell.process.kill()  # as when its window is closed
    shell.process.wait()
    history = tmp_path / "musterd" / "musterctl_history"
    assert history.read_text() == "pause jobs\n"
    assert history.stat().st_mode & 0o777 == 0o600
    another = ctl(daemon)
    another.wait("it asks", has("musterctl>"))
    another.press("\x1b[A\n")  # arrow up
    another.wait("it is done", has("jobs: paused"))
    assert daemon.pool("jobs").halt == "paused"


def test_ctrl_c_ends_the_command_and_ctrl_d_the_shell(jobs, ctl):
    daemon = jobs(size=1)
    shell = ctl(daemon)
    shell.wait("it asks", has("musterctl>"))
    shell.press("events -f --kind pool.paused\n")
    daemon.ctl("pause", "jobs")
    shell.wait("it follows", has("pool.paused"))
    shell.press("\x03")
    shell.wait("it asks again", lambda lines: [line for line in lines if line][-1] == "musterctl>")
    shell.press("status nosuch\n")
    shell.wait("an error", has("no such name"))
    shell.press("\x04")
    shell.wait("it ends", lambda _: shell.process.poll() is not None)
    assert shell.process.returncode == 4, "that of the last command"


def test_bash_can_complete(jobs):
    daemon = jobs(size=1)
    done = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor.ctl"],
        env={
            **os.environ,
            "_MUSTERCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": "musterctl stop jobs",
            "COMP_CWORD": "2",
            "MUSTERD_CONTROL": daemon.control_socket,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    assert done.stdout.split() == ["plain,jobs", "plain,jobs/0"]


STOPS = """
import time
from musterd import task

@task(max_retries=0)
def stop(ctx, price: int) -> int:
    breakpoint()
    time.sleep(60 if price < 0 else 0)
    return price
"""


def at_prompt(lines: list[str]) -> bool:
    return [line for line in lines if line][-1] == "(Pdb)"


@pytest.fixture
def stopped(muster) -> Callable[[int], tuple[Muster, Any]]:
    """Return a function that makes a daemon with a task at a breakpoint."""

    def make(price: int) -> tuple[Muster, Any]:
        daemon = muster({"shop": {"worker": "stops", "debug": True}}, start=False)
        Path(daemon.folder, "stops.py").write_text(STOPS)
        return daemon.start(), daemon.client().submit("shop.stop", {"price": price})

    return make


def test_a_debugger_has_the_keys_of_a_terminal(stopped, ctl, waiting):
    daemon, task = stopped(42)
    waiting("it is at the breakpoint", lambda: "breakpoint" in daemon.worker("shop/0").debug)
    screen = ctl(daemon, "debug")
    screen.wait("the prompt", has("(Pdb)"))
    screen.press("p rice\x1b[D\x1b[D\x1b[D\x1b[Dp\x05 * 1\x7f2\r")  # arrows, Ctrl-E, backspace
    screen.wait("the line as it was edited", has("84"))
    screen.press("this is nothing")
    screen.wait("it is typed", has("this is nothing"))
    screen.press("\x03")
    screen.wait("the next prompt", at_prompt)
    screen.press("p price + 1\r")
    screen.wait("the line before was dropped", has("43"))
    screen.resize(60, 24)
    screen.press("\x1b[A")  # what was typed before
    screen.wait("the last line is there again", has("(Pdb) p price + 1"))
    screen.press("0\r")
    screen.wait("edited again", has("52"))
    screen.press("\x04")
    screen.wait("Ctrl-D leaves", has("shop/0: the debugger was left"))
    assert screen.process.wait(SECONDS) == 0
    assert task.result(SECONDS) == 42


def test_ctrl_c_stops_the_code_and_a_second_one_leaves(stopped, ctl, waiting):
    daemon, task = stopped(-1)
    waiting("it is at the breakpoint", lambda: "breakpoint" in daemon.worker("shop/0").debug)
    screen = ctl(daemon, "debug")
    screen.wait("the prompt", has("(Pdb)"))
    screen.press("c\r")
    screen.wait("it goes on", lambda lines: lines and "(Pdb) c" in "\n".join(lines))
    time.sleep(0.3)  # the line is on its way
    screen.press("\x03")
    screen.wait("it is shown where it is", has("-> time.sleep(60"))
    screen.wait("the prompt", at_prompt)
    screen.press("c\r")
    time.sleep(0.3)
    os.kill(daemon.worker("shop/0").pid, signal.SIGSTOP)  # code that cannot be stopped
    screen.press("\x03")
    screen.wait("it is tried", has("Ctrl-C again"))
    time.sleep(0.3)
    screen.press("\x03")
    screen.wait("the task is left alone", has("left: the task goes on"))
    assert screen.process.wait(SECONDS) == 0
    os.kill(daemon.worker("shop/0").pid, signal.SIGCONT)
    task.cancel()


def test_a_prompt_ends_with_the_task(stopped, ctl, waiting):
    daemon, task = stopped(1)
    waiting("it is at the breakpoint", lambda: "breakpoint" in daemon.worker("shop/0").debug)
    screen = ctl(daemon, "debug")
    screen.wait("the prompt", has("(Pdb)"))
    screen.press("half a li")
    screen.wait("it is being typed", has("half a li"))
    task.cancel()
    screen.wait("it says so", has("shop/0: the task was cancelled"))
    assert screen.process.wait(SECONDS) == 0
    assert termios.tcgetattr(screen.theirs) == screen.before, "the keyboard is as before"


def test_the_shell_debugs_and_goes_on(stopped, ctl, waiting):
    daemon, task = stopped(7)
    waiting("it is at the breakpoint", lambda: "breakpoint" in daemon.worker("shop/0").debug)
    screen = ctl(daemon)
    screen.wait("the shell", has("musterctl>"))
    screen.press("debug shop/0\r")
    screen.wait("the prompt", has("(Pdb)"))
    screen.press("c\r")
    screen.wait("it is over", has("shop/0: the attempt has ended"))
    assert task.result(SECONDS) == 7
    screen.press("ver\t\r")
    screen.wait("commands are completed again", has("musterctl> version"))
