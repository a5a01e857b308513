"""The monitor looks while it is switched on, and does nothing while it is off."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.config.schema import MemoryConfig, MonitorConfig
from musterd.supervisor.core.model.events import MemorySampled
from musterd.supervisor.log import log as journal
from musterd.supervisor.memory.watch import MemoryWatch
from support.core import Muster

ON, OFF = MonitorConfig(), MonitorConfig(enabled=False)
ALWAYS = MemoryConfig(statistics_ns=1)


class Spawner:
    def inits(self) -> dict[int, int]:
        return {}


class Notes:
    """A probe that notes what it is told, and has a sample at any time."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.sample = MemorySampled(())

    def look(self, *, on: bool) -> None:
        self.told.append(on)

    def look_every(self, seconds: float) -> None: ...

    def start(self) -> MemorySampled:
        self.told.append("looks")
        return self.sample

    def begin(self) -> None: ...

    def watch(self, roots: dict[int, int]) -> None: ...

    def take(self) -> MemorySampled:
        return self.sample


@pytest.fixture
def watches(tmp_path: Path) -> Iterator[Any]:
    made = []

    def make(monitor: MonitorConfig) -> MemoryWatch:
        watch: Any = MemoryWatch(ALWAYS, monitor, Spawner(), tmp_path)  # type: ignore[arg-type]
        made.append(watch._probe)
        watch.probe, watch._probe = watch._probe, Notes()
        return watch  # type: ignore[no-any-return]

    yield make
    for probe in made:
        probe.close()


def test_it_looks_from_the_start_and_hands_over_what_it_saw(watches: Any) -> None:
    watch = watches(ON)
    assert watch.open(0) is watch._probe.sample
    assert watch.hear() is watch._probe.sample
    assert watch._probe.told == [True, "looks"]


def test_switched_off_it_does_not_look_and_what_was_seen_before_is_dropped(watches: Any) -> None:
    watch = watches(OFF)
    assert watch.open(0) is None
    assert watch.hear() is None
    assert watch._probe.told == [False]
    watch.follow(ALWAYS, ON)
    assert watch.hear() is watch._probe.sample
    watch.follow(ALWAYS, OFF)
    assert watch.hear() is None
    assert watch._probe.told == [False, True, False]


def test_only_a_monitor_that_looks_writes_statistics(
    watches: Any, muster: type[Muster], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(journal, "note", lambda event, *_, **__: noted.append(event))
    fleet = muster(1).fleet
    for monitor, expected in ((OFF, []), (ON, ["machine.statistics"])):
        watch = watches(monitor)
        watch._probe = watch.probe
        watch.account(fleet, 10)
        assert noted == expected
