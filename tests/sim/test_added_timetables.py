"""Schedules of run time over simulated days: simulation/added_timetable.py says what is checked."""

import pytest
from simulation.added_timetable import AddedTimetable, story_of

SHARE = 10  # a seed of these days takes as long as that many other seeds


def run_seed(seed: int) -> AddedTimetable:
    world = AddedTimetable(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(
            f"added timetable of seed {seed} after {world.steps} steps: "
            f"{type(error).__name__}: {error}\n"
            f"again: python -m pytest tests/sim/test_added_timetables.py --seed {seed}\n"
            f"{story_of(world)}"
        ) from error
    return world


@pytest.mark.timeout(600)
def test_what_is_put_stays_and_what_is_deleted_runs_no_more(seeds: range) -> None:
    worlds = [run_seed(seed) for seed in seeds[::SHARE]]
    if len(worlds) >= 25:
        assert sum(world.runs for world in worlds) > 1000
        assert sum(world.survived for world in worlds) > 100
