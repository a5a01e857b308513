"""Engines to test: both in every test of the contract; one PostgreSQL for a process of tests."""

from collections.abc import Iterator
from random import Random

import pytest
from postgres import Cluster, Server, servers
from rig import Rig

from musterd.supervisor.cluster.model_engine import ModelEngine


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
