"""Our ROUTER with our DEALER, with libzmq's, and with peers that are gone, malformed or silent."""

import contextlib
import errno
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from musterd.ipc.wire import codec, router
from musterd.ipc.wire.messages import PROTOCOL, Completion, Done, WorkerHello
from musterd.ipc.wire.router import PEERS_PER_TURN, QUEUE_MAX, TURN_BYTES, Router
from musterd.ipc.wire.zmtp import HANDSHAKE, Connection, Message, Wire
from musterd.supervisor.core.model import events
from musterd.supervisor.sockets.listen import listen
from musterd.supervisor.sockets.workers import WorkerPort
from support.waiting import wait_for

PATIENCE_SECONDS = 30.0
MIB = 1024 * 1024
SIZES = [0, 1, 255, 256, 65_535, 65_536, 3 * MIB]


PING = b"\x04\x0a\x04PING\0\x0actx"


class Stage:
    """A router, its complaints, and every message it has received."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.complaints: list[tuple[int, str]] = []
        self.router = Router(listen(path, None), lambda *why: self.complaints.append(why))
        self.heard: list[tuple[int, Message]] = []

    def turn(self, seconds: float = 0.02) -> None:
        if select.select([self.router], [], [], seconds)[0]:
            self.heard += self.router.receive()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> object:
            value = condition()
            if not value:
                self.turn()
            return value

        wait_for(what, met)

    def meet(self, connection: Connection) -> int:
        """Shake hands; return the number of the connection."""

        def ready() -> bool:
            connection.receive()
            return connection.ready

        self.until(ready, "the handshake")
        connection.put(b"hello")
        connection.flush()
        self.until(lambda: self.heard and self.heard[-1][1] == b"hello", "the first message")
        return self.heard.pop()[0]

    def connect(self) -> tuple[int, Connection]:
        connection = Connection(self.path)
        return self.meet(connection), connection


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "r.sock")


@pytest.fixture
def stage(path: str) -> Iterator[Stage]:
    before = set(os.listdir("/proc/self/fd"))
    stage = Stage(path)
    yield stage
    stage.router.close()
    left = set(os.listdir("/proc/self/fd")) - before
    assert not {fd for fd in left if os.path.exists(f"/proc/self/fd/{fd}")}, "descriptors are left"


@pytest.fixture
def dealer(path: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
        yield dealer


def test_messages_of_all_sizes_go_both_ways_to_libzmq(stage, dealer):
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 20)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
    dealer.connect(f"ipc://{stage.path}")
    messages = [bytes((n,)) * size for n, size in enumerate(SIZES)]
    for message in messages:
        dealer.send(message)
    stage.until(lambda: len(stage.heard) == len(messages), "all of them")
    assert [message for _, message in stage.heard] == messages
    number = stage.heard[0][0]
    for message in messages:
        assert stage.router.send(number, message)
    got: list[bytes] = []
    stage.until(lambda: got if len(got) == len(messages) else _drain(dealer, got), "all back")
    assert got == messages
    end = time.monotonic() + 1.0  # its PINGs are answered, or it would have disconnected
    while time.monotonic() < end:
        stage.turn()
    dealer.send(b"still here")
    stage.until(lambda: stage.heard[-1] == (number, b"still here"), "the same connection")
    assert not stage.complaints


def _drain(dealer: "zmq.Socket[bytes]", got: list[bytes]) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            got.append(dealer.recv(zmq.NOBLOCK))


def test_a_message_of_several_frames_is_none(stage, dealer):
    dealer.connect(f"ipc://{stage.path}")
    dealer.send_multipart([b"a", b"b"])
    dealer.send(b"c")
    stage.until(lambda: len(stage.heard) == 2, "both")
    assert [message for _, message in stage.heard] == [None, b"c"]


def test_peers_are_told_apart_and_numbers_are_not_given_again(stage):
    (one, first), (two, second) = stage.connect(), stage.connect()
    first.put(b"1")
    first.flush()
    second.put(b"2")
    second.flush()
    stage.until(lambda: len(stage.heard) == 2, "both")
    assert sorted(stage.heard) == [(one, b"1"), (two, b"2")]
    first.close()
    stage.turn()
    three, third = stage.connect()
    assert len({one, two, three}) == 3
    assert not stage.router.send(one, b"x")
    assert stage.router.send(two, b"for two")
    stage.until(second.receive, "an answer")
    second.close()
    third.close()


def test_what_is_not_read_is_kept_in_order_and_a_full_peer_is_told_nothing_more(stage):
    number, connection = stage.connect()
    count = 0
    while stage.router.send(number, b"%07d" % count + b"." * 10_000):
        count += 1
        assert count < 10 * QUEUE_MAX
    assert count > QUEUE_MAX
    got: list[Message] = []

    def read() -> bool:
        got.extend(connection.receive())
        return len(got) == count

    stage.until(read, "all that was taken")
    assert [int(bytes(message)[:7]) for message in got if message] == list(range(count))
    assert stage.router.send(number, b"there is room again")
    stage.until(connection.receive, "one more")
    assert not select.select([stage.router], [], [], 0)[0], "it is told of room and has nothing"
    connection.close()


def test_of_one_that_has_ended_everything_is_heard_at_once(stage):
    number, connection = stage.connect()
    last = [b"result", b"x" * 100_000, b"the last"]
    for message in last:
        connection.put(message)
    assert connection.flush()
    connection.close()
    assert stage.router.receive_all(number) == last
    assert stage.router.receive_all(number) == []
    stage.turn()
    assert not stage.heard


def test_a_child_that_holds_the_connection_open_does_not_matter(stage):
    number, connection = stage.connect()
    child = os.dup(connection.fileno())
    connection.put(b"the last")
    connection.flush()
    connection.close()
    assert stage.router.receive_all(number) == [b"the last"]
    os.close(child)


def test_a_send_that_fails_loses_nothing_of_what_was_said_before(stage):
    number, connection = stage.connect()
    connection.put(b"the last")
    connection.flush()
    connection.close()
    assert not stage.router.send(number, b"too late")
    assert not stage.router.send(number, b"and again")
    assert stage.router.receive_all(number) == [b"the last"]


def test_the_answer_to_a_ping_that_finds_no_room_leaves_later(stage):
    room = 0
    number, connection = stage.connect()
    while not stage.router._wires[number].unsent:
        stage.router.send(number, bytes(4000))
        room += 1
    connection.close()
    stage.turn()
    number, connection = stage.connect()
    for _ in range(room - 1):  # exactly that many fit
        assert stage.router.send(number, bytes(4000))
    assert not stage.router._wires[number].unsent
    os.write(connection.fileno(), PING)
    stage.turn()
    assert stage.router.send(number, b"behind it")
    got: list[Message] = []
    stage.until(lambda: got.extend(connection.receive()) or b"behind it" in got, "the message")
    connection.close()


def test_a_ping_of_one_that_is_gone_costs_nothing_of_what_it_said(stage):
    for receive in (stage.router.receive_all, lambda _: [m for _, m in stage.router.receive()]):
        number, connection = stage.connect()
        connection.put(b"result")
        connection.flush()
        os.write(connection.fileno(), PING)
        connection.close()
        assert receive(number) == [b"result"]


def test_what_was_said_before_garbage_counts(stage):
    for receive in (stage.router.receive_all, lambda _: [m for _, m in stage.router.receive()]):
        number, connection = stage.connect()
        connection.put(b"result")
        connection.flush()
        os.write(connection.fileno(), b"\xff" * 9)
        assert receive(number) == [b"result"]
        if stage.router._wires:
            os.write(connection.fileno(), b"more")
            stage.turn()
        assert number not in stage.router._wires
        connection.close()
    assert ["flags 0xff" in why for _, why in stage.complaints] == [True]


def test_after_a_send_that_failed_nothing_more_is_sent_and_all_is_heard(stage, monkeypatch):
    number, connection = stage.connect()

    def flush(_: Wire) -> bool:
        raise OSError(errno.ENOBUFS, "no buffer")

    with monkeypatch.context() as broken:
        broken.setattr(Wire, "flush", flush)
        assert not stage.router.send(number, b"cut off, perhaps")
    assert not stage.router.send(number, b"would be read as the rest of it")
    connection.put(b"the last")
    connection.flush()
    assert stage.router.receive_all(number) == [b"the last"]
    with pytest.raises(ConnectionResetError):
        connection.receive()
    connection.close()


def test_many_peers_take_turns(stage):
    crowd = [stage.connect() for _ in range(2 * PEERS_PER_TURN + 5)]
    for _, connection in crowd:
        for _ in range(TURN_BYTES):
            connection.put(b"x")
        connection.flush()
    for _ in range(3):
        stage.turn()
    assert {number for number, _ in stage.heard} == {number for number, _ in crowd}
    for _, connection in crowd:
        connection.close()


class Stubborn:
    """An epoll that accepts no registration for now."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self.full = True

    def register(self, fd: int, events: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "too many watches")
        self._epoll.register(fd, events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


def _is_over(connection: Connection) -> bool:
    try:
        connection.receive()
    except ConnectionResetError:
        return True
    return False


def test_one_who_cannot_be_watched_is_not_let_in(stage):
    stage.router._epoll = epoll = Stubborn(stage.router._epoll)
    refused = Connection(stage.path)
    stage.turn()
    stage.until(lambda: _is_over(refused), "it hears of that")
    refused.close()
    stage.router._accepts = False
    epoll.unregister(stage.router.listener_fd)
    stage.router.tidy_up()
    epoll.full = False
    stage.router.tidy_up()
    number, connection = stage.connect()
    assert stage.router.send(number, b"x")
    connection.close()


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not ZeroMQ: it began with b'GET / HTTP"),
        (HANDSHAKE + b"\xff" * 64, "a frame with the flags 0xff"),
        (HANDSHAKE[:64] + b"\0\1x", "a message before READY"),
        (HANDSHAKE.replace(b"DEALER", b"STREAM"), "of the type b'STREAM' instead of DEALER"),
    ],
    ids=["http", "flags", "no ready", "type"],
)
def test_garbage_is_put_out_and_disturbs_nobody(stage, garbage, why):
    number, connection = stage.connect()
    with socket.socket(socket.AF_UNIX) as mad:
        mad.connect(stage.path)
        mad.sendall(garbage)
        stage.until(lambda: stage.complaints, "the complaint")
        mad.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionResetError):  # some of its bytes were not read
            while mad.recv(1000):
                pass
    assert why in stage.complaints[0][1]
    assert stage.router.send(number, b"x")
    connection.close()


