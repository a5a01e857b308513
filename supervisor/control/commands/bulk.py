"""Commands on all tasks that fit a selection: retry, cancel and purge, a step at a time.

The caller goes from step to step by the cursor of each answer. So a turn of the loop has a bounded
part of the work, nobody has to remember a command that was interrupted, and a kill leaves whole
steps behind: typed again, the command finds what is left.

Ended tasks are gone through from the newest to the oldest. A task that is retried and fails again
is newer than where its step began, and is not retried twice.
"""

from musterd.ipc.wire.messages import FAILED, QUEUE_FULL, SHUTTING_DOWN, Rejection
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import BULK_MAX, INVALID_PARAMS, RpcError
from musterd.supervisor.api.status import BulkResult, RefusedTask
from musterd.supervisor.control.answers import LaterAnswers, Pending
from musterd.supervisor.control.commands.lists import (
    ENDED,
    LIVE,
    Place,
    Search,
    can_be_cancelled,
    dead_only,
    is_node,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.task import Task
from musterd.supervisor.core.tasks.manual_retry import (
    NO_SUCH_TASK,
    NOT_ENDED,
    NOT_FAILED,
    NOT_KNOWN,
)
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import Listed, Purge, Purged, StoredTask

# The task has changed since it was found: another command was faster.
_CHANGED = (NO_SUCH_TASK, NOT_ENDED, NOT_FAILED)
_ENDS = (SHUTTING_DOWN, NOT_KNOWN)  # nothing can be done for the moment


class BulkCommands:
    def __init__(self, shell: Shell, answers: LaterAnswers) -> None:
        self._shell = shell
        self._answers = answers
        self._search = Search(shell)

    def retry(self, params: rpc.RetryTasks, where: Selection) -> Pending:
        """Run a step of the tasks again."""
        pending, where = Pending(), dead_only(where)
        place = self._search.begin(where, params.after)

        def found(listed: Listed) -> None:
            ids = [task.spec.id for task in listed.tasks]
            rest = _cursor(ENDED, listed.below)
            if self._is_told(pending, params, where, ids, rest):
                return

            def acknowledged(rejected: list[Rejection]) -> None:
                ended = [each for each in rejected if each.code in _ENDS]
                if ended:  # the caller does not go on, and types the command again later
                    pending.fail(RpcError(rpc.FAILED, ended[0].message))
                    return
                full = sum(each.code == QUEUE_FULL for each in rejected)
                passed = (QUEUE_FULL, *_CHANGED)
                refused = [
                    RefusedTask(each.id, each.code, each.message)
                    for each in rejected
                    if each.code not in passed
                ]
                pending.resolve(
                    BulkResult(
                        matched=len(ids),
                        done=len(ids) - len(rejected),
                        full=full,
                        refused=refused,
                        cursor=_cursor(ENDED, listed.top) if full else rest,
                        cluster=is_node(self._shell),
                    )
                )

            token, asked = self._answers.begin(acknowledged)
            pending.on_abandoned = asked.abandon
            wall_ns = self._shell.wall_ns()
            self._shell.feed(events.RetryRequested(token, 0, ids, wall_ns, in_bulk=True))

        self._search.ended(
            where, place.below, BULK_MAX, found, pending.unreadable, dead=where.state == FAILED
        )
        return pending

    def purge(self, params: rpc.PurgeTasks, where: Selection) -> Pending:
        """Forget a step of the tasks."""
        pending, where, now_ns = Pending(), dead_only(where), self._shell.wall_ns()
        place = self._search.begin(where, params.after)

        def found(listed: Listed) -> None:
            ids = [task.spec.id for task in listed.tasks]
            rest = _cursor(ENDED, listed.below)
            if self._is_told(pending, params, where, ids, rest):
                return

            def purged(answer: Purged) -> None:
                self._shell.artefacts.forget(answer.ids, now_ns)
                pending.resolve(BulkResult(matched=len(ids), done=answer.count, cursor=rest))

            query = Purge(ids, now_ns, unwell=True)
            self._shell.store_requests.ask(query, purged, pending.unreadable)

        self._search.ended(where, place.below, BULK_MAX, found, pending.unreadable)
        return pending

    def cancel(self, params: rpc.CancelTasks, where: Selection) -> Pending:
        """Cancel a step of the tasks. The answer does not wait for those that run."""
        if where.ended:
            raise RpcError(INVALID_PARAMS, "only tasks that have not ended can be cancelled")
        pending, place = Pending(), self._search.begin(where, params.after)

        def found(tasks: list[Task | StoredTask], below: int) -> None:
            ids = [task.spec.id for task in tasks]
            rest = _cursor(LIVE, below)
            if self._is_told(pending, params, where, ids, rest):
                return

            def acknowledged(_rejected: list[Rejection]) -> None:
                pending.resolve(
                    BulkResult(
                        matched=len(ids),
                        done=len(ids),
                        cursor=rest,
                        cluster=is_node(self._shell),
                    )
                )

            token, asked = self._answers.begin(acknowledged)
            pending.on_abandoned = asked.abandon
            self._shell.feed(events.CancelRequested(ids, token))

        self._search.live(
            where, place.below, BULK_MAX, found, pending.unreadable, wanted=can_be_cancelled
        )
        return pending

    def _is_told(
        self,
        pending: Pending,
        params: rpc.RetryTasks | rpc.PurgeTasks | rpc.CancelTasks,
        where: Selection,
        ids: list[str],
        cursor: str,
    ) -> bool:
        """Answer a step that changes nothing; return whether it was one."""
        if pending.abandoned:
            return True
        if not ids and not cursor and not params.after:
            try:
                self._search.check_names(where)
            except RpcError as error:
                pending.fail(error)
                return True
        if ids and not params.dry_run:
            return False
        pending.resolve(BulkResult(matched=len(ids), cursor=cursor, cluster=is_node(self._shell)))
        return True


def selection_of(
    params: rpc.RetryTasks | rpc.PurgeTasks | rpc.CancelTasks, *others: bool
) -> Selection | None:
    """Return what a command in bulk is for, None for a command on ids; RpcError if neither or both
    are given. `others` stand for other ways to say which."""
    if bool(params.ids) + (params.where is not None) + sum(others) != 1:
        ways = "either ids, all, older_than or where" if others else "either ids or where"
        method = rpc.METHOD_OF[type(params)]
        raise RpcError(INVALID_PARAMS, f"parameters of {method}: give {ways}")
    return params.where


def _cursor(part: str, below: int) -> str:
    return str(Place(part, below)) if below else ""
