"""Every message on tasks.sock and workers.sock, as tagged msgspec structs.

    tasks.sock     client  DEALER -> ROUTER  ClientMessage      Hello first, then anything
                   client  DEALER <- ROUTER  ServerMessage      Welcome or Refused first
    workers.sock   worker  DEALER -> ROUTER  WorkerMessage      WorkerHello first
                   worker  DEALER <- ROUTER  CommandMessage

One message is one ZeroMQ frame (behind the ROUTER's identity frame): a msgpack array whose first
element is the tag. Arguments and results are `bytes` that hold msgpack of their own: the
supervisor carries them from the client to the worker and back without ever looking inside.

Times are integer nanoseconds. Durations are relative, so that clocks need not agree.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, msgpack

from musterd.ipc.wire.history import Entries
from musterd.ipc.wire.resolving import Place, Resolve, Resolved

PROTOCOL = 1

# Limits. A receiver drops a message over MESSAGE_BYTES_MAX; a client never makes one, because it
# refuses a task over TASK_BYTES_MAX and cuts its batches at BATCH_BYTES_MAX.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
# A longer frame ends the connection. A message that is a little too large gets a polite answer.
WIRE_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
BATCH_BYTES_MAX = 1024 * 1024
BATCH_TASKS_MAX = 1000
TASK_BYTES_MAX = 4 * 1024 * 1024
# How deep arguments and results may be nested. From Python 3.14 on the size of the stack decides
# that, and what was encoded cannot always be decoded. Every stack has room for this.
NESTING_MAX = 5000
# The largest that a client makes: a task with arguments and a fallback, behind a batch. A longer
# frame ends its connection when its size is seen.
CLIENT_BYTES_MAX = 2 * TASK_BYTES_MAX + 2 * BATCH_BYTES_MAX
RESULT_BYTES_MAX = 12 * 1024 * 1024
CONCURRENCY_MAX = 64  # tasks that one worker runs at once; its scoreboard has as many rows
SAMPLES_MAX = 1000  # metrics sent at once
SAMPLE_CHARS_MAX = 64  # of a metric's name, and of each label
SAMPLE_LABELS_MAX = 4
STATE_BYTES_MAX = 1024 * 1024  # one ctx.state value: a note of where to go on, not the data
WATCH_BYTES_MAX = 8 * 1024  # rules of a schedule: which part of its results is watched, and how
VIEW_BYTES_MAX = 256 * 1024  # the watched part of a result, as history keeps it
VIEW_NUMBERS_MAX = 100
SESSION_CHARS_MAX = 64
SESSION_PREFIX = "session:"  # of the key of the state that keeps a session
HISTORY_LIMIT_MAX = 1000  # results in one question
LEASES_MAX = 1000  # in one message of a worker, which holds some hundred at most
# Of a failure's message and traceback. Workers cut far below it: escapes are added after the cut.
FAILURE_CHARS_MAX = 64 * 1024
TYPE_CHARS_MAX = 500  # of the name of an exception's class
STATUS_MAX = 999  # HTTP statuses have three digits

# Priorities, the smallest served first. The names are what users write.
CRITICAL, HIGH, NORMAL, LOW = range(4)
PRIORITY_NAMES = ("critical", "high", "normal", "low")

# States of a task, on the way and final, as written on wires and on disk.
QUEUED, WAITING, RUNNING = "queued", "waiting", "running"
SUCCEEDED, FAILED, CANCELLED, EXPIRED = "succeeded", "failed", "cancelled", "expired"
FINAL_STATES = (SUCCEEDED, FAILED, CANCELLED, EXPIRED)

# Why a submit was rejected, as written in Rejection.code; the client raises the error so named.
QUEUE_FULL, SHUTTING_DOWN, UNKNOWN_TASK, INVALID_TASK = (
    "QueueFull",
    "ShuttingDown",
    "UnknownTask",
    "InvalidTask",
)
# On local.sock alone: the task is not of this machine, and not known here. No client sees it.
ELSEWHERE = "Elsewhere"

# What went wrong with an attempt, as written in Failure.kind.
ERROR = "error"  # the handler raised; may be retried
PERMANENT = "permanent"  # the handler raised Permanent; never retried
INVALID = "invalid"  # the arguments do not fit the handler; never retried
TIMEOUT = "timeout"  # soft or hard timeout; may be retried
CRASH = "crash"  # the worker died under the task
CANCEL = "cancel"  # the handler was told to stop and did
SHUT = "open"  # the task did not wait for its site, whose breaker is open; nothing has failed here
SHUT_TYPE = "BreakerOpen"  # Failure.type of such a task
NO_LOGIN, LOGGED_IN, LOGIN_FAILED, LOGIN_WANTED = range(4)  # Completion.login
POISON = "PoisonTask"  # Failure.type of a task that killed its workers and is not run any more

USUAL = "usual"  # in a list of exceptions for a breaker: those that count without such a list

# In a duration field 0 means forever; in a count -1 means "not given".
NOT_GIVEN = -1
# Allowed age of a result: as configured; or so short that no result is young enough.
AS_CONFIGURED = -1
NEVER_NS = 1

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Target = Annotated[str, Meta(max_length=253)]
# SQLite's integers end at 2**63 - 1. Half of that leaves room for the sum of two.
Nanoseconds = Annotated[int, Meta(ge=0, le=2**62)]
Age = Annotated[int, Meta(ge=AS_CONFIGURED, le=2**62)]  # of a result; 0: not asked for
Number = Annotated[int, Meta(ge=0, le=2**62)]  # of a request, a lease, a protocol
Retries = Annotated[int, Meta(ge=NOT_GIVEN, le=1000)]
WORD_CHARS_MAX = 200
Word = Annotated[str, Meta(max_length=WORD_CHARS_MAX)]  # a token, a version
FailureText = Annotated[str, Meta(max_length=FAILURE_CHARS_MAX)]
# Longer than a metric may be: that costs the metric, not the message (core/model/counters.py).
SampleText = Annotated[str, Meta(max_length=16 * SAMPLE_CHARS_MAX)]
KEY_LENGTH_MAX = 200
ARGUMENTS_MAX = 255  # of a handler; no person writes more
Key = Annotated[str, Meta(max_length=KEY_LENGTH_MAX)]
Name32 = Annotated[str, Meta(max_length=32)]
Session = Annotated[str, Meta(max_length=SESSION_CHARS_MAX)]
OnOpen = Literal["", "wait", "fail", "fallback"]
FallbackOn = Literal["", "open", "failure"]


class TaskSpec(Struct, array_like=True, frozen=True, gc=False):
    """What a client asks for. Never changed once made."""

    id: Id
    name: Name  # "pool.method"
    args: Annotated[bytes, Meta(max_length=TASK_BYTES_MAX)]  # msgpack map of keyword arguments
    priority: Annotated[int, Meta(ge=CRITICAL, le=LOW)] = NORMAL
    target: Target = ""  # the site; "" means none
    timeout_ns: Nanoseconds = 0  # 0: as declared by the task, else by its pool
    max_retries: Retries = NOT_GIVEN
    delay_ns: Nanoseconds = 0
    expires_ns: Nanoseconds = 0  # counted from the submit; 0: never
    key: Key = ""  # unique while unfinished: a second submit with the key joins the first
    cache_ns: Age = 0  # accept a result of this key that is younger
    debounce_ns: Age = 0  # accept a result whose submit was less than this ago
    policy: Name32 = ""  # resilience class; "": as the target says, else none
    on_open: OnOpen = ""  # "": as the policy says
    fallback: Annotated[bytes, Meta(max_length=TASK_BYTES_MAX)] | None = None  # msgpack
    fallback_on: FallbackOn = ""  # "": as the task, target or class says, else open
    session: Session = ""  # cookies and storage that outlive the task; one task of each at a time
    # msgpack of rules for the worker, which says by a View what of the result is watched
    watch: Annotated[bytes, Meta(max_length=WATCH_BYTES_MAX)] = b""


class View(Struct, array_like=True, frozen=True, gc=False):
    """The watched part of a result, as the worker sees it."""

    digest: Word  # equal digests: nothing that is watched has changed
    numbers: Annotated[dict[Word, float], Meta(max_length=VIEW_NUMBERS_MAX)] = {}  # by field
    # msgpack of what history keeps; None: the result itself
    kept: Annotated[bytes, Meta(max_length=VIEW_BYTES_MAX)] | None = None
    cut: bool = False  # `kept` is only the beginning of it


class Failure(Struct, array_like=True, frozen=True, gc=False):
    """Why an attempt failed."""

    kind: Name32
    type: Annotated[str, Meta(max_length=TYPE_CHARS_MAX)] = ""  # the exception's class
    message: FailureText = ""
    traceback: FailureText = ""
    status: Annotated[int, Meta(ge=0, le=STATUS_MAX)] = 0  # HTTP status where there is one
    retry_after_ns: Nanoseconds = 0  # when to come back, according to the handler or the site
    unwell: bool = False  # the site is unwell: circuit breakers count this failure

    @property
    def refused(self) -> bool:
        """Whether a shut site refused the task, as it asked for: no dead letter."""
        return self.kind == SHUT


class Outcome(Struct, array_like=True, frozen=True, gc=False):
    """Final state of a task, as sent to its watchers.

    A succeeded outcome with a failure means: the task failed for good and ended with a substitute
    (`stale` or `fallback`), as its `fallback_on` asked.
    """

    id: str
    state: str
    value: bytes = b""  # msgpack of what the handler returned
    failure: Failure | None = None
    attempts: int = 0
    run_ns: int = 0
    stale: bool = False  # the last good result of an earlier task
    cached: bool = False  # the result of another task with the same key
    fallback: bool = False  # the value given with the submit

    @property
    def result(self) -> Any:
        """What the handler returned; None unless it succeeded."""
        return msgpack.decode(self.value) if self.value else None

    @property
    def error(self) -> str:
        """The failure in one line; "" if there is none."""
        failure = self.failure
        if failure is None:
            return ""
        return ": ".join(part for part in (failure.type or failure.kind, failure.message) if part)

    @property
    def run_seconds(self) -> float:
        """How long the last attempt ran."""
        return self.run_ns / 1e9

    @property
    def source(self) -> str:
        """Where the result is from; "" if it is the task's own."""
        for word in ("stale", "fallback", "cached"):
            if getattr(self, word):
                return word
        return ""


