"""Memory gets tight for real: a control group with a limit, and a process that fills it.

The thresholds are computed from the use just before, and only the group is ever filled: the machine
is in no danger, and other programs do not disturb the tests.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd import TaskFailed
from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.api import rpc
from musterd.workers.browser import find_executable
from support.daemon import Muster, Musters

MIB = 1024 * 1024
LIMIT_BYTES = 640 * MIB  # the daemon, two fork servers and eight workers take about 130
BALLAST = """
import sys
held = []
print("up", flush=True)
for line in sys.stdin:
    held = []
    held = [b"x" * (1 << 20) * int(line)]
    print("filled", flush=True)
"""
WORKER = """
import subprocess, sys, time
from musterd import Worker, task

class Eaters(Worker):
    @task
    def nap(self, ctx, seconds: float = 0.2) -> int:
        time.sleep(seconds)
        return self.index

    @task
    def eat(self, ctx, megabytes: int, child: int = 0) -> None:
        self.held = b"x" * (1 << 20) * megabytes
        if child:
            code = f"import time; held = b'x' * (1 << 20) * {child}; time.sleep(600)"
            self.child = subprocess.Popen([sys.executable, "-c", code])
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group limited to LIMIT_BYTES, wherever this machine allows one."""
    mounted = Path("/sys/fs/cgroup")
    own = {
        line.split(":")[1]: line.split(":", 2)[2].lstrip("/")
        for line in Path("/proc/self/cgroup").read_text().splitlines()
    }
    if "memory" in own:
        base, limit = mounted / "memory" / own["memory"], "memory.limit_in_bytes"
        base = base if base.exists() else mounted / "memory"
    else:
        base, limit = mounted, "memory.max"
    made = base / f"musterd-test-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
        (made / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if made.exists():
            made.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield made
    deadline = time.monotonic() + 20
    while True:
        try:
            made.rmdir()
        except OSError:  # the last process has not left the group yet
            assert time.monotonic() < deadline, f"{made} is not empty"
            time.sleep(0.01)
        else:
            return


class Ballast:
    """A process in the group that takes as much memory as it is told."""

    def __init__(self, group: Path) -> None:
        procs = group / "cgroup.procs"
        self._process = subprocess.Popen(
            [sys.executable, "-c", BALLAST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: procs.write_text("0"),  # noqa: PLW1509 - no other thread here
        )
        assert self._read() == "up\n"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def fill(self, size: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{int(size / MIB)}\n")
        self._process.stdin.flush()
        assert self._read() == "filled\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=20)


@pytest.fixture
def ballast(group: Path) -> Iterator[Ballast]:
    with contextlib.closing(Ballast(group)) as made:
        yield made


class Lines:
    """The thresholds warning and critical, well above what the machine uses now."""

    def __init__(self) -> None:
        machine = psutil.virtual_memory()
        self.warning = max(0.5, (machine.total - machine.available) / machine.total + 0.1)
        self.critical = self.warning + 0.2
        if self.critical > 0.9:
            pytest.skip("the machine itself is nearly full")

    def settings(self) -> dict[str, Any]:
        return {
            "memory__enabled": True,
            "memory__warning": self.warning,
            "memory__critical": self.critical,
            "memory__pressure": 0,
            "memory__check_interval": "200ms",
            "memory__calm": "1s",
            "memory__patience": "1s",
        }


@pytest.fixture
def fleet(muster: Musters) -> Callable[..., Any]:
    def make(pools: dict[str, dict[str, Any]], group: Path | None = None, **settings: Any) -> Any:
        made = muster(
            {name: {"worker": "eaters:Eaters", **pool} for name, pool in pools.items()},
            start=False,
            **settings,
        )
        Path(made.folder, "eaters.py").write_text(WORKER)
        if group is not None:
            procs = group / "cgroup.procs"
            made.popen_options = {"preexec_fn": lambda: procs.write_text("0")}
        return made.start()

    return make


def memory(daemon: Muster) -> Any:
    return daemon.ask(rpc.ShowMemory())


def used(daemon: Muster) -> int:
    """Return the memory used by the group in bytes."""
    (group,) = [each for each in memory(daemon)["sources"] if "control group" in each["name"]]
    size: int = group["used_bytes"]
    return size


def events_of(daemon: Muster) -> list[str]:
    recent = daemon.ask(rpc.Events())["recent"]
    names = [each["event"] for each in recent if each["event"].startswith("memory.")]
    return [name for name in names if name != "memory.held"]  # expected in a group this small


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="control groups are root's to make")


@pytest.mark.root
@as_root
def test_the_fleet_shrinks_when_memory_is_tight_and_comes_back(group, ballast, fleet, waiting):
    lines = Lines()
    daemon = fleet({"a": {"size": 4}, "b": {"size": 2}}, group, **lines.settings())
    waiting("all are there", lambda: _running(daemon) == (4, 2))
    before = used(daemon)
    assert before < 0.45 * LIMIT_BYTES, "the rest of this test would mean nothing"
    for _ in range(2):
        ballast.fill((lines.warning + 0.08) * LIMIT_BYTES - before)
        waiting("half is gone", lambda: _running(daemon) == (2, 1))
        status = memory(daemon)
        assert (status["level"], status["stage"]) == ("warning", "half")
        assert "control group" in status["source"]
        assert [(p["limit"], p["held"]) for p in status["pools"]] == [(2, 2), (1, 1)]
        assert daemon.pool("a").size == 2, "what memory allows is the target"
        assert daemon.ctl("status").returncode == 0
        assert "held back by memory" in daemon.ctl("status").stdout
        ballast.fill(0)
        waiting("they are back", lambda: _running(daemon) == (4, 2))
    assert events_of(daemon) == ["memory.warning", "memory.normal"] * 2
    assert f"over warning = {lines.warning:.0%}: each pool is halved" in daemon.log()


@pytest.mark.root
@as_root
def test_what_stays_critical_costs_workers_but_no_task(group, ballast, fleet, waiting):
    lines = Lines()
    daemon = fleet(
        {"a": {"size": 4}, "b": {"size": 2, "sacrifice": True}}, group, **lines.settings()
    )
    waiting("all are there", lambda: _running(daemon) == (4, 2))
    before = used(daemon)
    with daemon.client() as client:
        naps = [client.submit(f"{pool}.nap") for pool in "aaab" for _ in range(20)]
        long = [client.submit("b.nap", {"seconds": 60}) for _ in range(2)]
        client.flush()
        ballast.fill((lines.critical + 0.05) * LIMIT_BYTES - before)
        waiting("one is left, and none", lambda: _running(daemon) == (1, 0))
        assert memory(daemon)["stage"] in ("sacrifice", "kill")
        waiting("what did not give way is killed", lambda: memory(daemon)["stage"] == "kill")
        assert daemon.pool("b").size == 0
        assert daemon.ctl("status").returncode == 0
        ballast.fill(0)
        waiting("all are back", lambda: _running(daemon) == (4, 2))
        assert [nap.result(60) for nap in naps[:60]]
        for task in long:
            task.cancel()
        assert len([nap.result(60) for nap in naps]) == 80
    told = events_of(daemon)
    worse = ["memory.critical", "memory.sacrifice", "memory.kill"]
    assert [name for name in told if name in worse] == worse
    assert told[-1] == "memory.normal"
    assert daemon.pool("a").failed == daemon.pool("b").failed == 0


@pytest.mark.root
@as_root
def test_under_one_budget_browsers_go_first_and_parsers_last(memory_group, muster, waiting):
    try:
        find_executable()
    except ConfigurationError as error:
        pytest.skip(str(error))
    limit = 2048 * MIB
    group, lines = memory_group(limit), Lines()
    parser = {"worker": "musterd.workers.parser:ParserWorker", "size": 3}
    browser = {
        "worker": "musterd.workers.browser:BrowserWorker",
        "size": 2,
        "sacrifice": True,
        "options": {"backend": "cdp"},
    }
    daemon = muster({"parser": parser, "browser": browser}, start=False, **lines.settings())
    daemon.popen_options = {"preexec_fn": lambda: (group / "cgroup.procs").write_text("0")}
    daemon.start()

    def running() -> tuple[int, int]:
        return daemon.pool("parser").running, daemon.pool("browser").running

    waiting("all are there", lambda: running() == (3, 2))
    assert chromium_of(daemon)
    with (
        daemon.client() as client,
        contextlib.closing(Ballast(group)) as ballast,
        socket.socket() as unheard,
    ):
        assert used(daemon) < (lines.warning - 0.05) * limit, "the rest would mean nothing"
        held = look = 0.0

        def only_a_parser() -> bool:
            nonlocal held, look
            if time.monotonic() > look:  # also replaces what the first browsers have freed
                held += max(0.0, (lines.critical + 0.05) * limit - used(daemon))
                ballast.fill(held)
                look = time.monotonic() + 1  # five samples later
            return running() == (1, 0)

        waiting("one parser is left, and no browser", only_a_parser)
        waiting("nothing of the browsers is left", lambda: not chromium_of(daemon))
        unheard.bind(("127.0.0.1", 0))  # our port, on which nobody listens
        nobody = {"url": f"http://127.0.0.1:{unheard.getsockname()[1]}/"}
        page = client.submit("browser.render", nobody, max_retries=0)
        with pytest.raises(TaskFailed, match="SiteUnreachable"):
            client.submit("parser.fetch", nobody, max_retries=0).result(60)
        assert page.status().state == "queued"
        ballast.fill(0)
        waiting("all are back", lambda: running() == (3, 2))
        with pytest.raises(TaskFailed, match="SiteUnreachable"):
            page.result(60)
    assert daemon.pool("parser").lost == daemon.pool("browser").lost == {}


def chromium_of(daemon: Muster) -> list[psutil.Process]:
    found = []
    for process in daemon.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "chrom" in process.name():
                found.append(process)
    return found


def _running(daemon: Muster) -> tuple[int, int]:
    return daemon.pool("a").running, daemon.pool("b").running


@pytest.mark.root
@as_root
def test_a_pool_grows_no_further_than_memory_allows(group, ballast, fleet, waiting):
    lines = Lines()
    daemon = fleet({"a": {"size": 1}, "b": {"size": 1}}, group, **lines.settings())
    with daemon.client() as client:
        client.submit("a.eat", {"megabytes": 60}).result(60)
    waiting("it is measured", lambda: memory(daemon)["pools"][0]["memory_bytes"] > 60 * MIB)
    daemon.ask(rpc.Scale(pool="a", size=20, no_block=True))
    waiting("it grows", lambda: daemon.pool("a").running > 1)
    waiting("and stops growing", lambda: memory(daemon)["pools"][0]["held"])
    assert "event=memory.held" in daemon.log()
    assert memory(daemon)["level"] == "normal"
    shown = daemon.ctl("status").stdout
    assert "held back by memory" in shown
    assert daemon.ctl("status").returncode == 0, "it is as large as memory allows"


def test_a_machine_that_is_full_already_still_has_one_worker_of_each_pool(fleet, waiting):
    machine = psutil.virtual_memory()
    share = (machine.total - machine.available) / machine.total
    daemon = fleet(
        {"a": {"size": 3}, "b": {"size": 1}},
        memory__enabled=True,
        memory__warning=share / 4,
        memory__critical=share / 3,
        memory__margin=0,
        memory__patience="1h",
    )
    waiting("one of each runs", lambda: _running(daemon) == (1, 1))
    status = memory(daemon)
    assert (status["level"], status["source"]) == ("critical", "the machine's memory")
    with daemon.client() as client:
        assert len([client.submit("a.nap", {"seconds": 0}).result(60) for _ in range(5)]) == 5


def test_nothing_is_done_where_it_is_switched_off(fleet, waiting):
    daemon = fleet(
        {"a": {"size": 3}}, memory__warning=0.0001, memory__critical=0.0002, memory__margin=0
    )
    waiting("they are measured", lambda: all(w["memory_bytes"] for w in memory(daemon)["workers"]))
    assert memory(daemon)["level"] == "normal"
    assert daemon.pool("a").running == 3
    assert "no limits" in daemon.ctl("memory").stdout


def test_a_worker_is_measured_with_all_that_it_started(fleet, waiting):
    daemon = fleet({"a": {"size": 1}, "b": {"size": 1}})
    with daemon.client() as client:
        client.submit("a.eat", {"megabytes": 50, "child": 80}).result(60)

    def sizes() -> dict[str, int]:
        return {each["name"]: each["memory_bytes"] / MIB for each in memory(daemon)["workers"]}

    waiting("130 MiB are seen", lambda: 130 < sizes()["a/0"] < 200)
    assert 0 < sizes()["b/0"] < 40
    assert daemon.worker("a/0").memory_bytes > 130 * MIB
    shown = daemon.ctl("memory").stdout
    assert "the machine's memory" in shown
    assert shown.splitlines()[-2].startswith("a/0 "), "the largest first"
    told = json.loads(daemon.ctl("memory", "--json").stdout)
    assert told["pools"][0]["memory_bytes"] == told["workers"][0]["memory_bytes"]
    assert told["machine"]["disk_total_bytes"] > 0


def test_systemd_can_ask_for_a_look_at_once(fleet, muster, tmp_path, waiting):
    fifo = tmp_path / "pressure"
    os.mkfifo(fifo)
    daemon = muster({}, start=False, memory__check_interval="1h")
    daemon.popen_options = {
        "env": {
            **os.environ,
            "MEMORY_PRESSURE_WATCH": str(fifo),
            "MEMORY_PRESSURE_WRITE": "aGVsbG8=",
        }
    }
    daemon.start()
    with fifo.open("r+b", buffering=0) as there:
        before = memory(daemon)["notifications"]  # without a kernel, it hears its own word, too
        age = memory(daemon)["age_seconds"]
        waiting("time passes", lambda: memory(daemon)["age_seconds"] > age + 0.5)
        there.write(b"x")
        waiting("it looks", lambda: memory(daemon)["age_seconds"] < 0.5)
        assert memory(daemon)["notifications"] > before


def test_what_cannot_be_watched_is_told_and_nothing_else(muster):
    daemon = muster({}, start=False)
    daemon.popen_options = {"env": {**os.environ, "MEMORY_PRESSURE_WATCH": "/nowhere/pressure"}}
    began = time.monotonic()
    daemon.start()
    assert "MEMORY_PRESSURE_WATCH='/nowhere/pressure' cannot be watched" in daemon.log()
    assert memory(daemon)["age_seconds"] <= time.monotonic() - began, "it measures all the same"


def test_the_figures_of_the_machine_are_in_the_log(muster, waiting):
    daemon = muster({}, memory__statistics="1s")
    waiting("a line", lambda: "statistics event=machine.statistics" in daemon.log())
    line = next(line for line in daemon.log().splitlines() if "machine.statistics" in line)
    for field in ("memory=", "cpu=", "load=", "disk=", "disk_written=", "received=", "supervisor="):
        assert field in line
