"""Every message on node.sock, between the supervisor and the cluster sidecar of its machine.

    node.sock   sidecar  DEALER -> ROUTER  SidecarMessage     SidecarHello first
                sidecar  DEALER <- ROUTER  NodeMessage        Greeting first

The sidecar speaks to the engine (supervisor/cluster/engine.py). The supervisor wants attempts, runs
them and tells how they ended. Frames are as in messages.py.

Both processes are on one machine and read one monotonic clock. So `expires_at_ns` and `until_ns`
are instants of that clock, counted by the sidecar from before it asked the engine: a message that
waits, because a process was stopped, prolongs no lease.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Protocol, TypeVar

from msgspec import Meta, Struct, msgpack

from musterd.ipc.wire.messages import (
    BATCH_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    NOT_GIVEN,
    RESULT_BYTES_MAX,
    STATE_BYTES_MAX,
    TASK_BYTES_MAX,
    Failure,
    Id,
    Key,
    Name,
    Name32,
    Nanoseconds,
    Number,
    TaskDeclaration,
    TaskSpec,
    TaskView,
    View,
    Word,
)

NODE_PROTOCOL = 1
ATTEMPTS_MAX = 1000  # in one message; the sender also cuts at BATCH_BYTES_MAX
POOLS_MAX = 1000
NAMES_MAX = 10_000  # tasks that the code of a pool has
WANT_MAX = 1_000_000  # attempts at once, of all workers of a pool
NODES_MAX = 1000  # that a look at the cluster tells; more than one database serves
COUNTS_MAX = 4000  # queues that a look tells, by pool, level and state
BUCKETS_MAX = 65  # of a duration: as in core/model/counters.py
NOTICE_CHARS_MAX = 1000
FOUND_MAX = 1000  # tasks in an answer to people
POLICY_BYTES_MAX = 16 * 1024 * 1024  # of all parts of a policy: 10,000 sites take a fifth of it
NEWS_CHARS_MAX = 1000
CONTENT_BYTES_MAX = 32 * 1024  # JSON: twice what an event has of a result, and a line
LOGINS_MAX = 1000  # sessions whose logins fail, that a node hears of
REQUESTS_MAX = 1000  # of handlers, in one message; the sender also cuts at BATCH_BYTES_MAX

_PACK = msgpack.Encoder().encode
_UNPACK_VIEWS = msgpack.Decoder(Annotated[list[TaskView], Meta(max_length=FOUND_MAX)]).decode

Count = Annotated[int, Meta(ge=0, le=WANT_MAX)]
EndKind = Literal["succeeded", "failed", "untouched", "interrupted", "crashed"]
LockWishKind = Literal["want", "pass", "leave"]
StateValue = Annotated[bytes, Meta(max_length=STATE_BYTES_MAX)] | None
Remark = Annotated[str, Meta(max_length=1000)]  # for people
Name64 = Annotated[str, Meta(max_length=64)]


class Held(Struct, array_like=True, frozen=True, gc=False):
    """An attempt that the node has, or had until it told its end."""

    id: Id
    claim: Number


class Attempt(Struct, array_like=True, frozen=True, gc=False):
    """One attempt of one task, granted to this node."""

    spec: TaskSpec
    claim: Number
    attempt: Annotated[int, Meta(ge=1, le=2**31)]  # 1 for the first
    crashes: Number = 0
    interruptions: Number = 0
    policy: Name32 = ""  # its resilience class: that of the submit, else of its target
    expires_at_ns: Nanoseconds = 0  # never to begin after; 0: no limit
    again: bool = False  # it has waited for the login task of its session, which has worked ...
    login_error: Remark = ""  # ... or why that has not: it has failed before it begins


class LoginVerdict(Struct, array_like=True, frozen=True):
    """What an attempt says about the logins of its session, and what holds for those that fail.

    "wanted": it has found nobody logged in, and begins anew when a login task has run.
    """

    session: Name64
    said: Literal["worked", "failed", "wanted"]
    failures: Count  # in a row, after which none is tried for a while ...
    pause_ns: Nanoseconds  # ... and twice as long each time that one fails again, ...
    pause_max_ns: Nanoseconds  # ... at most so long
    problem: Remark = ""  # why it failed
    task: Annotated[str, Meta(max_length=200)] = ""  # the login task that is wanted
    args: Annotated[bytes, Meta(max_length=TASK_BYTES_MAX)] = b""


class AttemptEnd(Struct, array_like=True, frozen=True, gc=False):
    """How an attempt ended. A failure with `retry_ns` is tried again after that time."""

    id: Id
    claim: Number
    kind: EndKind
    value: Annotated[bytes, Meta(max_length=RESULT_BYTES_MAX)] = b""
    failure: Failure | None = None
    run_ns: Nanoseconds = 0
    retry_ns: Annotated[int, Meta(ge=NOT_GIVEN, le=2**62)] = NOT_GIVEN
    patience_ns: Nanoseconds = 0  # how long the retry may wait for its site's budget
    clears: Key = ""  # key of the state that a success makes obsolete
    keeps: bool = False  # a success is remembered as the last good result of its key
    view: View | None = None  # what of a run's result is watched
    login: LoginVerdict | None = None

    @property
    def size(self) -> int:
        """Return the bytes that dominate the message."""
        failure = self.failure
        words = len(failure.message) + len(failure.traceback) if failure is not None else 0
        seen = len(self.view.kept or b"") if self.view is not None else 0
        login = len(self.login.args) if self.login is not None else 0
        return len(self.value) + words + seen + login


class PoolCard(Struct, array_like=True, frozen=True):
    """What the node says about one of its clustered pools."""

    name: Name
    places: Count  # tasks that it runs at once
    tasks: Annotated[tuple[TaskDeclaration, ...], Meta(max_length=NAMES_MAX)]
    queue_size: Number
    aging_ns: Nanoseconds
    max_crashes: Number
    cache_ns: Nanoseconds
    debounce_ns: Nanoseconds


Attempts = Annotated[list[Attempt], Meta(max_length=ATTEMPTS_MAX)]
Ends = Annotated[list[AttemptEnd], Meta(max_length=ATTEMPTS_MAX)]
HeldList = Annotated[list[Held], Meta(max_length=ATTEMPTS_MAX)]

# -- sidecar -> supervisor --------------------------------------------------------------------


class SidecarHello(Struct, array_like=True, tag="cluster", frozen=True):
    """Say that the sidecar is there, with the token that it was started with."""

    protocol: Number
    token: Word


class Membership(Struct, array_like=True, tag="member", frozen=True):
    """What the engine says about this node, after each heartbeat and when that changes."""

    tenure: Number  # 0: none
    until_ns: Nanoseconds  # the end of the lease
    away: bool = False  # the engine does not answer
    draining: bool = False
    policy: Number = 0  # version of the applied policy; 0: none


class SharedPolicy(Struct, array_like=True, tag="policy", frozen=True):
    """Part of the policy of the cluster, as msgpack; the parts of one come in a row.

    An empty one says that this version of musterd cannot read it.
    """

    version: Number
    part: Annotated[bytes, Meta(max_length=BATCH_BYTES_MAX)] = b""
    more: bool = False


class Content(Struct, array_like=True, frozen=True):
    """What has changed: in one line, and both results, as far as an event has room for them."""

    summary: str = ""
    before: Any = None
    after: Any = None


class ScheduleNews(Struct, array_like=True, tag="schedule", frozen=True):
    """Something happened to a schedule of the cluster that operators want to know."""

    event: Literal[
        "schedule.skipped", "schedule.reset", "task.changed", "watch.stale", "watch.recovered"
    ]
    schedule: Name
    pool: Word = ""
    task: Word = ""
    reason: Annotated[str, Meta(max_length=NEWS_CHARS_MAX)] = ""
    count: Number = 0
    digest: Word = ""
    elsewhere: bool = False  # another node alerts people of it
    # Of a change: the numbers of both results in history, when, and the results themselves.
    number: Number = 0
    number_before: Number = 0
    at_ns: Nanoseconds = 0
    again: bool = False  # another node may have alerted people of it before
    content: Annotated[bytes, Meta(max_length=CONTENT_BYTES_MAX)] = b""  # JSON of Content
    change: Number = 0  # to be confirmed by NewsTold; 0: no need


class Granted(Struct, array_like=True, tag="granted", frozen=True, gc=False):
    """Answer a Want, which is used up by that; attempts may come in several messages."""

    request: Number
    pool: Name
    attempts: Attempts


class Confirmed(Struct, array_like=True, tag="confirmed", frozen=True, gc=False):
    """The engine has heard of these ends, whether they counted or not."""

    held: HeldList


class CancelAttempts(Struct, array_like=True, tag="cancel", frozen=True):
    """Somebody has cancelled these tasks."""

    held: HeldList


class LoseAttempts(Struct, array_like=True, tag="lost", frozen=True):
    """These attempts are not ours any more: how they end does not count."""

    held: HeldList


class Notice(Struct, array_like=True, tag="notice", frozen=True):
    """Something an operator wants to know: the daemon logs it."""

    event: Annotated[str, Meta(max_length=50, pattern=r"^cluster\.[a-z_]{1,40}$")]
    level: Literal["info", "warning", "error"] = "info"
    reason: Annotated[str, Meta(max_length=NOTICE_CHARS_MAX)] = ""
    node: Annotated[str, Meta(max_length=200)] = ""  # that it is about
    count: Number = 0


class Figures(Struct, array_like=True, tag="figures", frozen=True):
    """What this sidecar has done since it started: at most one message a second."""

    claims: Number = 0  # calls
    attempts: Number = 0  # that they brought
    claim_ns: Number = 0  # that the calls took together, and by powers of two
    claim_buckets: Annotated[list[Number], Meta(max_length=BUCKETS_MAX)] = []
    ends: Number = 0  # that the engine has heard of
    fenced: Number = 0  # results among them that did not count
    reaped: Number = 0  # nodes
    failed_calls: Number = 0
    submitted: Number = 0  # tasks of the clients here
    refused: Number = 0
    told: Number = 0  # results
    refusing: bool = False  # new submits, because the engine does not answer
    policy: Annotated[int, Meta(ge=-1, le=2**31)] = 0  # version that is applied


class QueueCount(Struct, array_like=True, frozen=True):
    """Live tasks of a pool, and those of them that would begin if there were a worker."""

    pool: Name
    level: Annotated[int, Meta(ge=0, le=15)]
    state: Annotated[str, Meta(max_length=20)]  # queued, running, waiting
    tasks: Number
    ready: Number = 0
    waited_ns: Nanoseconds = 0  # by the one of these that waits for longest


class NodeSeen(Struct, array_like=True, frozen=True):
    """A node of the cluster. `tenure` is 0 if it has left or was given up."""

    name: Annotated[str, Meta(max_length=200)]
    tenure: Number
    alive: bool
    draining: bool
    claims: Number
    beat_age_ns: Nanoseconds
    software: Annotated[str, Meta(max_length=200)]
    pools: Annotated[tuple[Name, ...], Meta(max_length=POOLS_MAX)]


class Seen(Struct, array_like=True, tag="seen", frozen=True):
    """The whole cluster at the instant `at_ns` of the machine's clock; every ten seconds or so."""

    at_ns: Nanoseconds
    oldest_snapshot_ns: Nanoseconds
    dead_tuples: Number
    live_bytes: Number
    counts: Annotated[tuple[QueueCount, ...], Meta(max_length=COUNTS_MAX)]
    nodes: Annotated[tuple[NodeSeen, ...], Meta(max_length=NODES_MAX)]


