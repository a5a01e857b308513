"""Each process of a browser worker is killed or stopped, while idle and while a page loads.

Each pool is named after the process that is struck in it. All are struck at once, so that the waits
overlap.
"""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from trouble.fleet import Fleet, failure

from musterd.ipc.errors import ConfigurationError
from musterd.workers.browser import find_executable

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

VICTIMS = ("browser", "driver", "renderer", "worker")
# Task timeouts, longer than a busy machine needs to request all pages. No test waits for the
# timeout of a killed process.
TASK_SECONDS = {signal.SIGKILL: 40.0, signal.SIGSTOP: 8.0}
POOL: dict[str, Any] = {
    "worker": "musterd.workers.browser:BrowserWorker",
    "size": 1,
    "heartbeat_timeout": "2s",
}
POOLS = dict.fromkeys(VICTIMS, POOL)
KILLED = {"browser": "BrowserDied", "driver": "DriverDied", "renderer": "PageCrashed"}
# A stopped renderer looks like a page that does not come, like one whose script spins.
STOPPED = {"browser": "BrowserStuck", "driver": "BrowserStuck", "renderer": "SiteTimeout"}
HOW = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])


@pytest.fixture(autouse=True)
def shown(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the daemon's log when a test fails."""
    yield
    if getattr(request.node, "failed_call", False):
        print(fleet.daemon.log()[-20_000:])


def victims(fleet: Fleet) -> list[str]:
    return [each for each in VICTIMS if each != "driver" or fleet.backend == "playwright"]


@HOW
def test_struck_while_idle_the_next_task_works(fleet: Fleet, number: signal.Signals) -> None:
    for victim in victims(fleet):
        if (victim, number) == ("browser", signal.SIGKILL):
            # The browser's parts end when they lose it, unless they are stopped.
            fleet.strike(victim, "part", signal.SIGSTOP)
        fleet.strike(victim, victim, number)
    fleet.well()


@HOW
def test_struck_while_a_page_loads_the_error_says_what_it_was(
    fleet: Fleet, number: signal.Signals
) -> None:
    pages = dict.fromkeys(victims(fleet), "/half")
    # The task of a lost worker runs again, and this page comes the second time.
    pages["worker"] = f"/half-once?{fleet.backend}-{fleet.daemon.pid}-{number}"
    seconds = TASK_SECONDS[number]
    tasks = fleet.loading(pages, timeout=seconds)
    lost = tasks.pop("worker")
    for victim in victims(fleet):
        fleet.strike(victim, victim, number)
    found = {victim: failure(task) for victim, task in tasks.items()}
    wanted = KILLED if number == signal.SIGKILL else STOPPED
    assert found == {victim: wanted[victim] for victim in tasks}
    if number == signal.SIGKILL:
        assert lost.result(60)["title"] == "good"
    else:
        # Woken before its kill, the worker may still report the timeout, or that the page is late;
        # else the supervisor does.
        assert failure(lost) in ("TaskTimeout", "SiteTimeout", "TimeoutError")
    fleet.well()
