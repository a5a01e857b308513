"""Where the web process listens, and what it says where it cannot."""

import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.settings.sidecars import WebSettings
from musterd.supervisor.web.server import EXIT_CONFIGURATION, NotNow, listen, run


def settings(where: str, group: str = "") -> WebSettings:
    return WebSettings(listen=where, control="/nowhere", group=group)


def test_port_0_is_any_and_answers_are_sent_at_once() -> None:
    sock, address = listen(settings("127.0.0.1:0"))
    with sock:
        assert address.port == sock.getsockname()[1] > 0
        with socket.create_connection(("127.0.0.1", address.port)) as caller:
            accepted, _ = sock.accept()
            with accepted:
                # asyncio checks this before it sets TCP_NODELAY.
                assert accepted.proto == socket.IPPROTO_TCP
                assert caller.getpeername()[1] == address.port


def test_an_address_in_use_may_be_free_later(short_folder: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(NotNow, match="another program may use it"),
    ):
        listen(settings(f"127.0.0.1:{taken.getsockname()[1]}"))
    path = str(short_folder / "a.sock")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)
        taken.listen()
        with pytest.raises(NotNow, match="another program listens"):
            listen(settings(f"unix:{path}"))


def test_the_socket_of_a_dead_one_is_taken_over(short_folder: Path) -> None:
    path = str(short_folder / "a.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    sock, address = listen(settings(f"unix:{path}"))
    with sock:
        assert address.path == path
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


def test_a_file_in_the_way_is_left_alone(short_folder: Path) -> None:
    path = short_folder / "a.sock"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="is not a socket"):
        listen(settings(f"unix:{path}"))
    assert path.read_text() == "mine"


def test_a_group_that_is_not_there_is_told_by_its_key(short_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"http\.group"):
        listen(settings(f"unix:{short_folder}/a.sock", "no-such-group"))


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "prometheus_client"])
def test_without_the_extra_it_says_which_to_install_and_that_trying_again_is_no_use(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(settings("127.0.0.1:0")) == EXIT_CONFIGURATION
    assert "pip install 'musterd[web]'" in capsys.readouterr().err