def test_one_that_never_stops_does_not_keep_others_waiting(stage):
    (flooding, flood), (number, connection) = stage.connect(), stage.connect()
    for _ in range(TURN_BYTES):
        flood.put(b"x")
    flood.flush()
    connection.put(b"mine")
    connection.flush()
    stage.turn()
    assert (number, b"mine") in stage.heard
    assert 0 < len([1 for each, _ in stage.heard if each == flooding]) <= TURN_BYTES / 3
    flood.close()
    connection.close()


def test_who_never_shakes_hands_is_put_out(stage, monkeypatch):
    with socket.socket(socket.AF_UNIX) as mute:
        monkeypatch.setattr(router, "HANDSHAKE_SECONDS", 0.05)
        mute.connect(stage.path)
        mute.sendall(HANDSHAKE[:20])
        stage.turn()
        number, connection = stage.connect()
        assert not stage.router.send(number - 1, b"x"), "nothing is said in a handshake"
        time.sleep(0.06)
        mute.sendall(HANDSHAKE[20:30])
        stage.router.tidy_up()
        assert not stage.complaints, "something of it waits to be read"
        stage.turn()
        stage.router.tidy_up()
        assert stage.complaints == [(number - 1, "no ZeroMQ handshake within 0.05 s")]
        mute.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while mute.recv(1000):
                pass
        assert stage.router.send(number, b"x")
        connection.close()


