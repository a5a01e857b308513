"""Many pages in a row, with browsers replaced in between: use of memory and files stays flat.

`make soak-browser` opens 300 with each backend; docs/browser.md has the results.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from trouble.fleet import Fleet, mark_of
from trouble.site import TroubleSite

from musterd.ipc.errors import ConfigurationError
from musterd.workers.browser import find_executable
from support.daemon import Musters
from support.waiting import Waiting

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

TENTHS = 10
BROWSERS = 5  # one after the other in a run
# A browser that is a few pages older uses some MiB more; a leak of half a MiB per page shows in
# 300 pages.
GROWTH_MAX = 1.15
# The sockets, pipes and pidfds of supervisor and worker vary by a few.
DESCRIPTORS_MORE_MAX = 3


class Holdings(NamedTuple):
    """What the fleet holds when no task runs."""

    own_bytes: int  # of the worker and its browser, without mapped files, which others may share
    processes: int
    supervisor_descriptors: int
    worker_descriptors: int
    files: int  # below the daemon's directory, temporary files included


def _own(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # a spare process that was ended
        return 0
    kibibytes = [line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return 1024 * sum(map(int, kibibytes))


def holdings(fleet: Fleet) -> Holdings:
    fleet.settle()
    worker = fleet.worker("browser")
    mark = mark_of(worker)
    tree = [part.pid for part in fleet.parts("browser") if part.mark == mark]
    profile = fleet.profile("browser")
    found = [path for path in fleet.daemon.folder.rglob("*") if profile not in path.parents]
    return Holdings(
        sum(map(_own, tree)),
        len(tree),
        psutil.Process(fleet.daemon.pid).num_fds(),
        psutil.Process(worker).num_fds(),
        len(found),
    )


def work(fleet: Fleet, number: int) -> None:
    """Run tasks of all kinds, one after the other."""
    paths = ("/good", "/dialogs", "/popups", "/missing")
    path = paths[number % len(paths)]
    method = ("render", "extract", "screenshot")[number % 3]
    fleet.submit(path, method=method).result(60)


@pytest.fixture(params=[pytest.param("playwright", marks=pytest.mark.long), "cdp"])
def soaked(  # noqa: PLR0917 - fixtures
    request: pytest.FixtureRequest,
    muster: Musters,
    trouble_site: TroubleSite,
    waiting: Waiting,
    usual_user: dict[str, Any],
    renders: int,
) -> Fleet:
    """Start a daemon whose browsers are replaced a few times in this run."""
    backend = str(request.param)
    options = {"backend": backend, "recycle_requests": renders // BROWSERS}
    pool = {"worker": "musterd.workers.browser:BrowserWorker", "size": 1, "options": options}
    return Fleet(muster({"browser": pool}, **usual_user), backend, trouble_site, waiting)


def test_what_is_held_stays_the_same_over_many_pages(
    soaked: Fleet, renders: int, tell: Callable[[str, object], None]
) -> None:
    worker = soaked.worker("browser")
    browsers = {soaked.one("browser", "browser").pid}
    held = []
    for number in range(renders):
        work(soaked, number)
        if number % (renders // TENTHS // 2) == 0:  # more often than browsers are replaced
            browsers.add(soaked.one("browser", "browser").pid)
        if (number + 1) % (renders // TENTHS) == 0:
            held.append(holdings(soaked))
    tell("pages", renders)
    tell("browsers", len(browsers))
    for name in Holdings._fields:
        unit = 1024 * 1024 if name.endswith("_bytes") else 1
        tell(f"{name} at each tenth", [round(getattr(each, name) / unit) for each in held])
    assert len(browsers) >= BROWSERS - 1, "they were replaced"
    assert soaked.worker("browser") == worker, "the worker was not"
    assert soaked.daemon.pool("browser").lost == {}
    earlier, later = held[: TENTHS // 2], held[TENTHS // 2 :]

    def mean(part: list[Holdings], name: str) -> float:
        return statistics.mean(getattr(each, name) for each in part)

    # The minimum of each part: the number of a browser's processes varies.
    least = [min(each.own_bytes for each in part) for part in (earlier, later)]
    assert least[1] < least[0] * GROWTH_MAX
    for name in ("supervisor_descriptors", "worker_descriptors"):
        assert mean(later, name) <= mean(earlier, name) + DESCRIPTORS_MORE_MAX, name
    assert later[-1].files <= earlier[0].files, "files are left"
    assert soaked.daemon.stop() == 0
