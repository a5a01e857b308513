"""Thread pools of a worker's own code end with their worker."""

from pathlib import Path

from support.daemon import Musters
from support.waiting import Waiting

POOLS = """
import time
from pathlib import Path

from musterd import Worker, task
from musterd.workers.toolkit import executors


def job(name, begun, gate):
    begun.touch()
    while not gate.exists():
        time.sleep(0.005)
    Path(name).touch()


class Pools(Worker):
    @task
    def begin(self, ctx, jobs: int) -> list:
        for number in range(jobs):
            executors.io.submit(job, f"job{number}", Path(f"begun{number}"), Path("gate"))
        while not Path("begun2").exists():
            time.sleep(0.005)
        import threading
        return sorted({each.name.partition("_")[0] for each in threading.enumerate()})
"""


def test_what_runs_in_them_may_end_and_what_waits_is_not_begun(
    muster: Musters, waiting: Waiting
) -> None:
    daemon = muster({"pools": {"worker": "pools:Pools"}}, start=False)
    Path(daemon.folder, "pools.py").write_text(POOLS)
    daemon.start()
    client = daemon.client()
    names = client.submit("pools.begin", {"jobs": 5}).result(30)
    assert not any("calculation" in name or "api" in name for name in names), "made when used"
    assert daemon.ctl("stop", "--no-block", "pools").returncode == 0
    waiting("it stops", lambda: daemon.worker("pools/0").state != "RUNNING")
    Path(daemon.folder, "gate").touch()
    waiting("it has stopped", lambda: daemon.worker("pools/0").state == "STOPPED")
    ended = [number for number in range(5) if Path(daemon.folder, f"job{number}").exists()]
    assert ended == [0, 1, 2], "io has three threads"
