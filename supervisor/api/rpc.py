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

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

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
from musterd.supervisor.api.alerts import AlertsStatus
from musterd.supervisor.api.params import NAMES_MAX, Ids, Names, Seconds, SomeNames, TaskState

LINE_BYTES_MAX = 1024 * 1024  # a request is short; big task arguments go through tasks.sock
ANSWER_BYTES_MAX = 16 * 1024 * 1024  # room for the largest result (8 MiB) written as JSON
BATCH_MAX = 64  # requests in one line: as many as a connection may leave unanswered
BATCH_BYTES_MAX = 4 * 1024 * 1024  # of the answers to a batch, kept until all are there
ARTEFACT_PART_BYTES = 512 * 1024  # of one answer, which the loop encodes in a millisecond
LIST_MAX = 1000  # tasks in one answer, which the loop makes in one turn

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
    state: TaskState | Literal["", "finished"] = ""  # "finished": in any of the final ones
    pool: str = ""
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100


class ListClusterTasks(Params, frozen=True):
    """Tasks of all nodes; only on a node of a cluster."""

    state: TaskState | Literal["", "finished"] = ""
    pool: Annotated[str, Meta(max_length=200)] = ""
    node: Annotated[str, Meta(max_length=200)] = ""  # that has claimed them; "": any
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100


class GetClusterTask(Params, frozen=True):
    id: Id


class CancelTasks(Params, frozen=True):
    ids: Ids
    no_block: bool = False


class ListDead(Params, frozen=True):
    pool: str = ""
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100


class RetryTasks(Params, frozen=True):
    ids: Ids


class PurgeTasks(Params, frozen=True):
    """Forget failed tasks: these ids, or all, or those that failed longer ago than this."""

    ids: Annotated[list[Id], Meta(max_length=NAMES_MAX)] = []
    all: bool = False
    older_than: Seconds = 0


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

# -- the envelope -----------------------------------------------------------------------------


class Request(Struct, frozen=True):
    jsonrpc: Literal["2.0"]
    method: str
    params: Raw = Raw(b"{}")
    id: RequestId | UnsetType = UNSET  # unset: a notification, never answered


class ErrorBody(Struct, frozen=True):
    code: int
    message: str
    data: Any = None


class Answer(Struct, frozen=True):
    """An answer with `result` or `error`; a line without both is an event of a stream."""

    jsonrpc: str = ""
    id: RequestId = None
    result: Raw | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


class _Result(Struct, frozen=True):
    id: RequestId
    result: Any
    jsonrpc: str = "2.0"


class _Error(Struct, frozen=True):
    id: RequestId
    error: ErrorBody
    jsonrpc: str = "2.0"


class _OnlyId(Struct, frozen=True):
    id: RequestId = None


_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(Request).decode
_decode_batch = msgspec.json.Decoder(list[Raw]).decode
_decode_answer = msgspec.json.Decoder(Answer).decode
_decode_id = msgspec.json.Decoder(_OnlyId).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_request(line: bytes) -> Request:
    """Return the request on this line; RpcError, with the id if readable, if there is none."""
    try:
        return _decode_request(line)
    except msgspec.ValidationError as error:
        raise RpcError(
            INVALID_REQUEST, f"not a JSON-RPC 2.0 request: {error}", request_id=_id_of(line)
        ) from error
    except _UNREADABLE as error:
        raise RpcError(PARSE_ERROR, f"not readable as JSON: {error}") from error


def decode_batch(line: bytes) -> list[bytes]:
    """Return the requests of a batch; RpcError if it is no list, empty or too long."""
    try:
        members = _decode_batch(line)
    except _UNREADABLE as error:
        raise RpcError(PARSE_ERROR, f"not readable as JSON: {error}") from error
    if not members:
        raise RpcError(INVALID_REQUEST, "a batch without a request: send at least one")
    if len(members) > BATCH_MAX:
        raise RpcError(
            LIMIT_REACHED, f"a batch of {len(members)} requests, over {BATCH_MAX}: send several"
        )
    return [bytes(member).strip() for member in members]


def _id_of(line: bytes) -> RequestId:
    try:
        return _decode_id(line).id
    except _UNREADABLE:
        return None


def decode_params(method: str, params: Raw) -> Params:
    """Return the typed parameters of a method; RpcError names what is wrong."""
    kind = METHODS.get(method)
    if kind is None:
        raise RpcError(METHOD_NOT_FOUND, f"no method {method[:100]!r}: one of {', '.join(METHODS)}")
    try:
        if bytes(params).startswith(b"["):
            params = _by_name(method, kind, _decode_batch(params))
        return msgspec.json.decode(params, type=kind)
    except _UNREADABLE as error:
        raise RpcError(INVALID_PARAMS, f"parameters of {method}: {error}") from error


def _by_name(method: str, kind: type[Params], values: list[Raw]) -> Raw:
    names = kind.__struct_encode_fields__
    if len(values) > len(names):
        raise RpcError(
            INVALID_PARAMS,
            f"parameters of {method}: {len(values)} are given, and it has "
            f"{', '.join(names) or 'none'}",
        )
    return Raw(_encode(dict(zip(names, values, strict=False))))


def encode_request(request_id: int, params: Params) -> bytes:
    """Return the line that calls the method of these parameters."""
    method = METHOD_OF[type(params)]
    line: bytes = _encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
    return line + b"\n"


def encode_result(request_id: RequestId, result: object) -> bytes:
    """Return the line that answers with `result`; RpcError if it would be too long."""
    line = _encode(_Result(request_id, result))
    if len(line) > ANSWER_BYTES_MAX:
        raise RpcError(
            LIMIT_REACHED,
            f"the answer has {len(line)} bytes, over the limit of {ANSWER_BYTES_MAX}: "
            "fetch it with musterd.Client, or ask for less",
        )
    return line + b"\n"


def join_answers(lines: list[bytes]) -> bytes:
    """Return the line that answers a batch."""
    return b"[" + b",".join(line.rstrip(b"\n") for line in lines) + b"]\n"


def encode_error(request_id: RequestId, error: RpcError) -> bytes:
    """Return the line that answers with `error`."""
    return _encode(_Error(request_id, ErrorBody(error.code, error.message, error.data))) + b"\n"


def decode_answer(line: bytes) -> Answer:
    """Return an answer, or an event without result and error; RpcError if it is not JSON."""
    try:
        return _decode_answer(line)
    except _UNREADABLE as error:
        raise RpcError(PARSE_ERROR, f"the daemon's answer is not readable: {error}") from error
