"""Foreign clients of tasks.sock: libzmq, zeromq.js, and bytes according to the standard."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from musterd.ipc.wire.codec import decode_server, encode
from musterd.ipc.wire.messages import PROTOCOL, Hello, Results, Submit, TaskSpec, Welcome
from musterd.ipc.wire.zmtp import HANDSHAKE
from support.daemon import Muster, Musters

SECONDS = 60.0
NODE = Path(__file__).resolve().parents[2] / ".venv-node" / "node_modules"
PROGRAM = Path(__file__).with_name("node") / "client.js"
GREETING, READY = HANDSHAKE[:64], HANDSHAKE[64:]
# The identities that libzmq's ROUTER gives its first peers. A peer that announces the next one ends
# a process that contains libzmq.
FIRST_OF_LIBZMQ = 0x6B8B4567


@pytest.fixture(scope="module")
def fleet(module_muster: Musters) -> Muster:
    made = module_muster({"jobs": {"worker": "jobs:Jobs", "size": 1}}, start=False)
    Path(made.folder, "jobs.py").write_text(
        "from musterd import Worker, task\n"
        "class Jobs(Worker):\n"
        "    @task\n"
        "    def echo(self, ctx, value: object = None) -> object:\n"
        "        return value\n"
    )
    return made.start()


class Peers:
    """Sockets of libzmq, closed at the end."""

    def __init__(self, fleet: Muster, held: contextlib.ExitStack) -> None:
        self._endpoint = f"ipc://{fleet.tasks_socket}"
        self._held = held
        self._context = held.enter_context(zmq.Context())

    def make(self, **options: Any) -> Any:
        made = self._held.enter_context(self._context.socket(zmq.DEALER))
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        return made

    def connect(self, **options: Any) -> Any:
        made = self.make(**options)
        made.connect(self._endpoint)
        return made

    def refused(self, **options: Any) -> int:
        """Return libzmq's code for the failed handshake."""
        made = self.make(**options)
        with made.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) as monitor:
            monitor.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
            made.connect(self._endpoint)
            told = recv_monitor_message(monitor)
            made.disable_monitor()
        return int(told["value"])


@pytest.fixture
def peers(fleet: Muster) -> Iterator[Peers]:
    with contextlib.ExitStack() as held:
        yield Peers(fleet, held)


def echo(peer: Any, value: str) -> Any:
    """Run a task for a client that has said hello; return the result."""
    id_ = f"{value}-{time.monotonic_ns()}"
    args = msgspec.msgpack.encode({"value": value})
    peer.send(encode(Submit(1, [TaskSpec(id_, "jobs.echo", args)])))
    while not isinstance(answer := decode_server(peer.recv()), Results):
        pass
    (outcome,) = answer.outcomes
    assert outcome.id == id_
    return outcome.result


def greet(peer: Any) -> Welcome:
    peer.send(encode(Hello(PROTOCOL)))
    answer = decode_server(peer.recv())
    assert isinstance(answer, Welcome)
    return answer


# -- libzmq -----------------------------------------------------------------------------------


def test_a_client_of_libzmq_with_heartbeats_is_served(peers: Peers) -> None:
    peer = peers.connect(HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=500)
    epoch = greet(peer).epoch
    end = time.monotonic() + 1.5
    while time.monotonic() < end:  # its PINGs are answered, or it would reconnect
        assert greet(peer).epoch == epoch
        time.sleep(0.1)
    assert echo(peer, "libzmq") == "libzmq"


def test_two_clients_with_the_same_identity_are_two(peers: Peers) -> None:
    one, two = (peers.connect(IDENTITY=b"twin") for _ in range(2))
    assert greet(one).epoch != greet(two).epoch
    assert echo(one, "one") == "one"
    assert echo(two, "two") == "two"


def test_an_identity_as_libzmq_would_give_it_next_ends_nothing(fleet: Muster, peers: Peers) -> None:
    with contextlib.ExitStack() as held:
        for number in range(64):
            peer = held.enter_context(raw(fleet))
            identity = b"\0" + (FIRST_OF_LIBZMQ + number).to_bytes(4, "big")
            peer.sendall(GREETING + ready(Identity=identity))
        for number in range(8):
            other = peers.connect()
            greet(other)
            assert echo(other, f"after {number}") == f"after {number}"
    assert fleet.process.poll() is None


def test_a_client_of_libzmq_that_wants_security_is_told_that_there_is_none(peers: Peers) -> None:
    plain = {"PLAIN_USERNAME": b"somebody", "PLAIN_PASSWORD": b"secret"}
    public, secret = zmq.curve_keypair()
    curve = {
        "CURVE_SERVERKEY": zmq.curve_keypair()[0],
        "CURVE_PUBLICKEY": public,
        "CURVE_SECRETKEY": secret,
    }
    for options in (plain, curve):
        assert peers.refused(**options) == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


# -- zeromq.js --------------------------------------------------------------------------------


