"""Alerts sent by real processes: a daemon, a web hook on loopback, commands, and kills."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd import TaskFailed
from musterd.supervisor.api import rpc
from support.daemon import Jobs, Muster, Musters
from support.surroundings import Survivors
from support.waiting import Waiting

TOKEN = "s3cretT0kenOfABot"


class Hook:
    """A web hook that keeps the requests it gets."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        self.stall = threading.Event()  # set: answer at once
        self.stall.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.stall.wait(60)
                hook.paths.append(self.path)
                if hook.status == 200:
                    hook.heard.append(json.loads(body))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(hook.status)
                    self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.port}/hook"

    def titles(self) -> list[str]:
        return [each["title"].partition(": ")[2] for each in self.heard]

    def bodies(self) -> str:
        return "\n".join(each["message"] for each in self.heard)

    def close(self) -> None:
        self.stall.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


@pytest.fixture
def alerted(jobs: Jobs) -> Callable[..., Any]:
    """Make a daemon with one alert `ops`; the arguments set its fields."""

    def make(*, start: bool = True, size: int = 1, **alert: Any) -> Any:
        fields = {"on": ["breaker.*", "task.dead", "daemon.*"], "group": "100ms", **alert}
        return jobs(size, start=start, alerts__ops=fields)

    return make


def process_of(muster: Muster) -> psutil.Process:
    """Return the process that sends alerts."""
    found = []
    for process in muster.processes():
        with contextlib.suppress(psutil.Error):  # a courier that has ended
            if "musterd: alerts" in " ".join(process.cmdline()):
                found.append(process)
    assert len(found) == 1
    return found[0]


def speaks(muster: Muster) -> dict[str, Any] | None:
    """Return the state of the alert, once the alert process has reported it."""
    status = muster.ask(rpc.ListAlerts())
    return status["alerts"][0] if status["pid"] else None


def up(muster: Muster, waiting: Waiting) -> Any:
    waiting("the alert process speaks", lambda: speaks(muster))
    return muster


# -- delivery ---------------------------------------------------------------------------------


def test_a_breaker_that_opens_and_closes_is_told_twice(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    muster.ask(rpc.SetBreaker(target="site.example", command="open"))
    waiting("it is told", lambda: hook.titles() == ["breaker.forced_open site.example"])
    (shown,) = waiting("it is shown", lambda: speaks(muster)["open"])
    assert (shown["kind"], shown["stage"]) == ("breaker.forced_open", "told")
    muster.ask(rpc.SetBreaker(target="site.example", command="close"))
    waiting("its end is told", lambda: len(hook.heard) == 2)
    assert "resolved: breaker.forced_open site.example after" in hook.heard[1]["message"]
    assert [each["type"] for each in hook.heard] == ["failure", "success"]


FRAGILE = """
import os
from pathlib import Path
from musterd import Worker, task

class Fragile(Worker):
    def open(self):
        if Path("broken").exists():
            os._exit(3)

    @task
    def echo(self, ctx) -> None: ...
"""


def test_a_worker_that_is_given_up_is_told_and_so_is_that_it_is_back(
    muster: Musters, hook: Hook, waiting: Waiting
) -> None:
    restart = {"base": "10ms", "max": "20ms", "limit": 2, "pause_after": 100}
    pools = {"frail": {"worker": "fragile:Fragile", "size": 1, "restart": restart}}
    alert = {"url": hook.url, "on": ["worker.fatal"], "group": "100ms"}
    made = muster(pools, start=False, alerts__ops=alert)
    Path(made.folder, "fragile.py").write_text(FRAGILE)
    up(made.start(), waiting)
    Path(made.folder, "broken").touch()
    os.kill(made.worker("frail/0").pid, signal.SIGKILL)
    waiting("it is told", lambda: hook.titles() == ["worker.fatal frail/0"])
    assert "the worker keeps failing and stays down until it is reset" in hook.bodies()
    Path(made.folder, "broken").unlink()
    made.ask(rpc.Reset(names=["frail/0"]))
    waiting("its end is told", lambda: hook.titles()[1:] == ["resolved: worker.fatal frail/0"])


def test_dead_tasks_are_told_together_with_why(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url, on=["task.dead"], group="1s"), waiting)
    client = muster.client()
    handles = [client.submit("jobs.fail", {"text": f"no page {n}"}) for n in range(50)]
    for handle in handles:
        with pytest.raises(TaskFailed):
            handle.result(timeout=30)
    waiting("it is told", lambda: hook.heard)
    assert hook.titles()[0] == "task.dead jobs"
    assert "ValueError: no page" in hook.bodies()
    waiting("each is counted", lambda: counted(muster, hook) == 50)


