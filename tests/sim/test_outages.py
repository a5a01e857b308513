"""Circuit breakers over simulated weeks: simulation/outages.py says what is checked."""

import pytest
from simulation.outages import Outages, story_of

SHARE = 250  # a seed of these weeks takes as long as that many other seeds


def run_seed(seed: int) -> Outages:
    world = Outages(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(
            f"outages of seed {seed} after {world.steps} steps: {type(error).__name__}: {error}\n"
            f"again: python -m pytest tests/sim/test_outages.py --seed {seed}\n{story_of(world)}"
        ) from error
    return world


@pytest.mark.timeout(600)
def test_a_site_that_is_down_is_left_alone_and_found_again(seeds: range) -> None:
    worlds = [run_seed(seed) for seed in seeds[::SHARE]]
    if len(worlds) >= 10:
        assert sum(world.openings for world in worlds) > 500
        assert sum(world.deaths for world in worlds) > 500
        sites = [site for world in worlds for site in world.sites.values()]
        asked, checks = (sum(each) for each in zip(*map(counts, sites), strict=True))
        assert asked < checks, "they are asked less often than they are checked"


def counts(site: object) -> tuple[int, int]:
    return site.attempts_down, site.checks_down  # type: ignore[attr-defined]
