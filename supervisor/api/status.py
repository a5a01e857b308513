"""Answers of control.sock as structs: the daemon fills them, musterctl shows them.

They become JSON for people and scripts, so fields are whole words, durations are seconds, and every
field is always there: null is a moment that has not been, or never will be. Fields are added, and
never renamed. docs/musterctl.schema.json describes them: see ctl/json_schema.py.
"""

from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec import Struct, structs
from msgspec.msgpack import Ext

from musterd.ipc.secrets.reference import JSON_KEY, secret_name
from musterd.ipc.wire.messages import Failure, TaskView
from musterd.supervisor.api.cluster import ClusterStatus
from musterd.supervisor.api.rpc import NO_SUCH_NAME, RpcError

# States of a slot, as shown.
STOPPED, STARTING, RUNNING, BUSY, DRAINING, BACKOFF, FATAL = (
    "STOPPED",
    "STARTING",
    "RUNNING",
    "BUSY",
    "DRAINING",
    "BACKOFF",
    "FATAL",
)
# States in which a worker counts as running.
UP_STATES = frozenset((RUNNING, BUSY, DRAINING))

WHOLE_POOL = -1  # an index that means every slot of the pool, as in the core's events


class WorkerStatus(Struct, frozen=True, kw_only=True):
    name: str  # "parser/0"
    state: str
    pid: int = 0  # as the host sees it; 0 for none
    memory_bytes: int = 0  # PSS of it and all it started; 0: not measured yet
    task_id: str = ""
    method: str = ""
    uptime_seconds: float = 0.0
    task_seconds: float = 0.0  # how long the task has been running
    restarts: int = 0
    lost: dict[str, int] = {}  # workers that ended unasked, by cause
    recycled: int = 0  # workers that were replaced after max_tasks, max_age or max_memory
    tasks_done: int = 0
    reason: str = ""  # for BACKOFF, FATAL or STOPPED
    halt: str = ""  # "paused" or "drained": it gets no tasks until it is resumed
    debug: str = ""  # where its task waits for a debugger, or who debugs it
    output: str = ""  # the last output of the worker that was lost


class MetricStatus(Struct, frozen=True, kw_only=True):
    """A metric that the workers of a pool have counted (`ctx.metrics`)."""

    name: str
    value: float
    labels: dict[str, str] = {}
    gauge: bool = False


