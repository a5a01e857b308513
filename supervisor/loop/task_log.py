"""Log lines about tasks: one at the end of each, and what goes wrong on the way.

A task that succeeds gets a line if few enough came in during the last second
(`supervisor.log_tasks`); that is settled when the task comes in. At log level debug the whole story
of every task is logged: submitted, given to a worker, waiting for long, ended. So `journalctl
MUSTERD_TASK=<id>` shows all of it.

Everything is read from the core's actions as they are performed. A task whose story is not logged
costs one lookup in a dict.
"""

import logging
import re
from itertools import islice

from msgspec import Struct

from musterd.ipc.wire.messages import CANCELLED, PRIORITY_NAMES, SUCCEEDED, Lease, Outcome, TaskSpec
from musterd.ipc.wire.node_messages import AttemptEnd
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.actions import FinalRecord, Persist
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.core.model.slot import Slot
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.log import log
from musterd.supervisor.log.token_bucket import Allowance
from musterd.supervisor.views import fleet as fleet_view

# After a silence, this many seconds' worth of tasks at once: what a person submits by hand.
BURST_SECONDS = 10
STORIES_MAX = 10_000  # of tasks that have not ended; about 300 bytes each
LOOKS_PER_SECOND = 200  # at waiting tasks; each look takes some microseconds
LONG_WAIT_NS = 1_000_000_000

_FIGURES = re.compile(r"[\d.]+")


class Story(Struct):
    """A task whose story is logged."""

    seq: int
    since_ns: int  # when it was submitted, or given back
    waits: str = ""  # what the log said it waits for, without figures
    worker: str = ""  # the last that had it
    waited_ns: int = 0  # in the queue, over all attempts
    task: Task | None = None  # an attempt of the cluster


