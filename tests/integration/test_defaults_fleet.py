"""Defaults of the configuration in a real daemon: ages of results, threads of executors, the
monitor, and how many workers fit."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd import AsyncClient
from support.daemon import Muster, Musters
from support.waiting import Waiting

WORK = """
from musterd import Worker, task
from musterd.workers.toolkit import cached, executors

asked = []

@cached
def ask(number: int) -> int:
    asked.append(number)
    return number

class Work(Worker):
    def open(self):
        self.runs = 0

    @task
    def ask(self, ctx, numbers: list[int], pause: float = 0.0) -> list[int]:
        asked.clear()
        for number in numbers:
            ask(number)
            __import__("time").sleep(pause)
        return asked

    @task
    def run(self, ctx, a: int = 0, b: int = 0) -> int:
        self.runs += 1
        return self.runs

    @task(cache=True)
    def cached(self, ctx, a: int = 0, b: int = 0) -> int:
        self.runs += 1
        return self.runs

    @task(debounce=True)
    def debounced(self, ctx, a: int = 0) -> int:
        self.runs += 1
        return self.runs

    @task
    def threads(self, ctx) -> dict[str, int]:
        jobs = [executors.api.submit(__import__("time").sleep, 0.05) for _ in range(30)]
        for job in jobs:
            job.result()
        return {
            "io": executors.io.threads,
            "api": executors.api.threads,
            "used": len(executors.api._pool._threads),
        }