class Rejection(Struct, array_like=True, frozen=True):
    id: str
    code: str
    message: str
    retry_after_ns: int = 0


class FailedAttempt(Struct, frozen=True, omit_defaults=True):
    """Failure of one attempt, as shown to people."""

    attempt: int
    at: float  # seconds of wall-clock time
    worker: str
    failure: Failure


class TaskView(Struct, frozen=True, omit_defaults=True):
    """Task as shown to people: `task.status()`, `musterctl task ID`."""

    id: str
    name: str
    state: str
    priority: str
    target: str = ""
    attempt: int = 0
    crashes: int = 0
    worker: str = ""
    submitted_at: float = 0.0  # seconds of wall-clock time, for people only
    finished_at: float = 0.0
    run_seconds: float = 0.0
    policy: str = ""  # which timeout, retries, ... hold, and where each comes from
    waits_for: str = ""  # why the task is not running yet
    failure: Failure | None = None
    value: bytes = b""
    source: str = ""  # where the value is from, if not the task's own: see Outcome.source
    progress: float = 0.0  # the newest of ctx.progress()
    progress_text: str = ""
    attempts: list[FailedAttempt] = []  # the last failed ones, oldest first
    args: bytes = b""  # as they were submitted; not in lists


# -- client -> supervisor ---------------------------------------------------------------------


