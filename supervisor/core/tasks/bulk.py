"""Bulk submits: takes many tasks at once that differ only in id and arguments.

A submit that needs a decision about one of its tasks (a site, a class, a key, a delay, an expiry, a
known id, a queue that is nearly full) goes through intake.py, task by task.
"""

from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import BulkRecord, NewRecord
from musterd.supervisor.core.model.lanes import Lane, Place
from musterd.supervisor.core.model.ledger import Ledger, UnwrittenBulk
from musterd.supervisor.core.model.pool import QUEUE_BYTES_MAX
from musterd.supervisor.core.model.queue import TASK_BYTES
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Route, Task, TaskState
from musterd.supervisor.core.tasks.pauses import DRAINED

RUN_MIN = 8  # fewer tasks are as fast one by one


def alike(event: events.TasksSubmitted) -> bool:
    """Return whether the tasks of a submit differ only in id and arguments."""
    specs = event.tasks
    if len(specs) < RUN_MIN or event.rejected:
        return False
    name, priority = specs[0].name, specs[0].priority
    for spec in specs:
        if (
            spec.name != name
            or spec.priority != priority
            or spec.target
            or spec.policy
            or spec.session
            or spec.key
            or spec.delay_ns
            or spec.expires_ns
        ):
            return False
    return True


def take(
    state: State,
    ledger: Ledger,
    disk_queue: DiskQueue,
    event: events.TasksSubmitted,
    *,
    route: Route,
    last_seq: int,
) -> int:
    """Take all tasks and return the last seq, or 0 if they have to be taken one by one."""
    specs, pool = event.tasks, route.pool
    queue, known, count = pool.queue, state.tasks, len(specs)
    ids = [spec.id for spec in specs]
    size = sum([len(spec.args) for spec in specs]) + count * TASK_BYTES
    if (
        state.store_problem
        or not state.intake_open
        or pool.halt == DRAINED
        or len(set(ids)) < count
        or not known.keys().isdisjoint(ids)
        or not disk_queue.places.keys().isdisjoint(ids)
        or queue.bytes + size > QUEUE_BYTES_MAX
        or not queue.takes(specs[0].priority, pool.held + count - 1)
    ):
        return 0
    pool.live += count
    queue.bytes += size
    pool.counters.submitted += count
    new = BulkRecord(last_seq + 1, specs, event.wall_ns, pool.name)
    if not event.peer or pool.unstored:
        _make(state, ledger, event.peer, route, None, new)
        return last_seq + count
    lane, early = queue.fit_early(specs[0].priority, count)
    if early:
        _make(state, ledger, event.peer, route, lane, _part(new, 0, early))
    if early < count:
        place = Place(lane, event.peer, written=False)
        disk_queue.put_unwritten(lane, dict.fromkeys(ids[early:], place))
        if early:
            size = sum([len(spec.args) + TASK_BYTES for spec in specs[early:]])
        ledger.add_unwritten(UnwrittenBulk(route, place, _part(new, early, count), size))
    return last_seq + count


def _part(new: BulkRecord, begin: int, end: int) -> BulkRecord:
    if end - begin == len(new.specs):
        return new
    return BulkRecord(new.first + begin, new.specs[begin:end], new.submitted_wall_ns, new.pool)


def _make(  # noqa: PLR0917 - the parts of a task
    state: State,
    ledger: Ledger,
    peer: bytes,
    route: Route,
    lane: Lane | None,
    run: BulkRecord,
) -> None:
    """Create tasks: queued in this lane or, without a lane, waiting for the disk."""
    known, early = state.tasks, lane is not None
    at, now_ns = (TaskState.QUEUED, state.now_ns) if early else (TaskState.NEW, 0)
    wall_ns, pool = run.submitted_wall_ns, run.pool
    tasks: list[Task] = []
    added: list[NewRecord] = []
    for seq, spec in enumerate(run.specs, run.first):
        task = Task(seq, spec, route, wall_ns, peer, at, now_ns, lane, None, early)
        known[spec.id] = task
        tasks.append(task)
        added.append(NewRecord(seq, spec, wall_ns, pool))
    ledger.add_many(tasks, added)
    if lane is not None:
        lane.tasks.extend(tasks)
        lane.level.count(lane, len(tasks))
    else:
        route.pool.unstored += len(tasks)
