"""A daemon in bad surroundings: broken settings, full disks, stuck and stopped processes."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.ctl.connection import Connection
from support.daemon import Jobs
from support.waiting import Waiting

CONFIGURATION, ANOTHER_INSTANCE, INTERNAL = 78, 69, 70
START_SECONDS = 20  # a start that fails ends much earlier


def run(made: Any, *arguments: str, command: str = "run") -> "subprocess.CompletedProcess[str]":
    """Run a daemon that should end by itself; a hanging daemon fails the test."""
    return subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", command, "-c", made.config_path, *arguments],
        cwd=made.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )


def one_line(text: str) -> str:
    """Return the only line of the text; a traceback has more."""
    (line,) = text.splitlines()
    return line


def fork_server_of(made: Any) -> int:
    titles = {child.pid: child.cmdline() for child in psutil.Process(made.pid).children()}
    (pid,) = [pid for pid, title in titles.items() if "fork server" in title[0]]
    return pid


def kill_worker(made: Any, waiting: Waiting) -> None:
    """Kill the worker and wait for the next one."""
    killed = made.worker("jobs/0").pid
    os.kill(killed, signal.SIGKILL)

    def is_back() -> bool:
        worker = made.worker("jobs/0")
        return worker.state == "RUNNING" and worker.pid != killed

    waiting("the worker is back", is_back)


# -- starts that cannot succeed ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("supervisor.control_group=nosuch", "supervisor.control_group = 'nosuch'"),
        ("supervisor.tasks_group=nosuch", "supervisor.tasks_group = 'nosuch'"),
        ("supervisor.log_file=/nonexist/x.log", "supervisor.log_file = '/nonexist/x.log'"),
        (f"supervisor.runtime_dir=/tmp/{'x' * 120}", "shorten supervisor.runtime_dir"),
    ],
)
def test_a_setting_that_this_machine_cannot_have_is_exit_78_and_found_by_check_config(
    jobs: Jobs, setting: str, told: str
) -> None:
    made = jobs(start=False)
    for command in ("run", "check-config"):
        done = run(made, "--set", setting, command=command)
        assert done.returncode == CONFIGURATION
        assert told in one_line(done.stderr)
    assert not made.processes()


@pytest.mark.parametrize("name", ["control.sock", "tasks.sock", "workers.sock"])
def test_what_is_in_the_way_of_a_socket_is_exit_78_and_no_lock_is_kept(
    jobs: Jobs, name: str
) -> None:
    made = jobs(start=False)
    (made.runtime / name).mkdir(parents=True)
    done = run(made)
    assert done.returncode == CONFIGURATION
    assert str(made.runtime / name) in one_line(done.stderr)
    (made.runtime / name).rmdir()
    assert [path.name for path in made.runtime.iterdir()] == ["lock"]
    made.start()


def test_a_second_daemon_on_the_same_state_is_exit_69(jobs: Jobs) -> None:
    made = jobs()
    done = run(made, "--set", f"supervisor.runtime_dir={made.folder / 'other'}")
    assert done.returncode == ANOTHER_INSTANCE
    assert f"pid {made.pid}" in one_line(done.stderr)
    assert made.status().state == "running"


def test_a_corrupt_store_is_one_line_and_exit_78(jobs: Jobs) -> None:
    made = jobs()
    assert made.stop() == 0
    store = made.state / "store.db"
    content = bytearray(store.read_bytes())
    content[100:] = os.urandom(len(content) - 100)
    store.write_bytes(content)
    done = run(made)
    assert done.returncode == CONFIGURATION
    assert str(store) in one_line(done.stderr)
    assert [path.name for path in made.runtime.iterdir()] == ["lock"]


# -- shutdown on a full disk -------------------------------------------------------------------


def test_a_shutdown_on_a_full_disk_tidies_up_and_is_exit_70(jobs: Jobs, waiting: Waiting) -> None:
    made = jobs(size=1)
    room = made.log_path.stat().st_size + 200_000
    resource.prlimit(made.pid, resource.RLIMIT_FSIZE, (room, room))  # no file can grow larger
    client = made.client()
    client.submit("jobs.echo", {"value": "x" * 1_000_000})
    waiting("the store fails", lambda: "store.failing" in made.log())
    assert made.stop() == INTERNAL
    log = made.log()
    assert "Traceback" not in log
    assert log.count("daemon.unclean") == 1
    assert "daemon.stopped" in log
    assert not list(made.runtime.glob("*.sock"))


# -- sockets ----------------------------------------------------------------------------------


def test_removed_sockets_are_told_once_in_the_log_and_in_the_status(
    jobs: Jobs, waiting: Waiting
) -> None:
    made = jobs(size=1)
    with Connection(made.control_socket, timeout=START_SECONDS) as connection:
        for name in ("control.sock", "tasks.sock"):
            (made.runtime / name).unlink()

        def problem() -> str:
            answer = connection.request(rpc.Status())
            return msgspec.json.decode(answer, type=FleetStatus).problem

        found = waiting("the status tells", problem)
    assert "control.sock" in found
    assert "tasks.sock" in found
    assert "workers.sock" not in found
    assert "stop musterd and start it" in found
    assert made.stop() == 0
    assert made.log().count("sockets.lost") == 1


# -- fork servers --------------------------------------------------------------------------------


def test_a_stopped_fork_server_is_replaced_and_blamed(jobs: Jobs, waiting: Waiting) -> None:
    made = jobs(size=1, pool={"start_timeout": "1s"})
    stopped = fork_server_of(made)
    os.kill(stopped, signal.SIGSTOP)
    kill_worker(made, waiting)
    assert fork_server_of(made) != stopped
    assert "the fork server forked no worker within its start_timeout of 1 s" in made.log()
    assert made.log().count("worker.crashed") == 1, "the slot is not to blame"
    assert made.client().submit("jobs.echo", {"value": 1}).result(timeout=30) == 1


BROKEN = """
import os, time
from musterd import Worker, task
{import_}
class Jobs(Worker):
    @task
    def echo(self, ctx, value: object = None) -> object:
        return value