def node(fleet: Muster, manner: str) -> Any:
    if shutil.which("node") is None or not (NODE / "zeromq").is_dir():
        pytest.skip("zeromq.js is not installed: make .venv-node/.installed")
    done = subprocess.run(
        ["node", str(PROGRAM), fleet.tasks_socket, manner],
        env={**os.environ, "NODE_PATH": str(NODE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("manner", ["plain", "identity", "heartbeat"])
def test_a_client_of_zeromq_js_is_served(fleet: Muster, manner: str) -> None:
    found = node(fleet, manner)
    del found["epoch"]
    assert found == {"accepted": [7, []], "id": True, "state": "succeeded", "result": "from node"}


def test_a_client_of_zeromq_js_that_wants_security_is_told(fleet: Muster) -> None:
    assert node(fleet, "secured") in ("handshake:error:protocol", "disconnect")


# -- bytes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def raw(fleet: Muster) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(SECONDS)
        peer.connect(fleet.tasks_socket)
        yield peer


def ready(**properties: bytes) -> bytes:
    body = b"\x05READY"
    for name, value in {"Socket_Type": b"DEALER", **properties}.items():
        label = name.replace("_", "-").encode()
        body += bytes((len(label),)) + label + len(value).to_bytes(4, "big") + value
    if len(body) > 255:
        return b"\x06" + len(body).to_bytes(8, "big") + body
    return bytes((4, len(body))) + body


def read(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        chunk = peer.recv(size - len(found))
        assert chunk, f"it ended after {found!r}"
        found += chunk
    return found


def read_frame(peer: socket.socket) -> tuple[int, bytes]:
    flags, size = read(peer, 2)
    if flags & 2:
        size = int.from_bytes(bytes((size,)) + read(peer, 7), "big")
    return flags, read(peer, size)


def shake(peer: socket.socket) -> None:
    assert read(peer, 64) == GREETING
    flags, body = read_frame(peer)
    assert flags == 4
    assert body.startswith(b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER")


def is_served(peer: socket.socket) -> None:
    hello = encode(Hello(PROTOCOL))
    peer.sendall(bytes((0, len(hello))) + hello)
    assert isinstance(decode_server(read_frame(peer)[1]), Welcome)


@pytest.mark.parametrize("minor", [0, 1, 7])
@pytest.mark.parametrize("portion", [1, 1000])
def test_any_version_3_is_welcome_in_portions_of_any_size(
    fleet: Muster, minor: int, portion: int
) -> None:
    hello = encode(Hello(PROTOCOL))
    greeting = GREETING[:11] + bytes((minor,)) + GREETING[12:]
    says = greeting + ready(Identity=b"x" * 255) + bytes((0, len(hello))) + hello
    with raw(fleet) as peer:
        for start in range(0, len(says), portion):
            peer.sendall(says[start : start + portion])
            if portion == 1:
                time.sleep(0.001)
        shake(peer)
        assert isinstance(decode_server(read_frame(peer)[1]), Welcome)


def test_a_ping_is_answered_with_its_context(fleet: Muster) -> None:
    with raw(fleet) as peer:
        peer.sendall(GREETING + ready())
        shake(peer)
        peer.sendall(b"\x04\x0f\x04PING\x00\x0acontext!")
        assert read_frame(peer) == (4, b"\x04PONGcontext!")
        is_served(peer)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (GREETING.replace(b"NULL\0", b"PLAIN"), "it wants the mechanism 'PLAIN'"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "it wants the mechanism 'CURVE'"),
        (GREETING + ready(Socket_Type=b"PUB"), "a socket of the type b'PUB'"),
        (GREETING + b"\0\x05hello", "a message before READY"),
    ],
    ids=["PLAIN", "CURVE", "PUB", "early"],
)
def test_a_handshake_that_cannot_be_is_answered_with_an_error_and_closed(
    fleet: Muster, says: bytes, why: str
) -> None:
    with raw(fleet) as peer:
        peer.sendall(says)
        assert read(peer, 64) == GREETING
        flags, body = read_frame(peer)
        if body.startswith(b"\x05READY"):  # its greeting was valid
            flags, body = read_frame(peer)
        assert flags == 4
        assert body[:6] == b"\x05ERROR"
        assert body[6] == len(body) - 7
        assert why in body[7:].decode()
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b"", "the end"


@pytest.mark.parametrize("says", [b"\x01\x00", GREETING[:10] + b"\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_who_does_not_speak_version_3_is_closed(fleet: Muster, says: bytes) -> None:
    with raw(fleet) as peer:
        peer.sendall(says)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(1000):
                pass


# -- the supervisor ---------------------------------------------------------------------------


def test_nothing_of_libzmq_is_in_the_process_of_a_daemon(fleet: Muster) -> None:
    mapped = Path(f"/proc/{fleet.pid}/maps").read_text()
    assert "python" in mapped
    assert "zmq" not in mapped
    program = (
        "import sys, musterd.supervisor.loop.daemon\n"
        "print([name for name in sys.modules if 'zmq' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
