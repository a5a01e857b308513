"""Schedules of a cluster as clients and people see them, and a run that one of them asks for."""

from collections.abc import Iterable

import msgspec

from musterd.ipc.wire import schedule_messages as wire
from musterd.ipc.wire.messages import Rejection, TaskDeclaration
from musterd.supervisor.cluster.engine import NodeCard, PoolCard, Run, ScheduleView
from musterd.supervisor.cluster.scheduler import memory_of, run_by_hand, site_of
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.runs import asked_ns, still_running
from musterd.supervisor.core.model.shared import schedule_of
from musterd.supervisor.core.model.timing import Every, ZoneOf
from musterd.supervisor.core.model.watching import Watched
from musterd.supervisor.text.units import format_duration

ORIGIN = "the applied policy"  # of a schedule that was not added at run time
UNUSABLE = "unusable"

_decode = msgspec.msgpack.Decoder(Watched).decode


def shown(view: ScheduleView, zone_of: ZoneOf) -> wire.ScheduleView:
    """Return a schedule as a daemon shows its own."""
    due, watched = view.due, _watched(view.record)
    common = wire.ScheduleView(
        name=due.name,
        state=UNUSABLE,
        task="",
        when="",
        origin="" if view.added else ORIGIN,
        section=view.section,
        last_ns=view.ran_ns,
        last_task=view.task,
        last_state=view.state,
        runs=view.runs,
        skipped=view.skipped,
        skipped_why=memory_of(due).why,
        failures=watched.failures,
        stale=watched.stale,
    )
    try:
        policy = schedule_of(due.plan, zone_of)
    except ValueError as error:
        return msgspec.structs.replace(common, problem=str(error))
    state = "disabled" if not policy.enabled else "paused" if view.paused else "active"
    return msgspec.structs.replace(
        common,
        state=state,
        task=policy.task,
        when=when(policy),
        next_ns=(view.next_ns or 0) if state == "active" else 0,
    )


def when(policy: SchedulePolicy) -> str:
    timing = policy.timing
    if isinstance(timing, Every):
        return f"every {format_duration(timing.every_ns)}"
    return f"{timing.expression} ({timing.zone})"


def due_run(
    view: ScheduleView, id_: str, cards: Iterable[NodeCard], zone_of: ZoneOf
) -> Run | Rejection | None:
    """Return the run that somebody asks for by this id ("": by none), or why it is refused; None if
    it is alive already."""
    due = view.due
    try:
        policy = schedule_of(due.plan, zone_of)
    except ValueError as error:
        why = f"schedule '{due.name}' cannot be run from here: {error}"
        return Rejection(due.name, wire.INVALID_SCHEDULE, why)
    if id_ and due.alive == id_:
        return None
    if due.alive and not policy.overlap:
        return still_running(due.name, due.alive)
    declared = declared_in((pool for card in cards for pool in card.pools), policy.task)
    run = run_by_hand(due, policy, site_of(policy, declared) if declared is not None else "")
    if not id_:
        return run
    spec = msgspec.structs.replace(run.spec, id=id_)
    return Run(asked_ns(id_), spec)


def declared_in(pools: Iterable[PoolCard], name: str) -> TaskDeclaration | None:
    """Return what the first of these pools says about a task."""
    for pool in pools:
        for task in pool.tasks:
            if f"{pool.name}.{task.method}" == name:
                return task
    return None


def _watched(record: bytes) -> Watched:
    try:
        return _decode(record) if record else Watched()
    except msgspec.MsgspecError:  # of another version
        return Watched()
