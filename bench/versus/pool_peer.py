"""multiprocessing.Pool, or ProcessPoolExecutor with BENCH_POOL; both fork their workers.

Neither keeps anything on disk, and neither has priorities.
"""

import multiprocessing
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import peer
import tasks

CONTEXT = multiprocessing.get_context("fork")
FUNCTIONS = {each.__name__: each for each in tasks.ALL}


class PoolPeer(peer.Peer):
    version = f"Python {platform.python_version()}"
    in_process = True
    queues_alone = False
    priorities = False

    def __init__(self) -> None:
        super().__init__()
        self._pool: Any = None

    def start(self, workers: int) -> None:
        self._pool = CONTEXT.Pool(workers)

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return self._pool.apply_async(FUNCTIONS[name], arguments)

    def result(self, handle: Any, seconds: float) -> Any:
        try:
            return handle.get(seconds)
        except multiprocessing.TimeoutError as error:
            raise TimeoutError from error

    def run_all(self, count: int) -> int:
        each = [tasks.ARGUMENT] * count
        results = self._pool.imap_unordered(tasks.echo, each, chunksize=1)
        return sum(result == tasks.ARGUMENT for result in results)

    def mains(self) -> list[int]:
        return [os.getpid()]

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None


class ExecutorPeer(PoolPeer):
    def start(self, workers: int) -> None:
        self._workers = workers
        self._pool = ProcessPoolExecutor(workers, mp_context=CONTEXT)

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return self._pool.submit(FUNCTIONS[name], *arguments)

    def result(self, handle: Any, seconds: float) -> Any:
        return handle.result(seconds)

    def run_all(self, count: int) -> int:
        return peer.Peer.run_all(self, count)

    def renew(self) -> None:
        self._pool.shutdown(wait=False)
        self.start(self._workers)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


if __name__ == "__main__":
    peer.serve(ExecutorPeer() if os.environ.get("BENCH_POOL") == "executor" else PoolPeer())
