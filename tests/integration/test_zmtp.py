"""Our end of ZeroMQ with libzmq's, and with listeners that speak no ZeroMQ or do not read."""

import contextlib
import itertools
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.zmtp import HANDSHAKE, Connection, Message

PATIENCE_SECONDS = 30.0
MIB = 1024 * 1024
SIZES = [0, 1, 100, 255, 256, 257, 65_535, 65_536, 1_000_000]
# As the other end would send it.
ROUTER = HANDSHAKE.replace(b"DEALER", b"ROUTER")


class Listener:
    """A bare listener on a path; the sockets it accepts block, with a timeout."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.bind(path)
        self.socket.listen(1)

    def accept(self, say: bytes = b"") -> socket.socket:
        peer, _ = self.socket.accept()
        peer.settimeout(PATIENCE_SECONDS)
        peer.sendall(say)
        return peer


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "z.sock")


@pytest.fixture
def listener(path: str) -> Iterator[Listener]:
    listener = Listener(path)
    yield listener
    listener.socket.close()


@pytest.fixture
def router(path: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
        router.setsockopt(zmq.HEARTBEAT_IVL, 50)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
        router.bind(f"ipc://{path}")
        yield router


@contextlib.contextmanager
def connect(path: str) -> Iterator[Connection]:
    connection = Connection(path)
    try:
        yield connection
    finally:
        connection.close()


def pump(connection: Connection, done: Callable[[], object], events: int) -> list[Message]:
    """Receive and send until done; return the messages received."""
    found: list[Message] = []
    poller = select.poll()
    poller.register(connection, events)
    end = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < end, "never came true"
        poller.poll(100)
        found += connection.receive()
        connection.flush()
    return found


def shake_hands(connection: Connection) -> Connection:
    assert pump(connection, lambda: connection.ready, select.POLLIN) == []
    return connection


def receive(connection: Connection, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += pump(connection, _once(), select.POLLIN)
    return found


def _once() -> Callable[[], bool]:
    looks = itertools.count()
    return lambda: next(looks) > 0


def read_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = peer.recv(min(size - len(data), MIB))
        assert chunk, f"the end after {len(data)} of {size} bytes"
        data += chunk
    return bytes(data)


def test_messages_of_all_sizes_go_both_ways(router, path):
    with connect(path) as connection:
        shake_hands(connection)
        messages = [bytes((n,)) * size for n, size in enumerate(SIZES)]
        for message in messages:
            connection.put(message)
        pump(connection, lambda: not connection.unsent, select.POLLOUT)
        got = [router.recv_multipart() for _ in messages]
        assert [frames[1:] for frames in got] == [[message] for message in messages]
        peer = got[0][0]
        for message in messages:
            router.send_multipart([peer, message])
        assert receive(connection, len(messages)) == messages


def test_sixteen_mib_go_both_ways(router, path):
    message = bytes(range(256)) * (16 * MIB // 256)
    with connect(path) as connection:
        shake_hands(connection)
        connection.put(message)
        pump(connection, lambda: not connection.unsent, select.POLLOUT)
        peer, got = router.recv_multipart()
        assert got == message
        router.send_multipart([peer, message, b""])
        router.send_multipart([peer, message])
        assert receive(connection, 2) == [None, message]


def test_many_small_messages_are_taken_at_once(router, path):
    with connect(path) as connection:
        shake_hands(connection)
        messages = [b"%d" % n for n in range(200)]
        for message in messages:
            connection.put(message)
        assert connection.flush()
        got = [router.recv_multipart() for _ in messages]
        assert [message for _, message in got] == messages
        for message in messages:
            router.send_multipart([got[0][0], message])
        time.sleep(0.3)  # until all of them are in the kernel
        assert connection.receive() == messages
        assert connection.drained


def test_a_router_that_asks_for_signs_of_life_gets_them(router, path):
    with connect(path) as connection:
        shake_hands(connection)
        connection.put(b"first")
        connection.flush()
        peer, _ = router.recv_multipart()
        end = time.monotonic() + 1.5  # three times its timeout
        pump(connection, lambda: time.monotonic() > end, select.POLLIN)
        router.send_multipart([peer, b"still here"])
        assert receive(connection, 1) == [b"still here"]


def test_the_frames_are_those_of_a_dealer_of_libzmq(listener):
    messages = [b"", b"abc", b"x" * 255, b"y" * 256, b"z" * 70_000]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{listener.path}")
        for message in messages:
            dealer.send(message)
        with listener.accept(ROUTER) as peer:
            greeting = read_exactly(peer, 64)
            ready = read_exactly(peer, 2)
            ready += read_exactly(peer, ready[1])
            theirs = read_exactly(peer, sum(len(m) + (2 if len(m) < 256 else 9) for m in messages))
    with connect(listener.path) as connection, listener.accept(ROUTER) as peer:
        shake_hands(connection)
        for message in messages:
            connection.put(message)
        assert connection.flush()
        said = read_exactly(peer, len(HANDSHAKE) + len(theirs))
    assert said[len(HANDSHAKE) :] == theirs
    assert said[9:64] == greeting[9:]  # the bytes before mean nothing
    assert said[66 : len(HANDSHAKE)] == ready[2 : 2 + len(HANDSHAKE) - 66]  # then their Identity


def test_what_the_kernel_does_not_take_waits_and_goes_out_in_order(listener):
    messages = [bytes((n,)) * 300_000 for n in range(20)]
    with connect(listener.path) as connection, listener.accept(ROUTER) as peer:
        shake_hands(connection)
        for message in messages:  # nobody reads: a blocking send would wait forever
            connection.put(message)
            connection.flush()
        assert connection.unsent
        assert not connection.flush()
        peer.setblocking(False)
        said = bytearray()
        while len(said) < len(HANDSHAKE) + 20 * 300_009:
            connection.flush()
            with contextlib.suppress(BlockingIOError):
                said += peer.recv(50_000)
        assert not connection.unsent
    frames = b"".join(b"\x02" + len(m).to_bytes(8, "big") + m for m in messages)
    assert bytes(said[len(HANDSHAKE) :]) == frames


@pytest.mark.parametrize("stage", [0, 1, 9, 10, 11, 63, 64, 65, 66, 80, len(ROUTER) - 1])
def test_a_peer_that_goes_in_the_middle_of_the_handshake_is_noticed(listener, stage):
    with connect(listener.path) as connection:
        listener.accept(ROUTER[:stage]).close()
        with pytest.raises(ConnectionError):
            pump(connection, lambda: connection.ready, select.POLLIN)
        assert not connection.ready


def test_a_peer_that_goes_later_is_noticed_by_reading_and_by_writing(listener):
    with connect(listener.path) as connection:
        peer = listener.accept(ROUTER)
        shake_hands(connection)
        peer.close()  # with our handshake unread, which causes a reset
        with pytest.raises(ConnectionResetError):
            connection.receive()
        connection.put(b"x")
        with pytest.raises(BrokenPipeError):
            connection.flush()


def test_a_listener_that_is_no_zeromq_is_told_apart_at_its_first_word(listener):
    with (
        connect(listener.path) as connection,
        listener.accept(b'{"jsonrpc'),
        pytest.raises(ProtocolError, match=r"not ZeroMQ: it began with b'\{"),
    ):
        pump(connection, lambda: connection.ready, select.POLLIN)


def test_where_too_many_wait_connect_does_not(listener):
    waiting: list[Connection] = []

    def crowd() -> None:
        for _ in range(100):
            waiting.append(Connection(listener.path))

    try:
        with pytest.raises(BlockingIOError):
            crowd()
    finally:
        for connection in waiting:
            connection.close()


@pytest.mark.parametrize("there", [False, True])
def test_where_nobody_listens_the_error_says_so(path, there):
    if there:
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(path)
    with pytest.raises(ConnectionRefusedError if there else FileNotFoundError):
        Connection(path)
