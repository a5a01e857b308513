"""Workers are recycled all the time and some are killed: every task succeeds once."""

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from support.daemon import Muster, Musters
from support.waiting import Waiting

TASKS = 600
KILLS = 12
RESTART = {"base": "10ms", "max": "50ms", "pause": "50ms", "limit": 10_000}


def killed_one(daemon: Muster, rng: Random) -> bool:
    """Kill one worker with SIGKILL, at work, during its start or on its way out."""
    pool = daemon.pool("jobs")
    pids = [worker.pid for worker in (*pool.workers, *pool.leaving) if worker.pid]
    if not pids:
        return False
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(rng.choice(pids))
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
        return True
    return False


@pytest.mark.timeout(180)
def test_nothing_is_lost_while_workers_are_recycled_and_killed(
    muster: Musters, waiting: Waiting, chaos_seed: int
) -> None:
    rng = Random(chaos_seed)
    keys = {"size": 3, "max_tasks": 8, "max_age": "2s", "max_crashes": 100, "restart": RESTART}
    keys |= {"secrets": ["CHAOS_GENERATION", "CHAOS_DIARY"]}
    daemon = muster({"jobs": {"worker": "chaos_jobs:Jobs", **keys}}, start=False)
    shutil.copy(Path(__file__).with_name("chaos_jobs.py"), daemon.folder)
    diary = daemon.folder / "diary"
    diary.touch()
    daemon.popen_options = {
        "env": {**os.environ, "CHAOS_GENERATION": "1", "CHAOS_DIARY": str(diary)}
    }
    daemon.start()
    with daemon.client() as client:
        handles = [
            client.submit("jobs.nap", {"value": n, "seconds": rng.uniform(0, 0.03)})
            for n in range(TASKS)
        ]
        kills = 0
        deadline = time.monotonic() + 60
        while kills < KILLS and time.monotonic() < deadline:
            kills += killed_one(daemon, rng)
            time.sleep(rng.uniform(0, 0.3))
        assert [handle.result(100) for handle in handles] == list(range(TASKS))
    waiting("all are back", lambda: daemon.pool("jobs").running == 3)
    pool = daemon.pool("jobs")
    assert pool.failed == 0
    assert pool.recycled >= TASKS // 8 // 3
    assert set(pool.lost) <= {"signal", "boot"}, "nobody else is to blame"
    assert sum(pool.lost.values()) <= kills
    ran = Counter(line.split()[2] for line in diary.read_text().splitlines() if "ran" in line)
    assert len(ran) == TASKS
    assert sum(ran.values()) - TASKS <= kills, "only what a kill interrupted ran twice"
