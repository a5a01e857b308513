"""A task that cannot be submitted is InvalidTask; the message uses the caller's own words."""

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd import AsyncClient, Client, InvalidTask, NotConnected
from musterd.ipc.client.taskspec import make_spec
from musterd.ipc.wire.codec import decode_client, encode
from musterd.ipc.wire.messages import NESTING_MAX, TASK_BYTES_MAX, Submit
from musterd.supervisor.api.convert import task_spec
from musterd.supervisor.api.rpc import RpcError, SubmitTask
from musterd.supervisor.config.kinds import Choice

# Python's messages about our code, which do not tell users what to change.
INTERNAL = re.compile(
    r"make_spec|unpack|subscriptable|not iterable|positional argument|has no attr"
)


class Hostile:
    """Object that raises wherever it is inspected."""

    def __repr__(self) -> str:
        raise ZeroDivisionError("of a class of the user")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError("of a class of the user")

    def __hash__(self) -> int:
        raise ZeroDivisionError("of a class of the user")


circle: list[Any] = []
circle.append(circle)
deep: list[Any] = []
for _ in range(100_000):
    deep = [deep]


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    """Take a deeply nested list apart by hand: its destructor would not return."""
    yield
    inner = deep
    while inner:
        inner = inner.pop()
    circle.clear()


UNFIT = [
    *(2**64, -(2**63) - 1, 10**5000, object(), "\ud800", Hostile(), {"a": {"b": 2**64}}),
    *(circle, deep, "x" * TASK_BYTES_MAX, range, lambda: None, 1j, Path("/")),
]


@pytest.mark.parametrize("value", UNFIT, ids=range(len(UNFIT)))
@pytest.mark.parametrize("place", ["args", "fallback"])
def test_values_that_cannot_be_sent_are_invalid(place: str, value: Any) -> None:
    args, options = ({"value": value}, {}) if place == "args" else (None, {"fallback": value})
    with pytest.raises(InvalidTask, match=r"p\.x") as caught:
        make_spec("p.x", args, **options)
    assert not INTERNAL.search(str(caught.value))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("inmost", [[], 2**64, object()], ids=["nothing", "int", "object"])
@pytest.mark.parametrize("depth", [NESTING_MAX, 20_000])
def test_a_value_that_is_too_deep_is_invalid_whatever_is_in_it(depth: int, inmost: Any) -> None:
    """A search for the culprit that recurses for each level would not return."""
    value = inmost
    for _ in range(depth):
        value = [value]
    with pytest.raises(InvalidTask, match=r"p\.x") as caught:
        make_spec("p.x", {"value": value})
    assert len(str(caught.value)) < 500


def test_an_int_over_64_bits_is_named_with_what_to_do() -> None:
    with pytest.raises(InvalidTask, match=r"args\['n'\]\[1\] is an int of more than 64 bits"):
        make_spec("p.x", {"n": [1, 2**64]})


@pytest.mark.parametrize("args", [[], (), 0, "", False, [("a", 1)], "abc", 5, {1: 2}, {None: 1}])
def test_arguments_that_are_no_mapping_of_names_are_invalid(args: Any) -> None:
    with pytest.raises(InvalidTask, match=r"arguments of p\.x"):
        make_spec("p.x", args)


WRONG = [
    ("priority", ["urgent", 4, -1, True, 1.0, None, [], "hıgh", Hostile()]),
    ("target", [5, None, b"x", "t" * 254, "\ud800", []]),
    (
        "timeout",
        [0, -1, True, "30", float("nan"), float("inf"), 10**400, [], Decimal(1), Decimal("sNaN")],
    ),
    ("max_retries", [-1, 1.0, True, "3", 1001, 10**400, []]),
    ("delay", [-1, False, "1", None, [], 10**400, Decimal("sNaN")]),
    ("expires", [0, -1, "1", [], 1e12]),
    ("key", [5, None, [], b"k", "k" * 201, "\ud800"]),
    ("cache", [-1, "30", [], {}, 10**400, Decimal("sNaN")]),
    ("debounce", [-1, "x", [], float("inf")]),
    ("policy", [5, None, [], "p" * 33]),
    ("on_open", [5, None, [], "hope", Hostile()]),
    ("fallback_on", [5, None, [], "ever", Hostile()]),
]


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in WRONG for value in values], ids=type
)
def test_a_wrong_option_is_invalid_and_named(option: str, value: Any) -> None:
    with pytest.raises(InvalidTask, match=option) as caught:
        make_spec("p.x", **{option: value})
    assert isinstance(caught.value, ValueError)  # as Python's users expect for a wrong value
    assert not INTERNAL.search(str(caught.value))
    assert len(str(caught.value)) < 500


def test_an_unknown_option_is_invalid_and_says_which_was_meant() -> None:
    with pytest.raises(InvalidTask, match=r"no option 'prioritty': did you mean 'priority'\?"):
        make_spec("p.x", prioritty="high")
    with pytest.raises(InvalidTask, match=r"no option 'zzz': there are priority, target, "):
        make_spec("p.x", zzz=1)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.datetimes() | st.decimals() | st.complex_numbers() | st.uuids(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner)
    | st.tuples(inner) | st.sets(st.integers()),
    max_leaves=10,
)  # fmt: skip


@given(
    args=st.none() | st.dictionaries(st.text(), anything) | anything,
    options=st.dictionaries(
        st.sampled_from([option for option, _ in WRONG] + ["fallback", "other"]), anything
    ),
)
def test_whatever_is_submitted_is_a_task_that_can_be_decoded_or_invalid(
    args: Any, options: dict[str, Any]
) -> None:
    try:
        spec = make_spec("p.x", args, **options)
    except InvalidTask as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert not INTERNAL.search(refused)
        return
    msgspec.msgpack.decode(spec.args)
    decoded = decode_client(encode(Submit(1, [spec])))
    assert isinstance(decoded, Submit)
    assert decoded.tasks == [spec]


