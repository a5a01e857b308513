"""Clients and callers that misbehave for some seconds, in a separate process.

    python floods.py KIND SEED SECONDS RUNTIME_DIR LEDGER

KIND is one of FLOODS. The program writes to the LEDGER which tasks were acknowledged and which were
refused, one line each. Standard output gets one JSON object with counts.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq

from musterd import Client, QueueFull
from musterd.ipc.client.ids import new_id
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import (
    PROTOCOL,
    Cancel,
    Done,
    Hello,
    Inspect,
    Submit,
    TaskSpec,
    Watch,
    WorkerHello,
)

POOL = "public"  # used by floods alone
CLIENTS_AT_ONCE = 6
CLIENT_SECONDS_MAX = 90.0  # a client that takes longer is stuck
KILLED_SECONDS_MAX = 0.3  # the life of a client that is going to be killed
CONNECT_SECONDS = 30.0
CONNECTIONS = 500  # to the control socket at once
HELD_SECONDS_MAX = 0.5
LONG_LINE_BYTES = 1_100_000  # a line may have 1 MiB
BULK_KILOBYTES = 16
UNREAD_TASKS = 60
FLOOD_SECONDS_MAX = 4.0  # the length of one flood
QUIET_SECONDS_MAX = 2.0  # between two floods of a kind


class Ledger:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, what: str, ids: list[str]) -> None:
        """Append a line with one write: lines of several processes never mix."""
        if ids:
            os.write(self._fd, "".join(f"{what} {id_}\n" for id_ in ids).encode())


class Flood:
    def __init__(self, rng: Random, seconds: float, runtime: Path, ledger: Ledger) -> None:
        self.rng = rng
        self.end = time.monotonic() + seconds
        self.tasks = str(runtime / "tasks.sock")
        self.workers = str(runtime / "workers.sock")
        self.control = str(runtime / "control.sock")
        self.ledger = ledger
        self.counts: Counter[str] = Counter()

    def over(self) -> bool:
        return time.monotonic() > self.end

    def pause(self, seconds_max: float) -> None:
        time.sleep(self.rng.uniform(0, seconds_max))


# -- clients ----------------------------------------------------------------------------------


def short_client(flood: Flood) -> None:
    """Submit a few tasks, wait for them and leave."""
    with Client(flood.tasks, connect_timeout=CONNECT_SECONDS) as client:
        handles = [
            client.submit(f"{POOL}.tiny", {"value": value})
            for value in range(flood.rng.randint(1, 5))
        ]
        for value, handle in enumerate(handles):
            try:
                handle.ack(CLIENT_SECONDS_MAX)
            except QueueFull:
                flood.ledger.note("refused", [handle.id])
                continue
            flood.ledger.note("acked", [handle.id])
            if flood.rng.random() < 0.7:
                assert handle.result(CLIENT_SECONDS_MAX) == value


def hasty_client(flood: Flood) -> None:
    """Disconnect without a word, before any answer."""
    client = Client(flood.tasks, connect_timeout=CONNECT_SECONDS)
    for value in range(20):
        client.submit(f"{POOL}.tiny", {"value": value})
    flood.pause(0.02)
    os._exit(0)


def greedy_client(flood: Flood) -> None:
    """Submit and cancel until killed."""
    client = Client(flood.tasks, connect_timeout=CONNECT_SECONDS)
    while True:
        count = flood.rng.randint(1, 50)
        handles = [client.submit(f"{POOL}.tiny", {"value": value}) for value in range(count)]
        handles[0].cancel()
        with contextlib.suppress(QueueFull):
            client.flush(CLIENT_SECONDS_MAX)
        flood.ledger.note("acked", [each.id for each in handles if each._acknowledged])


def deaf_client(flood: Flood) -> None:
    """Ask for large results and read none of them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(f"ipc://{flood.tasks}")
        dealer.send(encode(Hello(PROTOCOL)))
        ids = [new_id() for _ in range(UNREAD_TASKS)]
        args = msgspec.msgpack.encode({"value": 1, "kilobytes": BULK_KILOBYTES})
        dealer.send(encode(Submit(1, [TaskSpec(id_, f"{POOL}.bulky", args) for id_ in ids])))
        for _ in range(flood.rng.randint(1, 20)):
            dealer.send(encode(Watch(ids)))
        flood.pause(1.0)


CLIENTS: dict[Callable[[Flood], None], int] = {
    short_client: 20,
    hasty_client: 4,
    greedy_client: 4,
    deaf_client: 1,
}


