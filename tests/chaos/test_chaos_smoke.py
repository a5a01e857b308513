"""Thousands of tasks while workers, fork servers and the supervisor are killed: none may be lost.

Delivery is at least once, with exactly one final state. So each acknowledged task must end as its
kind says, once, for its submitter and in the store. A killed process must explain each additional
execution.
"""

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import psutil
import pytest
from storm.diary import Diary
from storm.monkey import KILLS, SUPERVISOR, Monkey
from storm.work import (
    NOT_A_NUMBER,
    Job,
    Submitter,
    check_outcomes,
    final_states,
    make_job,
    submit_all,
)

from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.core.tasks.leases import WINDOW_MAX
from musterd.supervisor.system.directories import store_file
from support.daemon import OUR_FRAME, Musters
from support.waiting import Waiting

TASKS = 2000
POOLS = {"crowd": 3, "single": 1}
SHARES = {"crowd": 9, "single": 1}  # of the tasks
CLIENTS = 3
CLIENT_SECONDS_MAX = 90.0  # from the first submit to the last result; about 15 are usual
PAUSE_SECONDS_MAX = 29.0  # less than three are usual; a lost message is repeated after 30
RECOVERY_SECONDS_MAX = 29.0  # less than one is usual; a lost start is noticed after 30
WORKERS = sum(POOLS.values())

# Must never be in the daemon's log: our own mistakes, or dropped messages.
FORBIDDEN = (
    "internal error",
    "is not stored",
    "was taken",
    "cannot be read",
    "dropped a message",
    "malformed",
    "resists",
    "task.quarantined",
    "given up",
    "no pool",
)

# A worker that is killed can repeat its leases: tasks that ran, and tasks that had run unreported.
# With the supervisor, results die that were reported but not committed. While one group is being
# written, a worker gets through about as many tasks again as it can hold.
REPEATS_PER_WORKER_MAX = WINDOW_MAX
REPEATS_PER_SUPERVISOR_MAX = WORKERS * 2 * WINDOW_MAX


def check_store(path: Path, jobs: dict[str, Job]) -> None:
    """Check that each task ended in the store once, as expected, and nothing else is there."""
    assert final_states(path) == {job.id: job.state for job in jobs.values()}


def check_executions(diary: Diary, jobs: dict[str, Job], monkey: Monkey) -> None:
    """Check that everything ran as often as needed; a killed process must explain every repeat."""
    needed = {
        (job.id, attempt)
        for job in jobs.values()
        if job.args["value"] != NOT_A_NUMBER
        for attempt in range(1, job.attempts + 1)
    }
    assert diary.runs.keys() == needed
    diary.check()
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
        assert not OUR_FRAME.search(line), line


def all_there(fleet: FleetStatus) -> bool:
    return all(pool.running == pool.size for pool in fleet.pools)


def zombies(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # an init that has just ended
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("containment", ["auto", "reaper"])
def test_nothing_is_lost_while_everything_is_killed(
    muster: Musters,
    waiting: Waiting,
    chaos_seed: int,
    tell: Callable[[str, object], None],
    containment: str,
) -> None:
    began = time.monotonic()
    rng = Random(chaos_seed)
    restart = {"base": "10ms", "max": "50ms", "pause": "50ms", "limit": 10_000}
    daemon = muster(
        {
            name: {
                "worker": "chaos_jobs:Jobs",
                "secrets": ["CHAOS_GENERATION", "CHAOS_DIARY"],
                "size": size,
                "max_crashes": 100,
                "restart": restart,
            }
            for name, size in POOLS.items()
        },
        start=False,
        retry__base="10ms",
        retry__max="50ms",
        retry__budget=False,  # all its attempts are counted
        supervisor__containment=containment,
    )
    shutil.copy(Path(__file__).with_name("chaos_jobs.py"), daemon.folder)
    (daemon.folder / "diary").touch()
    monkey = Monkey(daemon, Random(rng.random()))
    monkey.start(wait=True)
    jobs = [make_job(rng, number, SHARES) for number in range(TASKS)]
    submitters = [
        Submitter(
            daemon.tasks_socket,
            jobs[start::CLIENTS],
            Random(rng.random()),
            seconds_max=CLIENT_SECONDS_MAX,
        )
        for start in range(CLIENTS)
    ]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = submit_all(submitters, pool)
        monkey.rage(
            KILLS,
            progress=lambda: sum(len(each.ended) for each in submitters) / TASKS,
            over=lambda: (
                all(client.done() for client in clients)
                or any(client.done() and client.exception() for client in clients)
            ),
        )
        for client in clients:
            client.result()
    known = check_outcomes(submitters)
    assert len(known) == TASKS
    assert monkey.longest_pause < PAUSE_SECONDS_MAX
    assert monkey.struck.keys() == KILLS.keys(), monkey.struck
    waiting("every worker is back", lambda: all_there(daemon.status()), RECOVERY_SECONDS_MAX)
    waiting("no zombie is left", lambda: not zombies(daemon.pid), RECOVERY_SECONDS_MAX)
    assert daemon.stop() == 0
    diary = Diary(daemon.folder / "diary")
    tell("tasks", TASKS)
    tell("executions", diary.executions)
    tell("of them repeated", sum(diary.repeated.values()))
    tell("workers", f"{len(diary.incarnations)}, {len(diary.killed)} killed")
    tell("spares killed", monkey.spares_killed)
    tell("strikes", ", ".join(f"{name} {times}" for name, times in monkey.struck.items()))
    tell("longest without progress", f"{monkey.longest_pause:.1f} s")
    tell("took", f"{time.monotonic() - began:.1f} s")
    check_store(store_file(daemon.state), known)
    check_executions(diary, known, monkey)
    check_log(daemon.log())
