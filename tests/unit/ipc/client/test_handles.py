"""Handles: what users see of them, results as annotated, and the status with Python values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec.msgpack import Ext

from musterd import AsyncTaskHandle, InvalidResult, Secret, TaskHandle, TaskStatus
from musterd.ipc.client.handle import BaseHandle, task_status
from musterd.ipc.client.session import Session
from musterd.ipc.secrets.reference import SECRET_CODE, encode_secret
from musterd.ipc.signatures import result_decoder
from musterd.ipc.wire.messages import FAILED, SUCCEEDED, Outcome, TaskView

encode = msgspec.msgpack.encode

# What docs/tasks.md and docs/workers.md promise.
PUBLIC = {
    *("id", "name", "state", "cached", "stale", "fallback"),
    *("done", "ack", "result", "outcome", "status", "progress", "cancel"),
}


@dataclass
class Offer:
    shop: str
    price: float


@pytest.mark.parametrize("kind", [TaskHandle, AsyncTaskHandle])
def test_a_handle_shows_its_public_names_and_no_others(kind: type[BaseHandle[Any]]) -> None:
    handle = kind("a", "p.x", None)
    assert {name for name in dir(handle) if not name.startswith("_")} == PUBLIC
    with pytest.raises(AttributeError):
        handle.anything = 1  # type: ignore[attr-defined]


def ended(value: object, returns: Callable[[bytes], Any] | None = None, **how: bool) -> Any:
    handle = BaseHandle[Any]("a", "p.x", None, None, returns)
    handle._ending = Outcome("a", SUCCEEDED, encode(value), **how)
    return handle._value(Session())


def offer(ctx: Any) -> Offer: ...


DECODE = result_decoder("offer", offer)


def test_the_result_of_a_typed_call_is_of_the_annotated_type() -> None:
    plain = {"shop": "aurora", "price": 3}
    assert ended(plain) == plain
    assert ended(plain, DECODE) == Offer("aurora", 3.0)
    assert ended(plain, DECODE, stale=True) == Offer("aurora", 3.0)
    assert ended(plain, DECODE, fallback=True) == Offer("aurora", 3.0)


def test_a_result_that_is_not_as_annotated_is_said() -> None:
    with pytest.raises(InvalidResult) as caught:
        ended({"shop": "aurora"}, DECODE)
    assert str(caught.value) == (
        "task a (p.x) succeeded, but its result is not what its handler is annotated with: "
        "the result: the field 'price' is missing; outcome().result has it as it is"
    )
    with pytest.raises(InvalidResult):
        ended(None, DECODE)


def test_no_result_at_all_is_none() -> None:
    handle = BaseHandle[Any]("a", "p.x", None, None, msgspec.msgpack.Decoder(None).decode)
    handle._ending = Outcome("a", SUCCEEDED)
    assert handle._value(Session()) is None


def test_the_fallback_of_a_submit_may_be_of_another_type() -> None:
    assert ended(None, DECODE, fallback=True) is None
    assert ended("nothing", DECODE, fallback=True) == "nothing"


def test_a_status_has_arguments_and_result_as_python_values() -> None:
    args = {"shop": "aurora", "password": Secret("SHOP"), "since": [1, {"a": b"b"}]}
    data = msgspec.msgpack.Encoder(enc_hook=encode_secret).encode(args)
    view = TaskView("a", "p.x", FAILED, "low", attempt=2, args=data, value=encode([1.5]))
    status = task_status(view)
    assert (status.args, status.value) == (args, [1.5])
    assert isinstance(status, TaskStatus)
    assert isinstance(status, TaskView)
    for name in TaskView.__struct_fields__:
        if name not in ("args", "value"):
            assert getattr(status, name) == getattr(view, name)
    assert task_status(TaskView("a", "p.x", "queued", "low")).args == {}
    assert task_status(TaskView("a", "p.x", "queued", "low")).value is None


def test_what_foreign_clients_have_sent_is_shown_as_far_as_it_can_be() -> None:
    for data in (b"\xc1", b"\xa1\xff", b"\x91" * 100_000):
        assert task_status(TaskView("a", "p.x", "queued", "low", args=data)).args == data
    foreign = [Ext(SECRET_CODE, b"$secret:../etc"), Ext(5, b"x")]
    shown = task_status(TaskView("a", "p.x", "queued", "low", args=encode(foreign)))
    assert shown.args == foreign
