"""Thousands of restarts: the supervisor and its fork server hold no more afterwards than before.

`make bench-fleet` measures the same at length; this test checks the limits.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
from storm.monkey import opened, send

from support.daemon import Muster, Musters
from support.waiting import Waiting

WORKERS = 8
TENTHS = 10
STEP_SECONDS_MAX = 60.0  # from one restart to the next; hundredths are usual
READY = frozenset(("RUNNING", "BUSY"))
# Rings of output and events, windows of crashes and the allocator fill up at first, so the second
# half counts. A leak of some hundred bytes per restart stands out in the second half of 10,000.
GROWTH_BYTES_MAX = 2 * 1024 * 1024


class Holdings(NamedTuple):
    """What the supervisor and its fork server hold."""

    descriptors: int
    threads: int
    mappings: int
    anonymous_bytes: int  # not part of any file, so no other process affects it
    pss_bytes: int  # shown only: it depends on who else maps the same libraries


def lasting(supervisor: psutil.Process) -> list[psutil.Process]:
    found = [supervisor]
    for each in supervisor.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # the init of a worker that was killed
            if "fork server" in " ".join(each.cmdline()):
                found.append(each)
    return found


def spares(supervisor: psutil.Process) -> list[psutil.Process]:
    """Return the spare workers that are up: each has its init already."""
    found = []
    for each in supervisor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(each.cmdline()).startswith("musterd: spare "):
                found.append(each)
    return found


def holdings(supervisor: psutil.Process) -> Holdings:
    processes = lasting(supervisor)
    return Holdings(
        sum(each.num_fds() for each in processes),
        sum(each.num_threads() for each in processes),
        sum(len(each.memory_maps(grouped=False)) for each in processes),
        sum(rolled_up(each.pid, "Anonymous") for each in processes),
        sum(rolled_up(each.pid, "Pss") for each in processes),
    )


def rolled_up(pid: int, field: str) -> int:
    """Return one line of smaps_rollup, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found) * 1024


def strike(pid: int, supervisor: int, rng: Random) -> None:
    """Kill this worker or its init."""
    with contextlib.suppress(psutil.NoSuchProcess):
        init = rng.random() < 0.2
        victim = psutil.Process(pid).ppid() if init else pid
        pidfd = opened(victim, "musterd: init " if init else "musterd: worker ", supervisor)
        if pidfd is not None:
            send(pidfd, signal.SIGKILL)
            os.close(pidfd)


def kill_until(daemon: Muster, restarts: int, rng: Random, waiting: Waiting) -> None:
    """Kill workers and their inits as soon as they are up, until there were that many restarts."""
    killed: set[int] = set()

    def step() -> str:
        pool = daemon.pool("jobs")
        up = [worker.pid for worker in pool.workers if worker.state in READY]
        fresh = [pid for pid in up if pid not in killed]
        if pool.restarts >= restarts:
            return "over" if len(fresh) == WORKERS else ""
        for pid in fresh:
            strike(pid, daemon.pid, rng)
        killed.update(fresh)
        return "on" if fresh else ""

    while waiting("workers are back", step, STEP_SECONDS_MAX) != "over":
        pass


def test_descriptors_and_memory_stay_flat_over_restarts(
    muster: Musters,
    waiting: Waiting,
    chaos_seed: int,
    restarts: int,
    tell: Callable[[str, object], None],
) -> None:
    pauses = dict.fromkeys(("base", "max", "pause", "reset"), "1ms")
    restart = {**pauses, "window": "1s", "limit": 10_000}
    pool = {
        "worker": "chaos_jobs:Jobs",
        "secrets": ["CHAOS_GENERATION", "CHAOS_DIARY"],
        "size": WORKERS,
        "start_timeout": "10s",
        "restart": restart,
    }
    daemon = muster({"jobs": pool}, start=False)
    shutil.copy(Path(__file__).with_name("chaos_jobs.py"), daemon.folder)
    diary = {"CHAOS_GENERATION": "1", "CHAOS_DIARY": os.devnull}
    daemon.popen_options = {"env": {**os.environ, **diary}}
    daemon.start()
    rng = Random(chaos_seed)
    supervisor = psutil.Process(daemon.pid)
    waiting("all workers are up", lambda: daemon.pool("jobs").running == WORKERS, STEP_SECONDS_MAX)
    waiting("the pool has its spare", lambda: spares(supervisor), STEP_SECONDS_MAX)
    processes = len(supervisor.children(recursive=True))
    held = []
    for tenth in range(1, TENTHS + 1):
        kill_until(daemon, restarts * tenth // TENTHS, rng, waiting)
        waiting(
            "the dead are gone",
            lambda: len(supervisor.children(recursive=True)) == processes,
            STEP_SECONDS_MAX,
        )
        held.append(holdings(supervisor))
    first, last = held[TENTHS // 2 - 1], held[-1]
    tell("restarts", daemon.pool("jobs").restarts)
    for name in Holdings._fields:
        tell(f"{name} at each tenth", " ".join(str(getattr(each, name)) for each in held))
    assert last.descriptors <= first.descriptors + WORKERS  # some are under way at any moment
    assert last.threads <= first.threads
    assert last.mappings <= first.mappings + WORKERS
    assert last.anonymous_bytes - first.anonymous_bytes < GROWTH_BYTES_MAX
    with daemon.client() as client:
        assert client.submit("jobs.tiny", {"value": 7}).result(60) == 7