class FoundTasks(Struct, array_like=True, tag="found", frozen=True):
    """Answer a FindTasks. `worker` of a task is the node that has claimed it."""

    request: Number
    packed: Annotated[bytes, Meta(max_length=MESSAGE_BYTES_MAX)] = _PACK([])  # list of TaskView
    more: bool = False  # there are more than were asked for
    reason: Annotated[str, Meta(max_length=NOTICE_CHARS_MAX)] = ""  # why there is no answer

    @property
    def tasks(self) -> list[TaskView]:
        """ValidationError if that cannot be read."""
        views: list[TaskView] = _UNPACK_VIEWS(self.packed)
        return views


class StateReply(Struct, array_like=True, frozen=True, gc=False):
    number: Number
    value: StateValue = None  # what was loaded
    error: Remark = ""  # why there is none, or why it is not saved

    @property
    def size(self) -> int:
        return len(self.value or b"")


class StatesTold(Struct, array_like=True, tag="states", frozen=True, gc=False):
    """What became of requests of handlers, after the commit."""

    replies: Annotated[list[StateReply], Meta(max_length=REQUESTS_MAX)]


class LockReply(Struct, array_like=True, frozen=True):
    request: Number
    name: Key
    taken: bool
    holder: Remark = ""  # who has it, if it was not taken


