"""The protocol of control.sock: JSON-RPC 2.0, one object per line, in both directions.

    caller -> daemon   {"jsonrpc": "2.0", "id": 1, "method": "scale", "params": {"pool": "a", ...}}
    caller <- daemon   {"jsonrpc": "2.0", "id": 1, "result": ...}
                   or  {"jsonrpc": "2.0", "id": 1, "error": {"code": 4, "message": "..."}}

Parameters are given by name, or as a list in the order of the fields below. A request without `id`
is carried out and not answered. A line may also be a batch: a list of requests. One list answers
the batch when all its requests are done, without those that have no `id`. After the answer to
`events` the connection is a stream: one JSON object per event, {"dropped": n} where the reader was
too slow. Before the answer to `debug` it is a dialogue (debugging.py).

Both ends import this module, so it imports msgspec and nothing that takes time to load.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from musterd.ipc.errors import MusterdError
from musterd.ipc.resilience.policy import POOL_SIZE_MAX
from musterd.ipc.wire.debugger_messages import DEBUGGER_CHARS_MAX
from musterd.ipc.wire.messages import (
    NOT_GIVEN,
    SESSION_CHARS_MAX,
    FallbackOn,
    Id,
    Key,
    Name,
    Name32,
    OnOpen,
    Session,
    Target,
)
from musterd.ipc.wire.schedule_messages import PUTS_MAX
from musterd.ipc.wire.selection import Selection, Text
from musterd.supervisor.api.alerts import AlertsStatus
from musterd.supervisor.api.params import Cursor, Names, Seconds, SomeIds, SomeNames, TaskState

LINE_BYTES_MAX = 1024 * 1024  # a request is short; big task arguments go through tasks.sock
ANSWER_BYTES_MAX = 16 * 1024 * 1024  # room for the largest result (8 MiB) written as JSON
BATCH_MAX = 64  # requests in one line: as many as a connection may leave unanswered
BATCH_BYTES_MAX = 4 * 1024 * 1024  # of the answers to a batch, kept until all are there
ARTEFACT_PART_BYTES = 512 * 1024  # of one answer, which the loop encodes in a millisecond
LIST_MAX = 1000  # tasks in one answer, which the loop makes in one turn
BULK_MAX = 250  # tasks in one step of a command in bulk, which the loop takes in one turn

# Codes of JSON-RPC itself, then codes of musterd: small numbers, musterctl's exit codes.
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND = -32700, -32600, -32601
INVALID_PARAMS, INTERNAL_ERROR = -32602, -32603
FAILED = 1
NO_SUCH_NAME = 4
NOT_ALLOWED = 5
LIMIT_REACHED = 6  # too many connections or pending requests, or an answer too long to send

RequestId = str | int | float | None


class RpcError(MusterdError):
    """The answer to a request that cannot be done; the daemon returns or raises it."""

    def __init__(
        self, code: int, message: str, data: object = None, *, request_id: RequestId = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data
        self.request_id = request_id


def internal_error() -> RpcError:
    return RpcError(INTERNAL_ERROR, "internal error: the daemon's log has the details")


# -- parameters, one struct per method --------------------------------------------------------


class Params(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all parameters: an unknown one is an error, so that a typo has no effect."""


class Status(Params, frozen=True):
    names: Names = []  # none: everything


class Start(Params, frozen=True):
    names: SomeNames
    no_block: bool = False


class Stop(Params, frozen=True):
    names: SomeNames
    no_block: bool = False


class Restart(Params, frozen=True):
    names: SomeNames
    no_block: bool = False


class Reset(Params, frozen=True):
    names: SomeNames
    no_block: bool = False


class Scale(Params, frozen=True):
    pool: Name
    size: Annotated[int, Meta(ge=0, le=POOL_SIZE_MAX)] | Literal["auto"]
    no_block: bool = False


class Pause(Params, frozen=True):
    names: SomeNames


class Drain(Params, frozen=True):
    names: Names = []  # none: everything
    no_block: bool = False


class Resume(Params, frozen=True):
    names: Names = []  # none: everything


class Signal(Params, frozen=True):
    signal: str | int  # "HUP", "SIGHUP" or 1: see convert.py
    names: SomeNames


class Pid(Params, frozen=True):
    names: Names = []  # none: the pid of the supervisor


