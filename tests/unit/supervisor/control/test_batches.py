"""Batches and positional parameters of JSON-RPC 2.0, on a real socket."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import Params
from musterd.supervisor.control import connection as control_connection
from musterd.supervisor.control import server
from musterd.supervisor.control.answers import Pending
from musterd.supervisor.control.server import ControlServer
from musterd.supervisor.sockets.listen import Caller

TURNS_MAX = 5000


class Handler:
    """A handler that answers with `result`, or with the Pending that `later` has for the method."""

    def __init__(self) -> None:
        self.calls: list[Params] = []
        self.later: dict[str, Pending] = {}
        self.result: object = "done"

    def call(self, method: str, params: Params, caller: Caller) -> object:
        self.calls.append(params)
        return self.later.get(method, self.result)


class Bench:
    def __init__(self, path: Path) -> None:
        self.handler = Handler()
        self.server = ControlServer(path, "", self.handler)
        self.path = path
        self.client = self.connect()

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(str(self.path))
        client.setblocking(False)
        return client

    def turn(self) -> None:
        self.server.serve(1_000_000_000)

    def ask(self, message: Any) -> list[Any]:
        """Send a message; return the lines of the answer."""
        line = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.client.send(line + b"\n")
        return self.lines()

    def lines(self) -> list[Any]:
        received, quiet = b"", 0
        while quiet < 5:
            self.turn()
            try:
                received += self.client.recv(1 << 24)
                quiet = 0
            except BlockingIOError:
                quiet += 1
        return [json.loads(line) for line in received.splitlines()]

    def close(self) -> None:
        self.server.close()
        self.client.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "control.sock")
    yield made
    made.close()


def one(method: str = "version", **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, **more}


def ok(request_id: Any, result: Any = "done") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def codes(answers: Any) -> list[Any]:
    return [(each["id"], each["error"]["code"]) for each in answers]


# -- parameters -------------------------------------------------------------------------------


def test_an_empty_list_of_parameters_is_none(bench: Bench) -> None:
    assert bench.ask(one("status", id=1, params=[])) == [ok(1)]
    assert bench.handler.calls == [rpc.Status()]


def test_parameters_by_position_are_those_by_name(bench: Bench) -> None:
    assert bench.ask(one("scale", id=1, params=["parser", 3])) == [ok(1)]
    assert bench.handler.calls == [rpc.Scale(pool="parser", size=3)]


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        ("version", [1], "1 are given, and it has none"),
        ("scale", ["a", 1, True, 4], "4 are given, and it has pool, size, no_block"),
        ("scale", ["a"], "missing required field `size`"),
        ("scale", ["a", "many"], "scale"),
        ("scale", [], "missing required field `pool`"),
        ("scale", None, "Expected `object`, got `null`"),
        ("scale", 5, "Expected `object`, got `int`"),
    ],
)
def test_wrong_parameters_by_position_are_told(
    bench: Bench, method: str, params: Any, words: str
) -> None:
    (answer,) = bench.ask(one(method, id=1, params=params))
    assert answer["error"]["code"] == rpc.INVALID_PARAMS
    assert words in answer["error"]["message"]
    assert bench.handler.calls == []


# -- batches: the examples of the specification --------------------------------------------------


def test_an_empty_batch_is_one_invalid_request(bench: Bench) -> None:
    (answer,) = bench.ask([])
    assert codes([answer]) == [(None, rpc.INVALID_REQUEST)]


def test_a_batch_that_is_not_json_is_one_parse_error(bench: Bench) -> None:
    (answer,) = bench.ask(b'[{"jsonrpc": "2.0", "method": "version", "id": 1}, {"jsonrpc"')
    assert codes([answer]) == [(None, rpc.PARSE_ERROR)]


@pytest.mark.parametrize("count", [1, 3])
def test_members_that_are_no_requests_are_told_one_by_one(bench: Bench, count: int) -> None:
    (answers,) = bench.ask(list(range(count)))
    assert codes(answers) == [(None, rpc.INVALID_REQUEST)] * count


def test_a_batch_of_all_kinds(bench: Bench) -> None:
    (answers,) = bench.ask(
        [
            one("status", id="1", params=[]),
            one("pid"),  # a notification
            {"foo": "boo"},
            [one("version", id="nested")],
            one("foo.get", id="5"),
            one("version", id=None),
            one("scale", id="9", params={"pool": "a", "size": 1}),
        ]
    )
    assert len(bench.handler.calls) == 4
    assert [each for each in answers if "result" in each] == [ok("1"), ok(None), ok("9")]
    assert codes([each for each in answers if "error" in each]) == [
        (None, rpc.INVALID_REQUEST),
        (None, rpc.INVALID_REQUEST),
        ("5", rpc.METHOD_NOT_FOUND),
    ]


def test_a_batch_of_notifications_is_carried_out_and_not_answered(bench: Bench) -> None:
    assert bench.ask([one("version"), one("pid", params=[])]) == []
    assert bench.handler.calls == [rpc.Version(), rpc.Pid()]
    assert bench.ask(one(id=2)) == [ok(2)]


# -- time and limits ----------------------------------------------------------------------------


def test_a_batch_is_answered_when_its_last_request_is_and_lines_behind_wait(bench: Bench) -> None:
    pending = bench.handler.later["stop"] = Pending()
    batch = [one("stop", id=1, params=[["a"]]), one("version", id=2)]
    lines = json.dumps(batch).encode() + b"\n" + json.dumps(one("pid", id=3)).encode()
    assert bench.ask(lines) == []
    assert bench.handler.calls == [rpc.Stop(names=["a"]), rpc.Version()]
    pending.resolve("stopped")
    answers, behind = bench.lines()
    assert sorted(answers, key=lambda each: each["id"]) == [ok(1, "stopped"), ok(2)]
    assert behind == ok(3)


def test_a_caller_that_sends_on_behind_a_batch_is_not_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.handler.later["stop"] = Pending()
    bench.ask([one("stop", id=1, params=[["a"]])])
    sent = 0
    for _ in range(TURNS_MAX):
        bench.turn()
        try:
            sent += bench.client.send(b"x" * 65536)
        except BlockingIOError:
            break
    (connection,) = bench.server._connections.values()
    assert sent > 0
    assert len(connection.input) <= 2 * server.READ_BYTES


def test_a_batch_is_bounded(bench: Bench) -> None:
    (answer,) = bench.ask([one(id=n) for n in range(rpc.BATCH_MAX + 1)])
    assert codes([answer]) == [(None, rpc.LIMIT_REACHED)]
    assert bench.handler.calls == []
    (answers,) = bench.ask([one(id=n) for n in range(rpc.BATCH_MAX)])
    assert [each["id"] for each in answers] == list(range(rpc.BATCH_MAX))


def test_a_large_batch_is_worked_on_in_turns(bench: Bench) -> None:
    bench.client.send(json.dumps([one(id=n) for n in range(rpc.BATCH_MAX)]).encode() + b"\n")
    seen = 0
    while seen < rpc.BATCH_MAX:
        bench.turn()
        assert len(bench.handler.calls) - seen <= server.REQUESTS_PER_TURN
        seen = len(bench.handler.calls)


def test_answers_that_are_too_long_together_are_left_out_and_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.handler.result = "x" * 1000
    monkeypatch.setattr(control_connection, "BATCH_BYTES_MAX", 2500)
    (answers,) = bench.ask([one(id=n) for n in range(4)])
    assert ["result" in each for each in answers] == [True, True, False, False]
    assert codes(answers[2:]) == [(2, rpc.LIMIT_REACHED), (3, rpc.LIMIT_REACHED)]


def test_what_batches_keep_counts_for_all_callers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_connection, "OUTPUT_BYTES_MAX_OF_ALL", 1_000_000)
    bench.handler.result = "x" * 200_000
    bench.handler.later["stop"] = Pending()
    batch = json.dumps([one("stop", params=[["a"]]), *(one(id=n) for n in range(10))]).encode()
    bench.client.send(batch + b"\n")
    for _ in range(10):
        bench.turn()
    assert bench.client.recv(1) == b""  # the connection was dropped, and all that was kept for it


@pytest.mark.parametrize(
    ("method", "params"), [("events", {}), ("tail", {"follow": True}), ("debug", {})]
)
def test_a_stream_is_not_for_a_batch(bench: Bench, method: str, params: Any) -> None:
    (answers,) = bench.ask([one(method, id=1, params=params), one(id=2)])
    assert codes(answers[:1]) == [(1, rpc.INVALID_REQUEST)]
    assert answers[1] == ok(2)
    assert bench.ask(one(id=3)) == [ok(3)]  # the connection has not become a stream
