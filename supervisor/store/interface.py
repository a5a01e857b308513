"""The interface of the store, as the loop uses it, its queries and their answers.

The loop hands over a `Persist` with `write()`, or a query with `ask()`, and goes on. When
`fileno()` becomes readable, the loop asks `completed()` for the highest durable ticket and
`found()` for answers, each with the token of its query. No method waits for a disk, except
`recover()`, `facts()` and `last_seq()` at the start and `close()` at the end. engines.py opens the
store that the configuration names.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.ipc.wire.messages import (
    FAILED,
    QUEUED,
    RUNNING,
    WAITING,
    FailedAttempt,
    Failure,
    Outcome,
    TaskSpec,
)
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.core.model.actions import Fact, Persist
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.core.model.on_disk import OnDisk

LIST_TASKS_MAX = 1000  # in one answer, which becomes a page for people
# Tasks that one query looks at: some 15 ms of a thread which shares the interpreter with the loop.
LIST_LOOKS_MAX = 2000
# Arguments in one Page, and the arguments that a restart holds at a time.
PAGE_BYTES_MAX = 4 * 1024 * 1024
RECOVERED_AT_ONCE = 1000  # tasks in memory besides those of the queue, however many are stored
# Errors kept of one task: the last ones, each with the end of its traceback, which names the line
# that raised. A task may have a thousand attempts.
ATTEMPTS_KEPT = 20
TRACEBACK_CHARS_KEPT = 4 * 1024
# State, for lists, of a task that failed because its site was shut, which its caller asked for.
REFUSED = "refused"
WALL_NS_MAX = 2**63 - 1  # the greatest integer of SQLite: the year 2262


class StoreError(MusterdError):
    """The store cannot be opened, or was closed without writing everything."""


class StoredTask(Struct, frozen=True, gc=False):
    """A task as the store knows it; `outcome` is None until the task is finished."""

    seq: int
    spec: TaskSpec
    state: str
    outcome: Outcome | None
    crashes: int
    attempt: int
    submitted_wall_ns: int
    finished_wall_ns: int = 0
    attempts: list[FailedAttempt] = []  # only if the query wants attempts


def listed_state(outcome: Outcome) -> str:
    """Return the state that lists find a task by: failed tasks that are no dead letters have one of
    their own."""
    refused = outcome.failure is not None and outcome.failure.refused
    return REFUSED if refused and outcome.state == FAILED else outcome.state


# -- queries: each says by its base what its answer is --------------------------------------------

A = TypeVar("A")


class Query(Struct, Generic[A], frozen=True, gc=False):
    """Something to ask the store, which answers with an A."""


class Unanswered(Struct, frozen=True, gc=False):
    """The answer to a query that failed several times: the store cannot be read."""


class FindTasks(Query[list[StoredTask]], frozen=True, gc=False):
    """Look up tasks, finished or not. Unknown ids are left out."""

    ids: list[str]
    attempts: bool = False  # with their failed attempts


class Portion(Struct, frozen=True, gc=False):
    """The answer to FindSome."""

    tasks: list[StoredTask]
    unread: list[str]  # ids not read; if no task was read, the first one exceeds bytes_max
    next_bytes: int = 0  # the size of the first unread task


class FindSome(Query[Portion], frozen=True, gc=False):
    """Look up the first tasks that fit into `bytes_max`."""

    ids: list[str]
    bytes_max: int
    attempts: bool = False


class Page(Struct, frozen=True, gc=False):
    """The answer to ReadQueued: the tasks that exist, as many as PAGE_BYTES_MAX allows."""

    tasks: OnDisk
    unread: list[str]


class ReadQueued(Query[Page], frozen=True, gc=False):
    """Read queued tasks, to be run, ahead of other queries."""

    ids: list[str]


class Listed(Struct, frozen=True, gc=False):
    """The answer to ListFinished and ListLive: some of the tasks that fit."""

    tasks: list[StoredTask]
    below: int  # where the next query goes on; 0: there are no others
    top: int  # `below` of a query that begins where this one began, whatever has come since


class ListFinished(Query[Listed], frozen=True, gc=False):
    """List finished tasks that fit, newest first, without arguments and values.

    An answer may have fewer tasks than `limit`, or none, though others follow: a query looks at
    LIST_LOOKS_MAX tasks at most.
    """

    where: Selection
    limit: int
    dead: bool = False  # of the failed ones, only those that wait for a person: dead letters
    below: int = 0  # as the answer before said; 0: begin with the newest


class ListLive(Query[Listed], frozen=True, gc=False):
    """List unfinished tasks that fit, newest first, without arguments; as ListFinished. `below` is
    a seq."""

    where: Selection
    limit: int
    below: int = 0


class StrandedTasks(Struct, frozen=True, gc=False):
    """The answer to FindStranded, ordered by seq."""

    tasks: list[Recovered]
    after_seq: int  # where the next page begins; 0: this is the last page


class FindStranded(Query[StrandedTasks], frozen=True, gc=False):
    """Read the next unfinished tasks of a pool, as recover() yields them."""

    pool: str
    after_seq: int


class FindFact(Query[bytes | None], frozen=True, gc=False):
    """Look up the value of a fact; None if the fact does not exist or has expired."""

    kind: str
    key: str


class FindFacts(Query[list[bytes | None]], frozen=True, gc=False):
    """Look up the values of facts of one kind, in the order of their keys; None for no fact."""

    kind: str
    keys: list[str]


class Withdraw(Query[list[int]], frozen=True, gc=False):
    """Drop new tasks; the answer has those that are not in the store and never will be."""

    seqs: list[int]


class Purged(Struct, frozen=True, gc=False):
    """The answer to Purge: how many tasks were forgotten, and which of the named ones."""

    count: int
    ids: list[str]


class Purge(Query[Purged], frozen=True, gc=False):
    """Forget failed tasks that ended before this time: those of the ids, or all with None."""

    ids: list[str] | None
    before_wall_ns: int
    unwell: bool = False  # also those that expired or were cancelled; only with ids


# -- the store ------------------------------------------------------------------------------------

WallTime = Callable[[], int]  # the time of day, for any thread
Found = tuple[object, object]  # the token of a query, and its answer


class Store(Protocol):
    """A place where tasks survive. Only the loop's thread calls its methods."""

    immediate: bool  # write() is complete when it returns: completed() need not be polled for

    @property
    def commits(self) -> int:
        """Transactions so far."""

    @property
    def ended(self) -> int:
        """Tasks that have ever ended, as trim() counts them; a moment old."""

    @property
    def commit_times(self) -> Histogram:
        """How long commits took; a moment old, because another thread adds to the histogram."""

    @property
    def size_bytes(self) -> int:
        """The size of the store's files, about a second old; 0 for a store without files."""

    def recover(self, now_ns: int, wall_ns: int) -> Iterator[list[Recovered]]:
        """Yield all unfinished tasks by seq, page by page. Call this before the first write."""

    def unfinished(self) -> int:
        """Return how many tasks recover() yields. Call this before the first write."""

    def last_seq(self) -> int:
        """Return the greatest seq ever written, 0 for none. Call this before the first write."""

    def facts(self, kind: str) -> list[tuple[str, bytes]]:
        """Return all facts of a kind as (key, value), by key. Call this before the first write."""

    def write(self, persist: Persist) -> None:
        """Make a page durable; completed() tells when."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when completed() or found() has news."""

    def completed(self) -> int | None:
        """Return the highest durable ticket, None if that is no news; clear the descriptor."""

    def ask(self, query: Query[Any], token: object) -> bool:
        """Send a query; return False if too many wait, and no answer will come."""

    def found(self) -> list[Found]:
        """Return the answers that arrived since the last call, each with its query's token."""

    def problem(self) -> str | None:
        """Return why the store cannot write or read at the moment; None when all is well."""

    def write_problem(self) -> str | None:
        """Return why the store cannot write at the moment; None when it can."""

    def newest_wall_ns(self) -> int:
        """Return the newest time of day of any task, 0 for none, before the first write."""

    def trim(self, keep_ns: int | None, keep_max: int) -> None:
        """Forget finished tasks older than `keep_ns`, and all but the newest `keep_max`, in slices.

        With None, age does not matter. Call this now and then.
        """

    def close(self) -> None:
        """Write what waits and release everything; StoreError if something was not written."""


