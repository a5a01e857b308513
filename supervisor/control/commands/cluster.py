"""Commands about tasks of the whole cluster: the cluster sidecar of this node looks for them."""

from collections.abc import Callable

from msgspec import structs

from musterd.ipc.wire.messages import TaskView
from musterd.ipc.wire.node_messages import FindTasks, FoundTasks
from musterd.supervisor.api import rpc
from musterd.supervisor.api.convert import no_such_task
from musterd.supervisor.api.rpc import FAILED, RpcError
from musterd.supervisor.api.status import TaskList, TaskStatus, task_status
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.shell import Shell


class ClusterCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def methods(self) -> Methods:
        return {rpc.ListClusterTasks: self._list, rpc.GetClusterTask: self._get}

    def _list(self, params: rpc.ListClusterTasks) -> Pending:
        wanted = FindTasks(0, params.state, params.pool, params.node, params.limit)
        return self._find(
            wanted, lambda told: TaskList(tasks=list(map(_status, told.tasks)), more=told.more)
        )

    def _get(self, params: rpc.GetClusterTask) -> Pending:
        def answer(told: FoundTasks) -> object:
            tasks = told.tasks
            return _status(tasks[0]) if tasks else no_such_task(params.id)

        return self._find(FindTasks(0, id=params.id), answer)

    def _find(self, wanted: FindTasks, answer: Callable[[FoundTasks], object]) -> Pending:
        pending = Pending()

        def found(told: FoundTasks) -> None:
            pending.resolve(RpcError(FAILED, told.reason) if told.reason else answer(told))

        self._shell.find_in_cluster(wanted, found)
        return pending


def _status(view: TaskView) -> TaskStatus:
    """Return a task of the cluster, whose view names the node and not the worker."""
    shown = task_status(structs.replace(view, worker=""), with_value=False)
    return structs.replace(shown, node=view.worker)
