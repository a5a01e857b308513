"""Secrets: named by clients, refused as literals by the supervisor, looked up in workers."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd import InvalidTask, Secret
from musterd.ipc.client.taskspec import encode_args
from musterd.ipc.errors import ConfigurationError
from musterd.ipc.secrets.access import Access, RefusedSecret
from musterd.ipc.secrets.lookup import SECRET_BYTES_MAX, MissingSecret
from musterd.ipc.secrets.names import SENSITIVE
from musterd.ipc.secrets.reference import SECRET_MARK, from_json
from musterd.ipc.wire.messages import INVALID_TASK, TaskSpec
from musterd.supervisor.config.load import load
from musterd.supervisor.config.redact import DEPTH_MAX, Redaction
from musterd.supervisor.core.model.events import TasksSubmitted
from musterd.supervisor.processes.environment import inherited
from musterd.supervisor.settings import worker_environment
from musterd.workers.authoring.state import own_key
from musterd.workers.authoring.vault import Leak, Vault, Vaults

VALUE = "p4$$ wörd/with?odd&signs"


def args(**arguments: Any) -> bytes:
    return encode_args("p.x", arguments)


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setenv("SHOP_KEY", VALUE)
    return Vaults(Access("shop", variables=frozenset({"SHOP_KEY"}))).new()


# -- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "../etc/passwd", "a b", "9", "a" * 129, None, "x\n", "ä"])
def test_a_secret_needs_a_name_that_is_no_path_and_no_value(name: Any) -> None:
    with pytest.raises(ValueError, match="give the name"):
        Secret(name)


def test_a_secret_travels_by_name_at_any_depth() -> None:
    data = args(login={"keys": [Secret("SHOP_KEY")]}, other=Secret("B"))
    assert SECRET_MARK in data
    assert data.count(SECRET_MARK) == 2
    assert b"SHOP_KEY" in data


def test_what_cannot_be_sent_is_still_named() -> None:
    with pytest.raises(InvalidTask, match=r"args\['a'\]\[0\] is of type object"):
        args(a=[object()])


def test_json_has_a_way_to_write_one() -> None:
    value = {"a": {"$secret": "SHOP_KEY"}, "b": [{"$secret": "B"}], "c": {"$secret": "C", "d": 1}}
    read = from_json(value)
    assert read == {"a": Secret("SHOP_KEY"), "b": [Secret("B")], "c": {"$secret": "C", "d": 1}}
    with pytest.raises(ValueError, match="give the name"):
        from_json({"a": {"$secret": 5}})


# -- literals are refused -----------------------------------------------------------------------

REDACTION = Redaction(("api_key", "password"))


def refused(*arguments: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the ids that pass, and the messages for those that do not."""
    specs = [TaskSpec(str(n), "p.x", encode_args("p.x", each)) for n, each in enumerate(arguments)]
    event = REDACTION.refuse(TasksSubmitted(b"", 1, specs, 0))
    assert {each.code for each in event.rejected} <= {INVALID_TASK}
    return [spec.id for spec in event.tasks], [each.message for each in event.rejected]


def test_a_literal_under_a_redacted_name_is_refused_and_not_repeated() -> None:
    passed, messages = refused({"password": "hunter2"}, {"user": "password"})
    assert passed == ["1"]
    assert "argument 'password' of 'p.x' is named in redact" in messages[0]
    assert "hunter2" not in messages[0]


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"login": {"api_key": "x"}}, "login.api_key"),
        ({"rows": [{"a": 1}, {"password": ["x"]}]}, "rows[1].password"),
        ({"password": {"api_key": Secret("A")}}, "password"),
        ({"password": 5}, "password"),
        ({"password": b"x"}, "password"),
    ],
)
def test_a_literal_is_found_at_any_depth(arguments: dict[str, Any], path: str) -> None:
    _, (message,) = refused(arguments)
    assert f"'{path}'" in message


@pytest.mark.parametrize("value", [Secret("A"), None, ""])
def test_a_secret_or_nothing_is_welcome(value: Any) -> None:
    assert refused({"password": value, "deep": {"api_key": value}}) == (["0"], [])


def test_an_event_without_such_names_is_left_as_it_is() -> None:
    event = TasksSubmitted(b"", 1, [TaskSpec("t", "p.x", args(passwords=1))], 0)
    assert REDACTION.refuse(event) is event


def test_another_extension_is_no_secret() -> None:
    other = msgspec.msgpack.encode({"password": msgspec.msgpack.Ext(5, b"$secret:A")})
    false = msgspec.msgpack.encode({"password": msgspec.msgpack.Ext(83, b"hunter2")})
    assert REDACTION.literal_in(other) == REDACTION.literal_in(false) == "password"


