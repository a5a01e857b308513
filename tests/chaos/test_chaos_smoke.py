"""Thousands of tasks while workers, nurseries and the supervisor are killed: none may be lost.

Delivery is at least once, with exactly one final state. So each acknowledged task must end as its
kind says, once, for its submitter and in the store; and each execution beyond those that were
needed must be explained by a process that was killed.
"""

import asyncio
import shutil
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest

from musterd import AsyncClient, Client
from musterd.ipc.messages import CANCELLED, EXPIRED, FAILED, SUCCEEDED, Outcome
from musterd.supervisor.core.leases import WINDOW_MAX
from musterd.supervisor.paths import store_file
from musterd.supervisor.status import FleetStatus

TASKS = 2000
POOLS = {"crowd": 3, "single": 1}
SITES = ("", "a.example", "b.example", "c.example", "d.example")
PRIORITIES = ("critical", "high", "normal", "low")
UNDER_WAY_MAX = 150  # of one client: submits go on while the fleet is being killed
BATCH_MAX = 40
CLIENTS = 3
CONNECT_SECONDS = 30.0
CLIENT_SECONDS_MAX = 90.0  # from the first submit to the last result; about 15 are needed
PAUSE_SECONDS_MAX = 20.0  # takes less than three; what was lost is asked for again after 30
RECOVERY_SECONDS_MAX = 10.0  # takes less than one; a start that was lost is noticed after 30
LOOK_SECONDS = 0.05  # how long a client waits for one of its tasks before it looks at all
NOT_A_NUMBER = "not a number"
SUPERVISOR = "kill supervisor"
WORKERS = sum(POOLS.values())

# What must never be in the daemon's log: mistakes of our own, or news that was thrown away.
FORBIDDEN = (
    "internal error",
    "Traceback",
    "is not stored",
    "was taken",
    "cannot be read",
    "dropped a message",
    "malformed",
    "resists",
    "quarantined",
    "given up",
    "no pool",
)

# A worker that is killed can repeat what it had leased: what ran, what had run and was not told
# yet. With the supervisor die, besides, the results it had been told and not committed yet; while
# one group is being written a worker gets through about as much again as it can hold.
REPEATS_PER_WORKER_MAX = WINDOW_MAX
REPEATS_PER_SUPERVISOR_MAX = WORKERS * 2 * WINDOW_MAX


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
        kind, args, state = "tiny", {"value": NOT_A_NUMBER}, FAILED
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
        self.submitted: list[Job] = []
        self.ended: dict[str, Outcome] = {}
        self._left = list(reversed(jobs))
        self._open: list[Any] = []  # handles
        self._rng = rng
        self._deadline = time.monotonic() + CLIENT_SECONDS_MAX

    def run(self) -> None:
        """In a thread."""
        with Client(self.socket, connect_timeout=CONNECT_SECONDS) as client:
            while not self._finished():
                jobs = self._batch()
                for handle in self._note(jobs, client.submit_many([job.request for job in jobs])):
                    handle.cancel()
                if self._rng.random() < 0.1:
                    client.flush(CLIENT_SECONDS_MAX)
                handle = self._rng.choice(self._open)
                if self._rng.random() < 0.1:
                    assert handle.status(CLIENT_SECONDS_MAX).id == handle.id
                with suppress(TimeoutError):  # another may end earlier
                    handle.outcome(LOOK_SECONDS)
                self._gather()

    async def run_async(self) -> None:
        """The same with `await`."""
        async with AsyncClient(self.socket, connect_timeout=CONNECT_SECONDS) as client:
            while not self._finished():
                jobs = self._batch()
                handles = await client.submit_many([job.request for job in jobs])
                for handle in self._note(jobs, handles):
                    await handle.cancel()
                if self._rng.random() < 0.1:
                    await client.flush(CLIENT_SECONDS_MAX)
                handle = self._rng.choice(self._open)
                if self._rng.random() < 0.1:
                    assert (await handle.status(CLIENT_SECONDS_MAX)).id == handle.id
                with suppress(TimeoutError):
                    await handle.outcome(LOOK_SECONDS)
                self._gather()

    def _batch(self) -> list[Job]:
        room = UNDER_WAY_MAX - len(self._open)
        size = min(self._rng.randint(1, BATCH_MAX), room, len(self._left))
        return [self._left.pop() for _ in range(size)]

    def _note(self, jobs: list[Job], handles: list[Any]) -> list[Any]:
        """Keep the handles; which of them are to be cancelled."""
        for job, handle in zip(jobs, handles, strict=True):
            job.id = handle.id
        self.submitted += jobs
        self._open += handles
        return [h for job, h in zip(jobs, handles, strict=True) if job.state == CANCELLED]

    def _gather(self) -> None:
        """Note what has ended."""
        for handle in self._open:
            if handle.done():
                assert isinstance(handle.ending, Outcome), f"{handle} has {handle.ending}"
                self.ended[handle.id] = handle.ending
        self._open = [handle for handle in self._open if not handle.done()]

    def _finished(self) -> bool:
        assert time.monotonic() < self._deadline, (
            f"{len(self._open)} tasks without an end, such as {self._open[:5]}"
        )
        return not self._left and not self._open