class Hello(Struct, array_like=True, tag="hello", frozen=True):
    protocol: Number
    software: Word = ""
    # Which client this is, over all its connections: a new one ends the one before. Nobody else
    # knows it. "" where a client sends nothing again.
    session: Word = ""


class Submit(Struct, array_like=True, tag="submit", frozen=True, gc=False):
    """Submit tasks; answered after the commit by one Accepted with the same request number."""

    request: Number
    tasks: Annotated[list[TaskSpec], Meta(max_length=BATCH_TASKS_MAX)]
    resend: bool = False  # sent before without an acknowledgement: the ids may be known already


class Watch(Struct, array_like=True, tag="watch", frozen=True):
    """Ask for the Outcome of each id, now or at its end; answered by Missing if unknown."""

    ids: Annotated[list[Id], Meta(max_length=BATCH_TASKS_MAX)]


class Inspect(Struct, array_like=True, tag="inspect", frozen=True):
    """Ask for a TaskView; answered by Inspected with the same request number."""

    request: Number
    id: Id


class Advise(Struct, array_like=True, tag="advise", frozen=True):
    """Ask how many workers the pools should have; answered by Advice with the same number."""

    request: Number


class Cancel(Struct, array_like=True, tag="cancel", frozen=True):
    """Cancel tasks; the outcome arrives like any other."""

    ids: Annotated[list[Id], Meta(max_length=BATCH_TASKS_MAX)]