def test_what_cannot_be_looked_into_is_refused() -> None:
    deep: Any = {"password": Secret("A")}
    for _ in range(DEPTH_MAX + 1):
        deep = [deep]
    assert REDACTION.literal_in(args(a=deep))
    assert REDACTION.literal_in(b"\x81\xa8password")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"password": "hunter2"}, "has a value at password, which is named in supervisor.redact"),
        ({"login": {"api_key": "hunter2"}}, "has a value at login.api_key"),
        ({"password": {"$secret": "not a name"}}, "are not valid arguments of a task"),
        ({"password": {"$secret": "SHOP_KEY"}}, ""),
    ],
)
def test_a_literal_in_a_schedule_is_a_mistake_of_the_configuration(
    tmp_path: Path, args: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "musterd.json"
    schedule = {"task": "p.x", "every": "1m", "args": args}
    pools = {"p": {"worker": "m:C"}}
    path.write_bytes(msgspec.json.encode({"pools": pools, "schedule": {"s": schedule}}))
    if not problem:
        load([path], None, [], {})
        return
    with pytest.raises(ConfigurationError) as caught:
        load([path], None, [], {})
    assert f"'schedule.s.args': {problem}" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_is_redacted_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "musterd.json"
    path.write_bytes(msgspec.json.encode({"supervisor": {"redact": ["pin", "pin", "token"]}}))
    assert load([path], None, [], {}).config.supervisor.redact == ("pin", "token")
    for wrong in ("pin", [1], [""], ["x" * 300], [str(n) for n in range(101)]):
        path.write_bytes(msgspec.json.encode({"supervisor": {"redact": wrong}}))
        with pytest.raises(ConfigurationError, match=r"supervisor\.redact"):
            load([path], None, [], {})


@pytest.mark.parametrize(
    "name",
    [
        *("token", "secret", "passwd", "api_secret", "user_password", "apiKey", "APIKey"),
        *("authorization", "Authorization", "X-API-KEY", "cookie", "Set-Cookie", "PASSWORD"),
        *("db.password", "user password", "password2", "client-secret", "AccessToken"),
    ],
)
def test_names_are_compared_by_word(name: str) -> None:
    redaction = Redaction(SENSITIVE)
    spec = TaskSpec("t", "p.x", args(deep=[{name: "hunter2"}]))
    (rejection,) = redaction.refuse(TasksSubmitted(b"", 1, [spec], 0)).rejected
    assert f"argument 'deep[0].{name}'" in rejection.message
    assert "hunter2" not in rejection.message


@pytest.mark.parametrize(
    "name", ["tokens", "secretary", "password_age", "next_page_token", "monkey", "author", "keys"]
)
def test_other_words_are_welcome(name: str) -> None:
    event = TasksSubmitted(b"", 1, [TaskSpec("t", "p.x", args(**{name: "password"}))], 0)
    assert Redaction(SENSITIVE).refuse(event) is event


@pytest.mark.parametrize(
    "key",
    [
        b"\xa8password",
        b"\xd9\x08password",
        b"\xda\x00\x08password",
        b"\xdb\x00\x00\x00\x08password",
        b"\xc4\x08password",
        b"\xc5\x00\x08PassWord",
    ],
)
def test_a_name_is_found_in_any_encoding_that_msgpack_has(key: bytes) -> None:
    data = b"\x81\xa1a\x81" + key + b"\xa7hunter2"
    event = TasksSubmitted(b"", 1, [TaskSpec("t", "p.x", data)], 0)
    (rejection,) = REDACTION.refuse(event).rejected
    assert "password" in rejection.message.lower()


def test_a_fallback_has_no_literal_either() -> None:
    brought = msgspec.msgpack.encode({"login": {"apiKey": "hunter2"}})
    specs = [
        TaskSpec("a", "p.x", args(a=1), fallback=brought),
        TaskSpec("b", "p.x", args(a=1), fallback=msgspec.msgpack.encode({"price": 1})),
    ]
    event = REDACTION.refuse(TasksSubmitted(b"", 1, specs, 0))
    assert [spec.id for spec in event.tasks] == ["b"]
    assert "'login.apiKey' in the fallback of 'p.x' is named in redact" in event.rejected[0].message


def test_a_name_that_moves_the_cursor_does_not_come_back_raw() -> None:
    spec = TaskSpec("t", "p.x", args(**{"\x1b[31m.password": "hunter2"}))
    (rejection,) = REDACTION.refuse(TasksSubmitted(b"", 1, [spec], 0)).rejected
    assert rejection.message.isprintable()


# -- which secrets a pool may use -----------------------------------------------------------------


def loaded(folder: Path, pool: dict[str, Any], **sections: Any) -> Any:
    path = folder / "musterd.json"
    pools = {"p": {"worker": "m:C", **pool}}
    path.write_bytes(msgspec.json.encode({"pools": pools, **sections}))
    return load([path], None, [], {}).config


@pytest.mark.parametrize(
    ("secrets", "problem"),
    [
        ("SHOP_*", 'is not a list of secret names: give one such as ["SHOP_*"]'),
        ([1], "is not a list of secret names"),
        (["a b"], "is not a valid secret name"),
        (["../x"], "is not a valid secret name"),
        ([""], "is not a valid secret name"),
        (["SHOP/*"], "matches no secret"),
        (["x" * 128 + "*"], "matches no secret"),
        ([str(n) + "*" for n in range(101)], "has more than 100 secret names: use a pattern"),
        (["MUSTERD_HTTP__TOKEN"], "the daemon's own"),
        (["CREDENTIALS_DIRECTORY"], "the daemon's own"),
        (["NOTIFY_SOCKET"], "the daemon's own"),
    ],
)
def test_patterns_are_checked(tmp_path: Path, secrets: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(tmp_path, {"secrets": secrets})
    assert "pools.p.secrets" in str(caught.value)
    assert problem in str(caught.value)


def test_what_the_daemon_keeps_for_itself_cannot_be_given_to_a_pool(tmp_path: Path) -> None:
    alerts = {"ops": {"on": ["worker.fatal"], "url_secret": "ALERT_URL"}}
    for name, sections in (
        ("ALERT_URL", {"alerts": alerts}),
        ("http-token", {"http": {"token_file": "http-token"}}),
    ):
        assert loaded(tmp_path, {"secrets": ["*"]}, **sections)
        with pytest.raises(ConfigurationError, match=f"names {name}, which is the daemon's own"):
            loaded(tmp_path, {"secrets": ["*", name]}, **sections)


def test_a_directory_with_the_daemons_token_is_no_secrets_dir(tmp_path: Path) -> None:
    token = {"token_file": "/etc/musterd/http-token"}
    with pytest.raises(ConfigurationError, match="holds http-token, which is the daemon's own"):
        loaded(tmp_path, {"secrets_dir": "/etc/musterd"}, http=token)
    assert loaded(tmp_path, {"secrets_dir": "/etc/musterd", "secrets": ["SHOP_*"]}, http=token)


def test_a_pool_is_given_what_it_names_in_full_and_no_more(tmp_path: Path) -> None:
    pool = {"secrets": ["SHOP_*", "KEY"], "env": {"LANG": "C"}, "secrets_dir": "/run/secrets"}
    config = loaded(tmp_path, pool, http={"token_file": "http-token"})
    environ = {"SHOP_A": "a", "KEY": "k", "OTHER": "o", "CREDENTIALS_DIRECTORY": "/run/c"}
    given = worker_environment.given("p", config.pools["p"], config, environ)
    access = msgspec.json.decode(given.pop("MUSTERD_SECRETS"), type=Access)
    assert given == {"MUSTERD_LOG_LEVEL": "info", "KEY": "k", "LANG": "C"}
    assert access == Access(
        pool="p",
        patterns=("SHOP_*", "KEY"),
        variables=frozenset({"KEY", "LANG"}),
        credentials={"KEY": "/run/c/KEY"},
        folder="/run/secrets",
        own=("/run/c/http-token",),
    )
    kept = {**environ, "PATH": "/bin", "LC_ALL": "C", "https_proxy": "x", "PYTHONPATH": "/srv"}
    assert inherited(kept).keys() == {*("PATH", "LC_ALL", "https_proxy", "PYTHONPATH")}


# -- values, in the worker ----------------------------------------------------------------------


def test_values_take_the_place_of_names(vault: Vault) -> None:
    opened = vault.open(args(a=Secret("SHOP_KEY"), b=[{"c": Secret("SHOP_KEY")}], d=1.5))
    assert msgspec.msgpack.decode(opened) == {"a": VALUE, "b": [{"c": VALUE}], "d": 1.5}


def test_other_extensions_pass_untouched(vault: Vault) -> None:
    other = msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(5, b"$secret:SHOP_KEY")})
    assert vault.open(other) == other


