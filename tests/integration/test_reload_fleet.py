"""Reload with real processes: only changed pools are touched, and no task is lost."""

import os
import py_compile
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from musterd import UnknownTask
from musterd.supervisor.api import rpc
from support.daemon import Muster

RENAMED = "jobs2"


class Configured:
    """A daemon whose configuration can be rewritten."""

    def __init__(self, daemon: Muster) -> None:
        self.daemon = daemon
        self.config = msgspec.json.decode(daemon.config_path.read_bytes())

    def write(self) -> None:
        self.daemon.config_path.write_bytes(msgspec.json.encode(self.config))

    def pids(self, pool: str) -> list[int]:
        return [worker.pid for worker in self.daemon.pool(pool).workers]


@pytest.fixture
def fleet(jobs) -> Any:
    """Make a daemon with the pools `jobs` (2 workers) and `other` (1): fleet(...)."""

    def make(**settings: Any) -> Configured:
        other = {"other": {"worker": "jobs:Jobs", "size": 1}}
        return Configured(jobs(others=other, **settings))

    return make


def fork_servers_of(daemon: Muster, pool: str) -> list[psutil.Process]:
    found = []
    for process in daemon.processes():
        try:
            if f"musterd: fork server {pool}" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_changed_pool_rolls_under_load_and_the_other_one_is_not_touched(fleet, waiting):
    made = fleet(size=3)
    daemon = made.daemon
    before, other = made.pids("jobs"), made.pids("other")
    with daemon.client() as client:
        handles = client.submit_many(
            [("jobs.nap", {"seconds": 0.02})] * 200 + [("other.echo", {"value": 1})] * 100
        )
        client.flush()
        made.config["pools"]["jobs"]["env"] = {"COLOUR": "blue"}
        made.write()
        os.kill(daemon.pid, signal.SIGHUP)
        waiting("it rolls", lambda: "event=pool.rolled pool=jobs" in daemon.log())
        handles += client.submit_many([("jobs.nap", {"seconds": 0.02})] * 100)
        results = [handle.result(60) for handle in handles]
    assert len(results) == 400
    assert not set(before) & set(made.pids("jobs"))
    assert len(made.pids("jobs")) == 3
    assert made.pids("other") == other
    status = {pool.name: pool for pool in daemon.status().pools}
    assert (status["jobs"].failed, status["jobs"].restarts) == (0, 0)
    assert "pool=other" not in daemon.log().partition("config.reloaded")[2]
    assert "task.interrupted" not in daemon.log()
    waiting("the old fork server is gone", lambda: len(fork_servers_of(daemon, "jobs")) == 1)


def test_workers_of_the_new_build_have_what_is_new(fleet):
    made = fleet(size=2)
    daemon = made.daemon
    source = Path(daemon.folder, "jobs.py").read_text()
    Path(daemon.folder, f"{RENAMED}.py").write_text(
        source
        + "\n    @task\n    def extra(self, ctx) -> str:\n        return os.environ['COLOUR']\n"
    )
    made.config["pools"]["jobs"] |= {"worker": f"{RENAMED}:Jobs", "env": {"COLOUR": "green"}}
    made.write()
    with daemon.client() as client:
        with pytest.raises(UnknownTask):
            client.submit("jobs.extra").result(30)
        done = daemon.ctl("reload")
        assert done.returncode == 0, done.stderr
        assert 'pools.jobs.worker: "jobs:Jobs" -> "jobs2:Jobs"  (rolls)' in done.stdout
        assert "pool jobs: rolls" in done.stdout
        assert client.submit("jobs.extra").result(30) == "green"


def test_a_bad_configuration_is_refused_whole_and_the_daemon_runs_on(fleet, waiting):
    made = fleet(size=1)
    daemon = made.daemon
    before = made.pids("jobs") + made.pids("other")
    made.config["pools"]["jobs"]["size"] = "three"
    made.config["pools"]["other"]["size"] = 4
    made.write()
    for command in ("reload", "update", "reread"):
        done = daemon.ctl(command)
        assert done.returncode == 1
        assert f"{daemon.config_path}: key 'pools.jobs.size': value \"three\"" in done.stderr
    os.kill(daemon.pid, signal.SIGHUP)
    waiting("that is logged", lambda: daemon.log().count("event=config.refused") == 3)
    daemon.config_path.write_text("{")
    assert daemon.ctl("reload").returncode == 1
    assert made.pids("jobs") + made.pids("other") == before
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(30) == 1


