"""Schedules of a real daemon: across kill -9, run by hand, and their messages."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Muster

ROOT = Path(__file__).resolve().parents[2]
EVERY_NS = 200_000_000
WATCH = """
from pathlib import Path
from musterd import Worker, task

class Watch(Worker):
    @task(max_retries=0)
    def read(self, ctx, path: str) -> str:
        return Path(path).read_text()
"""


def schedules(daemon: Muster) -> dict[str, dict[str, Any]]:
    done = daemon.ctl("--json", "schedule")
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["schedules"]}


def changes(daemon: Muster) -> list[dict[str, Any]]:
    lines = daemon.ctl("--json", "events").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["event"] == "task.changed"]


def instant_of(task_id: str) -> int:
    return int(task_id.rpartition(".")[2], 16)


def test_every_instant_is_run_or_counted_over_kill_9(jobs, waiting, short_folder):
    ran = short_folder / "ran"
    ran.touch()
    nap = {"seconds": 0, "tell": str(ran)}
    daemon = jobs(schedule__quick={"task": "jobs.nap", "every": "200ms", "args": nap})

    def lines() -> int:
        return len(ran.read_text().splitlines())

    def settled() -> tuple[int, int]:
        """Return the last instant that was served, and how many there were so far."""
        status = schedules(daemon)["quick"]
        return round(status["next_at"] * 1e9) - EVERY_NS, status["runs"] + status["skipped"]

    waiting("it runs", lines)
    first_ns, first_count = settled()
    for _ in range(3):
        before = lines()
        waiting("it goes on", lambda before=before: lines() >= before + 4)
        daemon.kill()
        back_ns = time.time_ns() + 3 * EVERY_NS
        waiting("instants are missed", lambda back_ns=back_ns: time.time_ns() > back_ns)
        daemon.start()
    before = lines()
    waiting("it runs again", lambda: lines() >= before + 4)
    last_ns, last_count = settled()
    assert last_count - first_count == round((last_ns - first_ns) / EVERY_NS)

    assert daemon.ctl("schedule", "pause", "quick").returncode == 0
    waiting("all have ended", lambda: schedules(daemon)["quick"]["last_state"] == "succeeded")
    status = schedules(daemon)["quick"]
    times = Counter(line.split()[0] for line in ran.read_text().splitlines())
    # A run that was cut short runs again; apart from those three, each ran once.
    assert sum(times.values()) - len(times) <= 3, times
    instants = sorted(map(instant_of, times))
    assert all((instant - instants[0]) % EVERY_NS == 0 for instant in instants)
    assert status["runs"] == len(instants)
    assert status["skipped"] >= 3, "each downtime is longer than two intervals"
    assert "runs of a schedule were skipped" in daemon.log()
    assert "catch_up = one" in daemon.log()


def test_why_runs_are_skipped_is_said(jobs, waiting, short_folder):
    over = short_folder / "over"
    args = {"path": str(over)}
    daemon = jobs(schedule__slow={"task": "jobs.until", "every": "200ms", "args": args})
    waiting("it runs", lambda: schedules(daemon)["slow"]["last_task"])
    # A loop that was slow has another reason for a moment.
    why = f"run {schedules(daemon)['slow']['last_task']} has not ended"
    waiting("why is told", lambda: schedules(daemon)["slow"]["skipped_why"] == why)
    line = f"slow: the last run that was skipped: {why}"
    waiting("people are told", lambda: line in daemon.ctl("schedule").stdout)
    assert re.search(r"event=schedule.skipped .*reason=.* schedule=slow", daemon.log())
    over.touch()


def test_a_changed_result_is_an_event_also_after_kill_9(muster, waiting, short_folder):
    page = short_folder / "page"
    page.write_text("old")
    daemon = muster(
        {"watch": {"worker": "watch:Watch"}},
        schedule__page={
            "task": "watch.read",
            "args": {"path": str(page)},
            "cron": "0 0 1 1 *",
            "timezone": "Europe/Berlin",
            "notify": "task.changed",
        },
        start=False,
    )
    (daemon.folder / "watch.py").write_text(WATCH)
    daemon.start()

    def run() -> str:
        done = daemon.ctl("schedule", "run", "page")
        assert done.returncode == 0, done.stderr
        waiting("it has ended", lambda: schedules(daemon)["page"]["last_state"] == "succeeded")
        return done.stdout.strip()

    run()
    run()
    assert changes(daemon) == []
    page.write_text("new")
    changed = run()
    [event] = waiting("it is told", lambda: changes(daemon))
    assert (event["schedule"], event["task"]) == ("page", changed)
    assert re.fullmatch("[0-9a-f]{64}", event["digest"])
    assert (event["before"], event["after"]) == ("old", "new")
    assert event["again"] is False
    waiting("that it was told is known", lambda: _told(daemon))

    daemon.kill()
    page.write_text("newer")
    daemon.start()
    assert changes(daemon) == [], "the old change is not told again"
    run()
    assert len(waiting("it is told", lambda: changes(daemon))) == 1


def _told(daemon: Muster) -> bool:
    """Tell whether the daemon has noted in its store that the event was sent."""
    import sqlite3

    [store] = daemon.state.glob("*.db")
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as connection:
        [(value,)] = connection.execute("SELECT value FROM facts WHERE kind = 'schedule'")
    connection.close()
    import msgspec

    from musterd.supervisor.core.tasks.schedule import ScheduleRecord

    return not msgspec.msgpack.decode(value, type=ScheduleRecord).watched.untold


def test_people_pause_run_and_resume(jobs, waiting):
    began = time.time()
    daemon = jobs(
        schedule__slow={"task": "jobs.nap", "every": "1h", "args": {"seconds": 60}},
        schedule__off={"task": "jobs.echo", "cron": "0 3 * * *", "enabled": False},
    )
    found = schedules(daemon)
    assert (found["slow"]["state"], found["off"]["state"]) == ("active", "disabled")
    assert began + 3600 <= found["slow"]["next_at"] <= time.time() + 3600
    assert found["slow"]["when"] == "every 1h"
    shown = daemon.ctl("schedule", "list").stdout.splitlines()
    assert shown[0].split()[:4] == ["SCHEDULE", "STATE", "TASK", "WHEN"]
    assert [line.split()[0] for line in shown[1:]] == ["slow", "off"], "what is off comes last"

    run = daemon.ctl("schedule", "run", "slow")
    assert run.returncode == 0
    waiting("it runs", lambda: schedules(daemon)["slow"]["last_state"] == "running")
    assert schedules(daemon)["slow"]["last_task"] == run.stdout.strip()
    again = daemon.ctl("schedule", "run", "slow")
    assert again.returncode == 1
    assert "has not ended" in again.stderr
    assert daemon.ctl("cancel", run.stdout.strip()).returncode == 0
    waiting("it has ended", lambda: schedules(daemon)["slow"]["last_state"] == "cancelled")

    paused = daemon.ctl("schedule", "pause", "slow")
    assert (paused.returncode, paused.stdout) == (0, "slow: paused\n")
    daemon.kill()
    daemon.start()
    assert schedules(daemon)["slow"]["state"] == "paused"
    assert schedules(daemon)["slow"]["next_at"] is None
    resumed = daemon.ctl("schedule", "resume", "slow")
    assert (resumed.returncode, resumed.stdout) == (0, "slow: active\n")
    assert daemon.ctl("schedule", "resume", "slow").returncode == 0, "done already"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "absent"], 4, "no such schedule: 'absent': there are known"),
        (["pause", "absent"], 4, "no such schedule"),
        (["run"], 2, "needs a NAME"),
        (["list", "known"], 2, "takes no NAME"),
        (["stop", "known"], 2, "there are list, add, edit"),
    ],
)
def test_mistakes_of_people(jobs, arguments, code, words):
    daemon = jobs(size=0, schedule__known={"task": "jobs.echo", "every": "1h"})
    done = daemon.ctl("schedule", *arguments)
    assert done.returncode == code
    assert words in done.stderr


def test_without_a_daemon_the_exit_code_is_7(muster):
    daemon = muster({}, start=False)
    assert daemon.ctl("schedule").returncode == 7


def test_the_site_of_a_scheduled_task_is_read_from_its_arguments(muster, waiting):
    daemon = muster(
        {"sites": {"worker": "sites"}},
        schedule__visit={
            "task": "sites.visit",
            "every": "1h",
            "args": {"url": "https://Site.example/page"},
        },
        start=False,
    )
    (daemon.folder / "sites.py").write_text(
        'from musterd import task\n\n@task(target="url")\ndef visit(ctx, url: str) -> None: ...\n'
    )
    daemon.start()
    task_id = daemon.ctl("schedule", "run", "visit").stdout.strip()
    shown = json.loads(daemon.ctl("--json", "task", task_id).stdout)
    assert shown["target"] == "site.example"


# -- the documentation ------------------------------------------------------------------------


def test_the_example_of_the_documentation_works(muster, waiting):
    import tomllib

    import msgspec

    text = (ROOT / "docs" / "schedules.md").read_text()
    daemon = muster({}, start=False)
    for block in re.findall(r"^```(?:python|toml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if named := re.match(r"# ([\w.]+)\n", block):
            (daemon.folder / named[1]).write_text(block)
    config = tomllib.loads((daemon.folder / "promos.toml").read_text())
    config["supervisor"] = {"runtime_dir": str(daemon.runtime), "state_dir": str(daemon.state)}
    daemon.config_path.write_bytes(msgspec.json.encode(config))
    daemon.start()
    watcher = subprocess.Popen(
        [sys.executable, "watcher.py"],
        cwd=daemon.folder,
        env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        line = watcher.stdout.readline()
    finally:
        watcher.terminate()
        watcher.wait(20)
        watcher.stdout.close()
    assert re.fullmatch(r"aurora has changed: price \d+ → \d+\n", line)
    assert list(schedules(daemon)) == ["aurora", "nightly"]
    sites = subprocess.run(
        [sys.executable, "sites.py"],
        cwd=daemon.folder,
        env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    result, every, catch_up, names = sites.stdout.splitlines()
    assert result.startswith("{'shop': 'kites', 'price': ")
    assert every.startswith("schedule 'wrong': key 'every': value \"5x\" ")
    assert catch_up.startswith("schedule 'wrong': key 'catch_up': value \"some\" ")
    assert names == "['kites', 'shop-a', 'shop-b']"
    assert list(schedules(daemon)) == ["aurora", "nightly"]


def test_the_commands_of_the_documentation_are_those_of_musterctl():
    text = (ROOT / "docs" / "schedules.md").read_text()
    said = set(re.findall(r"^\$ musterctl schedule ?(\w*)", text, re.MULTILINE))
    assert said == {"", "run", "pause", "resume"}
