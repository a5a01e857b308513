"""Sidecars in a simulated world: every seed, every invariant."""

from simulation.sidecar_life import SidecarWorld

SEEDS = 400


def test_a_sidecar_is_there_when_it_is_wanted_and_never_twice() -> None:
    starts = kills = taken = 0
    for seed in range(SEEDS):
        world = SidecarWorld(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        starts += world.starts
        kills += world.kills
        taken += world.code != 0
    assert starts > 2 * SEEDS
    assert kills > SEEDS // 10, "hardly any hangs"
    assert taken > 5, "hardly any daemon's place is taken"
