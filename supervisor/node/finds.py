"""Look for tasks of the cluster, for people who ask the supervisor of this node.

A list has neither arguments nor results nor tracebacks; one task alone has its arguments.
"""

from collections.abc import Callable

import msgspec

from musterd.ipc.wire.messages import TaskView
from musterd.ipc.wire.node_messages import (
    FOUND_MAX,
    NOTICE_CHARS_MAX,
    FindTasks,
    FoundTasks,
    found_tasks,
)
from musterd.supervisor.cluster.engine import TaskFilter
from musterd.supervisor.cluster.sidecar_events import EngineAnswered, EngineFailed
from musterd.supervisor.node.engines import Engines, Job

ARGUMENTS_BYTES_MAX = 256 * 1024  # of one task: more is not shown


def find_tasks(engines: Engines, wanted: FindTasks, tell: Callable[[FoundTasks], None]) -> None:
    """Ask the engine, and tell what it found."""

    def answered(event: EngineAnswered | EngineFailed) -> None:
        tell(_found(wanted, event))

    if wanted.id:
        engines.call(Job(0, "view", (wanted.id,), {}, answered))
        return
    # One more than is shown, to know whether there are more; all of them, to find those of a node.
    # Only running tasks have a node.
    limit = FOUND_MAX if wanted.node else wanted.limit + 1
    state = (wanted.state or "running") if wanted.node else wanted.state
    which = TaskFilter(pool=wanted.pool, state=state, limit=limit)
    engines.call(Job(0, "find", (which,), {}, answered))


def _found(wanted: FindTasks, event: EngineAnswered | EngineFailed) -> FoundTasks:
    if isinstance(event, EngineFailed):
        reason = f"the cluster's database does not answer: {' '.join(event.reason.split())}"
        return FoundTasks(wanted.request, reason=reason[:NOTICE_CHARS_MAX])
    result = event.result
    if wanted.id:
        views = [_whole(result)] if isinstance(result, TaskView) else []
        return found_tasks(wanted.request, views)
    assert isinstance(result, list)
    views = [view for view in result if not wanted.node or view.worker == wanted.node]
    shown = [_short(view) for view in views[: wanted.limit]]
    more = len(views) > wanted.limit or (bool(wanted.node) and len(result) == FOUND_MAX)
    return found_tasks(wanted.request, shown, more=more)


def _whole(view: TaskView) -> TaskView:
    args = view.args if len(view.args) <= ARGUMENTS_BYTES_MAX else b""
    return msgspec.structs.replace(view, value=b"", args=args)


def _short(view: TaskView) -> TaskView:
    failure = view.failure
    if failure is not None:
        failure = msgspec.structs.replace(failure, traceback="")
    return msgspec.structs.replace(view, failure=failure, attempts=[], value=b"", args=b"")
