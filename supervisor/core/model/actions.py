"""What the core wants done. The shell carries these out in order and decides nothing itself."""

from collections.abc import Iterator

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
from musterd.supervisor.core.model.events import RetryRequested, TasksSubmitted
from musterd.supervisor.core.model.sidecar_events import WEB

# -- tasks ------------------------------------------------------------------------------------


class NewRecord(Struct, frozen=True, gc=False):
    seq: int
    spec: TaskSpec
    submitted_wall_ns: int
    pool: str


class NewRun(Struct, frozen=True, gc=False):
    """New tasks of one submit, whose seqs follow each other: no object is made of each."""

    first: int  # seq
    specs: list[TaskSpec]
    submitted_wall_ns: int
    pool: str

    @property
    def end(self) -> int:
        """The seq behind the last one."""
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
    """What changed of a live task. `wait_ns` counts from now; `begun` marks a running one."""

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
    ttl_ns: int = 0  # 0: for ever


class AttemptRecord(Struct, frozen=True, gc=False):
    """A failed attempt of a task. `ordinal` grows by one with each; the last ones are kept."""

    seq: int
    ordinal: int
    attempt: int
    worker: str
    failure: Failure


class ReopenRecord(Struct, frozen=True, gc=False):
    """Takes a finished task back; as a new one it is in `added`, and inherits its attempts."""

    id: str
    former_seq: int
    seq: int


class Persist(Struct, frozen=True, gc=False):
    """Write in one transaction, in this order, then answer with Persisted(ticket)."""

    ticket: int
    added: list[NewRecord]
    changed: list[LiveRecord]
    finished: list[FinalRecord]
    facts: list[Fact] = []
    failed: list[AttemptRecord] = []
    reopened: list[ReopenRecord] = []  # carried out before `added`
    patient: bool = False  # the ends of all of it will follow in a moment: one commit will do
    runs: list[NewRun] = []  # more that are added; none of them is in any of the others

    def news(self) -> Iterator[NewRecord]:
        """All that are added, by their seqs."""
        yield from self.added
        for run in self.runs:
            yield from run.records()


class CheckResent(Struct, frozen=True):
    """Find out which of these ids are finished; answer with ResendChecked or ResendUnknown."""

    submitted: TasksSubmitted


class DropRequest(Struct, frozen=True):
    """Tell a client that its request cannot be answered, by ending its connection: it comes back
    and asks again."""

    peer: bytes
    request: int
    reason: str


class Withdraw(Struct, frozen=True):
    """Do not write these new tasks if that has not happened yet; answer with TasksWithdrawn."""

    seqs: list[int]


class FindEnded(Struct, frozen=True):
    """Find those of `ids` that are finished; answer with EndedFound or EndedUnknown.

    `rejected` goes into the answer as it is.
    """

    requested: RetryRequested
    ids: list[str]
    rejected: list[Rejection]


class ReadDiskTasks(Struct, frozen=True, gc=False):
    """Read these queued tasks back; answer with ShelvedRead, in any order."""

    ticket: int
    ids: list[str]


class FindStranded(Struct, frozen=True):
    """Find the next unfinished tasks of a pool that is about to be there, in the order of their
    seq; answer with StrandedFound."""

    pool: str
    request: int
    after_seq: int = 0


class LookUp(Struct, frozen=True):
    """Send the outcomes of the finished ones to the peer; answer with LookedUp for the others."""

    peer: bytes
    ids: list[str]


class TellMissing(Struct, frozen=True):
    """Tell the peer that there are no such tasks."""

    peer: bytes
    ids: list[str]


class Acknowledge(Struct, frozen=True, gc=False):
    peer: bytes
    request: int
    rejected: list[Rejection]


class Deliver(Struct, frozen=True, gc=False):
    peer: bytes
    outcomes: list[Outcome]


class TellChanges(Struct, frozen=True):
    """The newest change of each schedule, for one who follows them."""

    peer: bytes
    changes: list[Change]


class TellProgress(Struct, frozen=True, gc=False):
    """How far a task is, for those who wait for it; may be dropped for who does not keep up."""

    peers: list[bytes]
    note: ProgressNote


# -- workers ----------------------------------------------------------------------------------


class StartForkServer(Struct, frozen=True):
    pool: str
    build: str = ""


