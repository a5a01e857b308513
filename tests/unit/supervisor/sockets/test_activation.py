"""Sockets that are handed over at the start, as systemd does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.control.server import ControlServer
from musterd.supervisor.sockets import activation
from musterd.supervisor.sockets.files import SocketFiles

# A process finds the listening sockets at descriptor 3 and prints their paths.
CHILD = """
import os, sys
from musterd.supervisor.sockets import activation
os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[1]))
try:
    handed = activation.take(os.environ)
except activation.ConfigurationError as error:
    sys.exit(f"refused: {error}")
print(*sorted(str(path) for path in handed), "LISTEN_FDS" in os.environ)
print(*(os.get_inheritable(sock.fileno()) for sock in handed.values()))
"""


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


def handed_to_a_child(
    sock: socket.socket, other_pid: int = 0
) -> "subprocess.CompletedProcess[str]":
    # A program in between puts the socket at descriptor 3, as systemd does.
    command = [sys.executable, "-c", CHILD, str(other_pid)]
    return subprocess.run(
        ["bash", "-c", f'exec 3<&{sock.fileno()}; exec "$@"', "sh", *command],
        pass_fds=[sock.fileno()],
        env={**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "tasks"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_sockets_are_known_by_their_path_and_the_variables_are_gone(tmp_path: Path) -> None:
    with listening(tmp_path / "tasks.sock") as sock:
        done = handed_to_a_child(sock)
    assert done.stdout == f"{tmp_path}/tasks.sock False\nFalse\n", done.stderr


def test_what_is_meant_for_another_process_is_left_alone(tmp_path: Path) -> None:
    with listening(tmp_path / "tasks.sock") as sock:
        done = handed_to_a_child(sock, other_pid=1)
    assert done.stdout.strip() == "False", done.stderr


def test_a_socket_without_a_path_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        done = handed_to_a_child(sock)
    assert "refused: systemd handed over" in done.stderr


def test_a_socket_that_nobody_would_look_at_is_an_error(tmp_path: Path) -> None:
    ours, other = tmp_path / "tasks.sock", tmp_path / "elsewhere.sock"
    with listening(ours) as sock:
        activation.check({ours: sock}, [ours])
        assert activation.pick({ours: sock}, ours) is sock
        assert activation.pick({ours: sock}, other) is None
        with pytest.raises(ConfigurationError, match=r"elsewhere.*runtime_dir and ListenStream="):
            activation.check({other: sock}, [ours])


def test_a_link_on_the_way_to_the_socket_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "var").symlink_to(tmp_path / "run")
    real, linked = tmp_path / "run/tasks.sock", tmp_path / "var/tasks.sock"
    with listening(real) as sock:
        activation.check({real: sock}, [linked])
        assert activation.pick({real: sock}, linked) is sock


class Nobody:
    def call(self, method: str, params: object, caller: object) -> object:
        return None


def test_a_socket_that_was_handed_over_stays(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    ours = tmp_path / "workers.sock"
    ours.touch()
    with listening(path) as held:
        server = ControlServer(path, "", Nobody(), "", held.dup())
        files = SocketFiles([path, ours], held=[path])
        files.remove()
        server.close()
        assert path.exists()
        assert not ours.exists()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))  # a client that comes now waits for the next daemon


def test_the_group_of_a_socket_that_was_handed_over_is_as_configured(tmp_path: Path) -> None:
    import grp

    path = tmp_path / "control.sock"
    group = grp.getgrgid(os.getgid())
    with listening(path) as held:
        path.chmod(0o600)
        server = ControlServer(path, "", Nobody(), "", held.dup())
        assert path.stat().st_mode & 0o777 == 0o600, "the affair of whoever made it"
        server.close()
        server = ControlServer(path, group.gr_name, Nobody(), "", held.dup())
        assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (0o660, group.gr_gid)
        server.close()
