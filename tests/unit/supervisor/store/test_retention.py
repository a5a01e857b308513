"""When the store forgets ended tasks."""

from typing import Any

import pytest

from musterd.supervisor.config.schema import StoreConfig
from musterd.supervisor.store.retention import ENDED_MAX, ENDED_MIN, INTERVAL_NS, Trimming


class Counting:
    """A store that knows only the number of its ended tasks."""

    def __init__(self) -> None:
        self.ended = 7
        self.trims = 0
        self.keep_ns: int | None = 0

    def trim(self, keep_ns: int | None, keep_max: int) -> None:
        self.trims += 1
        self.keep_ns = keep_ns


def test_it_forgets_once_a_minute_and_sooner_after_much() -> None:
    store: Any = Counting()
    trimming, keep = Trimming(store, 0), StoreConfig()
    trimming.look(INTERVAL_NS - 1, keep, by_age=True)
    assert store.trims == 0
    trimming.look(INTERVAL_NS, keep, by_age=True)
    assert store.trims == 1
    store.ended += ENDED_MAX - 1
    trimming.look(INTERVAL_NS + 1, keep, by_age=True)
    assert store.trims == 1
    store.ended += 1
    trimming.look(INTERVAL_NS + 2, keep, by_age=True)
    trimming.look(INTERVAL_NS + 3, keep, by_age=True)
    assert store.trims == 2
    trimming.look(2 * INTERVAL_NS + 1, keep, by_age=True)
    assert store.trims == 2, "a minute after the last"


@pytest.mark.parametrize(("kept", "many"), [(0, ENDED_MIN), (5_000, 5_000)])
def test_where_few_are_kept_it_forgets_after_as_many(kept: int, many: int) -> None:
    store: Any = Counting()
    trimming, keep = Trimming(store, 0), StoreConfig(keep_results_max=kept)
    store.ended += many - 1
    trimming.look(1, keep, by_age=True)
    assert store.trims == 0
    store.ended += 1
    trimming.look(2, keep, by_age=True)
    assert store.trims == 1


def test_while_the_clock_is_doubted_nothing_is_forgotten_for_its_age() -> None:
    store: Any = Counting()
    trimming, keep = Trimming(store, 0), StoreConfig()
    trimming.look(INTERVAL_NS, keep, by_age=False)
    assert (store.trims, store.keep_ns) == (1, None)
    trimming.look(2 * INTERVAL_NS, keep, by_age=True)
    assert (store.trims, store.keep_ns) == (2, keep.keep_results_ns)