class Diary:
    """What the workers wrote: who ran what, and who was killed."""

    def __init__(self, path: Path) -> None:
        self.incarnations: list[str] = []  # in the order of their birth
        self.runs: dict[tuple[str, int], list[str]] = defaultdict(list)  # (task, attempt): by whom
        said_bye = set()
        for line in path.read_text().splitlines():
            what, incarnation, *more = line.split()
            if what == "born":
                self.incarnations.append(incarnation)
            elif what == "bye":
                said_bye.add(incarnation)
            else:
                self.runs[more[0], int(more[1])].append(incarnation)
        self.killed = [each for each in self.incarnations if each not in said_bye]
        # The last one that was killed in a slot may have died with its supervisor; one that has a
        # successor under the same supervisor was killed by itself.
        last = {each.rpartition(":")[0]: each for each in self.incarnations}
        self.killed_alone = [each for each in self.killed if each not in last.values()]
        self.repeated = Counter(
            incarnation for runs in self.runs.values() for incarnation in runs[:-1]
        )

    @property
    def executions(self) -> int:
        return sum(map(len, self.runs.values()))


def check_outcomes(submitters: list[Submitter]) -> dict[str, Job]:
    """Each client saw each of its tasks end as it must. All jobs by their ids."""
    jobs: dict[str, Job] = {}
    for submitter in submitters:
        for job in submitter.submitted:
            assert job.id not in jobs
            jobs[job.id] = job
            outcome = submitter.ended[job.id]
            assert (outcome.state, outcome.attempts) == (job.state, job.attempts), (job, outcome)
            if job.state == SUCCEEDED:
                assert msgspec.msgpack.decode(outcome.value) == job.args["value"], job
    assert len(jobs) == TASKS
    return jobs


