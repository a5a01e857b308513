"""Breakers, limits, classes and retries of a real daemon, as operators configure and see them."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from musterd import InvalidTask, TaskFailed
from musterd.supervisor.api import rpc
from support.daemon import Muster, Musters
from support.waiting import Waiting

SITES = """
import time
from pathlib import Path
from musterd import Worker, task

def own_pause(attempt, error):
    return 0.05

def told(ctx, error):
    with open("told", "a") as f:
        f.write(f"{ctx.attempt} {error}\\n")

class Sites(Worker):
    # A site is down while a file of its name is there.
    @task(target="site")
    def get(self, ctx, site: str, seconds: float = 0.0) -> str:
        begun = time.monotonic()
        try:
            time.sleep(seconds)
            if Path(site).exists():
                raise ConnectionError(f"{site} is down")
            return f"{site} {ctx.attempt}"
        finally:
            with open(f"{site}.log", "a") as f:
                f.write(f"{begun} {time.monotonic()}\\n")

    @task(target="site", backoff=own_pause, on_retry=told, max_retries=3)
    def stubborn(self, ctx, site: str) -> int:
        if ctx.attempt < 4:
            raise ValueError(f"attempt {ctx.attempt}")
        return ctx.attempt
"""

DOWN = "down.example"
UP = "up.example"
QUICK = {"breaker__open": "60s", "retry__max_retries": 0}


class Sites:
    """A daemon with the worker above, and what an operator sees of it."""

    def __init__(self, daemon: Muster, waiting: Waiting) -> None:
        self.daemon = daemon
        self.waiting = waiting
        self.client = daemon.client()

    def get(self, site: str, seconds: float = 0.0, **options: Any) -> Any:
        return self.client.submit("sites.get", {"site": site, "seconds": seconds}, **options)

    def break_down(self, site: str = DOWN) -> None:
        Path(self.daemon.folder, site).touch()

    def repair(self, site: str = DOWN) -> None:
        Path(self.daemon.folder, site).unlink()

    def fail(self, times: int, site: str = DOWN) -> None:
        for _ in range(times):
            with pytest.raises(TaskFailed, match="is down"):
                self.get(site).result(timeout=30)

    def runs(self, site: str) -> list[tuple[float, float]]:
        """Return when each run began and ended."""
        log = Path(self.daemon.folder, f"{site}.log")
        lines = log.read_text().splitlines() if log.exists() else []
        return sorted((float(begun), float(ended)) for begun, ended in map(str.split, lines))

    def breaker(self, site: str = DOWN) -> dict[str, Any]:
        found = self.daemon.ask(rpc.ListBreakers())["breakers"]
        return next((each for each in found if each["target"] == site), {})

    def why(self, task: Any) -> str:
        return str(self.daemon.ask(rpc.GetTask(id=task.id)).get("waits_for", ""))

    def wait_for_why(self, task: Any, words: str) -> None:
        task.ack(timeout=30)
        self.waiting(f"it waits for {words}", lambda: words in self.why(task))

    def events(self, site: str) -> list[dict[str, Any]]:
        told = [json.loads(line) for line in self.ctl("events", "--json").splitlines()]
        return [each for each in told if each.get("target") == site]

    def ctl(self, *arguments: str, code: int = 0) -> str:
        done = self.daemon.ctl(*arguments)
        assert done.returncode == code, done
        return str(done.stdout)


@pytest.fixture
def sites(muster: Musters, waiting: Waiting) -> Callable[..., Sites]:
    """Make a daemon with sites: sites(size=2, targets={...}, classes={...}, breaker__open="1s")."""

    def make(
        size: int = 2,
        *,
        targets: dict[str, Any] | None = None,
        classes: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        pool: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Sites:
        for name, each in (targets or {}).items():
            settings[f"targets__{name}"] = each
        for name, each in (classes or {}).items():
            settings[f"classes__{name}"] = each
        pools = {"sites": {"worker": "sites:Sites", "size": size, **(pool or {})}}
        daemon = muster(pools, start=False, **settings)
        for name, text in {"sites.py": SITES, **(files or {})}.items():
            Path(daemon.folder, name).write_text(text)
        return Sites(daemon.start(), waiting)

    return make


@contextlib.contextmanager
def sample_site() -> Iterator[str]:
    """Yield the address of a site on loopback, as host and port."""
    with subprocess.Popen(
        [sys.executable, "-m", "musterd.supervisor.demo.sample_site", "--until-stdin-closes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(10)


# -- breakers ---------------------------------------------------------------------------------


def test_three_failures_leave_a_site_alone_while_others_run_at_once(
    sites: "Callable[..., Sites]",
) -> None:
    s = sites(**QUICK)
    s.break_down()
    s.fail(3)
    waits = s.get(DOWN)
    s.wait_for_why(waits, f"breaker of {DOWN} is open for")
    assert s.get(UP).result(timeout=30) == f"{UP} 1"
    assert len(s.runs(DOWN)) == 3
    shown = s.ctl("task", waits.id)
    assert f"waiting for: breaker of {DOWN} is open for" in shown
    assert "policy:      timeout 120 s (pool), 0 retries (default)" in shown
    queued = s.daemon.pool("sites").queued
    assert queued["normal"] == 1, "what waits at a gate is not lost from the figures"

    listed = s.ctl("breaker", "list").splitlines()
    assert listed[0].split()[:2] == ["SITE", "STATE"]
    row = next(line.split() for line in listed if line.startswith(DOWN))
    assert row[1] == "open"
    assert row[-4] == "3", "the failures that opened it"
    assert row[-1] == "1", "the one that waits"

    s.repair()
    assert s.ctl("breaker", "reset", DOWN) == f"{DOWN}: closed\n"
    assert waits.result(timeout=30) == f"{DOWN} 1"


def test_a_site_that_is_well_again_is_found_out_by_probes(sites: "Callable[..., Sites]") -> None:
    s = sites(breaker__open="100ms", retry__max_retries=0)
    s.break_down()
    s.fail(3)
    s.repair()
    tasks = [s.get(DOWN) for _ in range(5)]
    assert [task.result(timeout=30) for task in tasks] == [f"{DOWN} 1"] * 5
    assert s.breaker()["state"] == "closed"
    changes = [each["event"] for each in s.events(DOWN)]
    assert [each for each in changes if each.startswith("breaker.")] == [
        "breaker.open",
        "breaker.half_open",
        "breaker.closed",
    ]


def test_a_real_site_that_asks_to_be_left_alone_is(muster: Musters, waiting: Waiting) -> None:
    with sample_site() as busy, sample_site() as well:
        daemon = muster(
            {"parser": {"worker": "musterd.workers.parser:ParserWorker", "size": 2}},
            breaker__open="10ms",
            retry__max_retries=0,
        )
        s = Sites(daemon, waiting)

        def extract(host: str, path: str) -> Any:
            arguments = {"url": f"http://{host}{path}", "select": {"title": "h1"}}
            return s.client.submit("parser.extract", arguments)

        for _ in range(3):
            with pytest.raises(TaskFailed, match="HTTP 503"):
                extract(busy, "/busy").result(timeout=30)
        opened = next(each for each in s.events(busy) if each["event"] == "breaker.open")
        assert opened["seconds"] == 1.0, "its Retry-After of 1 s, not the 10 ms"
        waits = extract(busy, "/promo/aurora-books")
        assert "Aurora Books" in extract(well, "/promo/aurora-books").result(timeout=30)["title"]
        assert "Aurora Books" in waits.result(timeout=30)["title"]


def test_what_is_wrong_with_a_page_does_not_shut_its_site(
    muster: Musters, waiting: Waiting
) -> None:
    with sample_site() as host:
        parser = {"worker": "musterd.workers.parser:ParserWorker", "size": 1}
        s = Sites(muster({"parser": parser}), waiting)
        for _ in range(5):
            with pytest.raises(TaskFailed, match="404"):
                s.client.submit("parser.fetch", {"url": f"http://{host}/gone"}).result(timeout=30)
        assert s.breaker(host)["state"] == "closed"


def test_breakers_are_held_open_and_switched_off_by_hand(sites: "Callable[..., Sites]") -> None:
    s = sites(**QUICK)
    assert s.ctl("breaker") == "no sites yet\n"
    assert s.ctl("breaker", "open", UP) == f"{UP}: forced-open\n"
    waits = s.get(UP)
    s.wait_for_why(waits, f"breaker of {UP} is held open")
    assert json.loads(s.ctl("breaker", "close", UP, "--json"))["state"] == "closed"
    assert waits.result(timeout=30) == f"{UP} 1"

    s.break_down()
    assert s.ctl("breaker", "disable", DOWN) == f"{DOWN}: disabled\n"
    s.fail(5)
    assert s.breaker()["state"] == "disabled"
    assert s.ctl("breaker", "reset", DOWN) == f"{DOWN}: closed\n"
    s.fail(3)
    assert s.breaker()["state"] == "open"

    done = s.daemon.ctl("breaker", "reset", "never.seen")
    assert done.returncode == 4
    assert "no such target: 'never.seen'" in done.stderr
    s.ctl("breaker", "explode", UP, code=2)
    s.ctl("breaker", "open", code=2)
    s.ctl("breaker", "list", UP, code=2)


def test_a_breaker_is_open_after_a_kill_and_a_restart(sites: "Callable[..., Sites]") -> None:
    s = sites(**QUICK)
    s.break_down()
    s.fail(3)
    held = s.breaker()["open_seconds"]
    waits = s.get(DOWN)
    waits.ack(timeout=30)
    s.daemon.kill()
    s.daemon.start()
    breaker = s.breaker()
    assert breaker["state"] == "open"
    assert 0 < breaker["open_seconds"] <= held, "time goes on"
    s.wait_for_why(waits, "is open for")
    assert len(s.runs(DOWN)) == 3
    s.repair()
    s.ctl("breaker", "close", DOWN)
    assert waits.result(timeout=30) == f"{DOWN} 1"


def test_breakers_can_be_switched_off_altogether(sites: "Callable[..., Sites]") -> None:
    s = sites(breaker__enabled=False, retry__max_retries=0)
    s.break_down()
    s.fail(6)
    assert s.breaker()["state"] == "disabled"


# -- fallbacks --------------------------------------------------------------------------------


def test_a_shut_site_is_answered_for_by_the_last_good_result_or_a_default(
    sites: "Callable[..., Sites]",
) -> None:
    s = sites(classes={"soft": {"on_open": "fallback"}}, **QUICK)
    fresh = s.get(DOWN, policy="soft")
    assert fresh.result(timeout=30) == f"{DOWN} 1"
    assert not fresh.stale
    s.break_down()
    s.fail(3)

    old = s.get(DOWN, policy="soft")
    assert old.result(timeout=30) == f"{DOWN} 1"
    assert old.stale
    default = s.get(DOWN, seconds=0.01, fallback={"price": None})
    assert default.result(timeout=30) == {"price": None}
    assert (default.stale, default.fallback) == (False, True)
    with pytest.raises(TaskFailed, match=f"the breaker of {DOWN} is open for") as failed:
        (refused := s.get(DOWN, on_open="fail")).result(timeout=30)
    assert (failed.value.kind, failed.value.type) == ("open", "BreakerOpen")
    assert refused.id in s.ctl("tasks", "--state", "failed")
    assert refused.id not in s.ctl("dead"), "nobody has to look at what was asked for"
    dead = [line for line in s.ctl("events").splitlines() if "task.dead" in line]
    assert dead
    assert not [line for line in dead if refused.id in line], "alerts are about these events"

    s.daemon.kill()
    s.daemon.start()
    assert s.get(DOWN, policy="soft").result(timeout=30) == f"{DOWN} 1", "also after a restart"
    arguments = ("submit", "sites.get", f"site={DOWN}", "seconds=0.02", "--wait")
    assert s.ctl(*arguments, "--fallback", '"none"') == "none\n"
    done = s.daemon.ctl(*arguments, "--on-open", "fail")
    assert done.returncode == 1
    assert "breaker" in done.stderr


def test_a_task_that_failed_for_good_falls_back_where_it_asks_so_and_shows_its_error(
    sites: "Callable[..., Sites]",
) -> None:
    soft = {"fallback_on": "failure"}
    s = sites(classes={"soft": soft}, breaker__enabled=False, retry__max_retries=0)
    assert s.get(DOWN, policy="soft").result(timeout=30) == f"{DOWN} 1"
    s.break_down()
    s.daemon.kill()
    s.daemon.start()

    old = s.get(DOWN, policy="soft")
    assert old.result(timeout=30) == f"{DOWN} 1"
    assert (old.state, old.stale, old.fallback) == ("succeeded", True, False)
    default = s.get(DOWN, seconds=0.01, fallback="none", fallback_on="failure")
    assert default.result(timeout=30) == "none"
    with pytest.raises(TaskFailed, match="is down"):
        s.get(DOWN, seconds=0.01, fallback="none").result(timeout=30)

    shown = s.ctl("task", old.id)
    assert f"ConnectionError: {DOWN} is down" in shown
    assert "source:      the last good result of an earlier task, because it failed" in shown
    assert "falls back on failure (class)" in shown
    assert "failed attempts:" in shown
    assert old.id not in s.ctl("dead")
    arguments = ("submit", "sites.get", f"site={DOWN}", "seconds=0.02", "--wait")
    assert s.ctl(*arguments, "--fallback", "none", "--fallback-on", "failure") == "none\n"
    told = [json.loads(line) for line in s.ctl("events", "--json").splitlines()]
    assert [each["task"] for each in told if each["event"] == "task.fallback"][:2] == [
        old.id,
        default.id,
    ]


def test_a_target_says_which_exceptions_its_breaker_counts(sites: "Callable[..., Sites]") -> None:
    named = {"counts": ["OSError"], "breaker": {"failures": 1}}
    others = {"counts": ["sites:NoSuchError", "KeyError"], "breaker": {"failures": 1}}
    of_class = {"class": "picky", "breaker": {"failures": 1}}
    own = {**of_class, "counts": ["usual"]}
    targets = {"named": named, "others": others, "classed": of_class, "own": own}
    s = sites(targets=targets, classes={"picky": {"counts": ["KeyError"]}}, **QUICK)
    for site in targets:
        s.break_down(site)
        s.fail(1, site)
    states = {site: s.breaker(site)["state"] for site in targets}
    assert states == {"named": "open", "others": "closed", "classed": "closed", "own": "open"}


ASYNC_SITES = """
from musterd import Worker, task

