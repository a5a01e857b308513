"""Events: what can happen. The shell makes them; `Fleet.handle` answers with actions.

`worker` is the number of a worker process, unique in the life of the supervisor: so the core
recognises stale news of a process that was replaced. A `peer` is a client's connection.
"""

from typing import Any

from msgspec import Struct

from musterd.ipc.wire.messages import Completion, Rejection, Sample, TaskDeclaration, TaskSpec
from musterd.ipc.wire.node_messages import Attempt, ClusterNews, Held, LockReply, StateReply
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.core.model.schedule_events import AddedSchedule
from musterd.supervisor.core.model.shared import ClusterPolicy

WEB, ALERTS, EVENTS, CLUSTER = "web", "alerts", "events", "cluster"  # the sidecars
EXIT_TAKEN = 69  # exit code where another daemon has the directory, or another node the name


class Started(Struct, frozen=True):
    """The shell is up and the store has been read."""


class Ticked(Struct, frozen=True):
    """A deadline passed."""


class ClockRead(Struct, frozen=True):
    """What the wall clock says: read at the start and once a second, because it may be set."""

    wall_ns: int
    anchor: bytes = b""  # the believed moment, to be stored (clock.py)


class TasksSubmitted(Struct, frozen=True, gc=False):
    peer: bytes
    request: int
    tasks: list[TaskSpec]
    wall_ns: int
    resend: bool = False
    rejected: list[Rejection] = []  # what the shell has refused already


class Recovered(Struct, frozen=True, gc=False):
    """One unfinished task that the store held at the start."""

    seq: int
    spec: TaskSpec
    submitted_wall_ns: int
    ready_ns: int  # monotonic: not to be run before; 0 for at once
    expires_at_ns: int  # monotonic; 0 for never
    attempt: int
    crashes: int
    interruptions: int
    begun: bool  # it ran when the supervisor died


class TasksRecovered(Struct, frozen=True):
    """Unfinished tasks that the store held, oldest first; `more` is true until the last page."""

    tasks: list[Recovered]
    more: bool = False


class DiskTasksRead(Struct, frozen=True, gc=False):
    """The store's answer to ReadDiskTasks. Tasks in `unread` would have been too much at once."""

    ticket: int
    tasks: OnDisk
    unread: list[str] = []


class StrandedFound(Struct, frozen=True):
    """The store's answer to FindStranded: unfinished tasks that it holds for that pool."""

    pool: str
    request: int
    tasks: list[Recovered]
    after_seq: int = 0  # where the next page begins; 0: this was the last


class FactsRecovered(Struct, frozen=True):
    """All facts of one kind that the store held at the start, as (key, value)."""

    kind: str
    facts: list[tuple[str, bytes]]
    wall_ns: int = 0  # what the wall clock shows; 0: not known


class Persisted(Struct, frozen=True):
    """Everything up to and including this ticket is on disk."""

    ticket: int


class ResendChecked(Struct, frozen=True, gc=False):
    """The store's answer to CheckResent: these ids are finished already, and these it holds."""

    submitted: TasksSubmitted
    finished: frozenset[str]
    live: frozenset[str] = frozenset()
    stored: dict[str, TaskSpec] = {}  # both, as they were submitted first


class ResendUnknown(Struct, frozen=True, gc=False):
    """The other answer to CheckResent: the store cannot be read."""

    submitted: TasksSubmitted


class StoreFailing(Struct, frozen=True):
    """Nothing can be written: the disk is full, or worse."""

    reason: str


class StoreRecovered(Struct, frozen=True):
    """The store writes again."""


class TasksWithdrawn(Struct, frozen=True):
    """The store's answer to Withdraw: these new tasks are not written and never will be."""

    seqs: list[int]


class RetryRequested(Struct, frozen=True):
    """A person wants finished tasks to be run again, under their ids."""

    peer: bytes
    request: int
    ids: list[str]
    wall_ns: int
    in_bulk: bool = False  # one of many steps: the queue is to have room for others


class EndedTask(Struct, frozen=True, gc=False):
    seq: int
    spec: TaskSpec
    state: str


class EndedFound(Struct, frozen=True, gc=False):
    """The store's answer to FindEnded: the finished tasks."""

    requested: RetryRequested
    asked: list[str]
    ended: list[EndedTask]
    rejected: list[Rejection]


class EndedUnknown(Struct, frozen=True, gc=False):
    """The other answer to FindEnded: the store cannot be read."""

    requested: RetryRequested
    asked: list[str]
    rejected: list[Rejection]


class TasksWatched(Struct, frozen=True):
    peer: bytes
    ids: list[str]


class LookedUp(Struct, frozen=True):
    """The store's answer to LookUp, as far as the tasks have not ended there."""

    peer: bytes
    unfinished: list[tuple[str, str]]  # (id, pool): the store holds these tasks
    absent: list[str] = []  # ids that the store does not have


class CancelRequested(Struct, frozen=True):
    """The peer, where one is given, is answered once nothing can undo the cancel."""

    ids: list[str]
    peer: bytes = b""
    request: int = 0


