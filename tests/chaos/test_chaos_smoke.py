"""Thousands of tasks while workers, nurseries and the supervisor are killed: none may be lost.

Delivery is at least once, with exactly one final state. So each acknowledged task must end as its
kind says, once, for its submitter and in the store; and each execution beyond those that were
needed must be explained by a process that was killed.
"""

import asyncio
import shutil
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest

from musterd import AsyncClient
from musterd.ipc.messages import CANCELLED, EXPIRED, FAILED, SUCCEEDED, Outcome
from musterd.supervisor.core.leases import WINDOW_MAX

TASKS = 2000
POOLS = {"crowd": 3, "single": 1}
SITES = ("", "a.example", "b.example", "c.example", "d.example")
PRIORITIES = ("critical", "high", "normal", "low")
UNDER_WAY_MAX = 150  # of one client: submits go on while the fleet is being killed
BATCH_MAX = 40
CLIENT_SECONDS_MAX = 90.0

# What must never be in the daemon's log: mistakes of our own, or news that was thrown away.
FORBIDDEN = ("internal error", "Traceback", "is not stored", "was taken", "cannot be read",
             "dropped a message", "malformed", "resists", "quarantined", "given up", "no pool")

# A worker that is killed can repeat what it had leased: what ran, what had run and was not told
# yet. With the supervisor die, besides, the results it had been told and not committed yet; while
# one group is being written a worker gets through about as much again as it can hold.
REPEATS_PER_WORKER_MAX = WINDOW_MAX
REPEATS_PER_SUPERVISOR_MAX = sum(POOLS.values()) * 2 * WINDOW_MAX


class Job(msgspec.Struct):
    """A task to submit, and what must become of it."""

    name: str
    args: dict[str, Any]
    options: dict[str, Any]
    state: str
    attempts: int  # that it takes, whatever is killed
    id: str = ""

    @property
    def request(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        return self.name, self.args, self.options


def make_job(rng: Random, value: int) -> Job:
    kind = rng.choices(
        ("tiny", "nap", "anap", "flaky", "hopeless", "refused", "invalid", "expired", "cancelled"),
        (1000, 300, 300, 60, 20, 20, 20, 20, 20),
    )[0]
    pool = rng.choices(tuple(POOLS), (9, 1))[0]
    options = {"priority": rng.choice(PRIORITIES), "target": rng.choice(SITES)}
    args: dict[str, Any] = {"value": value}
    state, attempts = SUCCEEDED, 1
    if kind in ("nap", "anap"):
        args["seconds"] = rng.uniform(0.001, 0.02)
    elif kind == "flaky":
        args["fails"] = rng.randint(1, 3)
        attempts = args["fails"] + 1
    elif kind == "hopeless":
        options["max_retries"] = rng.randint(0, 2)
        state, attempts = FAILED, options["max_retries"] + 1
    elif kind == "refused":
        state = FAILED
    elif kind == "invalid":
        kind, args, state = "tiny", {"value": "not a number"}, FAILED
    elif kind == "expired":
        kind, options["delay"], options["expires"], state, attempts = "tiny", 60, 0.2, EXPIRED, 0
    elif kind == "cancelled":
        kind, options["delay"], state, attempts = "tiny", 600, CANCELLED, 0
    if kind == "tiny" and state == SUCCEEDED and rng.random() < 0.05:
        options["delay"] = rng.uniform(0.01, 1.0)
    return Job(f"{pool}.{kind}", args, options, state, attempts)


class Submitter:
    """One client's share of the tasks: submits in batches as room comes up, sees all of it end."""

    def __init__(self, socket: str, jobs: list[Job], rng: Random) -> None:
        self.socket = socket
        self.rng = rng
        self.ended: dict[str, Outcome] = {}
        self._left = list(reversed(jobs))
        self._room = threading.Event()  # for threads; an async client looks when it wakes up
        self.submitted: list[Job] = []

    def batch(self) -> list[Job]:
        room = UNDER_WAY_MAX - (len(self.submitted) - len(self.ended))
        size = min(self.rng.randint(1, BATCH_MAX), room, len(self._left))
        return [self._left.pop() for _ in range(size)]

    def note(self, jobs: list[Job], handles: list[Any]) -> list[Any]:
        """Which of these are to be cancelled."""
        for job, handle in zip(jobs, handles, strict=True):
            job.id = handle.id
            self.submitted.append(job)
        return [h for job, h in zip(jobs, handles, strict=True) if job.state == CANCELLED]

    def gather(self, handles: list[Any]) -> list[Any]:
        """Keep what has ended; the others."""
        for handle in handles:
            if handle.done():
                assert isinstance(handle.ending, Outcome), f"rejected: {handle.ending}"
                assert handle.id not in self.ended
                self.ended[handle.id] = handle.ending
        return [handle for handle in handles if not handle.done()]

    @property
    def finished(self) -> bool:
        return not self._left and len(self.ended) == len(self.submitted)

    def run(self, daemon: Any) -> None:
        client = daemon.client()
        open_handles: list[Any] = []
        deadline = time.monotonic() + CLIENT_SECONDS_MAX
        while not self.finished:
            jobs = self.batch()
            if jobs:
                handles = client.submit_many([job.request for job in jobs])
                for handle in self.note(jobs, handles):
                    handle.cancel()
                open_handles += handles
                if self.rng.random() < 0.2:
                    client.flush(CLIENT_SECONDS_MAX)
            assert time.monotonic() < deadline, self.overdue(open_handles)
            for handle in client.as_completed(open_handles, deadline - time.monotonic()):
                handle.ack(0)
                break  # one is enough to have room again
            open_handles = self.gather(open_handles)
        client.close(10)

    async def run_async(self) -> None:
        async with AsyncClient(self.socket, connect_timeout=30) as client:
            open_handles: list[Any] = []
            deadline = time.monotonic() + CLIENT_SECONDS_MAX
            while not self.finished:
                jobs = self.batch()
                if jobs:
                    handles = await client.submit_many([job.request for job in jobs])
                    for handle in self.note(jobs, handles):
                        await handle.cancel()
                    open_handles += handles
                assert time.monotonic() < deadline, self.overdue(open_handles)
                left = deadline - time.monotonic()
                async for handle in client.as_completed(open_handles, left):
                    await handle.ack(0)
                    break
                open_handles = self.gather(open_handles)

    def overdue(self, handles: list[Any]) -> str:
        return f"{len(handles)} tasks without an end, such as {handles[:5]}"