def test_without_descriptors_those_who_come_wait_and_the_loop_rests(stage):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number, connection = stage.connect()
    late = Connection(stage.path)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        stage.turn()
        assert stage.complaints == [(0, "Too many open files")]
        assert not select.select([stage.router], [], [], 0)[0], "it would be asked for ever"
        assert stage.router.send(number, b"x"), "others are served"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    stage.router.tidy_up()
    assert stage.meet(late) > number
    late.close()
    connection.close()


# -- WorkerPort ---------------------------------------------------------------------------------


class Port:
    """One worker, 7, with the token "t"; the worker of the token "ended" has ended."""

    def __init__(self, path: Path) -> None:
        self.port = WorkerPort(path, {"t": 7, "ended": 0}.get)
        self.connection = Connection(str(path))
        while not self.connection.ready:
            self.port.receive()
            self.connection.receive()

    def say(self, message: Any) -> None:
        self.connection.put(codec.encode(message))
        self.connection.flush()

    def hear(self) -> list[object]:
        select.select([self.port], [], [], PATIENCE_SECONDS)
        return self.port.receive()


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    port = Port(tmp_path / "w.sock")
    yield port
    port.connection.close()
    port.port.close()


def test_the_last_results_of_a_worker_are_heard_with_its_end(port):
    port.say(WorkerHello(PROTOCOL, "t", 1))
    assert port.hear() == [events.WorkerReady(7, 1)]
    port.say(Done([Completion(1, 5, b"a")]))
    port.say(Done([Completion(2, 5, b"b")]))
    port.connection.close()
    leases = [event.completions[0].lease for event in port.port.last_words(7)]
    assert leases == [1, 2]
    assert port.port.last_words(7) == []
    assert not port.port.malformed