class Invalidate(Struct, array_like=True, tag="invalidate", frozen=True):
    """Forget cached results of this key, or of all keys that begin with it."""

    key: Key
    prefix: bool = False


class Follow(Struct, array_like=True, tag="follow", frozen=True):
    """Ask for the Changes of all schedules: first the newest of each, then as they come."""


class History(Struct, array_like=True, tag="history", frozen=True):
    """Ask for the newest results of a schedule, or for those of these numbers; answered by
    Entries with the same request number."""

    request: Number
    schedule: Name
    limit: Annotated[int, Meta(ge=1, le=HISTORY_LIMIT_MAX)] = HISTORY_LIMIT_MAX
    numbers: Annotated[list[Number], Meta(max_length=HISTORY_LIMIT_MAX)] = []


Question = Inspect | Advise | History | Resolve
ClientMessage = Hello | Submit | Watch | Cancel | Invalidate | Follow | Question

# -- supervisor -> client ---------------------------------------------------------------------


class Welcome(Struct, array_like=True, tag="welcome", frozen=True):
    """Accept a client. `epoch` is new with each start of the supervisor: a client that sees another
    epoch resends what was not acknowledged and watches its tasks again."""

    protocol: int
    epoch: str
    software: str = ""


class Refused(Struct, array_like=True, tag="refused", frozen=True):
    protocol: int
    reason: str


class Fault(Struct, array_like=True, tag="error", frozen=True):
    """Answer a message that cannot be understood, or announce the end of the connection."""

    reason: str


class Accepted(Struct, array_like=True, tag="accepted", frozen=True):
    """Confirm that every task of the request is on disk, except those rejected here."""

    request: int
    rejected: list[Rejection] = []


class Results(Struct, array_like=True, tag="results", frozen=True):
    outcomes: list[Outcome]


class Missing(Struct, array_like=True, tag="missing", frozen=True):
    ids: list[str]


class Inspected(Struct, array_like=True, tag="inspected", frozen=True):
    request: int
    view: TaskView | None


class Advice(Struct, array_like=True, tag="advice", frozen=True):
    """How many workers memory allows in each pool."""

    request: int
    workers: dict[str, int]