def clients(flood: Flood) -> None:
    """Run many clients at once, each in a process; no ZeroMQ context is made before a fork."""
    due: dict[int, tuple[str, float, bool]] = {}  # pid: kind, deadline, whether it is killed then
    while due or not flood.over():
        while not flood.over() and len(due) < CLIENTS_AT_ONCE:
            kind = flood.rng.choices(tuple(CLIENTS), tuple(CLIENTS.values()))[0]
            seed = flood.rng.random()
            killed = kind is greedy_client
            seconds = flood.rng.uniform(0.02, KILLED_SECONDS_MAX) if killed else CLIENT_SECONDS_MAX
            pid = os.fork()
            if pid == 0:
                _be_client(kind, flood, seed)
            due[pid] = (kind.__name__, time.monotonic() + seconds, killed)
        for pid, (name, until, killed) in list(due.items()):
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                flood.counts[name if killed else f"{name} stuck"] += 1
                del due[pid]
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                flood.counts[name if status == 0 else f"{name} failed"] += 1
                del due[pid]
        time.sleep(0.002)


def _be_client(kind: Callable[[Flood], None], flood: Flood, seed: float) -> None:
    code = 1
    try:
        flood.rng = Random(seed)
        kind(flood)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


# -- garbage ----------------------------------------------------------------------------------


def garbage(flood: Flood) -> None:
    """Send data that is no message to the sockets of tasks and workers."""
    kinds = (raw_bytes, half_greeting, silent_crowd, odd_frames)
    while not flood.over():
        kind = flood.rng.choice(kinds)
        with contextlib.suppress(OSError):  # the daemon is down, or has disconnected us
            kind(flood)
        flood.counts[kind.__name__] += 1
        flood.pause(0.05)


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(5.0)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def raw_bytes(flood: Flood) -> None:
    with _connected(flood.rng.choice((flood.tasks, flood.workers))) as sock:
        sock.sendall(flood.rng.randbytes(flood.rng.choice((1, 10, 64, 1000, 60_000))))
        flood.pause(0.02)


def half_greeting(flood: Flood) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    with _connected(flood.rng.choice((flood.tasks, flood.workers))) as sock:
        sock.sendall(greeting[: flood.rng.randint(1, len(greeting))])
        flood.pause(0.1)


def silent_crowd(flood: Flood) -> None:
    """Open connections and never say anything."""
    path = flood.rng.choice((flood.tasks, flood.workers))
    with contextlib.ExitStack() as held:
        for _ in range(flood.rng.randint(1, 200)):
            held.enter_context(_connected(path))
        flood.pause(HELD_SECONDS_MAX)


def odd_frames(flood: Flood) -> None:
    """Send frames that are valid ZeroMQ and nothing else."""
    rng = flood.rng
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{rng.choice((flood.tasks, flood.workers))}")
        good = [
            encode(Hello(PROTOCOL)),
            encode(Hello(PROTOCOL + 1)),
            encode(WorkerHello(PROTOCOL, rng.randbytes(16).hex())),
            encode(Submit(1, [TaskSpec(new_id(), "nowhere.tiny", b"\x80")])),
            encode(Watch([new_id()])),
            encode(Inspect(1, new_id())),
            encode(Cancel([new_id()])),
            encode(Done([])),
        ]
        for _ in range(rng.randint(1, 50)):
            frame = bytearray(rng.choice(good))
            how = rng.randrange(5)
            if how == 0:
                del frame[rng.randrange(len(frame)) :]
            elif how == 1:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            elif how == 2:
                frame = bytearray(b"\x91" * rng.randint(1, 5000))  # an array in an array in ...
            elif how == 3:
                frame = bytearray(rng.randbytes(rng.randint(0, 2000)))
            if rng.random() < 0.1:
                dealer.send_multipart([bytes(frame)] * rng.randint(2, 5))
            else:
                dealer.send(bytes(frame))
        flood.pause(0.05)


# -- the control socket -----------------------------------------------------------------------


