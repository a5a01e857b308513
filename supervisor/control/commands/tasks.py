"""Commands about tasks on control.sock: submit, get, cancel, and forget cached results."""

from collections.abc import Callable

import msgspec

from musterd.ipc.wire.artefacts import Artefact
from musterd.ipc.wire.messages import FINAL_STATES, Outcome, Rejection, TaskView
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import FAILED, RpcError
from musterd.supervisor.api.status import CacheResult, TaskList, TaskStatus, task_status
from musterd.supervisor.control.answers import LaterAnswers, Methods, Pending
from musterd.supervisor.control.commands.artefacts import BUSY, shown
from musterd.supervisor.control.commands.bulk import BulkCommands, selection_of
from musterd.supervisor.control.commands.lists import is_node, listed
from musterd.supervisor.core.model import events
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindTasks, StoredTask
from musterd.supervisor.views import fleet as fleet_view
from musterd.supervisor.views.task import look_at, view_of

_UNTOLD = RpcError(
    FAILED,
    "the daemon is shutting down before it could say whether the task is stored: submit it"
    " again with the same id when it is up",
)


class TaskCommands:
    def __init__(self, shell: Shell, answers: LaterAnswers) -> None:
        self._shell = shell
        self._answers = answers
        self._bulk = BulkCommands(shell, answers)

    def methods(self) -> Methods:
        return {
            rpc.SubmitTask: self._submit,
            rpc.GetTask: self._get,
            rpc.CancelTasks: self._cancel,
            rpc.InvalidateCache: self._invalidate,
        }

    # -- submit -------------------------------------------------------------------------------

    def _submit(self, params: rpc.SubmitTask) -> Pending:
        spec = convert.task_spec(params)

        def acknowledged(rejected: list[Rejection]) -> None:
            if rejected:
                pending.fail(convert.rejected(rejected[0]))
            elif not params.wait:
                pending.resolve(TaskStatus(id=params.id, name=params.name, state="queued"))

        def ended(outcome: Outcome) -> None:
            self._tell_end(pending, params, outcome)

        token, pending = self._answers.begin(acknowledged, ended if params.wait else None)
        pending.last_answer = _UNTOLD
        # The id is the caller's: a repeated submit is the same task, also when it has ended.
        self._shell.submit(events.TasksSubmitted(token, 0, [spec], self._shell.wall_ns(), True))
        return pending

    def _tell_end(self, pending: Pending, params: rpc.SubmitTask, outcome: Outcome) -> None:
        """Answer with the task as the store has it, which knows the times; else with `outcome`."""
        end = task_status(
            TaskView(
                outcome.id,
                params.name,
                outcome.state,
                params.priority,
                params.target,
                outcome.attempts,
                run_seconds=outcome.run_ns / 1e9,
                failure=outcome.failure,
                value=outcome.value,
                source=outcome.source,
            )
        )
        pending.last_answer = end

        def found(stored: list[StoredTask]) -> None:
            view = view_of(self._shell, outcome.id, stored)
            if view is None or view.state not in FINAL_STATES:  # it runs again already
                pending.resolve(end)
                return
            status = pending.last_answer = task_status(view)
            self._with_artefacts(pending, view, status, lambda: pending.resolve(status))

        query = FindTasks([outcome.id], attempts=True)
        self._shell.store_requests.ask(query, found, lambda: pending.resolve(end))

    # -- get -----------------------------------------------------------------------------------

    def _get(self, params: rpc.GetTask) -> Pending:
        pending = Pending()

        def found(view: TaskView | None) -> None:
            if view is None:
                pending.fail(convert.no_such_task(params.id, clustered=is_node(self._shell)))
                return
            status = task_status(view, with_value=params.value)
            self._with_artefacts(pending, view, status, lambda: pending.fail(BUSY))

        look_at(self._shell, params.id, found, pending.unreadable)
        return pending

    def _with_artefacts(
        self, pending: Pending, view: TaskView, status: TaskStatus, busy: Callable[[], None]
    ) -> None:
        """Answer with `status`, completed by the files that failed attempts have left."""

        def complete(kept: list[Artefact]) -> None:
            pending.resolve(msgspec.structs.replace(status, artefacts=shown(kept)))

        if not view.attempts and view.failure is None:
            pending.resolve(status)
        elif self._shell.artefacts.full:
            busy()
        else:
            self._shell.artefacts.find(view.id, complete)

    # -- cancel -------------------------------------------------------------------------------

    def _cancel(self, params: rpc.CancelTasks) -> Pending:
        where = selection_of(params)
        if where is not None:
            return self._bulk.cancel(params, where)
        alive, ids = self._shell.fleet.alive, params.ids

        def acknowledged(_rejected: list[Rejection]) -> None:
            # The cancel is on disk now: it holds even if the daemon dies.
            self._answers.wait(pending, attempt)

        def attempt() -> bool:
            if not params.no_block and any(alive(id_) for id_ in ids):
                return False
            self._tell_cancelled(pending, ids)
            return True

        token, pending = self._answers.begin(acknowledged)
        self._shell.feed(events.CancelRequested(ids, token))
        return pending

    def _tell_cancelled(self, pending: Pending, ids: list[str]) -> None:
        tasks, now_ns = self._shell.fleet.tasks, self._shell.now_ns()
        live = [
            task_status(fleet_view.live_view(tasks[id_], now_ns)) for id_ in ids if id_ in tasks
        ]
        rest = [id_ for id_ in ids if id_ not in tasks]

        def found(stored: list[StoredTask]) -> None:
            ended = [listed(each) for each in stored]
            known = {each.id for each in ended}
            missing = [id_ for id_ in rest if id_ not in known]
            cluster = is_node(self._shell)
            pending.resolve(TaskList(tasks=live + ended, missing=missing, cluster=cluster))

        self._shell.store_requests.ask(FindTasks(rest), found, pending.unreadable)

    # -- cached results -----------------------------------------------------------------------

    def _invalidate(self, params: rpc.InvalidateCache) -> CacheResult:
        fleet = self._shell.fleet
        before = fleet.results_remembered
        self._shell.feed(events.InvalidateRequested(params.key, params.prefix))
        return CacheResult(forgotten=before - fleet.results_remembered)
