"""Schedules over simulated weeks: simulation/timetable.py says what is checked."""

import pytest
from simulation.timetable import Timetable, story_of

SHARE = 120  # a seed of these weeks takes as long as that many other seeds


def run_seed(seed: int) -> Timetable:
    world = Timetable(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(
            f"timetable of seed {seed} after {world.steps} steps: {type(error).__name__}: {error}\n"
            f"again: python -m pytest tests/sim/test_timetables.py --seed {seed}\n{story_of(world)}"
        ) from error
    return world


@pytest.mark.timeout(600)
def test_every_instant_is_run_once_or_counted_as_skipped(seeds: range) -> None:
    worlds = [run_seed(seed) for seed in seeds[::SHARE]]
    if len(worlds) >= 25:
        accounts = [account for world in worlds for account in world.accounts.values()]
        assert sum(len(account.instants) for account in accounts) > 5000
        assert sum(account.skipped for account in accounts) > 1000
        assert sum(account.replaced for account in accounts) > 50
        assert sum(account.hastened for account in accounts) > 0
        watched = [account.watched for account in accounts]
        assert sum(len(each.changes) for each in watched) > 500
        assert sum(each.repeated for each in watched) > 0
        assert sum(each.stales for each in watched) > 50
        assert sum(account.turn for account in accounts) > 10
