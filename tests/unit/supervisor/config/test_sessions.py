"""[sessions]: their keys, what is refused, and what workers are told."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.secrets.sessions import decode_access, key_of
from musterd.supervisor.config.load import Loaded, load, show
from musterd.supervisor.processes.forkserver_messages import WorkerSettings
from musterd.supervisor.settings.diff import compare
from musterd.supervisor.settings.node import node_settings
from musterd.supervisor.settings.policy import fleet_policy, worker_settings_of
from musterd.supervisor.settings.sessions import (
    find_key,
    key_file,
    session_access,
    sessions_of,
    with_sessions,
)

ACME = """
[sessions.acme]
login = "shops.acme:log_in"
args = {user = "ada", password = {"$secret" = "ACME_PASSWORD"}}
concurrent = 2
logged_out = ["https://acme.example/login*"]
sites = ["acme.example"]
keep = "7d"
"""
Read = Callable[..., Loaded]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(*parts: str, **environ: str) -> Loaded:
        file = tmp_path / "musterd.toml"
        place = f'[supervisor]\nstate_dir = "{tmp_path / "state"}"\n'
        file.write_text(place + "\n".join(parts))
        return load([file], None, [], environ, default_file=file)

    return read


def problem(read: Read, *parts: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read(*parts)
    return str(caught.value)


def told(loaded: Loaded, pool: str = "parser") -> Any:
    config = loaded.config
    given = config.pools[pool]
    settings = with_sessions(worker_settings_of(given), session_access(pool, given, config))
    return decode_access(settings.sessions) if settings.sessions else None


def test_keys_and_sections_stand_beside_each_other(read: Read) -> None:
    loaded = read('[sessions]\nkey_secret = "KEY"', ACME, "[sessions.shop]")
    sessions = loaded.config.sessions
    assert sessions.key_secret == "KEY"
    assert list(sessions.named) == ["acme", "shop"]
    assert sessions.named["acme"].concurrent == 2
    assert loaded.origins["sessions.acme.login"].endswith("musterd.toml")
    assert loaded.origins["sessions.shop.login"] == "built-in"


def test_what_is_shown_loads_to_the_same(read: Read, tmp_path: Path) -> None:
    loaded = read('[sessions]\nkey_file = "/run/key"', ACME)
    shown = tmp_path / "shown.toml"
    shown.write_text(show(loaded))
    assert load([shown], None, [], {}, default_file=shown).config == loaded.config


def test_hosts_are_written_as_cookies_have_them(read: Read) -> None:
    sites = ["Acme.Example.", "käse.example", "127.0.0.1", "[::1]", "localhost"]
    loaded = read(f"[sessions.acme]\nsites = {sites}")
    hosts = ("acme.example", "xn--kse-qla.example", "127.0.0.1", "::1", "localhost")
    assert loaded.config.sessions.named["acme"].sites == hosts


def test_the_core_is_told_how_many_may_use_each_and_which_pools(read: Read) -> None:
    loaded = read(ACME, "[sessions.shop]", "[pools.parser]", '[pools.browser]\nsessions = ["s*"]')
    policy = fleet_policy(loaded.config)
    assert {name: each.concurrent for name, each in policy.sessions.items()} == {
        "acme": 2,
        "shop": 1,
    }
    assert [pool.sessions for pool in policy.pools] == [("acme", "shop"), ("shop",)]


def test_the_core_is_told_how_long_no_login_is_tried(read: Read) -> None:
    [usual] = fleet_policy(read("[sessions.acme]").config).sessions.values()
    logins = usual.logins
    assert (logins.enabled, logins.failures, logins.successes) == (True, 3, 1)
    minute_ns = 60 * 10**9
    assert (logins.open_ns, logins.open_factor) == (15 * minute_ns, 2)
    assert logins.open_max_ns == 24 * 60 * minute_ns
    text = '[sessions.acme]\nlogin_failures = 0\nlogin_pause = "3d"'
    [other] = fleet_policy(read(text).config).sessions.values()
    assert (other.logins.enabled, other.logins.open_ns) == (False, 3 * 24 * 60 * minute_ns)
    assert other.logins.open_max_ns == other.logins.open_ns


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (["[sessions.acme]\nlogin = 'x'"], 'give "module:function"'),
        (["[sessions.acme]\nlogins = 'x:y'"], "did you mean 'login'?"),
        (["[sessions.Acme]"], "not the name of a session"),
        (["[sessions]\nacme = 3"], "unknown key"),
        (["[sessions]\nkey_file = '/k'\nkey_secret = 'K'"], "remove one of them"),
        (["[sessions.acme]\nconcurrent = 0"], "concurrent"),
        (["[sessions.acme]\nlogged_out = ['login']"], "write it whole"),
        (["[sessions.acme]\nargs = {a = 1}"], "has no effect without login"),
        (
            ["[sessions.acme]\nsites = ['https://a.example']"],
            'has "https://a.example", which is no',
        ),
        (["[sessions.acme]\nsites = ['*.a.example']"], "without scheme, port and wildcards"),
        (["[sessions.acme]\nsites = ['a.example:80']"], "which is no host"),
        (["[sessions.acme]\nsites = ['.a.example']"], "which is no host"),
        (["[sessions.acme]\nsites = ['']"], "which is no host"),
        (
            ["[sessions.acme]\nlogin = 'a:b'\nargs = {password = 'x'}"],
            "has a value at password, which is named in supervisor.redact",
        ),
        (
            ["[pools.parser]\nsecrets = ['KEY']\n[sessions]\nkey_secret = 'KEY'"],
            "is the daemon's own (sessions.key_secret)",
        ),
    ],
)
def test_what_is_wrong_is_told(read: Read, parts: list[str], why: str) -> None:
    assert why in problem(read, *parts)


SHARED = '[cluster]\nurl_secret = "DB"\npools = ["parser"]'
SCHEDULE = '[[schedule]]\nname = "s"\ntask = "parser.fetch"\nevery = "1m"\nsession = "acme"'


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "is not a session of [sessions]: known are none"),
        (["[sessions.acme]", "[pools.parser]\nsessions = []"], "is not for pool 'parser'"),
        (
            ["[sessions.acme]", SHARED],
            "stays on one machine, and pool 'parser' is shared by the cluster",
        ),
        (
            [
                "[sessions]\nkey_secret = 'K'",
                '[sessions.acme]\nlogin_task = "browser.render"',
                "[pools.browser]",
                SHARED,
            ],
            "has a login task of pool 'browser' and is for pool 'parser', and of these only "
            "'parser' is shared by the cluster: take 'browser' into cluster.pools, too",
        ),
        (
            [
                "[sessions]\nkey_secret = 'K'",
                '[sessions.acme]\nlogin_task = "browser.render"',
                "[pools.browser]",
                SHARED.replace("parser", "browser"),
            ],
            "only 'browser' is shared by the cluster: take 'parser' into cluster.pools, too",
        ),
    ],
)
def test_a_schedule_that_cannot_use_its_session_is_refused(
    read: Read, parts: list[str], why: str
) -> None:
    assert why in problem(read, *parts, SCHEDULE)


def test_a_login_task_of_a_shared_pool_is_for_shared_pools(read: Read) -> None:
    both = SHARED.replace('"parser"', '"parser", "browser"')
    session = '[sessions.acme]\nlogin_task = "browser.render"'
    key = "[sessions]\nkey_secret = 'K'"
    config = read(key, session, "[pools.browser]\n[pools.parser]", both, SCHEDULE).config
    for name in ("parser", "browser"):
        assert list(sessions_of(name, config.pools[name], config)) == ["acme"]


def test_a_pool_that_is_shared_has_sessions_if_the_key_is(read: Read) -> None:
    named = [ACME, '[sessions.task]\nlogin_task = "browser.fetch"', SHARED]
    pools = "[pools.parser]\n[pools.browser]"
    for key, of_parser in (("", ()), ("[sessions]\nkey_secret = 'KEY'", ("acme",))):
        policy = fleet_policy(read(key, *named, pools).config)
        assert {each.name: each.sessions for each in policy.pools} == {
            "parser": of_parser,
            "browser": ("acme", "task"),
        }
        told = node_settings(read(key, *named, pools).config)
        assert told.sessions == {"parser": of_parser}


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("nobody.fetch", "has no pool"),
        ("browser.fetch", "has a pool that is not enabled"),
        ("parser.fetch", "is not for pool 'parser'"),
        ("parser", 'give "POOL.METHOD"'),
    ],
)
def test_a_login_task_that_cannot_run_is_refused(read: Read, task: str, why: str) -> None:
    pools = "[pools.parser]\nsessions = []\n[pools.browser]\nenabled = false"
    assert why in problem(read, f'[sessions.acme]\nlogin_task = "{task}"', pools)


def test_a_schedule_has_its_session(read: Read) -> None:
    (policy,) = fleet_policy(read(ACME, SCHEDULE).config).schedules
    assert policy.session == "acme"


# -- the key ------------------------------------------------------------------------------------


def test_a_key_is_generated_once_beside_the_state(read: Read, tmp_path: Path) -> None:
    config = read(ACME).config
    path = tmp_path / "state-keys" / "sessions.key"
    assert key_file(config) == path
    assert find_key(config) == b""  # a check makes nothing
    assert not path.parent.exists()
    made = find_key(config, make=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_key(config) == find_key(config, make=True) == made
    assert [each.name for each in path.parent.iterdir()] == ["sessions.key"]


def test_workers_get_the_key_if_their_pool_may_use_a_session(read: Read) -> None:
    loaded = read(ACME, "[pools.parser]", "[pools.browser]\nsessions = []")
    access = told(loaded)
    assert access.key == find_key(loaded.config)
    assert access.rules["acme"].login == "shops.acme:log_in"
    assert b"$secret:ACME_PASSWORD" in access.rules["acme"].args
    assert told(loaded, "browser") is None
    assert told(read("[pools.parser]")) is None


def test_the_key_of_a_secret(read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEY", "k" * 40)
    loaded = read('[sessions]\nkey_secret = "KEY"', ACME)
    assert told(loaded).key == key_of("k" * 40)
    assert not (tmp_path / "state-keys").exists()


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("short", 0o600, "give at least 32 random ones"),
        ("k" * 40, 0o644, "others may read or change it (mode 0644): chmod 600"),
        (None, 0, "No such file"),
    ],
)
def test_a_key_that_cannot_be_used_is_told_to_workers_not_fatal(
    read: Read, tmp_path: Path, text: str | None, mode: int, why: str
) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    access = told(read(f'[sessions]\nkey_file = "{file}"', ACME))
    assert access.key == b""
    assert why in access.problem


def test_where_no_key_can_be_generated_workers_are_told_what_to_do(
    read: Read, tmp_path: Path
) -> None:
    (tmp_path / "state-keys").write_text("a file, where the directory should be")
    assert "give sessions.key_file or sessions.key_secret" in told(read(ACME)).problem


# -- reloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "rolls"),
    [
        ("", ACME, True),
        (ACME, ACME.replace("log_in", "enter"), True),
        (ACME, ACME.replace("concurrent = 2", "concurrent = 3"), False),
        (ACME, ACME + '[sessions]\nkey_secret = "KEY"', True),
    ],
)
def test_workers_are_replaced_when_what_they_are_told_changes(
    read: Read, before: str, after: str, rolls: bool
) -> None:
    old, new = read(before), read(after)
    difference = compare(old, new)
    assert [each.effect for each in difference.pools] == (["rolls"] if rolls else [])
    assert difference.restart == []


def test_a_pool_without_sessions_keeps_its_build(read: Read) -> None:
    one = "[pools.parser]\nsessions = []"
    assert compare(read(one), read(one, ACME)).pools == []


def test_settings_with_a_key_are_msgpack_and_nothing_else(read: Read) -> None:
    config = read(ACME).config
    pool = config.pools["parser"]
    settings = with_sessions(worker_settings_of(pool), session_access("parser", pool, config))
    encoded = msgspec.msgpack.encode(settings)
    assert msgspec.msgpack.decode(encoded, type=WorkerSettings).sessions == settings.sessions