def test_reread_shows_what_is_different_and_changes_nothing(fleet):
    made = fleet(size=1)
    daemon = made.daemon
    before = made.pids("jobs")
    assert daemon.ctl("reread").stdout == "the configuration has not changed\n"
    pools = made.config["pools"]
    pools["jobs"] |= {
        "size": 2,
        "task_timeout": "7s",
        "env": {"COLOUR": "red", "API_TOKEN": "abc", "HOME_URL": "https://me:word@site.example/"},
    }
    pools["new"] = {"worker": "jobs:Jobs", "queue_size": 5}
    del pools["other"]
    made.config["supervisor"] |= {"log_level": "debug", "containment": "reaper"}
    made.config["retry"] = {"max_retries": 7}
    made.write()
    done = daemon.ctl("reread")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "pools.jobs.env.API_TOKEN: (not set) -> (hidden)  (rolls)",
        'pools.jobs.env.COLOUR: (not set) -> "red"  (rolls)',
        'pools.jobs.env.HOME_URL: (not set) -> "https://(hidden)@site.example/"  (rolls)',
        "pools.jobs.size: 1 -> 2  (scales)",
        'pools.jobs.task_timeout: "2m" -> "7s"  (at once)',
        "pools.new.queue_size: (not set) -> 5  (added)",
        'pools.new.worker: (not set) -> "jobs:Jobs"  (added)',
        "pools.other.size: 1 -> (not set)  (removed)",
        'pools.other.worker: "jobs:Jobs" -> (not set)  (removed)',
        "retry.max_retries: 3 -> 7  (at once)",
        'supervisor.containment: "auto" -> "reaper"  (needs a restart)',
        'supervisor.log_level: "info" -> "debug"  (at once)',
    ]
    assert "abc" not in daemon.ctl("--json", "reread").stdout
    assert made.pids("jobs") == before
    assert [pool.name for pool in daemon.status().pools] == ["jobs", "other"]
    done = daemon.ctl("reload")
    assert done.returncode == 0, done.stderr
    assert "restart the daemon to apply supervisor.containment" in done.stderr
    # Settings that need a restart still differ.
    assert daemon.ctl("reread").stdout.splitlines() == [
        'supervisor.containment: "auto" -> "reaper"  (needs a restart)'
    ]


def test_pools_come_and_go_and_their_tasks_wait_in_the_store(fleet):
    made = fleet(size=1, pool={"max_crashes": 3})
    daemon = made.daemon
    client = daemon.client()
    running = client.submit("other.nap", {"seconds": 4.0})  # longer than musterctl takes to start
    waiting = [client.submit("other.echo", {"value": n}) for n in range(20)]
    later = client.submit("other.echo", {"value": "later"}, delay=0.5)
    client.flush()
    other = made.config["pools"].pop("other")
    made.config["pools"]["third"] = {"worker": "jobs:Jobs", "size": 2}
    made.write()
    done = daemon.ctl("update")
    assert done.returncode == 0, done.stderr
    assert "pool third: added" in done.stdout
    assert "pool other: removed, 21 tasks stay in the store" in done.stdout
    assert running.result(30) == 0  # the running task was not dropped
    assert sorted(pool.name for pool in daemon.status().pools) == ["jobs", "third"]
    assert client.submit("third.echo", {"value": 3}).result(30) == 3
    with pytest.raises(UnknownTask, match="no pool 'other'"):
        client.submit("other.echo", {"value": 1}).result(30)
    assert daemon.ctl("tasks", "--pool", "third").returncode == 0
    # The pool is back after a restart of the daemon: its tasks run, and waiting clients hear.
    made.config["pools"]["other"] = other
    made.write()
    assert daemon.ctl("reload").returncode == 0
    assert [handle.result(30) for handle in waiting] == list(range(20))
    assert later.result(30) == "later"


def test_stranded_tasks_survive_a_restart_without_their_pool(fleet):
    made = fleet(size=1)
    daemon = made.daemon
    client = daemon.client()
    client.submit("other.nap", {"seconds": 0.5})
    handle = client.submit("other.echo", {"value": "kept"})
    client.flush()
    other = made.config["pools"].pop("other")
    made.write()
    assert daemon.ctl("reload").returncode == 0
    daemon.stop()
    daemon.start()
    made.config["pools"]["other"] = other
    made.write()
    assert daemon.ctl("reload").returncode == 0
    assert handle.result(30) == "kept"


