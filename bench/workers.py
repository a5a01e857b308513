"""The tasks that the benchmark submits: `worker = "bench.workers"`."""

import os
import random
import time
from typing import Any

from musterd import Permanent, task

FAIL_SHARE = 0.1  # of `page`


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


@task
def wall_stamp(ctx: Any) -> int:
    """Return the start time by the wall clock, which schedules follow."""
    return time.time_ns()


PICTURE = b"\x89PNG" + b"x" * 8000 + b"IEND\xaeB`\x82"  # as far as anybody looks


@task
def page(ctx: Any, size: int) -> str:
    """Return another result each time, with a picture; fail now and then, and leave evidence."""
    if random.random() < FAIL_SHARE:
        ctx.artefact("page.html", "x" * size)
        raise Permanent("the page has changed its layout")
    ctx.attach(PICTURE)
    return f"{random.random()}" + "x" * size
