"""Which tasks may be on disk alone, and how rows become tasks again."""

from collections.abc import Iterable

from musterd.ipc.wire.messages import LOW, NOT_GIVEN
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.lanes import Lane
from musterd.supervisor.core.model.ledger import RUN_PREFIX
from musterd.supervisor.core.model.queue import UNKNOWN_COST_NS
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Route, Task, TaskState


def is_plain(task: Task) -> bool:
    """Whether the row of a task, and one client that waits, is all there is to know of it."""
    spec = task.spec
    return not (
        task.attempt
        or task.crashes
        or task.interruptions
        or task.expires_at_ns
        or task.cancelled
        or task.watchers
        or task.urged != LOW
        or spec.key
        or spec.id.startswith(RUN_PREFIX)
    )


def make_all(
    state: State, found: events.OnDisk, lane: Lane | None, peers: Iterable[bytes]
) -> list[Task]:
    """Make tasks of rows, each for its client in `peers`; queued in `lane`, if one is given."""
    now_ns, offset_ns = state.now_ns, state.wall_offset_ns
    if offset_ns is None:  # the wall clock cannot tell since when tasks wait
        offset_ns = -now_ns
    gate = lane.gate if lane is not None else None
    specs, walls = found.specs, found.submits_wall_ns
    routes = {name: _route(state, name) for name in {spec.name for spec in specs}}
    queued = TaskState.QUEUED
    return [
        Task(
            seq,
            spec,
            routes[spec.name],
            wall_ns,
            peer,
            queued,
            since_ns if (since_ns := wall_ns + spec.delay_ns - offset_ns) < now_ns else now_ns,
            lane,
            gate,
        )
        for seq, spec, wall_ns, peer in zip(found.seqs, specs, walls, peers, strict=True)
    ]


def _route(state: State, name: str) -> Route:
    pool = state.pools[name.partition(".")[0]]
    route = pool.route(name)
    if route is None:  # the worker class has changed meanwhile: the worker has the last word
        route = Route(pool, name, name.partition(".")[2], 0, NOT_GIVEN, UNKNOWN_COST_NS)
    return route