class InvalidateRequested(Struct, frozen=True):
    """Forget the results of this key, or of all keys with this prefix."""

    key: str
    prefix: bool = False


class PeerLost(Struct, frozen=True):
    """A client's connection is gone: it waits for nothing any more."""

    peer: bytes


# -- workers ----------------------------------------------------------------------------------


class ForkServerReady(Struct, frozen=True):
    pool: str
    declarations: tuple[TaskDeclaration, ...]
    build: str = ""


class ForkServerFailed(Struct, frozen=True):
    """The worker class cannot be loaded: trying again will not help."""

    pool: str
    reason: str
    build: str = ""


class ForkServerExited(Struct, frozen=True):
    pool: str
    reason: str
    build: str = ""


class WorkerForked(Struct, frozen=True):
    worker: int
    pid: int  # of the worker, as the host sees it


class SpawnFailed(Struct, frozen=True):
    worker: int
    reason: str


class WorkerReady(Struct, frozen=True):
    """The worker's hello arrived: it may get leases."""

    worker: int
    width: int = 1  # tasks that it runs at once


class LeasesCompleted(Struct, frozen=True, gc=False):
    worker: int
    completions: list[Completion]
    samples: list[Sample] = []  # what the worker has counted meanwhile

    @property
    def leases(self) -> list[int]:
        return [each.lease for each in self.completions]


class LeasesReturned(Struct, frozen=True):
    """The worker had not begun these and never will."""

    worker: int
    leases: list[int]


class ProgressMade(Struct, frozen=True, gc=False):
    """A running handler says how far it is."""

    worker: int
    lease: int
    fraction: float
    text: str


class StateWanted(Struct, frozen=True):
    """A running handler asks for the state saved under this key."""

    worker: int
    request: int
    key: str
    lease: int = 0  # 0: the worker does not say


class StateGiven(Struct, frozen=True, gc=False):
    """A running handler saves a state, or clears it with None."""

    worker: int
    request: int
    key: str
    value: bytes | None
    ttl_ns: int
    lease: int = 0


class LockWanted(Struct, frozen=True):
    """A running handler wants a lock, and waits for it up to the timeout."""

    worker: int
    lease: int
    request: int
    name: str
    timeout_ns: int


class LockReturned(Struct, frozen=True):
    """A handler gives a lock back, or stops waiting for it."""

    worker: int
    lease: int
    name: str


class WaitBegun(Struct, frozen=True):
    """A running handler waits until one of these tasks has ended."""

    worker: int
    lease: int
    request: int
    ids: list[str]


class WaitEnded(Struct, frozen=True):
    """A handler stops waiting."""

    worker: int
    lease: int
    request: int


class BoardRead(Struct, frozen=True):
    """What a worker's scoreboard shows. `lease` is 0 when nothing runs."""

    worker: int
    lease: int
    since_ns: int  # when that lease began, or the last sign of life when idle
    checking_ns: int = 0  # since when healthy() runs, 0 if it does not
    beside: tuple[tuple[int, int], ...] = ()  # what else runs, and since when


class BoardsRead(Struct, frozen=True):
    """What the scoreboards of several workers show; workers that are gone have none."""

    boards: list[BoardRead]


class LeftoversEnded(Struct, frozen=True):
    """Processes or directories outlived their worker, and were ended or removed."""

    pool: str  # "" for leftovers of an earlier supervisor
    index: int  # of the slot; -1 for the pool's fork server
    processes: int
    directories: int  # temporary ones


class WorkerExited(Struct, frozen=True):
    """The process and everything it started are gone."""

    worker: int
    exit_code: int  # 0..255, or -N when ended by signal N
    lease: int  # what ran when it ended, 0 for nothing
    detail: str = ""  # the last words of the worker, such as the error of open()
    oom: str = ""  # words for an OOM kill, and how sure it is; "" for none
    unhealthy: bool = False  # the worker ended itself because healthy() said so
    beside: tuple[int, ...] = ()  # the other leases that ran when it ended


class MemorySource(Struct, frozen=True):
    """A source of memory: the machine, or a control group."""

    name: str  # as people read it: "the machine's memory"
    total_bytes: int
    used_bytes: int  # without memory that the kernel can take back at any time

    @property
    def share(self) -> float:
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


class MemorySampled(Struct, frozen=True):
    """The memory of the machine and of the workers."""

    sources: tuple[MemorySource, ...]  # at least one
    stalled_some: float = 0.0  # share of the last seconds in which a process waited for memory
    stalled_full: float = 0.0  # ... in which all of them did
    workers: dict[int, int] = {}  # bytes (PSS) of each, with all it started, where known


# -- sidecars (core/workers/sidecar.py); `number` names the process ---------------------------


class SidecarReady(Struct, frozen=True):
    """A sidecar is at work; the web process listens."""

    number: int
    pid: int
    address: str
    name: str = WEB


