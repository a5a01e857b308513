"""What tests of the store share."""

from collections.abc import Iterator

import pytest

from musterd.supervisor.store import sqlite

QUICK_SECONDS = 0.01


@pytest.fixture
def quick() -> Iterator[None]:
    """A store made after this looks at its files, and tries again, a hundred times as often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "LOOK_SECONDS", QUICK_SECONDS)
        patch.setattr(sqlite, "RETRY_SECONDS", QUICK_SECONDS)
        yield
