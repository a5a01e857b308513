"""Fixtures of unit tests: a fleet of the core, and both ways in which the store keeps tasks."""

import pytest

from musterd.supervisor.store import result_batches, task_batches
from support.core import Muster


@pytest.fixture
def muster() -> type[Muster]:
    """Return the class of the fleet: `muster(size=2)` makes one."""
    return Muster


@pytest.fixture(params=["rows", "batches"])
def rows_or_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with a row for each task, and with batches even of a single task."""
    if request.param == "batches":
        monkeypatch.setattr(task_batches, "BATCH_MIN", 1)
        monkeypatch.setattr(result_batches, "BATCH_MIN", 1)
        monkeypatch.setattr(task_batches, "latest_id", lambda: "~")  # let any id be a client's
