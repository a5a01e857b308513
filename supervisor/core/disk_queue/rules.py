"""Everything that must always hold of the shelf; for tests and the simulation."""

from musterd.supervisor.core.disk_queue.queue import Shelf
from musterd.supervisor.core.model.lanes import Lane
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import TaskState


def validate(shelf: Shelf, state: State) -> None:
    on_the_way: dict[Lane, list[str]] = {}
    for portions in shelf.reading.values():
        for portion in portions:
            on_the_way.setdefault(portion.lane, []).extend(portion.ids)
            assert all(shelf.places[id_].written for id_ in portion.asked if id_ in shelf.places)
    tasks = state.tasks
    assert not any(id_ in tasks for id_ in shelf.places)
    assert all(id_ in shelf.places for id_ in shelf.watchers)
    behind = _behind(shelf, state)
    used = 0
    for pool in state.pools.values():
        shelved = 0
        for level in pool.queue.levels:
            for lane in level.lanes.values():
                used += bool(lane.shelf)
                assert lane.behind == behind.pop(lane, 0), lane.key
                assert bool(lane.reading) == (lane in on_the_way), lane.key
                ids = {*(lane.shelf or ()), *on_the_way.get(lane, ())}
                here = [id_ for id_ in ids if shelf.is_place(lane, id_)]
                kept = [id_ for id_ in ids if shelf.kept(lane, id_) is not None]
                assert len(here) + len(kept) == lane.behind, lane.key
                assert len(kept) == lane.kept, lane.key
                shelved += len(here)
                moves = lane.alive > lane.behind or lane.reading or _first_afloat(shelf, lane)
                assert moves or not lane.behind, lane.key
                waits = lane.room is shelf.room
                assert not waits or lane.alive == lane.behind, f"{lane.key} waits for nothing"
        assert shelved == pool.queue.shelved, (pool.name, shelved, pool.queue.shelved)
    assert not behind, behind
    assert used == shelf.used, (used, shelf.used)


def _behind(shelf: Shelf, state: State) -> dict[Lane, int]:
    """How many each lane has on its shelf, or on their way from there."""
    behind: dict[Lane, int] = {}
    for place in shelf.places.values():
        behind[place.lane] = behind.get(place.lane, 0) + 1
    for task in state.tasks.values():
        if task.behind:
            assert task.lane is not None and task.state == TaskState.QUEUED, task.spec.id
            behind[task.lane] = behind.get(task.lane, 0) + 1
    return behind


def _first_afloat(shelf: Shelf, lane: Lane) -> bool:
    """Whether the next of the lane that is not dead waits for the disk."""
    for id_ in lane.shelf or ():
        if shelf.is_place(lane, id_):
            return not shelf.places[id_].written
        if shelf.kept(lane, id_) is not None:
            return False
    return False
