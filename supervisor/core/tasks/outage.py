"""Store outages: what happens to submits while the store cannot write.

A new submit is refused at once. A task that was on its way to the disk when the outage began, and
that no worker has had yet, is given to no worker. It waits for PATIENCE_NS, in case the outage is
short; then the store is asked to leave the task out. A task that the store confirms is refused: it
is not on disk and never will be. A task that the store does not confirm is on disk and is
acknowledged as usual. So no task is ever both refused and run. A task that a worker has had is
acknowledged, and ends, when the store writes again.

Everything else (results, retries, states) waits until the store writes again; the number of tasks
bounds it.
"""

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.disk_queue.unwritten import UnwrittenTasks
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import LookUp, Withdraw
from musterd.supervisor.core.model.hooks import Hooks
from musterd.supervisor.core.model.ledger import Ledger, Pending, Receipt
from musterd.supervisor.core.model.queue import PoolQueue
from musterd.supervisor.core.model.runs import RUN_PREFIX
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.core.tasks.coalescing import Coalescing
from musterd.supervisor.core.tasks.refusals import store_fails

PATIENCE_NS = 5 * SECOND_NS  # shorter than the 10 s that musterctl waits for an answer


class Outage:
    def __init__(
        self,
        state: State,
        ledger: Ledger,
        hooks: Hooks,
        coalescing: Coalescing,
        unwritten: UnwrittenTasks,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._hooks = hooks
        self._coalescing = coalescing
        self._unwritten = unwritten
        self._count = 0  # failures and recoveries so far: odd during an outage

    def failing(self, event: events.StoreFailing) -> None:
        if not self._state.store_problem:
            self._count += 1
            due_ns = self._state.now_ns + PATIENCE_NS
            self._state.timers.at(due_ns, self._give_up, self._count)
            for page in self._ledger.pending:
                page.stored.extend(self._unwritten.take_back(page.unwritten))
                page.unwritten.clear()
            self._make_wait([task for task in self._unstored() if task.early])
        self._state.store_problem = event.reason

    def recovered(self, _event: events.StoreRecovered) -> None:
        if self._state.store_problem:
            self._count += 1
            self._state.store_problem = ""

    def _give_up(self, count: int) -> None:
        if count != self._count:
            return
        if self._coalescing.leaving:  # one request to the store at a time
            self._state.timers.at(self._state.now_ns + PATIENCE_NS, self._give_up, count)
            return
        tasks = self._unstored()
        for task in tasks:
            self._coalescing.leaving[task.spec.id] = None
        if tasks:
            self._state.out.append(Withdraw([task.seq for task in tasks]))

    def _make_wait(self, tasks: list[Task]) -> None:
        """Take tasks out of the queue until they are on disk."""
        queues: dict[str, PoolQueue] = {}
        for task in tasks:
            pool = task.route.pool
            pool.queue.discard(task)
            pool.unstored += 1
            task.early = False
            task.state = TaskState.NEW
            queues[pool.name] = pool.queue
        for queue in queues.values():
            queue.sweep()  # a task may come back, and must be queued only once

    def _unstored(self) -> list[Task]:
        """Return new tasks that were never run and that no submitter was told of."""
        tasks = self._state.tasks
        found: dict[str, Task] = {}
        for page in self._ledger.pending:
            for receipt in page.receipts:
                refused = {rejection.id for rejection in receipt.answer.rejected}
                for id_ in receipt.ids:
                    task = tasks.get(id_)
                    if task is not None and _untouched(task) and id_ not in refused:
                        found[id_] = task
        return list(found.values())

    def withdrawn(self, event: events.TasksWithdrawn) -> None:
        """Refuse the tasks that the store left out; all others it was asked about are on disk."""
        gone = dict.fromkeys(event.seqs)
        refused: dict[str, Task] = {}
        for page in self._ledger.pending:
            for task in page.stored:
                if task.seq in gone:
                    refused[task.spec.id] = task
            page.stored[:] = [task for task in page.stored if task.seq not in gone]
        for task in refused.values():
            self._coalescing.leave(task)
            self._forget(task)
        self._coalescing.leaving.clear()
        if refused:
            pages = self._ledger.pending
            waiting = {task.spec.id for page in pages for task in page.stored}
            for page in pages:
                for receipt in list(page.receipts):
                    self._refuse(page, receipt, refused, waiting)
            self._tell_watchers(refused)

    def _forget(self, task: Task) -> None:
        self._ledger.forget_cancel(task)
        if task.spec.id.startswith(RUN_PREFIX):  # a schedule's run, retried by hand
            self._hooks.schedule_retried(task.spec.id, False)
        del self._state.tasks[task.spec.id]
        pool = task.route.pool
        pool.leave(task.spec)
        pool.unstored -= 1
        pool.counters.submitted -= 1
        pool.counters.withdrawn += 1
        pool.counters.rejected += 1

    def _refuse(
        self, page: Pending, receipt: Receipt, refused: dict[str, Task], waiting: set[str]
    ) -> None:
        """Tell a submitter: at once, unless other tasks of the submit still wait for the disk."""
        problem = self._state.store_problem or "the disk was full"
        answer = receipt.answer
        before = {rejection.id for rejection in answer.rejected}
        now = [
            store_fails(refused[id_].spec, problem)
            for id_ in receipt.ids
            if id_ in refused and id_ not in before
        ]
        if not now:
            return
        place = next(i for i, each in enumerate(page.acknowledgements) if each is answer)
        page.receipts.remove(receipt)
        answer = structs.replace(answer, rejected=answer.rejected + now)
        if any(id_ in waiting for id_ in receipt.ids):
            page.acknowledgements[place] = answer
            page.receipts.append(Receipt(answer, receipt.ids))
        else:
            del page.acknowledgements[place]
            self._state.out.append(answer)

    def _tell_watchers(self, refused: dict[str, Task]) -> None:
        """Tell watchers that did not submit the task that it does not exist."""
        for id_, task in refused.items():
            for peer in task.watchers or ():
                self._state.out.append(LookUp(peer, [id_]))


def _untouched(task: Task) -> bool:
    """Return whether the task is new and no worker has ever had it."""
    waits = task.state == TaskState.NEW
    return waits or (task.early and task.state == TaskState.QUEUED and not task.leased_ns)
