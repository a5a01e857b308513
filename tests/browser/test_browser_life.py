"""The life of a browser under the daemon: up before its worker, probed while idle, measured."""

import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from trouble.fleet import Fleet
from trouble.site import TroubleSite

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.ctl.connection import Unreachable
from musterd.workers.browser import BrowserOptions, find_executable, worker
from support.daemon import Musters
from support.waiting import Waiting

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

WORKER = "musterd.workers.browser:BrowserWorker"


@pytest.fixture(params=["playwright", "cdp"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(
    muster: Musters,
    trouble_site: TroubleSite,
    waiting: Waiting,
    usual_user: dict[str, Any],
    backend: str,
) -> Callable[..., Fleet]:
    """Start a fleet of one browser with these pool keys: start(health_interval="1s", ...)."""

    def make(options: dict[str, Any] | None = None, **keys: Any) -> Fleet:
        pool = {
            "worker": WORKER,
            "size": 1,
            "options": {"backend": backend, **(options or {})},
            **keys,
        }
        return Fleet(muster({"browser": pool}, **usual_user), backend, trouble_site, waiting)

    return make


def test_a_worker_is_ready_when_its_browser_is_up(
    muster: Musters, waiting: Waiting, backend: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    slow = tmp_path / "slow"  # a browser that waits until it may start
    slow.write_text(
        f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.05; done\nexec {find_executable()} "$@"\n'
    )
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    options = {"backend": backend, "executable": str(slow)}
    daemon = muster({"browser": {"worker": WORKER, "size": 1, "options": options}}, start=False)
    daemon.start(wait=False)

    def started() -> int:
        with suppress(Unreachable):  # its socket does not listen yet
            return int(daemon.worker("browser/0").pid)
        return 0

    waiting("it is started", started)
    waiting(
        "its browser is", lambda: any(str(slow) in " ".join(_words(p)) for p in daemon.processes())
    )
    assert daemon.worker("browser/0").state == "STARTING"
    gate.touch()
    waiting("it is ready", lambda: daemon.worker("browser/0").state == "RUNNING")


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # the process has ended
        return []


@pytest.mark.parametrize("victim", ["browser", "driver"])
def test_an_idle_worker_whose_browser_hangs_is_replaced_as_a_whole(
    start: Callable[..., Fleet], backend: str, victim: str
) -> None:
    if (victim, backend) == ("driver", "cdp"):
        pytest.skip("this backend has no driver")
    # The worker finds it out by itself, also where a probe takes longer than usual.
    fleet = start(health_interval="500ms", health_timeout="60s")
    before = fleet.worker("browser")
    fleet.strike("browser", victim, signal.SIGSTOP)
    fleet.waiting("it is lost", lambda: fleet.daemon.pool("browser").lost == {"unhealthy": 1})
    fleet.well()
    assert fleet.worker("browser") != before
    fleet.waiting("it is told", lambda: "the browser failed its probe" in fleet.daemon.log())


def test_the_memory_of_the_browser_counts_as_its_workers(start: Callable[..., Fleet]) -> None:
    # A worker without its browser uses less than half of this; a browser uses more.
    fleet = start(max_memory="100M")
    before = fleet.worker("browser")
    fleet.render("/good")
    fleet.waiting("it is recycled", lambda: fleet.daemon.pool("browser").recycled >= 1)
    fleet.waiting("the log says why", lambda: "(max_memory)" in fleet.daemon.log())
    fleet.waiting("another is there", lambda: fleet.worker("browser") != before)
    fleet.render("/good")


def test_browsers_are_replaced_after_fifty_pages_or_half_an_hour_more_or_less() -> None:
    options = BrowserOptions()
    assert (options.recycle_requests, options.recycle_seconds) == (50, 1800)
    drawn = {round(worker.spread(50)) for _ in range(200)}
    assert min(drawn) >= 45
    assert max(drawn) <= 55
    assert len(drawn) > 5, "those of a pool do not end together"
    assert worker.spread(0) == float("inf"), "never"