class ProgressNote(Struct, array_like=True, tag="progress", frozen=True, gc=False):
    """Progress of a task, from 0 to 1, for its watchers; the newest wins."""

    id: str
    fraction: float
    text: str = ""


class Change(Struct, array_like=True, frozen=True):
    """New result of a schedule."""

    schedule: str
    task: str  # id of the run that returned it
    digest: str = ""  # SHA-256 of the result, or of the part that is watched
    at_ns: int = 0  # wall-clock time
    number: int = 0  # of the result in the schedule's history; 0: nothing is kept of it
    before: int = 0  # of the result before it
    again: bool = False  # told once more, because the supervisor was not sure


class Changes(Struct, array_like=True, tag="changes", frozen=True):
    """Changes of schedules. `newest` answers a Follow with each schedule's newest change, however
    old."""

    changes: list[Change]
    newest: bool = False


ServerMessage = (
    Welcome
    | Refused
    | Fault
    | Accepted
    | Results
    | Missing
    | Inspected
    | ProgressNote
    | Changes
    | Advice
    | Entries
    | Resolved
)

# -- worker -> supervisor ---------------------------------------------------------------------


class Arguments(Struct, array_like=True, frozen=True):
    """The arguments that a handler takes."""

    names: Annotated[tuple[Word, ...], Meta(max_length=ARGUMENTS_MAX)] = ()
    required: Annotated[tuple[Word, ...], Meta(max_length=ARGUMENTS_MAX)] = ()
    open: bool = False  # any other name is an argument, too


class TaskDeclaration(Struct, array_like=True, frozen=True):
    """What @task says about one handler; the fork server reports it after its import."""

    method: Name
    timeout_ns: Nanoseconds = 0
    max_retries: Retries = NOT_GIVEN
    target: Word = ""  # name of the argument that has the site
    fallback_on: FallbackOn = ""
    cache_ns: Age = 0  # for submits that do not say themselves
    debounce_ns: Age = 0
    place: Place = ""  # "module:function": by it clients find the pools of a typed call
    arguments: Arguments | None = None  # None: nobody has said


class WorkerHello(Struct, array_like=True, tag="worker", frozen=True):
    """Say that the worker is ready, after open() returned. The worker got the token at its fork."""

    protocol: Number
    token: Word
    width: Annotated[int, Meta(ge=1, le=CONCURRENCY_MAX)] = 1  # tasks it runs at once


class Completion(Struct, array_like=True, frozen=True, gc=False):
    lease: Number
    run_ns: Nanoseconds
    value: Annotated[bytes, Meta(max_length=RESULT_BYTES_MAX)] = b""
    failure: Failure | None = None
    retry_delay_ns: Annotated[int, Meta(ge=NOT_GIVEN, le=2**62)] = NOT_GIVEN  # of user code
    clears: Key = ""  # key of the state that a success makes obsolete
    view: View | None = None  # where the lease has rules in `watch`, and the handler succeeded
    login: Annotated[int, Meta(ge=0, le=LOGIN_WANTED)] = NO_LOGIN  # WANTED: its task has to run


class Sample(Struct, array_like=True, frozen=True, gc=False):
    """What a worker has counted under one name since its last report."""

    name: SampleText
    labels: Annotated[dict[SampleText, SampleText], Meta(max_length=16 * SAMPLE_LABELS_MAX)]
    value: float
    gauge: bool = False  # the value itself, not an increment


class Done(Struct, array_like=True, tag="done", frozen=True, gc=False):
    completions: Annotated[list[Completion], Meta(max_length=LEASES_MAX)]
    samples: Annotated[list[Sample], Meta(max_length=2 * SAMPLES_MAX)] = []


class Returned(Struct, array_like=True, tag="returned", frozen=True):
    """Give back recalled leases that had not begun."""

    leases: Annotated[list[Number], Meta(max_length=LEASES_MAX)]


