"""Operation state: a key for every set of parameters, resumed, cleared, nothing secret in it."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.workers.authoring.base import Context
from musterd.workers.toolkit import MemoryState, StateError, operation
from musterd.workers.toolkit.state import (
    NAME_CHARS_MAX,
    is_sensitive,
    operation_key,
    short_name,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=5,
)
parameters = st.dictionaries(st.text(min_size=1).map(lambda name: f"p{name}"), plain, max_size=4)


class Ctx(Context):
    def __init__(self) -> None:
        super().__init__("t1")
        self.state = MemoryState()


@given(st.text(), parameters)
def test_the_key_does_not_depend_on_the_order(name: str, given_: dict[str, Any]) -> None:
    backwards = dict(reversed(given_.items()))
    assert operation_key(name, given_) == operation_key(name, backwards)


@given(st.text(), parameters, parameters)
def test_other_parameters_make_another_key(
    name: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    same = repr(sorted(one.items())) == repr(sorted(other.items()))
    if not same and one != other:
        assert operation_key(name, one) != operation_key(name, other)


def test_the_key_is_the_same_in_another_process() -> None:
    code = (
        "from musterd.workers.toolkit.state import operation_key\n"
        "print(operation_key('sync', {'shops': {'b', 'a', 'c'}, 'password': 'hunter2'}))"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


def test_secrets_tell_operations_apart_without_being_readable() -> None:
    key = operation_key("sync", {"shop": "a", "password": "hunter2"})
    assert key.startswith("sync:")
    assert "hunter2" not in key
    assert key != operation_key("sync", {"shop": "a", "password": "hunter3"})
    assert key != operation_key("sync", {"shop": "a"})
    assert key != operation_key("sync", {"shop": "a", "api_key": "hunter2"})


def test_long_names_still_make_short_keys_that_differ() -> None:
    long = "x" * 5000
    keys = {operation_key(name, {}) for name in (long, long + "y")}
    assert len(keys) == 2
    names = {short_name(name) for name in (long, long + "y", "x" * NAME_CHARS_MAX, "x")}
    assert len(names) == 4
    assert max(map(len, keys | names)) <= NAME_CHARS_MAX + 33


def test_parameters_that_cannot_be_a_key_are_a_clear_error() -> None:
    with pytest.raises(StateError, match="operation 'sync' cannot be a key"):
        operation_key("sync", {"what": object()})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("password", "DB_PASSWORD", "api-key", "X-API-Key", "apikey")),
        *((name, True) for name in ("token", "access_token", "Authorization", "cookie", "secret")),
        *((name, False) for name in ("page", "next_page_token", "sync_token", "tokens", "keys")),
        *((name, False) for name in ("secretary", "author", "password_age", "monkey")),
    ],
)
def test_which_names_are_sensitive(name: str, expected: bool) -> None:
    assert is_sensitive(name) is expected


def test_more_names_can_be_called_sensitive() -> None:
    assert is_sensitive("iban", frozenset({"iban"}))
    assert not is_sensitive("iban")


# -- life -----------------------------------------------------------------------------------------


def test_state_stays_after_an_error_and_is_cleared_after_a_good_end() -> None:
    ctx = Ctx()

    def stopped() -> None:
        with operation(ctx, "sync", shop="a") as work:
            assert work.load() is None
            work.save({"page": 2})
            raise ConnectionError

    with pytest.raises(ConnectionError):
        stopped()
    with operation(ctx, "sync", shop="b") as other:
        assert other.load() is None
    with operation(ctx, "sync", shop="a") as work:
        assert work.load() == {"page": 2}
        work.save({"page": 3})
    assert ctx.state.kept == {}


def test_the_same_for_async_handlers() -> None:
    ctx = Ctx()

    async def run(*, fails: bool) -> Any:
        async with operation(ctx, "sync", shop="a") as work:
            before = await work.aload()
            await work.asave({"page": 2})
            if fails:
                raise ConnectionError
            return before

    with pytest.raises(ConnectionError):
        asyncio.run(run(fails=True))
    assert asyncio.run(run(fails=False)) == {"page": 2}
    assert ctx.state.kept == {}


def test_restoring_is_logged_without_parameters(caplog: pytest.LogCaptureFixture) -> None:
    ctx = Ctx()
    with caplog.at_level("DEBUG", "musterd.toolkit"):
        work = operation(ctx, "sync", shop="acme", password="hunter2")
        work.save({"page": 2})
        work.load()
        work.clear()
    key = work.key
    assert [record.getMessage() for record in caplog.records] == [
        f"state of {key} saved",
        f"state of {key} restored",
        f"state of {key} cleared",
    ]
    assert "hunter2" not in caplog.text


# -- secrets --------------------------------------------------------------------------------------


@dataclass
class Login:
    user: str
    password: str | None


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"api_key": "x"}, r"'api_key' at state;"),
        ({"pages": [1, {"login": {"Password": "x"}}]}, r"at state\['pages'\]\[1\]\['login'\];"),
        ({"login": Login("me", "x")}, r"'password' at state\['login'\];"),
    ],
)
def test_a_value_with_a_sensitive_name_is_refused(value: Any, where: str) -> None:
    ctx = Ctx()
    with pytest.raises(StateError, match=where):
        operation(ctx, "sync").save(value)
    with pytest.raises(StateError, match=where):
        asyncio.run(operation(ctx, "sync").asave(value))
    assert ctx.state.kept == {}


@pytest.mark.parametrize(
    "value",
    [
        {"next": "https://shop.example/?page=2&key=s3cr3t%2Fkey+1"},
        ["https://shop.example/?key=s3cr3t%2Fkey%201"],
        {"s3cr3t/key 1": 1},
        {"raw": b"<s3cr3t/key 1>"},
    ],
)
def test_a_value_that_contains_a_secret_parameter_is_refused(value: Any) -> None:
    ctx = Ctx()
    with pytest.raises(StateError, match="contains the value of its parameter 'api_key'") as told:
        operation(ctx, "sync", api_key="s3cr3t/key 1").save(value)
    assert "s3cr3t" not in str(told.value)
    assert ctx.state.kept == {}


def test_innocent_values_pass() -> None:
    ctx = Ctx()
    work = operation(ctx, "sync", password="ab", api_key="s3cr3t/key 1")
    work.save({"about": "able", "password": None, "next_page_token": "abc", "n": [1.5, None]})
    assert work.load()["about"] == "able"  # type: ignore[index]


def test_a_value_that_contains_itself_is_a_clear_error() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(StateError, match="contains itself"):
        operation(Ctx(), "sync").save(ring)


def test_without_a_context_it_says_so() -> None:
    with pytest.raises(TypeError, match="operation 'sync' needs the task's ctx"):
        operation(None, "sync")  # type: ignore[arg-type]
