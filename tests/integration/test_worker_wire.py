"""A worker's end of workers.sock: large results, and a supervisor that does not read or is gone."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from musterd.ipc.wire import codec
from musterd.ipc.wire.messages import PROTOCOL, Assign, Completion, Done, Lease, WorkerHello
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.ipc.wire.signals import INTERRUPT_SIGNAL
from musterd.ipc.wire.zmtp import HANDSHAKE
from musterd.workers.runtime import mailbox as mailboxes
from musterd.workers.runtime.mailbox import FULL_MS, Mailbox, connect
from support.waiting import wait_for

PATIENCE_SECONDS = 30.0
MIB = 1024 * 1024

WORKERS = """
    import asyncio, os, time
    from pathlib import Path
    from musterd import Worker, task

    class Sync(Worker):
        def close(self): Path(__file__).with_name("closed").touch()
        @task
        def big(self, ctx, letter: str, size: int): return letter * size
        @task
        def until(self, ctx, path: str):
            while not os.path.exists(path): time.sleep(0.005)
        @task
        def remember(self, ctx): ctx.state.load()

    class Async(Worker):
        async def open(self): pass
        async def close(self): Path(__file__).with_name("closed").touch()
        @task
        async def big(self, ctx, letter: str, size: int): return letter * size
        @task
        async def until(self, ctx, path: str):
            while not os.path.exists(path): await asyncio.sleep(0.005)
        @task
        async def remember(self, ctx): await ctx.state.aload()
"""
PROGRAM = """
import sys
from types import SimpleNamespace
from musterd.workers.runtime import run as runtime
worker, path, fd, width = sys.argv[1:]
sys.exit(runtime.run(runtime.load(worker), pool="p",
                     called=lambda: SimpleNamespace(index=0, token="t"), socket=path,
                     board_fd=int(fd), options=bytes([0x80]), health_seconds=0, beat_seconds=0.5,
                     concurrency=int(width)))
"""
KINDS = {"Sync": ("Sync", 1), "Async": ("Async", 1), "ConcurrentRunner": ("Async", 4)}


class Supervisor:
    """The supervisor's end, and one worker. It reads one message ahead and no more."""

    def __init__(self, directory: Path, kind: str) -> None:
        worker, width = KINDS[kind]
        self.go, self.closed = directory / "go", directory / "closed"
        (directory / "wired.py").write_text(textwrap.dedent(WORKERS))
        self.errors = directory / "stderr"
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.RCVHWM, 1)
        path = str(directory / "w.sock")
        self.router.bind(f"ipc://{path}")
        self.board = Scoreboard.create()
        self._leases = 0
        board = [str(self.board.fd)]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, f"wired:{worker}", path, *board, str(width)],
                pass_fds=[self.board.fd],
                env={**os.environ, "PYTHONPATH": str(directory)},
                stderr=errors,
            )
        self._identity = b""
        assert self.receive() == WorkerHello(PROTOCOL, "t", width)

    def receive(self) -> Any:
        assert self.router.poll(int(PATIENCE_SECONDS * 1000)), self.errors.read_text()
        self._identity, frame = self.router.recv_multipart()
        return codec.decode_worker(frame)

    def completions(self, count: int) -> list[Completion]:
        found: list[Completion] = []
        while len(found) < count:
            message = self.receive()
            assert isinstance(message, Done), message
            found += message.completions
        return found

    def lease(self, method: str, **arguments: Any) -> Lease:
        self._leases += 1
        data = msgspec.msgpack.encode(arguments)
        return Lease(self._leases, f"task-{self._leases}", method, data, 1, 0)

    def assign(self, *leases: Lease) -> None:
        self.router.send_multipart([self._identity, codec.encode(Assign(list(leases)))])

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def hang_up(self) -> None:
        self.router.close()
        self._context.term()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()
        self.board.close()


@pytest.fixture(params=list(KINDS))
def supervisor(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, request.param)
    yield supervisor
    supervisor.close()


