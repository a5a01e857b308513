"""Where tasks survive: the interface that the loop speaks to.

The loop hands over a `Persist` with `write()` and goes on; when `fileno()` becomes readable it asks
`completed()` for the highest ticket that is safe and `found()` for the answers to its questions and
requests, each with the token it came with. Nothing here waits for a disk, except `recover()`,
`facts()` and `last_seq()` at the start and `close()` at the end.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.ipc.wire.messages import (
    QUEUED,
    RUNNING,
    WAITING,
    FailedAttempt,
    Failure,
    Outcome,
    TaskSpec,
)
from musterd.supervisor.core.model.actions import Fact, Persist
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.core.model.events import OnDisk, Recovered

# Answers that list_finished() gives at most: a page for people, not an export, and one more, which
# tells that there are more.
LIST_TASKS_MAX = 1001
# Arguments that one Page brings, and what a restart holds of them at a time.
PAGE_BYTES_MAX = 4 * 1024 * 1024
RECOVERED_AT_ONCE = 1000  # tasks in memory beside those of the queue, however many there are
# The errors kept of one task: its last ones, each with the end of its traceback, which names the
# line that raised. A task may be tried a thousand times.
ATTEMPTS_KEPT = 20
TRACEBACK_CHARS_KEPT = 4 * 1024
WALL_NS_MAX = 2**63 - 1  # the greatest integer of SQLite's: the year 2262


class StoreError(MusterdError):
    """The store cannot be opened or could not be closed with everything written."""


class StoredTask(Struct, frozen=True, gc=False):
    """A task as the store knows it; `outcome` is None while it is not finished."""

    seq: int
    spec: TaskSpec
    state: str
    outcome: Outcome | None
    crashes: int
    attempt: int
    submitted_wall_ns: int
    finished_wall_ns: int = 0
    attempts: list[FailedAttempt] = []  # where they were asked for


class Page(Struct, frozen=True, gc=False):
    """The answer to read(): those that are there, but not so many that they fill the memory."""

    tasks: OnDisk
    unread: list[str]


class FoundFact(Struct, frozen=True, gc=False):
    """The answer to find_fact(); `value` is None if there is no such fact, or not any more."""

    value: bytes | None


class Withdrawn(Struct, frozen=True, gc=False):
    """The answer to withdraw(): these are not in the store and never will be."""

    seqs: list[int]


class Purged(Struct, frozen=True, gc=False):
    """The answer to purge(): how many tasks, and of the named ones which."""

    count: int
    ids: list[str]


class StrandedTasks(Struct, frozen=True, gc=False):
    """The answer to find_stranded(), in the order of their seq."""

    tasks: list[Recovered]
    after_seq: int  # where the next ones begin; 0: these were the last


class Portion(Struct, frozen=True, gc=False):
    """The answer to find_some()."""

    tasks: list[StoredTask]
    unread: list[str]  # the ids behind those; with none read, the first is larger than was allowed
    next_bytes: int = 0  # of the first of those


class Unanswered(Struct, frozen=True, gc=False):
    """The answer to a question that cannot be answered: it could not be read, again and again."""


WallTime = Callable[[], int]  # the time of day, for any thread
# What found() brings: tasks for find() and list_finished(), a fact for find_fact(), ...
Answer = (
    list[StoredTask] | Page | Portion | FoundFact | Withdrawn | Purged | StrandedTasks | Unanswered
)
# The token of a question, and the answer to it.
Found = tuple[object, Answer]


class Store(Protocol):
    """What the daemon needs of a store. All methods are for the loop's thread alone."""

    immediate: bool  # write() is complete when it returns: completed() need not be polled for

    @property
    def commits(self) -> int:
        """Transactions so far."""

    @property
    def ended(self) -> int:
        """Tasks that have ended, ever, as far as trim() matters; a moment old."""

    @property
    def commit_times(self) -> Histogram:
        """How long they took; a moment old, for another thread may be adding to it."""

    @property
    def size_bytes(self) -> int:
        """Of its files, about a second old; 0 for a store without."""

    def recover(self, now_ns: int, wall_ns: int) -> Iterator[list[Recovered]]:
        """All unfinished tasks in the order of their seq, page by page. Before the first write."""

    def unfinished(self) -> int:
        """How many recover() will bring. To be called before the first write."""

    def last_seq(self) -> int:
        """The greatest seq ever written, 0 for none. To be called before the first write."""

    def facts(self, kind: str) -> list[tuple[str, bytes]]:
        """All facts of a kind as (key, value), by key. To be called before the first write."""

    def write(self, persist: Persist) -> None:
        """Make it durable; completed() tells when."""

    def fileno(self) -> int:
        """Readable when completed() or found() has news; call both then."""

    def completed(self) -> int | None:
        """The highest ticket that is durable, None if that is no news. Clears the fileno."""

    def withdraw(self, seqs: list[int], token: object) -> bool:
        """Do not write these new tasks any more; answered by those that were not written yet."""

    def find(self, ids: list[str], token: object, *, attempts: bool = False) -> bool:
        """Look these up, finished or not; False (and no answer) if too many questions wait."""

    def find_some(
        self, ids: list[str], bytes_max: int, token: object, *, attempts: bool = False
    ) -> bool:
        """Look up the first of these, no more than so many bytes of them; answered by a Portion."""

    def read(self, ids: list[str], token: object) -> bool:
        """Queued tasks, to be run; answered by a Page, without waiting for other questions."""

    def list_finished(self, state: str | None, pool: str | None, limit: int, token: object) -> bool:
        """The newest finished tasks first, without arguments and values; as find() otherwise."""

    def list_live(self, pool: str | None, limit: int, token: object) -> bool:
        """The newest unfinished tasks first, without arguments; as find() otherwise."""

    def find_stranded(self, pool: str, after_seq: int, token: object) -> bool:
        """The next unfinished tasks of a pool, as recover() gives them; as find() otherwise."""

    def find_fact(self, kind: str, key: str, token: object) -> bool:
        """Look one fact up; as find() otherwise."""

    def found(self) -> list[Found]:
        """The answers that arrived since the last call. Ids that are unknown are left out."""

    def purge(self, ids: list[str] | None, before_wall_ns: int, token: object) -> bool:
        """Forget failed tasks that ended before, bit by bit: those of the ids, or with None all."""

    def problem(self) -> str | None:
        """Why something cannot be written or read at the moment; None when all is well."""

    def write_problem(self) -> str | None:
        """Why nothing can be written at the moment."""

    def newest_wall_ns(self) -> int:
        """The newest time of day that a task was noted with, 0 for none. Before the first write."""

    def trim(self, keep_ns: int | None, keep_max: int) -> None:
        """Forget what finished longer than this ago, and all but the newest `keep_max`, bit by bit.
        With None, nothing is forgotten for its age. To be called now and then.
        """

    def close(self) -> None:
        """Write what waits and release everything; StoreError if something had to be left out."""


