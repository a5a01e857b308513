"""ControlServer on a real socket, driven turn by turn in this thread with a clock of the test."""

import contextlib
import json
import os
import resource
import select
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import LINE_BYTES_MAX, Params, RpcError
from musterd.supervisor.control import connection, streams
from musterd.supervisor.control import server as control
from musterd.supervisor.control.access import VIEW_METHODS, Access, Admitted, Rank
from musterd.supervisor.control.answers import Pending
from musterd.supervisor.control.connection import SLOW_NS
from musterd.supervisor.control.server import ControlServer
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.sockets import listen
from musterd.supervisor.sockets.listen import Caller

TURNS_MAX = 5000  # a server that never comes to rest fails the test instead of hanging it


class Happened(msgspec.Struct, frozen=True):
    event: str
    reason: str = ""
    attempt: int = 0


class Recorder:
    """A handler that answers from a list of replies and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Params, Caller]] = []
        self.reply: Any = {"ok": True}

    def call(self, method: str, params: Params, caller: Caller) -> object:
        self.calls.append((method, params, caller))
        reply = self.reply(params) if callable(self.reply) else self.reply
        if isinstance(reply, BaseException) and not isinstance(reply, RpcError):
            raise reply
        return reply


class Bench:
    """The server, its handler, and clients that are closed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handler = Recorder()
        self.server = ControlServer(path, "", self.handler)
        self.now_ns = 1_000_000_000
        self.clients: list[socket.socket] = []

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.clients.append(client)
        client.connect(str(self.path))
        client.setblocking(False)
        return client

    def settle(self) -> None:
        """Run turns until nothing is left to do at this time."""
        for _ in range(TURNS_MAX):
            ready = select.select([self.server], [], [], 0)[0]
            deadline = self.server.next_deadline()
            if not ready and (deadline is None or deadline > self.now_ns):
                return
            if ready:
                self.server.serve(self.now_ns)
            else:
                self.server.tick(self.now_ns)
        raise AssertionError("the server does not come to rest")

    def lines(self, client: socket.socket) -> list[Any]:
        """Return what the client receives until the server rests; "EOF" stands for the end."""
        received = bytearray()
        ended = False
        for _ in range(TURNS_MAX):
            self.settle()
            try:
                data = client.recv(1 << 20)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                ended = True
                break
            received += data
        assert received == b"" or received.endswith(b"\n")
        return [json.loads(line) for line in received.splitlines()] + ["EOF"] * ended

    def ask(self, client: socket.socket, data: bytes) -> list[Any]:
        client.send(data)
        return self.lines(client)

    def close(self) -> None:
        self.server.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "control.sock")
    yield made
    made.close()


def request(method: str = "version", request_id: Any = 1, **params: Any) -> bytes:
    message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
    return json.dumps(message).encode() + b"\n"


def result(request_id: Any = 1, value: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "result": value or {"ok": True}}


def code(answer: dict[str, Any]) -> int:
    assert answer["jsonrpc"] == "2.0"
    found = answer["error"]["code"]
    assert isinstance(found, int)
    return found


# -- framing ----------------------------------------------------------------------------------


def test_a_request_is_answered_and_the_handler_learns_who_asked(bench: Bench) -> None:
    assert bench.ask(bench.connect(), request("status", 7, names=["a"])) == [result(7)]
    method, params, caller = bench.handler.calls[0]
    assert (method, params) == ("status", rpc.Status(names=["a"]))
    assert caller == Caller(os.getpid(), os.getuid(), os.getgid())


def test_a_line_may_arrive_in_pieces(bench: Bench) -> None:
    client = bench.connect()
    for byte in request()[:-1]:
        assert bench.ask(client, bytes([byte])) == []
    assert bench.ask(client, b"\n") == [result()]


def test_several_lines_may_arrive_at_once_and_are_answered_in_order(bench: Bench) -> None:
    count = control.REQUESTS_PER_TURN * 3 + 1
    lines = b"".join(request(request_id=n) for n in range(count))
    assert bench.ask(bench.connect(), lines) == [result(n) for n in range(count)]


def test_crlf_blank_lines_and_a_missing_last_newline_are_understood(bench: Bench) -> None:
    client = bench.connect()
    line = request()
    client.send(b"\r\n\n" + line[:-1] + b"\r\n" + line[:-1])
    client.shutdown(socket.SHUT_WR)
    assert bench.lines(client) == [result(), result(), "EOF"]