class SubmitTask(Params, frozen=True):
    """A task to run; durations are seconds. See convert.py."""

    name: Name
    id: Id
    args: dict[str, Any] = {}
    priority: str = "normal"  # in any case
    target: Target = ""
    timeout: Seconds = 0
    max_retries: Annotated[int, Meta(ge=NOT_GIVEN, le=1000)] = NOT_GIVEN
    delay: Seconds = 0
    expires: Seconds = 0
    key: Key = ""
    cache: Seconds | bool = 0  # true: as configured; false: never, whatever @task says
    debounce: Seconds | bool = 0
    policy: Name32 = ""
    on_open: OnOpen = ""
    fallback: Any = UNSET
    fallback_on: FallbackOn = ""
    session: Session = ""
    wait: bool = False  # answered with the final state instead of after the commit


class InvalidateCache(Params, frozen=True):
    """Forget the results of one key, or of all keys with this prefix."""

    key: Key = ""
    prefix: bool = False


class GetTask(Params, frozen=True):
    id: Id
    value: bool = True  # false: without its result, which may be large


class ListArtefacts(Params, frozen=True):
    id: Id  # also of a task that this node of a cluster does not know any more


class ReadArtefact(Params, frozen=True):
    id: Id
    name: Annotated[str, Meta(min_length=1, max_length=100)]  # as in the answer of tasks.get
    offset: Annotated[int, Meta(ge=0, le=2**40)] = 0


class ListTasks(Params, frozen=True):
    """List tasks that fit `where`; `state` and `pool` may stand beside it."""

    state: TaskState | Literal["", "finished"] = ""  # "finished": in any of the final ones
    pool: Text = ""
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100
    where: Selection = Selection()
    after: Cursor = ""  # `cursor` of the answer before


class ListClusterTasks(Params, frozen=True):
    """Tasks of all nodes; only on a node of a cluster."""

    state: TaskState | Literal["", "finished"] = ""
    pool: Annotated[str, Meta(max_length=200)] = ""
    node: Annotated[str, Meta(max_length=200)] = ""  # that has claimed them; "": any
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100


class GetClusterTask(Params, frozen=True):
    id: Id


class CancelTasks(Params, frozen=True):
    """Cancel these tasks, or a step of those that fit `where`: BULK_MAX at most."""

    ids: SomeIds = []
    no_block: bool = False
    where: Selection | None = None
    after: Cursor = ""  # `cursor` of the step before
    dry_run: bool = False  # only count those of the step


class ListDead(Params, frozen=True):
    pool: Text = ""
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100
    where: Selection = Selection()  # in the state failed (if it names none), expired or cancelled
    after: Cursor = ""


class RetryTasks(Params, frozen=True):
    """Run these tasks again, or a step of those that fit `where`, as CancelTasks."""

    ids: SomeIds = []
    where: Selection | None = None  # as ListDead
    after: Cursor = ""
    dry_run: bool = False


class PurgeTasks(Params, frozen=True):
    """Forget failed tasks: these ids, or all, or those that failed longer ago than this; or a step
    of those that fit `where`, as RetryTasks."""

    ids: SomeIds = []
    all: bool = False
    older_than: Seconds = 0
    where: Selection | None = None
    after: Cursor = ""
    dry_run: bool = False


class ListSchedules(Params, frozen=True):
    after: Annotated[str, Meta(max_length=200)] = ""  # the name of the last one that is known
    state: Literal["", "active", "paused", "disabled", "unusable", "stale"] = ""


class GetSchedule(Params, frozen=True):
    name: Name


class PutSchedule(Params, frozen=True):
    """Keys of a schedule, as [[schedule]] has them."""

    name: Name
    keys: dict[str, Any]


