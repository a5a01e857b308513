"""The ZMTP reader: for any bytes, cut in any way."""

import itertools
import re
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.messages import WIRE_BYTES_MAX
from musterd.ipc.wire.zmtp import HANDSHAKE, Message, Reader

# Greeting of a ROUTER of libzmq 4.3.5, as recorded.
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
LONG_SIZE = struct.Struct(">Q")

bodies = st.one_of(st.binary(max_size=300), st.just(b"x" * 256), st.just(b"y" * 70_000))


def frame(body: bytes, flags: int = 0, *, long: bool = False) -> bytes:
    if long or len(body) > 255:
        return bytes((flags | 2,)) + LONG_SIZE.pack(len(body)) + body
    return bytes((flags, len(body))) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    return frame(bytes((len(name),)) + name + data, 4)


def ready(**properties: bytes) -> bytes:
    data = b""
    for name, value in properties.items():
        key = name.replace("_", "-").encode()
        data += bytes((len(key),)) + key + struct.pack(">I", len(value)) + value
    return command(b"READY", data)


def read(*chunks: bytes) -> list[Message]:
    reader = Reader()
    return [message for chunk in chunks for message in reader.feed(chunk)]


def connected() -> Reader:
    reader = Reader()
    assert reader.feed(GREETING + READY) == []
    assert reader.ready
    return reader


def test_a_greeting_has_64_bytes_and_names_version_mechanism_and_socket():
    assert HANDSHAKE[:12] == b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01"
    assert HANDSHAKE[12:64] == b"NULL".ljust(52, b"\0")
    assert HANDSHAKE[64:] == ready(Socket_Type=b"DEALER")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 16 * 1024 * 1024])
def test_a_message_is_what_was_sent(size):
    body = bytes(range(256)) * (size // 256) + b"z" * (size % 256)
    assert connected().feed(frame(body)) == [body]
    assert connected().feed(frame(body, long=True)) == [body]  # allowed, though not needed


@given(st.lists(bodies, max_size=20), st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(messages, data):
    stream = GREETING + READY + b"".join(frame(body) for body in messages)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=30).map(sorted))
    edges = [0, *cuts, len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(edges) if a < b]
    assert read(*chunks) == messages


def test_byte_by_byte_is_enough():
    stream = GREETING + READY + frame(b"one") + frame(b"2" * 300) + frame(b"") + frame(b"end")
    chunks = [stream[at : at + 1] for at in range(len(stream))]
    assert read(*chunks) == [b"one", b"2" * 300, b"", b"end"]


@given(st.binary(min_size=1), st.booleans(), st.integers(1, 50))
def test_garbage_is_read_or_refused_and_nothing_else(garbage, greeted, step):
    reader = connected() if greeted else Reader()
    try:
        for at in range(0, len(garbage), step):
            reader.feed(garbage[at : at + step])
    except ProtocolError:
        pass
    assert len(reader._body) + len(reader._rest) <= len(garbage)


@given(st.binary(max_size=60), st.integers(0, 255))
def test_garbage_in_a_ready_is_read_or_refused(data, length):
    reader = Reader()
    reader.feed(GREETING)
    try:
        reader.feed(frame(bytes((length,)) + b"READY" + data, 4))
    except ProtocolError:
        assert not reader.ready


def test_a_message_of_several_frames_is_told_once_and_the_next_is_read():
    several = frame(b"a", 1) + frame(b"b" * 300, 1) + frame(b"c")
    assert connected().feed(several + frame(b"next")) == [None, b"next"]
    reader = connected()
    found = [message for byte in several for message in reader.feed(bytes((byte,)))]
    assert found == [None]


def test_a_ping_is_answered_with_what_it_carried_and_other_commands_with_nothing():
    reader = connected()
    assert reader.feed(frame(b"a") + command(b"PING", b"\0\x0ahello") + frame(b"b")) == [b"a", b"b"]
    assert reader.pong == command(b"PONG", b"hello")
    reader.pong = b""
    for other in (b"SUBSCRIBE", b"ERROR", b"JOIN", b""):
        assert reader.feed(command(other, b"topic")) == []
    assert reader.feed(frame(b"", 4) + frame(b"c")) == [b"c"]
    assert reader.pong == b""


def test_a_size_is_no_reason_to_take_memory():
    reader = connected()
    assert reader.feed(b"\x02" + LONG_SIZE.pack(WIRE_BYTES_MAX) + b"only this") == []
    assert sys.getsizeof(reader._body) < 1000


def test_a_frame_over_the_limit_is_refused_when_its_size_is_seen():
    with pytest.raises(ProtocolError, match=f"a frame of {WIRE_BYTES_MAX + 1} bytes"):
        connected().feed(b"\x02" + LONG_SIZE.pack(WIRE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "not ZeroMQ: it began with b'HTTP/1.1"),
        (b"{", "not ZeroMQ"),
        (b"\xff\0\0\0\0\0\0\0\x01\x00", "not ZeroMQ"),
        (GREETING[:10] + b"\x01", "ZMTP of version 1 instead of 3"),
        (GREETING.replace(b"NULL", b"PLAIN")[:64], "the mechanism 'PLAIN' instead of 'NULL'"),
        (GREETING + command(b"ERROR", b"\x03no!"), "refuses the connection: 'no!'"),
        (GREETING + command(b"HELLO"), "the command b'HELLO' before READY"),
        (GREETING + frame(b"hi"), "a message before READY"),
        (GREETING + ready(Socket_Type=b"PUB"), "the type b'PUB' instead of ROUTER"),
        (GREETING + ready(), "the type b'' instead of ROUTER"),
        (GREETING + command(b"READY", b"\x0bSocket-Type\0\0\1\0ROUTER"), "properties do not fit"),
        (GREETING + command(b"READY", b"\xffSocket-Type"), "properties do not fit"),
        (GREETING + READY + b"\x08\x01x", "the flags 0x08"),
    ],
)
def test_who_does_not_speak_our_zeromq_is_told_apart(said, why):
    with pytest.raises(ProtocolError, match=re.escape(why)):
        Reader().feed(said)


def test_names_of_properties_may_be_written_in_any_case():
    reader = Reader()
    reader.feed(GREETING + ready(X=b"y", SOCKET_type=b"ROUTER"))
    assert reader.ready


def test_neither_a_client_nor_a_worker_nor_a_fork_server_loads_libzmq():
    program = (
        "import sys, musterd.supervisor.processes.forkserver\n"
        "import musterd.workers.runtime.run, musterd.workers.parser\n"
        "from musterd import AsyncClient, Client, Worker\n"
        "print([name for name in sys.modules if 'zmq' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
