"""A real journald: fields, explanations, stories of tasks, and a journald that reads nothing."""

import json
import re
from typing import Any

import pytest

from bed.host import Host
from support.waiting import Waiting

WORKERS = """
import os

from musterd import Worker, task


class Noisy(Worker):
    @task
    def add(self, ctx, a: int, b: int) -> int:
        return a + b

    @task(max_retries=1, retry_on=(ValueError,))
    def fail(self, ctx, text: str) -> None:
        raise ValueError(text)

    @task
    def die(self, ctx) -> None:
        print("my last words")
        os.kill(os.getpid(), 9)

    @task(max_retries=0)
    def leak(self, ctx, api_key: str) -> None:
        ctx.log.warning("signing with %s", api_key)
        raise RuntimeError(f"https://shop.example/?key={api_key} says no")

    @task
    def talk(self, ctx, lines: int) -> None:
        for number in range(lines):
            print("line", number, "x" * 200)
"""
SECRET = "k-98765-very-secret"


def start(host: Host, **settings: Any) -> Any:
    host.write("/srv/bed/noisy.py", WORKERS)
    host.drop_in(f"[Service]\nEnvironment=SHOP_KEY={SECRET}\n")
    pool = {"worker": "noisy:Noisy", "size": 2, "secrets": ["SHOP_KEY"]}
    host.configure({"noisy": pool}, retry__base="10ms", **settings)
    host.start()
    return host


@pytest.fixture
def daemon(host: Host) -> Any:
    return start(host)


def entries(daemon: Host, *words: str) -> list[dict[str, Any]]:
    lines = daemon.run("journalctl", "--no-pager", "-o", "json", *words, check=False).stdout
    return [json.loads(line) for line in lines.splitlines()]


def events(daemon: Host, task: str) -> list[str]:
    found = entries(daemon, f"MUSTERD_TASK={task}")
    return [each["MUSTERD_EVENT"].removeprefix("task.") for each in found]


def test_a_task_tells_what_went_wrong_and_how_it_ended(daemon: Host, waiting: Waiting) -> None:
    task = daemon.submit("noisy.fail", "text=boom", "--target", "site.example")
    waiting("it is dead", lambda: "failed" in events(daemon, task))
    assert events(daemon, task) == ["retry", "failed"]


def test_a_task_tells_its_whole_story_where_it_is_asked_for(host: Host, waiting: Waiting) -> None:
    daemon = start(host, supervisor__log_level="debug")
    task = daemon.submit("noisy.fail", "text=boom", "--target", "site.example")
    waiting("it is dead", lambda: "failed" in events(daemon, task))
    assert events(daemon, task) == ["queued", "started", "retry", "started", "failed"]
    queued, started, retry, again, failed = entries(daemon, f"MUSTERD_TASK={task}")
    for each in (queued, started, retry, again, failed):
        assert each["_SYSTEMD_UNIT"] == "musterd.service"
        assert each["SYSLOG_IDENTIFIER"] == "musterd"
        assert (each["MUSTERD_POOL"], each["MUSTERD_TARGET"]) == ("noisy", "site.example")
    assert started["MUSTERD_WORKER"].startswith("noisy/")
    assert (started["MUSTERD_ATTEMPT"], again["MUSTERD_ATTEMPT"]) == ("1", "2")
    assert (retry["PRIORITY"], failed["PRIORITY"]) == ("6", "4")
    assert retry["MUSTERD_REASON"] == "ValueError: boom"
    assert failed["MESSAGE"].startswith("task is dead: it is not retried task=")


