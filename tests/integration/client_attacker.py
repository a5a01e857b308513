"""python client_attacker.py KIND SOCKET PEERS AT_LEAST [ID...]: hostile clients of tasks.sock.

Each peer sends as fast as the daemon lets it and reads nothing. A peer that is disconnected
connects again. The program prints "begun" when every peer has connected once. It runs until
standard input ends, then prints the number of disconnections.
"""

import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import (
    CLIENT_BYTES_MAX,
    PROTOCOL,
    Hello,
    Inspect,
    Submit,
    TaskSpec,
    Watch,
)
from musterd.ipc.wire.zmtp import HANDSHAKE

MORE, LONG = 1, 2
CHUNK = 64 * 1024


def frame(body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BQ", flags | LONG, len(body)) + body


HELLO = frame(encode(Hello(PROTOCOL)))


def endless(_ids: list[str]) -> Iterator[bytes]:
    """Send a message of several frames that never ends."""
    yield HELLO
    part = frame(bytes(CHUNK), MORE)
    while True:
        yield part


def half(_ids: list[str]) -> Iterator[bytes]:
    """Send a frame that lacks its last byte."""
    yield HELLO
    yield frame(bytes(CLIENT_BYTES_MAX - 1))[:9]
    for _ in range(CLIENT_BYTES_MAX // CHUNK - 1):
        yield bytes(CHUNK)


def mute(_ids: list[str]) -> Iterator[bytes]:
    """Send half a frame without a hello."""
    says = half([])
    next(says)
    yield from says


def watch(ids: list[str]) -> Iterator[bytes]:
    """Watch large results, all at once, again and again."""
    yield HELLO
    while True:
        yield frame(encode(Watch((ids * 60)[:60])))


def inspect(ids: list[str]) -> Iterator[bytes]:
    """Inspect large tasks, one after the other."""
    yield HELLO
    number = 0
    while True:
        number += 1
        yield frame(encode(Inspect(number, ids[number % len(ids)])))


def resend(_ids: list[str]) -> Iterator[bytes]:
    """Send submits marked as resent, which only the store can tell from new ones."""
    yield HELLO
    mine = f"{os.getpid()}-{time.monotonic_ns()}"
    number = 0
    while True:
        number += 1
        task = TaskSpec(f"{mine}-{number}", "nowhere.x", bytes(1024 * 1024))
        yield frame(encode(Submit(number % 3, [task], True)))


def again(_ids: list[str]) -> Iterator[bytes]:
    """Send the same submits on each connection in turn."""
    yield HELLO
    tasks = [TaskSpec(f"again-{number}", "jobs.echo", bytes(60 * 1024)) for number in range(4)]
    for number, task in enumerate(tasks):
        yield frame(encode(Submit(number, [task], True)))


def unknown(_ids: list[str]) -> Iterator[bytes]:
    """Send small submits that get long answers."""
    yield HELLO
    tasks = [TaskSpec(f"u{number}", "nowhere.x", b"") for number in range(1000)]
    submit = frame(encode(Submit(1, tasks)))
    while True:
        yield submit


def hello(_ids: list[str]) -> Iterator[bytes]:
    """Send hello again and again; each hello gets an answer."""
    while True:
        yield HELLO * 100


def garbage(_ids: list[str]) -> Iterator[bytes]:
    """Send frames that hold no message."""
    yield HELLO
    while True:
        yield b"\0\1\xc1" * 1000


KINDS: dict[str, Callable[[list[str]], Iterator[bytes]]] = {
    each.__name__: each
    for each in (endless, half, mute, watch, inspect, resend, again, unknown, hello, garbage)
}
HANGS_UP = ("again",)  # after the last byte


class Peer:
    def __init__(self, kind: str, path: str, ids: list[str]) -> None:
        self._says = KINDS[kind](ids)
        self.hangs_up = kind in HANGS_UP
        self.rest = HANDSHAKE
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.setblocking(False)
        self.socket.connect(path)

    def go_on(self) -> bool:
        """Send as much as fits; return False when nothing is left to send."""
        try:
            while True:
                while self.rest:
                    self.rest = self.rest[self.socket.send(self.rest) :]
                self.rest = next(self._says, b"")
                if not self.rest:
                    return False
        except BlockingIOError:
            return True


def attack(kind: str, path: str, peers: int, at_least: int, ids: list[str]) -> None:
    """Attack until standard input is closed and so many connections have ended."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    begun = False
    wanted, put_out = peers, 0
    enough = False
    while not (enough and put_out >= at_least):
        while wanted:
            try:
                peer = Peer(kind, path, ids)
            except BlockingIOError:  # the accept queue is full
                break
            selector.register(peer.socket, selectors.EVENT_WRITE, peer)
            wanted -= 1
        if not wanted and not begun:
            begun = True
            print("begun", flush=True)
        for key, _ in selector.select(0.05):
            peer = key.data
            if peer is None:
                enough = True
                selector.unregister(sys.stdin)
                continue
            try:
                over = not peer.go_on()
                if over and peer.hangs_up:
                    raise ConnectionResetError
                if over:  # from now on only the end of the connection matters
                    selector.modify(peer.socket, selectors.EVENT_READ, peer)
                    if key.events == selectors.EVENT_READ and not peer.socket.recv(1024 * 1024):
                        raise ConnectionResetError
            except ConnectionError:
                selector.unregister(peer.socket)
                peer.socket.close()
                wanted += 1
                put_out += 1
    print(put_out)


if __name__ == "__main__":
    kind, path, peers, at_least, *ids = sys.argv[1:]
    attack(kind, path, int(peers), int(at_least), ids)
