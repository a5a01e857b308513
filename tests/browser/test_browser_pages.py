"""Harmful pages: each costs at most its own task, and leaves nothing behind."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trouble.fleet import Fleet, failure

from musterd.ipc.errors import ConfigurationError
from musterd.workers.browser import find_executable
from support.waiting import wait_for

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

HEAP = "--js-flags=--max-old-space-size=64"  # MiB, so that /hoard does not harm the machine
PATIENT = True  # no browser is replaced because it is slow
POOLS: dict[str, dict[str, Any]] = {
    "browser": {
        "worker": "musterd.workers.browser:BrowserWorker",
        "size": 1,
        "options": {"args": [HEAP], "recycle_requests": 0, "max_bytes": 1_000_000},
    }
}
# For pages that never come: a page limit far below the task's, so that a busy machine cannot
# confuse the two.
SHORT: dict[str, Any] = {"timeout": 60.0, "args": {"timeout": 3.0}}
LATE = {"timeout": 3.0}
LONG = {"timeout": 30.0}
HUGE = {"timeout": 10.0}
FILE_BYTES_MAX = 4 * 1024 * 1024  # of a profile; a larger file was downloaded
# Bytes under way in sockets and in the network service when a download is refused.
REFUSED_BYTES_MAX = 32 * 1024 * 1024


@pytest.fixture(autouse=True)
def shown(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the daemon's log when a test fails."""
    yield
    if getattr(request.node, "failed_call", False):
        print(fleet.daemon.log()[-20_000:])


@pytest.fixture
def same_browser(fleet: Fleet) -> Iterator[None]:
    """Check that the next task works in the same browser, and that nothing is left."""
    before = fleet.one("browser", "browser").pid
    yield
    fleet.well()
    assert fleet.one("browser", "browser").pid == before, "it cost a browser"


def large_files(fleet: Fleet) -> list[Path]:
    """Return the large files on disk. Chromium makes some that it removes at once."""
    found = Path(fleet.daemon.state, "tmp").rglob("*")
    return [each for each in found if each.is_file() and each.stat().st_size > FILE_BYTES_MAX]


@pytest.mark.usefixtures("same_browser")
@pytest.mark.parametrize(
    ("path", "error", "options"),
    [
        ("/never", "SiteTimeout", SHORT),
        ("/half", "SiteTimeout", SHORT),
        ("/spin", "SiteTimeout TaskTimeout", LATE),  # a busy machine may miss either limit
        ("/hoard", "PageCrashed", LONG),
        ("/huge", "PageTooLarge SiteTimeout", HUGE),  # 50 MB: either may come first
        ("/endless", "BadRequest", LONG),
    ],
)
def test_a_page_that_harms_costs_its_own_task_only(
    fleet: Fleet, path: str, error: str, options: dict[str, Any]
) -> None:
    task = fleet.submit(path, **options)
    assert failure(task) in error.split()
    wait_for("no large file is left", lambda: not large_files(fleet))


@pytest.mark.usefixtures("same_browser")
@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("/dialogs", "after false null"),
        ("/leaves", "good"),
        ("/popups", "popups"),
        ("/popup-alerts", "popup"),
        ("/popup-spin", "popup"),
    ],
)
def test_dialogs_and_popups_hold_nothing_up(fleet: Fleet, path: str, title: str) -> None:
    args = {"wait_until": "networkidle"} if path == "/leaves" else {}
    assert fleet.render(path, args=args, **LONG)["title"] == title


@pytest.mark.usefixtures("same_browser")
def test_half_of_a_character_harms_nobody(fleet: Fleet) -> None:
    """Pages cut texts wherever they like, and Chromium passes on what they say."""
    shown = "half \N{REPLACEMENT CHARACTER}"
    script = "console.log(document.title); return [{a: document.title, [document.title]: 1}]"
    page = fleet.render("/halves", args={"script": script}, **LONG)
    assert page["title"] == shown
    assert f"<p>{shown}</p>" in page["html"]
    assert page["script"] == [{"a": shown, shown: 1}]
    failed = fleet.submit("/halves", args={"script": "throw new Error(document.title)"}, **LONG)
    assert failure(failed) == "ScriptFailed"


def test_a_browser_that_cannot_reach_anything_is_replaced_after_three_pages(fleet: Fleet) -> None:
    fleet.strike("browser", "network", signal.SIGSTOP)
    for _ in range(3):
        assert failure(fleet.submit("/good", timeout=2.0)) in ("SiteTimeout", "TaskTimeout")
    fleet.well()


@pytest.mark.usefixtures("same_browser")
def test_downloads_are_refused_and_leave_nothing_on_the_disk(fleet: Fleet) -> None:
    fleet.site.sent.clear()
    script = "await new Promise(resolve => setTimeout(resolve, 1000))"  # time to download
    page = fleet.render("/downloads", args={"script": script, "wait_until": "commit"}, **LONG)
    assert page["title"] == "downloads"
    assert fleet.site.requested["/endless"] > 0
    assert fleet.site.sent["/endless"] < REFUSED_BYTES_MAX
    wait_for("no large file is left", lambda: not large_files(fleet))
