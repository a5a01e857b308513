"""The supervisor's end of workers.sock, and one real worker: for tests of the runtime alone."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from musterd.ipc.wire import codec
from musterd.ipc.wire.messages import (
    PROTOCOL,
    Assign,
    Completion,
    Done,
    Failure,
    Lease,
    WorkerHello,
)
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.ipc.wire.signals import INTERRUPT_SIGNAL
from support.waiting import wait_for

PATIENCE_SECONDS = 20.0

PROGRAM = """
import sys
from types import SimpleNamespace
from musterd.workers.runtime import run as runtime
worker, path, fd, options, health, idle, width = sys.argv[1:]
sys.exit(runtime.run(runtime.load(worker), pool="parser", socket=path,
                     called=lambda: SimpleNamespace(index=3, token="secret"),
                     board_fd=int(fd), options=bytes.fromhex(options),
                     health_seconds=float(health), beat_seconds=float(idle),
                     concurrency=int(width)))
"""


class Fleet:
    """The supervisor's end of workers.sock, and one worker."""

    def __init__(self, directory: Path, modules: dict[str, str]) -> None:
        self.directory = directory
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.path = str(directory / "w.sock")
        self.router.bind(f"ipc://{self.path}")
        self.board = Scoreboard.create()
        self.errors = directory / "stderr"
        self.process: subprocess.Popen[bytes] | None = None
        self.identity = b""
        self.leases = 0
        for name, text in modules.items():
            (directory / f"{name}.py").write_text(textwrap.dedent(text))

    def launch(
        self,
        worker: str,
        *,
        health: float = 60.0,
        idle: float = 1.0,
        width: int = 1,
        **options: object,
    ) -> None:
        arguments = [worker, self.path, str(self.board.fd)]
        encoded = msgspec.msgpack.encode({"greeting": "hello", **options}).hex()
        numbers = (health, idle, width)
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments, encoded, *map(str, numbers)],
                pass_fds=[self.board.fd],
                env={**os.environ, "PYTHONPATH": str(self.directory)},
                stderr=errors,
            )

    def start(self, worker: str = "sample_workers:Sync", **options: Any) -> "Fleet":
        self.launch(worker, **options)
        assert self.receive() == WorkerHello(PROTOCOL, "secret", options.get("width", 1))
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def receive(self) -> Any:
        assert self.router.poll(int(PATIENCE_SECONDS * 1000)), self.errors.read_text()
        self.identity, frame = self.router.recv_multipart()
        return codec.decode_worker(frame)

    def send(self, message: object) -> None:
        self.router.send_multipart([self.identity, codec.encode(message)])

    def command(self, message: object) -> None:
        """Send a message that cannot wait."""
        self.send(message)
        os.kill(self.pid, INTERRUPT_SIGNAL)

    def lease(self, method: str, arguments: dict[str, Any] | None = None, **more: Any) -> Lease:
        self.leases += 1
        number, data = self.leases, msgspec.msgpack.encode(arguments or {})
        options = {"attempt": 1, "timeout_ns": 0, "args": data, **more}
        return Lease(lease=number, id=f"task-{number}", method=method, **options)

    def assign(self, *leases: Lease) -> None:
        self.send(Assign(list(leases)))

    def completions(self, count: int) -> list[Completion]:
        found: list[Completion] = []
        while len(found) < count:
            message = self.receive()
            assert isinstance(message, Done), message
            found += message.completions
        assert len(found) == count
        return found

    def run(self, method: str, arguments: dict[str, Any] | None = None, **more: Any) -> Completion:
        lease = self.lease(method, arguments, **more)
        self.assign(lease)
        completion = self.completions(1)[0]
        assert completion.lease == lease.lease
        return completion

    def value(self, method: str, arguments: dict[str, Any] | None = None, **more: Any) -> Any:
        completion = self.run(method, arguments, **more)
        assert completion.failure is None, completion.failure
        return msgspec.msgpack.decode(completion.value)

    def failure(self, method: str, arguments: dict[str, Any] | None = None, **more: Any) -> Failure:
        completion = self.run(method, arguments, **more)
        assert completion.failure is not None
        return completion.failure

    def begun(self, lease: Lease) -> None:
        wait_for(f"{lease} begins", lambda: self.board.read().lease == lease.lease)

    def title(self) -> str:
        return psutil.Process(self.pid).cmdline()[0]

    def exit_code(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.router.close()
        self.context.term()
        self.board.close()
