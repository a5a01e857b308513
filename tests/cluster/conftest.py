"""Engines to test: both in every test of the contract."""

from random import Random

import pytest
from rig import Rig

from musterd.supervisor.cluster.model_engine import ModelEngine


def model_rig() -> Rig:
    now_ns = [1_000_000_000]

    def pass_ns(by_ns: int) -> None:
        now_ns[0] += by_ns

    engine = ModelEngine(lambda: now_ns[0], Random(1), wall_ns=1_700_000_000_000_000_000)
    return Rig(engine, pass_ns, lambda lost: engine.restart(lost=lost))


@pytest.fixture(params=["model"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return model_rig()
