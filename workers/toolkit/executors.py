"""Named thread pools for a worker's own code: `io` (3 threads), `calculation` (20), `api` (10).

    future = executors.io.submit(path.read_text)
    text = await loop.run_in_executor(executors.io, path.read_text)

[executors] of the configuration may set other sizes. A pool makes its threads at its first use. A
fork has none of its parent's threads, so its pools begin anew. The worker shuts them down when it
ends: waiting jobs are cancelled, running jobs have SHUTDOWN_SECONDS to end.
"""

import concurrent.futures
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from musterd.ipc.errors import MusterdError
from musterd.workers.authoring.settings import settings

P = ParamSpec("P")
T = TypeVar("T")

IO_THREADS = 3  # more threads make no disk faster
CALCULATION_THREADS = 20
API_THREADS = 10
JOBS_MAX = 10_000  # running or waiting in a pool: more is a producer that does not wait
SHUTDOWN_SECONDS = 5.0


class ExecutorFull(MusterdError):
    """Too many jobs wait in the pool."""


class Pool(Executor):
    """ThreadPoolExecutor that is made on first use."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._usual = threads
        self._begin()

    @property
    def threads(self) -> int:
        """Most threads of the pool: as configured, else the default."""
        return settings().threads.get(self.name, self._usual)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a job; ExecutorFull if JOBS_MAX wait already.

        The job runs in a copy of the caller's context: what it logs names the caller's task.
        """
        with self._lock:
            if len(self._jobs) >= JOBS_MAX:
                raise ExecutorFull(
                    f"executors.{self.name} has {JOBS_MAX} jobs; wait for some of them first"
                )
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=self.name)
            inside = partial(copy_context().run, fn, *args, **kwargs)
            future = self._pool.submit(inside)
            self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down like any executor; the next submit makes new threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def jobs(self) -> list[Future[Any]]:
        """Return the jobs that run or wait."""
        return list(self._jobs)


io = Pool("io", IO_THREADS)
calculation = Pool("calculation", CALCULATION_THREADS)
api = Pool("api", API_THREADS)

_POOLS = (io, calculation, api)


def shutdown(timeout: float = SHUTDOWN_SECONDS) -> int:
    """Cancel waiting jobs, let running ones end; return how many still run after the timeout.

    The worker's runtime calls it after Worker.close().
    """
    end = monotonic() + timeout
    for pool in _POOLS:
        pool.shutdown(wait=False, cancel_futures=True)
    running = [job for pool in _POOLS for job in pool.jobs()]
    return len(concurrent.futures.wait(running, max(0.0, end - monotonic())).not_done)


def _begin_anew() -> None:
    for pool in _POOLS:
        pool._begin()


os.register_at_fork(after_in_child=_begin_anew)
