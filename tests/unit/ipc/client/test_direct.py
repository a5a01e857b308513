"""Clients of a cluster: what is refused before anything is started."""

import os
import time

import pytest

from musterd import AsyncClient, Client, ConfigurationError, NotConnected
from musterd.ipc.client import direct
from musterd.ipc.client.direct import DirectGateway, gateway_to

URL = "postgresql://ann:hunter2@db.example/tasks"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_without_psycopg_the_extra_is_named(
    kind: type[Client] | type[AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'musterd\[cluster\]'") as error:
        kind(URL)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_url_that_cannot_be_read_is_refused(kind: type[Client] | type[AsyncClient]) -> None:
    with pytest.raises(ConfigurationError, match="%2F") as error:
        kind("postgresql://ann:hun/ter2@db.example/tasks")
    assert "hun" not in str(error.value)


def test_clients_of_one_url_share_a_gateway() -> None:
    assert gateway_to(URL) is gateway_to(URL)
    assert gateway_to(URL) is not gateway_to(f"{URL}2")
    direct._gateways.clear()


def test_a_fork_has_gateways_of_its_own() -> None:
    mine = gateway_to(URL)
    child = os.fork()
    if not child:
        os._exit(0 if gateway_to(URL) is not mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gateway_to(URL) is mine
    direct._gateways.clear()


def test_a_gateway_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_interpreter", lambda: "/nowhere/python3")
    client = Client(URL, connect_timeout=0.01)
    with pytest.raises(NotConnected, match="/nowhere/python3") as error:
        client.submit("parser.fetch").result(10)
    assert "hunter2" not in str(error.value)
    with pytest.raises(NotConnected):
        client.close()
    direct._gateways.clear()


def test_gateways_that_do_not_get_ready_are_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    def spawn(_fd: int) -> int:
        started.append(1)
        return 2**22 + 1  # no process has this number

    monkeypatch.setattr(direct, "_spawn", spawn)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    gateway = DirectGateway(URL)  # nobody has the other end of its control socket
    for _ in range(1000):
        now[0] += 0.01
        with pytest.raises((BlockingIOError, ConnectionRefusedError)):
            gateway.connect()
    assert 5 <= len(started) <= 10  # after 0.1, 0.2, 0.4, ... seconds
    assert gateway.state().state == "away"
