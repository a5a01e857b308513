"""Commands about failed tasks on control.sock: run them again, forget them."""

from musterd.ipc.wire.messages import FAILED as TASK_FAILED
from musterd.ipc.wire.messages import Rejection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import (
    PurgeResult,
    RefusedTask,
    RetryResult,
)
from musterd.supervisor.control.answers import LaterAnswers, Methods, Pending
from musterd.supervisor.control.commands.bulk import BulkCommands, selection_of
from musterd.supervisor.control.commands.lists import is_node
from musterd.supervisor.core.model import events
from musterd.supervisor.core.tasks.manual_retry import NO_SUCH_TASK, NOT_ENDED, NOT_FAILED
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import (
    FindTasks,
    Purge,
    Purged,
    StoredTask,
)


class DeadCommands:
    def __init__(self, shell: Shell, answers: LaterAnswers) -> None:
        self._shell = shell
        self._answers = answers
        self._bulk = BulkCommands(shell, answers)

    def methods(self) -> Methods:
        return {
            rpc.RetryTasks: self._retry,
            rpc.PurgeTasks: self._purge,
        }

    def _retry(self, params: rpc.RetryTasks) -> Pending:
        where = selection_of(params)
        if where is not None:
            return self._bulk.retry(params, where)
        ids = list(dict.fromkeys(params.ids))

        def acknowledged(rejected: list[Rejection]) -> None:
            refused = {each.id: RefusedTask(each.id, each.code, each.message) for each in rejected}
            pending.resolve(
                RetryResult(
                    retried=[id_ for id_ in ids if id_ not in refused],
                    refused=[refused[id_] for id_ in ids if id_ in refused],
                    cluster=is_node(self._shell),
                )
            )

        token, pending = self._answers.begin(acknowledged)
        self._shell.feed(events.RetryRequested(token, 0, ids, self._shell.wall_ns()))
        return pending

    # -- forgetting ---------------------------------------------------------------------------

    def _purge(self, params: rpc.PurgeTasks) -> Pending:
        where = selection_of(params, params.all, bool(params.older_than))
        if where is not None:
            return self._bulk.purge(params, where)
        pending = Pending()
        now_ns = self._shell.wall_ns()
        if params.ids:
            self._purge_named(pending, list(dict.fromkeys(params.ids)), now_ns)
        else:
            before_ns = now_ns - round(params.older_than * 1e9)
            self._purge_some(pending, None, before_ns, [])
        return pending

    def _purge_named(self, pending: Pending, ids: list[str], now_ns: int) -> None:
        def found(stored: list[StoredTask]) -> None:
            states = {each.spec.id: each.state for each in stored}
            refused = [
                _refusal(id_, states.get(id_)) for id_ in ids if states.get(id_) != TASK_FAILED
            ]
            failed = [id_ for id_ in ids if states.get(id_) == TASK_FAILED]
            self._purge_some(pending, failed, now_ns, refused)

        self._shell.store_requests.ask(FindTasks(ids), found, pending.unreadable)

    def _purge_some(
        self,
        pending: Pending,
        ids: list[str] | None,
        before_ns: int,
        refused: list[RefusedTask],
    ) -> None:
        def purged(answer: Purged) -> None:
            self._shell.artefacts.forget(ids, before_ns)
            pending.resolve(PurgeResult(purged=answer.count, refused=refused))

        self._shell.store_requests.ask(Purge(ids, before_ns), purged, pending.unreadable)


def _refusal(id_: str, state: str | None) -> RefusedTask:
    if state is None:
        return RefusedTask(id_, NO_SUCH_TASK, f"no such task: '{id_}'")
    code = NOT_FAILED if state in ("succeeded", "cancelled", "expired") else NOT_ENDED
    return RefusedTask(id_, code, f"task '{id_}' is {state}: only failed tasks are purged")