def test_what_needs_no_worker_changes_in_place(fleet):
    made = fleet(size=2)
    daemon = made.daemon
    before = made.pids("jobs")
    made.config["pools"]["jobs"] |= {"task_timeout": "300ms", "queue_size": 17}
    made.config["retry"] = {"max_retries": 0}
    made.config["schedule"] = {"tick": {"task": "jobs.echo", "args": {"value": 1}, "every": "1s"}}
    made.config["targets"] = {"site.example": {"max_concurrent": 1}}
    made.config["supervisor"] |= {"log_level": "debug", "redact": ["pin"]}
    made.write()
    done = daemon.ctl("reload")
    assert done.returncode == 0, done.stderr
    assert made.pids("jobs") == before
    with daemon.client() as client:
        from musterd import InvalidTask, TaskFailed

        with pytest.raises(TaskFailed, match=r"timeout of 0\.3 s"):
            client.submit("jobs.nap", {"seconds": 20}).result(30)
        with pytest.raises(InvalidTask, match="pin"):
            client.submit("jobs.echo", {"value": {"pin": "1234"}}).result(30)
    schedules = daemon.ask(rpc.ListSchedules())["schedules"]
    assert [each["name"] for each in schedules] == ["tick"]
    assert made.pids("jobs") == before


def test_a_new_class_that_cannot_be_imported_leaves_the_old_workers(fleet, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # as users run it
    made = fleet(size=2)
    daemon = made.daemon
    before = made.pids("jobs")
    module = Path(daemon.folder, "broken.py")
    module.write_text("import nowhere_at_all\n")
    made.config["pools"]["jobs"]["worker"] = "broken:Jobs"
    made.config["pools"]["other"]["size"] = 2
    made.write()
    done = daemon.ctl("reload")
    assert done.returncode == 1
    assert "jobs: the old workers stay" in done.stderr
    assert "nowhere_at_all" in done.stderr
    assert "pool jobs: rolls: failed" in done.stdout
    assert made.pids("jobs") == before
    assert len(made.pids("other")) == 2  # the rest is applied anyway
    assert "nowhere_at_all" in daemon.pool("jobs").reason
    # Once the module is corrected, the same configuration is tried again. The compiled module still
    # looks up to date, because the source has the same size and time.
    py_compile.compile(str(module))
    was = module.stat()
    module.write_text("from jobs import Jobs\n")
    os.utime(module, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert module.stat().st_size == was.st_size
    done = daemon.ctl("reload")
    assert done.returncode == 0, done.stderr
    assert not set(before) & set(made.pids("jobs"))
    assert daemon.pool("jobs").reason == ""


def test_a_new_class_whose_open_fails_leaves_the_old_workers(fleet):
    made = fleet(size=2)
    daemon = made.daemon
    before = made.pids("jobs")
    Path(daemon.folder, "shut.py").write_text(
        "from jobs import Jobs as Base\n"
        "class Jobs(Base):\n"
        "    def open(self):\n"
        "        raise RuntimeError('cannot open today')\n"
    )
    made.config["pools"]["jobs"]["worker"] = "shut:Jobs"
    made.write()
    with daemon.client() as client:
        handles = client.submit_many([("jobs.nap", {"seconds": 0.01})] * 100)
        done = daemon.ctl("reload")
        assert done.returncode == 1
        assert "cannot open today" in done.stderr
        assert len([handle.result(60) for handle in handles]) == 100
    assert made.pids("jobs") == before
    assert all(worker.state == "RUNNING" for worker in daemon.pool("jobs").workers)


def test_reload_of_a_named_pool_loads_its_code_anew(fleet):
    made = fleet(size=2)
    daemon = made.daemon
    path = Path(daemon.folder, "jobs.py")
    path.write_text(path.read_text().replace("return value", "return ['new', value]"))
    before, other = made.pids("jobs"), made.pids("other")
    done = daemon.ctl("reload")
    assert done.stdout == "the configuration has not changed\n"
    newer = f"{path} has changed since pool {{0}} imported it: type musterctl -s {{1}} reload {{0}}"
    for pool in ("jobs", "other"):
        assert newer.format(pool, daemon.control_socket) in done.stderr
    assert made.pids("jobs") == before
    done = daemon.ctl("reload", "jobs")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"the configuration has not changed\npool jobs: rolls: new code ({path})\n"
    )
    assert newer.format("other", daemon.control_socket) in done.stderr
    assert not set(before) & set(made.pids("jobs"))
    assert made.pids("other") == other
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(30) == ["new", 1]
        assert client.submit("other.echo", {"value": 1}).result(30) == 1
    assert daemon.ctl("reload", "nothing").returncode == 4


@pytest.mark.parametrize(
    ("key", "value", "told"), [("size", 3, "scales"), ("task_timeout", "40s", "at once")]
)
def test_what_a_reload_changes_in_a_named_pool_does_not_hide_its_new_code(fleet, key, value, told):
    made = fleet(size=2)
    daemon = made.daemon
    path = Path(daemon.folder, "jobs.py")
    path.write_text(path.read_text().replace("return value", "return ['new', value]"))
    made.config["pools"]["jobs"][key] = value
    made.write()
    done = daemon.ctl("reload", "jobs")
    assert done.returncode == 0, done.stderr
    changed, rolled = done.stdout.splitlines()
    assert changed.startswith(f"pools.jobs.{key}: ")
    assert changed.endswith(f"({told})")
    assert rolled == f"pool jobs: rolls: new code ({path})"
    assert "since pool jobs imported it" not in done.stderr
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(30) == ["new", 1]


def test_a_restart_says_when_the_code_on_disk_is_newer(fleet):
    made = fleet(size=1)
    daemon = made.daemon
    done = daemon.ctl("restart", "jobs")
    assert (done.returncode, done.stderr) == (0, "")
    path = Path(daemon.folder, "jobs.py")
    path.write_text(path.read_text().replace("return value", "return ['new', value]"))
    done = daemon.ctl("restart", "jobs/0")
    assert done.returncode == 0
    assert done.stderr == (
        f"musterctl: {path} has changed since pool jobs imported it; a restart keeps the code as "
        f"it was: to import it anew, type musterctl -s {daemon.control_socket} reload jobs\n"
    )
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(30) == 1
        told = msgspec.json.decode(daemon.ctl("--json", "restart", "jobs").stdout)
        assert told["newer"] == [{"pool": "jobs", "files": [str(path)], "secrets": []}]
        command = done.stderr.rpartition("type musterctl ")[2].split()[2:]
        assert daemon.ctl(*command).returncode == 0
        assert client.submit("jobs.echo", {"value": 1}).result(30) == ["new", 1]
    assert daemon.ctl("restart", "jobs").stderr == ""


def test_reload_with_code_replaces_the_pools_whose_code_is_newer(fleet):
    made = fleet(size=1)
    daemon = made.daemon
    source = Path(daemon.folder, "jobs.py").read_text()
    module = Path(daemon.folder, "own.py")
    module.write_text("from jobs import Jobs as Base\n\nclass Jobs(Base): ...\n")
    made.config["pools"]["other"]["worker"] = "own:Jobs"
    made.write()
    assert daemon.ctl("reload").returncode == 0
    before = made.pids("jobs")
    assert daemon.ctl("reload", "--code").stdout == "the configuration has not changed\n"
    module.write_text("from jobs import Jobs as Base\n\nclass Jobs(Base):\n    def f(:\n")
    for _ in range(2):  # until it is mended
        done = daemon.ctl("reload", "--code")
        assert (done.returncode, done.stdout.splitlines()[1:]) == (1, ["pool other: rolls: failed"])
        assert f"SyntaxError: invalid syntax, at {module}:4" in done.stderr
    with daemon.client() as client:
        assert client.submit("other.echo", {"value": 1}).result(30) == 1
    module.write_text("from jobs import Jobs as Base\n\nclass Jobs(Base):\n    NEW = True\n")
    done = daemon.ctl("reload", "--code")
    assert done.stdout.splitlines()[1:] == [f"pool other: rolls: new code ({module})"]
    assert made.pids("jobs") == before
    Path(daemon.folder, "jobs.py").write_text(f"{source}\n# both pools import this\n")
    done = daemon.ctl("reload", "--code")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[1:]] == [
        "pool jobs",
        "pool other",
    ]
    assert not set(before) & set(made.pids("jobs"))


