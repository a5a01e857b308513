"""The tasks that the benchmark submits: `worker = "bench.workers"`."""

import os
import time
from typing import Any

from musterd import task


@task
def noop(ctx: Any, data: str) -> None:
    """Do nothing: only the cost of transport is left."""


@task
def nap(ctx: Any, seconds: float) -> None:
    time.sleep(seconds)


@task
def stamp(ctx: Any) -> int:
    """Return the start time; all processes of a machine share the monotonic clock."""
    return time.monotonic_ns()


@task
def hold(ctx: Any, path: str, seconds: float) -> None:
    """Stay the first time, for the worker to be killed; return the second time."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    time.sleep(seconds)
