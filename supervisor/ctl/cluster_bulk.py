"""Lists by options and commands in bulk with --cluster.

The database finds the newest tasks that fit, without cursors: a command in bulk is one step here,
for CLUSTER_BULK_MAX tasks at most, and is typed again for the others.
"""

from collections.abc import Iterable

from musterd.ipc.wire.messages import FAILED, QUEUED, RUNNING, WAITING, TaskView
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BulkResult, RefusedTask
from musterd.supervisor.cluster.engine import DEAD, TaskFilter
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.ctl.bulk import CLUSTER_BULK_MAX

LIVE_STATES = (QUEUED, WAITING, RUNNING)
# The task has changed since it was found: another command was faster.
_CHANGED = ("NoSuchTask", "NotEnded", "NotFailed")


def find(engine: PostgresEngine, where: Selection, state: str, limit: int) -> list[TaskView]:
    """Return the newest tasks that fit, in this state; one more than `limit` if there are more."""
    which = TaskFilter(
        pool=where.pool,
        target=where.target,
        state=state,
        error=where.error,
        key=where.key,
        schedule=where.schedule,
        limit=limit + 1,
    )
    found = engine.find(which)
    return [view for view in found if (view.finished_at or view.submitted_at) >= where.since]


def retry(engine: PostgresEngine, asked: rpc.RetryTasks, where: Selection) -> BulkResult:
    """Run the newest tasks that fit again. What finds no room is refused: a second look would find
    what has failed again."""
    ids = _ids(engine, where, [_dead_state(where)])
    if asked.dry_run:
        return BulkResult(matched=len(ids))
    refused = engine.retry(ids)
    told = [
        RefusedTask(each.id, each.code, each.message)
        for each in refused
        if each.code not in _CHANGED
    ]
    return BulkResult(matched=len(ids), done=len(ids) - len(refused), refused=told)


def cancel(engine: PostgresEngine, asked: rpc.CancelTasks, where: Selection) -> BulkResult:
    if where.ended:
        why = "only tasks that have not ended can be cancelled"
        raise rpc.RpcError(rpc.INVALID_PARAMS, why)
    ids = _ids(engine, where, [where.state] if where.state else LIVE_STATES)
    if asked.dry_run:
        return BulkResult(matched=len(ids))
    return BulkResult(matched=len(ids), done=len(engine.cancel(ids)))


def purge(engine: PostgresEngine, asked: rpc.PurgeTasks, where: Selection) -> BulkResult:
    if where.before:
        why = "with --cluster, --older-than cannot stand beside options that say which tasks"
        raise rpc.RpcError(rpc.INVALID_PARAMS, why)
    state = where.state or FAILED
    ids = _ids(engine, where, [state])
    if asked.dry_run or not ids:
        return BulkResult(matched=len(ids))
    done = engine.purge(TaskFilter(state=state, ids=tuple(ids)))
    return BulkResult(matched=len(ids), done=done)


def _dead_state(where: Selection) -> str:
    return DEAD if where.state in ("", FAILED) else where.state


def _ids(engine: PostgresEngine, where: Selection, states: Iterable[str]) -> list[str]:
    found = [view.id for state in states for view in find(engine, where, state, CLUSTER_BULK_MAX)]
    return found[:CLUSTER_BULK_MAX]