def test_a_hello_that_is_read_after_the_end_of_its_worker_is_no_fault(port, caplog):
    port.say(WorkerHello(PROTOCOL, "ended", 1))
    assert port.hear() == []
    assert not port.port.malformed
    port.say(WorkerHello(PROTOCOL, "made up", 1))
    assert port.hear() == []
    assert port.port.malformed == 1


def test_before_the_hello_nothing_counts(port, caplog):
    port.say(Done([Completion(1, 5, b"a")]))
    port.say(Done([Completion(2, 5, b"a")]))
    assert port.hear() == []
    assert port.port.malformed == 2
    assert len(caplog.records) == 1, "the first is told, the others are counted"
    assert "before the hello" in str(vars(caplog.records[0]))


def test_a_worker_that_cannot_be_let_in_is_told_of(port, caplog):
    port.port._complain(0, "Too many open files")
    assert port.port.malformed == 0
    assert [vars(each)["fields"]["EVENT"] for each in caplog.records] == ["workers.waiting"]


CROWD = """
import socket, sys
for _ in range(int(sys.argv[2])):
    made = socket.socket(socket.AF_UNIX)
    made.connect(sys.argv[1])
    if sys.argv[3]:
        made.sendall(bytes.fromhex(sys.argv[3]))
    globals().setdefault("kept", []).append(made)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("handshake", [b"", HANDSHAKE], ids=["silent", "ready"])
def test_the_process_with_most_connections_makes_room(path: str, handshake: bytes) -> None:
    """A process that opens connections without end loses its own."""
    room = 8
    stage = Stage(path)
    stage.router.close()
    made: list[Router] = []
    stage.router = Router(
        listen(path, None, backlog=100),
        lambda *why: stage.complaints.append(why),
        has_room=lambda: len(made[0]) < room,
    )
    made.append(stage.router)
    ours, connection = stage.connect()
    stranger = Connection(path)  # in the middle of its handshake
    stage.until(lambda: len(stage.router) == 2, "it is let in")
    command = [sys.executable, "-c", CROWD, path, str(5 * room), handshake.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout is not None
        assert crowd.stdin is not None
        assert crowd.stdout.readline() == b"there\n"
        for _ in range(10):
            stage.turn()
        assert ours in stage.router
        theirs = stage.meet(stranger)
        assert {ours, theirs} <= set(stage.router._wires)
        crowd.stdin.close()
    stage.until(lambda: len(stage.router) == 2, "the crowd is gone")
    connection.close()
    stranger.close()
    stage.until(lambda: not len(stage.router), "all are gone")
    assert not stage.router._owned
    stage.router.close()


# -- doors ------------------------------------------------------------------------------------


def test_a_second_door_leads_to_the_same_router(stage, tmp_path):
    other = str(tmp_path / "other.sock")
    stage.router.add_door(listen(other, None))
    number, connection = stage.connect()
    second = Connection(other)
    met = stage.meet(second)
    assert met != number
    assert stage.router.door_of(number) != stage.router.door_of(met)
    for each in (connection, second):
        each.close()


def test_a_door_that_is_shut_lets_nobody_in_and_ends_who_came_through_it(stage, tmp_path):
    other = str(tmp_path / "other.sock")
    stage.router.add_door(listen(other, None))
    number, connection = stage.connect()
    second = Connection(other)
    stays = stage.meet(second)
    stage.router.open_door(stage.router.listener_fd, False)
    assert number not in stage.router
    assert stays in stage.router
    waiting = Connection(stage.path)
    stage.router.tidy_up()
    for _ in range(5):
        stage.turn()
    assert len(stage.router) == 1, "somebody was let in"
    stage.router.open_door(stage.router.listener_fd, True)
    assert stage.meet(waiting) in stage.router
    for each in (connection, second, waiting):
        each.close()
