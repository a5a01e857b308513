"""Options of the chaos tests: `pytest tests/chaos --chaos-seed N --chaos-seconds 300`."""

import os
from collections.abc import Callable

import pytest

# What `make test` and `make test-long` have time for; `make chaos` asks for more.
STORM_SECONDS = 15.0
RESTARTS = 300
MARGIN_SECONDS = 240.0  # added to the time of the storm, for all that comes before and after
SECONDS_PER_RESTART_MAX = 0.2  # a quiet machine needs about 0.015

TABLE = pytest.StashKey[list[tuple[str, str]]]()
SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-seed", type=int, help="repeat the chaos run of this seed")
    group.addoption(
        "--chaos-seconds", type=float, help=f"how long the storm lasts (default {STORM_SECONDS:g})"
    )
    group.addoption(
        "--chaos-restarts", type=int, help=f"how many workers are killed (default {RESTARTS})"
    )


# pytest knows the options only when this folder is named to it.


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed that all tests of a run share."""
    seed = request.config.stash.get(SEED, request.config.getoption("--chaos-seed", None))
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "big")
    request.config.stash[SEED] = int(seed)
    print(f"\nchaos: repeat with  pytest tests/chaos --chaos-seed {seed}")
    return int(seed)


@pytest.fixture
def storm_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--chaos-seconds", None) or STORM_SECONDS)


@pytest.fixture
def restarts(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--chaos-restarts", None) or RESTARTS)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Add a row to the table at the end of the run: tell("tasks", 2000)."""
    table = request.config.stash.setdefault(TABLE, [])
    table.append((request.node.name, ""))

    def row(what: str, value: object) -> None:
        table.append((f"  {what}", str(value)))

    return row


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give long runs the time they ask for."""
    storm = float(config.getoption("--chaos-seconds", None) or STORM_SECONDS)
    restarts = int(config.getoption("--chaos-restarts", None) or RESTARTS)
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "storm_seconds" in names:
            item.add_marker(pytest.mark.timeout(storm * 2 + MARGIN_SECONDS))
        elif "restarts" in names:
            seconds = restarts * SECONDS_PER_RESTART_MAX
            item.add_marker(pytest.mark.timeout(seconds + MARGIN_SECONDS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    table = terminalreporter.config.stash.get(TABLE, [])
    if not table:
        return
    seed = terminalreporter.config.stash[SEED]
    terminalreporter.section(f"chaos, repeated by --chaos-seed {seed}")
    width = max(len(what) for what, _ in table)
    for what, value in table:
        terminalreporter.write_line(f"{what:<{width}}  {value}".rstrip())
