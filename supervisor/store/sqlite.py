"""The durable store: one SQLite file and three threads: one writes, one reads what people and
clients ask for, one reads queued tasks back.

A finish moves a task from `live` to `finished` in one transaction, so a task is always in exactly
one of them. The writer takes everything that waits into one transaction (group commit), and
publishes the group's highest ticket after its commit. A group that cannot be written is kept and
tried again; meanwhile nothing completes, and new tasks can be withdrawn from it.
"""

import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from musterd.supervisor.core.model.actions import Persist
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.store.file import (
    STOP,
    LostStore,
    connect,
    connect_reader,
    connect_writer,
    forget_copy,
    is_corruption,
    is_full,
    remedy,
    rewrite,
    save,
    saved_name,
    set_aside,
    suspect,
    take,
)
from musterd.supervisor.store.identity import Identity, Loss, is_at
from musterd.supervisor.store.interface import (
    RECOVERED_AT_ONCE,
    Answer,
    Bell,
    Found,
    StoreError,
    Unanswered,
    WallTime,
)
from musterd.supervisor.store.queries import (
    Listing,
    LiveListing,
    OneFact,
    Query,
    Queued,
    Tasks,
    Unfinished,
    answer,
    newest_wall_ns,
    unfinished_rows,
)
from musterd.supervisor.store.reserve import Reserve
from musterd.supervisor.store.rows import Group, recovered_task
from musterd.supervisor.store.writer import SLICE_ROWS, Purge, Withdrawal, Writer

PATIENCE_SECONDS = 0.0005  # how long a patient page waits for the next one
RETRY_SECONDS = 1.0  # after a failed commit or read; a full disk is not emptied faster than that
LOOK_SECONDS = 1.0  # between two looks at the files while nothing is written
READ_TRIES = 3  # after that the question is dropped: one broken page must not block all others
READS_WAITING_MAX = 20_000  # questions; about a second of work
TRIM_PACE = 2  # results forgotten for each new one, while there are too many
KEEP_NS_MAX = 2**62  # a time of day plus this is still an integer of SQLite's

# What passes: trouble of the disk, and a lack of memory, which SQLite has too. Whatever else a
# thread raises is a mistake of ours and would come again: the thread ends, and the daemon with it.
FORGIVEN = (sqlite3.Error, MemoryError)
WRITER, FILES = "writer", "files"  # what keeps the store from writing, by the names of problems

log = logging.getLogger("musterd")


class _Question(Struct, frozen=True):
    token: object
    query: Query


