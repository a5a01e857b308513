"""Test workers, and programs that use musterd: a plugin of pytest (docs/testing.md).

    musterd_worker    opens a worker inside the test: real core and runtime, no daemon, no waiting
    musterd_daemon    runs a real daemon for a module of tests, in a directory of its own

May import: api, config, core, core.model, ctl, ipc.client, ipc.errors, ipc.wire, processes,
settings, sockets, store, system, views, workers.authoring, workers.metrics, workers.runtime.
Not for: tests of musterd itself, which have tests/support; anything that a daemon runs.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from musterd.testing.daemon import DaemonFailed, LocalDaemon, start_daemon
    from musterd.testing.protocols import OpenWorker, StartDaemon
    from musterd.testing.worker import LocalTask, LocalWorker, open_worker
    from musterd.testing.world import Attempt, Stuck

__all__ = [
    "Attempt",
    "DaemonFailed",
    "LocalDaemon",
    "LocalTask",
    "LocalWorker",
    "OpenWorker",
    "StartDaemon",
    "Stuck",
    "open_worker",
    "start_daemon",
]

_HOMES = {
    "Attempt": "musterd.testing.world",
    "DaemonFailed": "musterd.testing.daemon",
    "LocalDaemon": "musterd.testing.daemon",
    "LocalTask": "musterd.testing.worker",
    "LocalWorker": "musterd.testing.worker",
    "OpenWorker": "musterd.testing.protocols",
    "StartDaemon": "musterd.testing.protocols",
    "Stuck": "musterd.testing.world",
    "open_worker": "musterd.testing.worker",
    "start_daemon": "musterd.testing.daemon",
}
LOG_LINES_SHOWN = 100

_daemons: "list[LocalDaemon]" = []  # that run now


def __getattr__(name: str) -> Any:
    """Load a name on its first use: pytest imports this module in every project that has musterd
    installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'musterd.testing' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


@pytest.fixture
def musterd_worker() -> Iterator["OpenWorker"]:
    """Open workers inside the test: `promos = musterd_worker(Promos)`.

    They run in this process, with the real core, runtime and configuration, and a clock of their
    own. See musterd.testing.open_worker.
    """
    from musterd.testing.worker import open_worker

    with ExitStack() as opened:

        def make(worker: Any, **given: Any) -> Any:
            return opened.enter_context(open_worker(worker, **given))

        yield make


@pytest.fixture(scope="module")
def musterd_daemon() -> Iterator["StartDaemon"]:
    """Run real daemons for this module of tests: `daemon = musterd_daemon("musterd.toml")`.

    Each has a directory of its own, and is ended with all it has started. See
    musterd.testing.start_daemon.
    """
    from musterd.testing.daemon import start_daemon

    with ExitStack() as started:

        def make(config: Any = None, **given: Any) -> Any:
            daemon = started.enter_context(start_daemon(config, **given))
            started.callback(_daemons.remove, daemon)
            _daemons.append(daemon)
            return daemon

        yield make


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Have pytest leave the asserts of musterd as they are.

    It rewrites all modules of an installed package that has a plugin. That would cost the tests of
    everybody who imports musterd a second, whether they use these fixtures or not.
    """
    hook: Any = pluginmanager.rewrite_hook
    getattr(hook, "_must_rewrite", set()).discard("musterd")
    getattr(hook, "_marked_for_rewrite_cache", {}).clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Show the log of the daemons with a test that fails."""
    answer: Any = yield
    if _daemons and (report := answer.get_result()).failed:
        for daemon in _daemons:
            lines = daemon.log.splitlines()[-LOG_LINES_SHOWN:]
            report.sections.append(("musterd log", "\n".join(lines)))
