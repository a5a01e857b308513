"""What a worker under test waits for beside its clock: jobs of executors, and its threads.

As long as one of them is at work, the clock of the worker must not run ahead: what it waits for
takes real time. Sockets are known to the event loop (loop.py); handlers that block are watched by
world.py.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet


class Outside:
    """Jobs and threads that the code of one worker has begun."""

    def __init__(self) -> None:
        self._new: list[Future[Any]] = []
        self._jobs: set[Future[Any]] = set()
        self._threads: WeakSet[threading.Thread] = WeakSet()

    def busy(self) -> bool:
        """Tell whether something may still come of a job or a thread."""
        # A job is over when all have heard who wait for it: so this one has to hear last. One that
        # has ended before it is looked at may be about to tell them.
        new, self._new = self._new, []
        for job in new:
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
        return bool(new or self._jobs) or any(thread.is_alive() for thread in list(self._threads))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the jobs and threads that this thread begins in the block."""
        maker = threading.get_ident()
        submit, start = ThreadPoolExecutor.submit, threading.Thread.start
        submitting = False

        def noted_submit(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
            nonlocal submitting
            if threading.get_ident() != maker:
                return submit(self_, *args, **kwargs)
            submitting = True  # the threads of an executor wait for jobs most of their time
            try:
                job = submit(self_, *args, **kwargs)
            finally:
                submitting = False
            self._new.append(job)
            return job

        def noted_start(self_: threading.Thread) -> None:
            start(self_)
            if threading.get_ident() == maker and not submitting:
                self._threads.add(self_)

        ThreadPoolExecutor.submit = noted_submit  # type: ignore[method-assign]
        threading.Thread.start = noted_start  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
            threading.Thread.start = start  # type: ignore[method-assign]