class TaskLines:
    def __init__(self, fleet: Fleet, per_second: int) -> None:
        self._fleet = fleet
        self._stories: dict[str, Story] = {}
        self._waiting: dict[str, Story] = {}  # of them, those without a worker, oldest look first
        self._claimed: dict[str, Story] = {}  # attempts of the cluster, the oldest first
        self._silent = 0  # finished without a line
        self.allow(per_second)

    def allow(self, per_second: int) -> None:
        """From now on, log the stories of at most this many tasks per second."""
        self._allowed = Allowance(per_second, per_second * BURST_SECONDS)

    def tells(self, task: str) -> bool:
        return task in self._stories or task in self._claimed

    # -- the beginning ------------------------------------------------------------------------

    def _begin(self, id_: str, seq: int, now_ns: int) -> bool:
        if len(self._stories) >= STORIES_MAX:
            return False
        if not log.log.isEnabledFor(logging.DEBUG) and not self._allowed.take(now_ns):
            return False
        self._stories[id_] = self._waiting[id_] = Story(seq, now_ns)
        return True

    def recovered(self, now_ns: int, tasks: list[Recovered]) -> None:
        """Begin the stories of tasks that the store had at the start."""
        if not log.log.isEnabledFor(logging.INFO):
            return
        for task in tasks:
            if not self._begin(task.spec.id, task.seq, now_ns):
                return
            if log.log.isEnabledFor(logging.DEBUG):
                fields = _known(task.spec, attempt=task.attempt)
                log.line("task.recovered", logging.DEBUG, fields)

    def persisted(self, now_ns: int, action: Persist) -> None:
        """Log new and finished tasks, which are on their way to the disk."""
        if not log.log.isEnabledFor(logging.INFO):
            return
        if action.added or action.bulk:
            again = {each.id for each in action.reopened}
            for record in action.news():
                if not self._begin(record.spec.id, record.seq, now_ns):
                    break
                if log.log.isEnabledFor(logging.DEBUG):
                    self._queued(record.spec, again=record.spec.id in again)
                task = self._fleet.tasks.get(record.spec.id)
                if task is not None and task.slot is not None:  # it was given out before the commit
                    self._started(now_ns, task, task.slot)
        if action.finished:
            self._finished(action)

    def _queued(self, spec: TaskSpec, *, again: bool) -> None:
        fields = _known(spec, priority=PRIORITY_NAMES[spec.priority])
        if spec.delay_ns:
            fields["DELAY"] = f"{spec.delay_ns / 1e9:g}"
        if again:
            fields["REASON"] = "retried by hand"
        log.line("task.queued", logging.DEBUG, fields)

    def withdrawn(self, seqs: list[int]) -> None:
        """Log tasks that are refused after all: the store could not take them."""
        gone = set(seqs)
        for id_ in [id_ for id_, story in self._stories.items() if story.seq in gone]:
            del self._stories[id_]
            self._waiting.pop(id_, None)
            log.line("task.withdrawn", logging.WARNING, {"TASK": id_})

    # -- on its way ---------------------------------------------------------------------------

    def assigned(self, now_ns: int, leases: list[Lease]) -> None:
        """Log tasks that a worker was given."""
        stories = self._stories
        if not stories:
            return
        for lease in leases:
            task = self._fleet.tasks.get(lease.id) if lease.id in stories else None
            if task is not None and task.slot is not None:
                self._started(now_ns, task, task.slot)

    def _started(self, now_ns: int, task: Task, slot: Slot) -> None:
        story = self._stories[task.spec.id]
        self._waiting.pop(task.spec.id, None)
        story.worker = slot.name
        waited_ns = now_ns - story.since_ns
        story.waited_ns += waited_ns
        if log.log.isEnabledFor(logging.DEBUG):
            fields = _known(task.spec, attempt=task.attempt)
            fields["WORKER"] = story.worker
            fields["WAITED"] = f"{waited_ns / 1e9:.3f}"
            log.line("task.started", logging.DEBUG, fields)

    def look(self, now_ns: int) -> None:
        """Log why tasks wait for long, once a second."""
        if not log.log.isEnabledFor(logging.DEBUG):
            return
        for id_ in list(islice(self._waiting, LOOKS_PER_SECOND)):
            story = self._waiting.pop(id_)
            self._waiting[id_] = story  # last: the next look is at another task
            if now_ns - story.since_ns >= LONG_WAIT_NS:
                self._look_at(id_, story, now_ns)

    def _look_at(self, id_: str, story: Story, now_ns: int) -> None:
        task = self._fleet.tasks.get(id_)
        if task is None or (task.debt is None and task.state not in _WORTH_A_LINE):
            return  # only on disk; or its delay was logged when it began
        why = fleet_view.live_view(task, now_ns).waits_for
        kind = _FIGURES.sub("", why)
        if kind != story.waits:
            story.waits = kind
            fields = _known(task.spec, attempt=task.attempt)
            log.line("task.waiting", logging.DEBUG, {**fields, "REASON": why})

    def back(self, task: str, now_ns: int) -> None:
        """Note that a task is in the queue again, or will be."""
        story = self._stories.get(task)
        if story is not None:
            story.since_ns, story.waits = now_ns, ""
            self._waiting[task] = story

    # -- the end ------------------------------------------------------------------------------

    def count(self) -> None:
        """Log how many tasks ended without a line, once a second and at the end."""
        if self._silent:
            log.note("tasks.finished", count=self._silent)
            self._silent = 0

    def _finished(self, action: Persist) -> None:
        workers = {each.seq: each.worker for each in action.failed}
        for record in action.finished:
            story = self._stories.pop(record.spec.id, None)
            outcome = record.outcome
            if story is not None:
                self._waiting.pop(record.spec.id, None)
            elif outcome.state == SUCCEEDED or not log.has_room(_event(outcome)):
                self._silent += 1
                continue
            worker = story.worker if story is not None else workers.get(record.seq, "")
            level = logging.INFO if outcome.state == SUCCEEDED else logging.WARNING
            fields = _end(record, worker)
            if story is not None and worker:
                fields["WAITED"] = f"{story.waited_ns / 1e9:.3f}"
            failure = outcome.failure if outcome.state != CANCELLED else None
            trace = failure.traceback if failure is not None else ""
            log.line(_event(outcome), level, fields, traceback=trace)

    # -- of the cluster -----------------------------------------------------------------------

    def claimed(self, now_ns: int, worker: int, leases: list[Lease]) -> None:
        """Begin the stories of attempts of the cluster that a worker was given."""
        if not log.log.isEnabledFor(logging.INFO):
            return
        debug = log.log.isEnabledFor(logging.DEBUG)
        for lease in leases:
            task = self._fleet.leased(worker, lease.lease)
            if task is None or task.claim is None or task.slot is None:
                continue
            if not debug and not self._allowed.take(now_ns):
                return
            waited_ns = max(0, now_ns - task.queued_ns)
            if len(self._claimed) >= STORIES_MAX:  # of attempts that were lost nobody tells the end
                del self._claimed[next(iter(self._claimed))]
            story = Story(0, now_ns, worker=task.slot.name, waited_ns=waited_ns, task=task)
            self._claimed[task.spec.id] = story
            if debug:
                line = {"WORKER": story.worker, "WAITED": f"{waited_ns / 1e9:.3f}"}
                fields = _known(task.spec, attempt=task.attempt, target=task.claim.target)
                log.line("task.started", logging.DEBUG, {**fields, **line})

    def ended(self, ends: list[AttemptEnd]) -> None:
        """Log attempts of the cluster that succeeded; reports tell what became of the others."""
        for end in ends:
            story = self._claimed.pop(end.id, None)
            if end.kind != "succeeded":
                continue
            if story is None or story.task is None or story.task.claim is None:
                self._silent += 1
                continue
            task, claim = story.task, story.task.claim
            fields = _known(
                task.spec, attempt=task.attempt, worker=story.worker, target=claim.target
            )
            fields["SECONDS"] = f"{end.run_ns / 1e9:.3f}"
            fields["WAITED"] = f"{story.waited_ns / 1e9:.3f}"
            log.line("task.succeeded", logging.INFO, fields)


_WORTH_A_LINE = (TaskState.QUEUED, TaskState.JOINED)


def _known(spec: TaskSpec, **more: object) -> dict[str, object]:
    """Return the fields that name a task, without empty ones."""
    fields: dict[str, object] = {
        "TASK": spec.id,
        "NAME": spec.name,
        "POOL": spec.name.partition(".")[0],
        "TARGET": spec.target,
        **{key.upper(): value for key, value in more.items()},
    }
    return {key: value for key, value in fields.items() if value}


def _event(outcome: Outcome) -> str:
    """Return the event of an end; a task that did not wait for its shut site is not dead."""
    refused = outcome.failure is not None and outcome.failure.refused
    return "task.refused" if refused else f"task.{outcome.state}"


def _end(record: FinalRecord, worker: str) -> dict[str, object]:
    outcome = record.outcome
    fields = _known(record.spec, attempt=outcome.attempts, worker=worker)
    if outcome.source:
        fields["RESULT"] = outcome.source
    elif outcome.run_ns:
        fields["SECONDS"] = f"{outcome.run_ns / 1e9:.3f}"
    failure = outcome.failure
    if failure is not None:
        fields["REASON"] = f"{failure.type or failure.kind}: {failure.message}"
    return fields
