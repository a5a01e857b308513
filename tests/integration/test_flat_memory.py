"""A short endurance run: many tasks leave nothing behind in the supervisor."""

import contextlib
import socket
import time
from itertools import pairwise
from pathlib import Path

import psutil

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import PROTOCOL, Hello
from musterd.ipc.wire.zmtp import HANDSHAKE
from support.daemon import Musters

TASKS_PER_ROUND = 10_000
# Tables, pools and SQLite's cache reach their full size after some 15 rounds: seen over 50.
WARM_UP_ROUNDS, ROUNDS = 18, 12
HEAP_BYTES_MAX = 64 * 1024 * 1024
GROWTH_MAX = 1.10  # 70 bytes leaked per task would exceed it
WORKER = """
from musterd import task


@task
def noop(ctx, data: str) -> None:
    pass
"""


def anonymous(pid: int) -> int:
    """Return the anonymous memory of the process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no line RssAnon")


def heaps_of_threads(pid: int) -> int:
    """Count glibc's heaps of threads. Each begins at a multiple of its maximum size, has no name,
    and is a used part and a reserved part, together of that size. Others may match by chance.
    """
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    nameless = [(*line[0].split("-"), line[1]) for line in lines if len(line) < 6]
    areas = [(int(begin, 16), int(end, 16), rights) for begin, end, rights in nameless]
    return sum(
        begin % HEAP_BYTES_MAX == 0
        and (rights, reserved) == ("rw-p", "---p")
        and (end, last) == (middle, begin + HEAP_BYTES_MAX)
        for (begin, end, rights), (middle, last, reserved) in pairwise(areas)
    )


def lasting_descriptors(pid: int) -> int:
    """Count descriptors, without those that are open for a moment."""
    looks = []
    for _ in range(5):
        looks.append(psutil.Process(pid).num_fds())
        time.sleep(0.01)
    return min(looks)


def test_many_tasks_leave_no_memory_and_no_descriptor_behind(muster: Musters) -> None:
    daemon = muster(
        {"jobs": {"worker": "jobs", "size": 2, "queue_size": TASKS_PER_ROUND * 2}},
        start=False,
        store__keep_results_max=TASKS_PER_ROUND,
    )
    (daemon.folder / "jobs.py").write_text(WORKER)
    daemon.start()
    client = daemon.client()
    weights, descriptors = [], []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        requests = [("jobs.noop", {"data": "x" * 100})] * TASKS_PER_ROUND
        for handle in client.submit_many(requests):
            handle.result(60)
        weights.append(anonymous(daemon.pid))
        descriptors.append(lasting_descriptors(daemon.pid))
    # A leak raises the minimum; memory in use for a moment raises only the maximum.
    early, late = max(weights[:WARM_UP_ROUNDS]), min(weights[-2:])
    assert late <= early * GROWTH_MAX, weights
    assert descriptors[-1] <= descriptors[WARM_UP_ROUNDS - 1], descriptors
    assert heaps_of_threads(daemon.pid) == 0, "its threads share one"


GREETING, READY = HANDSHAKE[:64], HANDSHAKE[64:]
HELLO = encode(Hello(PROTOCOL))
CONNECTIONS_PER_ROUND = 150
CONNECTION_ROUNDS = 8
COUNTED_ROUNDS = 5
# 9,000 connections of all kinds: 120 bytes leaked per connection would exceed it.
CONNECTION_GROWTH_BYTES_MAX = 1024 * 1024
MALFORMED = {
    "nothing": b"",
    "not ZeroMQ": b"GET / HTTP/1.1\r\n\r\n",
    "half a greeting": GREETING[:20],
    "another mechanism": GREETING.replace(b"NULL\0", b"PLAIN"),
    "a type of socket that may not come": HANDSHAKE.replace(b"DEALER", b"STREAM"),
    "a message before READY": GREETING + b"\0\1x",
    "no message": HANDSHAKE + b"\0\1\xc1",
    "several frames": HANDSHAKE + b"\1\1a\0\1b",
    "half a frame": HANDSHAKE + b"\0\xffabc",
    "flags that are none": HANDSHAKE + b"\xff\xff",
    "a hello, then garbage": HANDSHAKE + bytes((0, len(HELLO))) + HELLO + b"\0\1\xc1",
    "another protocol": HANDSHAKE + b"\0\x09" + encode(Hello(99)),
}


def say(path: str, said: bytes) -> None:
    """Send the handshake, then the rest; close our half and wait until the daemon closes."""
    with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(ConnectionError):
        peer.settimeout(60)
        peer.connect(path)
        first, rest = said, b""
        if said.startswith(HANDSHAKE):
            first, rest = said[: len(HANDSHAKE)], said[len(HANDSHAKE) :]
        peer.sendall(first)
        heard = b""
        while rest and b"READY" not in heard:
            heard += peer.recv(1000)
        peer.sendall(rest)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1000):
            pass


def test_malformed_connections_leave_nothing_behind(muster: Musters) -> None:
    daemon = muster({"jobs": {"worker": "jobs", "size": 1}}, start=False)
    (daemon.folder / "jobs.py").write_text(WORKER)
    daemon.start()
    weights, descriptors = [], []
    for _ in range(CONNECTION_ROUNDS):
        for _ in range(CONNECTIONS_PER_ROUND):
            for said in MALFORMED.values():
                say(daemon.tasks_socket, said)
        with daemon.client() as client:
            client.submit("jobs.noop", {"data": ""}).result(60)
        weights.append(anonymous(daemon.pid))
        descriptors.append(lasting_descriptors(daemon.pid))
    early, late = weights[-1 - COUNTED_ROUNDS], weights[-1]
    assert late - early <= CONNECTION_GROWTH_BYTES_MAX, weights
    assert descriptors[-1] <= descriptors[1] + 2, descriptors
