"""Schedules that are added to a real daemon: by clients and by musterctl, across kill -9."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd import (
    AsyncClient,
    InvalidSchedule,
    Secret,
    StillRunning,
    UnknownSchedule,
)
from support.daemon import Jobs, Muster, slowest_turn
from support.waiting import Waiting

PATIENCE_SECONDS = 60.0
MANY = 5000
TURN_SECONDS_MAX = 0.05
MEMORY_BYTES_MAX = 150 * 1024 * 1024
NEVER = "0 0 1 1 *"  # tests run it by hand


def names(daemon: Muster) -> dict[str, dict[str, Any]]:
    done = daemon.ctl("--json", "schedule")
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["schedules"]}


def test_what_a_client_puts_runs_and_survives_kill_9(jobs: Jobs) -> None:
    daemon = jobs()
    with daemon.client() as client:
        schedules = client.schedules
        schedules.put("kites", task="jobs.echo", args={"value": "red"}, cron=NEVER)
        assert schedules.run("kites").result(PATIENCE_SECONDS) == "red"
        schedules.pause("kites")
        daemon.kill()
        daemon.start()
        found = schedules.get("kites")
        assert (found.state, found.runs, found.origin) == ("paused", 1, "")
        assert found.keys == {"task": "jobs.echo", "args": {"value": "red"}, "cron": NEVER}
        schedules.resume("kites")
        schedules.put("kites", task="jobs.echo", args={"value": "blue"}, cron=NEVER)
        assert schedules.run("kites").result(PATIENCE_SECONDS) == "blue"
        assert [each.name for each in schedules.list()] == ["kites"]
        assert schedules.get("kites").runs == 2
        schedules.delete("kites")
        daemon.kill()
        daemon.start()
        assert schedules.list() == []
        with pytest.raises(UnknownSchedule, match="no schedule 'kites'"):
            schedules.get("kites")
        with pytest.raises(UnknownSchedule):
            schedules.delete("kites")
        with pytest.raises(UnknownSchedule):
            schedules.run("kites")


def test_all_that_is_wrong_is_told_at_once_and_the_others_are_stored(jobs: Jobs) -> None:
    daemon = jobs(schedule__ours={"task": "jobs.echo", "cron": NEVER})
    with daemon.client() as client:
        with pytest.raises(InvalidSchedule) as caught:
            client.schedules.put_many(
                {
                    "good": {"task": "jobs.echo", "every": 60},
                    "bad": {"task": "jobs.echo", "every": "5x", "catch_up": "some"},
                    "secret": {"task": "jobs.echo", "every": "1m", "args": {"password": "pw"}},
                    "homeless": {"task": "nobody.echo", "every": "1m"},
                    "coded": {"task": "jobs.echo", "every": "1m", "login": "os:system"},  # type: ignore[typeddict-unknown-key]
                    "ours": {"task": "jobs.echo", "every": "1m"},
                }
            )
        problems = caught.value.problems
        assert [len(problems[name]) for name in ("bad", "secret", "homeless", "coded")] == [
            2,
            1,
            1,
            1,
        ]
        assert problems["bad"][0].startswith(
            "schedule 'bad': key 'every': value \"5x\" has the unit"
        )
        assert "named in supervisor.redact" in problems["secret"][0]
        assert "has no pool: the pools are jobs" in problems["homeless"][0]
        assert "configuration files only" in problems["coded"][0]
        [read_only] = problems["ours"]
        assert str(daemon.config_path) in read_only
        assert "changed only there" in read_only
        with pytest.raises(InvalidSchedule, match="changed only there"):
            client.schedules.delete("ours")
        secret = {"value": {"password": Secret("SHOP")}}
        client.schedules.put("secret", task="jobs.echo", every="1m", args=secret)
        assert {each.name: bool(each.origin) for each in client.schedules.list()} == {
            "good": False,
            "ours": True,
            "secret": False,
        }
        assert client.schedules.get("secret").keys["args"] == {
            "value": {"password": {"$secret": "SHOP"}}
        }


def test_a_run_by_hand_is_refused_while_the_last_one_is_alive(jobs: Jobs) -> None:
    async def main(daemon: Muster) -> None:
        async with AsyncClient(daemon.tasks_socket) as client:
            schedules = client.schedules
            await schedules.put("slow", task="jobs.nap", args={"seconds": 600}, cron=NEVER)
            task = await schedules.run("slow")
            with pytest.raises(StillRunning) as caught:
                await schedules.run("slow")
            assert caught.value.task == task.id
            await task.cancel()
            await task.outcome(PATIENCE_SECONDS)
            await schedules.pause("slow")
            assert (await schedules.get("slow")).state == "paused"
            assert [each.name for each in await schedules.list()] == ["slow"]
            await schedules.resume("slow")
            await schedules.delete("slow")
            assert await schedules.list() == []

    asyncio.run(main(jobs()))


def test_who_checks_now_gets_the_result_though_a_run_is_due_while_that_waits_for_a_retry(
    jobs: Jobs, short_folder: Path
) -> None:
    args = {"path": str(short_folder / "attempts"), "times": 2, "after": 10 * PATIENCE_SECONDS}
    with jobs().client() as client:
        client.schedules.put("kites", task="jobs.flaky", args=args, every="1s")
        client.schedules.pause("kites")
        run = client.schedules.run("kites")
        client.schedules.resume("kites")
        assert run.result(PATIENCE_SECONDS) == 3  # the attempts at the next due times


def test_musterctl_adds_edits_and_removes(jobs: Jobs) -> None:
    daemon = jobs(schedule__ours={"task": "jobs.echo", "cron": NEVER})

    def done(*words: str, code: int = 0) -> str:
        ended = daemon.ctl("schedule", *words)
        assert ended.returncode == code, ended.stderr
        return ended.stdout + ended.stderr

    add = ("add", "kites", "--task", "jobs.echo", "--every", "5m", "--set", "priority=low")
    assert done(*add, "value=3") == "kites: active, every 5m\n"
    assert done("edit", "kites", "--cron", NEVER, "--set", "timezone=UTC") == (
        f"kites: active, {NEVER} (UTC)\n"
    )
    with daemon.client() as client:
        task = done("run", "kites").strip()
        assert client.task(task).result(PATIENCE_SECONDS) == 3
        assert client.schedules.get("kites").keys == {
            "task": "jobs.echo",
            "cron": NEVER,
            "timezone": "UTC",
            "priority": "low",
            "args": {"value": 3},
        }
        lacks = done("edit", "kites", "--unset", "args.value", "valeu=3", code=1)
        assert "key 'args': jobs.echo takes no argument 'valeu': it takes value" in lacks
        done("edit", "kites", "--unset", "priority", "value=4")
        kept = {"task": "jobs.echo", "cron": NEVER, "timezone": "UTC", "args": {"value": 4}}
        assert client.schedules.get("kites").keys == kept
    assert done("pause", "kites") == "kites: paused\n"
    assert done("resume", "kites") == "kites: active\n"
    assert "unknown key: did you mean 'every'" in done("edit", "kites", "--set", "evry=1", code=1)
    coded = done("edit", "kites", "--set", "login=os:system", code=1)
    assert "is for configuration files only" in coded
    assert str(daemon.config_path) in done("edit", "ours", "--every", "1m", code=1)
    assert str(daemon.config_path) in done("remove", "ours", code=1)
    assert "needs something to change" in done("edit", "kites", code=2)
    assert "no such schedule" in done("remove", "nobody", code=4)
    assert done("remove", "kites") == "kites: removed\n"
    assert names(daemon).keys() == {"ours"}


def test_a_file_wins_and_a_pool_that_is_gone_is_told(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs()
    before = daemon.config_path.read_text()
    config = json.loads(before)
    with daemon.client() as client:
        client.schedules.put("kites", task="jobs.echo", args={"value": "ours"}, cron=NEVER)
        client.schedules.put("tea", task="jobs.echo", args={"value": "tea"}, cron=NEVER)
        client.schedules.run("tea").result(PATIENCE_SECONDS)

        in_file = {"task": "jobs.echo", "args": {"value": "file"}, "cron": NEVER}
        daemon.config_path.write_text(json.dumps({**config, "schedule": {"kites": in_file}}))
        assert daemon.ctl("reload").returncode == 0
        assert client.schedules.run("kites").result(PATIENCE_SECONDS) == "file"
        found = client.schedules.get("kites")
        assert found.origin == str(daemon.config_path)
        assert "which runs" in found.problem
        assert "event=schedule.unusable" in daemon.log()

        daemon.config_path.write_text(before)
        assert daemon.ctl("reload").returncode == 0
        assert client.schedules.run("kites").result(PATIENCE_SECONDS) == "ours"

        daemon.stop()
        others = {"others": config["pools"]["jobs"]}
        daemon.config_path.write_text(json.dumps({**config, "pools": others}))
        daemon.start()
        tea = names(daemon)["tea"]
        assert (tea["state"], tea["task"], tea["next_at"]) == ("unusable", "jobs.echo", None)
        assert "has no pool" in tea["problem"]
        assert "has no pool" in daemon.ctl("schedule").stdout
        assert daemon.ctl("schedule", "run", "tea").returncode == 1

        daemon.config_path.write_text(before)
        assert daemon.ctl("reload").returncode == 0
        waiting("it is back", lambda: names(daemon)["tea"]["state"] == "active")
        assert names(daemon)["tea"]["runs"] == 1, "it goes on where it was"
        waiting("its pool is back", lambda: daemon.ctl("schedule", "run", "tea").returncode == 0)


@pytest.mark.timeout(300)
def test_thousands_are_added_live_and_are_there_after_kill_9(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    puts: Any = {
        f"site-{number}": {
            "task": "jobs.echo",
            "args": {"value": f"https://site-{number}.example/"},
            "every": "60s",
        }
        for number in range(MANY)
    }
    with daemon.client() as client:
        client.schedules.put_many(puts, timeout=PATIENCE_SECONDS)
        assert len(names(daemon)) == MANY
        daemon.kill()
        daemon.start()
        assert [each.name for each in client.schedules.list()] == sorted(puts)
        task = client.schedules.run("site-4711")
        assert task.result(PATIENCE_SECONDS) == "https://site-4711.example/"
        assert daemon.ctl("reload").returncode == 0
        assert psutil.Process(daemon.pid).memory_info().rss < MEMORY_BYTES_MAX
        client.schedules.delete(*puts)
        assert client.schedules.list() == []
    assert slowest_turn(daemon.log()) <= TURN_SECONDS_MAX