def test_what_an_operator_meets_is_explained_with_what_to_type(
    daemon: Host, waiting: Waiting
) -> None:
    task = daemon.submit("noisy.die")
    waiting("it is dead", lambda: "failed" in events(daemon, task))
    crashes = entries(daemon, "MUSTERD_EVENT=worker.crashed")
    worker = crashes[0]["MUSTERD_WORKER"]
    assert "my last words" in crashes[0]["MUSTERD_OUTPUT"]
    shown = daemon.run("journalctl", "--no-pager", "-x", "-u", "musterd").stdout
    assert f"Subject: Worker {worker} crashed" in shown
    assert f"musterctl tail -n 50 {worker}" in shown
    assert f"musterctl retry {task}" in shown
    daemon.run("systemctl", "stop", "musterd")
    shown = daemon.run("journalctl", "--no-pager", "-x", "-u", "musterd").stdout
    assert "The daemon is stopping: drain" in shown
    assert not re.findall(r"@MUSTERD_\w+@", shown), "a field that is not there"


def test_a_secret_is_not_in_the_journal(daemon: Host, waiting: Waiting) -> None:
    task = daemon.submit("noisy.leak", 'api_key={"$secret": "SHOP_KEY"}')
    waiting("it is dead", lambda: "failed" in events(daemon, task))
    waiting("its line is there", lambda: "signing with" in daemon.journal("-u", "musterd"))
    assert SECRET not in daemon.run("journalctl", "--no-pager", "-a", "-o", "json").stdout
    assert "***SHOP_KEY***" in daemon.journal("-u", "musterd")


def test_a_journald_that_is_stopped_holds_up_no_task_and_not_the_end(
    daemon: Host, waiting: Waiting
) -> None:
    daemon.submit("noisy.add", "a=1", "b=1", "--wait")
    journald = daemon.show("systemd-journald", "MainPID")
    daemon.run("kill", "-STOP", journald)
    try:
        for number in range(8):  # more than its socket and our buffers hold
            daemon.ctl("submit", "noisy.talk", "lines=400", "--wait")
            done = daemon.ctl("submit", "noisy.add", f"a={number}", "b=1", "--wait")
            assert done.stdout.strip().endswith(str(number + 1))
        assert daemon.ctl("status").returncode == 0
    finally:
        daemon.run("kill", "-CONT", journald)
    task = daemon.submit("noisy.add", "a=1", "b=2", "--wait", "--id", "after-the-pause")
    assert task.endswith("3")
    waiting("it is in the journal", lambda: "succeeded" in events(daemon, "after-the-pause"))
    daemon.run("kill", "-STOP", journald)
    try:
        daemon.ctl("submit", "noisy.talk", "lines=2000", "--wait")
        daemon.run("kill", str(daemon.main_pid()))
        waiting("it has ended", lambda: daemon.show("musterd", "MainPID") == "0")
        assert daemon.show("musterd", "ExecMainStatus") == "0"
    finally:
        daemon.run("kill", "-CONT", journald)


def test_members_of_the_groups_and_strangers_at_the_socket(daemon: Host) -> None:
    for group in ("operators", "watchers"):
        daemon.run("groupadd", group)
    daemon.run("usermod", "-a", "-G", "operators", "musterd")  # may give the socket to them
    for user, groups in (("ann", "operators"), ("bob", "watchers"), ("eve", "")):
        daemon.run("useradd", "-m", user, *(["-G", groups] if groups else []))
    daemon.configure(
        {"noisy": {"worker": "noisy:Noisy", "size": 2}},
        supervisor__control_group="operators",
        supervisor__view_group="watchers",
    )
    daemon.run("systemctl", "restart", "musterd")
    assert daemon.ctl("restart", "noisy:*", user="ann").returncode == 0
    for words in (["status"], ["memory"], ["events"]):
        assert daemon.ctl(*words, user="bob").returncode == 0
    refused = daemon.ctl("stop", "noisy", user="bob", check=False)
    assert refused.returncode == 1
    assert "is in group watchers, which may only look" in refused.stderr
    refused = daemon.ctl("status", user="eve", check=False)
    assert refused.returncode == 1
    assert "not in group operators or watchers: use sudo" in refused.stderr
