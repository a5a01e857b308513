"""A daemon for a module of tests: started, used, killed, and gone with the tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from musterd import Client, ConfigurationError, TaskFailed
from musterd.ipc.wire.paths import TASKS_VARIABLE
from musterd.testing import DaemonFailed, start_daemon
from support.daemon import is_gone
from support.waiting import wait_for

END_SECONDS = 60.0
SLEEPER = """
import time
from musterd import Worker, task

class Sleeper(Worker):
    def open(self):
        if self.options.get("fails"):
            raise ValueError("no browser here")

    @task
    def nap(self, ctx, seconds: float) -> float:
        print("naps", flush=True)
        time.sleep(seconds)
        return seconds

    @task
    def key(self, ctx) -> int:
        return len(ctx.secret("SHOP_KEY"))
"""


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a worker in a module of the tests."""
    (tmp_path / "sleepers.py").write_text(SLEEPER)
    monkeypatch.syspath_prepend(tmp_path)
    return "sleepers:Sleeper"


def family_of(folder: str | Path) -> list[psutil.Process]:
    """Return the keeper of a directory, its daemon, and all that it has started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(folder) in words and any(word.endswith("keeper.py") for word in words):
                return [process, *process.children(recursive=True)]
    return []


def gone(folder: str | Path, family: list[psutil.Process]) -> bool:
    return not os.path.exists(folder) and all(map(is_gone, family))


def test_a_daemon_is_there_for_clients_and_people_and_leaves_nothing(sleeper: str) -> None:
    assert TASKS_VARIABLE not in os.environ
    pools = {"sleepers": {"worker": sleeper, "size": 2}}
    with start_daemon(pools=pools, secrets={"SHOP_KEY": "k3y"}) as daemon:
        with Client() as client:
            assert client.submit("sleepers.nap", {"seconds": 0}).result(timeout=60) == 0
        assert daemon.client().submit("sleepers.key").result(timeout=60) == 3
        assert "2/2" in daemon.ctl("status").stdout
        assert daemon.ctl("task", "nothing").returncode != 0
        assert [pool.name for pool in daemon.status().pools] == ["sleepers"]
        assert "naps" in daemon.log
        family = family_of(daemon.folder)
        assert len(family) > 4, "keeper, daemon, fork server, inits, workers"
    assert TASKS_VARIABLE not in os.environ
    assert gone(daemon.folder, family)


def test_a_daemon_that_is_killed_goes_on_with_what_it_had(sleeper: str) -> None:
    with start_daemon(pools={"sleepers": {"worker": sleeper}}) as daemon:
        client = daemon.client()
        nap = client.submit("sleepers.nap", {"seconds": 0.5})
        nap.ack(timeout=60)
        before = daemon.pid
        daemon.kill()
        assert daemon.pid == 0
        daemon.start()
        assert daemon.pid not in (0, before)
        assert nap.result(timeout=60) == 0.5
        family = family_of(daemon.folder)
        assert daemon.stop() == 0
    assert gone(daemon.folder, family)


def test_what_runs_at_the_end_of_the_tests_delays_it_little(sleeper: str) -> None:
    with start_daemon(pools={"sleepers": {"worker": sleeper}}) as daemon:
        nap = daemon.client().submit("sleepers.nap", {"seconds": 3600}, timeout=7200)
        nap.ack(timeout=60)
        wait_for("it naps", lambda: "naps" in daemon.log)
        family = family_of(daemon.folder)
    assert gone(daemon.folder, family)


def test_the_users_configuration_holds_but_reaches_nobody(
    sleeper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTERD_RETRY__MAX_RETRIES", "7")  # of the developer's own daemon
    config = tmp_path / "musterd.toml"
    config.write_text(
        f"""
        [supervisor]
        log_level = "debug"
        log_file = "/nonexistent/musterd.log"
        control_group = "no-such-group"
        [retry]
        max_retries = 0
        [pools.sleepers]
        worker = "{sleeper}"
        size = 3
        [http]
        listen = "127.0.0.1:1"
        [cluster]
        url_file = "/nonexistent"
        [alerts.me]
        on = ["task.dead"]
        url = "json://127.0.0.1:1/"
        [[schedule]]
        name = "often"
        task = "sleepers.nap"
        args = {{seconds = 0}}
        every = "1h"
        """
    )
    with start_daemon(config, pools={"sleepers": {"size": 1}}) as daemon:
        [pool] = daemon.status().pools
        assert (pool.name, pool.size) == ("sleepers", 1)
        assert "often" not in daemon.ctl("schedule", "list").stdout
        with pytest.raises(TaskFailed) as failed:
            daemon.client().submit("sleepers.key").result(timeout=60)
        assert failed.value.attempts == 1
    with start_daemon(config, keep=["schedule"]) as daemon:
        assert "often" in daemon.ctl("schedule", "list").stdout
    with (
        pytest.raises(ConfigurationError, match=r"keep=\['schedules'\]: there are alerts"),
        start_daemon(config, keep=["schedules"]),
    ):
        pass


@pytest.fixture
def own_temporary(tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a temporary directory of this test: others make folders in the usual one.

    `tmp_path` comes first: pytest makes the folder of all tests with it, in the usual place.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))


def folders_of_tests() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("musterd-test-*"))


@pytest.mark.usefixtures("own_temporary")
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"config": {"retry": {"max_retrys": 1}}}, ConfigurationError, "key 'retry.max_retrys'"),
        ({"config": "nothing.toml"}, ConfigurationError, "there is no configuration nothing"),
        (
            {"pools": {"p": {"worker": "no:Body"}}},
            DaemonFailed,
            "pool p is FATAL: .*no module",
        ),
        (
            {"pools": {"p": {"worker": "sleepers:Sleeper", "options": {"fails": True}}}},
            DaemonFailed,
            "p/0 fails: .*no browser here",
        ),
        ({"pools": {"p": {"worker": "x", "sise": 1}}}, ConfigurationError, "pools.p.sise"),
    ],
)
def test_a_daemon_that_cannot_work_is_told_with_its_reason(
    given: dict[str, object],
    error: type[Exception],
    words: str,
    sleeper: str,
) -> None:
    with pytest.raises(error, match=words), start_daemon(**given):  # type: ignore[arg-type]
        pass
    assert not folders_of_tests()


TEST = """
import os
import pytest
from sleepers import Sleeper