def test_a_flood_of_one_caller_is_cut_into_turns_so_that_another_is_served(bench: Bench) -> None:
    flood, other = bench.connect(), bench.connect()
    flood.send(request() * 500)
    other.send(request(request_id="other"))
    bench.server.serve(bench.now_ns)  # accepts the connections
    bench.server.serve(bench.now_ns)
    assert len(bench.handler.calls) <= control.REQUESTS_PER_TURN * 2 + 1
    assert json.loads(other.recv(1000)) == result("other")
    assert bench.server.next_deadline() == 0
    assert len(bench.lines(flood)) == 500


# -- lines that are no requests ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected", "request_id"),
    [
        (b"nonsense", rpc.PARSE_ERROR, None),
        (b"\xff\xfe\x00\x01", rpc.PARSE_ERROR, None),
        (b'{"jsonrpc": "2.0"', rpc.PARSE_ERROR, None),
        (b"[]", rpc.INVALID_REQUEST, None),
        (b"17", rpc.INVALID_REQUEST, None),
        (b'{"id": 5, "method": "version"}', rpc.INVALID_REQUEST, 5),
        (b'{"jsonrpc": "1.0", "id": "x", "method": "version"}', rpc.INVALID_REQUEST, "x"),
        (b'{"jsonrpc": "2.0", "id": 5}', rpc.INVALID_REQUEST, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": 3}', rpc.INVALID_REQUEST, 5),
        (b'{"jsonrpc": "2.0", "id": {}, "method": "version"}', rpc.INVALID_REQUEST, None),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "explode"}', rpc.METHOD_NOT_FOUND, 5),
        (request("version", 5, extra=1).strip(), rpc.INVALID_PARAMS, 5),
        (request("start", 5, names=[]).strip(), rpc.INVALID_PARAMS, 5),
        (request("scale", 5, pool="a", size="two").strip(), rpc.INVALID_PARAMS, 5),
        (
            b'{"jsonrpc": "2.0", "id": 5, "method": "status", "params": ["a"]}',
            rpc.INVALID_PARAMS,
            5,
        ),
    ],
    ids=lambda value: value[:40].decode("latin1") if isinstance(value, bytes) else None,
)
def test_what_is_no_request_is_answered_and_the_connection_goes_on(
    bench: Bench, line: bytes, expected: int, request_id: object
) -> None:
    client = bench.connect()
    (answer,) = bench.ask(client, line + b"\n")
    assert (code(answer), answer["id"]) == (expected, request_id)
    assert bench.handler.calls == []
    assert bench.ask(client, request()) == [result()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"a":' * 60_000 + b"1" + b"}" * 60_000, (rpc.INVALID_REQUEST, None)),
        (
            b'{"jsonrpc":"2.0","id":5,"method":"tasks.submit","params":{"name":"a.b","id":"1",'
            b'"args":{"x":' + b"[" * 60_000 + b"]" * 60_000 + b"}}}",
            (rpc.INVALID_PARAMS, 5),
        ),
    ],
    ids=["nested", "nested arguments"],
)
def test_deep_nesting_is_refused_and_the_connection_goes_on(
    bench: Bench, line: bytes, expected: tuple[int, object]
) -> None:
    """The depth of JSON that can be read depends on the Python, from 3.14 on also on the stack."""
    client = bench.connect()
    sent = memoryview(line + b"\n")
    while sent:  # the line is longer than a socket's buffer
        try:
            sent = sent[client.send(sent) :]
        except BlockingIOError:
            bench.settle()
    (answer,) = bench.lines(client)
    assert (code(answer), answer["id"]) in (expected, (rpc.PARSE_ERROR, None))
    assert bench.handler.calls == []
    assert bench.ask(client, request()) == [result()]


def test_a_wrong_parameter_is_named(bench: Bench) -> None:
    (answer,) = bench.ask(bench.connect(), request("scale", pool="a", size=-1))
    assert "scale" in answer["error"]["message"]
    assert "$.size" in answer["error"]["message"]


def test_a_notification_is_carried_out_and_not_answered(bench: Bench) -> None:
    line = b'{"jsonrpc": "2.0", "method": "version"}\n'
    wrong = b'{"jsonrpc": "2.0", "method": "explode"}\n'
    assert bench.ask(bench.connect(), line + wrong) == []
    assert [call[0] for call in bench.handler.calls] == ["version"]


def test_a_notification_of_a_caller_that_left_at_once_is_carried_out(bench: Bench) -> None:
    client = bench.connect()
    client.send(b'{"jsonrpc": "2.0", "method": "version"}\n')
    client.close()
    bench.settle()
    assert [call[0] for call in bench.handler.calls] == ["version"]
    assert bench.server.next_deadline() is None


