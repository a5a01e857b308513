"""Two hundred workers: all of them start at once, and idle they cost next to nothing."""

import os
import time
from pathlib import Path
from typing import Any

WORKERS = 200
START_SECONDS_MAX = 90.0
IDLE_SECONDS = 6.0  # so that all of them are looked at once at least
# Of a core, for the daemon alone. Measured: 0.001. Where every worker is looked at in every turn of
# the loop, or wakes it all the time, it is far above.
IDLE_SHARE_MAX = 0.02


def test_two_hundred_workers_start_without_a_failure_and_idle_cheaply(
    jobs: Any, waiting: Any
) -> None:
    daemon = jobs(size=WORKERS, start=False)
    # As systemd gives it: a few descriptors for each worker are more than that.
    daemon.popen_options = {"preexec_fn": _usual_limit}
    daemon.start(wait=False)
    waiting("the daemon is up", lambda: "musterd is ready" in daemon.log(), START_SECONDS_MAX)
    pool = daemon.pool("jobs")
    assert (pool.running, pool.restarts) == (WORKERS, 0), pool.reason
    assert "could not be started" not in daemon.log()
    descriptors = _descriptors(daemon.pid)
    began, before = time.monotonic(), _processor_seconds(daemon.pid)
    time.sleep(IDLE_SECONDS)  # what is measured is what happens while nothing does
    share = (_processor_seconds(daemon.pid) - before) / (time.monotonic() - began)
    print(f"{WORKERS} idle workers: {share:.2%} of a core, {descriptors} descriptors")
    assert share < IDLE_SHARE_MAX
    assert _descriptors(daemon.pid) == descriptors
    client = daemon.client()
    done = client.map("jobs.echo", [{"value": number} for number in range(WORKERS)])
    assert sorted(each.result() for each in done) == list(range(WORKERS))
    began = time.monotonic()
    assert daemon.stop() == 0
    print(f"shut down in {time.monotonic() - began:.2f} s")


def _usual_limit() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _processor_seconds(pid: int) -> float:
    """Of all its threads, to the nanosecond: the usual figures are too coarse for so little."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