class NewSchedule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of many schedules."""

    name: Name
    keys: dict[str, Any]
    paused: bool = False  # pause it too; False leaves one that is paused as it is


class PutSchedules(Params, frozen=True):
    """Many schedules at once: those that are refused are told, the others are stored."""

    schedules: Annotated[list[NewSchedule], Meta(min_length=1, max_length=PUTS_MAX)]
    replace: bool = True  # False: refuse names that are in use
    dry_run: bool = False  # store nothing: only tell what would be refused


class DeleteSchedule(Params, frozen=True):
    name: Name


class RunSchedule(Params, frozen=True):
    name: Name


class PauseSchedule(Params, frozen=True):
    name: Name


class ResumeSchedule(Params, frozen=True):
    name: Name


class ListChanges(Params, frozen=True):
    """List the newest changes of one schedule, or of all."""

    name: Annotated[str, Meta(max_length=200)] = ""
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 20
    brief: bool = False  # which there are, without what is on disk: task, summary and results


class ShowHistory(Params, frozen=True):
    """List the newest results of a schedule that differ."""

    name: Name
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 20


class ListBreakers(Params, frozen=True):
    pass


class SetBreaker(Params, frozen=True):
    target: Annotated[str, Meta(min_length=1, max_length=253)]
    command: Literal["open", "close", "reset", "disable"]


class ListSessions(Params, frozen=True):
    held: bool = False  # only those whose logins fail, without what is kept of them


class ForgetSession(Params, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=SESSION_CHARS_MAX)]


class ResetSession(Params, frozen=True):
    """Let tasks of a session log in again, after logins that failed."""

    name: Annotated[str, Meta(min_length=1, max_length=SESSION_CHARS_MAX)]


class Events(Params, frozen=True):
    follow: bool = True  # false: recent events only, and the connection is no stream
    names: Names = []  # pools and slots; none: all
    kinds: Names = []  # "worker.*", "breaker.open"; none: all
    level: Literal["debug", "info", "warning", "error"] = "debug"  # the lowest
    limit: Annotated[int, Meta(ge=0, le=LIST_MAX)] = LIST_MAX  # of recent events


class Tail(Params, frozen=True):
    names: Names = []  # none: all
    lines: Annotated[int, Meta(ge=0, le=LIST_MAX)] = 10  # of each worker
    follow: bool = False  # true: the connection becomes a stream of their output


class Debug(Params, frozen=True):
    """Debug a task that waits at a breakpoint."""

    names: Names = []  # of slots, one of which has such a task; none: all


class DebugLine(Params, frozen=True):
    """Type a line for the debugger of this connection; null: leave it."""

    line: Annotated[str, Meta(max_length=DEBUGGER_CHARS_MAX)] | None


class DebugInterrupt(Params, frozen=True):
    """Stop the code that is debugged on this connection."""


class Reread(Params, frozen=True):
    """Tell what a reload would change."""


class Reload(Params, frozen=True):
    names: Names = []  # pools whose workers are replaced in any case
    no_block: bool = False
    code: bool = False  # replace also the workers of pools whose code on disk is newer


class Update(Params, frozen=True):
    no_block: bool = False


class Shutdown(Params, frozen=True):
    no_block: bool = False


class ShowMemory(Params, frozen=True):
    pass


class Metrics(Params, frozen=True):
    """Tell all figures at once: see metrics.py."""


class Version(Params, frozen=True):
    pass


class ShowClock(Params, frozen=True):
    """Tell which time the daemon uses."""


class AcceptClock(Params, frozen=True):
    """Believe the machine's clock, which the daemon doubts."""


class ListAlerts(Params, frozen=True):
    pass


class TestAlert(Params, frozen=True):
    name: Name


class ReportAlerts(Params, frozen=True):
    """From the process that sends alerts: the state of all alerts."""

    status: AlertsStatus


class TestedAlert(Params, frozen=True):
    """From the process that sends alerts: the outcome of a test."""

    token: Name
    error: str = ""


METHODS: dict[str, type[Params]] = {
    "status": Status,
    "start": Start,
    "stop": Stop,
    "restart": Restart,
    "reset": Reset,
    "scale": Scale,
    "pause": Pause,
    "drain": Drain,
    "resume": Resume,
    "signal": Signal,
    "pid": Pid,
    "tasks.submit": SubmitTask,
    "tasks.get": GetTask,
    "tasks.artefacts": ListArtefacts,
    "tasks.artefact": ReadArtefact,
    "tasks.list": ListTasks,
    "tasks.cancel": CancelTasks,
    "tasks.dead": ListDead,
    "tasks.retry": RetryTasks,
    "tasks.purge": PurgeTasks,
    "cluster.tasks": ListClusterTasks,
    "cluster.task": GetClusterTask,
    "cache.invalidate": InvalidateCache,
    "breaker.list": ListBreakers,
    "breaker.set": SetBreaker,
    "sessions.list": ListSessions,
    "sessions.forget": ForgetSession,
    "sessions.reset": ResetSession,
    "schedule.list": ListSchedules,
    "schedule.get": GetSchedule,
    "schedule.put": PutSchedule,
    "schedule.put_many": PutSchedules,
    "schedule.delete": DeleteSchedule,
    "schedule.run": RunSchedule,
    "schedule.pause": PauseSchedule,
    "schedule.resume": ResumeSchedule,
    "changes": ListChanges,
    "history": ShowHistory,
    "tail": Tail,
    "events": Events,
    "debug": Debug,
    "debug.line": DebugLine,
    "debug.interrupt": DebugInterrupt,
    "reread": Reread,
    "reload": Reload,
    "update": Update,
    "shutdown": Shutdown,
    "memory": ShowMemory,
    "metrics": Metrics,
    "version": Version,
    "clock": ShowClock,
    "clock.accept": AcceptClock,
    "alerts": ListAlerts,
    "alerts.test": TestAlert,
    "alerts.report": ReportAlerts,
    "alerts.tested": TestedAlert,
}
METHOD_OF = {params: method for method, params in METHODS.items()}
