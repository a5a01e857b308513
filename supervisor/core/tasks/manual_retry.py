"""Manual retries: runs finished tasks again (`musterctl retry`).

A task that failed, expired or was cancelled becomes a new task under its id: one commit replaces
the finished row by a live one, so the task is in the store exactly once at any time. Only the store
knows finished tasks, so the store is asked first. A task that ends while the store is asked is left
alone: the answer may be about its earlier run.

Retries in bulk come in steps (control/commands/bulk.py), each as long as one event may take. A
step fills a part of a queue only, so that programs can submit beside it. What finds no room stays a
failed task, and is asked for again later.
"""

from musterd.ipc.wire.messages import QUEUE_FULL, SUCCEEDED, Rejection
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import FindEnded
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.intake import Intake
from musterd.supervisor.core.tasks.refusals import UNREADABLE

# Why a task cannot be retried, as written in Rejection.code.
NO_SUCH_TASK = "NoSuchTask"
NOT_ENDED = "NotEnded"
NOT_KNOWN = "NotKnown"  # the store cannot be read
NOT_FAILED = "NotFailed"


class ManualRetry:
    def __init__(self, state: State, ledger: Ledger, intake: Intake) -> None:
        self._state = state
        self._ledger = ledger
        self._intake = intake

    def requested(self, event: events.RetryRequested) -> None:
        ids, rejected = [], []
        asked = self._state.asked
        for id_ in dict.fromkeys(event.ids):
            if self._intake.alive(id_):
                rejected.append(_not_ended(id_))
            else:
                ids.append(id_)
                asked[id_] = asked.get(id_, 0) + 1
        self._state.out.append(FindEnded(event, ids, rejected))

    def unknown(self, event: events.EndedUnknown) -> None:
        """Refuse all of them: whether they have failed cannot be read."""
        rejected = [Rejection(id_, NOT_KNOWN, UNREADABLE) for id_ in event.asked]
        self.found(
            events.EndedFound(event.requested, event.asked, [], [*event.rejected, *rejected])
        )

    def found(self, event: events.EndedFound) -> None:
        requested, rejected = event.requested, list(event.rejected)
        cancelled = [id_ for id_ in event.asked if id_ in self._state.cancelled_early]
        ended_since = self._intake.ended_since(event.asked)
        ended = {each.spec.id: each for each in event.ended}
        specs = []
        unknown = {each.id for each in rejected}
        for id_ in event.asked:
            if id_ in unknown:
                continue
            task = ended.get(id_)
            if self._intake.alive(id_) or id_ in ended_since:
                rejection = _not_ended(id_)
            elif task is None:
                rejection = Rejection(id_, NO_SUCH_TASK, f"no such task: '{id_}'")
            elif task.state == SUCCEEDED:
                rejection = Rejection(id_, NOT_FAILED, f"task '{id_}' has succeeded")
            elif requested.in_bulk and not self._intake.has_room(task.spec):
                rejection = Rejection(id_, QUEUE_FULL, f"the queue of '{task.spec.name}' is full")
            else:
                refused = self._intake.reopen(task, requested.wall_ns)
                if refused is None:
                    specs.append(task.spec)
                    continue
                rejection = refused
            rejected.append(rejection)
        self._ledger.acknowledge(
            requested.peer, requested.request, rejected, specs, at_once=not specs
        )
        if cancelled:
            self._intake.cancel(events.CancelRequested(cancelled))


def _not_ended(id_: str) -> Rejection:
    return Rejection(id_, NOT_ENDED, f"task '{id_}' has not ended, or only this moment")
