"""Where tasks survive: the interface the loop speaks to, and the store that keeps all in memory.

The loop hands over a `Persist` with `write()` and goes on; when `fileno()` becomes readable it asks
`completed()` for the highest ticket that is safe and `found()` for the answers to `find()` and
`list_finished()`. Nothing here waits for a disk, except `recover()` and `last_seq()` at the start
and `close()` at the end.
"""

import os
import time
from collections import OrderedDict, deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.ipc.messages import QUEUED, RUNNING, WAITING, Outcome, TaskSpec
from musterd.supervisor.core.actions import FinalRecord, LiveRecord, NewRecord, Persist
from musterd.supervisor.core.events import Recovered

# Answers that list_finished() gives at most: a page for people, not an export.
LIST_TASKS_MAX = 1000
# Results that the memory store keeps, whichever is reached first. Clients fetch results within
# seconds; the bounds keep a daemon that runs for months from growing.
MEMORY_RESULTS_MAX = 100_000
MEMORY_RESULT_BYTES_MAX = 64 * 1024 * 1024


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


# The token of a question, and the answer to it.
Found = tuple[object, list[StoredTask]]


class Store(Protocol):
    """What the daemon needs of a store. All methods are for the loop's thread alone."""

    immediate: bool  # write() is complete when it returns: completed() need not be polled for
    commits: int  # transactions so far

    def recover(self, now_ns: int, wall_ns: int) -> list[Recovered]:
        """All unfinished tasks in the order of their seq. To be called before the first write."""

    def last_seq(self) -> int:
        """The greatest seq ever written, 0 for none. To be called before the first write."""

    def write(self, persist: Persist) -> None:
        """Make it durable; completed() tells when."""

    def fileno(self) -> int:
        """Readable when completed() or found() has news; call both then."""

    def completed(self) -> int | None:
        """The highest ticket that is durable, None if that is no news. Clears the fileno."""

    def find(self, ids: list[str], token: object) -> bool:
        """Look these up, finished or not; False (and no answer) if too many questions wait."""

    def list_finished(self, state: str | None, pool: str | None, limit: int, token: object) -> bool:
        """The newest finished tasks first, without arguments and values; as find() otherwise."""

    def found(self) -> list[Found]:
        """The answers that arrived since the last call. Ids that are unknown are left out."""

    def problem(self) -> str | None:
        """Why nothing can be written or read at the moment; None when all is well."""

    def trim(self, keep_ns: int) -> None:
        """Forget what finished longer than this ago, bit by bit; to be called now and then."""

    def close(self) -> None:
        """Write what waits and release everything; StoreError if something had to be left out."""


def open_store(path: Path, durability: str, keep_ns: int) -> Store:
    """The store for a value of `store.durability`: full, normal or memory."""
    if durability == "memory":
        return MemoryStore(keep_ns)
    from musterd.supervisor.store_sqlite import SqliteStore

    return SqliteStore(path, durability)


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


class MemoryStore:
    """`durability = "memory"`: the same interface, gone with the process, and never a wait."""

    immediate = True

    def __init__(self, keep_ns: int) -> None:
        self.commits = 0
        self._keep_ns = keep_ns
        self._live: dict[str, tuple[NewRecord, int]] = {}  # by id, with the wall time of the write
        self._changed: dict[int, tuple[LiveRecord, int]] = {}  # by seq
        self._finished: OrderedDict[str, tuple[FinalRecord, int]] = OrderedDict()  # oldest first
        self._finished_bytes = 0
        self._last_seq = 0
        self._ticket: int | None = None
        self._answers: deque[Found] = deque()
        self._bell = Bell()

    def recover(self, now_ns: int, wall_ns: int) -> list[Recovered]:
        return []

    def last_seq(self) -> int:
        return self._last_seq

    def write(self, persist: Persist) -> None:
        wall_ns = time.time_ns()
        for new in persist.added:
            self._live[new.spec.id] = (new, wall_ns)
            self._last_seq = max(self._last_seq, new.seq)
        for change in persist.changed:
            self._changed[change.seq] = (change, wall_ns)
        for final in persist.finished:
            self._finish(final, wall_ns)
        self._forget_old(wall_ns)
        self._ticket = persist.ticket
        self.commits += 1

    def fileno(self) -> int:
        return self._bell.fileno()

    def completed(self) -> int | None:
        ticket, self._ticket = self._ticket, None
        return ticket

    def find(self, ids: list[str], token: object) -> bool:
        tasks = [task for task in map(self._find, ids) if task is not None]
        return self._answer(token, tasks)

    def list_finished(self, state: str | None, pool: str | None, limit: int, token: object) -> bool:
        matching = (
            without_payload(self._stored(final, wall_ns))
            for final, wall_ns in reversed(self._finished.values())
            if state in (None, final.outcome.state) and pool in (None, pool_of(final.spec))
        )
        return self._answer(token, list(islice(matching, min(limit, LIST_TASKS_MAX))))

    def found(self) -> list[Found]:
        self._bell.clear()
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def problem(self) -> str | None:
        return None

    def trim(self, keep_ns: int) -> None:
        self._keep_ns = keep_ns
        self._forget_old(time.time_ns())

    def close(self) -> None:
        self._bell.close()

    def _answer(self, token: object, tasks: list[StoredTask]) -> bool:
        self._answers.append((token, tasks))
        self._bell.ring()
        return True

    def _finish(self, final: FinalRecord, wall_ns: int) -> None:
        self._live.pop(final.spec.id, None)
        self._changed.pop(final.seq, None)
        # A task that was run again by hand replaces its former result, as the newest.
        former = self._finished.pop(final.spec.id, None)
        if former:
            self._finished_bytes -= _payload_bytes(former[0])
        self._finished[final.spec.id] = (final, wall_ns)
        self._finished_bytes += _payload_bytes(final)

    def _forget_old(self, wall_ns: int) -> None:
        while self._finished:
            final, finished_ns = next(iter(self._finished.values()))
            if (
                len(self._finished) <= MEMORY_RESULTS_MAX
                and self._finished_bytes <= MEMORY_RESULT_BYTES_MAX
                and finished_ns >= wall_ns - self._keep_ns
            ):
                return
            del self._finished[final.spec.id]
            self._finished_bytes -= _payload_bytes(final)

    def _find(self, task_id: str) -> StoredTask | None:
        if live := self._live.get(task_id):
            new, since_ns = live
            attempt, crashes, begun, wait_ns = 0, 0, False, new.spec.delay_ns
            if changed := self._changed.get(new.seq):
                change, since_ns = changed
                attempt, crashes, begun = change.attempt, change.crashes, change.begun
                wait_ns = change.wait_ns
            state = live_state(begun, time_left_ns(since_ns, wait_ns, time.time_ns()))
            return StoredTask(
                new.seq, new.spec, state, None, crashes, attempt, new.submitted_wall_ns
            )
        if finished := self._finished.get(task_id):
            return self._stored(*finished)
        return None

    @staticmethod
    def _stored(final: FinalRecord, finished_wall_ns: int) -> StoredTask:
        return StoredTask(
            final.seq, final.spec, final.outcome.state, final.outcome, final.crashes,
            final.outcome.attempts, final.submitted_wall_ns, finished_wall_ns,
        )  # fmt: skip


def _payload_bytes(final: FinalRecord) -> int:
    return len(final.spec.args) + len(final.outcome.value)
