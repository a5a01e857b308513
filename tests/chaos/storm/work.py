"""Tasks with a known outcome, the clients that submit them, and the check.

Delivery is at least once, with exactly one final state. So each acknowledged task must end as its
kind says, once, for its submitter and in the store; a refused task must not be in the store.
"""

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from musterd import AsyncClient, Client, QueueFull
from musterd.ipc.wire.messages import (
    CANCELLED,
    EXPIRED,
    FAILED,
    QUEUE_FULL,
    SUCCEEDED,
    Outcome,
    Rejection,
)
from musterd.supervisor.store.queries import contents

SITES = ("", "a.example", "b.example", "c.example", "d.example")
PRIORITIES = ("critical", "high", "normal", "low")
UNDER_WAY_MAX = 150  # per client: submits go on while the fleet is being killed
BATCH_MAX = 40
CONNECT_SECONDS = 30.0
LOOK_SECONDS = 0.05  # how long a client waits for one task before it looks at all of them
NOT_A_NUMBER = "not a number"
LONG_SECONDS = 10_000_000  # a delay that ends in no test, whatever the clock says
SHOUT_KILOBYTES_MAX = 200
BULK_KILOBYTES_MAX = 100

ORDINARY = {
    "tiny": 1000,
    "nap": 300,
    "anap": 300,
    "flaky": 60,
    **dict.fromkeys(("hopeless", "refused", "invalid", "expired", "cancelled"), 20),
}
# These include tasks that write too much, return too much, and leave things behind.
ROUGH = {**ORDINARY, "shout": 10, "bulky": 40, "litter": 20}


