"""control.sock between processes: who may call, and that no caller can disturb the others."""

import grp
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.api import rpc

STAND_IN = Path(__file__).with_name("control_standin.py")
SECONDS = 30.0
NOBODY = 65534
GROUP = "games"  # a group of every Debian that gives no rights here

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its uid")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a path that other users can reach; pytest's own folders are closed to them."""
    with tempfile.TemporaryDirectory(prefix="musterd-test-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder, "control.sock")


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Start a stand-in for the daemon and wait until it listens."""
    started: list[subprocess.Popen[str]] = []

    def run(group: str = "") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(STAND_IN), str(path), group], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(SECONDS)
    client.connect(str(path))
    return client


def ask(path: Path, method: str = "version", **params: Any) -> dict[str, Any]:
    with connect(path) as client:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        client.sendall(json.dumps(message).encode() + b"\n")
        with client.makefile("rb") as lines:
            answer = json.loads(lines.readline())
    assert isinstance(answer, dict)
    return answer


# Run by another user: connect, ask, and print every byte until the end. The program needs only the
# standard library, which any user can read.
ASK_AS = """
import os, socket, sys
path, uid, gid, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.setgroups([int(g) for g in groups.split(",") if g])
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
client = socket.socket(socket.AF_UNIX)
client.settimeout(30)
try:
    client.connect(path)
except OSError as error:
    sys.exit(f"connect: {error.strerror}")
try:
    client.sendall(b'{"jsonrpc": "2.0", "id": 1, "method": "version"}\\n')
    client.shutdown(socket.SHUT_WR)
except OSError:
    pass
while True:
    try:
        data = client.recv(65536)
    except ConnectionResetError:
        break
    if not data:
        break
    sys.stdout.write(data.decode())
"""


def ask_as(path: Path, uid: int, gid: int, groups: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", ASK_AS, str(path), str(uid), str(gid), groups],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@needs_root
def test_the_mode_of_the_socket_keeps_others_out(path: Path, start: Start) -> None:
    start()
    refused = ask_as(path, NOBODY, NOBODY)
    assert (refused.stdout, refused.stderr.strip()) == ("", "connect: Permission denied")


@needs_root
def test_a_caller_that_is_not_allowed_gets_an_error_and_never_silence(
    path: Path, start: Start
) -> None:
    start()
    path.chmod(0o666)  # even with an open file mode, the kernel's word on the caller counts
    for _ in range(20):  # sending before or after the answer must make no difference
        answer = json.loads(ask_as(path, NOBODY, NOBODY).stdout)
        assert answer["error"]["code"] == rpc.NOT_ALLOWED
        assert f"not allowed: uid {NOBODY}" in answer["error"]["message"]
    assert ask(path)["result"]["version"] == "9.9.9"


@needs_root
@pytest.mark.parametrize(
    ("gid", "extra", "allowed"), [("own", "", True), (NOBODY, "own", True), (NOBODY, "1", False)]
)
def test_members_of_the_control_group_are_allowed_by_either_kind_of_membership(
    path: Path, start: Start, gid: int | str, extra: str, allowed: bool
) -> None:
    number = grp.getgrnam(GROUP).gr_gid
    start(GROUP)
    assert path.stat().st_gid == number
    path.chmod(0o666)
    primary = number if gid == "own" else int(gid)
    supplementary = str(number) if extra == "own" else extra
    answer = json.loads(ask_as(path, NOBODY, primary, supplementary).stdout)
    assert ("result" in answer) is allowed
    if not allowed:
        assert GROUP in answer["error"]["message"]


@needs_root
def test_the_group_of_the_socket_alone_lets_a_member_in(path: Path, start: Start) -> None:
    number = grp.getgrnam(GROUP).gr_gid
    start(GROUP)
    assert "result" in json.loads(ask_as(path, NOBODY, NOBODY, str(number)).stdout)


def test_a_daemon_takes_over_the_socket_of_one_that_was_killed(path: Path, start: Start) -> None:
    first = start()
    first.send_signal(signal.SIGKILL)
    first.wait(SECONDS)
    assert path.is_socket()
    second = start()
    assert ask(path)["result"]["pid"] == second.pid


def test_garbage_floods_and_stalls_of_some_do_not_disturb_the_others(
    path: Path, start: Start
) -> None:
    daemon = start()
    stop = threading.Event()

    def misbehave(data: bytes, read: bool) -> None:
        while not stop.is_set():
            with connect(path) as client:
                client.settimeout(0.2)
                try:
                    client.sendall(data)
                    while read and client.recv(65536):
                        pass
                except OSError:
                    continue  # refused, as expected

    endless = b'{"jsonrpc": "2.0", "id": 1, "method": "status"}\n' * 5000
    misbehaviours = [(os.urandom(100_000), True), (b"x" * 3_000_000, False), (endless, False)]
    threads = [threading.Thread(target=misbehave, args=each) for each in misbehaviours]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            assert ask(path)["result"]["pid"] == daemon.pid
        assert ask(path, "stop", names=["parser/0"])["result"]["slots"][0]["state"] == "STOPPED"
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
    assert daemon.poll() is None


def test_many_callers_at_once_each_get_their_own_answer(path: Path, start: Start) -> None:
    start()
    answers: dict[int, Any] = {}

    def run(number: int) -> None:
        answers[number] = ask(
            path, "tasks.submit", name="parser.echo", id=str(number), args={"n": number}, wait=True
        )

    threads = [threading.Thread(target=run, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [answers[n]["result"]["value"] for n in range(60)] == [{"n": n} for n in range(60)]


def test_an_idle_server_sleeps(path: Path, start: Start) -> None:
    daemon = start()
    with connect(path) as idle, connect(path) as half:
        half.sendall(b'{"jsonrpc"')
        idle.sendall(b"\n")
        ask(path)
        before = turns(daemon.pid)
        ask(path)  # a few turns of the loop, no more
        assert turns(daemon.pid) - before < 50


def turns(pid: int) -> int:
    """Return the number of context switches of the process, voluntary and involuntary."""
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)