"""


@pytest.fixture
def work(muster: Musters) -> Any:
    """Make a daemon with one worker of the class above: work(pool={...}, cache__ttl="1h")."""

    def make(pool: dict[str, Any] | None = None, **settings: Any) -> Any:
        pools = {"work": {"worker": "work:Work", "size": 1, **(pool or {})}}
        daemon = muster(pools, start=False, **settings)
        Path(daemon.folder, "work.py").write_text(WORK)
        return daemon.start()

    return make


def reload(daemon: Muster, **sections: Any) -> None:
    config = msgspec.json.decode(daemon.config_path.read_bytes())
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    daemon.config_path.write_bytes(msgspec.json.encode(config))
    done = daemon.ctl("reload")
    assert done.returncode == 0, done.stderr


# -- ages of results --------------------------------------------------------------------------


def test_a_submit_that_asks_without_a_number_follows_the_configuration(work: Any) -> None:
    daemon = work(cache__ttl="1h", debounce__window="1h")
    client = daemon.client()
    first = client.submit("work.run", {"a": 1}, cache=True).result(30)
    again = client.submit("work.run", {"a": 1}, cache=True)
    assert (again.result(30), again.cached) == (first, True)
    shortly = client.submit("work.run", {"a": 1}, debounce=True)
    assert (shortly.result(30), shortly.cached) == (first, True)
    reload(daemon, pools={"work": {"worker": "work:Work", "size": 1, "cache_ttl": "1ms"}})
    aged = client.submit("work.run", {"a": 1}, cache=True)
    aged.result(30)
    assert not aged.cached
    reload(daemon, debounce={"enabled": False})
    later = client.submit("work.run", {"a": 1}, debounce=True)
    later.result(30)
    assert not later.cached


def test_a_task_that_declares_it_is_answered_without_a_word_of_the_submit(work: Any) -> None:
    client = work(cache__ttl="1h").client()
    first = client.submit("work.cached", {"a": 1, "b": 2}).result(30)
    again = client.submit("work.cached", {"b": 2, "a": 1})
    assert (again.result(30), again.cached) == (first, True)
    assert client.submit("work.cached", {"a": 1, "b": 2}, cache=False).result(30) == first + 1
    assert client.submit("work.cached", {"a": 2}).result(30) == first + 2
    client.invalidate(prefix="work.cached:")
    assert client.submit("work.cached", {"a": 1, "b": 2}).result(30) == first + 3


def test_a_task_may_declare_that_submits_are_debounced(work: Any) -> None:
    client = work(debounce__window="1h").client()
    first = client.submit("work.debounced", {"a": 1}).result(30)
    again = client.submit("work.debounced", {"a": 1})
    assert (again.result(30), again.cached) == (first, True)
    assert client.submit("work.debounced", {"a": 1}, debounce=False).result(30) == first + 1


def test_functions_of_a_worker_remember_as_its_pool_says(work: Any, waiting: Waiting) -> None:
    daemon = work(pool={"cache_entries": 2}, cache__ttl="1h", cache__entries=3)
    client = daemon.client()
    numbers = {"numbers": [1, 2, 3, 1]}
    assert client.submit("work.ask", numbers).result(30) == [1, 2, 3, 1], "two are kept"
    assert client.submit("work.ask", {"numbers": [3, 1]}).result(30) == []
    twice = {"numbers": [7, 7], "pause": 0.02}
    assert client.submit("work.ask", twice).result(30) == [7]
    reload(daemon, cache={"ttl": "1ms"})
    waiting("the worker is replaced", lambda: client.submit("work.ask", twice).result(30) == [7, 7])


def test_musterctl_takes_the_options_without_a_number(work: Any) -> None:
    daemon = work(cache__ttl="1h", debounce__window="1h")

    def submit(*words: str) -> str:
        done = daemon.ctl("submit", "--wait", *words)
        assert done.returncode == 0, done.stderr
        return str(done.stdout).strip()

    assert submit("work.run", "a=5", "--cache") == "1"
    assert submit("work.run", "a=5", "--cache") == "1"
    assert submit("--cache", "--priority", "high", "work.run", "a=5") == "1"
    assert submit("work.run", "a=5", "--cache=0.000001") == "2"
    assert submit("work.run", "a=5", "--debounce") == "2"
    done = daemon.ctl("submit", "--cache", "work.run", "a=5")
    assert done.returncode == 2
    assert "write --cache=SECONDS, or --cache alone after all arguments" in done.stderr


def test_a_schedule_is_answered_with_a_result_that_is_young_enough(
    work: Any, waiting: Waiting
) -> None:
    schedule = {"task": "work.run", "args": {"a": 9}, "every": "100ms", "cache": True}
    daemon = work(cache__ttl="1h", schedule__often=schedule)

    def ran() -> int:
        (found,) = json.loads(daemon.ctl("--json", "schedule").stdout)["schedules"]
        return int(found["runs"])

    waiting("it has run a few times", lambda: ran() >= 4)
    assert daemon.client().submit("work.run").result(30) == 2, "its task ran once"


# -- threads ----------------------------------------------------------------------------------


def test_executors_are_as_large_as_the_configuration_says(work: Any, waiting: Waiting) -> None:
    daemon = work(pool={"executors": {"api": 4}}, executors__io=6)
    client = daemon.client()
    assert client.submit("work.threads").result(30) == {"io": 6, "api": 4, "used": 4}
    reload(daemon, executors={"io": 2})
    waiting("the worker is replaced", lambda: client.submit("work.threads").result(30)["io"] == 2)


# -- the monitor, and how many workers fit ------------------------------------------------------


def test_recommended_workers_are_the_same_wherever_one_looks(work: Any, waiting: Waiting) -> None:
    daemon = work()
    client = daemon.client()

    def memory() -> Any:
        return json.loads(daemon.ctl("--json", "memory").stdout)

    waiting("it is measured", lambda: all(each["memory_bytes"] for each in memory()["workers"]))

    def agree() -> bool:
        (pool,) = memory()["pools"]
        told = client.recommended_workers(timeout=30)
        return told == {"work": pool["recommended_workers"]} and told["work"] >= 1

    waiting("both say the same", agree)
    assert "FIT" in daemon.ctl("memory").stdout


async def recommended(socket: str) -> dict[str, int]:
    async with AsyncClient(socket) as musterd:
        return await musterd.recommended_workers(timeout=30)


def test_where_nothing_is_known_all_recommend_the_size(work: Any, waiting: Waiting) -> None:
    daemon = work(pool={"size": 3}, monitor__enabled=False, http__listen="127.0.0.1:0")
    (pool,) = json.loads(daemon.ctl("--json", "memory").stdout)["pools"]
    assert pool["recommended_workers"] == 3
    assert daemon.client().recommended_workers(timeout=30) == {"work": 3}
    assert asyncio.run(recommended(daemon.tasks_socket)) == {"work": 3}
    lines = [line.split() for line in daemon.ctl("memory").stdout.splitlines()]
    heads = next(line for line in lines if line[:1] == ["POOL"])
    row = next(line for line in lines if line[:1] == ["work"])
    assert row[heads.index("FIT")] == "3"
    url = waiting("the web process is up", lambda: daemon.status().web.address)
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        assert 'musterd_recommended_workers{pool="work"} 3.0' in answer.read().decode().splitlines()


def test_a_monitor_that_is_switched_off_looks_at_nothing(work: Any, waiting: Waiting) -> None:
    daemon = work(monitor__enabled=False, memory__statistics="100ms")

    def memory() -> Any:
        return json.loads(daemon.ctl("--json", "memory").stdout)

    assert daemon.client().submit("work.run").result(30) == 1
    assert (memory()["watched"], memory()["sources"]) == (False, [])
    assert "memory is not monitored: [monitor] enabled = false" in daemon.ctl("memory").stdout
    assert daemon.client().recommended_workers(timeout=30) == {"work": 1}
    reload(daemon, monitor={"enabled": True})
    waiting("it looks", lambda: memory()["sources"])
    waiting("it tells", lambda: "machine.statistics" in daemon.log())
    reload(daemon, monitor={"enabled": False})
    waiting("it does not look any more", lambda: not memory()["sources"])
