"""[http]: where the web process may listen, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.http import Address, parse_address
from musterd.supervisor.config.load import load
from musterd.supervisor.settings.diff import compare
from musterd.supervisor.settings.policy import fleet_policy


def loaded(*sets: str) -> Any:
    return load([], None, list(sets), {}, default_file=Path("/nonexistent"))


def problem(*sets: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        loaded(*sets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("127.0.0.1:7717", Address(host="127.0.0.1", port=7717), "http://127.0.0.1:7717"),
        ("localhost:80", Address(host="127.0.0.1", port=80), "http://127.0.0.1:80"),
        ("[::1]:7717", Address(host="::1", port=7717), "http://[::1]:7717"),
        ("unix:/run/a.sock", Address(path="/run/a.sock"), "unix:/run/a.sock"),
    ],
)
def test_addresses_are_read(text: str, address: Address, url: str) -> None:
    assert parse_address(text) == address
    assert address.is_local
    assert address.url == url


@pytest.mark.parametrize(
    "text",
    [
        "7717", ":7717", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "::1:7717", "[::1]",
        "example.org:80", "unix:run/a.sock", "unix:", "unix:/" + "a" * 107, "[127.0.0.1]:80",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give|shorten"):
        parse_address(text)
    assert "http.listen" in problem(f"http.listen={text!r}")


def test_an_address_that_others_can_reach_needs_a_word_of_its_own() -> None:
    for listen in ("0.0.0.0:7717", "[::]:7717", "192.0.2.1:7717"):
        assert "allow_remote = true" in problem(f'http.listen="{listen}"')
        found = loaded(f'http.listen="{listen}"', "http.allow_remote=true").config
        assert found.http.listen == listen


def test_a_group_is_for_unix_sockets_alone() -> None:
    assert "http.group" in problem('http.listen="127.0.0.1:1"', "http.group=adm")
    assert loaded('http.listen="unix:/run/a"', "http.group=adm").config.http.group == "adm"


def test_names_of_hosts_are_checked() -> None:
    assert loaded('http.hosts=["Fleet.Example"]').config.http.hosts == ("fleet.example",)
    assert "not a host name" in problem('http.hosts=["a b"]')
    assert "list of names" in problem("http.hosts=a")


def test_the_daemon_has_a_web_process_only_where_it_shall() -> None:
    listen = 'http.listen="127.0.0.1:7717"'
    assert fleet_policy(loaded().config).web == ""
    assert fleet_policy(loaded(listen, "http.start=false").config).web == ""
    assert fleet_policy(loaded(listen).config).web != ""


def test_another_address_makes_another_web_process_at_once() -> None:
    old, new = loaded('http.listen="127.0.0.1:1"'), loaded('http.listen="127.0.0.1:2"')
    assert fleet_policy(old.config).web != fleet_policy(new.config).web
    assert [change.effect for change in compare(old, new).changes] == ["at once"]
