"""The contract of an engine: everything that nodes decide together.

    QUEUED ──claim──► CLAIMED ──finish──► (ended: succeeded, failed, cancelled, expired)
      ▲  ▲               │
      │  └─wake─ WAITING ◄┘ a retry, given back, its node was lost; also: delayed by its submit
      │
    JOINED ─ its leader ended without a result

Each method is one transaction. EngineAway means that nobody knows whether it happened: every method
may be called again. What makes that safe: ids are made by clients, and an end is fenced by (tenure,
claim).

A *tenure* is one life of a node: from `join` until it leaves, is reaped, or joins again. A *claim*
is a random number that is never used again; the tasks of one call share it. A node whose tenure is
over gets Fenced, and whatever it finishes does not count.

Only the engine's clock counts. Durations cross this border, instants do not; the instants of
schedules are wall-clock time of the engine.

What an attempt means for the task is said by the node that ran it (`End`), which knows the policy
and the task's declaration: a result, a retry after a pause, an interruption. What that means for
others (site, key, budget, queue) is decided here.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    NOT_GIVEN,
    Failure,
    Outcome,
    Rejection,
    TaskDeclaration,
    TaskSpec,
    TaskView,
    View,
)
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.cluster.adding import AddingEngine
from musterd.supervisor.cluster.handling import HandlingEngine, ProgressMark
from musterd.supervisor.cluster.logging_in import LoginEngine, LoginView
from musterd.supervisor.cluster.watching import WatchingEngine
from musterd.supervisor.core.model import shared
from musterd.supervisor.core.model.policy import SCHEDULES_MAX
from musterd.supervisor.core.model.runs import Way

BATCH_MAX = 1000  # tasks in one call; around 100 is fastest
INTERRUPTIONS_MAX = 20  # shutdowns and recycles that one task may survive: no task runs for ever
JOINED_MAX = 1000  # tasks that wait for one key: all of them end in one transaction
AGING_TURN = 16  # at most one grant of this many goes to an aged task of a lower level
HISTORY_MAX = 10  # failed attempts that a task remembers
GOOD_TTL_NS = 7 * 24 * 3600 * SECOND_NS  # a site that was shut for longer has changed
QUEUE_FULL_RETRY_NS = SECOND_NS  # how full a queue is, is counted once a second
RECENT_NS_MAX = 10 * SECOND_NS  # that `recent` looks back
DEAD_COUNTED_MAX = 10_000
SITES_SEEN_MAX = 1000  # of a cluster that has more, those with a breaker that is not closed first
FINISHED, UNSUCCESSFUL = "finished", "unsuccessful"  # for a filter: any final state, all but one
DEAD = "dead"  # for a filter: failed tasks, without those that were refused as they asked for
PROGRESS_GAP_NS = SECOND_NS  # between two reports of one task
ENDED_MAX = 1000  # ids that `ended` tells at once
MARKS_MAX = 10_000  # reports of progress in one answer
RETRYING_MAX = 100  # runs of one schedule that are looked at; with more, none counts as retrying


class EngineError(MusterdError):
    """Root of what an engine refuses."""


class EngineAway(EngineError):
    """The engine did not answer: whether the call took effect is not known. Call it again."""


class EngineUnreached(EngineAway):
    """The engine cannot be reached or cannot do it now: the call did not take effect."""


class EngineRefused(EngineError):
    """The database cannot be used as it is; the message says why, and what to do about it."""


class Fenced(EngineError):
    """The tenure is over: the node was reaped, forgotten or replaced. Join again."""


class NameTaken(EngineError):
    """Another node has this name, and was not reaped. It was heard of `beat_age_ns` ago."""

    def __init__(self, message: str, beat_age_ns: int = 0) -> None:
        super().__init__(message)
        self.beat_age_ns = beat_age_ns


class PolicyChanged(EngineError):
    """Somebody else applied a policy meanwhile: look at it first."""


# -- nodes ------------------------------------------------------------------------------------


class PoolCard(Struct, frozen=True):
    """What a node says about one of its pools."""

    name: str
    places: int  # tasks that it runs at once here
    tasks: tuple[TaskDeclaration, ...] = ()
    queue_size: int = 10_000
    aging_ns: int = 60 * SECOND_NS
    max_crashes: int = 3
    cache_ns: int = 30 * SECOND_NS
    debounce_ns: int = SECOND_NS // 2


class NodeCard(Struct, frozen=True):
    identity: str  # random, kept in the node's state_dir
    name: str
    lease_ns: int = 30 * SECOND_NS
    software: str = ""
    pools: tuple[PoolCard, ...] = ()
    redact: tuple[str, ...] = ()  # arguments that must be references to secrets


class Joined(Struct, frozen=True):
    tenure: int
    epoch: str  # one life of the server: after another, claims must be registered again
    policy: int  # version of the applied policy, 0 for none


class Orders(Struct, frozen=True):
    """What a heartbeat brings back."""

    epoch: str
    policy: int
    draining: bool = False
    cancel: tuple[str, ...] = ()  # ids of claimed tasks that somebody cancelled
    scheduled: int = 0  # as in PolicyView
    logins: tuple[LoginView, ...] = ()  # whose logins have failed


class NodeView(Struct, frozen=True):
    identity: str
    name: str
    tenure: int  # 0: it has left, or was reaped
    alive: bool
    draining: bool
    claims: int
    beat_age_ns: int
    software: str
    pools: tuple[PoolCard, ...]
    lost: bool = False  # it was reaped, and has not come back


class Cards(Struct, frozen=True):
    """What nodes declare, for those who submit without a node. `stamp` is for the next call."""

    stamp: str
    cards: tuple[NodeCard, ...]


class Reaped(Struct, frozen=True):
    name: str
    tenure: int
    claims: int  # that went back


# -- tasks ------------------------------------------------------------------------------------


class Verdict(Struct, frozen=True):
    """What became of one submitted task."""

    id: str
    state: Literal["accepted", "joined", "answered", "known", "rejected"]
    outcome: Outcome | None = None  # of one that was answered from memory
    rejection: Rejection | None = None


class Want(Struct, frozen=True):
    """Free places of a node in one pool. `names`: the tasks that its code has."""

    pool: str
    count: int
    names: tuple[str, ...]


class Grant(Struct, frozen=True):
    """One attempt of one task, for one node."""

    spec: TaskSpec
    claim: int
    attempt: int  # 1 for the first
    crashes: int = 0
    interruptions: int = 0
    policy: str = ""  # its resilience class: that of the submit, else of its target
    probe: bool = False  # it probes a half-open site
    expires_in_ns: int = 0  # 0: never
    held: LoginView | None = None  # no login of its session may be tried: it is to end at once
    again: bool = False  # it has waited for a login task, which has worked ...
    login_error: str = ""  # ... or why that has not: it has failed

    @property
    def id(self) -> str:
        return self.spec.id


class Held(Struct, frozen=True):
    """A claim that a node has."""

    id: str
    claim: int


EndKind = Literal["succeeded", "failed", "untouched", "interrupted", "crashed"]


class End(Struct, frozen=True):
    """How an attempt ended. A failure with `retry_ns` is tried again after that time."""

    id: str
    claim: int
    kind: EndKind
    value: bytes = b""
    failure: Failure | None = None
    run_ns: int = 0
    retry_ns: int = NOT_GIVEN
    patience_ns: int = 0  # how long the retry may wait for its site's budget
    clears: str = ""  # key of the state that a success makes obsolete
    keeps: bool = False  # a success is remembered as the last good result of its key
    view: View | None = None  # what of a run's result is watched
    login: LoginVerdict | None = None  # counts with the end


class Told(Struct, frozen=True):
    """An end that counted, and who waits for it. `state` is "" if the task is alive."""

    id: str
    waiter: int
    state: str


class Ended(Struct, frozen=True):
    """Ids that ended since the call before; `after` is for the next call.

    `more`: these are not all of them, and the next call may tell some at once.
    """

    ids: tuple[str, ...]
    after: str
    more: bool = False


class Fetched(Struct, frozen=True):
    """What became of tasks, all seen at one moment, in the order that was asked for."""

    outcomes: tuple[Outcome, ...] = ()
    alive: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # these have ended, and their results were too much at once
    next_bytes: int = 0  # size of the first result that was not read
    marks: tuple[ProgressMark, ...] = ()  # of those that are alive and have said how far they are


class TaskFilter(Struct, frozen=True):
    pool: str = ""
    target: str = ""
    state: str = ""  # queued, waiting, running, or a final state, a group of them (above); "": any
    error: str = ""  # part of the last error
    key: str = ""
    schedule: str = ""
    ids: tuple[str, ...] | None = None  # for purge; None: any
    older_ns: int = 0  # for purge: ended at least so long ago
    limit: int = 100


class Count(Struct, frozen=True):
    pool: str
    level: int
    state: str
    tasks: int


class Recent(Struct, frozen=True):
    """What became of tasks of a pool lately."""

    pool: str
    succeeded: int
    failed: int
    dead: int  # DEAD tasks that are kept, of the newest DEAD_COUNTED_MAX that failed in all pools


class Ticked(Struct, frozen=True):
    """What time has brought: numbers of tasks."""

    ready: int = 0
    expired: int = 0
    given_up: int = 0  # retries that their site's budget never paid for


# -- what all share ---------------------------------------------------------------------------


ScheduleCard = shared.ScheduleCard
ClusterPolicy = shared.ClusterPolicy


class PolicyView(Struct, frozen=True):
    version: int
    policy: ClusterPolicy
    scheduled: int = 0  # 1: there are schedules, 2: whose changes people want to know


class SiteView(Struct, frozen=True):
    """A site that has limits, or a breaker that is not as new."""

    target: str
    breaker: str
    open_for_ns: int = 0
    failures: int = 0
    inside: int = 0  # claims that hold a place
    reopenings: int = 0
    waiting: int = 0  # queued tasks, counted up to 1,000


class DueSchedule(Struct, frozen=True):
    """A schedule whose next instant has come. `turn` fences the answer."""

    name: str
    plan: bytes
    turn: int
    last_ns: int  # all instants up to this one are settled; 0: none yet
    now_ns: int  # wall-clock time of the engine
    memory: bytes
    alive: str  # id of a run that has not ended, the newest; also one that was retried by hand
    retrying: bool = False  # all such runs were attempted, and wait for another attempt
    asked: str = ""  # one of them that a person asked for or retried, the newest


class ScheduleView(Struct, frozen=True):
    """A schedule for people. `due` is as for a node, so that it can be run by hand."""

    due: DueSchedule
    next_ns: int | None  # wall-clock time of the engine; None: never again
    paused: bool = False
    notify: bool = False
    runs: int = 0
    skipped: int = 0
    task: str = ""  # id of the newest run
    ran_ns: int = 0  # its instant
    state: str = ""  # of that run; "": it is not known any more
    added: bool = False  # at run time, and not by a policy
    section: bytes = b""  # its keys as they were given then
    record: bytes = b""  # what is known of its results (watching.py)


class Run(Struct, frozen=True):
    instant_ns: int
    spec: TaskSpec


class Settled(Struct, frozen=True):
    verdicts: tuple[Verdict, ...] = ()  # of the runs of a schedule, in their order


class Backlog(Struct, frozen=True):
    """Tasks that would begin if a node had a place: queued, and their site is not known to be shut.

    A site that nobody has tried to claim from may be shut all the same.
    """

    pool: str
    level: int
    ready: int
    waited_ns: int  # by the one that waits for longest, roughly


class NodeSeen(Struct, frozen=True):
    """A node, in short."""

    name: str
    tenure: int  # 0: it has left, or was reaped
    alive: bool
    draining: bool
    claims: int
    beat_age_ns: int
    software: str
    pools: tuple[str, ...]


class Statistics(Struct, frozen=True):
    """What `musterd_cluster_*` shows: the whole cluster at one moment, `age_ns` ago."""

    oldest_snapshot_ns: int = 0  # the oldest that keeps dead tuples from being removed
    dead_tuples: int = 0  # of live tasks
    live_bytes: int = 0
    counts: tuple[Count, ...] = ()
    backlogs: tuple[Backlog, ...] = ()
    nodes: tuple[NodeSeen, ...] = ()
    age_ns: int = 0


class Engine(AddingEngine, HandlingEngine, LoginEngine, WatchingEngine, Protocol):
    # -- nodes
    def give_back(self, identity: str) -> None: ...  # what its daemon had that has died
    def join(self, card: NodeCard) -> Joined:
        """Begin a tenure; the claims of this identity's last one go back at once."""

    def redeclare(self, tenure: int, card: NodeCard) -> None:
        """Say anew what a node is called, how long its lease is and what it has.

        Its tenure and its claims stay. It is no heartbeat.
        """

    def rejoin(self, tenure: int, running: Sequence[Held]) -> list[str]:
        """Register all running claims of a node; return the ids that are lost.

        After a restart of the server nothing is granted to anybody before each live node has done
        this. Whatever else the tenure has goes back: it was granted in an answer that never
        arrived, or to a sidecar that is dead. An end that may have been heard of is to be finished
        before, and not called running: a claim that is over would be made again, and count twice.
        """

    def release(self, tenure: int, known: Sequence[Held]) -> int:
        """Give back the claims that the node does not know of, untouched; return how many.

        After a claim whose answer was lost nobody else would ever get these tasks.
        """

    def beat(self, tenure: int) -> Orders: ...
    def leave(self, tenure: int) -> None: ...
    def reap(self) -> list[Reaped]:
        """Take back the claims of nodes whose lease is over."""

    def nodes(self) -> list[NodeView]: ...
    def cards(self, seen: str = "") -> Cards | None:
        """Return what the nodes declare; None if that is as it was at this stamp."""

    def drain(self, name: str, *, draining: bool) -> bool:
        """Grant nothing more to a node, or again; return whether there is one of that name."""

    def forget(self, name: str, *, force: bool = True) -> bool:
        """End a node's tenure, and forget what it declared; return whether that was done.

        Without `force` a node that is alive is not forgotten.
        """

    # -- tasks
    def submit(
        self, tasks: Sequence[TaskSpec], *, waiter: int = 0, resend: bool = False
    ) -> list[Verdict]: ...
    def claim(self, tenure: int, wants: Sequence[Want]) -> list[Grant]: ...
    def begun(self, tenure: int, claims: Sequence[Held]) -> None:
        """Note that these run: if their node is lost, that is a crash of theirs."""

    def finish(self, tenure: int, ends: Sequence[End]) -> list[Told]:
        """End attempts; what is not in the answer did not count."""

    def ended(self, waiter: int, after: str = "", limit: int = ENDED_MAX) -> Ended:
        """Tell some of the ids that ended for a waiter since `after`, each once."""

    def look_up(self, ids: Sequence[str]) -> list[Outcome]: ...
    def fetch(self, ids: Sequence[str], bytes_max: int) -> Fetched:
        """Look at tasks, and read results of at most so many bytes; -1: read none."""

    def cancel(self, ids: Sequence[str]) -> list[str]:
        """Cancel tasks; return those that were alive."""

    def retry(self, ids: Sequence[str]) -> list[Rejection]:
        """Run tasks again that ended without success, one by one; return those that cannot.

        Whoever calls it again after EngineAway hears that those done before have not ended.
        """

    def purge(self, which: TaskFilter) -> int:
        """Forget ended tasks; return how many."""

    def view(self, id_: str) -> TaskView | None: ...
    def find(self, which: TaskFilter) -> list[TaskView]:
        """Return tasks, newest first, live ones before those that have ended."""

    def recent(self, span_ns: int) -> list[Recent]:
        """Say what ended within this time, at most RECENT_NS_MAX, for each pool."""

    def counts(self) -> list[Count]: ...
    def invalidate(self, key: str, *, prefix: bool = False) -> None: ...
    def tick(self) -> Ticked:
        """Do what time asks for: retries and delays that are due, expiries, waits that end."""

    def retain(self, keep_ns: int) -> int:
        """Forget tasks that ended longer ago, roughly; return how much was dropped at once."""

    # -- sites and policy
    def policy(self) -> PolicyView: ...
    def apply(self, policy: ClusterPolicy, former: int) -> int:
        """Apply a policy after version `former`; return the new version."""

    def sites(self) -> list[SiteView]: ...
    def breaker(
        self, target: str, command: Literal["open", "close", "disable", "reset"]
    ) -> None: ...

    # -- schedules
    def due(self) -> list[DueSchedule]: ...
    def settle(
        self,
        due: DueSchedule,
        runs: Sequence[Run],
        *,
        last_ns: int,
        next_ns: int | None,
        memory: bytes,
        skipped: int = 0,
        anew: bool = False,
        resend: bool = False,
        way: Way = "begins",
    ) -> Settled | None:
        """Submit the runs of a due schedule and move on to its next instant.

        None, and nothing happened, if another node was first. A run that is refused counts as
        skipped. `anew` forgets the last result: the next one is no change; then nothing is run.
        `resend`: a run may have been made before, and have ended.

        With `way` "replaces" all runs that are `retrying` end, if one of these is accepted; with
        "hastens" the one that is `asked` is queued at once. None, and nothing happened, if this is
        not as it was in `due`: they run by now, or somebody has retried one.
        """

    def schedules(
        self, name: str = "", *, after: str = "", limit: int = SCHEDULES_MAX
    ) -> list[ScheduleView]:
        """Return schedules by name: one, or those after one."""

    def pause(self, name: str, *, paused: bool) -> bool:
        """Pause a schedule, or let it go on without the instants of the pause.

        Return whether there is one of that name.
        """

    def statistics(self, age_ns: int = 0) -> Statistics | None:
        """Return figures at most this old; older ones, or None, while another node is looking."""