class StopForkServer(Struct, frozen=True):
    pool: str
    build: str = ""


class Declare(Struct, frozen=True):
    """These are the tasks of the pool from now on."""

    pool: str
    declarations: tuple[TaskDeclaration, ...]


class KeepSpares(Struct, frozen=True):
    """Keep a process ready for the next worker of these and no others, by (pool, build)."""

    kept: tuple[tuple[str, str], ...]


class SpawnWorker(Struct, frozen=True):
    worker: int
    pool: str
    index: int
    build: str = ""


class AssignLeases(Struct, frozen=True, gc=False):
    worker: int
    leases: list[Lease]


class RecallLeases(Struct, frozen=True):
    """Ask the worker to give back what it has not begun; answer: LeasesReturned."""

    worker: int


class CancelRunning(Struct, frozen=True):
    worker: int
    lease: int


class StopWorker(Struct, frozen=True):
    """Ask it to finish and exit; the core keeps the deadline."""

    worker: int


class TerminateWorker(Struct, frozen=True):
    """SIGTERM to the worker alone."""

    worker: int


class KillWorker(Struct, frozen=True):
    """SIGKILL to the worker and everything it started.

    With `dump`, ask for its stacks first and kill DUMP_PAUSE_NS later (loop/perform.py): the core
    has given the worker up by now, so nothing that happens in between can undo the kill.
    """

    worker: int
    dump: bool = False


class FindState(Struct, frozen=True):
    """Send the worker the fact of that kind and key, or nothing if there is none."""

    worker: int
    request: int
    kind: str
    key: str


class AnswerState(Struct, frozen=True):
    """Tell the worker that its state is saved."""

    worker: int
    request: int


class AnswerLock(Struct, frozen=True):
    """Tell the worker that it has the lock, or who else has it, or why it never will."""

    worker: int
    request: int
    taken: bool
    holder: str = ""
    error: str = ""


class AnswerWait(Struct, frozen=True):
    """Tell the worker that none of the tasks its handler waits for can ever end."""

    worker: int
    request: int
    ids: list[str]
    reason: str


class ReadBoard(Struct, frozen=True):
    """Look at the worker's scoreboard; answer with BoardRead."""

    worker: int


class ReadBoards(Struct, frozen=True):
    """Look at all of these workers' scoreboards; answer with one BoardsRead."""

    workers: list[int]


# -- sidecars --------------------------------------------------------------------------------


class StartSidecar(Struct, frozen=True):
    """Answer with SidecarReady, then SidecarBeat now and then; SidecarExited at its end."""

    number: int
    build: str
    name: str = WEB


class StopSidecar(Struct, frozen=True):
    """SIGTERM."""

    number: int
    name: str = WEB


class KillSidecar(Struct, frozen=True):
    """SIGKILL."""

    number: int
    name: str = WEB


# -- the daemon itself ------------------------------------------------------------------------


class Report(Struct, frozen=True):
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
    count: int = 0  # how many times it happened
    digest: str = ""  # of a result
    cause: str = ""  # why a worker was lost: one of core.causes
    output: str = ""  # what it said last: the shell knows


def can_wait(action: object) -> bool:
    """What is only said: after what is done. That of a task is told in the order of its life."""
    return type(action) is Report and not action.task


class RunCleanup(Struct, frozen=True):
    """Run these functions one after the other, within this time; answer with CleanupFinished."""

    names: tuple[str, ...] = ()
    within_ns: int = 0


class Exit(Struct, frozen=True):
    """The end: close the store and leave."""


Action = (
    Persist
    | CheckResent
    | DropRequest
    | Withdraw
    | FindEnded
    | ReadDiskTasks
    | FindStranded
    | LookUp
    | TellMissing
    | Acknowledge
    | Deliver
    | TellChanges
    | StartForkServer
    | StopForkServer
    | Declare
    | KeepSpares
    | SpawnWorker
    | AssignLeases
    | RecallLeases
    | CancelRunning
    | TellProgress
    | FindState
    | AnswerState
    | AnswerLock
    | AnswerWait
    | StopWorker
    | TerminateWorker
    | KillWorker
    | ReadBoard
    | ReadBoards
    | StartSidecar
    | StopSidecar
    | KillSidecar
    | Report
    | RunCleanup
    | Exit
)