class PoolStatus(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    size: int  # target; lowered by memory pressure, but not by stopping a slot or the pool
    running: int  # workers in UP_STATES
    busy: int = 0  # workers that have a task, also those that end after that
    queued: dict[str, int] = {}  # ready tasks by priority, also those held by a breaker or limit
    waiting: int = 0  # delayed tasks and those between two attempts
    submitted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    restarts: int = 0
    lost: dict[str, int] = {}  # workers that ended unasked, by cause
    failures: dict[str, int] = {}  # attempts that failed, by the type of their error
    metrics: list[MetricStatus] = []
    metrics_dropped: int = 0  # samples beyond the number of names that a pool may have
    orphans: int = 0  # processes that outlived their worker and were ended
    recycled: int = 0  # workers that were replaced after max_tasks, max_age or max_memory
    reason: str = ""
    halt: str = ""  # until it is resumed: "paused", or "drained", which also refuses new tasks
    scaling: str = "fixed"  # "auto": between min and max; "manual": as a person said
    min: int = 0  # of a pool that scales
    max: int = 0
    scaled: str = ""  # the last change of size, with its reason
    held: str = ""  # why the pool does not grow although it should
    workers: list[WorkerStatus] = []
    leaving: list[WorkerStatus] = []  # recycled workers that still end their last task
    tasks: list[str] = []  # names of its tasks: "parser.extract"; none before its class is loaded


class WebStatus(Struct, frozen=True, kw_only=True):
    """A sidecar of the daemon: for `http.listen` or `events.publish`."""

    state: str  # "starting", "up", "stopping", "backoff", "fatal", "down"
    address: str = ""  # where it listens
    pid: int = 0
    uptime_seconds: float = 0.0
    restarts: int = 0
    reason: str = ""  # why it is not up


class NodeStatus(Struct, frozen=True, kw_only=True):
    """One machine of a cluster."""

    name: str
    state: str  # "alive", "draining", "silent" (its lease is over), "lost" (reaped), "left"
    running: int = 0  # tasks that it has claimed
    places: int = 0  # tasks that it runs at once
    seen_seconds: float = 0.0  # since it was heard of
    version: str = ""
    pools: dict[str, int] = {}  # places by pool
    identity: str = ""


class NodeList(Struct, frozen=True, kw_only=True):
    """Answer to `musterctl cluster nodes`."""

    nodes: list[NodeStatus]


class FleetStatus(Struct, frozen=True, kw_only=True):
    version: str
    pid: int
    uptime_seconds: float
    state: str  # "starting", "running", "degraded", "draining", "stopping"
    pools: list[PoolStatus]
    containment: str = ""  # "pidns", "cgroup", "reaper"
    containment_reason: str = ""  # why not a better one
    problem: str = ""  # of the daemon itself, such as a store that cannot write
    web: WebStatus | None = None
    events: WebStatus | None = None  # the publisher
    nodes: list[NodeStatus] = []  # of a cluster, where that was asked
    database: str = ""  # of a cluster: where it is
    answer_seconds: float = 0.0  # that the database took
    cluster: ClusterStatus | None = None  # where this machine is a node of one
    at_target: bool = True  # every pool or slot asked about runs as it should: set by select()


class SlotResult(Struct, frozen=True, kw_only=True):
    """What a command did to one slot, or to a pool."""

    name: str
    ok: bool
    state: str
    pid: int = 0
    reason: str = ""


class KeyChange(Struct, frozen=True):
    """A changed key of the configuration; a value is "" where the key is not set."""

    key: str
    old: str
    new: str
    effect: str  # at once, rolls, scales, added, removed, restart


class PoolReload(Struct, frozen=True):
    """What a reload did to a pool, or would do."""

    name: str
    effect: str
    ok: bool = True
    reason: str = ""
    stranded: int = 0  # tasks of a removed pool that stay in the store


class NewerCode(Struct, frozen=True, kw_only=True):
    """What has changed on disk since the workers of a pool were made of it."""

    pool: str
    files: list[str] = []  # of code: workers import it when the pool is reloaded
    secrets: list[str] = []  # files of its secrets_dir: each task reads them


class ReloadResult(Struct, frozen=True):
    changes: list[KeyChange] = []
    pools: list[PoolReload] = []
    restart: list[str] = []  # keys that keep their old values until the daemon is restarted
    done: bool = True
    newer: list[NewerCode] = []  # as it was before the reload


class CommandResult(Struct, frozen=True, kw_only=True):
    """Answer to start, stop, restart, reset, scale, pause, drain, resume, signal and shutdown."""

    slots: list[SlotResult] = []
    done: bool = True  # false: accepted; the caller did not wait for the outcome
    newer: list[NewerCode] = []  # of a restart, which does not import code anew


class SlotPid(Struct, frozen=True):
    name: str
    pid: int


class PidResult(Struct, frozen=True, kw_only=True):
    supervisor: int
    workers: list[SlotPid] = []  # the named slots that have a process


class VersionResult(Struct, frozen=True, kw_only=True):
    version: str
    pid: int
    python: str = ""


class TaskFailure(Struct, frozen=True, kw_only=True):
    kind: str
    type: str = ""
    message: str = ""
    traceback: str = ""
    status: int = 0  # HTTP
    retry_after: float = 0.0
    unwell: bool = False  # circuit breakers count it: the site is unwell


class AttemptStatus(Struct, frozen=True, kw_only=True):
    """An attempt that failed."""

    attempt: int
    at: float
    worker: str = ""
    failure: TaskFailure


class ArtefactStatus(Struct, frozen=True, kw_only=True):
    """A file that a failed attempt has left on this machine."""

    name: str  # unique among those of its task
    attempt: int
    at: float
    bytes: int


class ArtefactList(Struct, frozen=True, kw_only=True):
    artefacts: list[ArtefactStatus]


class TaskStatus(Struct, frozen=True, kw_only=True):
    """One task; the answer to a submit without `wait` has little more than `id` and `state`."""

    id: str
    name: str
    state: str
    priority: str = ""
    args: Any = None  # a secret is {"$secret": NAME}; null in lists
    target: str = ""
    attempt: int = 0
    crashes: int = 0
    worker: str = ""
    node: str = ""  # of a cluster: the machine that has claimed it
    submitted_at: float | None = None
    finished_at: float | None = None  # null: it has not ended
    run_seconds: float = 0.0
    policy: str = ""
    waits_for: str = ""
    failure: TaskFailure | None = None
    value: Any = None
    source: str = ""  # of a value that the task did not make: cached, stale or fallback
    progress: float = 0.0
    progress_text: str = ""
    attempts: list[AttemptStatus] = []  # the last failed attempts, oldest first
    artefacts: list[ArtefactStatus] = []  # files that failed attempts have left, oldest first


class TaskList(Struct, frozen=True, kw_only=True):
    """Answer to tasks.list (newest first) and to tasks.cancel."""

    tasks: list[TaskStatus]
    missing: list[str] = []  # unknown ids
    more: bool = False  # there are more tasks than the limit
    cursor: str = ""  # where the next list goes on (`after`); "": there are no more
    cluster: bool = False  # this is a node of a cluster: it knows what runs here, and no more


class RefusedTask(Struct, frozen=True):
    """A task that a command could not be applied to."""

    id: str
    code: str  # NoSuchTask, NotEnded, NotFailed, QueueFull, ShuttingDown, UnknownTask
    reason: str


class RetryResult(Struct, frozen=True, kw_only=True):
    """Answer to tasks.retry."""

    retried: list[str]
    refused: list[RefusedTask] = []
    cluster: bool = False  # this is a node of a cluster: ended tasks are not here


class PurgeResult(Struct, frozen=True, kw_only=True):
    """Answer to tasks.purge."""

    purged: int
    refused: list[RefusedTask] = []


class BulkResult(Struct, frozen=True, kw_only=True):
    """Answer to a step of tasks.retry, .cancel and .purge with `where`; musterctl adds them up."""

    matched: int  # tasks that fit
    done: int = 0
    full: int = 0  # found no room in their queue: the same step is to be asked for again
    refused: list[RefusedTask] = []
    cursor: str = ""  # `after` of the next step; "": this was the last
    cluster: bool = False  # this is a node of a cluster, whose tasks are not meant


class CacheResult(Struct, frozen=True, kw_only=True):
    """Answer to cache.invalidate."""

    forgotten: int  # results


class ScheduleStatus(Struct, frozen=True, kw_only=True):
    """One schedule; times are seconds of wall-clock time."""

    name: str
    state: str  # "active", "paused", "disabled", "unusable"
    task: str
    when: str  # as written: "every 5m", "*/5 * * * * (Europe/Berlin)"
    next_at: float | None = None  # null: no further run
    last_at: float | None = None  # the due time of its newest run
    last_task: str = ""
    last_state: str = ""
    runs: int = 0
    skipped: int = 0
    skipped_why: str = ""  # of the newest run that was skipped ; of a daemon's own, since its start
    origin: str = ""  # the file that has it; "" where it was added at run time
    problem: str = ""  # why it is not run, and what to do
    failures: int = 0  # failed runs in a row, where it reports changes
    stale: bool = False  # ... and that was reported


class ScheduleKeys(ScheduleStatus, frozen=True, kw_only=True):
    """Answer to schedule.get."""

    keys: dict[str, Any] = {}  # as they were added


class ScheduleList(Struct, frozen=True, kw_only=True):
    """Schedules by name, SCHEDULES_LISTED_MAX at most."""

    schedules: list[ScheduleStatus]
    more: bool = False  # there are others, to be asked for with `after`


class RefusedSchedule(Struct, frozen=True, kw_only=True):
    name: str
    why: str  # each problem on a line


class SchedulesPut(Struct, frozen=True, kw_only=True):
    """Answer to schedule.put_many: all others are stored."""

    refused: list[RefusedSchedule] = []


class ClockStatus(Struct, frozen=True, kw_only=True):
    """Answer to clock and clock.accept; times are seconds of wall-clock time."""

    now: float  # the time that the daemon uses
    machine: float  # the time that the machine's clock shows
    doubted: bool = False  # the daemon does not believe the machine's clock
    forgets: bool = True  # old results and states are deleted
    reason: str = ""  # why the clock is doubted, and what to do


class RecentEvents(Struct, frozen=True, kw_only=True):
    """Answer to events; with `follow`, the stream continues from here."""

    recent: list[dict[str, Any]]


class OutputLine(Struct, frozen=True):
    at: float
    text: str


class WorkerOutput(Struct, frozen=True, kw_only=True):
    """Output of a worker; under a pool's name: output of importing its worker class."""

    name: str
    lines: list[OutputLine]


class TailResult(Struct, frozen=True, kw_only=True):
    """Answer to tail; with `follow`, the stream continues from here."""

    workers: list[WorkerOutput]


class BreakerStatus(Struct, frozen=True, kw_only=True):
    target: str
    state: str  # closed, open, half-open, forced-open, disabled
    open_seconds: float | None = 0.0  # how much longer it stays open; null: until it is closed
    failures: int = 0  # consecutive; while open, those that opened it
    reopenings: int = 0
    running: int = 0  # tasks of this target that run
    waiting: int = 0  # tasks of this target that wait at its gate


class BreakerList(Struct, frozen=True, kw_only=True):
    breakers: list[BreakerStatus]


class ArtefactPart(Struct, frozen=True, kw_only=True):
    """A part of an artefact; one that is shorter than ARTEFACT_PART_BYTES is the last."""

    data: bytes


class SessionStatus(Struct, frozen=True, kw_only=True):
    """A session; never what it holds."""

    name: str
    kept: bool = False
    site: str = ""  # of the first cookie
    bytes: int = 0  # encrypted
    login_seconds: float | None = None  # since the last login
    saved_seconds: float | None = None  # since it was saved last
    running: int = 0  # tasks that use it
    waiting: int = 0  # tasks that wait for it
    problem: str = ""
    login_task: str = ""  # id of the login task that its tasks wait for
    login_failures: int = 0  # logins in a row that have failed ...
    login_problem: str = ""  # ... and the error of the last one
    held_seconds: float = 0.0  # for so long no login is tried, and tasks fail


class SessionList(Struct, frozen=True, kw_only=True):
    sessions: list[SessionStatus]


def session_kept(status: SessionStatus, kept: bytes | None, wall_ns: int) -> SessionStatus:
    """Return a status with what can be read of a kept session without its key."""
    from musterd.ipc.secrets.sessions import Unreadable, read_head  # slow to load for musterctl

    if kept is None:
        return structs.replace(status, kept=False, bytes=0)
    known = structs.replace(status, kept=True, bytes=len(kept))
    try:
        head = read_head(kept)
    except Unreadable as error:
        return structs.replace(known, problem=str(error))
    return structs.replace(
        known,
        site=head.site,
        login_seconds=_since(head.login_wall_ns, wall_ns),
        saved_seconds=_since(head.saved_wall_ns, wall_ns),
    )


def _since(then_ns: int, now_ns: int) -> float | None:
    return max(0.0, (now_ns - then_ns) / 1e9) if then_ns else None


def task_status(view: TaskView, *, with_value: bool = True) -> TaskStatus:
    """Return a task as JSON can show it; `with_value` decodes its result too."""
    fields = {name: getattr(view, name) for name in _SAME_FIELDS}
    failure = _failure(view.failure) if view.failure is not None else None
    value = _shown(view.value, "result") if with_value and view.value else None
    args = _shown(view.args, "arguments") if view.args else None
    attempts = [
        AttemptStatus(
            attempt=each.attempt, at=each.at, worker=each.worker, failure=_failure(each.failure)
        )
        for each in view.attempts
    ]
    return TaskStatus(
        **fields,
        submitted_at=view.submitted_at or None,
        finished_at=view.finished_at or None,
        args=args,
        failure=failure,
        value=value,
        attempts=attempts,
    )


def _failure(told: Failure) -> TaskFailure:
    return TaskFailure(
        kind=told.kind,
        type=told.type,
        message=told.message,
        traceback=told.traceback,
        status=told.status,
        retry_after=told.retry_after_ns / 1e9,
        unwell=told.unwell,
    )


_SAME_FIELDS = tuple(
    name
    for name in TaskView.__struct_fields__
    if name not in ("args", "attempts", "failure", "value", "submitted_at", "finished_at")
)


def _shown(value: bytes, what: str) -> Any:
    """Return the decoded value, or a text that says that JSON cannot show it."""
    try:
        decoded = msgspec.msgpack.decode(value, ext_hook=_shown_extension)
        msgspec.json.encode(decoded)  # JSON has no keys but strings and numbers
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        return f"<{what} of {len(value)} bytes that JSON cannot show: {error}>"
    return decoded


def _shown_extension(code: int, data: memoryview) -> Any:
    """Return a reference to a secret as people write it."""
    extension = Ext(code, bytes(data))
    name = secret_name(extension)
    return extension if name is None else {JSON_KEY: name}


# -- names ------------------------------------------------------------------------------------


def expand(names: list[str], slots: dict[str, list[int]]) -> tuple[tuple[str, int], ...]:
    """Return the (pool, index) pairs that these names mean; WHOLE_POOL as index means a pool.

    A name is `POOL`, `POOL/N`, `all` or a glob over either. RpcError if a name matches nothing: a
    command that did nothing must not look as if it had worked.
    """
    found: dict[tuple[str, int], None] = {}
    for name in names:
        if name == "all":
            matches = [(pool, WHOLE_POOL) for pool in slots]
        elif "/" in name:
            matches = [
                (pool, index)
                for pool, indices in slots.items()
                for index in indices
                if fnmatchcase(f"{pool}/{index}", name)
            ]
        else:
            matches = [(pool, WHOLE_POOL) for pool in slots if fnmatchcase(pool, name)]
        if not matches and not (name == "all" or name in ("*", "*/*")):
            raise RpcError(NO_SUCH_NAME, f"no such name: {name!r}: {_known(slots)}")
        found.update(dict.fromkeys(matches))
    return tuple(found)


def means(names: list[str], name: str) -> bool:
    """Whether one of these names (as for expand) means this slot or pool."""
    pool = name.partition("/")[0]
    return any(
        given == "all" or fnmatchcase(name if "/" in given else pool, given) for given in names
    )


def _known(slots: dict[str, list[int]]) -> str:
    if not slots:
        return "there are no pools"
    shown = ", ".join(list(slots)[:20])
    return f"the pools are {shown}; slots are named POOL/N"


def select(fleet: FleetStatus, names: list[str]) -> FleetStatus:
    """Return the part of the status that was asked for; `at_target` is about that part."""
    if not names:
        return structs.replace(fleet, at_target=all(p.running >= p.size for p in fleet.pools))
    slots = {
        pool.name: [int(worker.name.rpartition("/")[2]) for worker in pool.workers]
        for pool in fleet.pools
    }
    wanted = set(expand(names, slots))
    pools: list[PoolStatus] = []
    at_target = True
    for pool in fleet.pools:
        whole = (pool.name, WHOLE_POOL) in wanted
        workers = [
            worker
            for worker, index in zip(pool.workers, slots[pool.name], strict=True)
            if whole or (pool.name, index) in wanted
        ]
        if whole:
            at_target &= pool.running >= pool.size
        elif workers:
            at_target &= all(worker.state in UP_STATES for worker in workers)
        if whole or workers:
            named = {worker.name for worker in workers}
            leaving = [worker for worker in pool.leaving if worker.name in named]
            pools.append(structs.replace(pool, workers=workers, leaving=leaving))
    return structs.replace(fleet, pools=pools, at_target=at_target)
