"""Options of the simulation: `python -m pytest tests/sim --seeds 20000` or `--seed 1234`."""

import pytest

from musterd.supervisor.core.tasks import bulk, logins

SEEDS_DEFAULT = 500  # a minute of processor time
SEEDS_LONG = 5000  # with --long; `--seeds 30000` before a release


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="simulate this seed alone")
    parser.addoption(
        "--seeds",
        type=int,
        help=f"how many seeds (default {SEEDS_DEFAULT}, {SEEDS_LONG} with --long)",
    )
    parser.addoption("--first-seed", type=int, help="where to begin (default 0)")


@pytest.fixture(autouse=True)
def _core_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a simulated world sets: tests of other folders run in the same process."""
    monkeypatch.setattr(bulk, "RUN_MIN", bulk.RUN_MIN)
    monkeypatch.setattr(logins, "ENDED_MAX", logins.ENDED_MAX)


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> range:
    """Return the seeds to run. pytest knows the options only when this folder is named to it."""
    config = request.config
    only = config.getoption("--seed", None)
    if only is not None:
        return range(only, only + 1)
    first = config.getoption("--first-seed", None) or 0
    usual = SEEDS_LONG if config.getoption("--long") else SEEDS_DEFAULT
    return range(first, first + (config.getoption("--seeds", None) or usual))