class LocksTold(Struct, array_like=True, tag="locks", frozen=True):
    """Answer wishes for locks: first whether the lock is ours, then when it is."""

    tenure: Number
    replies: Annotated[list[LockReply], Meta(max_length=REQUESTS_MAX)]


class SessionLogins(Struct, array_like=True, frozen=True):
    """Logins of a session that have failed in a row, as the whole cluster counts."""

    session: Name64
    failures: Count
    until_ns: Nanoseconds = 0  # none is tried before; 0: the next task may
    problem: Remark = ""  # why the last one failed
    mine: bool = False  # it failed here, so people are told here


class LoginsTold(Struct, array_like=True, tag="logins", frozen=True):
    """All sessions of the cluster whose logins have failed, when that has changed."""

    logins: Annotated[list[SessionLogins], Meta(max_length=LOGINS_MAX)]


ClusterNews = Notice | Figures | Seen | LoginsTold
SidecarMessage = (
    SidecarHello
    | Membership
    | SharedPolicy
    | ScheduleNews
    | Granted
    | Confirmed
    | CancelAttempts
    | LoseAttempts
    | Notice
    | Figures
    | Seen
    | FoundTasks
    | StatesTold
    | LocksTold
    | LoginsTold
)

# -- supervisor -> sidecar --------------------------------------------------------------------


