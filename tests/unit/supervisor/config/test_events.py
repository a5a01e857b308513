"""[events]: where events may be published, what is refused, and what their topics are."""

from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.events import Endpoint, parse_endpoint
from musterd.supervisor.config.load import load
from musterd.supervisor.publisher.process import topic_of
from musterd.supervisor.settings.diff import compare
from musterd.supervisor.settings.policy import fleet_policy
from musterd.supervisor.settings.sidecars import publisher_settings


def loaded(*sets: str) -> Any:
    return load([], None, list(sets), {}, default_file=Path("/nonexistent"))


def problem(*sets: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        loaded(*sets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("ipc:///run/musterd/events.sock", Endpoint(path="/run/musterd/events.sock")),
        ("tcp://127.0.0.1:5556", Endpoint(host="127.0.0.1", port=5556)),
        ("tcp://127.0.0.1:0", Endpoint(host="127.0.0.1")),
        ("tcp://[::1]:5556", Endpoint(host="::1", port=5556)),
    ],
)
def test_endpoints_are_read(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert loaded(f"events.publish={text}").config.events.publish == text


@pytest.mark.parametrize(
    "text",
    [
        *("events.sock", "/run/events.sock", "ipc://", "ipc://events.sock", "ipc://@name", "ipc://*"),
        *("ipc:///run/", "ipc:///" + "a" * 107, "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:"),
        *("tcp://127.0.0.1:65536", "tcp://127.0.0.1:" + "9" * 5000, "tcp://127.0.0.1:٣", "tcp://*:1"),
        *("tcp://localhost:1", "tcp://::1:5556", "tcp://[127.0.0.1]:1", "tcp://eth0:1", "udp://a"),
        *("inproc://a", "pgm://a", "tcp://0.0.0.0:5556", "tcp://[::]:5556", "tcp://192.0.2.1:5556"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_no_endpoint_or_open_to_others_is_refused(text: str) -> None:
    told = problem(f"events.publish={text!r}")
    assert "events.publish" in told
    assert any(word in told for word in ("give ", "shorten it", "publish on a loopback address"))


def test_a_group_is_for_socket_files_alone() -> None:
    assert "events.group" in problem("events.group=adm")
    assert "events.group" in problem("events.publish=tcp://127.0.0.1:1", "events.group=adm")


def test_the_socket_is_for_those_who_may_look_at_events_anyway() -> None:
    path = "events.publish=ipc:///run/events.sock"
    control, view = "supervisor.control_group=ops", "supervisor.view_group=watch"
    assert publisher_settings(loaded(path).config).group == ""
    assert publisher_settings(loaded(path, control).config).group == "ops"
    assert publisher_settings(loaded(path, control, view).config).group == "watch"
    assert publisher_settings(loaded(path, control, view, "events.group=adm").config).group == "adm"


def test_another_endpoint_is_another_publisher_and_needs_no_restart() -> None:
    nowhere, here, there = (
        loaded(*sets) for sets in ([], ["events.publish=ipc:///a"], ["events.publish=ipc:///b"])
    )
    assert fleet_policy(nowhere.config).events == ""
    assert fleet_policy(here.config).events != fleet_policy(there.config).events
    difference = compare(nowhere, here)
    assert difference.restart == []
    assert [change.key for change in difference.changes] == ["events.publish"]


@pytest.mark.parametrize(
    ("fields", "topic"),
    [
        ({"event": "task.changed", "schedule": "kites", "pool": "parser"}, "task.changed.kites"),
        ({"event": "worker.fatal", "pool": "parser", "worker": "parser/0"}, "worker.fatal.parser"),
        ({"event": "worker.fatal", "worker": "parser/0"}, "worker.fatal.parser"),
        ({"event": "breaker.open", "target": "site.example"}, "breaker.open.site.example"),
        ({"event": "session.held", "session": "acme"}, "session.held.acme"),
        ({"event": "task.dead", "pool": "parser", "target": "site"}, "task.dead.parser"),
        ({"event": "memory.critical"}, "memory.critical"),
    ],
)
def test_a_topic_is_the_event_and_what_it_is_about(fields: dict[str, str], topic: str) -> None:
    assert topic_of(fields) == topic