def test_a_pool_that_could_not_load_its_code_starts_when_it_is_mended(jobs, waiting):
    made = Configured(jobs(size=1, start=False))
    daemon = made.daemon
    module = Path(daemon.folder, "own.py")
    module.write_text("from jobs import Jobs\n\nimport nothing_like_that\n")
    made.config["pools"]["jobs"]["worker"] = "own:Jobs"
    made.write()
    daemon.start()
    waiting("it is FATAL", lambda: daemon.pool("jobs").state == "FATAL")
    log = daemon.log()
    assert "Traceback" in log
    assert f"No module named 'nothing_like_that', at {module}:3" in log
    for machinery in ("importlib", "user_code.py", "forkserver.py", "handlers.py"):
        assert machinery not in log
    module.write_text("from jobs import Jobs\n")
    done = daemon.ctl("reload", "--code")
    assert done.returncode == 0, done.stderr
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(30) == 1


def test_changed_secrets_are_told(jobs, tmp_path):
    (tmp_path / "KEY").write_text("one")
    daemon = jobs(size=1, pool={"secrets_dir": str(tmp_path)})
    assert daemon.ctl("reload").stdout == "the configuration has not changed\n"
    (tmp_path / "KEY").write_text("two")
    assert daemon.ctl("reload").stdout.splitlines()[1:] == [
        "pool jobs: new secrets (KEY), which its tasks read by themselves"
    ]
    assert daemon.ctl("reload", "jobs").stdout.splitlines()[1:] == [
        "pool jobs: rolls: new secrets (KEY)"
    ]
    assert daemon.ctl("reload", "jobs").stdout.splitlines()[1:] == ["pool jobs: rolls"]


