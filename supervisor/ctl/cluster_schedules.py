"""What `musterctl --cluster schedule` does."""

from random import Random
from zoneinfo import ZoneInfo

import msgspec
from msgspec import structs

from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import IN_USE, READ_ONLY
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import (
    CommandResult,
    RefusedSchedule,
    ScheduleKeys,
    ScheduleList,
    SchedulesPut,
    ScheduleStatus,
)
from musterd.supervisor.cluster.added import added
from musterd.supervisor.cluster.adding import refusal
from musterd.supervisor.cluster.engine import Engine, ScheduleView
from musterd.supervisor.cluster.schedule_views import due_run, shown
from musterd.supervisor.ctl.cluster_link import ClusterRefused
from musterd.supervisor.settings.added_schedules import read_shared

NAMES_SHOWN_MAX = 20  # in the message that a schedule is not known
TRIES_MAX = 10  # to run one by hand, while nodes decide about it
SCHEDULES_LISTED_MAX = 500  # of one answer
STALE = "stale"  # for lists: those that keep failing, whatever their state


def listed(engine: Engine, asked: rpc.ListSchedules) -> ScheduleList:
    """Return the schedules of the cluster after a name, as many as one answer has."""
    found = engine.schedules(after=asked.after, limit=SCHEDULES_LISTED_MAX + 1)
    views = [status_of(view) for view in found[:SCHEDULES_LISTED_MAX]]
    if asked.state:
        views = [each for each in views if asked.state in (each.state, STALE if each.stale else "")]
    return ScheduleList(schedules=views, more=len(found) > SCHEDULES_LISTED_MAX)


def keys_of(engine: Engine, name: str) -> ScheduleKeys:
    """Return a schedule with the keys by which it was put."""
    view = _found(engine, name)
    keys = msgspec.msgpack.decode(view.section) if view.section else {}
    return ScheduleKeys(keys=keys, **structs.asdict(status_of(view)))


def put(engine: Engine, asked: rpc.PutSchedule) -> ScheduleStatus:
    """Add a schedule, or change one that was added."""
    [*refused] = _put(engine, [(asked.name, msgspec.msgpack.encode(asked.keys))])
    if refused:
        raise convert.rejected(refused[0])
    return status_of(_found(engine, asked.name))


def put_many(engine: Engine, asked: rpc.PutSchedules) -> SchedulesPut:
    puts = [(each.name, msgspec.msgpack.encode(each.keys)) for each in asked.schedules]
    paused = frozenset(each.name for each in asked.schedules if each.paused)
    refused = _put(engine, puts, paused, replace=asked.replace, dry_run=asked.dry_run)
    return SchedulesPut(refused=[RefusedSchedule(name=e.id, why=e.message) for e in refused])


def _put(
    engine: Engine,
    puts: list[tuple[str, bytes]],
    paused: frozenset[str] = frozenset(),
    *,
    replace: bool = True,
    dry_run: bool = False,
) -> list[Rejection]:
    found = engine.cards()
    cards = found.cards if found is not None else ()
    pools = {pool.name for card in cards for pool in card.pools}
    redact = tuple(sorted({word for card in cards for word in card.redact}))
    usable, rejected = read_shared(pools, redact, puts)
    policies = [(each.policy, each.section) for each in usable if each.policy is not None]
    if dry_run:
        known = {view.due.name: view for view in engine.schedules()}
        for policy, _ in policies:
            view = known.get(policy.name)
            if view is not None and not (view.added and replace):
                code = IN_USE if view.added else READ_ONLY
                rejected.append(refusal(policy.name, code))
        return rejected
    return rejected + engine.put(added(policies, Random(), paused), replace=replace)


def delete(engine: Engine, name: str) -> CommandResult:
    """Forget a schedule that was added."""
    _found(engine, name)
    for refused in engine.delete([name]):
        raise convert.rejected(refused)
    return CommandResult()


def pause(engine: Engine, name: str, *, paused: bool) -> ScheduleStatus:
    """Pause a schedule, or let it go on without the instants of the pause."""
    engine.pause(name, paused=paused)
    return status_of(_found(engine, name))


def run(engine: Engine, name: str) -> ScheduleStatus:
    """Run a schedule now; RpcError if its last run has not ended, or the run is refused."""
    for _ in range(TRIES_MAX):
        view = _found(engine, name)
        found = engine.cards()
        made = due_run(view, "", found.cards if found is not None else (), ZoneInfo)
        if isinstance(made, Rejection):
            raise convert.rejected(made)
        assert made is not None, "it has no id before"
        due = view.due
        moved = {"last_ns": due.last_ns, "next_ns": view.next_ns, "memory": due.memory}
        settled = engine.settle(due, [made], **moved)  # type: ignore[arg-type]
        if settled is None:
            continue  # a node has just decided about it
        for verdict in settled.verdicts:
            if verdict.rejection is not None:
                raise convert.rejected(verdict.rejection)
        return status_of(_found(engine, name))
    raise ClusterRefused(f"schedule '{name}' changes all the time: try again")


def status_of(view: ScheduleView) -> ScheduleStatus:
    found = shown(view, ZoneInfo)
    return ScheduleStatus(
        name=found.name,
        state=found.state,
        task=found.task,
        when=found.when,
        origin=found.origin,
        problem=f"schedule '{found.name}': {found.problem}" if found.problem else "",
        next_at=found.next_ns / 1e9 or None,
        last_at=found.last_ns / 1e9 or None,
        last_task=found.last_task,
        last_state=found.last_state,
        runs=found.runs,
        skipped=found.skipped,
        skipped_why=found.skipped_why,
        failures=found.failures,
        stale=found.stale,
    )


def _found(engine: Engine, name: str) -> ScheduleView:
    for view in engine.schedules(name):
        return view
    raise RpcError(NO_SUCH_NAME, f"no such schedule: {name!r}: {known_names(engine)}")


def known_names(engine: Engine) -> str:
    names = [view.due.name for view in engine.schedules(limit=NAMES_SHOWN_MAX)]
    return f"there are {', '.join(names) or 'none'}"