class Blocked(Exception): ...

class Sites(Worker):
    @task(target="site", max_retries=0)
    async def get(self, ctx, site: str, seconds: float = 0.0) -> None:
        raise Blocked(f"{site} is down")
"""


@pytest.mark.parametrize("concurrency", [1, 4])
def test_exceptions_of_async_tasks_count_likewise(
    sites: "Callable[..., Sites]", concurrency: int
) -> None:
    targets = {"named": {"counts": ["sites:Blocked"], "breaker": {"failures": 1}}}
    pool = {"concurrency": concurrency}
    s = sites(1, targets=targets, files={"sites.py": ASYNC_SITES}, pool=pool, breaker__failures=1)
    for site in ("named", UP):
        s.fail(1, site)
    assert s.breaker("named")["state"] == "open"
    assert s.breaker(UP)["state"] == "closed"


# -- limits -----------------------------------------------------------------------------------


def overlap(runs: list[tuple[float, float]]) -> int:
    """Return the largest number of runs at the same time."""
    marks = sorted([(begun, 1) for begun, _ in runs] + [(ended, -1) for _, ended in runs])
    now = most = 0
    for _, change in marks:
        now += change
        most = max(most, now)
    return most


def test_no_more_tasks_of_a_target_run_than_it_has_places(sites: "Callable[..., Sites]") -> None:
    s = sites(5, targets={UP: {"max_concurrent": 2}})
    tasks = [s.get(UP, 0.1) for _ in range(8)]
    s.wait_for_why(tasks[-1], f"bulkhead {UP} 2/2")
    others = [s.get(f"other{number}", 0.1) for number in range(3)]
    for task in tasks + others:
        task.result(timeout=30)
    assert overlap(s.runs(UP)) == 2


def test_no_more_tasks_of_a_class_run_than_it_has_places(sites: "Callable[..., Sites]") -> None:
    s = sites(4, classes={"few": {"max_concurrent": 2}}, targets={"a": {"class": "few"}})
    tasks = [s.get(site, 0.1, policy=policy) for site, policy in (("a", ""), ("b", "few")) * 4]
    s.wait_for_why(tasks[-1], "bulkhead class few 2/2")
    for task in tasks:
        task.result(timeout=30)
    assert overlap(s.runs("a") + s.runs("b")) == 2


def test_tasks_of_a_target_begin_no_more_often_than_its_rate(sites: "Callable[..., Sites]") -> None:
    s = sites(4, targets={UP: {"rate": "10/s", "burst": 2}})
    from_the_start = time.monotonic()
    tasks = [s.get(UP) for _ in range(8)]
    s.wait_for_why(tasks[-1], f"rate 10/s of {UP}")
    for task in tasks:
        task.result(timeout=30)
    begun = [at for at, _ in s.runs(UP)]
    assert begun[-1] - from_the_start >= 0.6, "2 at once, then 6 in 0.6 s"
    assert begun[4] - from_the_start >= 0.3


# -- classes ----------------------------------------------------------------------------------


def test_timeouts_by_target_and_by_class(sites: "Callable[..., Sites]") -> None:
    s = sites(
        classes={"quick": {"timeout": "200ms"}},
        targets={"slow.example": {"timeout": "300ms"}, "classed.example": {"class": "quick"}},
        retry__max_retries=0,
    )
    for site, options, seconds in (
        ("slow.example", {}, "0.3"),
        ("classed.example", {}, "0.2"),
        (UP, {"policy": "quick"}, "0.2"),
    ):
        with pytest.raises(TaskFailed, match=rf"{seconds} s") as failed:
            s.get(site, 20, **options).result(timeout=15)
        assert failed.value.kind == "timeout"
    assert s.get("slow.example", 0.4, timeout=10).result(timeout=30) == "slow.example 1"


def test_a_class_that_is_not_there_is_refused(sites: "Callable[..., Sites]") -> None:
    s = sites(1, classes={"critical": {}})
    with pytest.raises(InvalidTask, match=r"no class 'urgent' in \[classes\] \(known: critical\)"):
        s.get(UP, policy="urgent").result(timeout=30)
    arguments = ("submit", "sites.get", f"site={UP}", "--wait", "--policy")
    assert s.ctl(*arguments, "critical") == f"{UP} 1\n"
    done = s.daemon.ctl(*arguments, "urgent")
    assert done.returncode == 1
    assert "known: critical" in done.stderr


# -- retries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "pauses"),
    [("fixed", [0.1, 0.1, 0.1]), ("linear", [0.1, 0.2, 0.3])],
)
def test_the_strategy_of_the_configuration_makes_the_pauses(
    sites: "Callable[..., Sites]", strategy: str, pauses: list[float]
) -> None:
    s = sites(
        1,
        retry__strategy=strategy,
        retry__base="100ms",
        retry__factor=100,  # exponential delays would be 0.1, 10 and 60 s
        retry__jitter=0,
        breaker__enabled=False,
    )
    s.break_down()
    with pytest.raises(TaskFailed, match="is down"):
        s.get(DOWN).result(timeout=9)
    begun = [at for at, _ in s.runs(DOWN)]
    found = [later - earlier for earlier, later in pairwise(begun)]
    assert len(found) == 3
    for pause, least in zip(found, pauses, strict=True):
        assert pause >= least


def test_a_class_has_a_strategy_of_its_own(sites: "Callable[..., Sites]") -> None:
    quick = {"retry": {"strategy": "fixed", "base": "10ms", "max_retries": 2}}
    s = sites(1, classes={"quick": quick}, retry__base="30s", retry__max_retries=9)
    s.break_down()
    with pytest.raises(TaskFailed, match="is down"):
        s.get(DOWN, policy="quick").result(timeout=15)
    assert len(s.runs(DOWN)) == 3


def test_a_function_of_one_s_own_makes_the_pauses(sites: "Callable[..., Sites]") -> None:
    pauses = (
        "def mine(attempt, error):\n    return 0.01 * attempt if 'down' in str(error) else 99\n"
    )
    s = sites(
        1,
        files={"pauses.py": pauses},
        retry__strategy="pauses:mine",
        retry__base="60s",
        breaker__enabled=False,
    )
    s.break_down()
    with pytest.raises(TaskFailed, match="is down"):
        s.get(DOWN).result(timeout=15)
    assert len(s.runs(DOWN)) == 4


def test_a_task_has_a_backoff_and_a_hook_of_its_own(sites: "Callable[..., Sites]") -> None:
    s = sites(1, retry__base="60s")
    task = s.client.submit("sites.stubborn", {"site": UP})
    assert task.result(timeout=15) == 4
    told = Path(s.daemon.folder, "told").read_text().splitlines()
    assert told == ["1 attempt 1", "2 attempt 2", "3 attempt 3"]


def test_the_hook_is_not_told_of_the_last_failure(sites: "Callable[..., Sites]") -> None:
    s = sites(1)
    with pytest.raises(TaskFailed, match="attempt 2"):
        s.client.submit("sites.stubborn", {"site": UP}, max_retries=1).result(timeout=15)
    assert Path(s.daemon.folder, "told").read_text() == "1 attempt 1\n"


def test_a_broken_site_gets_no_more_than_its_share_of_retries(
    sites: "Callable[..., Sites]",
) -> None:
    s = sites(
        2,
        targets={DOWN: {"retry_share": "25%", "breaker": {"enabled": False}}},
        retry__base="1ms",
        retry__max="5m",
        retry__max_retries=1,
    )
    s.break_down()
    tasks = [s.get(DOWN) for _ in range(20)]
    s.client.flush()
    budget = f"the retry budget of {DOWN}"

    def held() -> list[Any]:
        return [task for task in tasks if s.why(task) == budget]

    def ended() -> list[Any]:
        return [task for task in tasks if task.done()]

    s.waiting("all are held or have ended", lambda: len(held()) + len(ended()) == 20)
    late = held()
    assert 5 <= len(late) <= 10, "ten retries were saved up, five were earned at most"
    assert len(s.runs(DOWN)) == 20 + 20 - len(late)
    s.daemon.kill()
    s.daemon.start()
    assert held() == late
    for _ in range(4):
        s.get(DOWN, max_retries=0).outcome(30)
    s.waiting("four first attempts have earned one retry", lambda: held() == late[1:])
    assert late[0].outcome(30).attempts == 2
    assert len(s.runs(DOWN)) == 20 + 20 - len(late) + 4 + 1


@pytest.mark.parametrize("key", ["retry", "classes.c.retry", "targets.t.retry"])
def test_a_strategy_that_cannot_be_loaded_is_found_by_check_config(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "musterd.toml"
    path.write_text(f'[{key}]\nstrategy = "os.path:absent"\n[pools]\n')
    done = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "check-config", "-c", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 78
    assert f"key '{key}.strategy': value \"os.path:absent\"" in done.stderr
    assert "has no function 'absent'" in done.stderr
