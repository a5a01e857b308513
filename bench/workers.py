"""The tasks that the benchmark submits: `worker = "bench.workers"`."""

import os
import time
from typing import Any

from musterd import task


@task
def noop(ctx: Any, data: str) -> None:
    """Nothing: what is left is the cost of the way."""


@task
def nap(ctx: Any, seconds: float) -> None:
    time.sleep(seconds)


@task
def stamp(ctx: Any) -> int:
    """When it began; the monotonic clock is the same in all processes of a machine."""
    return time.monotonic_ns()


@task
def hold(ctx: Any, path: str, seconds: float) -> None:
    """Stays the first time, so that its worker can be killed under it, and returns the second."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    time.sleep(seconds)
