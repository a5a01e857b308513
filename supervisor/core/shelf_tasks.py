"""What was read from the shelf, as tasks again."""

from collections.abc import Callable, Sequence

from musterd.ipc.messages import NOT_GIVEN, TaskSpec
from musterd.supervisor.core import events
from musterd.supervisor.core.lanes import Lane
from musterd.supervisor.core.queue import UNKNOWN_COST_NS
from musterd.supervisor.core.state import State
from musterd.supervisor.core.task import Route, Task, TaskState


def numbers_of(ids: list[str], specs: list[TaskSpec]) -> Sequence[int]:
    """Where among the specs each of these is, -1 for nowhere. As a rule both are in one order."""
    if [spec.id for spec in specs] == ids:
        return range(len(ids))
    at = {spec.id: number for number, spec in enumerate(specs)}
    return [at.get(id_, -1) for id_ in ids]


def maker(
    state: State, watchers: dict[str, dict[bytes, None]], found: events.Shelved, lane: Lane | None
) -> Callable[[int, bytes], Task]:
    """What makes a task of one of these, by its number, for the one who waits; queued in that lane.

    `watchers`: others who wait, by id.
    """
    seqs, specs, walls = found.seqs, found.specs, found.submits_wall_ns
    now_ns, offset_ns = state.now_ns, state.wall_offset_ns
    gate = lane.gate if lane is not None else None
    routes: dict[str, Route] = {}

    def make(number: int, peer: bytes) -> Task:
        spec, wall_ns = specs[number], walls[number]
        route = routes.get(spec.name)
        if route is None:
            route = routes[spec.name] = _route(state, spec.name)
        since_ns = now_ns
        if offset_ns is not None:  # as far as the wall clock can tell
            since_ns = wall_ns + spec.delay_ns - offset_ns
        task = Task(
            seqs[number],
            spec,
            route,
            wall_ns,
            peer,
            TaskState.QUEUED,
            queued_ns=since_ns if since_ns < now_ns else now_ns,
            lane=lane,
            gate=gate,
        )
        if watchers:
            task.watchers = watchers.pop(spec.id, None)
        return task

    return make


def _route(state: State, name: str) -> Route:
    pool = state.pools[name.partition(".")[0]]
    route = pool.route(name)
    if route is None:  # its class has changed meanwhile: the worker has the last word
        route = Route(pool, name, name.partition(".")[2], 0, NOT_GIVEN, UNKNOWN_COST_NS)
    return route