# -- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_over_the_limit_is_answered_and_closed(bench: Bench, end: bytes) -> None:
    client, other = bench.connect(), bench.connect()
    left = memoryview(b"x" * (LINE_BYTES_MAX + 1) + end)
    while left:
        try:
            left = left[client.send(left) :]
        except BlockingIOError:
            bench.settle()
        except BrokenPipeError:
            break
    answer, end_mark = bench.lines(client)
    assert (code(answer), end_mark) == (rpc.INVALID_REQUEST, "EOF")
    assert str(LINE_BYTES_MAX) in answer["error"]["message"]
    assert bench.ask(other, request()) == [result()]


def test_a_line_of_exactly_the_limit_is_taken(bench: Bench) -> None:
    client = bench.connect()
    line = request()[:-1]
    left = memoryview(line + b" " * (LINE_BYTES_MAX - len(line)) + b"\n")
    while left:
        try:
            left = left[client.send(left) :]
        except BlockingIOError:
            bench.settle()
    assert bench.lines(client) == [result()]


def test_half_a_line_is_given_up_after_its_time_and_not_before(bench: Bench) -> None:
    slow, idle = bench.connect(), bench.connect()
    slow.send(b'{"jsonrpc"')
    bench.settle()
    assert bench.server.next_deadline() == bench.now_ns + SLOW_NS
    bench.now_ns += SLOW_NS - 1
    assert bench.ask(slow, b":") == []  # more bytes do not buy more time
    bench.now_ns += 1
    answer, end = bench.lines(slow)
    assert (code(answer), end) == (rpc.INVALID_REQUEST, "EOF")
    assert bench.server.next_deadline() is None
    assert bench.ask(idle, request()) == [result()]  # an idle connection is no fault


def test_each_line_has_its_own_time(bench: Bench) -> None:
    client = bench.connect()
    line = request()
    client.send(line[:5])
    bench.settle()
    bench.now_ns += SLOW_NS - 1
    assert bench.ask(client, line[5:] + line[:5]) == [result()]
    bench.now_ns += SLOW_NS - 1
    assert bench.ask(client, line[5:]) == [result()]


def test_one_connection_too_many_is_told_so(bench: Bench) -> None:
    waiting: list[Pending] = []

    def wait(_params: Params) -> Pending:
        waiting.append(Pending())
        return waiting[-1]

    clients = _fill_up(bench)
    bench.handler.reply = wait
    for client in clients:
        client.send(request())
    bench.settle()
    assert len(waiting) == control.CONNECTIONS_MAX
    answer, end = bench.lines(bench.connect())
    assert (code(answer), end) == (rpc.LIMIT_REACHED, "EOF")
    clients[0].close()
    bench.settle()
    bench.handler.reply = {"ok": True}
    assert bench.ask(bench.connect(), request()) == [result()]


def test_silent_connections_lock_nobody_out(bench: Bench) -> None:
    clients = _fill_up(bench)
    assert bench.ask(clients[0], request()) == [result()]  # now the second is silent for longest
    assert bench.ask(bench.connect(), request()) == [result()]
    assert bench.lines(clients[1]) == ["EOF"]
    assert bench.ask(clients[0], request()) == [result()]
    assert bench.ask(clients[-1], request()) == [result()]


