"""Send a message there and back over ZeroMQ, with nothing behind it: the part of a round trip that
is left if client, supervisor and worker have nothing to do.

    python wire.py router TASKS WORKERS    the supervisor's part: from one ROUTER to the other
    python wire.py worker WORKERS          the worker's part: back
"""

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fleet import BenchError

from musterd.ipc.wire.router import Router
from musterd.ipc.wire.zmtp import Connection
from musterd.supervisor.sockets.listen import listen

SECONDS = 30.0  # later answers never come
LOOK_SECONDS = 0.01


def route(tasks: Path, workers: Path) -> None:
    outer, inner = (
        Router(listen(str(path), None), lambda *why: sys.exit(f"wire: {why}"))
        for path in (tasks, workers)
    )
    epoll = select.epoll()
    for each in (outer, inner):
        epoll.register(each.fileno(), select.EPOLLIN)
    worker = client = 0
    held: list[bytes] = []  # sent by the client before the worker was there
    while True:
        ready = [fd for fd, _ in epoll.poll(1)]
        if inner.fileno() in ready:
            for number, answered in inner.receive():
                worker = number
                while held:
                    inner.send(worker, held.pop(0))
                if answered:
                    outer.send(client, bytes(answered))
        if outer.fileno() in ready:
            for number, asked in outer.receive():
                client = number
                if asked and worker:
                    inner.send(worker, bytes(asked))
                elif asked:
                    held.append(bytes(asked))


class End:
    """One end of the wire, as clients and workers have it."""

    def __init__(self, path: Path) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self._connection = Connection(str(path))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_SECONDS)
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)
        while not self._connection.ready:
            self._wait()
            self._connection.receive()

    def _wait(self) -> None:
        if not self._poll.poll(SECONDS * 1000):
            raise BenchError("the other end of the wire is silent")

    def send(self, message: bytes) -> None:
        self._connection.put(message)
        self._connection.flush()

    def receive(self) -> bytes:
        while True:
            self._wait()
            for message in self._connection.receive():
                if message:
                    return bytes(message)

    def close(self) -> None:
        self._connection.close()


def answer(workers: Path) -> None:
    end = End(workers)
    end.send(b"")
    with contextlib.suppress(ConnectionError):
        while True:
            end.send(end.receive())


@contextlib.contextmanager
def wire(folder: Path) -> Iterator[End]:
    """Return the client's end of a router with one worker."""
    tasks, workers = folder / "wire-tasks", folder / "wire-workers"
    me = [sys.executable, str(Path(__file__).resolve())]
    with contextlib.ExitStack() as stack:
        for arguments in (["router", str(tasks), str(workers)], ["worker", str(workers)]):
            process = subprocess.Popen([*me, *arguments], stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        end = End(tasks)
        stack.callback(end.close)
        end.send(b"?")
        end.receive()  # the worker is there
        yield end


if __name__ == "__main__":
    role, *paths = sys.argv[1:]
    {"router": route, "worker": answer}[role](*map(Path, paths))
