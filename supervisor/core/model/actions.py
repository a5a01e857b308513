"""Actions: what the core wants done. The shell carries them out in order and decides nothing."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar

from msgspec import Struct

from musterd.ipc.wire.messages import (
    Change,
    Failure,
    Lease,
    Outcome,
    ProgressNote,
    Rejection,
    TaskDeclaration,
    TaskSpec,
)
from musterd.ipc.wire.node_messages import (
    AttemptEnd,
    AttemptProgress,
    Held,
    LockWish,
    PoolCard,
    StateRequest,
)
from musterd.supervisor.core.model.events import WEB, RetryRequested, TasksSubmitted

# -- order ------------------------------------------------------------------------------------

# `Fleet.handle` sorts the actions of one event by rank; equal ranks stay in the order decided.
WORK = 0  # for workers, processes and the store
REPORT = 1  # for the operator: after what the report tells of
ANSWER = 2  # for clients: workers work while clients are told
END = 3  # of the daemon

rank_of = attrgetter("rank")  # sorts faster than a Python function


class Action(Struct, frozen=True):
    rank: ClassVar[int] = WORK


class _Answer(Action, frozen=True):
    rank: ClassVar[int] = ANSWER


class _End(Action, frozen=True):
    rank: ClassVar[int] = END


# -- tasks ------------------------------------------------------------------------------------


class NewRecord(Struct, frozen=True, gc=False):
    seq: int
    spec: TaskSpec
    submitted_wall_ns: int
    pool: str


class BulkRecord(Struct, frozen=True, gc=False):
    """New tasks of one submit with consecutive seqs: no object is made for each."""

    first: int  # seq
    specs: list[TaskSpec]
    submitted_wall_ns: int
    pool: str

    @property
    def end(self) -> int:
        """Return the seq after the last one."""
        return self.first + len(self.specs)

    def records(self) -> Iterator[NewRecord]:
        for seq, spec in enumerate(self.specs, self.first):
            yield NewRecord(seq, spec, self.submitted_wall_ns, self.pool)


class FinalRecord(Struct, frozen=True, gc=False):
    """Ends a live task: its row moves to the finished ones."""

    seq: int
    spec: TaskSpec
    submitted_wall_ns: int
    outcome: Outcome
    crashes: int


class LiveRecord(Struct, frozen=True, gc=False):
    """Changed counts of a live task. `wait_ns` counts from now; `begun` marks a running task."""

    seq: int
    attempt: int
    crashes: int
    interruptions: int
    wait_ns: int
    begun: bool


class Fact(Struct, frozen=True, gc=False):
    """A small thing to remember over restarts: a breaker's state, a schedule's last run."""

    kind: str
    key: str
    value: bytes | None  # None: forget it
    ttl_ns: int = 0  # 0: forever


class AttemptRecord(Struct, frozen=True, gc=False):
    """A failed attempt of a task. `ordinal` counts attempts; the store keeps the last few."""

    seq: int
    ordinal: int
    attempt: int
    worker: str
    failure: Failure


class ReopenRecord(Struct, frozen=True, gc=False):
    """Takes a finished task back: it is in `added` as a new one, and inherits its attempts."""

    id: str
    former_seq: int
    seq: int


class Persist(Action, frozen=True, gc=False):
    """Write in one transaction, in this order, then answer with Persisted(ticket)."""

    ticket: int
    added: list[NewRecord]
    changed: list[LiveRecord]
    finished: list[FinalRecord]
    facts: list[Fact] = []
    failed: list[AttemptRecord] = []
    reopened: list[ReopenRecord] = []  # carried out before `added`
    patient: bool = False  # these tasks will end in a moment: one commit can do for both
    bulk: list[BulkRecord] = []  # more new tasks; none of them is in the other lists

    def news(self) -> Iterator[NewRecord]:
        """Yield all new tasks, in the order of their seqs."""
        yield from self.added
        for each in self.bulk:
            yield from each.records()


class CheckResent(Action, frozen=True):
    """Find out which of these ids are finished; answer with ResendChecked or ResendUnknown."""

    submitted: TasksSubmitted


class DropRequest(_Answer, frozen=True):
    """End a client's connection, because its request cannot be answered: it will ask again."""

    peer: bytes
    request: int
    reason: str


class Withdraw(Action, frozen=True):
    """Do not write these new tasks, if they are not written yet; answer with TasksWithdrawn."""

    seqs: list[int]