class Job(msgspec.Struct):
    """A task to submit, and its expected outcome."""

    name: str
    args: dict[str, Any]
    options: dict[str, Any]
    state: str
    attempts: int  # that the task takes, whatever is killed
    id: str = ""

    @property
    def request(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        return self.name, self.args, self.options

    def is_answered_by(self, outcome: Outcome) -> bool:
        if (outcome.state, outcome.attempts) != (self.state, self.attempts):
            return False
        if self.state != SUCCEEDED:
            return True
        value = msgspec.msgpack.decode(outcome.value)
        return bool((value[0] if isinstance(value, list) else value) == self.args["value"])


def make_job(
    rng: Random, value: int, pools: Mapping[str, int], kinds: Mapping[str, int] = ORDINARY
) -> Job:
    """Make a job of a random kind for one of the pools; both have weights."""
    kind = rng.choices(tuple(kinds), tuple(kinds.values()))[0]
    pool = rng.choices(tuple(pools), tuple(pools.values()))[0]
    options: dict[str, Any] = {"priority": rng.choice(PRIORITIES), "target": rng.choice(SITES)}
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
        kind, args, state = "tiny", {"value": NOT_A_NUMBER}, FAILED
    elif kind == "expired":
        kind, options["delay"], options["expires"] = "tiny", LONG_SECONDS, 0.2
        state, attempts = EXPIRED, 0
    elif kind == "cancelled":
        kind, options["delay"], state, attempts = "tiny", LONG_SECONDS, CANCELLED, 0
    elif kind == "shout":
        args["kilobytes"] = rng.randint(1, SHOUT_KILOBYTES_MAX)
    elif kind == "bulky":
        args["kilobytes"] = rng.randint(1, BULK_KILOBYTES_MAX)
    if kind == "tiny" and state == SUCCEEDED and rng.random() < 0.05:
        options["delay"] = rng.uniform(0.01, 1.0)
    return Job(f"{pool}.{kind}", args, options, state, attempts)


class Submitter:
    """One client's share of the tasks: submits batches as room comes up, sees all of them end."""

    def __init__(
        self, socket: str, jobs: Iterable[Job], rng: Random, *, seconds_max: float
    ) -> None:
        self.socket = socket
        self.submitted: list[Job] = []
        self.ended: dict[str, Outcome] = {}
        self.refused: list[str] = []  # refused ids; each job was submitted again as another task
        self._jobs: Iterator[Job] = iter(jobs)
        self._again: list[Job] = []
        self._exhausted = False
        self._open: dict[str, tuple[Any, Job]] = {}  # handles
        self._rng = rng
        self._seconds_max = seconds_max
        self._deadline = time.monotonic() + seconds_max

    def give_up(self) -> None:
        """Do not wait for the rest: the test has failed already."""
        self._deadline = 0.0

    def run(self) -> None:
        """Submit the tasks and wait for them, in a thread."""
        with Client(self.socket, connect_timeout=CONNECT_SECONDS) as client:
            while not self._finished():
                jobs = self._batch()
                for handle in self._note(jobs, client.submit_many([job.request for job in jobs])):
                    handle.cancel()
                if self._rng.random() < 0.1:
                    with suppress(QueueFull):
                        client.flush(self._seconds_max)
                handle = self._any()
                if handle is not None:
                    if self._rng.random() < 0.1 and handle._acknowledged:
                        assert handle.status(self._seconds_max).id == handle.id
                    with suppress(TimeoutError, QueueFull):  # another task may end earlier
                        handle.outcome(LOOK_SECONDS)
                for refused in self._gather():
                    with suppress(QueueFull):
                        refused.outcome(0)

    async def run_async(self) -> None:
        """Submit the tasks and wait for them with `await`."""
        async with AsyncClient(self.socket, connect_timeout=CONNECT_SECONDS) as client:
            while not self._finished():
                jobs = self._batch()
                handles = await client.submit_many([job.request for job in jobs])
                for handle in self._note(jobs, handles):
                    await handle.cancel()
                if self._rng.random() < 0.1:
                    with suppress(QueueFull):
                        await client.flush(self._seconds_max)
                handle = self._any()
                if handle is not None:
                    if self._rng.random() < 0.1 and handle._acknowledged:
                        assert (await handle.status(self._seconds_max)).id == handle.id
                    with suppress(TimeoutError, QueueFull):
                        await handle.outcome(LOOK_SECONDS)
                for refused in self._gather():
                    with suppress(QueueFull):
                        await refused.outcome(0)

    def _batch(self) -> list[Job]:
        room = UNDER_WAY_MAX - len(self._open)
        size = min(self._rng.randint(1, BATCH_MAX), room)
        batch, self._again = self._again[:size], self._again[size:]
        if not self._exhausted and len(batch) < size:
            fresh = list(islice(self._jobs, size - len(batch)))
            self._exhausted = len(fresh) < size - len(batch)
            batch += fresh
        return batch

    def _note(self, jobs: list[Job], handles: list[Any]) -> list[Any]:
        """Keep the handles; return those to be cancelled."""
        for job, handle in zip(jobs, handles, strict=True):
            job.id = handle.id
            self._open[handle.id] = (handle, job)
        return [h for job, h in zip(jobs, handles, strict=True) if job.state == CANCELLED]

    def _any(self) -> Any:
        return self._rng.choice(list(self._open.values()))[0] if self._open else None

    def _gather(self) -> list[Any]:
        """Note the tasks that have ended; return the handles of refused ones."""
        done = [(handle, job) for handle, job in self._open.values() if handle.done()]
        refused = []
        for handle, job in done:
            del self._open[handle.id]
            if isinstance(handle._ending, Outcome):
                self.submitted.append(job)
                self.ended[handle.id] = handle._ending
                continue
            assert isinstance(handle._ending, Rejection), handle
            assert handle._ending.code == QUEUE_FULL, f"{handle} has {handle._ending}"
            assert not handle._acknowledged, f"{handle} was accepted, and then refused"
            refused.append(handle)
            self.refused.append(handle.id)
            self._again.append(msgspec.structs.replace(job, id=""))
        return refused

    def _finished(self) -> bool:
        assert time.monotonic() < self._deadline, (
            f"{len(self._open)} tasks without an end, such as {list(self._open.values())[:5]}"
        )
        return self._exhausted and not self._again and not self._open


def submit_all(submitters: list[Submitter], pool: ThreadPoolExecutor) -> list[Future[None]]:
    """Start the clients: the first is asynchronous, the others run in threads."""
    first, *others = submitters
    return [
        pool.submit(lambda: asyncio.run(first.run_async())),
        *[pool.submit(submitter.run) for submitter in others],
    ]


def check_outcomes(submitters: list[Submitter]) -> dict[str, Job]:
    """Check that each client saw each of its tasks end as expected; return all jobs by id."""
    jobs: dict[str, Job] = {}
    for submitter in submitters:
        for job in submitter.submitted:
            assert job.id not in jobs
            jobs[job.id] = job
            assert job.is_answered_by(submitter.ended[job.id]), (job, submitter.ended[job.id])
    return jobs


def final_states(path: Path) -> dict[str, str]:
    """Return each task's final state in the store: no task is under way, none ended twice."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        live, ended = contents(store)
    assert live == []
    rows = [(each.spec.id, each.state) for each in ended]
    twice = {id_: times for id_, times in Counter(id_ for id_, _ in rows).items() if times > 1}
    assert not twice, f"ended more than once: {twice}"
    return dict(rows)