def open_store(
    path: Path, durability: str, on_corrupt: str = "stop", wall_ns: WallTime = time.time_ns
) -> Store:
    """The store for a value of `store.durability`: full, normal or memory."""
    if durability == "memory":
        from musterd.supervisor.store.memory import MemoryStore

        return MemoryStore(wall_ns)
    from musterd.supervisor.store.sqlite import SqliteStore

    return SqliteStore(path, durability, on_corrupt, wall_ns)


def pool_of(spec: TaskSpec) -> str:
    """The pool that a task's name begins with."""
    return spec.name.partition(".")[0]


def live_state(begun: bool, wait_left_ns: int) -> str:
    """What to call an unfinished task."""
    if begun:
        return RUNNING
    return WAITING if wait_left_ns > 0 else QUEUED


def time_left_ns(since_wall_ns: int, duration_ns: int, wall_ns: int) -> int:
    """What is left of a duration. A wall clock that was set back never makes it longer."""
    return max(0, min(duration_ns, since_wall_ns + duration_ns - wall_ns))


def fact_end_ns(fact: Fact, wall_ns: int) -> int:
    """When a fact that is written now is to be forgotten (wall clock), 0 for never."""
    return min(wall_ns + fact.ttl_ns, WALL_NS_MAX) if fact.ttl_ns else 0


def kept_failure(failure: Failure) -> Failure:
    """As it is kept with an attempt."""
    if len(failure.traceback) <= TRACEBACK_CHARS_KEPT:
        return failure
    return msgspec.structs.replace(failure, traceback=failure.traceback[-TRACEBACK_CHARS_KEPT:])


def without_payload(task: StoredTask) -> StoredTask:
    """The task as shown in a list: a thousand values of megabytes would not fit anywhere."""
    outcome = task.outcome
    return msgspec.structs.replace(
        task,
        spec=msgspec.structs.replace(task.spec, args=b""),
        outcome=msgspec.structs.replace(outcome, value=b"") if outcome else None,
    )


class Bell:
    """An eventfd that is readable from ring() to clear(); any thread may ring."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError):  # it did not ring
                os.eventfd_read(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