class FindEnded(Action, frozen=True):
    """Find those of `ids` that are finished; answer with EndedFound or EndedUnknown.

    `rejected` goes into the answer as it is.
    """

    requested: RetryRequested
    ids: list[str]
    rejected: list[Rejection]


class ReadDiskTasks(Action, frozen=True, gc=False):
    """Read these queued tasks back; answer with DiskTasksRead, in any order."""

    ticket: int
    ids: list[str]


class FindStranded(Action, frozen=True):
    """Find the next unfinished tasks of a pool that is being added, in the order of their seqs;
    answer with StrandedFound."""

    pool: str
    request: int
    after_seq: int = 0


class LookUp(Action, frozen=True):
    """Send the outcomes of the finished ones to the peer; answer with LookedUp for the others."""

    peer: bytes
    ids: list[str]


class TellMissing(_Answer, frozen=True):
    """Tell the peer that there are no such tasks."""

    peer: bytes
    ids: list[str]


class Acknowledge(_Answer, frozen=True, gc=False):
    peer: bytes
    request: int
    rejected: list[Rejection]


class Deliver(_Answer, frozen=True, gc=False):
    peer: bytes
    outcomes: list[Outcome]


class TellChanges(_Answer, frozen=True):
    """Send a client that follows changes the newest change of each schedule."""

    peer: bytes
    changes: list[Change]


class ForgetPicture(Action, frozen=True):
    """Remove the picture that a run has left: its result is no change."""

    task: str


class TellProgress(_Answer, frozen=True, gc=False):
    """Send progress to the clients that wait for a task; may be dropped for slow clients."""

    peers: list[bytes]
    note: ProgressNote


# -- workers ----------------------------------------------------------------------------------


class StartForkServer(Action, frozen=True):
    pool: str
    build: str = ""


class StopForkServer(Action, frozen=True):
    pool: str
    build: str = ""


class Declare(Action, frozen=True):
    """Set the tasks of a pool from now on."""

    pool: str
    declarations: tuple[TaskDeclaration, ...]


class KeepSpares(Action, frozen=True):
    """Keep a process ready for the next worker of these and no others, by (pool, build)."""

    kept: tuple[tuple[str, str], ...]


class SpawnWorker(Action, frozen=True):
    worker: int
    pool: str
    index: int
    build: str = ""


class AssignLeases(Action, frozen=True, gc=False):
    worker: int
    leases: list[Lease]


class RecallLeases(Action, frozen=True):
    """Ask the worker to give back what it has not begun; answer with LeasesReturned."""

    worker: int


class CancelRunning(Action, frozen=True):
    worker: int
    lease: int


class StopWorker(Action, frozen=True):
    """Ask the worker to finish and exit; the core keeps the deadline."""

    worker: int


class TerminateWorker(Action, frozen=True):
    """Send SIGTERM to the worker alone."""

    worker: int


class KillWorker(Action, frozen=True):
    """Send SIGKILL to the worker and all it started.

    With `dump`, ask for its stacks first and kill DUMP_PAUSE_NS later (loop/perform.py): the core
    has given the worker up by now, so nothing that happens in between can undo the kill.
    """

    worker: int
    dump: bool = False


class FindState(Action, frozen=True):
    """Send the worker the fact of this kind and key, or nothing if there is none."""

    worker: int
    request: int
    kind: str
    key: str


class AnswerState(Action, frozen=True):
    """Tell the worker that its state is saved, what it is, or why there is none."""

    worker: int
    request: int
    error: str = ""
    value: bytes | None = None


class AnswerLock(Action, frozen=True):
    """Tell the worker that it has the lock, or who holds it, or why it will never have it."""

    worker: int
    request: int
    taken: bool
    holder: str = ""
    error: str = ""


class AnswerWait(Action, frozen=True):
    """Tell the worker that none of the tasks its handler waits for can ever end."""

    worker: int
    request: int
    ids: list[str]
    reason: str


class AnswerDebugger(Action, frozen=True):
    """Give the debugger of a handler a line; None: there is nobody, or nobody any more."""

    worker: int
    request: int
    line: str | None = None


class BreakIntoHandler(Action, frozen=True):
    """Stop in the code of a debugged handler; `leave`: have it go on without a debugger instead."""

    worker: int
    lease: int
    leave: bool = False


class ReadBoard(Action, frozen=True):
    """Read the worker's scoreboard; answer with BoardRead."""

    worker: int