class SqliteStore:
    """`durability`: "full" (on disk before completed() says so) or "normal" (a moment later)."""

    immediate = False

    def __init__(
        self,
        path: Path,
        durability: str,
        on_corrupt: str = STOP,
        wall_ns: WallTime = time.time_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._synchronous = {"full": "FULL", "normal": "NORMAL"}[durability]
        self._path = path
        self._lock_fd = take(path, on_corrupt)
        with ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            connection = undo.enter_context(closing(connect_writer(path, self._synchronous)))
            self._reader = undo.enter_context(closing(connect_reader(path)))
            self._pager = undo.enter_context(closing(connect_reader(path)))
            with self._reading():
                self._writer = Writer(connection, path, wall_ns)
            self._identity = Identity(path)
            undo.pop_all()
        self._anew_fd: int | None = None  # of a file that was written anew, until it is in use
        self._stale: set[str] = set()  # threads whose connections are to a file that was lost
        self._reserve = Reserve(path)
        self._reserve.keep()
        self._bell = Bell()
        self._closing = threading.Event()
        self._closed = False
        self._problems: dict[str, str] = {}  # of the writer and of the reader, by their names
        self._ticket: int | None = None  # the highest that is durable
        self._told: int | None = None  # the highest that completed() told
        self._last: int | None = None  # the highest that write() was given
        self._writes: queue.SimpleQueue[Persist | None] = queue.SimpleQueue()  # None only wakes
        self._reads: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._pages: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()  # never behind those
        self._withdrawals: deque[Withdrawal] = deque()
        self._purges: deque[Purge] = deque()
        self._trims: deque[tuple[int | None, int]] = deque()  # only the last one counts
        self._answers: deque[Found] = deque()
        self._threads = [
            threading.Thread(target=self._guard, args=(loop, name), name=f"store-{name}")
            for name, loop in (
                ("writer", self._write_loop),
                ("reader", self._read_loop),
                ("pager", self._page_loop),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- for the loop's thread ----------------------------------------------------------------

    @property
    def commits(self) -> int:
        return self._writer.commits

    @property
    def ended(self) -> int:
        return self._writer.ended

    @property
    def commit_times(self) -> Histogram:
        return self._writer.times

    @property
    def size_bytes(self) -> int:
        return self._writer.size_bytes

    @property
    def conflicts(self) -> int:
        return self._writer.conflicts

    def recover(self, now_ns: int, wall_ns: int) -> Iterator[list[Recovered]]:
        with self._at_start() as connection:
            rows = unfinished_rows(connection)
            while page := list(islice(rows, RECOVERED_AT_ONCE)):
                tasks = [recovered_task(row, now_ns, wall_ns) for row in page]
                yield [task for task in tasks if task is not None]

    def unfinished(self) -> int:
        with self._at_start() as connection:
            ((count,),) = connection.execute("SELECT count(*) FROM live")
        return int(count) + self._writer.on_batches

    def last_seq(self) -> int:
        with self._at_start() as connection:
            ((seq,),) = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'live'")
        return int(seq)

    def facts(self, kind: str) -> list[tuple[str, bytes]]:
        with self._at_start() as connection:
            return connection.execute(
                "SELECT key, value FROM facts"
                " WHERE kind = ? AND (expires_at = 0 OR expires_at > ?) ORDER BY key",
                (kind, self._wall_ns()),
            ).fetchall()

    @contextmanager
    def _at_start(self) -> Iterator[sqlite3.Connection]:
        with self._reading(), closing(connect(self._path)) as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """An error of it is a StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            self._note_corruption(error)
            raise StoreError(
                f"the store {self._path} cannot be read: {error}."
                " Check the disk; a corrupt file is found and set aside at the next start."
            ) from error

    def write(self, persist: Persist) -> None:
        assert not self._closed
        self._last = persist.ticket
        self._writes.put(persist)

    def fileno(self) -> int:
        return self._bell.fileno()

    def completed(self) -> int | None:
        self._bell.clear()  # first: whatever is published after this rings again
        ticket = self._ticket
        if ticket == self._told:
            return None
        self._told = ticket
        return ticket

    def withdraw(self, seqs: list[int], token: object) -> bool:
        self._withdrawals.append(Withdrawal(seqs, token))
        self._writes.put(None)
        return True

    def find(self, ids: list[str], token: object, *, attempts: bool = False) -> bool:
        return self._ask(token, Tasks(ids, attempts))

    def find_some(
        self, ids: list[str], bytes_max: int, token: object, *, attempts: bool = False
    ) -> bool:
        return self._ask(token, Tasks(ids, attempts, bytes_max))

    def read(self, ids: list[str], token: object) -> bool:
        assert not self._closed
        self._pages.put(_Question(token, Queued(ids)))
        return True

    def list_finished(self, state: str | None, pool: str | None, limit: int, token: object) -> bool:
        return self._ask(token, Listing(state, pool, limit))

    def list_live(self, pool: str | None, limit: int, token: object) -> bool:
        return self._ask(token, LiveListing(pool, limit))

    def find_stranded(self, pool: str, after_seq: int, token: object) -> bool:
        return self._ask(token, Unfinished(pool, after_seq))

    def find_fact(self, kind: str, key: str, token: object) -> bool:
        return self._ask(token, OneFact(kind, key))

    def found(self) -> list[Found]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def purge(self, ids: list[str] | None, before_wall_ns: int, token: object) -> bool:
        self._purges.append(Purge(ids, before_wall_ns, token))
        self._writes.put(None)
        return True

    def problem(self) -> str | None:
        return "; ".join(list(self._problems.values())) or None

    def write_problem(self) -> str | None:
        return self._problems.get(FILES) or self._problems.get(WRITER)

    def newest_wall_ns(self) -> int:
        with self._at_start() as connection:
            return newest_wall_ns(connection)

    def trim(self, keep_ns: int | None, keep_max: int) -> None:
        keep_ns = None if keep_ns is None else min(keep_ns, KEEP_NS_MAX)
        self._trims.append((keep_ns, keep_max))
        self._writes.put(None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._writes.put(None)
        self._reads.put(None)
        self._pages.put(None)
        for thread in self._threads:
            thread.join()
        self._reader.close()
        self._pager.close()
        self._reserve.give_up()
        self._writer.close()  # the last one: SQLite moves the log into the file and removes it
        self._identity.close()
        os.close(self._lock_fd)
        if self._anew_fd is not None:
            os.close(self._anew_fd)
        self._bell.close()
        if self._ticket != self._last:
            raise StoreError(
                f"the store {self._path} was closed without the latest changes: {self.problem()}."
                " Tasks that they were about will run again."
            )

    def _ask(self, token: object, query: Query) -> bool:
        assert not self._closed
        if self._reads.qsize() >= READS_WAITING_MAX:
            return False
        self._reads.put(_Question(token, query))
        return True

    # -- for both threads ---------------------------------------------------------------------

    def _guard(self, loop: Callable[[], None], name: str) -> None:
        try:
            loop()
        except BaseException as error:
            what = str(error) if isinstance(error, StoreError) else repr(error)
            self._problems[name] = f"the store's {name} ended: {what}; the daemon ends"
            self._problems.pop(FILES, None)
            self._bell.ring()
            raise

    def _failed(self, name: str, error: Exception) -> None:
        what = str(error) or type(error).__name__
        reason = (
            f"the store {self._path} cannot be used by its {name}: {what}: {remedy(error)};"
            " it is tried again every second"
        )
        if self._problems.get(name) != reason:
            log.error(
                "store fails, trying again",
                extra={"fields": {"EVENT": "store.failed", "REASON": reason}},
            )
            self._note_corruption(error)
        self._problems[name] = reason
        self._bell.ring()

    def _note_corruption(self, error: Exception) -> None:
        if is_corruption(error):
            with suppress(OSError):  # the disk may be what is wrong
                suspect(self._path)

    def _works(self, name: str) -> None:
        if self._problems.pop(name, None):
            log.info("store works again", extra={"fields": {"EVENT": "store.recovered"}})
            self._bell.ring()

    def _publish(self, token: object, found: Answer) -> None:
        self._answers.append((token, found))
        self._bell.ring()

    # -- the writer's thread ------------------------------------------------------------------

    def _write_loop(self) -> None:
        while not (self._closing.is_set() and self._writes.empty()):
            group = self._next_group()
            self._withdraw_from(group)
            if group.ticket is not None:
                if not self._write_group(group):
                    return
                self._ticket = group.ticket
                self._bell.ring()
            elif not self._closing.is_set():
                self._files_are_ours()
            if not self._closing.is_set():
                self._tidy_up(len(group.finished))

    def _next_group(self) -> Group:
        """Everything that waits; where there is other work, without waiting for more."""
        group = Group()
        failing = "writer" in self._problems
        busy = self._trims or self._purges
        with suppress(queue.Empty):
            persist = self._writes.get(
                block=failing or not busy, timeout=RETRY_SECONDS if failing else LOOK_SECONDS
            )
            wall_ns = self._wall_ns()
            while True:
                if persist is not None:
                    group.take(persist, wall_ns, self._writer.withdrawn)
                    if group.full():
                        break
                if persist is not None and group.patient and self._writes.empty():
                    group.patient = False  # once is enough
                    persist = self._writes.get(timeout=PATIENCE_SECONDS)
                else:
                    persist = self._writes.get_nowait()
        return group

    def _write_group(self, group: Group) -> bool:
        """Until it is written; False if that failed and the store is being closed."""
        while True:
            last_try = self._closing.is_set()
            # Nothing to write proves nothing: the problem would seem to be over.
            probe = group.empty() and "writer" in self._problems
            work = self._writer.probe if probe else lambda: self._writer.commit(group)
            # Before, too: a file that was cut is as long as it was after the next write to its end.
            if self._files_are_ours() and self._attempt(work):
                return self._kept(group)
            if last_try:
                return False
            self._closing.wait(RETRY_SECONDS)
            self._withdraw_from(group)

    def _kept(self, group: Group) -> bool:
        """Until what was just written is where the next start will look for it; as above."""
        while not self._files_are_ours():
            if self._closing.wait(RETRY_SECONDS):
                return self._files_are_ours()
            self._withdraw_from(group)
        return True

    def _files_are_ours(self) -> bool:
        """Whether they are those that were opened. Writes what was lost anew; or LostStore."""
        if self._anew_fd is not None:
            if is_at(self._anew_fd, self._path):
                return self._write_anew()
            os.close(self._anew_fd)
            self._anew_fd = None
        lost = self._identity.look()
        if lost is None:
            return self._are_back() if FILES in self._problems else True
        reason = f"the store {self._path} is lost: {lost.reason}"
        if FILES not in self._problems:
            log.error(
                "the store's files are not where they were",
                extra={"fields": {"EVENT": "store.lost", "REASON": reason}},
            )
        self._problems[FILES] = reason
        self._bell.ring()
        match lost.kind:
            case Loss.MISSING:
                return self._write_anew()
            case Loss.AWAY:
                self._problems[FILES] = f"{reason}: put it back; it is tried again every second"
                return False
            case _:
                raise self._loss(lost.kind, reason)

    def _are_back(self) -> bool:
        """What was lost is where it was: somebody has put it back."""
        try:
            forget_copy(self._path)
        except OSError as error:
            reason = f"{self._path} is back, but an older copy beside it cannot be removed: {error}"
            self._problems[FILES] = f"the store {reason}: {remedy(error)}; it is tried again"
            return False
        self._works(FILES)
        return True

    def _write_anew(self) -> bool:
        """In two steps: where the second fails, only that is tried again."""
        self._reserve.give_up()  # for room; it may be gone, too, and the next commit keeps one
        try:
            if self._anew_fd is None:
                self._anew_fd = rewrite(self._writer.connection, self._path)
            self._go_on_with(self._anew_fd)
        except (*FORGIVEN, OSError) as error:
            reason = f"{self._path} is lost and cannot be written anew: {error}"
            self._problems[FILES] = f"the store {reason}: {remedy(error)}; it is tried again"
            self._bell.ring()
            return False
        self._stale.update(("reader", "pager"))
        log.warning(
            "the store was written anew: nothing is lost",
            extra={"fields": {"EVENT": "store.rewritten", "REASON": str(self._path)}},
        )
        self._works(FILES)
        return True

    def _go_on_with(self, lock_fd: int) -> None:
        """Use the file that was written anew."""
        with ExitStack() as undo:
            connection = undo.enter_context(closing(connect_writer(self._path, self._synchronous)))
            connection.execute("SELECT count(*) FROM live").fetchone()  # it has a log from now on
            identity = Identity(self._path)
            undo.pop_all()
        self._writer.move(connection)
        self._identity.close()
        os.close(self._lock_fd)
        self._identity, self._lock_fd, self._anew_fd = identity, lock_fd, None

    def _loss(self, kind: Loss, reason: str) -> LostStore:
        """Why the daemon has to end, and what to do."""
        with suppress(OSError):  # the disk may be what is wrong
            suspect(self._path)
        if kind is Loss.TRUNCATED:
            return LostStore(
                f"{reason}. The daemon ends, for it cannot know what is missing: restore a copy"
                " as docs/operations.md says, or start it to have the rest checked and set aside."
            )
        copy = saved_name(self._path, "saved")
        try:
            os.close(save(self._writer.connection, copy))
        except (*FORGIVEN, OSError) as error:
            saved = f"What the daemon knew could not be saved as {copy.name}: {error}"
        else:
            saved = f"What the daemon knew is saved as {copy.name}"
        with suppress(OSError):  # SQLite would take the log that is left for that of the new file
            set_aside(self._path, self._identity.still_there())
        return LostStore(
            f"{reason}. {saved}. Start the daemon to go on with what is there now, or after you"
            " have put the saved one in its place."
        )

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Whether it could be done."""
        try:
            work()
        except FORGIVEN as error:
            self._writer.roll_back()
            self._failed("writer", error)
            return is_full(error) and self._reserve.give_up() and self._attempt(work)
        if self._reserve.keep():
            self._works("writer")
        return True

    def _withdraw_from(self, group: Group) -> None:
        while self._withdrawals:
            self._publish(*self._writer.withdraw(self._withdrawals.popleft(), group))

    def _tidy_up(self, ended: int) -> None:
        """One small transaction of what is not urgent; or, in trouble, a try whether it is over.

        So many tasks have just ended.
        """
        if self._purges:
            purge = self._purges[0]
            if self._attempt(lambda: self._writer.purge_slice(purge)) and purge.done:
                self._purges.popleft()
                self._publish(purge.token, purge.answer())
        elif self._trims:
            self._trim_some(max(SLICE_ROWS, TRIM_PACE * ended))
        elif "writer" in self._problems:
            self._attempt(self._writer.probe)

    def _trim_some(self, rows: int) -> None:
        """It ends with a slice that finds nothing; after a failure the next trim() tries again."""
        while len(self._trims) > 1:
            self._trims.popleft()
        deleted = 0

        def work() -> None:
            nonlocal deleted
            deleted = self._writer.trim_slice(*self._trims[0], rows)

        if not self._attempt(work) or not deleted:
            self._trims.popleft()  # by this thread alone, so it is the one that was worked on

    # -- the threads of the reader and of the pager --------------------------------------------

    def _read_loop(self) -> None:
        while not self._closing.is_set():
            question = self._reads.get()
            if question is not None:
                self._answer(question)

    def _open_reader(self) -> None:
        """Read the file that was written anew."""
        self._stale.discard("reader")  # first: it may be written anew once more
        self._reader.close()
        self._reader = connect_reader(self._path)

    def _open_pager(self) -> None:
        self._stale.discard("pager")
        self._pager.close()
        self._pager = connect_reader(self._path)

    def _page_loop(self) -> None:
        """What the queue waits for is never dropped."""
        while not self._closing.is_set():
            question = self._pages.get()
            while question is not None and not self._closing.is_set():
                try:
                    if "pager" in self._stale:
                        self._open_pager()
                    found = answer(self._pager, question.query, self._wall_ns())
                except FORGIVEN as error:
                    self._failed("pager", error)
                    self._closing.wait(RETRY_SECONDS)
                else:
                    self._works("pager")
                    self._publish(question.token, found)
                    question = None

    def _answer(self, question: _Question) -> None:
        """Dropped after READ_TRIES: no answer is better than a wrong "no such task"."""
        for _ in range(READ_TRIES):
            try:
                if "reader" in self._stale:
                    self._open_reader()
                found = answer(self._reader, question.query, self._wall_ns())
            except FORGIVEN as error:
                self._failed("reader", error)
                if self._closing.wait(RETRY_SECONDS):
                    return
            else:
                self._works("reader")
                self._publish(question.token, found)
                return
        self._publish(question.token, Unanswered())
