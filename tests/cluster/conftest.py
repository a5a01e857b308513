"""Engines to test: both in every test of the contract; one PostgreSQL for a process of tests."""

from collections.abc import Iterator
from random import Random

import pytest
from chaos_run import seconds_max
from postgres import Cluster, Server, servers
from rig import Rig

from musterd.supervisor.cluster.model_engine import ModelEngine

# Of a chaos run: what `make test` and `make test-long` have time for; `make chaos-cluster` asks for
# more.
CHAOS_TASKS = 3_000
CHAOS_TASKS_LONG = 12_000
MARGIN_SECONDS = 300.0  # before and after a run, which ends itself


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos of a cluster")
    group.addoption("--chaos-tasks", type=int, help=f"how many tasks (default {CHAOS_TASKS})")
    group.addoption("--chaos-cluster-seed", type=int, help="repeat the plan of this seed")


# pytest knows the options only when this folder is named to it.


def _chaos_tasks(config: pytest.Config) -> int:
    usual = CHAOS_TASKS_LONG if config.getoption("--long") else CHAOS_TASKS
    return int(config.getoption("--chaos-tasks", None) or usual)


@pytest.fixture
def chaos_tasks(request: pytest.FixtureRequest) -> int:
    return _chaos_tasks(request.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give a chaos run the time that it may take."""
    for item in items:
        if "chaos_tasks" in getattr(item, "fixturenames", ()):
            seconds = seconds_max(_chaos_tasks(config)) + MARGIN_SECONDS
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with servers() as server:
        yield server


@pytest.fixture(scope="session")
def _cluster(server: Server) -> Cluster:
    return Cluster(server, "contract")


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """A cluster in PostgreSQL, as new."""
    _cluster.reset()
    yield _cluster
    _cluster.close()


def model_rig() -> Rig:
    now_ns = [1_000_000_000]

    def pass_ns(by_ns: int) -> None:
        now_ns[0] += by_ns

    engine = ModelEngine(lambda: now_ns[0], Random(1), wall_ns=1_700_000_000_000_000_000)
    return Rig(engine, pass_ns, lambda lost: engine.restart(lost=lost))


@pytest.fixture(params=["model", "postgres"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Each engine of the contract, one after the other."""
    if request.param == "model":
        return model_rig()
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster.rig()