class Progress(Struct, array_like=True, tag="progress", frozen=True, gc=False):
    lease: Number
    fraction: Annotated[float, Meta(ge=0, le=1)]
    text: Annotated[str, Meta(max_length=500)] = ""


class LoadState(Struct, array_like=True, tag="load", frozen=True):
    """Ask for the state saved under this key; answered by StateAnswer."""

    request: Number
    key: Key
    lease: Number = 0  # whose handler asks


class SaveState(Struct, array_like=True, tag="save", frozen=True, gc=False):
    """Keep a state under the key, None to clear it; answered by StateAnswer after the commit."""

    request: Number
    key: Key
    value: Annotated[bytes, Meta(max_length=STATE_BYTES_MAX)] | None
    ttl_ns: Nanoseconds = 0  # 0: forever
    lease: Number = 0  # whose handler asks


class LockState(Struct, array_like=True, tag="lock", frozen=True):
    """Take a lock that all workers share, or give it back (or stop waiting for it).

    Taking is answered by LockAnswer, once the lock is taken or the time is over.
    """

    request: Number
    name: Key
    take: bool
    timeout_ns: Nanoseconds = 0  # 0: do not wait
    lease: Number = 0  # owner of the lock


class Waiting(Struct, array_like=True, tag="wait", frozen=True):
    """Say that a handler waits until one of these tasks ends; no ids: it waits no longer.

    Answered by WaitAnswer only if none of them can ever end.
    """

    request: Number
    lease: Number
    ids: Annotated[list[Id], Meta(max_length=BATCH_TASKS_MAX)]


WorkerMessage = (
    WorkerHello | Done | Returned | Progress | LoadState | SaveState | LockState | Waiting
)

# -- supervisor -> worker ---------------------------------------------------------------------


class Fetching(Struct, array_like=True, frozen=True, gc=False):
    """How pages of a site are fetched, as its target says."""

    proxies: tuple[str, ...] = ()  # addresses, or "secret:NAME" of one
    robots: bool | None = None  # keep to robots.txt; None: as the pool's options say


class Lease(Struct, array_like=True, frozen=True, gc=False):
    """One attempt of one task, given to one worker."""

    lease: int
    id: str
    method: str
    args: bytes
    attempt: int  # 1 for the first
    timeout_ns: int
    last: bool = False  # no retry will follow this attempt
    # function of the worker's side that computes the pause before the next attempt
    backoff: str = ""
    counts: tuple[str, ...] | None = None  # exceptions that say the site is unwell; None: the usual
    session: str = ""
    watch: bytes = b""
    fetching: Fetching | None = None  # where the site's target says anything about it


class Assign(Struct, array_like=True, tag="assign", frozen=True, gc=False):
    leases: list[Lease]


class Recall(Struct, array_like=True, tag="recall", frozen=True):
    """Give back what has not begun; answered by Returned, with an empty list if all has begun."""


class CancelLease(Struct, array_like=True, tag="cancel", frozen=True):
    """Interrupt a running lease, drop one that has not begun; answered by its Completion."""

    lease: int


class Stop(Struct, array_like=True, tag="stop", frozen=True):
    """Finish what runs, give back the rest (Returned), close() and exit with 0."""

    close_ns: int = 0  # how long close() and the clean-ups may take; 0: not said


class StateAnswer(Struct, array_like=True, tag="state", frozen=True, gc=False):
    request: int
    value: bytes | None = None
    error: str = ""


class LockAnswer(Struct, array_like=True, tag="locked", frozen=True):
    request: int
    taken: bool
    holder: str = ""  # who has the lock, if it was not taken
    error: str = ""  # why the lock can never be taken, if so


class WaitAnswer(Struct, array_like=True, tag="waits", frozen=True):
    """None of the tasks that a handler waits for can ever end."""

    request: int
    ids: list[str]
    reason: str


HandlerAnswer = StateAnswer | LockAnswer | WaitAnswer
CommandMessage = Assign | Recall | CancelLease | Stop | HandlerAnswer
