"""Client side of options that make tasks share results, and of invalidation."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from musterd.ipc.client.handle import BaseHandle
from musterd.ipc.client.record import TaskRecord
from musterd.ipc.client.session import Session
from musterd.ipc.client.taskspec import checked_invalidation, make_spec
from musterd.ipc.errors import InvalidTask
from musterd.ipc.wire.codec import decode_client
from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    KEY_LENGTH_MAX,
    NEVER_NS,
    PROTOCOL,
    TASK_BYTES_MAX,
    Inspect,
    Inspected,
    Invalidate,
    Outcome,
    Submit,
    TaskSpec,
    Welcome,
)

NOW = 1_000_000_000_000
SECOND_NS = 1_000_000_000
unpack = msgspec.msgpack.decode


def test_nothing_is_shared_unless_asked_for() -> None:
    spec = make_spec("p.x", {"a": 1})
    assert spec == TaskSpec(spec.id, "p.x", spec.args)


def test_key_cache_and_debounce_reach_the_task() -> None:
    spec = make_spec("p.x", key="k", cache=30, debounce=1.5)
    assert (spec.key, spec.cache_ns, spec.debounce_ns) == ("k", 30 * SECOND_NS, 1_500_000_000)
    spec = make_spec("p.x", cache=timedelta(minutes=1), timeout=timedelta(seconds=2))
    assert (spec.cache_ns, spec.timeout_ns) == (60 * SECOND_NS, 2 * SECOND_NS)
    for nothing in (0, None):
        spec = make_spec("p.x", key="k", cache=nothing, debounce=nothing)
        assert (spec.cache_ns, spec.debounce_ns) == (0, 0)


def test_true_is_as_configured_and_false_is_never() -> None:
    spec = make_spec("p.x", cache=True, debounce=True)
    assert (spec.cache_ns, spec.debounce_ns) == (AS_CONFIGURED, AS_CONFIGURED)
    assert spec.key.startswith("p.x:")
    spec = make_spec("p.x", cache=False, debounce=False)
    assert (spec.key, spec.cache_ns, spec.debounce_ns) == ("", NEVER_NS, NEVER_NS)
    spec = make_spec("p.x", key="k", cache=False)
    assert (spec.key, spec.cache_ns, spec.debounce_ns) == ("k", NEVER_NS, 0)


@pytest.mark.parametrize("option", ["cache", "debounce"])
def test_without_a_key_name_and_arguments_are_the_key(option: str) -> None:
    def key(name: str, args: Any) -> str:
        return make_spec(name, args, **{option: 1}).key  # type: ignore[arg-type]

    assert key("p.x", {"a": {"c": 1, "d": 2}, "b": 1}) == key(
        "p.x", {"b": 1, "a": {"d": 2, "c": 1}}
    )
    assert key("p.x", {"a": 1}) != key("p.x", {"a": 2})
    assert key("p.x", None) == key("p.x", {}) != key("p.y", {})
    assert key("p.x", {}).startswith("p.x:")
    assert len(key("p." + "x" * 190, {})) <= KEY_LENGTH_MAX


def test_arguments_that_cannot_be_put_in_order_need_a_key() -> None:
    with pytest.raises(InvalidTask, match="give a key"):
        make_spec("p.x", {"a": {1: 2, "b": 3}}, cache=1)
    assert make_spec("p.x", {"a": {1: 2, "b": 3}}, cache=1, key="k").key == "k"


def test_the_arguments_themselves_keep_their_order() -> None:
    args = unpack(make_spec("p.x", {"b": {"z": 1, "a": 2}}, cache=1).args)
    assert list(args["b"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": "k" * 201}, InvalidTask),
        ({"key": 5}, InvalidTask),
        ({"key": "\ud800"}, InvalidTask),
        ({"cache": -1}, ValueError),
        ({"cache": "30"}, ValueError),
        ({"debounce": float("inf")}, ValueError),
        ({"policy": "p" * 33}, InvalidTask),
        ({"on_open": "hope"}, ValueError),
        ({"fallback": object()}, InvalidTask),
        ({"fallback": b"x" * TASK_BYTES_MAX}, InvalidTask),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    options: dict[str, Any], error: type[Exception]
) -> None:
    (name,) = options
    with pytest.raises(error, match=name):
        make_spec("p.x", **options)


def test_a_fallback_may_be_anything_even_none_and_says_when_it_is_meant() -> None:
    assert make_spec("p.x", policy="few", on_open="fail").fallback is None
    spec = make_spec("p.x", fallback=None)
    assert spec.fallback is not None
    assert (unpack(spec.fallback), spec.on_open) == (None, "fallback")
    spec = make_spec("p.x", fallback=[1], on_open="wait", policy="few")
    assert (spec.on_open, spec.policy) == ("wait", "few")


def test_a_fallback_counts_towards_the_size_of_a_batch() -> None:
    small, large = make_spec("p.x"), make_spec("p.x", fallback=b"x" * 5000)
    sizes = [TaskRecord(spec.id, spec.name, spec)._size for spec in (small, large)]
    assert sizes[1] - sizes[0] >= 5000


def test_a_handle_tells_whose_result_it_got() -> None:
    handle = BaseHandle("a", "p.x", None)
    assert (handle.cached, handle.stale) == (False, False)
    handle._ending = Outcome("a", "succeeded", cached=True)
    assert (handle.cached, handle.stale) == (True, False)
    handle._ending = Outcome("a", "succeeded", stale=True)
    assert (handle.cached, handle.stale, handle.fallback) == (False, True, False)
    handle._ending = Outcome("a", "succeeded", fallback=True)
    assert (handle.cached, handle.stale, handle.fallback) == (False, False, True)


def test_exactly_one_of_key_and_prefix_is_invalidated() -> None:
    assert checked_invalidation("k", None) == ("k", False)
    assert checked_invalidation("", "p") == ("p", True)
    assert checked_invalidation("", "") == ("", True)
    for wrong in (("", None), ("k", "p")):
        with pytest.raises(ValueError, match="give a key, or a prefix"):
            checked_invalidation(*wrong)


def sent(session: Session) -> list[object]:
    frames = list(session.outbox)
    session.outbox.clear()
    return [decode_client(frame) for frame in frames]


def test_an_invalidation_is_done_when_the_question_behind_it_is_answered() -> None:
    session = Session()
    session.connected(NOW)
    spec = make_spec("p.x")
    session.add(TaskRecord(spec.id, spec.name, spec))
    inspection = session.invalidate(NOW, "k", False)
    assert sent(session) == []  # no supervisor yet
    for epoch in ("one", "two"):  # a second supervisor is asked again
        session.receive(NOW, Welcome(PROTOCOL, epoch))
        messages = sent(session)
        assert isinstance(messages[0], Submit)
        assert messages[1:] == [Invalidate("k"), Inspect(1, "-")]
        assert not inspection.answered
    session.receive(NOW, Inspected(1, None))
    assert inspection.answered
    session.receive(NOW, Welcome(PROTOCOL, "three"))
    assert Invalidate("k") not in sent(session)


def test_an_invalidation_goes_out_behind_the_tasks_before_it() -> None:
    session = Session()
    session.connected(NOW)
    session.receive(NOW, Welcome(PROTOCOL, "one"))
    sent(session)
    spec = make_spec("p.x")
    session.add(TaskRecord(spec.id, spec.name, spec))
    session.invalidate(NOW, "p", True)
    assert [type(message) for message in sent(session)] == [Submit, Invalidate, Inspect]