def control(flood: Flood) -> None:
    """Abuse the control socket with several callers at once."""
    kinds: tuple[Callable[[Flood], None], ...] = (
        garbage_lines,
        half_line,
        long_line,
        many_callers,
        deaf_followers,
        unread_answers,
        gone_at_once,
    )

    def abuse(seed: float) -> None:
        own = Flood.__new__(Flood)
        own.__dict__.update(flood.__dict__)
        own.rng = Random(seed)
        while not flood.over():
            kind = own.rng.choice(kinds)
            with contextlib.suppress(OSError):  # the daemon is down, or has disconnected us
                kind(own)
            flood.counts[kind.__name__] += 1
            own.pause(0.05)

    threads = [threading.Thread(target=abuse, args=(flood.rng.random(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _line(method: str, params: Any, id_: int = 1) -> bytes:
    asked = {"jsonrpc": "2.0", "id": id_, "method": method, "params": params}
    return json.dumps(asked).encode() + b"\n"


def garbage_lines(flood: Flood) -> None:
    lines = [
        flood.rng.randbytes(100) + b"\n",
        b"[" * 5000 + b"\n",
        b'{"jsonrpc": "2.0"}\n',
        _line("nonsense", {}),
        _line("status", {"names": 7}),
        _line("scale", {"pool": "nowhere", "size": 3}),
        _line("tasks.get", {"id": "\ud800"}),
        b"\n" * 1000,
    ]
    with _connected(flood.control) as sock:
        for _ in range(flood.rng.randint(1, 100)):
            sock.sendall(flood.rng.choice(lines))
        if flood.rng.random() < 0.5:
            sock.recv(1000)


def half_line(flood: Flood) -> None:
    with _connected(flood.control) as sock:
        for byte in _line("status", {})[: flood.rng.randint(1, 30)]:
            sock.sendall(bytes([byte]))
        flood.pause(HELD_SECONDS_MAX)


def long_line(flood: Flood) -> None:
    with _connected(flood.control) as sock:
        sock.sendall(b"x" * LONG_LINE_BYTES)
        sock.recv(1000)


def many_callers(flood: Flood) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(CONNECTIONS):
            sock = held.enter_context(_connected(flood.control))
            if flood.rng.random() < 0.5:
                sock.sendall(_line("status", {}))
        flood.pause(HELD_SECONDS_MAX)


def deaf_followers(flood: Flood) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(20):
            sock = held.enter_context(_connected(flood.control))
            sock.sendall(_line("events", {"follow": True}))
        flood.pause(HELD_SECONDS_MAX)


def unread_answers(flood: Flood) -> None:
    with _connected(flood.control) as sock:
        sock.settimeout(HELD_SECONDS_MAX)
        sock.sendall(_line("status", {}) * 1000)
        flood.pause(HELD_SECONDS_MAX)


def gone_at_once(flood: Flood) -> None:
    for _ in range(50):
        with _connected(flood.control) as sock:
            sock.sendall(_line("tasks.list", {}))


FLOODS: dict[str, Callable[[Flood], None]] = {
    "clients": clients,
    "garbage": garbage,
    "control": control,
}


class Floods:
    """Runs floods of all kinds, again and again, for the test."""

    def __init__(self, rng: Random, runtime: Path, ledger: Path) -> None:
        self._rng = rng
        self._runtime = runtime
        self._ledger = ledger
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._next = dict.fromkeys(FLOODS, 0.0)  # the next start, by kind
        self.counts: Counter[str] = Counter()

    def tick(self) -> None:
        """Begin and end floods that are due."""
        now = time.monotonic()
        for kind in FLOODS:
            process = self._running.get(kind)
            if process is None and now >= self._next[kind]:
                self._running[kind] = self._begin(kind)
            elif process is not None and process.poll() is not None:
                self._end(kind)
                self._next[kind] = now + self._rng.uniform(0, QUIET_SECONDS_MAX)

    def _begin(self, kind: str) -> subprocess.Popen[bytes]:
        seconds = self._rng.uniform(0.5, FLOOD_SECONDS_MAX)
        command = [sys.executable, __file__, kind, str(self._rng.getrandbits(32)), str(seconds)]
        return subprocess.Popen(
            [*command, str(self._runtime), str(self._ledger)],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def _end(self, kind: str) -> None:
        process = self._running.pop(kind)
        output, _ = process.communicate(timeout=FLOOD_SECONDS_MAX + CLIENT_SECONDS_MAX * 2)
        assert process.returncode == 0, f"the flood of {kind} failed with {process.returncode}"
        self.counts.update(msgspec.json.decode(output, type=dict[str, int]))

    def finish(self) -> None:
        """Wait for the last floods."""
        for kind in list(self._running):
            self._end(kind)

    def kill(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self._running.clear()

    def told(self) -> dict[str, set[str]]:
        """Return ids by outcome, as their clients heard it."""
        found: dict[str, set[str]] = {"acked": set(), "refused": set()}
        for line in self._ledger.read_text().splitlines():
            what, id_ = line.split()
            found[what].add(id_)
        return found


def main(kind: str, seed: str, seconds: str, runtime: str, ledger: str) -> None:
    random.seed(seed)
    flood = Flood(Random(seed), float(seconds), Path(runtime), Ledger(ledger))
    FLOODS[kind](flood)
    print(json.dumps(flood.counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