class ReadBoards(Action, frozen=True):
    """Read the scoreboards of these workers; answer with one BoardsRead."""

    workers: list[int]


# -- sidecars ---------------------------------------------------------------------------------


class StartSidecar(Action, frozen=True):
    """Start a sidecar; answer with SidecarReady, then SidecarBeat regularly, then SidecarExited."""

    number: int
    build: str
    name: str = WEB


class StopSidecar(Action, frozen=True):
    """Send SIGTERM to a sidecar."""

    number: int
    name: str = WEB


class KillSidecar(Action, frozen=True):
    """Send SIGKILL to a sidecar."""

    number: int
    name: str = WEB


# -- the cluster ------------------------------------------------------------------------------


class GreetCluster(Action, frozen=True):
    """Tell a new cluster sidecar what this node has; so many ends follow in a TellCluster."""

    tenure: int
    held: list[Held]
    unconfirmed: int
    member: bool = False  # it has been a member before


class ShowPools(Action, frozen=True):
    """Tell the cluster sidecar what the clustered pools are, and which are of this node alone."""

    cards: tuple[PoolCard, ...]
    local: tuple[str, ...] = ()


class WantAttempts(Action, frozen=True):
    """Want so many attempts of a pool; answered by AttemptsGranted, whenever there are some."""

    request: int
    pool: str
    count: int
    names: tuple[str, ...]
    seen: int  # attempts of this pool that came over this connection


class TellCluster(Action, frozen=True, gc=False):
    """Tell the cluster sidecar how attempts ended, which of them run, and how far they are.

    Ends are answered by EndsConfirmed.
    """

    ends: list[AttemptEnd]
    begun: list[Held]
    marks: list[AttemptProgress]


class ServeClients(Action, frozen=True):
    """Serve tasks.sock, or leave it to the cluster sidecar and end the connections there."""

    serve: bool


class AskStates(Action, frozen=True, gc=False):
    """Have the engine load and save states; answered by StatesTold."""

    asks: list[StateRequest]


class AskLocks(Action, frozen=True):
    """Tell the engine what this node wants with locks; answered by LocksTold."""

    tenure: int
    wishes: list[LockWish]


class NewsTold(_Answer, frozen=True):
    """Tell the engine that people were alerted of a change: after the report."""

    change: int


# -- people who debug -------------------------------------------------------------------------


class ShowDebugger(_Answer, frozen=True):
    """Show the person what the debugger of this worker says; with a prompt, ask for a line."""

    worker: int
    text: str
    prompt: str | None = None


class CloseDebugger(_Answer, frozen=True):
    """Tell the person who debugs this worker that it is over."""

    worker: int
    reason: str


# -- the daemon itself ------------------------------------------------------------------------


class Report(Action, frozen=True):
    """Something an operator wants to know: one log line and one entry in `musterctl events`."""

    event: str  # "worker.crashed", "pool.fatal", "shutdown.phase", ...
    level: str = "info"
    pool: str = ""
    worker: str = ""  # "parser/0"
    task: str = ""
    attempt: int = 0
    target: str = ""
    phase: str = ""
    reason: str = ""
    seconds: float = 0.0
    schedule: str = ""
    session: str = ""  # of [sessions]
    count: int = 0  # how many times
    digest: str = ""  # of a result
    cause: str = ""  # why a worker was lost: one of core.model.slot.Cause
    output: str = ""  # what the worker printed last: filled in by the shell
    node: str = ""  # of the cluster
    elsewhere: bool = False  # another node of the cluster alerts people of it
    number: int = 0  # of a changed result in the history of its schedule
    number_before: int = 0
    changed_at: float = 0.0  # wall-clock time of the change, which may be told much later
    again: bool = False  # told once more after a restart: it may have been told before
    traceback: str = ""  # of a handler, for the log alone
    summary: str = ""  # what has changed, in one line: this and what follows, by the shell
    before: Any = None  # the results themselves, as JSON can have them; None: too long or unknown
    after: Any = None

    @property
    def rank(self) -> int:  # type: ignore[override]  # the one action whose rank depends on it
        """Keep a task's reports in their place: the log tells its life in order."""
        return WORK if self.task else REPORT


class RunCleanup(_End, frozen=True):
    """Run these functions in turn, within this time; answer with CleanupFinished."""

    names: tuple[str, ...] = ()
    within_ns: int = 0


class Exit(_End, frozen=True):
    """Close the store and exit, with this code if all went well."""

    code: int = 0
