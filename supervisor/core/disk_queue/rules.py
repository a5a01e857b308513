"""Everything that must always hold of the disk queue; for tests and the simulation."""

from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model.lanes import Lane
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import TaskState


def validate(disk_queue: DiskQueue, state: State) -> None:
    on_the_way: dict[Lane, list[str]] = {}
    for portions in disk_queue.reading.values():
        for portion in portions:
            on_the_way.setdefault(portion.lane, []).extend(portion.ids)
            assert all(
                disk_queue.places[id_].written for id_ in portion.asked if id_ in disk_queue.places
            )
    tasks = state.tasks
    assert not any(id_ in tasks for id_ in disk_queue.places)
    assert all(id_ in disk_queue.places for id_ in disk_queue.watchers)
    behind = _behind(disk_queue, state)
    used = 0
    for pool in state.pools.values():
        on_disk = 0
        for level in pool.queue.levels:
            for lane in level.lanes.values():
                used += bool(lane.disk_ids)
                assert lane.behind == behind.pop(lane, 0), lane.key
                assert bool(lane.reading) == (lane in on_the_way), lane.key
                ids = {*(lane.disk_ids or ()), *on_the_way.get(lane, ())}
                here = [id_ for id_ in ids if disk_queue.is_place(lane, id_)]
                kept = [id_ for id_ in ids if disk_queue.kept(lane, id_) is not None]
                assert len(here) + len(kept) == lane.behind, lane.key
                assert len(kept) == lane.kept, lane.key
                on_disk += len(here)
                moves = (
                    lane.alive > lane.behind or lane.reading or _first_unwritten(disk_queue, lane)
                )
                assert moves or not lane.behind, lane.key
                waits = lane.waits_among is disk_queue.waiting
                assert not waits or lane.alive == lane.behind, f"{lane.key} waits for nothing"
        assert on_disk == pool.queue.on_disk, (pool.name, on_disk, pool.queue.on_disk)
    assert not behind, behind
    assert used == disk_queue.used, (used, disk_queue.used)


def _behind(disk_queue: DiskQueue, state: State) -> dict[Lane, int]:
    """Count the tasks of each lane in its disk tail, or on their way from there."""
    behind: dict[Lane, int] = {}
    for place in disk_queue.places.values():
        behind[place.lane] = behind.get(place.lane, 0) + 1
    for task in state.tasks.values():
        if task.behind:
            assert task.lane is not None and task.state == TaskState.QUEUED, task.spec.id
            behind[task.lane] = behind.get(task.lane, 0) + 1
    return behind


def _first_unwritten(disk_queue: DiskQueue, lane: Lane) -> bool:
    """Whether the first live task of the disk tail is still being written."""
    for id_ in lane.disk_ids or ():
        if disk_queue.is_place(lane, id_):
            return not disk_queue.places[id_].written
        if disk_queue.kept(lane, id_) is not None:
            return False
    return False