@pytest.fixture(scope="module")
def daemon(musterd_daemon):
    return musterd_daemon(pools={"sleepers": {"worker": Sleeper, "size": 2}})

def test_it_works(daemon):
    assert daemon.client().submit("sleepers.nap", {"seconds": 0}).result(timeout=60) == 0

def test_it_is_the_same_one(daemon):
    print("FOLDER", daemon.folder, flush=True)
    assert [pool.succeeded for pool in daemon.status().pools] == [1]

def test_it_hangs(daemon):
    naps = [daemon.client().submit("sleepers.nap", {"seconds": 3600}) for _ in range(4)]
    naps[-1].ack(timeout=60)
    print("HANGS", os.getpid(), flush=True)
    naps[0].result()

def test_it_fails(daemon):
    assert daemon.pid == 0
"""


@pytest.fixture
def tests(tmp_path: Path, sleeper: str) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start pytest in a directory with a worker and its tests."""
    (tmp_path / "test_sleepers.py").write_text(textwrap.dedent(TEST))
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "-s",
            *arguments,
        ]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_module_shares_a_daemon_and_sees_its_log_with_a_failure(
    tests: Callable[..., "subprocess.Popen[str]"],
) -> None:
    process = tests("-k", "not hangs")
    output, _ = process.communicate(timeout=END_SECONDS)
    assert "1 failed, 2 passed" in output
    assert "- musterd log -" in output
    assert "worker is ready" in output
    [folder] = re.findall(r"FOLDER (\S+)", output)
    wait_for("nothing is left", lambda: gone(folder, family_of(folder)), END_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_tests_are_killed(
    number: signal.Signals, tests: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = tests("-k", "not fails")
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if "HANGS" in line:
            break
    [folder] = re.findall(r"FOLDER (\S+)", output) or [output]
    family = family_of(folder)
    assert len(family) > 4, output
    os.killpg(process.pid, number)  # as a terminal does, and a CI
    process.wait(END_SECONDS)
    wait_for("nothing is left", lambda: gone(folder, family), END_SECONDS)


def test_nothing_runs_when_the_keeper_is_killed(sleeper: str) -> None:
    with start_daemon(pools={"sleepers": {"worker": sleeper}}) as daemon:
        family = family_of(daemon.folder)
        family[0].kill()
        wait_for("nothing runs", lambda: all(map(is_gone, family)), END_SECONDS)
    assert not daemon.folder.exists()