def test_seconds_may_be_a_timedelta() -> None:
    names = ("timeout", "delay", "expires", "cache", "debounce")
    options: Any = {name: timedelta(milliseconds=n + 1) for n, name in enumerate(names)}
    spec = make_spec("p.x", **options)
    found = [getattr(spec, f"{name}_ns") for name in names]
    assert found == [1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000]


def test_what_can_be_sent_is_sent() -> None:
    make_spec("p.x", {"at": datetime.now(UTC), "n": 2**64 - 1, "price": Decimal("1.5")})


@pytest.mark.parametrize("priority", ["HIGH", "High", "high", 1])
def test_a_priority_may_be_written_in_any_case(priority: Any) -> None:
    assert make_spec("p.x", priority=priority).priority == 1
    if isinstance(priority, str):
        params = SubmitTask(name="p.x", id="a", priority=priority)
        assert task_spec(params).priority == 1
        assert Choice(("critical", "high")).read(priority) == "high"


def test_a_wrong_priority_on_control_sock_is_a_clear_error() -> None:
    with pytest.raises(RpcError, match="priority must be one of 'critical'"):
        task_spec(SubmitTask(name="p.x", id="a", priority="urgent"))


REQUESTS = [
    *(5, None, "p.x", (), ("p.x",), ("p.x", {}, {}, {}), ("p.x", {}, 5), ("p.x", {}, {1: 2})),
    *(("p.x", {}, {"zzz": 1}), ("p.x", {}, [("a", 1)]), ("p.x", 5), (5, {})),
    *(("p.x", {}, {"on_done": 5}), {"name": "p.x"}, Hostile()),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=type)
def test_a_request_of_submit_many_that_is_none_is_invalid(tmp_path: Path, request_: Any) -> None:
    client = Client(tmp_path / "no.sock")
    with pytest.raises(InvalidTask) as caught:
        client.submit_many([("p.x", {}), request_])
    assert not INTERNAL.search(str(caught.value))
    client.close()

    async def main() -> None:
        async with AsyncClient(tmp_path / "no.sock") as client:
            with pytest.raises(InvalidTask) as caught:
                await client.submit_many([("p.x", {}), request_])
            assert not INTERNAL.search(str(caught.value))

    asyncio.run(main())


def test_what_nothing_can_be_taken_from_is_told_in_words_of_the_caller(tmp_path: Path) -> None:
    wrong: Any = 5
    client = Client(tmp_path / "no.sock", connect_timeout=0)
    for call, kind, words in (
        (lambda: client.submit_many(wrong), InvalidTask, "submit_many takes several .*, not 5"),
        (
            lambda: next(client.map("p.x", wrong)),
            InvalidTask,
            r"several .*arguments of p\.x, not 5",
        ),
        (lambda: next(client.as_completed(wrong)), TypeError, "give several handles .*, not 5"),
        (lambda: next(client.as_completed([[]])), TypeError, r"give handles .*, not \[\]"),
        (lambda: client.changes([]), TypeError, r"give the names of schedules, not \[\]"),
    ):
        with pytest.raises(kind, match=words) as caught:
            call()
        assert not INTERNAL.search(str(caught.value))
    client.close()

    async def main() -> None:
        async with AsyncClient(tmp_path / "no.sock") as client:
            with pytest.raises(InvalidTask, match=r"submit_many takes several .*, not 5"):
                await client.submit_many(wrong)
            with pytest.raises(InvalidTask, match=r"arguments of p\.x, not 5"):
                await anext(client.map("p.x", wrong))
            with pytest.raises(TypeError, match=r"give several handles .*, not 5"):
                await anext(client.as_completed(wrong))

    asyncio.run(main())


async def acoroutine(task: object) -> None:
    raise AssertionError("never called")


class Callable_:
    async def __call__(self, task: object) -> None:
        raise AssertionError("never called")


def test_on_done_must_be_a_function_and_a_plain_one_for_client(tmp_path: Path) -> None:
    with Client(tmp_path / "no.sock") as client:
        with pytest.raises(InvalidTask, match="on_done must be a function"):
            client.submit("p.x", on_done=5)  # type: ignore[arg-type]
        for coroutine in (acoroutine, Callable_()):
            with pytest.raises(InvalidTask, match="use AsyncClient"):
                client.submit("p.x", on_done=coroutine)
            with pytest.raises(InvalidTask, match="use AsyncClient"):
                client.submit_many([("p.x", {}, {"on_done": coroutine})])


@pytest.mark.parametrize("seconds", ["5", None, -1, float("nan"), True])
def test_a_connect_timeout_that_is_none_is_a_clear_error(tmp_path: Path, seconds: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="connect_timeout must be a number of seconds"):
            kind(tmp_path / "no.sock", connect_timeout=seconds)


def test_a_timeout_of_a_call_that_is_no_number_is_a_clear_error(tmp_path: Path) -> None:
    client = Client(tmp_path / "no.sock", connect_timeout=0)
    task = client.submit("p.x")
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None, not '5'"):
        task.result("5")  # type: ignore[arg-type]
    with pytest.raises(NotConnected):
        client.close()


def test_as_completed_takes_handles_alone(tmp_path: Path) -> None:
    with (
        Client(tmp_path / "no.sock") as client,
        pytest.raises(TypeError, match=r"give handles that submit\(\) returned, not 'p\.x'"),
    ):
        list(client.as_completed(["p.x"]))  # type: ignore[list-item]
