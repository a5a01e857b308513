"""Every command with --json on a real daemon: all keys are there, and those of the schema."""

import json
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor import ctl
from support import json_answers
from support.daemon import Jobs, Muster
from support.waiting import Waiting


class Answers:
    """Ask a daemon, and keep which commands were asked."""

    def __init__(self, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._socket = socket
        self._capsys = capsys
        self.asked: set[str] = set()

    def __call__(self, *words: str, code: int = 0, silent: bool = False) -> Any:
        found = ctl.main(["-s", self._socket, "--json", *words])
        out, err = self._capsys.readouterr()
        assert found == code, (words, out, err)
        assert out or silent, words
        self.asked.add(command := json_answers.check(words, out))
        if command in json_answers.LINES:
            return [json.loads(line) for line in out.splitlines()]
        return json.loads(out)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "sites.csv"
    path.write_text(
        "name,url,task\nkites,https://shop.example/,jobs.visit\nbad,no address,nopool.echo\n"
    )
    return path


def test_every_command_prints_what_the_schema_says(
    jobs: Jobs, waiting: Waiting, capsys: pytest.CaptureFixture[str], csv: Path
) -> None:
    daemon = jobs(
        2,
        alerts__ops={"command": ["/bin/false"], "on": ["task.dead"]},
        sessions__acme={"args": {}},
        schedule__hourly={"task": "jobs.echo", "every": "1h", "notify": "task.changed"},
    )
    ask = Answers(daemon.control_socket, capsys)
    about_workers(ask, daemon, waiting)
    about_tasks(ask, waiting)
    about_sites(ask)
    about_schedules(ask, waiting, csv)
    about_the_daemon(ask, waiting)
    assert daemon.process is not None
    assert daemon.process.wait(60) == 0
    assert ask("status", code=4)["error"]["data"] is None
    whole = set(json_answers.schema()["properties"]) - {"error"}
    rest = {name for name in whole if name.startswith("cluster ") or " --" in name}
    assert whole - rest == ask.asked


def about_workers(ask: Answers, daemon: Muster, waiting: Waiting) -> None:
    (pool,) = ask("status")["pools"]
    assert pool["workers"][0]["name"] == "jobs/0"
    for command in ("stop", "start", "restart", "reset", "pause", "drain", "resume"):
        assert ask(command, "jobs/1")["slots"] != [], command
    ask("scale", "jobs", "2")
    ask("signal", "USR1", "jobs/0")
    assert ask("pid")["supervisor"] == daemon.pid
    waiting("it says where it is", lambda: ask("tail")["workers"])
    assert ask("tail")["workers"][0]["name"] == "jobs/0"
    ask("memory")
    ask("top")


def about_tasks(ask: Answers, waiting: Waiting) -> None:
    done = ask("submit", "jobs.echo", "value=[1]", "--wait")
    assert (done["value"], done["state"], done["failure"]) == ([1], "succeeded", None)
    failed = ask("submit", "jobs.fail", "text=no price", "--wait", code=1)
    ask("submit", "jobs.echo", "--delay", "600", "--id", "later")
    later = ask("task", "later")
    assert (later["submitted_at"] is None, later["finished_at"]) == (False, None)
    assert ask("task", failed["id"])["failure"]["type"] == "ValueError"
    ask("task", "nobody", code=4)
    assert len(ask("tasks")["tasks"]) == 3
    assert ask("dead")["tasks"][0]["id"] == failed["id"]
    assert ask("cancel", "later")["tasks"][0]["state"] == "cancelled"
    ask("retry", failed["id"])
    waiting("it failed again", lambda: ask("task", failed["id"])["state"] == "failed")
    ask("purge", "--all")
    ask("cache", "clear")


def about_sites(ask: Answers) -> None:
    assert ask("breaker")["breakers"] == []
    assert ask("breaker", "open", "site.example")["open_seconds"] is None, "it never closes itself"
    for action in ("close", "disable", "reset"):
        assert ask("breaker", action, "site.example")["open_seconds"] == 0.0
    (session,) = ask("sessions")["sessions"]
    assert (session["login_seconds"], session["saved_seconds"]) == (None, None)
    ask("sessions", "forget", "acme")
    ask("sessions", "reset", "acme")


def about_schedules(ask: Answers, waiting: Waiting, csv: Path) -> None:
    (hourly,) = ask("schedule")["schedules"]
    assert (hourly["last_at"], hourly["next_at"] is None) == (None, False)
    assert ask("schedule", "pause", "hourly")["next_at"] is None
    ask("schedule", "resume", "hourly")
    keys = ("--task", "jobs.echo", "--cron", "0 0 1 1 *", "--notify", "task.changed")
    for price in (1, 2):
        ask("schedule", "add", "mine", *keys, f'value={{"price": {price}}}')
        ask("schedule", "run", "mine")
        waiting("it ran", lambda: _succeeded(ask, "mine"))
    ask("schedule", "edit", "mine", "value=3")
    (change,) = waiting("it is told", lambda: ask("changes", silent=True))
    assert change["fields"]["price"] == {"before": 1, "after": 2}
    assert change["again"] is False
    assert [each["changed"] for each in ask("history", "mine")["entries"]] == [False, True]
    ask("schedule", "remove", "mine")
    report = ask("import", str(csv), code=1)
    assert [len(report[key]) for key in ("made", "refused")] == [1, 1]


def _succeeded(ask: Answers, name: str) -> bool:
    found = [each for each in ask("schedule")["schedules"] if each["name"] == name]
    return bool(found[0]["last_state"] == "succeeded")


def about_the_daemon(ask: Answers, waiting: Waiting) -> None:
    waiting("the process of alerts has reported", lambda: ask("alerts")["pid"])
    assert ask("alerts", "test", "ops", code=1)["error"]
    assert [each["name"] for each in ask("alerts")["alerts"]] == ["ops"]
    for command in ("version", "clock", "reread"):
        ask(command)
    ask("clock", "accept")
    ask("reload", "jobs")
    ask("update")
    events = ask("events")
    assert {"info"} <= {each["level"] for each in events} <= {"info", "warning", "error"}
    ask("shutdown")
