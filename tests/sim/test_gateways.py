"""Clients of a cluster in a world that fails: see simulation/gateways.py for what is checked."""

import pytest
from simulation.gateways import World

SHARE = 2  # a seed takes as long as so many of the other simulation


def run_seed(seed: int) -> World:
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(
            f"gateways of seed {seed} after {world.steps} steps, at {world.now_ns / 1e9} s: "
            f"{type(error).__name__}: {error}\n"
            f"again: python -m pytest tests/sim/test_gateways.py --seed {seed}"
        ) from error
    return world


@pytest.mark.timeout(600)
def test_nobody_is_told_what_is_not_so_and_everybody_is_told_the_end(seeds: range) -> None:
    worlds = [run_seed(seed) for seed in seeds[:: SHARE if len(seeds) > SHARE else 1]]
    if len(worlds) >= 10:
        assert min(sum(world.told != [] for world in worlds), len(worlds)) == len(worlds)
        for name in ("resent", "lost_answers", "deaths", "progress_told"):
            assert sum(getattr(world, name) for world in worlds) > len(worlds), name
        assert sum(client.rejections for world in worlds for client in world.clients) > 10