class Greeting(Struct, array_like=True, tag="greeting", frozen=True):
    """What the node has, for a sidecar that takes over. More of `held` may follow in Holds.

    `unconfirmed` ends follow in Finish. The sidecar lets the engine hear of these first, under the
    tenure given here, then of what is held: whatever else the tenure had goes back.
    """

    protocol: Number
    tenure: Number  # of the sidecar before; 0: none
    held: HeldList  # attempts that have not ended
    unconfirmed: Number
    more: bool = False
    member: bool = False  # this daemon has been a member of the cluster before


class Holds(Struct, array_like=True, tag="holds", frozen=True):
    """The next part of what a Greeting tells."""

    held: HeldList
    more: bool = False


class Pools(Struct, array_like=True, tag="pools", frozen=True):
    """The clustered pools, all of them, when they are known and when they change."""

    cards: Annotated[tuple[PoolCard, ...], Meta(max_length=POOLS_MAX)]
    local: Annotated[tuple[Name, ...], Meta(max_length=POOLS_MAX)] = ()  # pools of this node alone


class Want(Struct, array_like=True, tag="want", frozen=True):
    """Want attempts of a pool; replaces the pool's Want before.

    `seen` attempts of this pool have arrived over this connection. What was sent beyond that was on
    its way when this was written, and counts towards `count`.
    """

    request: Number
    pool: Name
    count: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=NAMES_MAX)]  # what the node's code has
    seen: Number