def check_store(path: Path, jobs: dict[str, Job]) -> None:
    """Each task has ended in the store exactly once, as it must, and nothing else is there."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        assert store.execute("SELECT id FROM live").fetchall() == []
        rows = store.execute("SELECT id, state FROM finished").fetchall()
    twice = {id_: times for id_, times in Counter(id_ for id_, _ in rows).items() if times > 1}
    assert not twice, f"ended more than once: {twice}"
    assert dict(rows) == {job.id: job.state for job in jobs.values()}


def check_executions(diary: Diary, jobs: dict[str, Job], monkey: Any) -> None:
    """Everything ran as often as needed; every repeat is the fault of a killed process."""
    needed = {
        (job.id, attempt)
        for job in jobs.values()
        if job.args["value"] != NOT_A_NUMBER
        for attempt in range(1, job.attempts + 1)
    }
    assert diary.runs.keys() == needed
    for run, by in diary.runs.items():
        assert len(by) == len(set(by)), f"{run} ran twice in one worker: {by}"
    assert len(diary.killed) <= monkey.workers_killed + monkey.struck[SUPERVISOR] * WORKERS
    assert len(diary.killed_alone) <= monkey.workers_killed
    unexplained = diary.repeated.keys() - set(diary.killed)
    assert not unexplained, f"repeated without a crash: {unexplained}"
    with_supervisor: Counter[str] = Counter()
    for incarnation, repeats in diary.repeated.items():
        if incarnation in diary.killed_alone:
            assert repeats <= REPEATS_PER_WORKER_MAX, (incarnation, repeats)
        else:
            with_supervisor[incarnation.partition(":")[0]] += repeats
    for generation, repeats in with_supervisor.items():
        assert repeats <= REPEATS_PER_SUPERVISOR_MAX, (generation, repeats)


def check_log(log: str) -> None:
    for line in log.splitlines():
        assert not any(words in line for words in FORBIDDEN), line


def all_there(fleet: FleetStatus) -> bool:
    return all(pool.running == pool.size for pool in fleet.pools)


def zombies(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


def submit_all(submitters: list[Submitter], pool: ThreadPoolExecutor) -> list[Future[None]]:
    """Start the clients: the first of them asynchronous, the others in threads of their own."""
    first, *others = submitters
    return [
        pool.submit(lambda: asyncio.run(first.run_async())),
        *[pool.submit(submitter.run) for submitter in others],
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("containment", ["auto", "reaper"])
def test_nothing_is_lost_while_everything_is_killed(
    muster: Callable[..., Any],
    waiting: Callable[..., Any],
    chaos_seed: int,
    monkey: Any,
    containment: str,
) -> None:
    began = time.monotonic()
    rng = Random(chaos_seed)
    restart = {"base": "10ms", "max": "50ms", "pause": "50ms", "limit": 10_000}
    daemon = muster(
        {
            name: {
                "worker": "chaos_jobs:Jobs",
                "size": size,
                "max_crashes": 100,
                "restart": restart,
            }
            for name, size in POOLS.items()
        },
        start=False,
        retry__base="10ms",
        retry__max="50ms",
        supervisor__containment=containment,
    )
    shutil.copy(Path(__file__).with_name("chaos_jobs.py"), daemon.folder)
    (daemon.folder / "diary").touch()
    monkey = monkey(daemon, Random(rng.random()))
    monkey.start(wait=True)
    jobs = [make_job(rng, number) for number in range(TASKS)]
    submitters = [
        Submitter(daemon.tasks_socket, jobs[start::CLIENTS], Random(rng.random()))
        for start in range(CLIENTS)
    ]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = submit_all(submitters, pool)
        monkey.rage(
            progress=lambda: sum(len(each.ended) for each in submitters) / TASKS,
            over=lambda: (
                all(client.done() for client in clients)
                or any(client.done() and client.exception() for client in clients)
            ),
        )
        for client in clients:
            client.result()
    known = check_outcomes(submitters)
    assert monkey.longest_pause < PAUSE_SECONDS_MAX
    assert all(monkey.struck.values()), monkey.struck
    waiting("every worker is back", lambda: all_there(daemon.status()), RECOVERY_SECONDS_MAX)
    waiting("no zombie is left", lambda: not zombies(daemon.pid), RECOVERY_SECONDS_MAX)
    assert daemon.stop() == 0
    diary = Diary(daemon.folder / "diary")
    print(
        f"chaos: seed {chaos_seed}, {containment}: {TASKS} tasks, {diary.executions} executions, "
        f"{sum(diary.repeated.values())} repeated, by {len(diary.repeated)} of "
        f"{len(diary.killed)} killed workers ({len(diary.incarnations)} in all); "
        f"{monkey.struck}; {time.monotonic() - began:.1f} s, "
        f"at most {monkey.longest_pause:.1f} s without progress"
    )
    check_store(store_file(daemon.state), known)
    check_executions(diary, known, monkey)
    check_log(daemon.log())