def test_a_secret_is_found_in_variables_then_in_credentials_then_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials, files = tmp_path / "credentials", tmp_path / "files"
    credentials.mkdir()
    files.mkdir()
    for folder, names in ((credentials, "AB"), (files, "ABC")):
        for name in names:
            (folder / name).write_text(f"{name} of {folder.name}\n")
    monkeypatch.setenv("A", "A of the environment")
    access = Access(
        variables=frozenset("A"),
        credentials={name: str(credentials / name) for name in "AB"},
        folder=str(files),
    )
    opened = Vaults(access).new().open(args(**{name: Secret(name) for name in "ABC"}))
    assert msgspec.msgpack.decode(opened) == {
        "A": "A of the environment",
        "B": "B of credentials",
        "C": "C of files",
    }


def test_a_secret_that_is_not_given_is_named_with_its_pool_and_what_to_write(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_GIVEN", "a variable of the worker for other ends")
    for name in ("NO_SUCH", "NOT_GIVEN"):
        with pytest.raises(RefusedSecret) as caught:
            vault.open(args(a=Secret(name)))
        assert f"secret '{name}' is not given to pool 'shop'" in str(caught.value)
        assert f"[pools.shop] secrets = ['{name}']" in str(caught.value)


def test_a_name_that_no_pattern_fits_is_refused_wherever_it_is(tmp_path: Path) -> None:
    for name in ("SHOP_KEY", "OTHER"):
        (tmp_path / name).write_text("value\n")
    vault = Vaults(Access("shop", patterns=("SHOP_*",), folder=str(tmp_path))).new()
    vault.open(args(a=Secret("SHOP_KEY")))
    with pytest.raises(RefusedSecret, match="'OTHER' is not for pool 'shop', which has secrets ="):
        vault.open(args(a=Secret("OTHER")))


def test_a_file_of_the_daemon_is_not_given_away_through_a_link(tmp_path: Path) -> None:
    own, folder = tmp_path / "http-token", tmp_path / "secrets"
    own.write_text("0123456789abcdef")
    folder.mkdir()
    (folder / "soft").symlink_to(own)
    (folder / "hard").hardlink_to(own)
    vault = Vaults(Access("shop", folder=str(folder), own=("/nowhere", str(own)))).new()
    for name in ("soft", "hard"):
        with pytest.raises(RefusedSecret, match="file of the daemon itself"):
            vault.open(args(a=Secret(name)))


def test_a_name_that_came_by_another_way_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    vault = Vaults(Access(folder=str(tmp_path / "files"))).new()
    evil = msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(83, SECRET_MARK + b"../outside")})
    with pytest.raises(MissingSecret, match="cannot be the name"):
        vault.open(evil)


