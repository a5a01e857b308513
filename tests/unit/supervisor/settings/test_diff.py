"""Differences between two configurations, and how a running daemon applies them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.supervisor.config.load import Loaded, load
from musterd.supervisor.settings.diff import compare

POOL = {"worker": "a:A"}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def make(**sections: Any) -> Loaded:
        path = tmp_path / "config.json"
        path.write_bytes(msgspec.json.encode({"pools": {"p": POOL}, **sections}))
        return load([path], None, [], {})

    return make


def lines(old: Loaded, new: Loaded) -> list[str]:
    changes = compare(old, new).changes
    return [f"{each.key}: {each.old} -> {each.new} ({each.effect})" for each in changes]


def pools(old: Loaded, new: Loaded) -> dict[str, str]:
    return {each.name: each.effect for each in compare(old, new).pools}


def test_the_same_is_not_different(read: Any) -> None:
    assert lines(read(), read()) == []
    assert pools(read(), read()) == {}


@pytest.mark.parametrize(
    ("keys", "effect"),
    [
        ({"worker": "b:B"}, "rolls"),
        ({"env": {"A": "1"}}, "rolls"),
        ({"options": {"deep": {"er": 1}}}, "rolls"),
        ({"secrets_dir": "/x"}, "rolls"),
        ({"secrets": ["SHOP_*"]}, "rolls"),
        ({"health_interval": "7s"}, "rolls"),
        ({"size": 3}, "scales"),
        ({"size": 2, "min": 1, "max": 4}, "scales"),
        ({"task_timeout": "1s"}, "at once"),
        ({"restart": {"limit": 3}}, "at once"),
        ({"enabled": False}, "removed"),
    ],
)
def test_what_becomes_of_a_pool(read: Any, keys: dict[str, Any], effect: str) -> None:
    new = read(pools={"p": {**POOL, **keys}})
    assert pools(read(), new) == {"p": effect}
    assert {each.effect for each in compare(read(), new).changes} == {effect}


def test_each_key_of_a_pool_says_what_it_does(read: Any) -> None:
    new = read(pools={"p": {"worker": "b:B", "size": 3, "aging": "1s"}})
    assert lines(read(), new) == [
        'pools.p.worker: "a:A" -> "b:B" (rolls)',
        "pools.p.size: 1 -> 3 (scales)",
        'pools.p.aging: "1m" -> "1s" (at once)',
    ]


def test_pools_that_come_and_go_show_what_was_written(read: Any) -> None:
    new = read(pools={"q": {"worker": "b:B", "size": 2}})
    assert lines(read(), new) == [
        'pools.p.worker: "a:A" ->  (removed)',
        'pools.q.worker:  -> "b:B" (added)',
        "pools.q.size:  -> 2 (added)",
    ]
    assert pools(read(), new) == {"p": "removed", "q": "added"}


def test_a_pool_that_is_not_enabled_means_nothing(read: Any) -> None:
    old = read(pools={"p": POOL, "q": {**POOL, "enabled": False}})
    new = read(pools={"p": POOL, "q": {**POOL, "enabled": False, "size": 4}})
    assert pools(old, new) == {}
    assert pools(old, read(pools={"p": POOL, "q": POOL})) == {"q": "added"}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("supervisor", "runtime_dir", "/x"),
        ("supervisor", "state_dir", "/x"),
        ("supervisor", "log_file", "/x"),
        ("supervisor", "containment", "reaper"),
        ("supervisor", "control_group", "root"),
        ("supervisor", "tasks_group", "root"),
        ("store", "durability", "memory"),
        ("store", "on_corrupt", "set-aside"),
    ],
)
def test_what_needs_a_restart_keeps_its_old_value(
    read: Any, section: str, key: str, value: str
) -> None:
    old, new = read(), read(**{section: {key: value}}, retry={"max_retries": 9})
    difference = compare(old, new)
    assert difference.restart == [f"{section}.{key}"]
    assert getattr(difference.in_force, section) == getattr(old.config, section)
    assert difference.in_force.retry.max_retries == 9


def test_values_of_secrets_are_not_shown(read: Any) -> None:
    new = read(
        supervisor={"redact": ["pin"]},
        pools={
            "p": {
                **POOL,
                "env": {"DB_PASSWORD": "x1", "DB_URL": "postgres://me:x2@db/main"},
                "options": {"api_key": "x3", "pin": "x4", "secret": {"inner": "x5"}, "plain": "ok"},
                "secrets_dir": "/run/secrets",
            }
        },
    )
    told = "\n".join(lines(read(), new))
    assert not any(f"x{n}" in told for n in range(1, 6)), told
    assert 'pools.p.options.plain:  -> "ok"' in told
    assert '"postgres://(hidden)@db/main"' in told
    assert "/run/secrets" in told


def test_named_sections_are_compared_entry_by_entry(read: Any) -> None:
    old = read(targets={"a.example": {"rate": "1/s"}}, classes={"k": {"timeout": "1s"}})
    new = read(targets={"a.example": {"rate": "2/s"}, "b.example": {"burst": 4}})
    assert lines(old, new) == [
        'classes.k.timeout: "1s" ->  (at once)',
        'targets."a.example".rate: "1/s" -> "2/s" (at once)',
        'targets."b.example".burst:  -> 4 (at once)',
    ]
