"""A worker under test waits for what its clock does not know: sockets, threads, and itself."""

import asyncio
import pdb
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from musterd import Context, TaskFailed, Worker, task
from musterd.testing import OpenWorker
from musterd.workers.toolkit import executors


class Blocker(Worker):
    @task(timeout=0.3, max_retries=0)
    def block(self, ctx: Context) -> None:
        self.lock().acquire()

    @task(timeout=0.3, max_retries=0)
    def debug(self, ctx: Context) -> str:
        breakpoint()
        return "debugged"

    @task(timeout=0.3, max_retries=0)
    def spin(self, ctx: Context) -> None:
        while True:
            pass

    def lock(self) -> threading.Lock:
        lock = threading.Lock()
        lock.acquire()
        return lock

    @task(timeout=60, max_retries=0)
    def wait_for_thread(self, ctx: Context) -> str:
        return executors.io.submit(self.work).result()

    @task(timeout=60, max_retries=0)
    async def await_thread(self, ctx: Context) -> str:
        return await asyncio.to_thread(self.work)

    @task(timeout=60, max_retries=0)
    async def await_job(self, ctx: Context) -> str:
        return await asyncio.wrap_future(executors.api.submit(self.work))

    @task(timeout=60, max_retries=0)
    async def await_own_thread(self, ctx: Context) -> str:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def work() -> None:
            loop.call_soon_threadsafe(future.set_result, self.work())

        threading.Thread(target=work).start()
        return str(await future)

    def work(self) -> str:
        self.until(lambda: False, 0.05)
        return "worked"

    @staticmethod
    def until(done: Any, seconds: float) -> None:
        """Wait in real time, as in threads it is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not done():
            time.sleep(0.001)

    @task(timeout=60, max_retries=0)
    async def ask(self, ctx: Context, port: int, pause: float = 0.0) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.sleep(pause)
            writer.write(b"hello\n")
            async with asyncio.timeout(3000):
                return (await reader.readline()).decode().strip()
        finally:
            writer.close()

    @task(timeout=60, max_retries=0)
    def never(self, ctx: Context) -> None:
        async def wait() -> None:
            await asyncio.get_running_loop().create_future()

        asyncio.run(wait())


@pytest.mark.parametrize("name", ["block", "spin"])
def test_a_handler_that_blocks_hears_of_its_timeout(name: str, musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Blocker)
    with pytest.raises(TaskFailed, match=r"timeout of 0\.3 s"):
        worker.run(name)
    assert worker.elapsed == pytest.approx(0.3, abs=30)


def test_no_time_passes_in_a_debugger(
    musterd_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_line(_: object, prompt: str) -> str:
        time.sleep_in_reality(0.7)  # type: ignore[attr-defined]  # somebody thinks
        return "continue"

    monkeypatch.setattr(time, "sleep_in_reality", time.sleep, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt="": read_line(None, prompt))
    monkeypatch.setattr(
        "sys.breakpointhook", lambda: pdb.Pdb(nosigint=True).set_trace(sys._getframe(1))
    )
    worker = musterd_worker(Blocker)
    assert worker.run("debug") == "debugged"
    assert worker.elapsed < 0.3


def test_patience_ends_what_blocks_soon(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Blocker, patience=0.1)
    with pytest.raises(TaskFailed, match="timeout of 3600 s"):
        worker.submit("block", timeout=3600).result()
    assert worker.elapsed >= 3600


@pytest.mark.parametrize(
    "name", ["wait_for_thread", "await_thread", "await_job", "await_own_thread"]
)
def test_the_clock_does_not_run_ahead_of_threads(name: str, musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Blocker)
    assert worker.run(name) == "worked"
    assert worker.elapsed < 60


@pytest.fixture
def echo() -> Iterator[int]:
    """A site that answers a line with the same line, if it is not `quiet`."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(4) as threads:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threads.submit(answer, connection)

        def answer(connection: socket.socket) -> None:
            with connection, connection.makefile("rwb") as file:
                for line in file:
                    file.write(line)
                    file.flush()

        threads.submit(serve)
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_the_clock_does_not_run_ahead_of_sockets(musterd_worker: OpenWorker, echo: int) -> None:
    worker = musterd_worker(Blocker)
    assert worker.run("ask", port=echo) == "hello"
    assert worker.elapsed < 60
    asking = worker.submit("ask", {"port": echo, "pause": 3600.0}, timeout=7200)
    assert asking.result() == "hello", "a pause is cut short even then"
    assert worker.elapsed >= 3600


def test_patience_ends_what_a_silent_site_delays(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Blocker, patience=0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(TaskFailed, match="TimeoutError"),
    ):
        worker.submit("ask", {"port": server.getsockname()[1]}, timeout=7200).result()
    assert worker.elapsed == pytest.approx(3000, abs=60)


def test_a_loop_in_a_handler_that_waits_for_nothing_hears_of_the_timeout(
    musterd_worker: OpenWorker,
) -> None:
    with pytest.raises(TaskFailed, match="timeout of 60 s"):
        musterd_worker(Blocker).run("never")
