"""A whole daemon with spares: which pools keep one, and that none is left behind."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil

from musterd.supervisor.system.linux import descendants, family, is_alive
from support.daemon import Jobs, Muster, Musters
from support.waiting import Waiting


def spares(daemon: Muster, pool: str = "jobs") -> list[int]:
    found = []
    for pid in descendants(daemon.pid, family()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(f"musterd: spare {pool}\0".encode()):
            found.append(pid)
    return found


def reconfigure(daemon: Muster, **keys: Any) -> None:
    config = msgspec.json.decode(daemon.config_path.read_bytes())
    config["pools"]["jobs"].update(keys)
    daemon.config_path.write_bytes(msgspec.json.encode(config))
    os.kill(daemon.pid, signal.SIGHUP)


def test_a_worker_that_is_killed_is_replaced_by_the_spare(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=1)
    (spare,) = waiting("a spare", lambda: spares(daemon))
    with daemon.client() as client:
        os.kill(daemon.worker("jobs/0").pid, signal.SIGKILL)
        assert client.submit("jobs.echo", {"value": 1}).result(30) == 1
        assert daemon.worker("jobs/0").pid == spare
        (other,) = waiting("another spare", lambda: spares(daemon))
        # The second restart in a row has a delay, and then finds that spare.
        os.kill(spare, signal.SIGKILL)
        assert client.submit("jobs.echo", {"value": 2}).result(30) == 2
        assert daemon.worker("jobs/0").pid == other
    assert daemon.worker("jobs/0").restarts == 2
    assert daemon.pool("jobs").orphans == 0


def test_a_spare_that_is_killed_is_no_crash_of_any_worker(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=2)
    workers = [daemon.worker(f"jobs/{index}").pid for index in range(2)]
    (spare,) = waiting("a spare", lambda: spares(daemon))
    init = Path(f"/proc/{psutil.Process(spare).ppid()}")
    os.kill(spare, signal.SIGKILL)
    waiting("the supervisor has seen its end", lambda: not init.exists())
    pool = daemon.pool("jobs")
    assert (pool.lost, pool.restarts, pool.running) == ({}, 0, 2)
    assert [daemon.worker(f"jobs/{index}").pid for index in range(2)] == workers
    os.kill(workers[0], signal.SIGKILL)
    waiting("it is replaced", lambda: daemon.worker("jobs/0").pid not in (0, workers[0]))
    waiting("all are up", lambda: daemon.pool("jobs").running == 2)
    pool = daemon.pool("jobs")
    assert (sum(pool.lost.values()), pool.restarts) == (1, 1), "a worker that is killed is one"


NO_HOUSEKEEPING = """
import sys
if "musterd.supervisor" in sys.orig_argv:
    import musterd.supervisor.loop.daemon as daemon
    daemon.HOUSEKEEPING_NS = 10**12
"""


def test_there_is_a_spare_before_the_house_is_kept(muster: Musters, waiting: Waiting) -> None:
    """A worker that dies in the first second finds a spare, too."""
    daemon = muster({"jobs": {"worker": "talk", "size": 1}}, start=False)
    Path(daemon.folder, "talk.py").write_text(
        "from musterd import task\n@task\ndef say(ctx): ...\n"
    )
    Path(daemon.folder, "sitecustomize.py").write_text(NO_HOUSEKEEPING)
    daemon.popen_options["env"] = {**os.environ, "PYTHONPATH": str(daemon.folder)}
    daemon.start()
    waiting("a spare", lambda: spares(daemon))


def test_what_a_called_spare_says_is_said_by_its_slot(muster: Musters, waiting: Waiting) -> None:
    daemon = muster({"jobs": {"worker": "talk", "size": 1}}, start=False)
    code = "from musterd import task\n@task\ndef say(ctx, text: str): print(text)\n"
    Path(daemon.folder, "talk.py").write_text(code)
    daemon.start()
    waiting("a spare", lambda: spares(daemon))
    os.kill(daemon.worker("jobs/0").pid, signal.SIGKILL)
    with daemon.client() as client:
        client.submit("jobs.say", {"text": "here I am"}).result(30)
    waiting("it is heard", lambda: "here I am" in daemon.ctl("tail", "jobs/0").stdout)


def test_the_key_takes_effect_at_once_and_replaces_no_worker(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=1, pool={"spare": False})
    worker = daemon.worker("jobs/0").pid
    reconfigure(daemon, spare=True)
    waiting("a spare", lambda: spares(daemon))
    reconfigure(daemon, spare=False)
    waiting("none", lambda: not spares(daemon))
    assert daemon.worker("jobs/0").pid == worker


def test_a_pool_that_is_scaled_to_nothing_has_no_spare(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=1)
    waiting("a spare", lambda: spares(daemon))
    assert daemon.ctl("scale", "jobs", "0").returncode == 0
    waiting("none", lambda: not spares(daemon))
    assert daemon.ctl("scale", "jobs", "1").returncode == 0
    waiting("a spare again", lambda: spares(daemon))


def test_another_build_has_another_spare(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=1)
    (spare,) = waiting("a spare", lambda: spares(daemon))
    worker = daemon.worker("jobs/0").pid
    reconfigure(daemon, env={"SEASON": "autumn"})
    waiting("the worker is another", lambda: daemon.worker("jobs/0").pid not in (0, worker))
    (other,) = waiting("one spare", lambda: [p for p in spares(daemon) if p != spare])
    assert daemon.worker("jobs/0").pid != spare
    waiting("the old one is gone", lambda: spares(daemon) == [other])


def test_nothing_is_left_of_a_spare_after_the_death_of_the_supervisor(
    jobs: Jobs, waiting: Waiting
) -> None:
    daemon = jobs(size=1)
    waiting("a spare", lambda: spares(daemon))
    everybody = descendants(daemon.pid, family())
    daemon.kill()
    waiting("all are gone", lambda: not any(map(is_alive, everybody)))
    daemon.start()
    assert "processes: 0, temporary directories: 1" in daemon.log(), "that of the worker"
