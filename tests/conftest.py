"""The options and fixtures of every folder of tests, and how tests are spread over processes."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from support.daemon import Musters, is_gone, musters, short_folders
from support.waiting import Waiting, wait_for

LONG = "long"
OURS = ("MUSTERD_CHROMIUM", "MUSTERD_TEST_PYTHON", "MUSTERD_SCREENSHOTS")  # variables for the tests
FOREIGN = ("/etc/musterd", "/var/lib/musterd", "/run/musterd")
LOOKS = frozenset(("open", "os.listdir", "os.scandir", "sqlite3.connect"))

# A suite that is run in the background has inherited "ignore Ctrl-C", and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes says more about what else this machine does than about us.
hypothesis.settings.register_profile(
    "musterd", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("musterd")


# Daemons and commands of the tests start in half the time from compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# A musterd of this machine decides no test: neither what it was told, nor what it has stored.
for name in [each for each in os.environ if each.startswith("MUSTERD_")]:
    if name not in OURS:
        del os.environ[name]
_strange: list[str] = []


def _look(event: str, arguments: tuple[object, ...]) -> None:
    if event in LOOKS and str(arguments[0]).startswith(FOREIGN):
        _strange.append(f"{event} {arguments[0]}")


sys.addaudithook(_look)


@pytest.fixture(autouse=True)
def _nothing_of_this_machine() -> Iterator[None]:
    """No test reads what a musterd that is installed here has."""
    _strange.clear()
    yield
    assert not _strange, f"read of this machine: {_strange}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run also the tests marked `long`")


@pytest.hookimpl(trylast=True)  # when every folder has marked what is its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `long`, unless it was asked for, by --long or by its own name."""
    if config.getoption("--long") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker(LONG) is not None]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread the tests file by file; those of tests/system as one file, for their one image; those
    of the simulation one by one, because they have nothing in common."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/system/"):
                return "tests/system"
            return nodeid if nodeid.startswith("tests/sim/") else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A directory with a path short enough for Unix sockets."""
    with short_folders() as folder:
        yield folder


@pytest.fixture
def muster(short_folder: Path, request: pytest.FixtureRequest) -> Iterator[Musters]:
    """muster(pools={...}, supervisor__drain_timeout="5s", ...) -> a running daemon.

    Afterwards no process, socket or temporary file of it may be left.
    """
    with musters(short_folder, request.node) as make:
        yield make


@pytest.fixture(scope="module")
def module_muster(request: pytest.FixtureRequest) -> Iterator[Musters]:
    """Daemons that tests of a module share; each is closed by whoever made it."""
    with short_folders() as folder, musters(folder, request.node) as make:
        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        item.failed_call = True  # type: ignore[attr-defined]
    return report


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether there is time for more of the same: longer attacks, more kills."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def waiting() -> Waiting:
    """waiting("what is awaited", condition) -> the condition's first true value."""
    return wait_for


@pytest.fixture(scope="session")
def gone() -> Callable[[psutil.Process], bool]:
    """gone(process): whether what a killed daemon left runs no more."""
    return is_gone