def counted(muster: Muster, hook: Hook) -> int:
    """Count the dead tasks that were told and those that wait to be told."""
    told = [int(n) for n in re.findall(r"\((\d+) times\)", hook.bodies())]
    waits = [each["times"] for each in speaks(muster)["open"]]
    return sum(told) + sum(waits)


def test_a_test_message_is_delivered_and_a_failure_says_why(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    done = muster.ctl("alerts", "test", "ops")
    assert (done.returncode, done.stdout) == (0, "ops: the test message was delivered\n")
    assert hook.titles() == ["test of alert ops"]
    hook.status = 500
    done = muster.ctl("alerts", "test", "ops")
    assert done.returncode == 1
    assert "was not delivered" in done.stderr
    assert muster.ctl("alerts", "test", "nobody").returncode == 4
    shown = muster.ctl("alerts").stdout
    assert "ops" in shown
    assert "json://..." in shown


def test_a_command_gets_the_message_as_json(
    alerted: Callable[..., Muster], waiting: Waiting, tmp_path: Path
) -> None:
    program = tmp_path / "tell"
    program.write_text(f"#!/bin/sh\ncat >> {tmp_path}/heard\n")
    program.chmod(0o755)
    muster = up(alerted(command=[str(program), "me"]), waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    heard = tmp_path / "heard"
    waiting("the command has run", lambda: heard.exists() and heard.read_text().endswith("\n"))
    told = json.loads(heard.read_text())
    assert told["alert"] == "ops"
    assert told["began"][0]["subject"] == "a"
    assert "breaker.forced_open a" in told["body"]


# -- trouble ----------------------------------------------------------------------------------


def test_a_command_that_hangs_is_killed_with_everything_it_started(
    alerted: Callable[..., Muster], waiting: Waiting, tmp_path: Path, survivors: Survivors
) -> None:
    program = tmp_path / "hang"
    program.write_text(
        f"""#!{sys.executable}
import os, signal, time
fd = os.open({str(survivors.path)!r}, os.O_WRONLY)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
os.write(fd, b"x")
time.sleep(600)
"""
    )
    program.chmod(0o755)
    muster = up(alerted(command=[str(program)], timeout="1s"), waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    survivors.wait_until_up()
    waiting("the failure is shown", lambda: "timeout" in speaks(muster)["error"])
    assert speaks(muster)["failures"] >= 1


def test_a_destination_that_fails_is_tried_again_and_counted(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    hook.status = 503
    muster = up(alerted(url=hook.url), waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    waiting("it was tried", lambda: speaks(muster)["state"] == "failing")
    assert "503" in speaks(muster)["error"]
    hook.status = 200
    waiting("it is delivered", lambda: hook.titles() == ["breaker.forced_open a"])
    waiting("that is shown", lambda: speaks(muster)["sent"] == 1)
    assert speaks(muster)["failures"] >= 1
    assert speaks(muster)["error"] == ""


def test_a_slow_destination_holds_up_neither_tasks_nor_control(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    hook.stall.clear()
    muster = up(alerted(url=hook.url, timeout="60s"), waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    waiting("it is on its way", lambda: speaks(muster)["state"] == "sending")
    assert muster.client().submit("jobs.echo", {"value": 7}).result(timeout=30) == 7
    assert muster.status().state == "running"
    assert hook.heard == []
    assert muster.stop() == 0  # although a delivery still waits for the hook


def test_the_supervisor_that_does_not_answer_is_an_alert(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    os.kill(muster.pid, signal.SIGSTOP)
    try:
        waiting("it is told", lambda: "daemon.silent" in hook.titles(), 60)
    finally:
        os.kill(muster.pid, signal.SIGCONT)
    waiting("its end is told", lambda: "resolved: daemon.silent" in hook.titles())


# -- over a restart -----------------------------------------------------------------------------


def test_a_killed_alert_process_comes_back_and_neither_repeats_nor_forgets(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    waiting("it is told", lambda: speaks(muster)["sent"] == 1)
    first = process_of(muster)
    first.kill()
    muster.ask(rpc.SetBreaker(target="b", command="open"))  # while no alert process runs
    waiting("what was missed is told", lambda: "breaker.forced_open b" in hook.titles())
    muster.ask(rpc.SetBreaker(target="a", command="close"))
    waiting("the end is told", lambda: "resolved: breaker.forced_open a" in hook.titles())
    assert hook.titles().count("breaker.forced_open a") == 1
    assert process_of(muster).pid != first.pid


def test_a_killed_daemon_is_told_and_open_alerts_are_not_repeated(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting, gone: Callable[..., bool]
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    waiting("it is told", lambda: speaks(muster)["sent"] == 1)
    orphan = process_of(muster)
    muster.kill()
    muster.start()
    waiting("the crash is told", lambda: "daemon.crashed" in hook.bodies())
    waiting("the former process has left", lambda: gone(orphan))
    up(muster, waiting)
    muster.ask(rpc.SetBreaker(target="a", command="close"))
    waiting("the end is told", lambda: "resolved: breaker.forced_open a" in hook.bodies())
    assert hook.titles().count("breaker.forced_open a") == 1


def test_a_daemon_that_stays_dead_is_told(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    orphan = process_of(muster)
    muster.kill()
    waiting("it is told", lambda: "daemon.silent" in hook.titles(), 60)
    assert "it was killed" in hook.bodies()
    orphan.kill()
    muster.start()
    waiting("its end is told", lambda: "resolved: daemon.silent" in hook.bodies())


def test_a_stopped_and_started_daemon_is_no_alert(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    assert muster.stop() == 0
    muster.start()
    up(muster, waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    waiting("that is told", lambda: hook.titles() == ["breaker.forced_open a"])


def test_a_reload_changes_the_alerts(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting
) -> None:
    muster = up(alerted(url=hook.url), waiting)
    config = json.loads(muster.config_path.read_text())
    config["alerts"]["ops"]["on"] = ["pool.paused"]
    config["alerts"]["night"] = {"url": hook.url, "on": ["pool.paused"], "group": "100ms"}
    muster.config_path.write_text(json.dumps(config))
    muster.ask(rpc.Reload())
    waiting("both are there", lambda: len(muster.ask(rpc.ListAlerts())["alerts"]) == 2)
    muster.ask(rpc.Pause(names=["jobs"]))
    waiting("both tell", lambda: hook.titles() == ["pool.paused jobs"] * 2)
    config["alerts"] = {}
    muster.config_path.write_text(json.dumps(config))
    muster.ask(rpc.Reload())
    waiting("there is no process", lambda: "musterd: alerts" not in str(command_lines(muster)))
    assert "no alerts" in muster.ctl("alerts").stdout


def command_lines(muster: Muster) -> list[list[str]]:
    found = []
    for process in muster.processes():
        with contextlib.suppress(psutil.Error):
            found.append(process.cmdline())
    return found


# -- secrets ----------------------------------------------------------------------------------


def test_the_url_is_in_no_log_no_answer_and_no_list_of_processes(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting, tmp_path: Path
) -> None:
    url_file = tmp_path / "url"
    url_file.write_text(f"json://user:{TOKEN}@127.0.0.1:{hook.port}/{TOKEN}/x\n")
    url_file.chmod(0o600)
    hook.status = 401
    muster = up(alerted(url_file=str(url_file)), waiting)
    muster.ask(rpc.SetBreaker(target="a", command="open"))
    seen = waiting("a courier is seen", lambda: "courier" in (seen := str(listed())) and seen)
    waiting("it was refused", lambda: speaks(muster)["error"])
    assert hook.paths[0] == f"/{TOKEN}/x"
    shown = muster.ctl("--json", "alerts").stdout + muster.ctl("alerts").stdout
    assert "401" in shown
    state = (muster.state / "alerts.json").read_text()
    for text in (muster.log(), shown, seen, str(command_lines(muster)), state):
        assert TOKEN not in text
    url_file.write_text(hook.url)  # a new url needs no reload
    hook.status = 200
    waiting("it is delivered", lambda: hook.heard)


def test_a_destination_that_cannot_work_is_told_at_the_start(
    alerted: Callable[..., Muster], hook: Hook, waiting: Waiting, tmp_path: Path
) -> None:
    """Else people hear of it when the first alert does not come."""
    url_file = tmp_path / "url"
    muster = up(alerted(url_file=str(url_file), start=False).start(), waiting)
    why = f"url_file {url_file} is missing or empty"
    assert f"alert ops: nothing can be delivered: {why}" in muster.log()
    assert "failing" in muster.ctl("alerts").stdout
    assert f"ops: not delivered: {why}" in muster.ctl("alerts").stdout
    url_file.write_text(hook.url)
    url_file.chmod(0o600)
    assert muster.ctl("alerts", "test", "ops").returncode == 0
    waiting("all is well", lambda: "idle" in muster.ctl("alerts").stdout)


def listed() -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.append(process.cmdline())
    return found