def letters(supervisor: Supervisor, count: int, size: int) -> list[Lease]:
    return [supervisor.lease("big", letter=chr(97 + n % 26), size=size) for n in range(count)]


def check(completions: list[Completion], leases: list[Lease]) -> None:
    assert sorted(each.lease for each in completions) == [lease.lease for lease in leases]
    arguments = {lease.lease: msgspec.msgpack.decode(lease.args) for lease in leases}
    for each in completions:
        asked = arguments[each.lease]
        value = msgspec.msgpack.decode(each.value)
        assert len(value) == asked["size"]
        assert value == asked["letter"] * asked["size"]


def test_a_worker_has_neither_libzmq_nor_a_thread_beside_its_own(supervisor):
    process = psutil.Process(supervisor.process.pid)
    assert [m.path for m in process.memory_maps() if "zmq" in m.path] == []
    assert process.num_threads() == 1


def test_results_for_a_supervisor_that_does_not_read_arrive_whole(supervisor):
    leases = letters(supervisor, 10, 3 * MIB)
    supervisor.assign(*leases)
    time.sleep(0.5)  # most of it fits nowhere but in the worker
    check(supervisor.completions(len(leases)), leases)


def test_a_supervisor_that_does_not_read_does_not_stop_the_work(supervisor):
    leases = letters(supervisor, 8, 3 * MIB)
    last = supervisor.lease("until", path=str(supervisor.go))
    supervisor.assign(*leases, last)
    wait_for("the last one begins", lambda: _runs(supervisor, last))
    time.sleep(5 * FULL_MS / 1000)  # nothing waits for the supervisor any more
    # The worker runs on without looking at its socket. Finished results arrive anyway.
    check(supervisor.completions(len(leases)), leases)
    supervisor.go.touch()
    assert supervisor.completions(1)[0].lease == last.lease


def _runs(supervisor: Supervisor, lease: Lease) -> bool:
    now = supervisor.board.read()
    return lease.lease in (now.lease, *(number for number, _ in now.beside))


def test_an_idle_worker_that_cannot_send_gives_signs_of_life_and_rests(supervisor):
    leases = letters(supervisor, 4, 3 * MIB)
    supervisor.assign(*leases)
    time.sleep(1.0)
    process, before = psutil.Process(supervisor.process.pid), supervisor.board.read().since_ns
    used = sum(process.cpu_times()[:2])
    wait_for("it stamps its board", lambda: supervisor.board.read().since_ns > before)
    time.sleep(1.0)
    assert sum(process.cpu_times()[:2]) - used < 0.5
    check(supervisor.completions(len(leases)), leases)


def test_signals_in_the_middle_of_large_messages_do_not_tear_them(supervisor):
    chance = random.Random(11)
    for _ in range(10):
        leases = letters(supervisor, 8, chance.randrange(200_000, MIB))
        supervisor.assign(*leases)
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            os.kill(supervisor.process.pid, INTERRUPT_SIGNAL)
            time.sleep(chance.uniform(0, 0.001))
        check(supervisor.completions(len(leases)), leases)


def test_large_leases_come_whole(supervisor):
    size = 3 * MIB
    leases = [supervisor.lease("big", letter="x" * size, size=1) for _ in range(4)]
    supervisor.assign(*leases)
    values = [msgspec.msgpack.decode(each.value) for each in supervisor.completions(4)]
    assert values == ["x" * size] * 4


@pytest.mark.parametrize("does", ["nothing", "ask"])
def test_a_worker_whose_supervisor_is_gone_ends(supervisor, does):
    if does == "ask":
        supervisor.assign(supervisor.lease("remember"))
        supervisor.receive()  # the question
    supervisor.hang_up()
    assert supervisor.exit_code() == 1
    assert supervisor.errors.read_text() == ""
    assert not supervisor.closed.exists()  # as if it had been killed
    assert "connection to the supervisor is lost" in supervisor.board.read().last_words