LOADS_UNTIL = """
import os, time
while os.environ.get("COLOUR") == "blue" and not os.path.exists({path!r}):
    time.sleep(0.01)
"""


def test_kills_in_the_middle_of_a_roll_lose_nothing(fleet, waiting):
    made = fleet(size=3)
    daemon = made.daemon
    before = made.pids("jobs")
    killed = threading.Event()
    module, go_on = Path(daemon.folder, "jobs.py"), Path(daemon.folder, "go-on")
    module.write_text(module.read_text() + LOADS_UNTIL.format(path=str(go_on)))

    def kill_some() -> None:
        """Kill both fork servers, as soon as there are two, and a worker or two."""
        waiting("two fork servers", lambda: len(fork_servers_of(daemon, "jobs")) > 1)
        for process in fork_servers_of(daemon, "jobs"):
            process.kill()
        go_on.touch()
        for worker in daemon.pool("jobs").workers[:2]:
            if worker.pid:
                os.kill(worker.pid, signal.SIGKILL)
        killed.set()

    with daemon.client() as client:
        handles = client.submit_many([("jobs.nap", {"seconds": 0.02})] * 300)
        client.flush()
        made.config["pools"]["jobs"]["env"] = {"COLOUR": "blue"}
        made.write()
        killer = threading.Thread(target=kill_some)
        killer.start()
        done = daemon.ctl("reload")
        killer.join()
        assert killed.is_set()
        results = [handle.result(60) for handle in handles]
    assert done.returncode == 0, done.stderr
    assert len(results) == 300
    waiting(
        "all workers are back",
        lambda: [each.state for each in daemon.pool("jobs").workers] == ["RUNNING"] * 3,
    )
    assert not set(before) & set(made.pids("jobs"))
    assert daemon.pool("jobs").failed == 0
    waiting("one fork server is left", lambda: len(fork_servers_of(daemon, "jobs")) == 1)


def test_a_shutdown_in_the_middle_of_a_roll_is_clean(fleet, waiting):
    made = fleet(size=2)
    daemon = made.daemon
    with daemon.client() as client:
        handles = client.submit_many([("jobs.nap", {"seconds": 0.05})] * 100)
        client.flush()
        made.config["pools"]["jobs"]["env"] = {"COLOUR": "blue"}
        made.write()
        daemon.ask(rpc.Reload(no_block=True))
        waiting("it rolls", lambda: "event=pool.rolling" in daemon.log())
        assert daemon.stop() == 0
        daemon.start()
        assert len([handle.result(60) for handle in handles]) == 100


def test_reload_is_refused_during_a_shutdown_and_status_tells_of_a_roll(fleet, waiting):
    made = fleet(size=1)
    daemon = made.daemon
    with daemon.client() as client:
        client.submit("jobs.nap", {"seconds": 3})
        waiting("it runs", lambda: daemon.worker("jobs/0").state == "BUSY")
        made.config["pools"]["jobs"]["env"] = {"COLOUR": "blue"}
        made.write()
        daemon.ask(rpc.Reload(no_block=True))
        waiting("status says so", lambda: "replaced" in daemon.pool("jobs").reason)
        waiting("it is done", lambda: not daemon.pool("jobs").reason)
        assert daemon.worker("jobs/0").state == "RUNNING"
        begun = daemon.folder / "begun"
        client.submit("jobs.nap", {"seconds": 3, "tell": str(begun)})
        waiting("it runs", begun.exists)
        daemon.process.terminate()
        waiting("it drains", lambda: daemon.status().state == "draining")
        done = daemon.ctl("reload")
        assert done.returncode == 1
        assert "shutting down" in done.stderr
