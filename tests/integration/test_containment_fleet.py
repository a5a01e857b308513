"""A whole daemon in each containment: processes that a task starts end with their worker."""

import os
import signal
from pathlib import Path

import pytest

from musterd.supervisor.system.linux import descendants, family, is_alive
from support.daemon import Jobs, Muster
from support.waiting import Waiting

MODES = ["pidns", pytest.param("cgroup", marks=pytest.mark.cgroups), "reaper"]


@pytest.mark.parametrize("containment", MODES)
def test_what_a_task_started_is_gone_with_its_worker(
    jobs: Jobs, waiting: Waiting, containment: str
) -> None:
    # Without a spare, which might start while processes are counted.
    daemon = jobs(size=1, pool={"spare": False}, supervisor__containment=containment)
    status = daemon.status()
    assert (status.containment, status.containment_reason) == (containment, "")
    assert f"containment {containment}" in daemon.ctl("status").stdout
    before = len(daemon.processes())
    folder = Path(daemon.client().submit("jobs.orphans").result(30))
    worker = daemon.worker("jobs/0")
    waiting("its children have forked and ended", lambda: len(daemon.processes()) == before + 3)
    assert (folder / "left").exists()
    os.kill(worker.pid, signal.SIGKILL)
    waiting("the worker is replaced", lambda: daemon.worker("jobs/0").pid not in (0, worker.pid))
    waiting("nothing is left", lambda: len(daemon.processes()) == before and not folder.exists())
    assert daemon.pool("jobs").orphans == 0, "nothing should have been left to the census"


def _with_orphans(daemon: Muster, waiting: Waiting) -> tuple[int, int, list[int]]:
    """Return the pids of a worker, of its init and of three orphans that its task has left."""
    daemon.client().submit("jobs.orphans").result(30)
    worker = daemon.worker("jobs/0").pid
    (init,) = (pid for pid, children in family().items() if worker in children)

    def orphans() -> list[int]:
        return [pid for pid in family()[init] if pid != worker]

    def settled() -> bool:
        made = descendants(init, family())
        return len(orphans()) == 3 and sum(map(is_alive, made)) == 4

    waiting("the children have forked and ended", settled)
    return worker, init, orphans()


@pytest.mark.parametrize("containment", [MODES[1], MODES[2]])
def test_what_outlived_a_worker_is_ended_counted_and_shown(
    jobs: Jobs, waiting: Waiting, containment: str
) -> None:
    daemon = jobs(size=1, supervisor__containment=containment)
    worker, init, _ = _with_orphans(daemon, waiting)
    os.kill(init, signal.SIGKILL)
    waiting("the worker is replaced", lambda: daemon.worker("jobs/0").pid not in (0, worker))
    found = daemon.pool("jobs").orphans
    assert found in (3, 4)  # 4 if the worker is counted, which dies with its init
    assert f"{found} orphans killed" in daemon.ctl("status").stdout
    assert "leftovers of a worker were removed" in daemon.log()


def test_a_daemon_tells_what_its_predecessor_left(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=1, supervisor__containment="reaper")
    worker, init, orphans = _with_orphans(daemon, waiting)
    os.kill(init, signal.SIGSTOP)  # so that the init does not clean up
    daemon.kill()
    os.kill(init, signal.SIGKILL)
    waiting("the worker died with its init", lambda: not is_alive(worker))
    assert all(map(is_alive, orphans))
    daemon.start()
    assert not any(map(is_alive, orphans))
    assert "leftovers of an earlier supervisor were removed" in daemon.log()
    assert "processes: 3, temporary directories: 1" in daemon.log()