def test_a_worker_whose_supervisor_goes_while_it_works_ends_after_it(supervisor):
    lease = supervisor.lease("until", path=str(supervisor.go))
    supervisor.assign(lease)
    wait_for("it begins", lambda: _runs(supervisor, lease))
    process = psutil.Process(supervisor.process.pid)
    used = sum(process.cpu_times()[:2])
    supervisor.hang_up()
    time.sleep(0.5)
    if process.status() != psutil.STATUS_ZOMBIE:
        assert sum(process.cpu_times()[:2]) - used < 0.3  # the worker does not spin
    supervisor.go.touch()
    assert supervisor.exit_code() == 1
    assert supervisor.errors.read_text() == ""
    assert not supervisor.closed.exists()


def test_a_worker_waits_until_it_is_let_in(tmp_path):
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        listener.listen(1)
        for _ in range(10):  # until the kernel takes no more
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(path)
        done = threading.Event()

        def let_in() -> None:
            time.sleep(0.1)
            listener.settimeout(0.1)
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    peer = stack.enter_context(listener.accept()[0])
                    with contextlib.suppress(BrokenPipeError):
                        peer.sendall(HANDSHAKE.replace(b"DEALER", b"ROUTER"))

        thread = threading.Thread(target=let_in)
        thread.start()
        board = Scoreboard.create()
        try:
            Mailbox(connect(path), board).close()
        finally:
            done.set()
            thread.join()
            board.close()


SPARE = PROGRAM.replace("called=lambda:", "called=lambda: sys.stdin.readline() and")


def test_a_spare_is_connected_before_it_is_called(tmp_path):
    (tmp_path / "wired.py").write_text(textwrap.dedent(WORKERS))
    board = Scoreboard.create()
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        listener.bind(path)
        listener.listen()
        with subprocess.Popen(
            [sys.executable, "-c", SPARE, "wired:Sync", path, str(board.fd), "1"],
            pass_fds=[board.fd],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdin=subprocess.PIPE,
        ) as spare:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(PATIENCE_SECONDS)
                peer.sendall(HANDSHAKE.replace(b"DEALER", b"ROUTER"))
                assert peer.recv(1000) == HANDSHAKE
                assert spare.stdin is not None
                spare.stdin.write(b"you are it\n")
                spare.stdin.flush()
                hello = codec.decode_worker(peer.recv(1000)[2:])
                assert hello == WorkerHello(PROTOCOL, "t", 1)
    board.close()


def test_where_there_is_no_supervisor_a_worker_says_so_and_ends(tmp_path):
    (tmp_path / "wired.py").write_text(textwrap.dedent(WORKERS))
    board = Scoreboard.create()
    path = str(tmp_path / "w.sock")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "wired:Sync", path, str(board.fd), "1"],
        pass_fds=[board.fd],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "FileNotFoundError" in board.read().last_words
    board.close()


@pytest.mark.parametrize("reads", [True, False])
def test_the_last_results_have_time_to_leave(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(mailboxes, "LINGER_MS", 1000)
    path, value = str(tmp_path / "w.sock"), b"x" * (4 * MIB)
    heard = bytearray()
    over, in_time = threading.Event(), []

    def listen() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(HANDSHAKE.replace(b"DEALER", b"ROUTER"))
            if not reads:
                in_time.append(over.wait(PATIENCE_SECONDS))
                return
            time.sleep(3 * FULL_MS / 1000)
            while chunk := peer.recv(MIB):
                heard.extend(chunk)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=listen)
        thread.start()
        board = Scoreboard.create()
        mailbox = Mailbox(connect(path), board)
        mailbox.complete(Completion(1, 0, value), 0)
        mailbox.flush()
        mailbox.close()
        over.set()
        thread.join()
        assert in_time != [False], "it waited until the supervisor was gone"
        board.close()
    if reads:
        message = codec.decode_worker(bytes(heard[len(HANDSHAKE) + 9 :]))
        assert isinstance(message, Done)
        assert message.completions[0].value == value
