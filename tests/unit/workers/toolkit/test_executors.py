"""executors: three pools, made when they are used, fresh in a fork, shut down in bounded time."""

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from musterd.workers.toolkit import ExecutorFull, executors
from support.waiting import wait_for

SECONDS = 30.0
POOLS = [(executors.io, "io", 3), (executors.calculation, "calculation", 20)]
POOLS += [(executors.api, "api", 10)]


@pytest.fixture(autouse=True)
def pools_end() -> Iterator[None]:
    yield
    assert executors.shutdown(SECONDS) == 0


@pytest.mark.parametrize(("pool", "name", "threads"), POOLS, ids=["io", "calculation", "api"])
def test_a_pool_has_its_number_of_threads_and_names_them(
    pool: executors.Pool, name: str, threads: int
) -> None:
    together = threading.Barrier(threads)

    def work() -> str:
        together.wait(SECONDS)  # passes only if all threads run at once
        return threading.current_thread().name

    jobs = [pool.submit(work) for _ in range(threads)]
    names = {job.result(SECONDS) for job in jobs}
    assert names == {f"{name}_{n}" for n in range(threads)}
    more = [pool.submit(threading.current_thread) for _ in range(3 * threads)]
    assert {job.result(SECONDS).name for job in more} <= names


def test_no_thread_is_made_before_the_first_use() -> None:
    before = threading.active_count()
    assert executors.io.jobs() == []
    assert threading.active_count() == before


def test_coroutines_use_them_through_the_loop() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(executors.api, lambda: threading.current_thread().name)

    assert asyncio.run(main()).startswith("api_")


def test_map_works_as_of_any_executor() -> None:
    assert list(executors.io.map(abs, [-1, -2, 3])) == [1, 2, 3]


def test_shutdown_cancels_what_waits_and_lets_what_runs_end() -> None:
    end = threading.Event()
    running = [executors.io.submit(end.wait, SECONDS) for _ in range(3)]
    queued = [executors.io.submit(end.wait, SECONDS) for _ in range(5)]
    assert executors.shutdown(0.01) == 3, "it does not wait until they have ended, which is now"
    assert all(job.cancelled() for job in queued)
    end.set()
    assert all(job.result(SECONDS) for job in running)
    assert executors.shutdown(SECONDS) == 0
    assert executors.io.submit(int).result(SECONDS) == 0, "the next submit makes new threads"


def test_too_many_jobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "JOBS_MAX", 4)
    end = threading.Event()
    jobs = [executors.io.submit(end.wait, SECONDS) for _ in range(4)]
    with pytest.raises(ExecutorFull, match=r"executors\.io has 4 jobs"):
        executors.io.submit(int)
    end.set()
    assert all(job.result(SECONDS) for job in jobs)
    wait_for("they have ended", lambda: not executors.io.jobs())
    executors.io.submit(int).result(SECONDS)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_does_not_use_its_parents_threads() -> None:
    end = threading.Event()
    jobs: list[Any] = [executors.io.submit(end.wait, SECONDS) for _ in range(5)]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert executors.io.jobs() == []
            os.write(writing, str(executors.io.submit(os.getpid).result(5)).encode())
            code = executors.shutdown(5)
        finally:
            os._exit(code)
    os.close(writing)
    try:
        told = os.read(reading, 100)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(reading)
        end.set()
    assert (told, status) == (str(child).encode(), 0)
    assert all(job.result(SECONDS) for job in jobs)
