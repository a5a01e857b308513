"""What `musterctl --cluster schedule` does."""

from zoneinfo import ZoneInfo

from musterd.ipc.wire.messages import TaskDeclaration
from musterd.supervisor.api import convert
from musterd.supervisor.api.rpc import NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import ScheduleList, ScheduleStatus
from musterd.supervisor.cluster.engine import Engine, ScheduleView
from musterd.supervisor.cluster.scheduler import run_by_hand, site_of
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.runs import still_running
from musterd.supervisor.core.model.shared import schedule_of
from musterd.supervisor.core.model.timing import Every, Timing
from musterd.supervisor.ctl.cluster_link import ClusterRefused
from musterd.supervisor.text.units import format_duration

NAMES_SHOWN_MAX = 20  # in the message that a schedule is not known
TRIES_MAX = 10  # to run one by hand, while nodes decide about it


def listed(engine: Engine) -> ScheduleList:
    """Return the schedules of the cluster."""
    return ScheduleList(schedules=[status_of(view) for view in engine.schedules()])


def pause(engine: Engine, name: str, *, paused: bool) -> ScheduleStatus:
    """Pause a schedule, or let it go on without the instants of the pause."""
    engine.pause(name, paused=paused)
    return status_of(_found(engine, name))


def run(engine: Engine, name: str) -> ScheduleStatus:
    """Run a schedule now; RpcError if its last run has not ended, or the run is refused."""
    for _ in range(TRIES_MAX):
        view = _found(engine, name)
        due, policy = view.due, _policy_of(view)
        if due.alive and not policy.overlap:
            raise convert.rejected(still_running(name, due.alive))
        declared = _declared(engine, policy.task)
        made = run_by_hand(due, policy, site_of(policy, declared) if declared else "")
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
    policy = _policy_of(view)
    state = "active"
    if not policy.enabled:
        state = "disabled"
    elif view.paused:
        state = "paused"
    return ScheduleStatus(
        name=view.due.name,
        state=state,
        task=policy.task,
        when=_when(policy.timing),
        next_at=(view.next_ns or 0) / 1e9 if state == "active" else 0.0,
        last_at=view.ran_ns / 1e9,
        last_task=view.task,
        last_state=view.state,
        runs=view.runs,
        skipped=view.skipped,
    )


def _policy_of(view: ScheduleView) -> SchedulePolicy:
    try:
        return schedule_of(view.due.plan, ZoneInfo)
    except ValueError as error:
        raise ClusterRefused(f"schedule '{view.due.name}': {error}: upgrade musterd here") from None


def _found(engine: Engine, name: str) -> ScheduleView:
    views = {view.due.name: view for view in engine.schedules()}
    if name not in views:
        raise RpcError(NO_SUCH_NAME, f"no such schedule: {name!r}: {known_names(engine)}")
    return views[name]


def known_names(engine: Engine) -> str:
    names = [view.due.name for view in engine.schedules()]
    return f"there are {', '.join(names[:NAMES_SHOWN_MAX]) or 'none'}"


def _declared(engine: Engine, name: str) -> TaskDeclaration | None:
    """Return what a node says about a task, a live one first."""
    for node in sorted(engine.nodes(), key=lambda each: not each.alive):
        for pool in node.pools:
            for task in pool.tasks:
                if f"{pool.name}.{task.method}" == name:
                    return task
    return None


def _when(timing: Timing) -> str:
    if isinstance(timing, Every):
        return f"every {format_duration(timing.every_ns)}"
    return f"{timing.expression} ({timing.zone})"
