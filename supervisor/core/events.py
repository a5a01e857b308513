"""What can happen. The shell turns the world into these; `Fleet.handle` answers with actions.

A worker process is named by its `worker` number, unique in the life of the supervisor, so that
news of a process that was replaced meanwhile is recognised as stale. A `peer` is a client's
connection.
"""

from msgspec import Struct

from musterd.ipc.messages import Completion, Rejection, TaskDeclaration, TaskSpec


class Started(Struct, frozen=True):
    """The shell is up and the store has been read."""


class Ticked(Struct, frozen=True):
    """A deadline passed."""


# -- tasks ------------------------------------------------------------------------------------


class TasksSubmitted(Struct, frozen=True, gc=False):
    peer: bytes
    request: int
    tasks: list[TaskSpec]
    wall_ns: int
    resend: bool = False
    rejected: list[Rejection] = []  # what the shell could not accept already


class Recovered(Struct, frozen=True):
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
    tasks: list[Recovered]


class Persisted(Struct, frozen=True):
    """Everything up to and including this ticket is on disk."""

    ticket: int


class ResendChecked(Struct, frozen=True, gc=False):
    """The store's answer to CheckResent: these ids are finished already."""

    submitted: TasksSubmitted
    finished: frozenset[str]


class TasksWatched(Struct, frozen=True):
    peer: bytes
    ids: list[str]


class CancelRequested(Struct, frozen=True):
    ids: list[str]


class PeerLost(Struct, frozen=True):
    """A client's connection is gone: nobody waits there any more."""

    peer: bytes


# -- workers ----------------------------------------------------------------------------------


class NurseryReady(Struct, frozen=True):
    pool: str
    declarations: tuple[TaskDeclaration, ...]


class NurseryFailed(Struct, frozen=True):
    """The worker class cannot be loaded: trying again will not help."""

    pool: str
    reason: str


class NurseryExited(Struct, frozen=True):
    pool: str
    reason: str


class WorkerForked(Struct, frozen=True):
    worker: int
    pid: int  # of the worker itself, as the host sees it


class SpawnFailed(Struct, frozen=True):
    worker: int
    reason: str


class WorkerReady(Struct, frozen=True):
    """Its hello arrived: it may be given leases."""

    worker: int


class LeasesCompleted(Struct, frozen=True, gc=False):
    worker: int
    completions: list[Completion]


class LeasesReturned(Struct, frozen=True):
    """The worker had not begun these and never will."""

    worker: int
    leases: list[int]


class BoardRead(Struct, frozen=True):
    """A look at a worker's scoreboard. `lease` is 0 when nothing runs."""

    worker: int
    lease: int
    since_ns: int  # when that lease began, or the last sign of life when idle


class WorkerExited(Struct, frozen=True):
    """The process and everything it started are gone."""

    worker: int
    exit_code: int  # 0..255, or -N when ended by signal N
    lease: int  # what ran when it ended, 0 for nothing
    detail: str = ""  # last words, such as the error of open()


# -- commands of a person ---------------------------------------------------------------------


class StartRequested(Struct, frozen=True):
    names: tuple[tuple[str, int], ...]  # (pool, index); index -1 for the whole pool


class StopRequested(Struct, frozen=True):
    names: tuple[tuple[str, int], ...]


class RestartRequested(Struct, frozen=True):
    names: tuple[tuple[str, int], ...]


class ResetRequested(Struct, frozen=True):
    """Clears FATAL and the restart history."""

    names: tuple[tuple[str, int], ...]


class ScaleRequested(Struct, frozen=True):
    pool: str
    size: int


class ShutdownRequested(Struct, frozen=True):
    """The first drains, the second ends the drain, the third kills."""

    reason: str


class CleanupFinished(Struct, frozen=True):
    reason: str = ""