@pytest.mark.parametrize("content", [b"x" * (SECRET_BYTES_MAX + 1), b"\xff\xfe"])
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "A").write_bytes(content)
    vault = Vaults(Access(folder=str(tmp_path))).new()
    with pytest.raises(MissingSecret, match="secret 'A'"):
        vault.open(args(a=Secret("A")))


@pytest.mark.parametrize(
    "written",
    [
        VALUE,
        repr(VALUE),
        "https://x/?key=p4%24%24%20w%C3%B6rd%2Fwith%3Fodd%26signs",
        "key=p4%24%24+w%C3%B6rd%2Fwith%3Fodd%26signs",
        '"p4$$ w\\u00f6rd/with?odd&signs"',
        "cDQkJCB3w7ZyZC93aXRoP29kZCZzaWducw==",
    ],
)
def test_text_is_told_without_values(vault: Vault, written: str) -> None:
    vault.open(args(a=Secret("SHOP_KEY")))
    told = vault.redact(f"it was <{written}>")
    assert "***SHOP_KEY***" in told
    assert "rd" not in told
    vault.clear()
    assert "rd" not in vault.redact(written), "a thread may still have it"


def test_data_with_a_value_is_refused_by_name(vault: Vault) -> None:
    vault.open(args(a=Secret("SHOP_KEY")))
    with pytest.raises(Leak, match="the result of x contains the value of secret 'SHOP_KEY'") as e:
        vault.check("the result of x", msgspec.msgpack.encode({"a": f"<{VALUE}>"}))
    assert VALUE not in str(e.value)
    vault.check("the result of x", b"something else")


def test_the_key_of_an_operation_is_made_of_names_and_the_order_does_not_matter(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = own_key("p.x", args(a=1, b=Secret("SHOP_KEY")))
    assert key == own_key("p.x", args(b=Secret("SHOP_KEY"), a=1))
    monkeypatch.setenv("SHOP_KEY", "another value")
    assert key == own_key("p.x", args(a=1, b=Secret("SHOP_KEY")))
    others = [
        own_key("p.y", args(a=1, b=Secret("SHOP_KEY"))),
        own_key("p.x", args(a=2, b=Secret("SHOP_KEY"))),
        own_key("p.x", args(a=1, b=Secret("OTHER"))),
    ]
    assert len({key, *others}) == 4
    assert len(own_key("p." + "x" * 198, args())) <= 200


@pytest.mark.timeout(30)
def test_a_pipe_is_no_secret_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "PIPE")
    with pytest.raises(MissingSecret, match="is not an ordinary file"):
        Access(folder=str(tmp_path)).find("PIPE")
