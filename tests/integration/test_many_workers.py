"""Two hundred workers start at once, and cost next to nothing while idle."""

import os
import time
from pathlib import Path

from support.daemon import Jobs
from support.waiting import Waiting

WORKERS = 200
AT_WORK = 5  # files that threads of the daemon have open for a moment
START_SECONDS_MAX = 90.0
IDLE_SECONDS = 3.0
IDLE_SECONDS_MAX = 45.0  # right after the start, every process tree is measured once
# Share of a core, for the daemon alone. Measured: 0.001. A daemon that looks at every worker in
# every turn of its loop, or that workers keep waking, is far above.
IDLE_SHARE_MAX = 0.02


def test_two_hundred_workers_start_without_a_failure_and_idle_cheaply(
    jobs: Jobs, waiting: Waiting
) -> None:
    daemon = jobs(size=WORKERS, start=False)
    # systemd's usual limit: two hundred workers need more descriptors.
    daemon.popen_options = {"preexec_fn": _usual_limit}
    daemon.start(wait=False)
    waiting("the daemon is up", lambda: "musterd is ready" in daemon.log(), START_SECONDS_MAX)
    pool = daemon.pool("jobs")
    assert (pool.running, pool.restarts) == (WORKERS, 0), pool.reason
    assert "could not be started" not in daemon.log()
    descriptors = _descriptors(daemon.pid)
    waiting(f"{WORKERS} workers idle cheaply", lambda: _idles(daemon.pid), IDLE_SECONDS_MAX)
    assert _descriptors(daemon.pid) <= descriptors + AT_WORK
    client = daemon.client()
    done = client.map("jobs.echo", [{"value": number} for number in range(WORKERS)])
    assert sorted(each.result() for each in done) == list(range(WORKERS))
    began = time.monotonic()
    assert daemon.stop() == 0
    print(f"shut down in {time.monotonic() - began:.2f} s")


def _idles(pid: int) -> bool:
    began, before = time.monotonic(), _processor_seconds(pid)
    time.sleep(IDLE_SECONDS)  # the measurement: what the daemon uses while nothing happens
    share = (_processor_seconds(pid) - before) / (time.monotonic() - began)
    print(f"{WORKERS} idle workers: {share:.2%} of a core, {_descriptors(pid)} descriptors")
    return share < IDLE_SHARE_MAX


def _usual_limit() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _processor_seconds(pid: int) -> float:
    """Return the processor time of all threads; the usual figures are too coarse for so little."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
