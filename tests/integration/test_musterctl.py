"""musterctl as a user runs it, against a stand-in for the daemon on a real socket."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd import __version__

STAND_IN = Path(__file__).with_name("control_standin.py")
SECONDS = 30.0
COMMAND = [sys.executable, "-m", "musterd.supervisor.ctl"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a path that other users can reach; pytest's own folders are closed to them."""
    with tempfile.TemporaryDirectory(prefix="musterd-test-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder, "control.sock")


@pytest.fixture
def daemon(path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, str(STAND_IN), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def ctl(path: Path) -> Run:
    """Run musterctl with this socket; return what it printed and its exit code."""

    def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, "-s", str(path), *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
        )

    return run


ANY_COMMAND = [
    ["start", "parser"],
    ["stop", "parser"],
    ["restart", "parser"],
    ["reset", "parser"],
    ["scale", "parser", "1"],
    ["signal", "HUP", "parser"],
    ["pid"],
    ["submit", "parser.echo"],
    ["tasks"],
    ["task", "1"],
    ["cancel", "1"],
    ["events"],
    ["tail"],
    ["pause", "parser"],
    ["drain"],
    ["resume"],
    ["shutdown"],
    ["version"],
]


# -- exit codes -------------------------------------------------------------------------------


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status"], 0),
        (["status", "parser", "broken/0"], 0),
        (["status", "nosuch"], 4),
        (["status", "parser", "nosuch/*"], 4),
        (["start", "parser"], 0),  # runs already
        (["stop", "parser/0"], 0),
        (["restart", "all"], 0),
        (["restart", "broken"], 1),
        (["--no-block", "restart", "broken"], 0),
        (["restart", "nosuch"], 4),
        (["reset", "pars*"], 0),
        (["scale", "parser", "3"], 0),
        (["scale", "nosuch", "3"], 4),
        (["scale", "parser", "-1"], 2),
        (["scale", "parser", "many"], 2),
        (["scale", "parser"], 2),
        (["signal", "HUP", "parser"], 0),
        (["signal", "NOPE", "parser"], 2),
        (["signal", "HUP", "nosuch"], 4),
        (["pid"], 0),
        (["pid", "parser"], 0),
        (["pid", "nosuch"], 4),
        (["submit", "parser.echo", "a=1"], 0),
        (["submit", "parser.echo", "a=1", "--wait"], 0),
        (["submit", "parser.fail"], 0),
        (["submit", "parser.fail", "--wait"], 1),
        (["submit", "parser.full"], 1),
        (["submit", "parser.nosuch"], 4),
        (["submit", "parser.echo", "novalue"], 2),
        (["submit", "parser.echo", "--priority", "urgent"], 2),
        (["submit", "parser.echo", "--id", "x" * 100], 2),
        (["--timeout", "0.3", "submit", "parser.never", "--wait"], 1),
        (["tasks"], 0),
        (["tasks", "--state", "nosuch"], 2),
        (["task", "nosuch"], 4),
        (["cancel", "nosuch"], 4),
        (["events"], 0),
        (["version"], 0),
        (["nosuch"], 2),
        (["tail"], 0),
        (["tail", "parser"], 0),
        (["tail", "nosuch"], 4),
        (["tail", "-n", "-1"], 2),
        (["events", "--level", "loud"], 2),
        (["events", "nosuch"], 4),
        (["pause", "parser/1"], 0),
        (["pause", "nosuch"], 4),
        (["pause"], 2),
        (["drain"], 0),
        (["resume"], 0),
        (["status", "--nosuch"], 2),
        (["start"], 2),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_exit_codes_are_the_same_with_json_and_without(
    ctl: Run, flags: list[str], arguments: list[str], code: int
) -> None:
    done = ctl(*flags, *arguments)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert done.stderr == ""
    else:
        assert done.stderr.startswith("musterctl: ")
        assert "Traceback (most" not in done.stderr
    if flags and arguments[0] != "events":
        json.loads(done.stdout)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_status_is_3_when_a_pool_is_not_at_its_target_size(ctl: Run, flags: list[str]) -> None:
    assert ctl("stop", "parser/1").returncode == 0
    assert ctl(*flags, "status").returncode == 3
    assert ctl(*flags, "status", "parser").returncode == 3
    assert ctl(*flags, "status", "parser/1").returncode == 3
    assert ctl(*flags, "status", "parser/0", "broken").returncode == 0
    assert ctl(*flags, "pid", "parser/1").returncode == 1  # nothing to print
    assert ctl("stop", "parser/1").returncode == 0  # stopped already
    assert ctl("start", "parser/1").returncode == 0
    assert ctl(*flags, "status").returncode == 0


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_unreachable_daemon_is_4_for_status_and_7_for_every_other_command(
    ctl: Run, flags: list[str]
) -> None:
    for arguments, code in [(["status"], 4), *((command, 7) for command in ANY_COMMAND)]:
        done = ctl(*flags, *arguments)
        assert done.returncode == code, arguments
        assert "cannot reach the daemon" in done.stderr
        assert "musterd run" in done.stderr
        if flags:
            assert json.loads(done.stdout)["error"]["code"] == code


def test_a_socket_nobody_listens_on_any_more_is_unreachable(ctl: Run, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert ctl("status").returncode == 4
    assert ctl("pid").returncode == 7


def test_a_daemon_that_accepts_and_does_not_answer_is_1(ctl: Run, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        for arguments in (["status"], ["pid"], ["submit", "a.b", "--wait", "--id", "mine"]):
            done = ctl("--timeout", "0.3", *arguments)
            assert done.returncode == 1
            assert "no answer" in done.stderr
            assert "0.3 seconds" in done.stderr
        assert "--id mine is safe" in done.stderr


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b'{"id": 1, "result": 5}\n'])
def test_a_peer_that_is_no_daemon_is_1(ctl: Run, path: Path, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        process = subprocess.Popen(
            [*COMMAND, "-s", str(path), "status"], stderr=subprocess.PIPE, text=True
        )
        peer, _address = other.accept()
        with peer:
            peer.sendall(said)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert errors.startswith("musterctl: the daemon")
    assert errors.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its uid")
@pytest.mark.usefixtures("daemon")
def test_a_caller_that_is_not_allowed_is_told_so(path: Path) -> None:
    path.chmod(0o666)
    # Another user may be unable to read the interpreter, so the uid changes after the imports.
    script = (
        "import os, sys, musterd.supervisor.ctl as ctl; os.setgroups([]); "
        "os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3); sys.exit(ctl.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "-s", str(path), "status"],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "not allowed: uid 65534" in done.stderr


# -- what is printed --------------------------------------------------------------------------


@pytest.mark.usefixtures("daemon")
def test_status_without_a_terminal_is_a_plain_table(ctl: Run) -> None:
    lines = ctl("status").stdout.splitlines()
    assert lines[0].startswith("musterd 9.9.9  running  pid ")
    assert [line.split()[:3] for line in lines if line.startswith("parser")] == [
        ["parser", "RUNNING", "2/2"],
        ["parser/0", "RUNNING", "1000"],
        ["parser/1", "RUNNING", "1001"],
    ]
    assert "\x1b" not in "".join(lines)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("variables", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_status_on_a_terminal_has_colours(
    path: Path, variables: dict[str, str], colours: bool
) -> None:
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    try:
        process = subprocess.run(
            [*COMMAND, "-s", str(path), "status"], stdout=follower, timeout=SECONDS, check=False,
            env={**environment, "TERM": "xterm", **variables},
        )  # fmt: skip
        text = os.read(leader, 65536).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert process.returncode == 0
    assert ("\x1b[32mRUNNING" in text) is colours


@pytest.mark.usefixtures("daemon")
def test_json_is_the_daemons_answer(ctl: Run, path: Path) -> None:
    shown = json.loads(ctl("--json", "status").stdout)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        client.connect(str(path))
        client.sendall(b'{"jsonrpc": "2.0", "id": 1, "method": "status"}\n')
        with client.makefile("rb") as lines:
            answered = json.loads(lines.readline())["result"]
    assert shown == answered
    assert json.loads(ctl("status", "--json").stdout) == answered  # also after the command


@pytest.mark.usefixtures("daemon")
def test_commands_tell_what_became_of_each_slot(ctl: Run) -> None:
    assert ctl("stop", "parser/1").stdout == "parser/1: STOPPED\n"
    failed = ctl("restart", "broken")
    assert failed.stdout == "broken/0: BACKOFF: exit 1\n"
    assert "1 of 1 failed (broken/0)" in failed.stderr
    assert "not waiting for the outcome" in ctl("stop", "parser", "--no-block").stdout


def test_pid_prints_numbers_only(ctl: Run, daemon: "subprocess.Popen[str]") -> None:
    assert ctl("pid").stdout == f"{daemon.pid}\n"
    assert ctl("pid", "parser").stdout == "1000\n1001\n"
    assert ctl("pid", "parser/1").stdout == "1001\n"


def test_version_names_both_sides(ctl: Run, daemon: "subprocess.Popen[str]") -> None:
    assert ctl("version").stdout.splitlines() == [
        f"musterctl {__version__}",
        f"musterd 9.9.9 (pid {daemon.pid})",
    ]
    assert ctl("--version").stdout == f"musterctl {__version__}\n"


def test_without_a_command_the_help_is_shown(ctl: Run) -> None:
    done = ctl()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: musterctl" in done.stderr


def test_a_typing_error_gets_a_hint(ctl: Run) -> None:
    assert "did you mean musterctl status?" in ctl("statsu").stderr


@pytest.mark.usefixtures("daemon")
def test_the_socket_may_be_named_by_the_environment(path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "pid"], env={**os.environ, "MUSTERD_CONTROL": str(path)},
        capture_output=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0


# -- tasks ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("daemon")
def test_submit_prints_an_id_by_which_the_task_is_found(ctl: Run) -> None:
    task_id = ctl("submit", "parser.echo", "a=1", "b=text").stdout.strip()
    shown = ctl("task", task_id).stdout
    assert f"id:          {task_id}\n" in shown
    assert "state:       succeeded\n" in shown
    assert json.loads(ctl("--json", "task", task_id).stdout)["value"] == {"a": 1, "b": "text"}
    assert task_id in ctl("tasks").stdout
    assert ctl("tasks", "--state", "failed").stdout == "no tasks\n"


@pytest.mark.usefixtures("daemon")
def test_submit_and_wait_prints_the_result_of_all_arguments(ctl: Run) -> None:
    done = ctl(
        "submit", "parser.echo", "n=5", "--json-args", '{"n": 1, "m": [2]}', "--wait",
        "--priority", "high", "--target", "site.example", "--timeout", "5", "--max-retries", "0",
        "--delay", "1", "--expires", "60",
    )  # fmt: skip
    assert json.loads(done.stdout) == {"n": 5, "m": [2]}


@pytest.mark.usefixtures("daemon")
def test_a_failed_task_puts_its_error_and_traceback_on_standard_error(ctl: Run) -> None:
    done = ctl("submit", "parser.fail", "--wait", "--id", "f1")
    assert done.stdout == ""
    assert "task f1 failed: ValueError: bad page" in done.stderr
    assert "Traceback: line 7\nbad page" in done.stderr
    assert "ValueError: bad page" in ctl("task", "f1").stdout
    told = json.loads(ctl("--json", "submit", "parser.fail", "--wait").stdout)
    assert (told["state"], told["failure"]["type"]) == ("failed", "ValueError")


@pytest.mark.usefixtures("daemon")
def test_cancel_tells_what_it_could_not_cancel(ctl: Run) -> None:
    for name, task_id in (("never", "n1"), ("never", "n2"), ("echo", "e1")):
        assert ctl("submit", f"parser.{name}", "--id", task_id).returncode == 0
    done = ctl("cancel", "n1")
    assert (done.returncode, done.stdout) == (0, "n1: cancelled\n")
    assert ctl("cancel", "n1").returncode == 0  # cancelled already
    late = ctl("cancel", "n2", "e1")
    assert (late.returncode, late.stdout) == (1, "n2: cancelled\ne1: succeeded\n")
    missing = ctl("cancel", "n2", "x9")
    assert missing.returncode == 4
    assert "no such task: x9" in missing.stderr


@pytest.mark.usefixtures("daemon")
def test_arguments_too_long_for_a_line_are_refused_before_they_are_sent(ctl: Run) -> None:
    value = '"' + "\\u0001" * 15_000 + '"'  # a single argument has at most 128 KiB
    pairs = [f"k{number}={value}" for number in range(12)]
    done = ctl("submit", "parser.echo", *pairs)
    assert done.returncode == 2
    assert "musterd.Client" in done.stderr


# -- events, shutdown, interruptions ----------------------------------------------------------


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def follower(daemon: object, path: Path, ctl: Run) -> Iterator["subprocess.Popen[str]"]:
    """`musterctl --json events -f` that has shown the first event."""
    ctl("signal", "HUP", "parser")
    process = subprocess.Popen(
        [*COMMAND, "-s", str(path), "--json", "events", "-f"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert json.loads(read_line(process))["reason"] == "signal 1"
    yield process
    process.kill()
    process.communicate()


def test_events_are_followed_until_ctrl_c_which_is_quiet(
    follower: "subprocess.Popen[str]", ctl: Run
) -> None:
    ctl("signal", "USR1", "parser")
    event: dict[str, Any] = json.loads(read_line(follower))
    assert (event["event"], event["reason"]) == ("signal.sent", "signal 10")
    follower.send_signal(signal.SIGINT)
    assert follower.communicate(timeout=SECONDS) == ("", "")
    assert follower.returncode == 0


def test_a_reader_of_events_that_goes_away_ends_it_quietly(
    follower: "subprocess.Popen[str]", ctl: Run
) -> None:
    assert follower.stdout is not None
    follower.stdout.close()
    ctl("signal", "USR1", "parser")
    assert follower.wait(SECONDS) == 0
    assert follower.stderr is not None
    assert follower.stderr.read() == ""


def test_the_end_of_the_daemon_ends_the_stream(
    follower: "subprocess.Popen[str]", daemon: "subprocess.Popen[str]"
) -> None:
    daemon.kill()
    _, errors = follower.communicate(timeout=SECONDS)
    assert follower.returncode == 1
    assert "ended the stream" in errors


@pytest.mark.usefixtures("daemon")
def test_recent_events_are_listed_and_it_ends(ctl: Run) -> None:
    ctl("signal", "HUP", "parser/0")
    done = ctl("events")
    assert done.stdout.endswith("info     signal.sent worker=parser/0 signal 1\n")
    (line,) = ctl("--json", "events").stdout.splitlines()
    assert json.loads(line)["event"] == "signal.sent"


@pytest.mark.usefixtures("daemon")
def test_ctrl_c_while_waiting_is_quiet(path: Path, ctl: Run) -> None:
    process = subprocess.Popen(
        [*COMMAND, "-s", str(path), "submit", "parser.never", "--wait", "--id", "w1"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while ctl("task", "w1").returncode != 0:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors.strip()) == (1, "")


@pytest.mark.usefixtures("daemon")
def test_an_answer_nobody_reads_changes_no_exit_code(path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "-s", str(path), "status"], stdout=writing, stderr=subprocess.PIPE,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("daemon")
def test_an_answer_that_cannot_be_written_is_a_failure(path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "-s", str(path), "status"], stdout=full, stderr=subprocess.PIPE,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode != 0
    assert b"No space left" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_shutdown_returns_when_the_process_is_gone(
    ctl: Run, daemon: "subprocess.Popen[str]", path: Path, flags: list[str]
) -> None:
    assert ctl(*flags, "shutdown").returncode == 0
    assert daemon.poll() == 0  # at once: nothing is left to wait for
    assert not path.exists()


def test_shutdown_may_be_asked_for_without_waiting(
    ctl: Run, daemon: "subprocess.Popen[str]"
) -> None:
    done = ctl("shutdown", "--no-block")
    assert done.returncode == 0
    assert "not waiting for the outcome" in done.stdout


def test_start_up_time_is_printed(ctl: Run, record_property: Callable[[str, object], None]) -> None:
    took = []
    for _ in range(5):
        begun = time.monotonic()
        assert ctl("--version").returncode == 0
        took.append(time.monotonic() - begun)
    record_property("startup_seconds", min(took))
    print(
        f"musterctl --version: {min(took) * 1000:.0f} ms at best, {max(took) * 1000:.0f} at worst"
    )