class Finish(Struct, array_like=True, tag="finish", frozen=True, gc=False):
    """Attempts that have ended; each is answered in a Confirmed, sooner or later."""

    ends: Ends


class Begun(Struct, array_like=True, tag="begun", frozen=True):
    """Attempts that run: if the node is lost, that is a crash of theirs."""

    held: HeldList


class AttemptProgress(Struct, array_like=True, frozen=True, gc=False):
    id: Id
    fraction: Annotated[float, Meta(ge=0, le=1)]
    text: Annotated[str, Meta(max_length=500)] = ""


class ProgressMarks(Struct, array_like=True, tag="progress", frozen=True):
    """How far attempts are; the newest mark of each counts."""

    marks: Annotated[list[AttemptProgress], Meta(max_length=ATTEMPTS_MAX)]


class FindTasks(Struct, array_like=True, tag="find", frozen=True):
    """Look for tasks of the cluster, for people. With an `id`: for that one, with its arguments."""

    request: Number
    state: Annotated[str, Meta(max_length=20)] = ""
    pool: Annotated[str, Meta(max_length=200)] = ""
    node: Annotated[str, Meta(max_length=200)] = ""  # that has claimed them; "": any
    limit: Annotated[int, Meta(ge=1, le=FOUND_MAX)] = 100
    id: Annotated[str, Meta(max_length=200)] = ""


class StateRequest(Struct, array_like=True, frozen=True, gc=False):
    """A running handler loads a state, saves it, or clears it with None."""

    number: Number
    id: Id
    claim: Number  # with the tenure it fences a save
    key: Key
    saves: bool = False
    value: StateValue = None
    ttl_ns: Nanoseconds = 0  # 0: for ever

    @property
    def size(self) -> int:
        return len(self.value or b"")


class AskStates(Struct, array_like=True, tag="states", frozen=True, gc=False):
    """Requests of handlers; each is answered in a StatesTold, unless its attempt has ended."""

    asks: Annotated[list[StateRequest], Meta(max_length=REQUESTS_MAX)]


class NewsTold(Struct, array_like=True, tag="told", frozen=True):
    """People are alerted of what ScheduleNews told."""

    change: Number


class LockWish(Struct, array_like=True, frozen=True):
    """What the node wants with a lock (cluster/engine.py:LockAsk); a newer wish replaces it."""

    request: Number
    name: Key
    token: Number
    kind: LockWishKind
    holder: Remark = ""  # who wants it, for people


class AskLocks(Struct, array_like=True, tag="locks", frozen=True):
    tenure: Number  # wishes of another one mean nothing
    wishes: Annotated[list[LockWish], Meta(max_length=REQUESTS_MAX)]


NodeMessage = (
    Greeting
    | Holds
    | Pools
    | Want
    | Finish
    | Begun
    | ProgressMarks
    | AskStates
    | AskLocks
    | NewsTold
    | FindTasks
)


class _Sized(Protocol):
    @property
    def size(self) -> int:
        """Return the bytes that dominate the message."""


Part = TypeVar("Part", bound=_Sized)


def found_tasks(request: int, tasks: list[TaskView], *, more: bool = False) -> FoundTasks:
    """Return the answer with these tasks, or why there is none."""
    packed = _PACK(tasks)
    if len(packed) > MESSAGE_BYTES_MAX:
        return FoundTasks(request, reason="that is too much at once: ask for fewer tasks")
    return FoundTasks(request, packed, more)


def portions(parts: list[Part]) -> Iterator[list[Part]]:
    """Cut parts into messages of ATTEMPTS_MAX and, but for one large part, BATCH_BYTES_MAX."""
    portion: list[Part] = []
    size = 0
    for part in parts:
        if portion and (len(portion) == ATTEMPTS_MAX or size + part.size > BATCH_BYTES_MAX):
            yield portion
            portion, size = [], 0
        portion.append(part)
        size += part.size
    if portion:
        yield portion