"""


def test_an_import_that_hangs_is_ended_and_tried_again(jobs: Jobs, waiting: Waiting) -> None:
    made = jobs(size=1, pool={"start_timeout": "2s"}, start=False)
    module = Path(made.folder, "jobs.py")
    hangs = "if not os.path.exists('enough'): time.sleep(600)"
    module.write_text(BROKEN.format(import_=hangs))
    made.start(wait=False)
    log = "the worker class was not loaded within its start_timeout of 2 s"
    waiting("it is told", lambda: made.log_path.exists() and log in made.log())
    waiting("the status tells", lambda: log in made.worker("jobs/0").reason)
    Path(made.folder, "enough").touch()
    waiting("the worker is there", lambda: made.worker("jobs/0").state == "RUNNING")
    assert made.worker("jobs/0").reason == made.pool("jobs").reason == ""


def test_an_import_that_ends_the_process_is_fatal_with_its_reason(
    jobs: Jobs, waiting: Waiting
) -> None:
    restart = {"limit": 2, "base": "50ms"}
    made = jobs(size=1, pool={"restart": restart}, start=False)
    Path(made.folder, "jobs.py").write_text(BROKEN.format(import_="os._exit(0)"))
    made.start()
    worker = waiting("it is given up", lambda: (w := made.worker("jobs/0")).state == "FATAL" and w)
    assert "exited with code 0 while it loaded the worker class" in worker.reason
    assert "more than 2 failures" in made.pool("jobs").reason
    assert made.status().state == "degraded"
    Path(made.folder, "jobs.py").write_text(BROKEN.format(import_=""))
    assert made.ctl("reset", "jobs").returncode == 0
    assert made.status().state == "running"


def test_threads_of_an_import_are_told_with_their_pool_and_names(
    jobs: Jobs,
) -> None:
    made = jobs(size=1, start=False)
    thread = (
        "import threading\n"
        "threading.Thread(target=time.sleep, args=(600,), name='restless', daemon=True).start()"
    )
    Path(made.folder, "jobs.py").write_text(BROKEN.format(import_=thread))
    made.start()
    (line,) = [line for line in made.log().splitlines() if "forkserver.threads" in line]
    assert "pool=jobs" in line
    assert "threads=restless" in line


def test_the_reason_of_a_class_that_cannot_be_loaded_is_said_once_and_names_no_code_of_ours(
    jobs: Jobs,
) -> None:
    made = jobs(size=1, pool={"worker": "jobs:Nope"})
    reason = made.pool("jobs").reason
    assert reason.startswith("worker = 'jobs:Nope': module jobs has no class 'Nope'")
    assert reason.count("jobs:Nope") == 1
    assert ".py" not in reason


def test_what_an_import_started_ends_with_the_daemon(jobs: Jobs) -> None:
    made = jobs(size=1, start=False)
    stray = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)"
    Path(made.folder, "jobs.py").write_text(BROKEN.format(import_=stray))
    made.start()
    assert "sleep" in [process.name() for process in made.processes()]
    assert made.stop() == 0
    assert made.processes() == []


# -- what operators see -------------------------------------------------------------------------


def test_the_first_line_of_the_log_names_both_directories(jobs: Jobs) -> None:
    made = jobs(size=1)
    (line,) = [line for line in made.log().splitlines() if "daemon.starting" in line]
    assert f"runtime_dir={made.runtime}" in line
    assert f"state_dir={made.state}" in line


def test_a_submit_that_waits_tells_when_the_task_began_and_ended(
    jobs: Jobs,
) -> None:
    made = jobs(size=1)
    for _ in range(2):  # the second time, the task has ended already
        told = made.ctl("--json", "submit", "jobs.echo", "value=1", "--id", "once", "--wait")
        answer = json.loads(told.stdout)
        assert 0 < answer["submitted_at"] <= answer["finished_at"]
        shown = json.loads(made.ctl("--json", "task", "once").stdout)
        assert answer == {key: value for key, value in shown.items() if key in answer}


def test_a_pool_has_at_most_a_thousand_workers(jobs: Jobs) -> None:
    made = jobs(size=1)
    done = made.ctl("scale", "jobs", "1001")
    assert done.returncode == 2
    assert "1000" in done.stderr
    assert made.pool("jobs").size == 1


def test_options_without_sense_are_refused(jobs: Jobs) -> None:
    made = jobs(size=1)
    for options, told in (
        (("--delay", "nan"), "'nan' is not a number of seconds"),
        (("--id", ""), "--id is empty"),
    ):
        done = made.ctl("submit", "jobs.echo", *options)
        assert done.returncode == 2
        assert told in done.stderr


def test_a_quarantined_task_shows_how_often_it_ran(jobs: Jobs) -> None:
    made = jobs(size=1)
    done = made.ctl("--json", "submit", "jobs.die", "--id", "poison", "--wait")
    assert done.returncode == 1
    answer = json.loads(made.ctl("--json", "task", "poison").stdout)
    assert (answer["attempt"], answer["crashes"]) == (3, 3)


def test_a_task_interrupted_by_a_stop_is_told_and_a_stopped_slot_has_no_reason(
    jobs: Jobs, waiting: Waiting
) -> None:
    made = jobs(size=1, supervisor__drain_timeout="100ms", supervisor__stop_timeout="200ms")
    kill_worker(made, waiting)
    task = made.client().submit("jobs.deaf", timeout=60).id
    waiting("it runs", lambda: made.worker("jobs/0").state == "BUSY")
    assert made.ctl("stop", "jobs").returncode == 0
    assert made.worker("jobs/0").reason == ""
    (line,) = [line for line in made.log().splitlines() if "task.interrupted" in line]
    assert f"task={task}" in line
    assert json.loads(made.ctl("--json", "task", task).stdout)["state"] == "queued"
