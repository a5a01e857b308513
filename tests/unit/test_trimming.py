"""When the store forgets."""

from typing import Any

from musterd.supervisor.config_schema import StoreConfig
from musterd.supervisor.trimming import ENDED_MAX, INTERVAL_NS, Trimming


class Counting:
    """A store of which only the number of ended tasks is known."""

    def __init__(self) -> None:
        self.ended = 7
        self.trims = 0

    def trim(self, keep_ns: int, keep_max: int) -> None:
        self.trims += 1


def test_it_forgets_once_a_minute_and_sooner_after_much() -> None:
    store: Any = Counting()
    trimming, keep = Trimming(store, 0), StoreConfig()
    trimming.look(INTERVAL_NS - 1, keep)
    assert store.trims == 0
    trimming.look(INTERVAL_NS, keep)
    assert store.trims == 1
    store.ended += ENDED_MAX - 1
    trimming.look(INTERVAL_NS + 1, keep)
    assert store.trims == 1
    store.ended += 1
    trimming.look(INTERVAL_NS + 2, keep)
    trimming.look(INTERVAL_NS + 3, keep)
    assert store.trims == 2
    trimming.look(2 * INTERVAL_NS + 1, keep)
    assert store.trims == 2, "a minute after the last"
