"""What unit tests share: a fleet of the core, and both ways of the store to write tasks."""

import pytest

from musterd.supervisor.store import result_batches, task_batches
from support.core import Muster


@pytest.fixture
def muster() -> type[Muster]:
    """Call it for a fleet: `muster(size=2)`."""
    return Muster


@pytest.fixture(params=["rows", "batches"])
def rows_or_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store as it is with tasks that come one by one, and with many at a time."""
    if request.param == "batches":
        monkeypatch.setattr(task_batches, "BATCH_MIN", 1)
        monkeypatch.setattr(result_batches, "BATCH_MIN", 1)
        monkeypatch.setattr(task_batches, "latest_id", lambda: "~")  # any id is one of a client
