"""The tasks of bench.workers for multiprocessing.Pool and ProcessPoolExecutor.

Both fork their workers, their fastest way; the benchmark has no thread and no connection when it
starts them. Run as a program, this module is an idle Pool whose memory is measured.
"""

import importlib
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import Pool

CONTEXT = multiprocessing.get_context("fork")


def noop(data: str) -> None:
    """Do what bench.workers.noop does."""


def nap(seconds: float) -> None:
    time.sleep(seconds)


def stamp() -> int:
    return time.monotonic_ns()


def hold(path: str, seconds: float) -> None:
    """Do what bench.workers.hold does."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    time.sleep(seconds)


def make_pool(workers: int) -> Pool:
    return CONTEXT.Pool(workers)


def make_executor(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=CONTEXT)


def worker_pids(pool: Pool | ProcessPoolExecutor) -> list[int]:
    """Return the workers' pids, which neither public interface has."""
    if isinstance(pool, ProcessPoolExecutor):
        return list(pool._processes)
    return [process.pid for process in pool._pool]  # type: ignore[attr-defined]


def _idle(workers: int, modules: list[str]) -> None:
    """Print the workers' pids, then wait until standard input closes."""
    for module in modules:
        importlib.import_module(module)
    with make_pool(workers) as pool:
        pool.map(noop, [""] * workers, chunksize=1)
        print(*worker_pids(pool), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _idle(int(sys.argv[1]), sys.argv[2:])