class SidecarBeat(Struct, frozen=True):
    """A sidecar says that it lives."""

    number: int
    name: str = WEB


class SidecarExited(Struct, frozen=True):
    """A sidecar is gone, or could not be started."""

    number: int
    reason: str
    fatal: bool = False  # trying again will not help
    name: str = WEB
    code: int = 0  # EXIT_TAKEN ends the daemon, too


# -- the cluster (core/tasks/claims.py) --------------------------------------------------------


class ClusterConnected(Struct, frozen=True):
    """The cluster sidecar has said hello; it knows nothing of the sidecar before it."""


class ClusterDisconnected(Struct, frozen=True):
    """The connection of the cluster sidecar is gone, and what was on its way to it is lost."""


class MembershipTold(Struct, frozen=True):
    """What the engine says about this node."""

    tenure: int  # 0: none
    until_ns: int  # the end of the lease, by the machine's monotonic clock
    away: bool = False  # the engine does not answer
    draining: bool = False
    policy: int = 0  # version of the applied policy; 0: none


class PolicyShared(Struct, frozen=True):
    """The policy that all nodes share. Version 0: none is applied. None: it cannot be read here."""

    version: int
    policy: ClusterPolicy | None


class ScheduleNoted(Struct, frozen=True):
    """Something happened to a schedule of the cluster that operators want to know."""

    event: str  # as in Report
    schedule: str
    pool: str = ""
    task: str = ""
    reason: str = ""
    count: int = 0
    digest: str = ""
    elsewhere: bool = False
    number: int = 0
    number_before: int = 0
    at_ns: int = 0
    again: bool = False
    summary: str = ""
    before: Any = None
    after: Any = None
    change: int = 0  # answered by NewsTold


class AttemptsGranted(Struct, frozen=True, gc=False):
    request: int
    pool: str
    attempts: list[Attempt]


class EndsConfirmed(Struct, frozen=True, gc=False):
    """The engine has heard of these ends, whether they counted or not."""

    held: list[Held]


class AttemptsCancelled(Struct, frozen=True):
    held: list[Held]


class AttemptsLost(Struct, frozen=True):
    """These attempts are not ours any more: how they end does not count."""

    held: list[Held]


class ClusterTold(Struct, frozen=True):
    """What the cluster sidecar tells operators, metrics and people."""

    message: ClusterNews


class StatesTold(Struct, frozen=True, gc=False):
    """What the engine answers to requests of handlers."""

    replies: list[StateReply]


class LocksTold(Struct, frozen=True):
    tenure: int
    replies: list[LockReply]


# -- commands of operators --------------------------------------------------------------------


class StartRequested(Struct, frozen=True):
    names: tuple[tuple[str, int], ...]  # (pool, index); index -1 for the whole pool


class StopRequested(Struct, frozen=True):
    names: tuple[tuple[str, int], ...]


class RestartRequested(Struct, frozen=True):
    names: tuple[tuple[str, int], ...]


class ResetRequested(Struct, frozen=True):
    """Clears FATAL and the restart history."""

    names: tuple[tuple[str, int], ...]


class PauseRequested(Struct, frozen=True):
    """Take nothing from the queue, but accept new tasks."""

    names: tuple[tuple[str, int], ...]


class DrainRequested(Struct, frozen=True):
    """Take nothing from the queue and accept nothing new."""

    names: tuple[tuple[str, int], ...]


class ResumeRequested(Struct, frozen=True):
    """Undoes a pause and a drain; for a pool, those of its slots as well."""

    names: tuple[tuple[str, int], ...]


class BreakerCommanded(Struct, frozen=True):
    """An operator sets the breaker of one target."""

    target: str
    command: str  # open, close, reset or disable


class SessionForgotten(Struct, frozen=True):
    """An operator forgets a session; tasks that use it now save nothing any more."""

    name: str


class SessionReset(Struct, frozen=True):
    """An operator lets tasks of a session log in again, after logins that failed."""

    name: str


class ScaleRequested(Struct, frozen=True):
    """Answered to the peer, where one is given, at once: refused if it is too many."""

    pool: str
    size: int
    peer: bytes = b""


class AutoscaleRequested(Struct, frozen=True):
    """Scale the pool as the configuration says, whatever was asked for before."""

    pool: str


class ChangesFollowed(Struct, frozen=True):
    """A client follows changed results, beginning with the newest of each schedule."""

    peer: bytes


class ChangeTold(Struct, frozen=True):
    """A change was reported to everybody who follows: it need not be told again."""

    schedule: str
    task: str
    number: int


class PolicyChanged(Struct, frozen=True):
    """The operator has changed the policy, which holds from now on."""

    policy: FleetPolicy
    added: list[AddedSchedule] = []  # what it makes of the schedules that were added


class ShutdownRequested(Struct, frozen=True):
    """The first drains, the second ends the drain, the third kills."""

    reason: str
    sockets_survive: bool = False  # the next daemon has the same sockets: new tasks wait for it


class CleanupFinished(Struct, frozen=True):
    reason: str = ""