def log_fields(event: str, reason: object = "", **others: object) -> dict[str, object]:
    """Return the fields of a log line, as `extra` takes them."""
    told = {"REASON": str(reason)} if reason else {}
    named = {name.upper(): value for name, value in others.items()}
    return {"fields": {"EVENT": event, **named, **told}}


def ended_fits(where: Selection, spec: TaskSpec, outcome: Outcome, finished_wall_ns: int) -> bool:
    """Return whether a finished task fits."""
    return (
        where.fits(spec, finished_wall_ns)
        and where.fits_state(outcome.state)
        and where.fits_error(outcome.failure)
    )


def pool_of(spec: TaskSpec) -> str:
    """Return the pool that a task's name begins with."""
    return spec.name.partition(".")[0]


def live_state(begun: bool, wait_left_ns: int) -> str:
    """Return the state of an unfinished task."""
    if begun:
        return RUNNING
    return WAITING if wait_left_ns > 0 else QUEUED


def time_left_ns(since_wall_ns: int, duration_ns: int, wall_ns: int) -> int:
    """Return the rest of a duration. A wall clock that was set back never makes it longer."""
    return max(0, min(duration_ns, since_wall_ns + duration_ns - wall_ns))


def fact_end_ns(fact: Fact, wall_ns: int) -> int:
    """Return when a fact that is written now expires (wall clock), 0 for never."""
    return min(wall_ns + fact.ttl_ns, WALL_NS_MAX) if fact.ttl_ns else 0


def kept_failure(failure: Failure) -> Failure:
    """Return a failure as the store keeps it, with the end of its traceback."""
    if len(failure.traceback) <= TRACEBACK_CHARS_KEPT:
        return failure
    return msgspec.structs.replace(failure, traceback=failure.traceback[-TRACEBACK_CHARS_KEPT:])


def without_payload(task: StoredTask) -> StoredTask:
    """Return a task for a list: a thousand values of megabytes would not fit anywhere."""
    outcome = task.outcome
    return msgspec.structs.replace(
        task,
        spec=msgspec.structs.replace(task.spec, args=b""),
        outcome=msgspec.structs.replace(outcome, value=b"") if outcome else None,
    )