def test_others_cannot_take_the_last_connections_from_root(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Access.of
    monkeypatch.setattr(Access, "of", lambda *_: Admitted(Caller(1, 54321, 54321), Rank.CONTROL))
    bench.handler.reply = lambda _params: Pending()
    room = control.CONNECTIONS_MAX - control.CONNECTIONS_RESERVED[Rank.CONTROL]
    clients = _fill_up(bench, room)
    for client in clients:
        client.send(request())
    bench.settle()
    answer, end = bench.lines(bench.connect())
    assert (code(answer), end) == (rpc.LIMIT_REACHED, "EOF")
    monkeypatch.setattr(Access, "of", real)
    bench.handler.reply = {"ok": True}
    assert bench.ask(bench.connect(), request()) == [result()]


def test_those_who_look_push_out_nobody_who_may_do_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Access.of
    watcher = Admitted(Caller(1, 54321, 54321), Rank.VIEW)
    room = control.CONNECTIONS_MAX - control.CONNECTIONS_RESERVED[Rank.VIEW]
    ours = _fill_up(bench, room)  # all of them silent
    monkeypatch.setattr(Access, "of", lambda *_: watcher)
    answer, end = bench.lines(bench.connect())
    assert (code(answer), end) == (rpc.LIMIT_REACHED, "EOF")
    monkeypatch.setattr(Access, "of", real)
    assert bench.ask(ours[0], request()) == [result()]


@pytest.mark.parametrize("method", rpc.METHODS)
def test_those_who_look_are_refused_what_does_something(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(Access, "of", lambda *_: Admitted(Caller(1, 54321, 54321), Rank.VIEW))
    params = {"name": "kites"} if method == "history" else {}
    (answer,) = bench.ask(bench.connect(), request(method, **params))
    if method in VIEW_METHODS:
        assert "result" in answer
    else:
        assert code(answer) == rpc.NOT_ALLOWED
        assert f"not {method}: use sudo" in answer["error"]["message"]
        assert not bench.handler.calls


def test_answers_that_nobody_reads_are_bounded_for_all_callers_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OUTPUT_BYTES_MAX_OF_ALL", 5_000_000)
    bench.handler.reply = {"ok": "x" * 1_000_000}
    silent = [bench.connect() for _ in range(10)]
    for client in silent:
        client.send(request())
        bench.settle()
        unread = [len(each.output) for each in bench.server._connections.values()]
        assert sum(unread) <= 5_000_000
    assert len(bench.server._connections) < 10  # some were dropped
    bench.handler.reply = {"ok": True}
    assert bench.ask(bench.connect(), request()) == [result()]


def _fill_up(bench: Bench, count: int = control.CONNECTIONS_MAX) -> list[socket.socket]:
    clients = [bench.connect() for _ in range(count // 2)]
    bench.settle()  # the backlog holds fewer than all clients
    clients += [bench.connect() for _ in range(count - len(clients))]
    bench.settle()
    return clients


def test_the_number_of_unanswered_requests_of_a_connection_is_limited(bench: Bench) -> None:
    waiting: list[Pending] = []

    def wait(_params: Params) -> Pending:
        waiting.append(Pending())
        return waiting[-1]

    bench.handler.reply = wait
    client = bench.connect()
    client.send(b"".join(request(request_id=n) for n in range(control.PENDING_MAX + 1)))
    (answer,) = bench.lines(client)
    assert (code(answer), answer["id"]) == (rpc.LIMIT_REACHED, control.PENDING_MAX)
    waiting[3].resolve("done")
    assert bench.lines(client) == [result(3, "done")]
    bench.handler.reply = "again"
    assert bench.ask(client, request()) == [result(1, "again")]


def test_a_caller_that_does_not_read_its_answers_is_asked_nothing_more_and_then_dropped(
    bench: Bench,
) -> None:
    bench.handler.reply = "x" * 400_000
    client = bench.connect()
    client.send(request() * 50)
    bench.settle()
    calls = len(bench.handler.calls)
    assert calls < 10
    assert bench.server.next_deadline() == bench.now_ns + SLOW_NS
    bench.now_ns += SLOW_NS
    bench.settle()
    assert len(bench.handler.calls) == calls
    assert bench.server.next_deadline() is None
    with pytest.raises(BrokenPipeError):
        client.send(b"\n")


def test_nothing_more_is_taken_from_a_caller_that_does_not_read(bench: Bench) -> None:
    bench.handler.reply = "x" * 400_000
    client = bench.connect()
    flood, sent = request() * 1000, 0
    while sent < 10 * LINE_BYTES_MAX:
        try:
            sent += client.send(flood)
        except BlockingIOError:
            break
        bench.settle()
    assert sent < 2 * LINE_BYTES_MAX


def test_a_caller_that_reads_late_gets_every_answer(bench: Bench) -> None:
    bench.handler.reply = "x" * 400_000
    client = bench.connect()
    client.send(request() * 50)
    bench.settle()
    assert bench.lines(client) == [result(1, "x" * 400_000)] * 50


def test_an_answer_too_long_to_send_becomes_an_error(bench: Bench) -> None:
    bench.handler.reply = "x" * rpc.ANSWER_BYTES_MAX
    (answer,) = bench.ask(bench.connect(), request())
    assert code(answer) == rpc.LIMIT_REACHED


# -- answers ----------------------------------------------------------------------------------


def test_a_pending_request_is_answered_when_it_is_resolved_and_others_pass_it(
    bench: Bench,
) -> None:
    pending = Pending()
    bench.handler.reply = pending
    client = bench.connect()
    assert bench.ask(client, request(request_id=1)) == []
    bench.handler.reply = "second"
    assert bench.ask(client, request(request_id=2)) == [result(2, "second")]
    pending.resolve("first")
    assert bench.lines(client) == [result(1, "first")]


def test_a_pending_request_may_be_resolved_before_it_is_returned(bench: Bench) -> None:
    pending = Pending()
    pending.fail(RpcError(rpc.FAILED, "at once"))
    bench.handler.reply = pending
    (answer,) = bench.ask(bench.connect(), request())
    assert (code(answer), answer["error"]["message"]) == (rpc.FAILED, "at once")


def test_a_pending_request_learns_that_its_caller_is_gone(bench: Bench) -> None:
    gone: list[str] = []
    pending = Pending(on_abandoned=lambda: gone.append("gone"))
    bench.handler.reply = pending
    client = bench.connect()
    assert bench.ask(client, request()) == []
    client.close()
    bench.settle()
    assert (pending.abandoned, gone) == (True, ["gone"])
    pending.resolve("too late")  # reaches nobody and raises nothing


def test_a_caller_that_has_only_closed_its_sending_side_still_gets_its_answer(
    bench: Bench,
) -> None:
    pending = Pending()
    bench.handler.reply = pending
    client = bench.connect()
    client.send(request())
    client.shutdown(socket.SHUT_WR)
    assert bench.lines(client) == []
    pending.resolve("late")
    assert bench.lines(client) == [result(1, "late"), "EOF"]


@pytest.mark.parametrize("raised", [False, True])
def test_an_error_of_the_handler_is_answered_with_its_code(bench: Bench, raised: bool) -> None:
    error = RpcError(rpc.NO_SUCH_NAME, "no such name: 'x'", {"hint": "y"})

    def reply(_params: Params) -> RpcError:
        if raised:
            raise error
        return error

    bench.handler.reply = reply
    (answer,) = bench.ask(bench.connect(), request(request_id="q"))
    assert answer == {
        "jsonrpc": "2.0",
        "id": "q",
        "error": {"code": 4, "message": "no such name: 'x'", "data": {"hint": "y"}},
    }


@pytest.mark.parametrize("reply", [ZeroDivisionError("mistake"), {("no", "json"): 1}, object()])
def test_a_mistake_in_the_daemon_is_answered_and_logged_and_ends_nothing(
    bench: Bench, reply: object, caplog: pytest.LogCaptureFixture
) -> None:
    bench.handler.reply = reply
    client = bench.connect()
    (answer,) = bench.ask(client, request())
    assert code(answer) == rpc.INTERNAL_ERROR
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info
    bench.handler.reply = "fine"
    assert bench.ask(client, request()) == [result(1, "fine")]


# -- events -----------------------------------------------------------------------------------


def test_events_are_streamed_after_the_recent_ones(bench: Bench) -> None:
    bench.server.publish(Happened("before", attempt=2))
    client = bench.connect()
    (answer,) = bench.ask(client, request("events"))
    (recent,) = answer["result"]["recent"]
    assert recent.pop("at") > 0
    assert recent == {"event": "before", "attempt": 2}
    bench.server.publish(Happened("after", "because"))
    (line,) = bench.lines(client)
    assert (line["event"], line["reason"]) == ("after", "because")
    (refused,) = bench.ask(client, request())
    assert code(refused) == rpc.INVALID_REQUEST


def test_words_of_progress_push_out_nothing_else(bench: Bench) -> None:
    bench.server.publish(Report("breaker.open", "warning", target="aurora"))
    for number in range(streams.EVENTS_KEPT):
        bench.server.publish(Report("task.progress", "debug", task=f"t{number}"))
    client = bench.connect()
    (answer,) = bench.ask(client, request("events", follow=False))
    names = [event["event"] for event in answer["result"]["recent"]]
    assert names == ["breaker.open", *["task.progress"] * streams.CHATTER_KEPT]


def test_without_follow_only_the_recent_events_are_given(bench: Bench) -> None:
    for number in range(streams.EVENTS_KEPT + 5):
        bench.server.publish(Happened(f"event {number}"))
    client = bench.connect()
    (answer,) = bench.ask(client, request("events", follow=False))
    names = [event["event"] for event in answer["result"]["recent"]]
    assert names == [f"event {number}" for number in range(5, streams.EVENTS_KEPT + 5)]
    bench.server.publish(Happened("after"))
    assert bench.lines(client) == []
    assert bench.ask(client, request()) == [result()]


def test_a_slow_reader_of_events_is_told_how_many_it_missed_and_holds_up_nobody(
    bench: Bench,
) -> None:
    slow, quick = bench.connect(), bench.connect()
    bench.ask(slow, request("events"))
    bench.ask(quick, request("events"))
    count, seen_by_quick = 3000, 0
    for number in range(count):
        bench.server.publish(Happened(f"event {number}", "x" * 1000))
        if number % 100 == 99:
            seen_by_quick += len(bench.lines(quick))
    assert seen_by_quick == count
    bench.now_ns += 10 * SLOW_NS
    lines = bench.lines(slow)  # a stream is not dropped for being slow
    dropped = sum(line.get("dropped", 0) for line in lines)
    told = [line for line in lines if "event" in line]
    assert 0 < dropped < count
    assert len(told) + dropped == count
    assert "dropped" in lines[-1]  # the count comes after the events that were kept
    bench.server.publish(Happened("back"))
    assert [line["event"] for line in bench.lines(slow)] == ["back"]


def test_publishing_without_a_reader_costs_no_connection_anything(bench: Bench) -> None:
    client = bench.connect()
    bench.ask(client, request())
    bench.server.publish(Happened("unheard"))
    assert bench.lines(client) == []


# -- the socket -------------------------------------------------------------------------------


def test_the_socket_is_for_owner_and_group_only_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    before = os.umask(0)
    try:
        server = ControlServer(path, "", Recorder())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    server.close()
    server.close()
    assert not path.exists()


def test_a_socket_left_by_a_dead_daemon_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    bench = Bench(path)
    assert bench.ask(bench.connect(), request()) == [result()]
    bench.close()


def test_a_server_does_not_remove_the_socket_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    first = ControlServer(path, "", Recorder())
    second = ControlServer(path, "", Recorder())
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()


def test_a_file_in_the_way_is_kept_and_named(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match=r"control\.sock is in the way"):
        ControlServer(path, "", Recorder())
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "group", "message"),
    [
        ("x" * 120, "", "107 bytes"),
        ("no/such/folder.sock", "", "No such file"),
        ("control.sock", "no-such-group", "no-such-group"),
    ],
)
def test_a_socket_that_cannot_be_made_is_a_clear_error(
    tmp_path: Path, name: str, group: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ControlServer(tmp_path / name, group, Recorder())


def test_whoever_waits_at_the_end_gets_its_last_answer_and_nothing_after_it(bench: Bench) -> None:
    pending = Pending(last_answer="as far as it got")
    bench.handler.reply = pending
    client = bench.connect()
    bench.ask(client, request())
    bench.server.answer_all()
    assert json.loads(client.recv(1000))["result"] == "as far as it got"
    pending.resolve("too late")
    bench.server.close()
    assert client.recv(1000) == b""


def test_closing_tells_whoever_waits(bench: Bench) -> None:
    pending = Pending()
    bench.handler.reply = pending
    client = bench.connect()
    bench.ask(client, request())
    bench.server.close()
    assert code(json.loads(client.recv(1000))) == rpc.FAILED
    assert client.recv(1000) == b""
    assert pending.abandoned


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process no free descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_without_descriptors_callers_get_spares_and_then_the_places_of_silent_ones(
    bench: Bench,
) -> None:
    callers = [bench.connect() for _ in range(3 * listen.SPARES)]
    for caller in callers:
        caller.send(request())
    with no_descriptors():
        answers = [bench.lines(caller) for caller in callers]
        assert all(answer[0] == result() for answer in answers), "each was heard"
        for caller in callers:
            caller.close()
        bench.settle()
        assert not bench.server._connections
    bench.server.tick(bench.now_ns)
    assert len(bench.server._spares._spares) == listen.SPARES, "for the next time"


def test_without_descriptors_and_silent_callers_accepting_pauses_and_who_is_there_is_served(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.handler.reply = lambda _params: Pending()
    callers = [bench.connect() for _ in range(listen.SPARES + 1)]
    *waiting, late = callers
    with no_descriptors():
        for caller in waiting:
            caller.send(request())
        bench.settle()
        assert bench.server.next_deadline() == bench.now_ns + control.ACCEPT_PAUSE_NS
        bench.handler.reply = {"ok": True}
        assert bench.ask(waiting[0], request()) == [result()]
    assert "cannot accept" in caplog.text
    assert bench.ask(late, request()) == []
    bench.now_ns += control.ACCEPT_PAUSE_NS
    assert bench.lines(late) == [result()]
