"""Several fleets around one engine: every seed, every invariant."""

import pytest
from simulation.cluster import ASKING_SEED, KINDS, ClusterWorld

FEWER = 2  # as many seeds as of each kind of a single fleet, divided by this

# Seeds that found a bug, with what it was.
CORPUS = {
    15: "a pool that left the cluster and came back had forgotten what it had seen",
    1679: "what was granted to a pool that had just left the cluster was never given back",
    85: "an attempt that had expired began, where a timer was late",
    206867: "a shutdown that nobody answered: its ends wait for the lease",
    3891: "a call of the sidecar before last came late, whose sessions had been ended (no bug)",
    1035: "an end that was told, and whose claim was registered again, counted twice",
}


@pytest.mark.parametrize("seed", CORPUS, ids=str)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    ClusterWorld(seed).run()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_every_task_of_the_cluster_ends_once(seeds: range, number: int) -> None:
    faults = KINDS[number][1]
    first = seeds.start - seeds.start % len(KINDS) + number
    worlds = [ClusterWorld(seed) for seed in range(first, first + len(seeds) // FEWER, len(KINDS))]
    for world in worlds:
        world.run()
    accepted = sum(len(world.accepted) for world in worlds)
    assert accepted > 10 * len(worlds), "hardly anything is accepted"
    many = len(worlds) >= 10 and not seeds.start  # what is rare need not be among any few others
    assert not many or sum(world.ended.get("refused", 0) for world in worlds), "nothing is refused"
    assert not many or sum(world.joined for world in worlds), "no task has joined another"
    timetables = [world.timetable for world in worlds if world.timetable.used]
    runs = sum(len(each) for table in timetables for each in table.instants.values())
    assert runs > 10 * len(timetables), "schedules hardly run"
    assert not many or sum(table.lost_races for table in timetables), "no node was too late"
    if many and any(world.profile.fail for world in worlds):
        assert sum(table.replaced for table in timetables), "no run ended for the next one"
        assert sum(table.hastened for table in timetables), "no run was attempted in its place"
    logins = [world.logins for world in worlds if world.logins.used]
    for name in ("failed", "holds", "held", "told", "wanted", "again", "refused"):
        assert not many or sum(getattr(each, name) for each in logins), f"logins: none {name}"
    changes = sum(len(table.told) for table in timetables)
    assert changes > len(timetables), "hardly anything changes"
    assert not (many and faults.node_deaths) or sum(table.retold for table in timetables)
    assert not (many and faults.node_deaths) or sum(world.reaped for world in worlds)
    assert not (many and faults.lost) or sum(world.fenced for world in worlds)
    assert not (many and faults.sidecar_deaths) or sum(world.takeovers for world in worlds)
    asking = [world for world in worlds if world.seed >= ASKING_SEED]
    for name in ("locks_given", "locks_refused", "saves", "loads"):
        total = sum(getattr(world.shared, name) for world in asking)
        assert total > len(asking) or len(asking) < 10, name
    for world in worlds:
        if not (faults.lost or world.profile.crash):
            runs = sum(world.ended.get(kind, 0) for kind in ("succeeded", "failed", "wanted"))
            assert sum(world.runs.values()) == runs, "a run is told of once"
